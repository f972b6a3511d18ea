"""One weight per group."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gcpo.errors import one_of
from gcpo.measures import ESTIMATORS
from gcpo.methods.forms import FORMS, alpha_g
from gcpo.methods.parts import CLUSTERS, Factor
from gcpo.rollouts import Rollouts


@dataclass(frozen=True, kw_only=True)
class GroupFactor(Factor):
    """Score x form x strength: ``FORMS[form](score(rollouts), strength)``, one weight per group.

    The strength is alpha / log G (GCPO, section 3.4; SEED-GRPO, Eq. 6), or alpha itself where ``per_log_g`` is off.
    """

    OPTIONS = ("form", "estimator", "clusters")
    granularity = "group"

    score: Callable[[Rollouts, GroupFactor], Float[Tensor, " B"]]
    highest: Callable[[int], float]  # the largest score at group size G
    features: frozenset[str] = frozenset()
    form: str = "linear"
    alpha: float = 0.6
    per_log_g: bool = True
    estimator: str | None = None  # of semantic entropy; no other score has one
    clusters: str | None = None  # a key of CLUSTERS, for a score that reads them

    def __post_init__(self) -> None:
        one_of("form", self.form, FORMS)
        one_of("estimator", self.estimator, (None, *ESTIMATORS))
        one_of("clusters", self.clusters, (None, *CLUSTERS))

    @property
    def reads(self) -> frozenset[str]:
        likelihood = {"logps", "mask"} if self.estimator in ("rao", "mc") else set()
        return self.features | likelihood

    @property
    def direction(self) -> str:
        low, high = (FORMS[self.form](torch.tensor(end), 0.1) for end in (0.0, 1.0))
        return f"{'boosts' if high > low else 'damps'} groups whose {self.subject} differ"

    @property
    def subject(self) -> str:
        """What differs in a group with a high score."""
        return "answers" if self.features else "rewards"

    def strength(self, alpha: float | None, group_size: int) -> float:
        """alpha_G of GCPO, or alpha where it is not divided by log G."""
        alpha = self.alpha if alpha is None else alpha
        return alpha_g(alpha, group_size) if self.per_log_g else alpha

    def bounds(self, alpha: float | None, group_size: int) -> tuple[float, float]:
        # Every form is monotone in its score, so that the score's two ends span the range.
        highest = math.inf if self.estimator == "mc" else self.highest(group_size)
        strength = self.strength(alpha, group_size)
        ends = torch.tensor([0.0, highest if strength else 0.0], dtype=torch.float64)
        reached = FORMS[self.form](ends, strength).tolist()
        return min(reached), max(reached)

    def columns(
        self, rollouts: Rollouts, base: Float[Tensor, "B G"], *, alpha: float | None, seed: int
    ) -> dict[str, Tensor]:
        score = self.score(rollouts, self)
        weight = FORMS[self.form](score, self.strength(alpha, rollouts.group_size))
        return {self.measure: score, self.weight: weight}
