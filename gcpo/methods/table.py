"""Every method, one declarative row each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from gcpo.methods import group
from gcpo.methods.components import Component, Factor, RewardStage
from gcpo.methods.own import source
from gcpo.methods.response import EntropyFactor, RatioVariance
from gcpo.methods.reward import AgreementBonus, ClusterShare, OverlongPenalty, ReferenceBonus
from gcpo.methods.token import CovarianceClip, CovarianceKernel, CovariancePenalty
from gcpo.papers import Paper, cited

# Settings of TRL's GRPOConfig for each base advantage, unless the user sets others.
BASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "scale_rewards": "group"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "scale_rewards": "group", "epsilon_high": 0.28},
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the table of methods.

    Attributes:
        paper: where the rule is from; the papers' names are ``shorthand`` in ``gcpo/papers.bib``, apart by "; ", the
            one whose rule it is first.
        rule: the rule in one line.
        acts: "base", "reward" (before advantages are normalised), "advantage" or "loss".
        factors: weights whose product multiplies the advantages.
        reward: the rule that changes rewards.
        penalty: a term of the loss beside the advantages.
        base: the base advantage, a key of :data:`BASES`.
        trl: further settings of TRL's GRPOConfig that the method needs.
        drops_equal: groups without reward variance leave the loss's token count.
        shuffle: of a control that hands groups the weights of others, which: "both" of GCPO's factors, "geo" or "rd".
        seed: of the permutation.
        power: of a control whose weights depart further from 1: that to which the product of weights is raised.
    """

    paper: str
    rule: str
    acts: Literal["base", "reward", "advantage", "loss"] = "advantage"
    factors: tuple[Factor, ...] = ()
    reward: RewardStage | None = None
    penalty: CovariancePenalty | None = None
    base: str = "grpo"
    trl: Mapping[str, Any] = field(default_factory=dict)
    drops_equal: bool = False
    shuffle: Literal["both", "geo", "rd"] | None = None
    seed: int = 0
    power: float = 1.0

    @property
    def papers(self) -> tuple[Paper, ...]:
        """Return the papers that the method is from, as far as they are known."""
        return cited(self.paper)

    @property
    def permuted(self) -> bool:
        """Return True for a control that hands groups the weights of other groups."""
        return self.shuffle is not None

    @property
    def components(self) -> tuple[Component, ...]:
        """Return the rule for rewards, the factors and the penalty, as far as the method has them."""
        return tuple(one for one in (self.reward, *self.factors, self.penalty) if one is not None)

    @property
    def reads(self) -> frozenset[str]:
        """Return the names of the features that the method reads beside rewards."""
        return frozenset().union(*(one.reads for one in self.components))

    @property
    def granularity(self) -> Literal["group", "response", "token"]:
        """Return the finest unit with its own weight; bases and reward rules act on responses."""
        units = {factor.granularity for factor in self.factors} | ({"token"} if self.penalty else set())
        return next((unit for unit in ("token", "response", "group") if unit in units), "response")

    @property
    def direction(self) -> str:
        """Return a short phrase for the method's effect on advantages."""
        if self.permuted:
            return "moves weights to other groups"
        return "; ".join(dict.fromkeys(one.direction for one in self.components))

    @property
    def reads_range(self) -> bool:
        """Return True if a component measures rewards by the range that they can reach."""
        return any(one.reads_range for one in self.components)

    @property
    def needs_correctness(self) -> bool:
        """Return True if a component reads the correctness of responses."""
        return any(one.needs_correctness for one in self.components)

    @property
    def negative_reinforcement(self) -> bool:
        """Return True if groups without a correct response get A = -1 (EGPO, Eq. 13)."""
        return any(one.negative_reinforcement for one in self.components)

    def needs_entailment(self, full_completion: bool) -> bool:
        """Return True if the method needs an entailment model; the task's clusters of full completions do not."""
        kinds = {one.clusters for one in self.components}
        return "nli" in self.reads or "greedy" in kinds or ("task" in kinds and not full_completion)

    @property
    def needs_off_policy_steps(self) -> bool:
        """Return True if a component acts by the ratios pi / pi_old alone."""
        return any(one.needs_off_policy_steps for one in self.components)

    @property
    def in_loss(self) -> bool:
        """Return True if a component reads the ratios of each optimiser step."""
        return self.penalty is not None or any(factor.stage == "loss" for factor in self.factors)

    def constants(self) -> dict[str, Any]:
        """Return every constant of the method, in values that JSON can hold."""
        parts = [{"part": one.kind, **asdict(one)} for one in self.components]
        named = {key: getattr(self, key) for key in ("alpha", "base", "trl", "drops_equal", "shuffle", "seed", "power")}
        text = json.dumps({"parts": parts, **named}, default=source)  # a function of one's own
        return json.loads(text, parse_constant=str)  # JSON has no infinity

    @property
    def alpha(self) -> float | None:
        """Return the alpha_base that all group factors share, or None."""
        alphas = {factor.alpha for factor in self.factors if isinstance(factor, group.GroupFactor)}
        return alphas.pop() if len(alphas) == 1 else None

    def clipped(self, epsilon: float, epsilon_high: float | None) -> Method:
        """Return the same method with the loss's own clip of the ratio, below and above 1, in the parts that ask
        (``clip_cov``)."""
        clip = epsilon, epsilon if epsilon_high is None else epsilon_high
        own = (replace(part, clip=clip) if isinstance(part, CovarianceClip) else part for part in self.factors)
        return replace(self, factors=tuple(own))

    def moved(self, end: float, share: float) -> Method:
        """Return the method with every alpha this share of the way to another."""
        every: Any = self.factors
        own = (replace(p, alpha=p.alpha + share * (end - p.alpha)) if p.has_alpha else p for p in every)
        return replace(self, factors=tuple(own))

    def seeded(self, seed: int) -> Method:
        """Return the method with another seed of its random draws: tokens (``clip_cov``) or the permutation of groups
        (``gcpo_shuffled``)."""
        return replace(self, seed=seed, factors=tuple(factor.seeded(seed) for factor in self.factors))


SE = group.SemanticEntropy()
SEED = group.SemanticEntropy(clusters="exact", estimator="rao", form="reciprocal", alpha=0.0417)
KLE, CD, BOT = group.KernelEntropy(), group.CosineDispersion(), group.BarycentricTransport()
RD, VARIANCE, HALF = group.RewardDispersion(), group.RewardVariance(), group.RandomHalf()

WRONG_CLAMP, CORRECT_CLAMP, JOINT_CLAMP = (0.8, 1.0), (1.0, 2.0), (0.8, 2.0)  # EGPO's bounds of a weight
EGPO = EntropyFactor(correct=CORRECT_CLAMP, wrong=WRONG_CLAMP, all_wrong="weighted", epsilon=1e-5)


def _egpo(rule: str, **changes: Any) -> Method:
    return Method(paper="EGPO, Table 2", rule=rule, factors=(replace(EGPO, **changes),))


# fmt: off
METHODS: dict[str, Method] = {
    # base advantages
    "grpo": Method(paper="GRPO (DeepSeekMath)", rule="A = (r - mean r) / (std r + 1e-4)", acts="base"),
    "dr_grpo": Method(paper="Dr. GRPO", rule="A = r - mean r; constant length normaliser", acts="base", base="dr_grpo"),
    "dapo": Method(paper="DAPO", rule="clip 0.2/0.28, token mean, overlong penalty; equal groups masked, not replaced",
                   acts="base", base="dapo", reward=OverlongPenalty(), drops_equal=True),
    # a weight per group
    "se": Method(paper="Semantic entropy; GCPO, Table 1", rule="clip(1 - alpha_G SE, 0, 1)", factors=(SE,)),
    "seed_grpo": Method(paper="SEED-GRPO", rule="1 / (1 + alpha_G SE_rao), exact answers, on dr_grpo", factors=(SEED,),
                        base="dr_grpo"),
    "kle": Method(paper="KLE; GCPO, Table 1", rule="clip(1 - alpha_G VNE, 0, 1)", factors=(KLE,)),
    "cd_only": Method(paper="GCPO, Eq. 8", rule="clip(1 - alpha_G CD^2, 0, 1)", factors=(CD,)),
    "bot_only": Method(paper="GCPO, section 3.2", rule="clip(1 - alpha_G BoT^2, 0, 1)", factors=(BOT,)),
    "rd_only": Method(paper="GCPO, Eq. 11", rule="1 + alpha_G RD", factors=(RD,)),
    "gcpo_cd": Method(paper="GCPO, section 3.4", rule="omega_CD omega_RD", factors=(CD, RD)),
    "gcpo_bot": Method(paper="GCPO, section 3.4", rule="omega_BoT omega_RD", factors=(BOT, RD)),
    "gcpo_shuffled": Method(paper="GCPO (our control)", rule="gcpo_bot's weights, permuted across groups",
                            factors=(BOT, RD), shuffle="both"),
    "qhawkeye": Method(paper="Q-Hawkeye; GCPO, App. G", rule="1 - alpha Var(r) / (range/2)^2", factors=(VARIANCE,)),
    # controls: weights that a test of weights has to see
    "gcpo_strong": Method(paper="GCPO (our control)", rule="gcpo_bot's weights to the power of 16", factors=(BOT, RD),
                          power=16.0),
    "se_shuffled": Method(paper="GCPO (our control)", rule="se's weights, permuted across groups", factors=(SE,),
                          shuffle="both"),
    "drop_half": Method(paper="GCPO (our control)", rule="0 for a random half of the groups", factors=(HALF,)),
    # a rule for rewards
    "empo": Method(paper="EMPO", rule="r = share of the response's cluster", acts="reward", reward=ClusterShare()),
    "care": Method(paper="GRPO-CARE", rule="bonus for right answers that an EMA reference finds likely", acts="reward",
                   reward=ReferenceBonus(), trl={"sync_ref_model": True, "ref_model_sync_steps": 10,
                                                 "ref_model_mixup_alpha": 0.005}),
    "care_agreement": Method(paper="GCPO, App. E.2; GRPO-CARE", acts="reward", reward=AgreementBonus(),
                             rule="bonus for right answers that agree with the group"),
    # a weight per response
    "egspo": Method(paper="EG-SPO; GCPO, App. G", rule="clip(H / mean H, 0.5, 1), Shannon", factors=(
        EntropyFactor(signal="shannon", inverse=False, correct=(0.5, 1.0), wrong=(0.5, 1.0)),)),
    "edge_grpo": Method(paper="EDGE-GRPO", rule="mean H / H, Shannon; no error correction", factors=(
        EntropyFactor(signal="shannon"),)),
    "egpo": Method(paper="EGPO", rule="mean H / H, NLL; right in [1, 2], wrong in [0.8, 1]; A = -1 if all wrong",
                   factors=(EGPO,)),
    "egpo_c1": _egpo("egpo with one clamp [0.8, 2] for all", correct=JOINT_CLAMP, wrong=JOINT_CLAMP),
    "egpo_c2": _egpo("egpo, only wrong responses bounded by 1", correct=JOINT_CLAMP),
    "egpo_c3": _egpo("egpo, only right responses bounded by 1", wrong=JOINT_CLAMP),
    "egpo_c4": _egpo("egpo, weight 1 if all wrong", all_wrong="locked"),
    "egpo_c5": _egpo("egpo, divided by the group's mean weight", renorm="after"),
    "egpo_c6": _egpo("egpo, divided by the group's mean before the clamp", renorm="before"),
    "r2vpo": Method(paper="R2VPO; GCPO, App. G", rule="1 / (1 + Var_t rho)", acts="loss", factors=(RatioVariance(),)),
    # a weight per token
    "cw_grpo": Method(paper="CW-GRPO", rule="exp(-c^2 / 2 sigma^2), mean 1 per group", factors=(CovarianceKernel(),)),
    "clip_cov": Method(paper="Cui et al. 2025", rule="2e-4 of the tokens dropped, covariance in (1, 5)", acts="loss",
                       factors=(CovarianceClip(),)),
    "kl_cov": Method(paper="Cui et al. 2025", rule="KL penalty on the 2e-3 of tokens with the largest covariance",
                     acts="loss", penalty=CovariancePenalty()),
}
# fmt: on
