"""Five rules of other papers as methods of this package, each in a few lines: how to add one of your own.

A method is an entry of the dict ``METHODS``. Once it is there, `weights`, `advantages`, `weight_range` and the trainer
know it: `import more_methods` before `GCPOConfig(method="steer")`. No run of this repository used these.
`python examples/more_methods.py` shows what they make of one group of answers.

- A base with other settings of TRL alone: GSPO, the 80/20 rule.
- A rule for rewards (`RewardStage`): DRA-GRPO, GRPO-S.
- A weight (`Factor`), here of tokens and inside the loss: STEER.

NSR, W-REINFORCE, GTPO and UCAS are not here: they put advantages of their own in the place of GRPO's, by which a weight
or a rule for rewards cannot be told. What the papers leave open is in the docstrings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gcpo.masked import deviations, mean
from gcpo.methods import METHODS, Method, advantages, is_correct
from gcpo.methods.components import Factor, RewardStage, is_graded
from gcpo.methods.reward import OverlongPenalty
from gcpo.rollouts import Rollouts

NO_ENTROPY = 1e-8  # added to every entropy before it is divided by (GTPO)


@dataclass(frozen=True, kw_only=True)
class DiversityDiscount(RewardStage):
    """DRA-GRPO: r over the sum of the response's cosines with all of the group, itself among them, which is 1 + the
    graph cut. Cosines below 0 count as 0, as a graph cut has no other. The paper compares whole completions."""

    kind = "DiversityDiscount"
    reads = frozenset({"embeddings"})
    direction = "rewards responses unlike the others"

    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "B G"]:
        unit = torch.nn.functional.normalize(rollouts.embeddings, dim=-1).to(rollouts.rewards.dtype)
        others = rollouts.scorable.unsqueeze(1) & ~torch.eye(rollouts.group_size, dtype=torch.bool, device=unit.device)
        return rollouts.rewards / (1 + torch.where(others, (unit @ unit.mT).clamp(min=0), 0).sum(2))


@dataclass(frozen=True, kw_only=True)
class EntropyReward(RewardStage):
    """GRPO-S: a right response gets r = 1 + ``bonus`` * u, a wrong one -1 - ``bonus`` * u, with u its mean entropy, or
    of a wrong one the inverse, over the mean of its kind in the group. Right is above the middle of the range. Groups
    without reward variance are left as they are: DAPO, on which GRPO-S is built, drops them. From two independent
    descriptions of Eq. 9 to 11, as no code of the authors is public."""

    kind = "EntropyReward"
    OPTIONS = NOT_NEGATIVE = ("bonus",)
    bonus: float = 0.1

    reads = frozenset({"entropies", "mask"})
    direction = "rewards unsure responses that are right, penalises sure ones that are wrong"
    needs_correctness = True

    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "B G"]:
        graded, right, tokens = is_graded(rollouts), is_correct(rollouts), rollouts.mask.bool()
        entropy = mean(rollouts.entropies, tokens).squeeze(-1).clamp(min=0) + NO_ENTROPY
        share = torch.zeros_like(entropy)
        for kind, value in ((right, entropy), (~right, 1 / entropy)):
            said = kind & graded & tokens.any(-1)
            share = torch.where(said, value / mean(value, said).clamp(min=NO_ENTROPY), share)
        shaped = torch.where(right, 1.0, -1.0) * (1 + self.bonus * share)
        varied = deviations(rollouts.rewards, graded).ne(0).any(1, keepdim=True)
        return torch.where(varied, shaped, rollouts.rewards).masked_fill(~graded, torch.nan)


@dataclass(frozen=True, kw_only=True)
class EntropyChange(Factor):
    """STEER: w = exp(-k |Omega|), with Omega = A rho (1 - pi) (log pi + H) the change of the entropy H that a token's
    update makes, to first order; rho = pi / pi_old, under the current policy.

    k makes the token that changes most weigh ``lowest``: k = -log(``lowest``) / max |Omega| of the batch, or less where
    none changes by 0.02 (``floor``). As its released code; 0.7 is ``lowest`` of the paper's fourth version. Its clip at
    0.28 above 1 is not the rule's: set ``epsilon_high``.
    """

    kind = "EntropyChange"
    OPTIONS = ("lowest", "floor")
    NOT_NEGATIVE, SHARES = ("floor",), ("lowest",)
    stage = "loss"
    granularity = "token"
    weight: str = "w_steer"
    measure: str = "entropy_change"
    lowest: float = 0.8
    floor: float = 0.02

    reads = frozenset({"logps", "ratios", "entropies", "mask"})
    direction = "damps tokens that change the entropy most"

    def bounds(self, group_size: int) -> tuple[float, float]:
        return self.lowest, 1.0

    def columns(self, rollouts: Rollouts, base: Float[Tensor, "B G"]) -> dict[str, Tensor]:
        kept = rollouts.mask.bool() & rollouts.scorable.unsqueeze(-1)
        logps = torch.where(kept, rollouts.logps + rollouts.ratios.log(), 0)
        slope = -logps.expm1() * (logps + rollouts.entropies) * rollouts.ratios
        change = torch.where(kept, base.unsqueeze(-1) * slope, 0)
        most = change.abs().amax().clamp(min=self.floor)
        return {self.measure: change, self.weight: (math.log(self.lowest) * change.abs() / most).exp()}


# The ratio and the clip of whole responses (GSPO, section 5.1); it equals GRPO unless num_iterations is above 1.
WHOLE = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}

METHODS |= {
    "gspo": Method(paper="GSPO", rule="ratio and clip, 3e-4 and 4e-4, of whole responses", acts="base", trl=WHOLE),
    "top_entropy": Method(
        paper="80/20 rule",
        rule="dapo on the 20 % of tokens with the largest entropy",
        acts="base",
        base="dapo",
        reward=OverlongPenalty(),
        drops_equal=True,
        trl={"top_entropy_quantile": 0.2},
    ),
    "dra_grpo": Method(
        paper="DRA-GRPO", rule="r / (sum of cosines with the group)", acts="reward", reward=DiversityDiscount()
    ),
    "grpo_s": Method(
        paper="GTPO",
        rule="r = +-(1 + 0.1 u), u = mean H or its inverse over its mean",
        acts="reward",
        reward=EntropyReward(),
        trl={"epsilon_high": 0.28},
    ),
    "steer": Method(
        paper="STEER", rule="exp(-k |A rho (1 - pi) (log pi + H)|)", acts="loss", factors=(EntropyChange(),)
    ),
}


def main() -> None:
    """Print the advantages of one group: three right answers, of which two are alike, and a wrong one."""
    group = Rollouts(
        torch.tensor([[2.0, 2.0, 2.0, 0.0]]),
        embeddings=torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]]),
        logps=torch.tensor([[[-0.1, -0.4], [-0.7, -0.2], [-0.1, -0.3], [-1.6, -1.2]]]),
        entropies=torch.tensor([[[0.4, 0.9], [1.2, 0.6], [0.4, 0.8], [1.3, 1.5]]]),
        ratios=torch.ones(1, 4, 2),
        mask=torch.ones(1, 4, 2),
    )
    for name in ("grpo", "dra_grpo", "grpo_s", "steer"):
        found = advantages(name, group)
        shown = found.mean(2) if found.ndim == 3 else found
        print(f"{name:9s}", *(f"{a:+.3f}" for a in shown[0].tolist()))


if __name__ == "__main__":
    main()
