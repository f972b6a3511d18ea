"""One weight, or one term of the loss, per token."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gcpo.masked import deviations, mean
from gcpo.methods.components import Component, Factor
from gcpo.methods.forms import check_alpha
from gcpo.rollouts import Rollouts


@dataclass(frozen=True, kw_only=True)
class CovarianceKernel(Factor):
    """CW-GRPO: w = exp(-c^2 / (2 sigma^2)), normalised to mean 1 over the tokens of the group.

    c_it = (log pi(o_it) - mean log pi)(A_i - mean A), with means and sigma = std{c} over the group (section 2.3); A's
    mean is over responses. Detached. Where sigma = 0, as for equal rewards, w = 1.
    """

    kind = "CovarianceKernel"
    granularity = "token"
    weight: str = "w_cov"
    measure: str = "cov"

    reads = frozenset({"logps", "mask"})
    direction = "damps tokens of extreme covariance"

    def bounds(self, group_size: int) -> tuple[float, float]:
        return 0.0, math.inf  # one token can have all the mass, which is the number of tokens in the group

    def columns(self, rollouts: Rollouts, base: Float[Tensor, "B G"]) -> dict[str, Tensor]:
        kept = rollouts.mask.bool() & rollouts.scorable.unsqueeze(-1)
        covariance = deviations(rollouts.logps, kept, (-2, -1)) * deviations(base, rollouts.scorable).unsqueeze(-1)
        squares = covariance.square()
        variance = mean(deviations(covariance, kept, (-2, -1)).square(), kept, (-2, -1))
        # Covariances that are equal differ by the rounding of their type.
        alike = variance <= (16 * torch.finfo(variance.dtype).eps) ** 2 * mean(squares, kept, (-2, -1))
        exponent = torch.where(alike, 0, -squares / (2 * variance)).masked_fill(~kept, -torch.inf)
        # Mean 1 is a softmax times the number of tokens, which cannot underflow as a ratio of kernels can.
        weight = exponent.flatten(1).softmax(1).view_as(exponent) * kept.sum((-2, -1), keepdim=True)
        return {self.measure: covariance, self.weight: torch.where(kept, weight, 1)}


def token_covariance(
    rollouts: Rollouts, base: Float[Tensor, "B G"]
) -> tuple[Float[Tensor, "B G T"], Bool[Tensor, "B G T"]]:
    """Return (log pi - mean)(A - mean) at each token under the current policy, by which Clip-Cov and KL-Cov select (Cui
    et al. 2025), and True for the tokens that count: both means are over those of the whole batch."""
    kept = rollouts.mask.bool() & rollouts.scorable.unsqueeze(-1)
    logps = torch.where(kept, rollouts.logps + rollouts.ratios.log(), 0)
    everywhere = (0, 1, 2)
    spread = deviations(base.unsqueeze(-1).expand_as(logps), kept, everywhere)
    return deviations(logps, kept, everywhere) * spread, kept


@dataclass(frozen=True, kw_only=True)
class CovarianceClip(Factor):
    """Clip-Cov: a random ``share`` of the batch's tokens (at least one) among those with a covariance inside ``band``
    gets weight 0. Tokens that the loss's own ``clip`` of the ratio (below and above 1) already stops are left out.
    """

    kind = "CovarianceClip"
    OPTIONS = ("share", "band", "clip")
    SHARES = ("share",)
    stage = "loss"
    granularity = "token"
    weight: str = "w_clip"
    measure: str = "cov"
    share: float = 2e-4
    band: tuple[float, float] = (1.0, 5.0)
    clip: tuple[float, float] = (0.2, 0.2)
    seed: int = 0  # of the draw

    def __post_init__(self) -> None:
        low, high = self.band
        if not low < high:
            raise ValueError(f"band is {(low, high)}, expected (low, high) with low < high.")
        for side in self.clip:
            check_alpha(side, "clip")
        super().__post_init__()

    reads = frozenset({"logps", "ratios", "mask"})
    direction = "drops some tokens of high covariance"

    def bounds(self, group_size: int) -> tuple[float, float]:
        return 0.0, 1.0

    def columns(self, rollouts: Rollouts, base: Float[Tensor, "B G"]) -> dict[str, Tensor]:
        covariance, kept = token_covariance(rollouts, base)
        sign = base.unsqueeze(-1)
        below, above = rollouts.ratios < 1 - self.clip[0], rollouts.ratios > 1 + self.clip[1]
        stopped = (below & (sign < 0)) | (above & (sign > 0))
        low, high = self.band
        candidates = (kept & ~stopped & (covariance > low) & (covariance < high)).flatten().nonzero().squeeze(1)
        count = max(1, int(self.share * kept.sum().item()))
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(self.seed))
        weight = torch.ones_like(covariance).flatten()
        weight[candidates[order[:count].to(candidates.device)]] = 0
        return {self.measure: covariance, self.weight: weight.view_as(covariance)}


@dataclass(frozen=True, kw_only=True)
class CovariancePenalty(Component):
    """KL-Cov: the ``share`` of the batch's tokens (at least one) with the largest covariance pays
    ``coefficient`` * |log pi - log pi_old| in the loss, whose gradient is 0 while the two are equal."""

    kind = "CovariancePenalty"
    OPTIONS = ("share", "coefficient")
    NOT_NEGATIVE = ("coefficient",)
    SHARES = ("share",)
    needs_off_policy_steps = True
    share: float = 2e-3
    coefficient: float = 1.0

    reads = frozenset({"logps", "ratios", "mask"})
    direction = "holds tokens of high covariance"

    def coefficients(self, rollouts: Rollouts, base: Float[Tensor, "B G"]) -> Float[Tensor, "B G T"]:
        """Return each token's penalty per nat of |log-ratio|."""
        covariance, kept = token_covariance(rollouts, base)
        total = int(kept.sum())
        count = min(total, max(1, int(self.share * total)))
        ranked = covariance.masked_fill(~kept, -torch.inf).flatten()
        paid = torch.zeros_like(ranked)
        paid[ranked.topk(count).indices] = self.coefficient
        return paid.view_as(covariance)
