"""Rules that change rewards before they are normalised to advantages."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gcpo.masked import deviations, mean
from gcpo.methods.components import ROUNDING, RewardStage, is_correct, is_graded
from gcpo.rollouts import Rollouts


@dataclass(frozen=True, kw_only=True)
class ClusterShare(RewardStage):
    """EMPO: r_i = the share of responses in i's cluster, whatever the task's reward says. A response without an answer
    gets 0, and so do all where no two agree (its entropy threshold)."""

    kind = "ClusterShare"
    OPTIONS = ("clusters",)
    clusters: str | None = "task"

    direction = "rewards the majority"

    @property
    def reads(self) -> frozenset[str]:
        return self.labels | {"answered"}

    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "B G"]:
        kept, clusters = rollouts.scorable, rollouts.cluster_labels(self.clusters)
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

    kind = "ReferenceBonus"
    reads_range = True
    OPTIONS = ("coefficient", "margin", "cap")
    NOT_NEGATIVE = ("coefficient", "margin")
    SHARES = ("cap",)
    coefficient: float = 0.5
    margin: float = 0.01
    cap: float = 0.95

    reads = frozenset({"ref_logps", "answer_mask", "mask"})
    direction = "rewards right answers that the reference finds likely"
    needs_correctness = True

    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "B G"]:
        accuracy = rollouts.correctness
        known = is_graded(rollouts)
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

    kind = "AgreementBonus"
    reads_range = True
    OPTIONS = NOT_NEGATIVE = ("coefficient",)
    coefficient: float = 0.5

    reads = frozenset({"embeddings"})
    direction = "rewards right answers that agree with the group"
    needs_correctness = True

    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "B G"]:
        kept = rollouts.scorable
        unit = torch.nn.functional.normalize(rollouts.embeddings, dim=-1)
        others = kept.unsqueeze(1) & ~torch.eye(rollouts.group_size, dtype=torch.bool, device=unit.device)
        agreement = mean(unit @ unit.mT, others).squeeze(-1)
        agree = is_correct(rollouts) & (deviations(agreement, kept) >= -ROUNDING)
        low, high = rollouts.reward_range
        bonus = self.coefficient * rollouts.correctness * (high - low)
        return rollouts.rewards + torch.where(agree, bonus, 0)


@dataclass(frozen=True, kw_only=True)
class OverlongPenalty(RewardStage):
    """DAPO's soft overlong punishment: falls from 0 to -1 over the last ``share`` of the allowed length, times half of
    the rewards' range (its rewards are -1 and 1). Groups without reward variance are left as they are: DAPO drops them.
    """

    kind = "OverlongPenalty"
    reads_range = True
    OPTIONS = SHARES = ("share",)
    share: float = 0.2  # 4096 of 20480 tokens

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
