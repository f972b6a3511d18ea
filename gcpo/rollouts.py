"""Rewards and features of B groups of G sampled responses, from which every method computes its weights."""

import functools
import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gcpo.clustering import bidirectional_clusters
from gcpo.errors import nearest
from gcpo.measures import REWARD_RANGE

Feature = Tensor | Callable[[], Tensor] | None

# By token; of some a logarithm may be infinite.
_TOKENS = ("logps", "entropies", "mask", "answer_mask", "ref_logps", "ratios")
# Trailing dimensions after (B, G): a size that differs between runs is written None.
_TRAILING: dict[str, tuple[int | None, ...]] = {
    **dict.fromkeys(("clusters", *(f"{kind}_clusters" for kind in ("bidirectional", "exact", "math", "task"))), ()),
    "embeddings": (None,),
    "nli": (-1, 3),  # -1 stands for G
    **dict.fromkeys(_TOKENS, (None,)),
    **dict.fromkeys(("answered", "correctness"), ()),
}


FEATURES = frozenset(_TRAILING) - {"correctness"}  # correctness is the rewards' own where it is not given


class MissingFeatureError(AttributeError, ValueError):
    """A method read a feature that the rollouts do not have."""


class Rollouts:
    """Rewards and features of B groups of G responses; a feature may be a callable, evaluated once when first read.

    Args:
        rewards: (B, G), NaN for a response that could not be scored.
        clusters: (B, G) int, semantic cluster labels, arbitrary within a group.
        bidirectional_clusters, exact_clusters, math_clusters, task_clusters: (B, G) int, other labels, of equal texts
            and so on (:data:`gcpo.methods.components.CLUSTERS`); a method that asks for a kind that is not given reads
            ``clusters``, or for the first makes it from ``nli``.
        embeddings: (B, G, d), one per response; measures normalise them.
        nli: (B, G, G, 3), probabilities of entailment, neutral and contradiction; premise i, hypothesis j.
        logps: (B, G, T), token log-probabilities under the policy that sampled.
        entropies: (B, G, T), Shannon entropy of the sampling distribution at each token, nats.
        mask: (B, G, T), 1 on completion tokens.
        answer_mask: (B, G, T), 1 on the tokens of the answer.
        ref_logps: (B, G, T), token log-probabilities under a reference policy.
        ratios: (B, G, T), probability ratios of the current to the sampling policy.
        answered: (B, G) bool, False where no answer could be extracted.
        correctness: (B, G) in [0, 1]; default: the reward's place in ``reward_range``. Above 1/2 is correct; NaN is
            neither correct nor incorrect.
        reward_range: lowest and highest possible reward.
        max_completion_length: the longest completion that can be sampled, in tokens; T of ``mask`` if not given.

    Raises:
        ValueError: a shape that does not fit ``rewards``, an infinite reward, a ``reward_range`` that is empty or
            infinite, or a feature with NaN where it counts: of a response with a reward and, for tokens, where ``mask``
            is 1. (``correctness`` may be NaN; embeddings, labels and ``nli`` may not be infinite either.)
        TypeError: a feature of another name, or one that is neither a tensor nor gives one.
        MissingFeatureError: on reading a feature that was not given.
    """

    def __init__(
        self,
        rewards: Float[Tensor, "B G"],
        *,
        reward_range: tuple[float, float] = REWARD_RANGE,
        max_completion_length: int | None = None,
        **features: Feature,
    ) -> None:
        if unknown := sorted(set(features) - set(_TRAILING)):
            raise TypeError(f"Rollouts have no feature {unknown[0]!r}.{nearest(unknown[0], _TRAILING)}")
        if not isinstance(rewards, Tensor) or rewards.ndim != 2:
            raise ValueError(f"rewards must be a tensor of shape (B, G), got {described(rewards)}.")
        low, high = reward_range
        if not (low < high and math.isfinite(low) and math.isfinite(high)):
            raise ValueError(f"reward_range must be (low, high) with low < high, got {reward_range}.")
        if (infinite := rewards.isinf().nonzero()).numel():
            group, response = infinite[0].tolist()
            raise ValueError(f"The reward of response {response} of group {group} is infinite: give NaN for none.")
        # Weights take the rewards' type, in which whole numbers would cut them off, and squares of halves overflow.
        self.rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
        self.reward_range = (float(low), float(high))
        self.max_completion_length = max_completion_length
        place = (self.rewards - low) / (high - low)
        given = {"correctness": place} | {name: value for name, value in features.items() if value is not None}
        self._features: dict[str, Feature] = {name: given[name] for name in _TRAILING if name in given}
        for name, value in self._features.items():
            if not callable(value):
                self._check(name, value)

    @property
    def group_size(self) -> int:
        """G, the number of responses per prompt."""
        return self.rewards.shape[1]

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that can be read."""
        return tuple(self._features)

    @functools.cached_property
    def scorable(self) -> Bool[Tensor, "B G"]:
        """Return True for responses with a reward; the others take no part in any group statistic."""
        return ~self.rewards.isnan()

    def cluster_labels(self, kind: str | None) -> Int[Tensor, "B G"]:
        """Return the cluster labels of a kind of ``methods.components.CLUSTERS``. A kind that was not given is replaced
        by ``clusters``, and "bidirectional" is made from ``nli``."""
        name = f"{kind}_clusters"
        if kind == "bidirectional" and name not in self._features:
            answered = self.scorable & self.answered.bool() if "answered" in self._features else self.scorable
            self._features[name] = bidirectional_clusters(self.nli, answered=answered)
        return getattr(self, name if name in self._features else "clusters")

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_") or name not in _TRAILING:
            raise AttributeError(f"Rollouts have no {name!r}.{nearest(name, _TRAILING)}")
        value = self._features.get(name)
        if value is None:
            has = ", ".join(["rewards", *self._features])
            raise MissingFeatureError(f"These rollouts have no {name!r}: give {name}=... beside {has}.")
        if not isinstance(value, Tensor):
            value = value()
            self._check(name, value)
            self._features[name] = value
        return value

    def _check(self, name: str, value: object) -> None:
        """Refuse what is no tensor, has a shape that does not fit the rewards, or is not a number where it counts."""
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, or a function that returns one, got {described(value)}.")
        groups, size = self.rewards.shape
        expected = (groups, size, *(size if n == -1 else n for n in _TRAILING[name]))
        wanted = zip(expected, value.shape, strict=False)
        if value.ndim != len(expected) or any(want not in (None, got) for want, got in wanted):
            shown = ", ".join("*" if n is None else str(n) for n in expected)
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected ({shown}) for rewards {(groups, size)}.")
        broken = value.isinf() if name == "correctness" else value.isnan() if name in _TOKENS else ~value.isfinite()
        if broken.any() and (places := (broken & self._counted(name, value)).nonzero()).numel():
            group, response, *_ = place = tuple(places[0].tolist())
            where = f"response {response} of group {group}, {place}"
            raise ValueError(f"{name} is {value[place].item()} for {where}: a response with a reward needs a number.")

    def _counted(self, name: str, value: Tensor) -> Bool[Tensor, "*counted"]:
        """Return True, in a shape that fits ``value``, where a feature may be read."""
        kept = self.scorable
        if name == "nli":
            return (kept.unsqueeze(1) & kept.unsqueeze(2)).unsqueeze(3)
        if name in _TOKENS and name != "mask" and "mask" in self._features:
            return kept.unsqueeze(2) & self.mask.bool()
        return kept.view(*kept.shape, *(1,) * (value.ndim - 2))


def described(value: object) -> str:
    """Return a value's shape, or its kind, for a message."""
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
