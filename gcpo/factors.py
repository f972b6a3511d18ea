"""What methods are made of: weights of groups, responses and tokens, and rules that change rewards.

Every class here is a frozen set of constants with one function of the rollouts. A weight reads the task's own rewards
and the base advantages A; responses without a reward take no part in any mean, and their weight is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gcpo.measures import ESTIMATORS
from gcpo.rollouts import Rollouts
from gcpo.weights import FORMS, alpha_g

CEILING = 10.0  # of a ratio of entropies before a mean is taken over it, which one token-sure response could rule alone

ROUNDING = 1e-6  # what is this little below a mean is at the mean
ALL: tuple[float, float] = (0.0, math.inf)

# Which responses mean the same: those that entail one another (GCPO, App. E.3), equal texts (SEED-GRPO), equal
# mathematical answers by Math-Verify, or as the task does it ("math" for mathematics, "nli" elsewhere).
CLUSTERS = ("nli", "exact", "math", "task")


def _one_of(name: str, value: object, valid: Iterable[object]) -> None:
    if value not in valid:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(str(v) for v in valid if v)}.")


def mean(values: Tensor, kept: Tensor, dims: int | tuple[int, ...] = -1) -> Tensor:
    """Mean over ``dims`` of the kept values, 0 where none is kept; the dimensions stay."""
    total = torch.where(kept, values, 0).sum(dims, keepdim=True)
    return total / kept.sum(dims, keepdim=True).clamp(min=1)


def deviations(values: Tensor, kept: Tensor, dims: int | tuple[int, ...] = -1) -> Tensor:
    """Kept values minus their mean, 0 elsewhere; exactly 0 for equal values, whose rounded mean could differ."""
    if not values.numel():
        return values
    lowest = values.masked_fill(~kept, torch.inf).amin(dims, keepdim=True)
    gain = torch.where(kept, values - lowest, 0)
    return torch.where(kept, gain - mean(gain, kept, dims), 0)


def right(rollouts: Rollouts) -> Bool[Tensor, "B G"]:
    """Where a response is right: its correctness is above 1/2, strictly (for F1, the papers' accuracy)."""
    return rollouts.scorable & (rollouts.correctness > 0.5)


def judged(rollouts: Rollouts) -> Bool[Tensor, "B G"]:
    """Where it is known whether a response is right."""
    return rollouts.scorable & ~rollouts.correctness.isnan()


def entirely_wrong(rollouts: Rollouts) -> Bool[Tensor, "B 1"]:
    """Groups with at least one response that is known to be wrong and none that is right (EGPO, section 3.2)."""
    return judged(rollouts).any(1, keepdim=True) & ~right(rollouts).any(1, keepdim=True)


def likelihoods(rollouts: Rollouts) -> tuple[Float[Tensor, "B G"], Bool[Tensor, "B G"]]:
    """Length-normalised log-likelihood of each response, and which responses have a token at all."""
    tokens = rollouts.mask.bool()
    return mean(rollouts.logps, tokens).squeeze(-1), tokens.any(-1)


@dataclass(frozen=True, kw_only=True)
class Factor:
    """One weight of a method, w(rollouts, A).

    ``measure`` and ``weight`` name its columns in logs. ``OPTIONS`` are the constants that a user may set.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ()
    stage: ClassVar[Literal["advantage", "loss"]] = "advantage"
    granularity: ClassVar[Literal["group", "response", "token"]]

    measure: str
    weight: str

    @property
    def reads(self) -> frozenset[str]:
        """The features of the rollouts it reads, beside rewards."""
        raise NotImplementedError

    @property
    def direction(self) -> str:
        """What it makes smaller or larger, in a few words."""
        raise NotImplementedError

    def bounds(self, alpha: float | None, group_size: int) -> tuple[float, float]:
        """The lowest and the highest weight for G of at least 2."""
        raise NotImplementedError

    def columns(
        self, rollouts: Rollouts, base: Float[Tensor, "B G"], *, alpha: float | None, seed: int
    ) -> dict[str, Tensor]:
        """The weight and what it is made from, by column: (B,), (B, G) or (B, G, T) as ``granularity`` says."""
        raise NotImplementedError


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
        _one_of("form", self.form, FORMS)
        _one_of("estimator", self.estimator, (None, *ESTIMATORS))
        _one_of("clusters", self.clusters, (None, *CLUSTERS))

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


@dataclass(frozen=True, kw_only=True)
class EntropyFactor(Factor):
    """A response's entropy against its group's: EDGE-GRPO, EG-SPO-style gating, EGPO and its ablations.

    ratio = mean_j(H_j) / (H_i + epsilon), or H_i / mean_j(H_j) if not ``inverse``; then clamped to ``correct`` or
    ``wrong`` by the response's outcome. H_i is the mean over tokens of the Shannon entropy ("shannon"), or of the
    negative log-likelihood of the sampled token ("nll", EGPO Eq. 5). A response without tokens, with H = 0, or in a
    group with mean 0, has ratio 1.

    ``renorm``: divide by the group's mean, "before" the clamp (mean not 1) or "after" it (bounds not kept), EGPO Eq. 9.
    ``all_wrong``: with "weighted", a group without a right response gets A = -1 (EGPO Eq. 13) times its weights; with
    "locked", times 1. ``scope``: tokens that count, all ("joint"), those of the answer, or those before it
    ("thinking"); where a response has none of them, all.
    """

    OPTIONS = ("correct", "wrong", "renorm", "all_wrong", "scope", "epsilon")
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
        _one_of("renorm", self.renorm, ("none", "before", "after"))
        _one_of("all_wrong", self.all_wrong, ("none", "weighted", "locked"))
        _one_of("scope", self.scope, ("joint", "thinking", "answer"))
        for name in ("correct", "wrong"):
            low, high = getattr(self, name)
            if not 0 <= low <= high:
                raise ValueError(f"{name} is {(low, high)}, expected (low, high) with 0 <= low <= high.")

    @property
    def judges(self) -> bool:
        """Whether it needs to know which responses are right."""
        return self.correct != self.wrong or self.all_wrong != "none"

    @property
    def reads(self) -> frozenset[str]:
        values = "entropies" if self.signal == "shannon" else "logps"
        return frozenset({values, "mask"} | ({"answer_mask"} if self.scope != "joint" else set()))

    @property
    def direction(self) -> str:
        return f"{'boosts' if self.inverse else 'damps'} confident responses"

    def bounds(self, alpha: float | None, group_size: int) -> tuple[float, float]:
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

    def columns(
        self, rollouts: Rollouts, base: Float[Tensor, "B G"], *, alpha: float | None, seed: int
    ) -> dict[str, Tensor]:
        values = rollouts.entropies if self.signal == "shannon" else -rollouts.logps
        tokens = self._tokens(rollouts)
        entropy = mean(values, tokens).squeeze(-1).clamp(min=0)
        valid = rollouts.scorable & tokens.any(-1) & entropy.isfinite()
        average = mean(entropy, valid)
        ratio = average / (entropy + self.epsilon) if self.inverse else entropy / average
        ratio = torch.where(valid & (entropy > 0) & (average > 0), ratio, 1)
        if self.renorm == "before":
            ratio = ratio.clamp(max=CEILING)
            ratio = ratio / mean(ratio, valid)
        correct = right(rollouts) if self.judges else torch.ones_like(valid)
        weight = torch.where(correct, ratio.clamp(*self.correct), ratio.clamp(*self.wrong))
        if self.renorm == "after":
            weight = weight / mean(weight, valid)
        if self.all_wrong == "locked":
            weight = torch.where(entirely_wrong(rollouts), 1, weight)
        return {self.measure: entropy, self.weight: torch.where(valid, weight, 1)}


@dataclass(frozen=True, kw_only=True)
class CovarianceKernel(Factor):
    """CW-GRPO: w = exp(-c^2 / (2 sigma^2)), normalised to mean 1 over the tokens of the group.

    c_it = (log pi(o_it) - mean log pi)(A_i - mean A), with means and sigma = std{c} over the group (section 2.3); A's
    mean is over responses. Detached. Where sigma = 0, as for equal rewards, w = 1.
    """

    granularity = "token"
    weight: str = "w_cov"
    measure: str = "cov"

    reads = frozenset({"logps", "mask"})
    direction = "damps tokens of extreme covariance"

    def bounds(self, alpha: float | None, group_size: int) -> tuple[float, float]:
        return 0.0, math.inf  # one token can have all the mass, which is the number of tokens in the group

    def columns(
        self, rollouts: Rollouts, base: Float[Tensor, "B G"], *, alpha: float | None, seed: int
    ) -> dict[str, Tensor]:
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


@dataclass(frozen=True, kw_only=True)
class RatioVariance(Factor):
    """R2VPO-style (GCPO, App. G): w_i = 1 / (1 + lambda Var_t(rho_it)) of the ratios rho = pi / pi_old, detached.

    The variance is over the response's tokens (population form). On-policy rho = 1, and w = 1.
    """

    OPTIONS = ("lambda_",)
    stage = "loss"
    granularity = "response"
    weight: str = "w_ratio"
    measure: str = "ratio_variance"
    lambda_: float = 1.0

    reads = frozenset({"ratios", "mask"})
    direction = "damps responses whose ratios vary"

    def bounds(self, alpha: float | None, group_size: int) -> tuple[float, float]:
        return 0.0, 1.0

    def columns(
        self, rollouts: Rollouts, base: Float[Tensor, "B G"], *, alpha: float | None, seed: int
    ) -> dict[str, Tensor]:
        kept = rollouts.mask.bool()
        variance = mean(deviations(rollouts.ratios, kept).square(), kept).squeeze(-1)
        weight = 1 / (1 + self.lambda_ * variance)
        return {self.measure: variance, self.weight: torch.where(rollouts.scorable, weight, 1)}


class TokenCovariance(NamedTuple):
    """(log pi - mean)(A - mean) at each token, with both means over all kept tokens of the batch."""

    values: Float[Tensor, "B G T"]
    kept: Bool[Tensor, "B G T"]


def token_covariance(rollouts: Rollouts, base: Float[Tensor, "B G"]) -> TokenCovariance:
    """The covariance that Clip-Cov and KL-Cov select by (Cui et al. 2025), under the current policy."""
    kept = rollouts.mask.bool() & rollouts.scorable.unsqueeze(-1)
    logps = torch.where(kept, rollouts.logps + rollouts.ratios.log(), 0)
    everywhere = (0, 1, 2)
    spread = deviations(base.unsqueeze(-1).expand_as(logps), kept, everywhere)
    return TokenCovariance(deviations(logps, kept, everywhere) * spread, kept)


@dataclass(frozen=True, kw_only=True)
class CovarianceClip(Factor):
    """Clip-Cov: a random ``share`` of the batch's tokens (at least one) among those with a covariance inside ``band``
    gets weight 0. Tokens that the loss's own ``clip`` of the ratio (below and above 1) already stops are left out.
    """

    OPTIONS = ("share", "band", "clip")
    stage = "loss"
    granularity = "token"
    weight: str = "w_clip"
    measure: str = "cov"
    share: float = 2e-4
    band: tuple[float, float] = (1.0, 5.0)
    clip: tuple[float, float] = (0.2, 0.2)

    reads = frozenset({"logps", "ratios", "mask"})
    direction = "drops some tokens of high covariance"

    def bounds(self, alpha: float | None, group_size: int) -> tuple[float, float]:
        return 0.0, 1.0

    def columns(
        self, rollouts: Rollouts, base: Float[Tensor, "B G"], *, alpha: float | None, seed: int
    ) -> dict[str, Tensor]:
        covariance, kept = token_covariance(rollouts, base)
        sign = base.unsqueeze(-1)
        below, above = rollouts.ratios < 1 - self.clip[0], rollouts.ratios > 1 + self.clip[1]
        stopped = (below & (sign < 0)) | (above & (sign > 0))
        low, high = self.band
        candidates = (kept & ~stopped & (covariance > low) & (covariance < high)).flatten().nonzero().squeeze(1)
        count = max(1, int(self.share * kept.sum().item()))
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
        weight = torch.ones_like(covariance).flatten()
        weight[candidates[order[:count].to(candidates.device)]] = 0
        return {self.measure: covariance, self.weight: weight.view_as(covariance)}


@dataclass(frozen=True, kw_only=True)
class CovariancePenalty:
    """KL-Cov: the ``share`` of the batch's tokens (at least one) with the largest covariance pays
    ``coefficient`` * |log pi - log pi_old| in the loss, whose gradient is 0 while the two are equal."""

    OPTIONS: ClassVar[tuple[str, ...]] = ("share", "coefficient")
    share: float = 2e-3
    coefficient: float = 1.0

    reads = frozenset({"logps", "ratios", "mask"})
    direction = "holds tokens of high covariance"

    def coefficients(self, rollouts: Rollouts, base: Float[Tensor, "B G"]) -> Float[Tensor, "B G T"]:
        """What each token pays per nat."""
        covariance, kept = token_covariance(rollouts, base)
        total = int(kept.sum())
        count = min(total, max(1, int(self.share * total)))
        ranked = covariance.masked_fill(~kept, -torch.inf).flatten()
        paid = torch.zeros_like(ranked)
        paid[ranked.topk(count).indices] = self.coefficient
        return paid.view_as(covariance)


@dataclass(frozen=True, kw_only=True)
class RewardStage:
    """A rule that changes rewards before they are normalised to advantages."""

    OPTIONS: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[frozenset[str]]
    direction: ClassVar[str]
    judges: ClassVar[bool] = False  # needs to know how right each response is

    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "B G"]:
        """New rewards; NaN stays NaN."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ClusterShare(RewardStage):
    """EMPO: r_i = the share of responses in i's cluster, whatever the task's reward says. A response without an answer
    gets 0, and so do all where no two agree (its entropy threshold)."""

    OPTIONS = ("clusters",)
    clusters: str = "task"

    def __post_init__(self) -> None:
        _one_of("clusters", self.clusters, CLUSTERS)

    reads = frozenset({"clusters", "answered"})
    direction = "rewards the majority"

    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "B G"]:
        kept, clusters = rollouts.scorable, rollouts.clusters_as(self.clusters)
        same = (clusters.unsqueeze(2) == clusters.unsqueeze(1)) & kept.unsqueeze(2) & kept.unsqueeze(1)
        size = same.sum(2)
        # A single response agrees with itself alone: there is nobody to differ from.
        agree = (size > 1).any(1, keepdim=True) | (kept.sum(1, keepdim=True) == 1)
        share = size / kept.sum(1, keepdim=True).clamp(min=1)
        share = torch.where(agree & rollouts.answered.bool(), share, 0).to(rollouts.rewards.dtype)
        return share.masked_fill(~kept, torch.nan)


@dataclass(frozen=True, kw_only=True)
class ReferenceBonus(RewardStage):
    """GRPO-CARE: right responses whose answer a slowly moving reference model finds likely earn more.

    Accurate is acc > 0.1 and acc >= mean acc; the confidence is min(exp(mean log p_ref of the answer's tokens), 0.95).
    An accurate response with confidence >= mean over accurate ones - ``margin`` earns ``coefficient`` * acc more. acc
    is in [0, 1], and the bonus in the rewards' unit: acc = 1 earns ``coefficient`` times the width of the range.
    """

    OPTIONS = ("coefficient", "margin", "cap")
    coefficient: float = 0.5
    margin: float = 0.01
    cap: float = 0.95

    reads = frozenset({"ref_logps", "answer_mask", "mask"})
    direction = "rewards right answers that the reference finds likely"
    judges = True

    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "B G"]:
        accuracy = rollouts.correctness
        known = judged(rollouts)
        accurate = known & (accuracy > 0.1) & (deviations(accuracy, known) >= -ROUNDING)
        tokens = rollouts.mask.bool() & rollouts.answer_mask.bool()
        confidence = mean(rollouts.ref_logps, tokens).squeeze(-1).exp().clamp(max=self.cap)
        accurate &= tokens.any(-1)
        likely = accurate & (confidence >= mean(confidence, accurate) - self.margin)
        low, high = rollouts.reward_range
        bonus = self.coefficient * accuracy * (high - low)
        return rollouts.rewards + torch.where(likely, bonus, 0)


@dataclass(frozen=True, kw_only=True)
class AgreementBonus(RewardStage):
    """GRPO-CARE as GCPO describes it: a right response earns ``coefficient`` * acc more if its mean cosine with the
    other responses is at or above the group's mean. An adaptation: the published method compares no responses."""

    OPTIONS = ("coefficient",)
    coefficient: float = 0.5

    reads = frozenset({"embeddings"})
    direction = "rewards right answers that agree with the group"
    judges = True

    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "B G"]:
        kept = rollouts.scorable
        unit = torch.nn.functional.normalize(rollouts.embeddings, dim=-1)
        others = kept.unsqueeze(1) & ~torch.eye(rollouts.group_size, dtype=torch.bool, device=unit.device)
        agreement = mean(unit @ unit.mT, others).squeeze(-1)
        agree = right(rollouts) & (deviations(agreement, kept) >= -ROUNDING)
        low, high = rollouts.reward_range
        bonus = self.coefficient * rollouts.correctness * (high - low)
        return rollouts.rewards + torch.where(agree, bonus, 0)


@dataclass(frozen=True, kw_only=True)
class OverlongPenalty(RewardStage):
    """DAPO's soft overlong punishment: falls from 0 to -1 over the last ``share`` of the allowed length, times half of
    the rewards' range (its rewards are -1 and 1). Groups without reward variance are left as they are: DAPO drops them.
    """

    OPTIONS = ("share",)
    share: float = 0.2  # 4096 of 20480 tokens

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}, expected a share of the allowed length, above 0 and at most 1.")

    reads = frozenset({"mask"})
    direction = "penalises long responses"

    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "B G"]:
        longest = rollouts.max_completion_length or rollouts.mask.shape[-1]
        room = self.share * longest
        length = rollouts.mask.bool().sum(-1).to(rollouts.rewards.dtype)
        penalty = ((longest - room - length) / room).clamp(-1, 0)
        low, high = rollouts.reward_range
        varied = deviations(rollouts.rewards, rollouts.scorable).ne(0).any(1, keepdim=True)
        return rollouts.rewards + torch.where(varied, penalty * (high - low) / 2, 0)
