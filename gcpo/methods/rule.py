"""Rules with advantages of their own, for which a weight on the base advantages would not do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gcpo.masked import deviations
from gcpo.methods.components import AdvantageRule, is_correct, is_graded
from gcpo.methods.reward import entropy_shaped
from gcpo.rollouts import Rollouts


@dataclass(frozen=True, kw_only=True)
class SampleReinforcement(AdvantageRule):
    """REINFORCE on right and wrong (Zhu et al. 2025): A = ``positive`` for a right response and -1 for a wrong one,
    without a baseline: 0 is NSR, negative samples alone, and 0.1 W-REINFORCE."""

    kind = "SampleReinforcement"
    OPTIONS = NOT_NEGATIVE = ("positive",)
    positive: float = 0.1

    reads: ClassVar[frozenset[str]] = frozenset()
    direction = "pushes wrong responses down, right ones little or not up"
    needs_correctness = True

    def __call__(self, rollouts: Rollouts, base: Float[Tensor, "B G"]) -> Float[Tensor, "B G"]:
        known = torch.where(is_correct(rollouts), self.positive, -1.0).to(base.dtype)
        return torch.where(is_graded(rollouts), known, 0)


@dataclass(frozen=True, kw_only=True)
class EntropyShaping(AdvantageRule):
    """GTPO: rewards of tokens, +-(1 + ``bonus`` * u) with u of the token's entropy (:func:`entropy_shaped`), less their
    mean over the group's tokens, over their deviation. Groups without reward variance have none, as DAPO drops them.
    """

    kind = "EntropyShaping"
    OPTIONS = NOT_NEGATIVE = ("bonus",)
    granularity = "token"
    bonus: float = 0.1

    reads = frozenset({"entropies", "mask"})
    direction = "boosts unsure tokens of right responses, and sure ones of wrong responses"
    needs_correctness = True

    def __call__(self, rollouts: Rollouts, base: Float[Tensor, "B G"]) -> Float[Tensor, "B G T"]:
        said = rollouts.mask.bool() & is_graded(rollouts).unsqueeze(-1)
        shaped = entropy_shaped(rollouts, rollouts.entropies, rollouts.mask.bool(), self.bonus).to(base.dtype)
        gain = deviations(shaped, said, (1, 2))
        squares, count = gain.square().sum((1, 2), keepdim=True), said.sum((1, 2), keepdim=True)
        varied = deviations(rollouts.rewards, is_graded(rollouts)).ne(0).any(1).view(-1, 1, 1)
        return torch.where(varied, gain / ((squares / (count - 1).clamp(min=1)).sqrt() + 1e-4), 0)


@dataclass(frozen=True, kw_only=True)
class UncertaintyShaping(AdvantageRule):
    """UCAS: A_i exp(-``unsure`` z_i) where A_i > 0, else A_i exp(``sure`` z_i); less ``penalty`` * l_it for each token,
    which makes no advantage above 0 one below it.

    z_i is the self-certainty of the response, the sum over its tokens of log sum exp(logits) - mean(logits), less its
    mean over the group, over its deviation (n - 1). l_it is the token's own logit, from 0 to 1 between the lowest and
    the highest of the batch; 1/2 where all are equal.
    """

    kind = "UncertaintyShaping"
    OPTIONS = NOT_NEGATIVE = ("unsure", "sure", "penalty")
    granularity = "token"
    unsure: float = 0.25
    sure: float = 0.35
    penalty: float = 0.05

    reads = frozenset({"certainties", "token_logits", "mask"})
    direction = "boosts unsure right responses and sure wrong ones; damps tokens of large logits"

    def __call__(self, rollouts: Rollouts, base: Float[Tensor, "B G"]) -> Float[Tensor, "B G T"]:
        valid = rollouts.scorable
        said = rollouts.mask.bool() & valid.unsqueeze(-1)
        certainty = deviations(torch.where(said, rollouts.certainties, 0).sum(-1), valid)
        count, squares = valid.sum(1, keepdim=True), certainty.square().sum(1, keepdim=True)
        z = certainty / ((squares / (count - 1).clamp(min=1)).sqrt() + 1e-6)
        weighed = (base * torch.where(base > 0, -self.unsure * z, self.sure * z).exp()).unsqueeze(-1)
        shaped = weighed - self.penalty * self._level(rollouts.token_logits, said)
        return torch.where(said, torch.where(weighed > 0, shaped.clamp(min=0), shaped), 0).to(base.dtype)

    @staticmethod
    def _level(logits: Float[Tensor, "B G T"], said: Bool[Tensor, "B G T"]) -> Float[Tensor, "B G T"]:
        """Return logits between the lowest and the highest that counts."""
        if not said.any():
            return torch.zeros_like(logits)
        low, high = logits[said].min(), logits[said].max()
        return torch.where(high > low, (logits - low) / (high - low + 1e-6), 0.5)
