"""Every method, one declarative row each: what it reads, how a score becomes a weight, and where it acts."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gcpo import measures
from gcpo.rollouts import Rollouts
from gcpo.weights import alpha_g, boost, damp, damp_square

ALPHA = 0.6  # alpha_base, GCPO App. E.3


@dataclass(frozen=True)
class Factor:
    """One weight of a group: ``shape(score(rollouts), alpha_G)``.

    ``measure`` and ``weight`` name the columns in logs, ``highest`` gives the largest score at group size G.
    """

    measure: str
    weight: str
    score: Callable[[Rollouts], Float[Tensor, " B"]]
    shape: Callable[[Tensor, float], Tensor]
    highest: Callable[[int], float]

    def at(self, score: float, alpha: float, group_size: int) -> float:
        """The weight of a group whose score is ``score``."""
        return float(self.shape(torch.tensor(score, dtype=torch.float64), alpha_g(alpha, group_size)))


@dataclass(frozen=True)
class Method:
    """A row of the table of methods.

    Attributes:
        paper: where the rule is from.
        rule: the rule in one line.
        factors: weights whose product multiplies the advantages; none for a base method.
        acts: "base", or "advantage" for a method whose weights multiply advantages.
        granularity: one weight per "group", "response" or "token".
        reads: the features of the rollouts it needs beside rewards.
        permuted: a control that hands each group the weight of another group.
    """

    paper: str
    rule: str
    factors: tuple[Factor, ...] = ()
    acts: Literal["base", "reward", "advantage", "loss"] = "advantage"
    granularity: Literal["group", "response", "token"] = "group"
    reads: frozenset[str] = frozenset()
    permuted: bool = False


CD = Factor(
    "u_geo",
    "w_geo",
    lambda r: measures.cosine_dispersion(r.embeddings, mask=r.scorable),
    damp_square,
    lambda g: 1 - 1 / g,
)
BOT = Factor(
    "u_geo",
    "w_geo",
    lambda r: measures.barycentric_transport(r.embeddings, r.clusters, mask=r.scorable),
    damp_square,
    lambda g: 0.5 if g > 1 else 0.0,
)
RD = Factor(
    "rd",
    "w_rd",
    lambda r: measures.reward_dispersion(r.rewards, r.reward_range),
    boost,
    lambda g: 1.0 if g > 1 else 0.0,
)
SE = Factor("se", "w_se", lambda r: measures.semantic_entropy(r.clusters, mask=r.scorable), damp, math.log)
KLE = Factor("kle", "w_kle", lambda r: measures.kernel_language_entropy(r.nli, mask=r.scorable), damp, math.log)

_BOT_READS = frozenset({"embeddings", "clusters"})

METHODS: dict[str, Method] = {
    "grpo": Method("GRPO (DeepSeekMath)", "A = (r - mean r) / (std r + 1e-4)", acts="base", granularity="response"),
    "se": Method("GCPO, Table 1", "clip(1 - alpha_G SE, 0, 1)", (SE,), reads=frozenset({"clusters"})),
    "kle": Method("GCPO, Table 1", "clip(1 - alpha_G VNE, 0, 1)", (KLE,), reads=frozenset({"nli"})),
    "cd_only": Method("GCPO, Eq. 8", "clip(1 - alpha_G CD^2, 0, 1)", (CD,), reads=frozenset({"embeddings"})),
    "bot_only": Method("GCPO, section 3.2", "clip(1 - alpha_G BoT^2, 0, 1)", (BOT,), reads=_BOT_READS),
    "rd_only": Method("GCPO, Eq. 11", "1 + alpha_G RD", (RD,)),
    "gcpo_cd": Method("GCPO, section 3.4", "omega_CD omega_RD", (CD, RD), reads=frozenset({"embeddings"})),
    "gcpo_bot": Method("GCPO, section 3.4", "omega_BoT omega_RD", (BOT, RD), reads=_BOT_READS),
    "gcpo_shuffled": Method(
        "our control", "gcpo_bot's weights, permuted across groups", (BOT, RD), reads=_BOT_READS, permuted=True
    ),
}


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the closest valid one, and all of them."""
    valid = list(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.4)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Valid names: {', '.join(valid)}."


def get_method(name: str) -> Method:
    """The row of a method.

    Raises:
        ValueError: unknown name, with the nearest valid one.
    """
    if name not in METHODS:
        raise ValueError(f"Unknown method {name!r}.{nearest(name, METHODS)}")
    return METHODS[name]


def permutation(size: int, seed: int) -> Tensor:
    """A seeded cyclic permutation of ``size`` groups, so that none keeps its own place.

    Raises:
        ValueError: fewer than two groups.
    """
    if size < 2:
        raise ValueError(
            "gcpo_shuffled permutes weights across the groups of a batch and needs at least 2 groups, "
            f"got {size}: put more prompts into the generation batch."
        )
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return torch.empty_like(order).scatter_(0, order, order.roll(1))


def group_factors(method: str, rollouts: Rollouts, *, alpha: float = ALPHA) -> dict[str, Float[Tensor, " B"]]:
    """Scores and weights of every factor of a method, by their column names in logs; nothing is permuted here."""
    strength = alpha_g(alpha, rollouts.group_size)
    columns = {}
    for factor in get_method(method).factors:
        score = factor.score(rollouts)
        columns[factor.measure] = score
        columns[factor.weight] = factor.shape(score, strength)
    return columns


def group_weights(method: str, columns: dict[str, Tensor], *, seed: int = 0) -> Float[Tensor, " B"]:
    """The product of a method's factors, from :func:`group_factors`' columns of a whole batch of groups."""
    row = get_method(method)
    product = torch.stack([columns[factor.weight] for factor in row.factors]).prod(0)
    return product[permutation(len(product), seed).to(product.device)] if row.permuted else product


def weights(method: str, rollouts: Rollouts, *, alpha: float = ALPHA, seed: int = 0) -> Float[Tensor, "B G"]:
    """The factor that a method puts on each advantage; 1 for a base method.

    Args:
        method: a name in :data:`METHODS`.
        rollouts: rewards and the features in ``METHODS[method].reads``.
        alpha: alpha_base; the strength is alpha / log G.
        seed: of the permutation of ``gcpo_shuffled``.

    Returns:
        (B, G), within ``weight_range(method, alpha, G)``.

    Raises:
        ValueError: unknown method; one group for ``gcpo_shuffled``; a weight that is not finite (the trainer replaces
            such a weight by 1 and counts it).
        MissingFeatureError: a feature that the method reads was not given.
    """
    if not get_method(method).factors:
        return torch.ones_like(rollouts.rewards)
    per_group = group_weights(method, group_factors(method, rollouts, alpha=alpha), seed=seed)
    if not per_group.isfinite().all():
        group = int((~per_group.isfinite()).nonzero()[0])
        raise ValueError(
            f"{method}: the weight of group {group} is not finite; look at its features, {_reads(method)}."
        )
    return per_group.to(rollouts.rewards.dtype).unsqueeze(1).expand_as(rollouts.rewards)


def _reads(method: str) -> str:
    return ", ".join(["rewards", *sorted(METHODS[method].reads)])


def base_advantages(rewards: Float[Tensor, "B G"]) -> Float[Tensor, "B G"]:
    """GRPO's advantage, (r - mean) / (std + 1e-4) with the n - 1 deviation (GCPO Eq. 1; epsilon as in TRL).

    NaN rewards take no part and get 0; a group with equal rewards, or with one scorable response, gets exactly 0.
    """
    valid = ~rewards.isnan()
    count = valid.sum(1, keepdim=True)
    known = rewards.nan_to_num(0.0)
    mean = known.sum(1, keepdim=True) / count.clamp(min=1)
    deviation = torch.where(valid, rewards - mean, 0.0)
    variance = deviation.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)
    infinite = torch.tensor(math.inf, dtype=rewards.dtype, device=rewards.device)
    lowest = torch.where(valid, rewards, infinite).amin(1, keepdim=True)
    highest = torch.where(valid, rewards, -infinite).amax(1, keepdim=True)
    return torch.where(highest > lowest, deviation / (variance.sqrt() + 1e-4), 0.0)


def advantages(method: str, rollouts: Rollouts, *, alpha: float = ALPHA, seed: int = 0) -> Float[Tensor, "B G"]:
    """The modulated advantage A~ = A * weight (GCPO, section 3.4), as the trainer uses it.

    Arguments, shape and errors as in :func:`weights`; no unit.
    """
    return base_advantages(rollouts.rewards) * weights(method, rollouts, alpha=alpha, seed=seed)
