"""A weight of one's own: a function of the rollouts, as a method."""

import hashlib
import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from gcpo.methods.components import Factor
from gcpo.rollouts import FEATURES, Rollouts, described

Weight = Callable[[Rollouts], Tensor]


def place(function: Weight) -> str:
    """Return "package.module:name" of a function, or of the class of an object that can be called."""
    function, _ = unpacked(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def unpacked(function: Any) -> tuple[Any, str]:
    """Return the function inside a ``functools.partial``, and what that gives it in words; or itself, and ""."""
    return (function.func, f"{function.args} {function.keywords}") if isinstance(function, partial) else (function, "")


def called(method: Any) -> str:
    """Return what a method goes by that is given as a name, a function or a `Method`."""
    return method if isinstance(method, str) else place(method) if callable(method) else "own"


def source(function: Weight) -> str:
    """Return a function's place and, where its module has a file, the hash of that and of what a partial one has been
    given, as ids of runs name it."""
    with suppress(OSError, TypeError):
        inner, given = unpacked(function)
        text = inspect.getsource(inspect.getmodule(inner)) + given  # type: ignore[arg-type]  # without one: TypeError
        return f"{place(function)} {hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return place(function)


class _Trial(Rollouts):
    """Two made-up groups of four responses of three tokens, one with equal rewards, that remember what is read."""

    def __init__(self) -> None:
        self.read = set[str]()
        drawn = torch.rand(2, 4, 4, 3, generator=torch.Generator().manual_seed(0))
        tokens, rewards = drawn[:, :, 0], torch.tensor([[0.0, 1, 0, 1], [0, 0, 0, 0]])
        made: dict[str, Any] = dict.fromkeys(("embeddings", "entropies"), tokens) | {"nli": drawn.softmax(-1)}
        made |= dict.fromkeys(("logps", "ref_logps"), -tokens) | dict.fromkeys(("mask", "answer_mask"), tokens.ceil())
        made |= dict.fromkeys(("clusters", "exact_clusters", "math_clusters", "task_clusters"), rewards.int())
        super().__init__(rewards, max_completion_length=3, answered=rewards.bool(), **made)
        self.read.clear()

    def __getattribute__(self, name: str) -> Any:
        if name != "read":
            self.read.add(name)
        return super().__getattribute__(name)


@dataclass(frozen=True, kw_only=True)
class OwnWeight(Factor):
    """The weight that a function gives to groups (B,), responses (B, G) or tokens (B, G, T).

    The function is tried on made-up rollouts first, which shows before any model is loaded what it reads, what it
    weighs, and what is wrong with it. Where there is no reward, and outside of ``mask``, its weight is 1.
    """

    kind = "OwnWeight"
    direction = "as its function says"
    reads = frozenset()  # these two and more are found by the trial
    needs_correctness = False
    measure: str = "w_own"
    weight: str = "w_own"
    function: Weight

    def __post_init__(self) -> None:
        trial, called = _Trial(), place(self.function)
        try:
            weight = self.columns(trial, trial.rewards)[self.weight]
            if not weight.isfinite().all():
                raise ValueError(f"{called} gives {weight.tolist()} for rewards {trial.rewards.tolist()}")
        except Exception as error:
            said = "" if called in str(error) else f"{called}: {type(error).__name__}: "
            raise ValueError(f"{said}{error} (tried on two made-up groups of four)") from error
        vars(self).update(
            reads=FEATURES & trial.read,
            needs_correctness="correctness" in trial.read,
            reads_range="reward_range" in trial.read,
            granularity=("group", "response", "token")[weight.ndim - 1],
            clusters="greedy" if "clusters" in trial.read else "task" if "task_clusters" in trial.read else None,
        )

    def bounds(self, group_size: int) -> tuple[float, float]:
        return 0.0, math.inf

    def seeded(self, seed: int) -> Self:
        return self

    def columns(self, rollouts: Rollouts, base: Float[Tensor, "B G"]) -> dict[str, Tensor]:
        weight, kept = self.function(rollouts), rollouts.scorable
        shapes = [kept.shape[:1], kept.shape, *([rollouts.mask.shape] if getattr(weight, "ndim", 0) == 3 else [])]
        if not isinstance(weight, Tensor) or weight.shape not in shapes:
            expected = f"(B,), (B, G) or (B, G, T) with (B, G) = {tuple(kept.shape)}"
            raise ValueError(f"{place(self.function)} gives {described(weight)}, expected {expected}")
        counted = (kept.any(1), kept, kept.unsqueeze(-1))[weight.ndim - 1]
        counted = counted & rollouts.mask.bool() if weight.ndim == 3 else counted
        if (weight[counted] < 0).any():
            least = weight[counted].min().item()
            raise ValueError(f"{place(self.function)} gives {least:.3g}, and a weight is at least 0")
        return {self.weight: torch.where(counted, weight.to(rollouts.rewards), 1)}
