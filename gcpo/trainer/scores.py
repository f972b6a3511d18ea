"""The rewards of a batch: their sum, which responses are right, and whether they keep to the range that is known."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.logging import get_logger
from jaxtyping import Float
from torch import Tensor

from gcpo.errors import nearest
from gcpo.rollouts import Rollouts
from gcpo.trainer.config import GCPOConfig, Range, as_range

PATIENCE = 8  # batches in which something may be missing before a warning
logger = get_logger("trl.gcpo")

# Values between which TRL's own reward functions lie, by name: numbers, or attributes that they are made with.
OF_TRL: dict[str, tuple[float | str, ...]] = {
    "accuracy_reward": (0.0, 1.0),
    "reasoning_accuracy_reward": (0.0, 1.0),
    "think_format_reward": (0.0, 1.0),
    "soft_overlong_punishment_reward": (-1.0, 0.0),
    "repetition_penalty_reward": ("max_penalty", 0.0),
    "cosine_scaled_reward": ("min_value_wrong", "max_value_wrong", "min_value_correct", "max_value_correct"),
}


def declared_range(function: Any) -> Range | None:
    """Return the lowest and highest reward of a function that declares them as ``reward_range``, or that is TRL's."""
    name = getattr(function, "__name__", type(function).__name__)
    if (given := getattr(function, "reward_range", None)) is not None:
        return as_range(f"{name}.reward_range", given)
    if isinstance(function, functools.partial):
        return declared_range(function.func)
    ends = OF_TRL.get(name, ()) if (getattr(function, "__module__", None) or "").startswith("trl.rewards") else ()
    values = [getattr(function, end) if isinstance(end, str) else end for end in ends]
    return (min(values), max(values)) if values else None


class Scores:
    """Rewards and correctness of batches, and what they can reach.

    A range is what the config says, else what the reward functions declare, weighted and summed.

    Args:
        args: the method, ranges and the name of the correctness reward.
        functions, names, weights: of the rewards, in TRL's order.

    Attributes:
        range: lowest and highest reward; None if the method does not ask and nothing tells.
        correctness_range: those of the correctness reward, above whose middle a response is right; likewise.

    Raises:
        ValueError: ``args.correctness_reward`` is no reward function, or none is named where several could be meant; or
            the method asks for a range that nothing tells.
    """

    def __init__(self, args: GCPOConfig, functions: Sequence[Any], names: Sequence[str], weights: Tensor) -> None:
        self.method, self.name, self.names, self.weights = args.resolved_method(), args.method, list(names), weights
        self.place = self._place(args.correctness_reward)  # of the correctness reward; None: all of them, summed
        declared = [declared_range(function) for function in functions]
        ends = [[w * end for end in limits or (0, 1)] for w, limits in zip(weights.tolist(), declared, strict=True)]
        low, high = sum(map(min, ends)), sum(map(max, ends))
        summed = (low, high) if None not in declared and low < high else None
        told = summed if self.place is None else declared[self.place]
        self.range: Any = args.reward_range or summed
        own = None if self.place is None else told
        self.correctness_range: Any = args.correctness_range or own or self.range
        # Who gives rewards knows what they reach; a range that the user has set may have been for another reward.
        self._sure = self.correctness_range in (args.correctness_range, told)
        unknown = [name for name, limits in zip(names, declared, strict=True) if not limits]
        if self.method.reads_range and not self.range:
            self._refuse("reward_range", unknown, low, high)
        if self.method.needs_correctness and not self.correctness_range:
            self._refuse("correctness_range", unknown if self.place is None else [names[self.place]], 0, 1)
        self._batches, self._seen, self._warned = 0, set[str](), set[str]()

    def _place(self, wanted: str | None) -> int | None:
        names, asks = self.names, self.method.needs_correctness
        if wanted is not None and wanted not in names:
            raise ValueError(f"correctness_reward: no reward function {wanted!r}.{nearest(wanted, names)}")
        alike = [name for name in names if names.count(name) > 1 and wanted in (None, name)]
        if alike and (asks or wanted):
            raise ValueError(
                f"correctness_reward: {len(alike)} reward functions are called {alike[0]!r}: give each a __name__ of "
                f"its own, and name the one that tells {self.name} which responses are right."
            )
        if asks and wanted is None and len(names) > 1:
            raise ValueError(
                f"{self.name} asks which responses are right, and a sum of {len(names)} rewards does not say: "
                f"set correctness_reward to one of {', '.join(names)}, and correctness_range to what it can reach."
            )
        return None if wanted is None else names.index(wanted)

    def _refuse(self, setting: str, unknown: Sequence[str], low: float, high: float) -> None:
        if not unknown:
            raise ValueError(f"{self.name} measures rewards, and reward_weights {self.weights.tolist()} leave none.")
        raise ValueError(
            f"{self.name} measures rewards by what they can reach, which nothing says of {', '.join(unknown)}. If each "
            f"is from 0 to 1, write GCPOConfig({setting}=[{low:g}, {high:g}]), or {unknown[0]}.reward_range = (0, 1) "
            "below the function."
        )

    def __call__(self, per_function: Float[Tensor, "N F"]) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
        """Return the weighted sum of the rewards, NaN where there is none, and correctness in [0, 1] where its range is
        known."""
        self._batches += 1
        weights = self.weights.to(per_function.device)
        rewards = (per_function * weights).nansum(dim=1).masked_fill(per_function.isnan().all(dim=1), torch.nan)
        if (infinite := rewards.isinf()).any():
            value = rewards[infinite][0].item()
            self._warn_once("infinite", f"A reward is {value}: such a response counts as unscored.")
        rewards = rewards.masked_fill(infinite, torch.nan)
        if self.method.reads_range and self.range:
            self._check_rewards(rewards, *self.range)
        if self.correctness_range is None:
            return rewards, None
        low, high = self.correctness_range
        correctness = rewards if self.place is None else per_function[:, self.place]
        if self.method.needs_correctness:
            self._check_correctness(correctness, low, high)
        return rewards, (correctness.clamp(low, high) - low) / (high - low)

    def watch(self, rollouts: Rollouts, advantages: Tensor) -> None:
        """Say once, after a few batches, what is missing for the policy to learn."""
        if self._batches > PATIENCE:
            return
        found = {"a reward": rollouts.scorable}
        if self.method.needs_correctness:
            found["a known correctness"] = ~rollouts.correctness.isnan()
        found["an advantage other than 0"] = advantages != 0
        if self.method.reads_range:
            low, high = rollouts.reward_range
            found[f"a reward above the middle of reward_range {(low, high)}"] = rollouts.rewards > (low + high) / 2
        self._seen |= {what for what, where in found.items() if where.any()}
        if self._batches == PATIENCE and (missing := [what for what in found if what not in self._seen]):
            logger.warning(
                f"{self.name}: {PATIENCE} batches without {missing[0]}: look at the reward functions, reward_weights "
                "and reward_range."
            )

    def _check_correctness(self, correctness: Tensor, low: float, high: float) -> None:
        known, middle = correctness[~correctness.isnan()], (low + high) / 2
        outside = known[(known < low) | (known > high)]
        if len(outside):
            self._stop_or_warn(
                "correctness",
                f"{self.name} asks which responses are right, and {self.names[self.place or 0]!r} gave "
                f"{outside[0].item():.4g}, outside {(low, high)}: that is no correctness signal. Name the reward "
                "function that is one with correctness_reward, or set correctness_range to what it can reach.",
                " It is clipped to the range.",
            )
        elif not self._sure and middle in known and set(known.tolist()) <= {low, middle}:
            self._stop_or_warn(
                "middle",
                f"{self.name} calls a response right above the middle of {(low, high)}, and the best of this batch are "
                f"exactly at {middle:.4g}: set reward_range=[{low:g}, {middle:g}] if that is a full reward, or "
                f"correctness_range=[{low:g}, {high:g}] if it is half of one.",
            )

    def _check_rewards(self, rewards: Tensor, low: float, high: float) -> None:
        outside = rewards[(rewards < low) | (rewards > high)]
        if len(outside):
            self._warn_once(
                "range",
                f"A reward of {outside[0].item():.4g} lies outside reward_range {(low, high)}. Rewards are used as "
                "they are; only measures of them are clipped to [0, 1]. Set GCPOConfig(reward_range=...) to what "
                "rewards can reach.",
            )

    def _stop_or_warn(self, kind: str, message: str, later: str = "") -> None:
        if self._batches == 1:
            raise ValueError(message)
        self._warn_once(kind, message + later)  # a run of days goes on

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, stacklevel=4)
