"""One weight per group: a score of its disagreement, through a form, at a strength."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gcpo import measures
from gcpo.methods.components import Factor, likelihoods
from gcpo.methods.forms import FORMS, Form, alpha_g
from gcpo.rollouts import Rollouts


@dataclass(frozen=True, kw_only=True)
class GroupFactor(Factor):
    """``FORMS[form](score(rollouts), strength)``, one weight per group; a subclass says which score.

    The strength is alpha / log G (GCPO, section 3.4; SEED-GRPO, Eq. 6), or alpha itself with ``alpha_norm="none"``. CD
    and BoT also take theirs as ``alpha_geo``, RD as ``alpha_rd``: GCPO has one alpha for both of its factors.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("form", "alpha_norm")
    has_alpha = True
    granularity = "group"

    form: Form = "linear"
    alpha: float = 0.6
    alpha_norm: Literal["log_g", "none"] = "log_g"

    @abstractmethod
    def score(self, rollouts: Rollouts) -> Float[Tensor, " B"]:
        """Return the disagreement of each group, at least 0."""

    def highest(self, group_size: int) -> float:
        """Return the largest score of a group of this size: 1 unless a subclass says otherwise."""
        return 1.0

    @property
    def direction(self) -> str:
        low, high = (FORMS[self.form](torch.tensor(end), 0.1) for end in (0.0, 1.0))
        subject = "rewards" if self.reads_range else "answers"
        return f"{'boosts' if high > low else 'damps'} groups whose {subject} differ"

    def strength(self, group_size: int) -> float:
        """Return GCPO's alpha_G, or alpha itself with ``alpha_norm="none"``."""
        return alpha_g(self.alpha, group_size) if self.alpha_norm == "log_g" else self.alpha

    def bounds(self, group_size: int) -> tuple[float, float]:
        # Every form is monotone in its score, so that the score's two ends span the range.
        strength = self.strength(group_size)
        ends = torch.tensor([0.0, self.highest(group_size) if strength else 0.0], dtype=torch.float64)
        reached = FORMS[self.form](ends, strength).tolist()
        return min(reached), max(reached)

    def columns(self, rollouts: Rollouts, base: Float[Tensor, "B G"]) -> dict[str, Tensor]:
        score = self.score(rollouts)
        weight = FORMS[self.form](score, self.strength(rollouts.group_size))
        return {self.measure: score, self.weight: weight}


@dataclass(frozen=True, kw_only=True)
class SemanticEntropy(GroupFactor):
    """SE(q) of the group's clusters (GCPO, section 2.1; SEED-GRPO, Eq. 5)."""

    kind = "SemanticEntropy"
    OPTIONS = ("form", "alpha_norm", "estimator", "clusters")
    measure: str = "se"
    weight: str = "w_se"
    estimator: measures.Estimator = "counts"
    clusters: str | None = "greedy"

    @property
    def reads(self) -> frozenset[str]:
        return self.labels if self.estimator in measures.COUNTED else self.labels | {"logps", "mask"}

    def score(self, rollouts: Rollouts) -> Float[Tensor, " B"]:
        clusters = rollouts.cluster_labels(self.clusters)
        if self.estimator in measures.COUNTED:
            return measures.semantic_entropy(clusters, estimator=self.estimator, mask=rollouts.scorable)
        logps, spoken = likelihoods(rollouts)
        kept = rollouts.scorable & spoken
        # The Monte-Carlo form is not bounded below, and a weight needs a score of at least 0.
        return measures.semantic_entropy(clusters, logps, estimator=self.estimator, mask=kept).clamp(min=0)

    def highest(self, group_size: int) -> float:
        return math.inf if self.estimator == "mc" else math.log(group_size)


@dataclass(frozen=True, kw_only=True)
class KernelEntropy(GroupFactor):
    """KLE(q), the von Neumann entropy of the entailment graph (GCPO, Table 1); ``t`` is the heat kernel's time."""

    kind = "KernelEntropy"
    OPTIONS = ("form", "alpha_norm", "kernel", "t")
    NOT_NEGATIVE = ("t",)
    measure: str = "kle"
    weight: str = "w_kle"
    kernel: measures.Kernel = "heat"
    t: float = 0.3
    reads = frozenset({"nli"})

    def score(self, rollouts: Rollouts) -> Float[Tensor, " B"]:
        return measures.kernel_language_entropy(rollouts.nli, kernel=self.kernel, t=self.t, mask=rollouts.scorable)

    def highest(self, group_size: int) -> float:
        return math.log(group_size)


@dataclass(frozen=True, kw_only=True)
class CosineDispersion(GroupFactor):
    """CD(q), GCPO Eq. 7, with the weight of Eq. 8."""

    kind = "CosineDispersion"
    OPTIONS = ("form", "alpha_norm", "alpha_geo")
    alpha_key = "geo"
    measure: str = "u_geo"
    weight: str = "w_geo"
    form: Form = "square"
    reads = frozenset({"embeddings"})

    def score(self, rollouts: Rollouts) -> Float[Tensor, " B"]:
        return measures.cosine_dispersion(rollouts.embeddings, mask=rollouts.scorable)

    def highest(self, group_size: int) -> float:
        return 1 - 1 / group_size


@dataclass(frozen=True, kw_only=True)
class BarycentricTransport(GroupFactor):
    """BoT(q), GCPO Eq. 9-10, with the weight of Eq. 8."""

    kind = "BarycentricTransport"
    OPTIONS = ("form", "alpha_norm", "alpha_geo", "clusters")
    alpha_key = "geo"
    measure: str = "u_geo"
    weight: str = "w_geo"
    form: Form = "square"
    clusters: str | None = "greedy"

    @property
    def reads(self) -> frozenset[str]:
        return self.labels | {"embeddings"}

    def score(self, rollouts: Rollouts) -> Float[Tensor, " B"]:
        clusters = rollouts.cluster_labels(self.clusters)
        return measures.barycentric_transport(rollouts.embeddings, clusters, mask=rollouts.scorable)

    def highest(self, group_size: int) -> float:
        return 0.5


@dataclass(frozen=True, kw_only=True)
class RewardDispersion(GroupFactor):
    """RD(q), GCPO Eq. 11."""

    kind = "RewardDispersion"
    OPTIONS = ("form", "alpha_norm", "alpha_rd")
    alpha_key = "rd"
    reads_range = True
    measure: str = "rd"
    weight: str = "w_rd"
    form: Form = "boost"

    def score(self, rollouts: Rollouts) -> Float[Tensor, " B"]:
        return measures.reward_dispersion(rollouts.rewards, rollouts.reward_range)


@dataclass(frozen=True, kw_only=True)
class RewardVariance(GroupFactor):
    """Q-Hawkeye's u, the variance of the rewards over the largest possible (GCPO, App. G)."""

    kind = "RewardVariance"
    reads_range = True
    measure: str = "reward_variance"
    weight: str = "w_variance"
    alpha: float = 0.2
    alpha_norm: Literal["log_g", "none"] = "none"

    def score(self, rollouts: Rollouts) -> Float[Tensor, " B"]:
        return measures.reward_variance(rollouts.rewards, rollouts.reward_range)


@dataclass(frozen=True, kw_only=True)
class RandomHalf(Factor):
    """Weight 0 for a random half of the batch's groups, rounded down: a control that throws away what it asked for.

    A group without a reward keeps weight 1.
    """

    kind = "RandomHalf"
    granularity = "group"
    direction = "drops groups at random"
    measure: str = "kept"
    weight: str = "w_half"
    seed: int = 0

    def bounds(self, group_size: int) -> tuple[float, float]:
        return 0.0, 1.0

    def columns(self, rollouts: Rollouts, base: Float[Tensor, "B G"]) -> dict[str, Tensor]:
        kept = torch.ones_like(rollouts.rewards[:, 0])
        order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(self.seed))
        kept[order[: len(kept) // 2].to(kept.device)] = 0
        kept = kept.where(rollouts.scorable.any(1), 1)
        return {self.measure: kept, self.weight: kept}
