"""One weight per response."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gcpo.masked import deviations, mean
from gcpo.methods.components import Factor, entirely_incorrect, is_correct, is_graded
from gcpo.rollouts import Rollouts

CEILING = 10.0  # of mean H / H_i before renormalising, so that one near-deterministic response cannot dominate the mean
ALL: tuple[float, float] = (0.0, math.inf)


@dataclass(frozen=True, kw_only=True)
class EntropyFactor(Factor):
    """A response's entropy against its group's: EDGE-GRPO, EG-SPO-style gating, EGPO and its ablations.

    ratio = mean_j(H_j) / (H_i + epsilon), or H_i / (mean_j(H_j) + epsilon) if not ``inverse``; then clamped to
    ``correct`` or ``wrong`` by the response's outcome. H_i is the mean over tokens of the Shannon entropy ("shannon"),
    or of the negative log-likelihood of the sampled token ("nll", EGPO Eq. 5). H = 0 is no special case: with an
    epsilon above 0 its ratio is the largest of all. A response without tokens, or whose ratio is a division by 0, has
    ratio 1. Where the two clamps differ, one that is not known to be right or wrong has weight 1; its entropy counts.

    ``renorm``: divide by the group's mean, "before" the clamp (mean not 1) or "after" it (bounds not kept), EGPO Eq. 9.
    ``all_wrong``: with "weighted", a group without a right response gets A = -1 (EGPO Eq. 13) times its weights; with
    "locked", times 1. ``scope``: tokens that count, all ("joint"), those of the answer, or those before it
    ("thinking"); where a response has none of them, all.
    """

    kind = "EntropyFactor"
    OPTIONS = ("correct", "wrong", "renorm", "all_wrong", "scope", "epsilon")
    NOT_NEGATIVE = ("epsilon",)
    granularity = "response"

    weight: str = "w_entropy"
    measure: str = "entropy"
    signal: Literal["shannon", "nll"] = "nll"
    inverse: bool = True
    correct: tuple[float, float] = ALL
    wrong: tuple[float, float] = ALL
    renorm: Literal["none", "before", "after"] = "none"
    all_wrong: Literal["none", "weighted", "locked"] = "none"
    scope: Literal["joint", "thinking", "answer"] = "joint"
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("correct", "wrong"):
            low, high = getattr(self, name)
            if not 0 <= low <= high:
                raise ValueError(f"{name} is {(low, high)}, expected (low, high) with 0 <= low <= high.")

    @property
    def needs_correctness(self) -> bool:
        return self.correct != self.wrong or self.negative_reinforcement

    @property
    def negative_reinforcement(self) -> bool:
        return self.all_wrong != "none"

    @property
    def reads(self) -> frozenset[str]:
        values = "entropies" if self.signal == "shannon" else "logps"
        return frozenset({values, "mask"} | ({"answer_mask"} if self.scope != "joint" else set()))

    @property
    def direction(self) -> str:
        return f"{'boosts' if self.inverse else 'damps'} confident responses"

    def bounds(self, group_size: int) -> tuple[float, float]:
        low, high = min(self.correct[0], self.wrong[0]), max(self.correct[1], self.wrong[1])
        if self.renorm == "after":
            others = group_size - 1
            ends = group_size * low / (low + others * high), group_size * high / (high + others * low)
            return ends if high < math.inf else (0.0, float(group_size))
        if self.inverse and self.renorm == "none" and not self.epsilon:
            low = max(low, min(1 / group_size, high))  # H_i is at most G times the mean
        return low, high

    def _tokens(self, rollouts: Rollouts) -> Bool[Tensor, "B G T"]:
        tokens = rollouts.mask.bool()
        if self.scope == "joint":
            return tokens
        answer = rollouts.answer_mask.bool()
        part = tokens & (answer if self.scope == "answer" else ~answer)
        return torch.where(part.any(-1, keepdim=True), part, tokens)

    def columns(self, rollouts: Rollouts, base: Float[Tensor, "B G"]) -> dict[str, Tensor]:
        values = rollouts.entropies if self.signal == "shannon" else -rollouts.logps
        tokens = self._tokens(rollouts)
        entropy = mean(values, tokens).squeeze(-1).clamp(min=0)
        valid = rollouts.scorable & tokens.any(-1) & entropy.isfinite()
        average = mean(entropy, valid)
        above, below = (average, entropy) if self.inverse else (entropy, average)
        below = below + self.epsilon
        ratio = torch.where(valid & (below > 0), above / below, 1)
        if self.renorm == "before":
            ratio = ratio.clamp(max=CEILING)
            level = mean(ratio, valid)
            ratio = torch.where(level > 0, ratio / level, 1)
        weight, known = ratio.clamp(*self.wrong), valid
        if self.correct != self.wrong:
            weight = torch.where(is_correct(rollouts), ratio.clamp(*self.correct), weight)
            known = valid & is_graded(rollouts)
        if self.renorm == "after":
            weight = weight / mean(weight, known)
        if self.all_wrong == "locked":
            weight = torch.where(entirely_incorrect(rollouts), 1, weight)
        return {self.measure: entropy, self.weight: torch.where(known, weight, 1)}


@dataclass(frozen=True, kw_only=True)
class RatioVariance(Factor):
    """R2VPO-style (GCPO, App. G): w_i = 1 / (1 + lambda Var_t(rho_it)) of the ratios rho = pi / pi_old, detached.

    The variance is over the response's tokens (population form). On-policy rho = 1, and w = 1.
    """

    kind = "RatioVariance"
    OPTIONS = NOT_NEGATIVE = ("lambda_",)
    needs_off_policy_steps = True
    stage = "loss"
    granularity = "response"
    weight: str = "w_ratio"
    measure: str = "ratio_variance"
    lambda_: float = 1.0

    reads = frozenset({"ratios", "mask"})
    direction = "damps responses whose ratios vary"

    def bounds(self, group_size: int) -> tuple[float, float]:
        return 0.0, 1.0

    def columns(self, rollouts: Rollouts, base: Float[Tensor, "B G"]) -> dict[str, Tensor]:
        kept = rollouts.mask.bool()
        variance = mean(deviations(rollouts.ratios, kept).square(), kept).squeeze(-1)
        weight = 1 / (1 + self.lambda_ * variance)
        return {self.measure: variance, self.weight: torch.where(rollouts.scorable, weight, 1)}
