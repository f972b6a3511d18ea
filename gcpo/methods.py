"""Every method, one declarative row each, and the two functions that apply a row to rollouts."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from gcpo import measures
from gcpo.factors import (
    AgreementBonus,
    ClusterShare,
    CovarianceClip,
    CovarianceKernel,
    CovariancePenalty,
    EntropyFactor,
    Factor,
    GroupFactor,
    OverlongPenalty,
    RatioVariance,
    ReferenceBonus,
    RewardStage,
    deviations,
    entirely_wrong,
    judged,
    likelihoods,
)
from gcpo.rollouts import Rollouts

# What each base advantage sets in TRL's GRPOConfig, unless the user does.
BASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "scale_rewards": "group"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "scale_rewards": "group", "epsilon_high": 0.28},
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the table of methods, or the product of several.

    Attributes:
        paper: where the rule is from.
        rule: the rule in one line.
        acts: "base", "reward" (before advantages are normalised), "advantage" or "loss".
        factors: weights whose product multiplies the advantages.
        reward: the rule that changes rewards.
        penalty: a term of the loss beside the advantages.
        base: the base advantage, a key of :data:`BASES`.
        trl: further settings of TRL's GRPOConfig that the method needs.
        drops_equal: groups without reward variance leave the loss's token count.
        permuted: a control that hands each group the weight of another group.
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
    permuted: bool = False

    @property
    def parts(self) -> tuple[Factor | RewardStage | CovariancePenalty, ...]:
        """Everything it is made of."""
        return tuple(part for part in (self.reward, *self.factors, self.penalty) if part is not None)

    @property
    def reads(self) -> frozenset[str]:
        """The features of the rollouts it needs beside rewards."""
        return frozenset().union(*(part.reads for part in self.parts))

    @property
    def granularity(self) -> Literal["group", "response", "token"]:
        """The finest thing it tells apart; a base and a reward are the response's."""
        finest = {factor.granularity for factor in self.factors} | ({"token"} if self.penalty else set())
        return next((g for g in ("token", "response", "group") if g in finest), "response")

    @property
    def direction(self) -> str:
        """What it makes smaller or larger."""
        if self.permuted:
            return "moves weights to other groups"
        return "; ".join(dict.fromkeys(part.direction for part in self.parts))

    @property
    def judges(self) -> bool:
        """Whether it needs to know which responses are right."""
        return any(getattr(part, "judges", False) for part in self.parts)

    def entails(self, mathematics: bool) -> bool:
        """Whether it asks an entailment model; clusters "as the task does it" do so where it is not mathematics."""
        kinds = {getattr(part, "clusters", None) for part in self.parts}
        return "nli" in self.reads or "nli" in kinds or ("task" in kinds and not mathematics)

    @property
    def in_loss(self) -> bool:
        """Whether it acts on the ratios of each optimiser step."""
        return self.penalty is not None or any(factor.stage == "loss" for factor in self.factors)


SE = GroupFactor(
    measure="se",
    weight="w_se",
    score=lambda r, f: _semantic_entropy(r, f),
    highest=math.log,
    features=frozenset({"clusters"}),
    clusters="nli",
    estimator="counts",
)
SEED = dataclasses.replace(SE, clusters="exact", estimator="rao", form="reciprocal", alpha=0.0417)
KLE = GroupFactor(
    measure="kle",
    weight="w_kle",
    score=lambda r, f: measures.kernel_language_entropy(r.nli, mask=r.scorable),
    highest=math.log,
    features=frozenset({"nli"}),
)
CD = GroupFactor(
    measure="u_geo",
    weight="w_geo",
    score=lambda r, f: measures.cosine_dispersion(r.embeddings, mask=r.scorable),
    highest=lambda g: 1 - 1 / g,
    features=frozenset({"embeddings"}),
    form="square",
)
BOT = GroupFactor(
    measure="u_geo",
    weight="w_geo",
    score=lambda r, f: measures.barycentric_transport(r.embeddings, r.clusters_as(f.clusters), mask=r.scorable),
    highest=lambda g: 0.5,
    features=frozenset({"embeddings", "clusters"}),
    clusters="nli",
    form="square",
)
RD = GroupFactor(
    measure="rd",
    weight="w_rd",
    score=lambda r, f: measures.reward_dispersion(r.rewards, r.reward_range),
    highest=lambda g: 1.0,
    form="boost",
)
VARIANCE = GroupFactor(
    measure="reward_variance",
    weight="w_variance",
    score=lambda r, f: measures.reward_variance(r.rewards, r.reward_range),
    highest=lambda g: 1.0,
    alpha=0.2,
    per_log_g=False,
)

CALM, BOLD, BOTH = (0.8, 1.0), (1.0, 2.0), (0.8, 2.0)  # EGPO's bounds of a weight
EGPO = EntropyFactor(correct=BOLD, wrong=CALM, all_wrong="weighted", epsilon=1e-5)


def _egpo(rule: str, **changes: Any) -> Method:
    return Method(paper="EGPO, Table 2", rule=rule, factors=(dataclasses.replace(EGPO, **changes),))


# fmt: off
METHODS: dict[str, Method] = {
    # base advantages
    "grpo": Method(paper="GRPO (DeepSeekMath)", rule="A = (r - mean r) / (std r + 1e-4)", acts="base"),
    "dr_grpo": Method(paper="Dr. GRPO", rule="A = r - mean r; constant length normaliser", acts="base", base="dr_grpo"),
    "dapo": Method(paper="DAPO", rule="clip 0.2/0.28, token mean, overlong penalty; equal groups masked, not replaced",
                   acts="base", base="dapo", reward=OverlongPenalty(), drops_equal=True),
    # a weight per group
    "se": Method(paper="GCPO, Table 1", rule="clip(1 - alpha_G SE, 0, 1)", factors=(SE,)),
    "seed_grpo": Method(paper="SEED-GRPO", rule="1 / (1 + alpha_G SE_rao), exact answers, on dr_grpo", factors=(SEED,),
                        base="dr_grpo"),
    "kle": Method(paper="GCPO, Table 1", rule="clip(1 - alpha_G VNE, 0, 1)", factors=(KLE,)),
    "cd_only": Method(paper="GCPO, Eq. 8", rule="clip(1 - alpha_G CD^2, 0, 1)", factors=(CD,)),
    "bot_only": Method(paper="GCPO, section 3.2", rule="clip(1 - alpha_G BoT^2, 0, 1)", factors=(BOT,)),
    "rd_only": Method(paper="GCPO, Eq. 11", rule="1 + alpha_G RD", factors=(RD,)),
    "gcpo_cd": Method(paper="GCPO, section 3.4", rule="omega_CD omega_RD", factors=(CD, RD)),
    "gcpo_bot": Method(paper="GCPO, section 3.4", rule="omega_BoT omega_RD", factors=(BOT, RD)),
    "gcpo_shuffled": Method(paper="our control", rule="gcpo_bot's weights, permuted across groups", factors=(BOT, RD),
                            permuted=True),
    "qhawkeye": Method(paper="GCPO, App. G", rule="1 - alpha Var(r) / (range/2)^2", factors=(VARIANCE,)),
    # a rule for rewards
    "empo": Method(paper="EMPO", rule="r = share of the response's cluster", acts="reward", reward=ClusterShare()),
    "care": Method(paper="GRPO-CARE", rule="bonus for right answers that an EMA reference finds likely", acts="reward",
                   reward=ReferenceBonus(), trl={"sync_ref_model": True, "ref_model_sync_steps": 10,
                                                 "ref_model_mixup_alpha": 0.005}),
    "care_agreement": Method(paper="GCPO, App. E.2", rule="bonus for right answers that agree with the group",
                             acts="reward", reward=AgreementBonus()),
    # a weight per response
    "egspo": Method(paper="GCPO, App. G", rule="clip(H / mean H, 0.5, 1), Shannon", factors=(
        EntropyFactor(signal="shannon", inverse=False, correct=(0.5, 1.0), wrong=(0.5, 1.0)),)),
    "edge_grpo": Method(paper="EDGE-GRPO", rule="mean H / H, Shannon; no error correction", factors=(
        EntropyFactor(signal="shannon"),)),
    "egpo": Method(paper="EGPO", rule="mean H / H, NLL; right in [1, 2], wrong in [0.8, 1]; A = -1 if all wrong",
                   factors=(EGPO,)),
    "egpo_c1": _egpo("egpo with one clamp [0.8, 2] for all", correct=BOTH, wrong=BOTH),
    "egpo_c2": _egpo("egpo, only wrong responses bounded by 1", correct=BOTH),
    "egpo_c3": _egpo("egpo, only right responses bounded by 1", wrong=BOTH),
    "egpo_c4": _egpo("egpo, weight 1 if all wrong", all_wrong="locked"),
    "egpo_c5": _egpo("egpo, divided by the group's mean weight", renorm="after"),
    "egpo_c6": _egpo("egpo, divided by the group's mean before the clamp", renorm="before"),
    "r2vpo": Method(paper="GCPO, App. G", rule="1 / (1 + Var_t rho)", acts="loss", factors=(RatioVariance(),)),
    # a weight per token
    "cw_grpo": Method(paper="CW-GRPO", rule="exp(-c^2 / 2 sigma^2), mean 1 per group", factors=(CovarianceKernel(),)),
    "clip_cov": Method(paper="Cui et al. 2025", rule="2e-4 of the tokens dropped, covariance in (1, 5)", acts="loss",
                       factors=(CovarianceClip(),)),
    "kl_cov": Method(paper="Cui et al. 2025", rule="KL penalty on the 2e-3 of tokens with the largest covariance",
                     acts="loss", penalty=CovariancePenalty()),
}
# fmt: on


def _semantic_entropy(rollouts: Rollouts, factor: GroupFactor) -> Float[Tensor, " B"]:
    clusters = rollouts.clusters_as(factor.clusters)
    if factor.estimator == "counts":
        return measures.semantic_entropy(clusters, mask=rollouts.scorable)
    logps, spoken = likelihoods(rollouts)
    estimator: Any = factor.estimator
    entropy = measures.semantic_entropy(clusters, logps, estimator=estimator, mask=rollouts.scorable & spoken)
    return entropy.clamp(min=0)  # the Monte-Carlo form is not bounded below, and a weight needs a score of at least 0


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the closest valid one, and all of them."""
    valid = list(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.4)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Valid names: {', '.join(valid)}."


def get_method(name: str | Sequence[str], **options: Any) -> Method:
    """The row of a method, or the product of several: ``"bot_only*egpo"``, or a list of names.

    Args:
        name: names in :data:`METHODS`.
        options: constants of its parts, by their names in ``gcpo.factors``; each goes to every part that has it.

    Raises:
        ValueError: unknown name (with the nearest valid one), a product that makes no sense, or an option that no part
            has.
    """
    names = [part.strip() for part in name.split("*")] if isinstance(name, str) else list(name)
    for part in names:
        if part not in METHODS:
            raise ValueError(f"Unknown method {part!r}.{nearest(str(part), METHODS)}")
    row = METHODS[names[0]] if len(names) == 1 else _product(names)
    return _with_options("*".join(names), row, options) if options else row


def _product(names: list[str]) -> Method:
    rows = [METHODS[name] for name in names]
    title = "*".join(names)

    def only_one(what: str, having: list[str], why: str) -> None:
        if len(having) > 1:
            raise ValueError(f"{title}: {' and '.join(having)} {what}, {why}; keep one of them.")

    if not names or len(set(names)) < len(names):
        raise ValueError(f"{title!r} is not a product of different methods.")
    if controls := [name for name, row in zip(names, rows, strict=True) if row.permuted]:
        raise ValueError(f"{title}: {controls[0]} is a control on its own; it permutes the weights of whole groups.")
    changing = [name for name, row in zip(names, rows, strict=True) if row.reward is not None]
    only_one("both change rewards", changing, "and the second would read what the first has made")
    bases = {row.base: name for name, row in zip(names, rows, strict=True) if row.base != "grpo" or name == "grpo"}
    only_one("have different base advantages", list(bases.values()), "of which an advantage has one")
    judging = [n for n, row in zip(names, rows, strict=True) if any(_all_wrong(f) != "none" for f in row.factors)]
    only_one("both set the advantage of an entirely wrong group", judging, "each in its own way")

    if judging and any(row.drops_equal for row in rows):
        raise ValueError(f"{title}: dapo drops the groups without reward variance that {judging[0]} reinforces.")

    factors: dict[str, Factor] = {}
    for name, row in zip(names, rows, strict=True):
        for factor in row.factors:
            if factor in factors.values():
                raise ValueError(f"{title}: {name} has the weight {factor.weight!r}, which another part has already.")
            taken = {column for other in factors.values() for column in (other.measure, other.weight)}
            if taken & {factor.measure, factor.weight}:  # BoT and CD are both "w_geo", two covariances "cov"
                factor = dataclasses.replace(
                    factor, measure=f"{factor.measure}_{name}", weight=f"{factor.weight}_{name}"
                )
            factors[factor.weight] = factor
    acts = [row.acts for row in rows]
    return Method(
        paper="; ".join(dict.fromkeys(row.paper for row in rows)),
        rule=" * ".join(row.rule for row in rows),
        acts=next(kind for kind in ("loss", "advantage", "reward", "base") if kind in acts),
        factors=tuple(factors.values()),
        reward=next((row.reward for row in rows if row.reward is not None), None),
        penalty=next((row.penalty for row in rows if row.penalty is not None), None),
        base=next(iter(bases), "grpo"),
        trl={key: value for row in rows for key, value in row.trl.items()},
        drops_equal=any(row.drops_equal for row in rows),
    )


def _all_wrong(factor: Factor) -> str:
    return getattr(factor, "all_wrong", "none")


def _with_options(title: str, row: Method, options: Mapping[str, Any]) -> Method:
    valid = [option for part in row.parts for option in part.OPTIONS if getattr(part, option) is not None]
    if unknown := set(options) - set(valid):
        name = min(unknown)
        hint = nearest(name, dict.fromkeys(valid)) if valid else " It has none."
        raise ValueError(f"{title} has no option {name!r}.{hint}")

    def changed(part: Any) -> Any:
        own = {key: value for key, value in options.items() if key in part.OPTIONS and getattr(part, key) is not None}
        own = {key: tuple(value) if isinstance(value, list) else value for key, value in own.items()}
        return dataclasses.replace(part, **own) if own else part

    return dataclasses.replace(
        row,
        factors=tuple(changed(factor) for factor in row.factors),
        reward=changed(row.reward) if row.reward else None,
        penalty=changed(row.penalty) if row.penalty else None,
    )


def permutation(size: int, seed: int) -> Tensor:
    """A seeded cyclic permutation of ``size`` groups, so that none keeps its own place.

    Raises:
        ValueError: fewer than two groups.
    """
    if size < 2:
        raise ValueError(
            "gcpo_shuffled permutes weights across the groups of a batch and needs at least 2 groups, "
            f"got {size}: put more prompts into the generation batch."
        )
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return torch.empty_like(order).scatter_(0, order, order.roll(1))


def base_advantages(
    rewards: Float[Tensor, "B G"], scale_rewards: Literal["group", "batch", "none"] = "group"
) -> Float[Tensor, "B G"]:
    """GRPO's advantage, (r - mean) / (std + 1e-4) with the n - 1 deviation (GCPO Eq. 1; epsilon as in TRL).

    ``scale_rewards``: the deviation of each group, of the whole batch, or no division ("none": Dr. GRPO's r - mean).
    NaN rewards take no part and get 0; a group with equal rewards, or with one scorable response, gets exactly 0.
    Raises ValueError for another ``scale_rewards``.
    """
    if scale_rewards not in ("group", "batch", "none"):
        raise ValueError(f'scale_rewards is {scale_rewards!r}, expected "group", "batch" or "none".')
    valid = ~rewards.isnan()
    deviation = deviations(rewards, valid)
    if scale_rewards == "none":
        return deviation
    if scale_rewards == "group":
        count, squares = valid.sum(1, keepdim=True), deviation.square().sum(1, keepdim=True)
    else:
        count, squares = valid.sum(), deviations(rewards, valid, (0, 1)).square().sum()
    return deviation / ((squares / (count - 1).clamp(min=1)).sqrt() + 1e-4)


class Modulation(NamedTuple):
    """What a method makes of a batch: base advantages A (B, G); the weight, (B, G) or (B, G, T); and the scores and
    weights of its factors by their columns in logs, (B,), (B, G) or (B, G, T)."""

    base: Tensor
    weight: Tensor
    columns: dict[str, Tensor]

    @property
    def advantages(self) -> Tensor:
        """A * weight, shaped like the weight."""
        return expand(self.base, self.weight.ndim) * self.weight


def expand(values: Tensor, ndim: int) -> Tensor:
    """A view with dimensions of size 1 at the end."""
    return values[(...,) + (None,) * (ndim - values.ndim)]


def modulate(
    row: Method,
    rollouts: Rollouts,
    base: Float[Tensor, "B G"] | None = None,
    *,
    alpha: float | None = None,
    seed: int = 0,
    equalize_mean: bool = False,
    scale_rewards: str | None = None,
    stages: Sequence[str] = ("advantage", "loss"),
) -> Modulation:
    """Apply a method to whole groups: the base advantages (computed unless given), and the product of its factors.

    Weights that are not finite are returned as they are. Arguments as in :func:`weights`; ``stages`` chooses factors.
    """
    if base is None:
        rewards = row.reward(rollouts) if row.reward else rollouts.rewards
        scale: Any = BASES[row.base]["scale_rewards"] if scale_rewards is None else scale_rewards
        base = base_advantages(rewards, scale)
    if "advantage" in stages and rollouts.group_size > 1 and any(_all_wrong(f) != "none" for f in row.factors):
        base = torch.where(entirely_wrong(rollouts) & judged(rollouts), -1, base)  # EGPO, Eq. 13
    columns: dict[str, Tensor] = {}
    weight = torch.ones_like(rollouts.rewards)
    for factor in row.factors:
        if factor.stage in stages:
            columns |= factor.columns(rollouts, base, alpha=alpha, seed=seed)
            own = columns[factor.weight].to(weight.dtype)
            ndim = max(weight.ndim, own.ndim)
            weight = expand(weight, ndim) * expand(own, ndim)
    if row.permuted:
        weight = weight[permutation(len(weight), seed).to(weight.device)]
    if equalize_mean:
        counted = rollouts.scorable if weight.ndim == 2 else rollouts.scorable.unsqueeze(-1) & rollouts.mask.bool()
        weight = weight / weight[counted].mean() if counted.any() else weight
    return Modulation(base, weight, columns)


def _finite(method: str | Sequence[str], row: Method, modulation: Modulation, seed: int) -> Modulation:
    broken = ~modulation.weight.isfinite()
    if broken.any():
        group = int(broken.flatten(1).any(1).nonzero()[0])
        group = int(permutation(len(broken), seed)[group]) if row.permuted else group  # whose weight it was
        reads = ", ".join(["rewards", *sorted(row.reads)])
        raise ValueError(f"{method}: the weight of group {group} is not finite; look at its features, {reads}.")
    return modulation


def weights(
    method: str | Sequence[str],
    rollouts: Rollouts,
    *,
    alpha: float | None = None,
    seed: int = 0,
    equalize_mean: bool = False,
    **options: Any,
) -> Float[Tensor, "B G"] | Float[Tensor, "B G T"]:
    """The factor that a method puts on each advantage; 1 for a base method and for one that acts on rewards.

    Args:
        method: a name in :data:`METHODS`, a product of names ("bot_only*egpo") or a list of them.
        rollouts: rewards and the features in ``get_method(method).reads``.
        alpha: alpha_base of the group factors (0.6 for GCPO's, 0.0417 for SEED-GRPO's, 0.2 for Q-Hawkeye's, which
            alone is not divided by log G); None: each factor's own. Other factors have none and do not read it.
        seed: of the permutation of ``gcpo_shuffled`` and of the tokens that ``clip_cov`` draws.
        equalize_mean: divide by the mean over the batch, so that methods differ in where they push and not in how far.
        options: constants of the method, such as ``form="linear"`` (see ``gcpo.factors``).

    Returns:
        (B, G), or (B, G, T) for a method that weighs tokens; within ``weight_range(method, alpha, G)`` unless
        equalised.

    Raises:
        ValueError: unknown method or option; one group for ``gcpo_shuffled``; a weight that is not finite (the trainer
            replaces such a weight by 1 and counts it).
        MissingFeatureError: a feature that the method reads was not given.
    """
    row = get_method(method, **options)
    if not row.factors:
        return torch.ones_like(rollouts.rewards)
    modulation = modulate(row, rollouts, alpha=alpha, seed=seed, equalize_mean=equalize_mean)
    weight = _finite(method, row, modulation, seed).weight
    return weight.clone() if rollouts.group_size > 1 else torch.ones_like(weight)


def advantages(
    method: str | Sequence[str],
    rollouts: Rollouts,
    *,
    alpha: float | None = None,
    seed: int = 0,
    equalize_mean: bool = False,
    scale_rewards: Literal["group", "batch", "none"] | None = None,
    **options: Any,
) -> Float[Tensor, "B G"] | Float[Tensor, "B G T"]:
    """The modulated advantage A~ = A * weight (GCPO, section 3.4), as the trainer uses it.

    A is computed from the rewards that the method's reward stage makes, and is -1 in the groups that EGPO's
    negative-sample reinforcement takes up. ``scale_rewards`` as in TRL; None: the method's own. Everything else as in
    :func:`weights`; no unit.
    """
    row = get_method(method, **options)
    modulation = modulate(
        row, rollouts, alpha=alpha, seed=seed, equalize_mean=equalize_mean, scale_rewards=scale_rewards
    )
    return _finite(method, row, modulation, seed).advantages
