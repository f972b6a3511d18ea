"""Applying methods to rollouts: the two functions users call, and what the trainer uses."""

import dataclasses
import inspect
import math
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from gcpo.errors import nearest, one_of
from gcpo.masked import deviations
from gcpo.methods.components import entirely_incorrect, is_graded
from gcpo.methods.forms import check_alpha
from gcpo.methods.own import OwnWeight, Weight, called, place, unpacked
from gcpo.methods.table import BASES, METHODS, Method
from gcpo.rollouts import Rollouts


def get_method(name: str | Method | Weight, *, alpha: float | None = None, seed: int = 0, **options: Any) -> Method:
    """Return a method's row with its constants.

    Args:
        name: a key of :data:`METHODS`, "package.module:name" of a method or function of one's own, or that itself. A
            function takes :class:`gcpo.rollouts.Rollouts` and returns weights of at least 0, of shape (B,), (B, G) or
            (B, G, T).
        alpha: alpha_base of the group factors; None: each factor's own. A method without group factors ignores it.
            The options ``alpha_geo`` (CD and BoT) and ``alpha_rd`` (RD) take precedence.
        seed: of the method's random draws (see :meth:`Method.seeded`).
        options: constants of its components, by their names in ``gcpo.methods``; each goes to every one that has it.

    Raises:
        ValueError: an unknown name or an option that no component has (with the nearest valid one), a value outside of
            its range, or an alpha that is negative or not finite.
    """
    row = METHODS[name] if isinstance(name, str) and name in METHODS else own_method(name)
    controls = ["shuffle"] * (row.permuted and len(row.factors) > 1) + ["power"] * (row.power != 1)
    valid = dict.fromkeys([option for one in row.components for option in one.OPTIONS] + controls)
    if unknown := options.keys() - valid.keys():
        wrong, own = min(unknown), called(name)
        raise ValueError(f"{own} has no option {wrong!r}.{nearest(wrong, valid) if valid else ' It has none.'}")
    return _with_constants(row, alpha, options).seeded(seed)


def own_method(given: Any) -> Method:
    """Return a method, or the one whose weight is a function, given as itself or by its place."""
    try:
        found = pkgutil.resolve_name(given) if isinstance(given, str) and ":" in given else given
    except (ImportError, AttributeError, ValueError) as error:
        way = " Set PYTHONPATH to its folder." if isinstance(error, ImportError) else ""
        raise ValueError(f"Unknown method {given!r}: {error}.{way}") from None
    if isinstance(found, Method):
        return found
    if not callable(found):
        raise ValueError(f"Unknown method {given!r}.{nearest(str(given), METHODS)} One's own is named module:name.")
    text = inspect.getdoc(unpacked(found)[0]) or place(found)
    return Method(paper="own", rule=text.partition("\n")[0], factors=(OwnWeight(function=found),))


def _with_constants(row: Method, alpha: float | None, options: Mapping[str, Any]) -> Method:
    """Return a row whose components have these constants, and this alpha where none of their own is given."""
    constants: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }
    shuffle, power = constants.get("shuffle", row.shuffle), constants.get("power", row.power)
    if row.permuted:
        one_of("shuffle", shuffle, ("both", "geo", "rd"))
    alphas = {"alpha": alpha, **{key: constants.pop(key, None) for key in ("alpha_geo", "alpha_rd")}}
    alphas = {key: value for key, value in alphas.items() if value is not None}
    for key, value in {"power": power, **alphas}.items():
        check_alpha(value, key)

    def bound(one: Any) -> Any:
        changed = {key: value for key, value in constants.items() if key in one.OPTIONS}
        if one.has_alpha:
            changed["alpha"] = alphas.get(f"alpha_{one.alpha_key}", alphas.get("alpha", one.alpha))
        return dataclasses.replace(one, **changed)

    rest = {name: bound(getattr(row, name)) for name in ("reward", "penalty") if getattr(row, name)}
    factors = tuple(map(bound, row.factors))
    return dataclasses.replace(row, factors=factors, shuffle=shuffle, power=power, **rest)


def permutation(size: int, seed: int) -> Tensor:
    """Return a seeded cyclic permutation of ``size`` groups, so that no group keeps its own place.

    Raises:
        ValueError: fewer than two groups.
    """
    if size < 2:
        raise ValueError(f"Weights are permuted across at least 2 groups, got {size}: put more prompts into the batch.")
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return torch.empty_like(order).scatter_(0, order, order.roll(1))


def base_advantages(
    rewards: Float[Tensor, "B G"], scale_rewards: Literal["group", "batch", "none"] = "group"
) -> Float[Tensor, "B G"]:
    """GRPO's advantage, (r - mean) / (std + 1e-4) with the n - 1 deviation (GCPO Eq. 1; epsilon as in TRL).

    ``scale_rewards``: the deviation of each group, of the whole batch, or no division ("none": Dr. GRPO's r - mean).
    NaN rewards take no part and get 0; a group with equal rewards, or with one scorable response, gets exactly 0.
    float64 stays float64, any other type is computed in float32. Raises ValueError for another ``scale_rewards``, and
    for rewards that are infinite or not of two dimensions.
    """
    one_of("scale_rewards", scale_rewards, ("group", "batch", "none"))
    rewards = Rollouts(rewards).rewards
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
    """Base advantages A of a batch, (B, G); the weight, (B, G) or (B, G, T); and the factors' measures and weights by
    their columns in logs, (B,), (B, G) or (B, G, T)."""

    base: Tensor
    weight: Tensor
    columns: dict[str, Tensor]

    @property
    def advantages(self) -> Tensor:
        """Return A * weight, shaped like the weight."""
        return expand(self.base, self.weight.ndim) * self.weight


def expand(values: Tensor, ndim: int) -> Tensor:
    """Return a view with dimensions of size 1 at the end, ``ndim`` in all."""
    return values[(...,) + (None,) * (ndim - values.ndim)]


def modulate(
    row: Method,
    rollouts: Rollouts,
    base: Float[Tensor, "B G"] | None = None,
    *,
    equalize_mean: bool = False,
    scale_rewards: str | None = None,
    stages: Sequence[str] = ("advantage", "loss"),
) -> Modulation:
    """Apply a resolved method to whole groups: the base advantages (computed unless given) and the product of its
    factors.

    Weights that are not finite are returned as they are. Arguments as in :func:`weights`; ``stages`` chooses factors.
    """
    if base is None:
        rewards = row.reward(rollouts) if row.reward else rollouts.rewards
        scale: Any = BASES[row.base]["scale_rewards"] if scale_rewards is None else scale_rewards
        base = base_advantages(rewards, scale)
    if "advantage" in stages and rollouts.group_size > 1 and row.negative_reinforcement:
        base = torch.where(entirely_incorrect(rollouts) & is_graded(rollouts), -1, base)  # EGPO, Eq. 13
    columns: dict[str, Tensor] = {}
    weight = torch.ones_like(rollouts.rewards)
    order = permutation(len(weight), row.seed).to(weight.device) if row.permuted else None
    for factor in row.factors:
        if factor.stage in stages:
            columns |= factor.columns(rollouts, base)
            own = columns[factor.weight].to(weight.dtype)
            own = own if order is None or row.shuffle not in ("both", factor.alpha_key) else own[order]
            ndim = max(weight.ndim, own.ndim)
            weight = expand(weight, ndim) * expand(own, ndim)
    weight = weight**row.power if row.power != 1 else weight
    if equalize_mean:
        counted = rollouts.scorable if weight.ndim == 2 else rollouts.scorable.unsqueeze(-1) & rollouts.mask.bool()
        counted = counted & weight.isfinite()  # weights that are replaced or refused later leave the mean alone
        weight = weight / weight[counted].mean() if counted.any() else weight
    return Modulation(base, weight, columns)


def _finite(method: Any, row: Method, modulation: Modulation) -> Modulation:
    broken = ~modulation.weight.isfinite()
    if broken.any():
        group = int(broken.flatten(1).any(1).nonzero()[0])
        if row.shuffle in ("both", "geo"):  # the group that the weight came from: RD's are finite
            group = int(permutation(len(broken), row.seed)[group])
        reads = ", ".join(["rewards", *sorted(row.reads)])
        raise ValueError(f"{called(method)}: the weight of group {group} is not finite; look at its features, {reads}.")
    return modulation


def weights(
    method: str | Method | Weight,
    rollouts: Rollouts,
    *,
    alpha: float | None = None,
    seed: int = 0,
    equalize_mean: bool = False,
    **options: Any,
) -> Float[Tensor, "B G"] | Float[Tensor, "B G T"]:
    """Return the factor that a method puts on each advantage; 1 for base methods and for methods that act on rewards.

    Args:
        method: a name in :data:`METHODS`, or one's own as in :func:`get_method`.
        rollouts: rewards and the features in ``get_method(method).reads``.
        alpha: alpha_base of the group factors (0.6 for GCPO's, 0.0417 for SEED-GRPO's, 0.2 for Q-Hawkeye's, which
            alone is not divided by log G: ``alpha_norm="none"``); None: each factor's own. Other factors have none and
            do not read it. ``alpha_geo`` and ``alpha_rd`` go before it, for CD and BoT, and for RD.
        seed: of the permutation of ``gcpo_shuffled`` (of one of its factors alone with ``shuffle="geo"`` or "rd") and
            of the tokens that ``clip_cov`` draws.
        equalize_mean: divide by the mean over the batch, so that methods differ in where they push and not in how far.
        options: constants of the method, such as ``form="linear"`` (see ``gcpo.methods``).

    Returns:
        (B, G), or (B, G, T) for a method that weighs tokens; within ``weight_range(method, alpha, G)`` unless
        equalised.

    Raises:
        ValueError: unknown method or option; one group for ``gcpo_shuffled``; a weight that is not finite (the trainer
            replaces such a weight by 1 and counts it).
        MissingFeatureError: a feature that the method reads was not given.
    """
    row = get_method(method, alpha=alpha, seed=seed, **options)
    if not row.factors:
        return torch.ones_like(rollouts.rewards)
    weight = _finite(method, row, modulate(row, rollouts, equalize_mean=equalize_mean)).weight
    return weight.clone() if rollouts.group_size > 1 else torch.ones_like(weight)


def advantages(
    method: str | Method | Weight,
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
    row = get_method(method, alpha=alpha, seed=seed, **options)
    modulation = modulate(row, rollouts, equalize_mean=equalize_mean, scale_rewards=scale_rewards)
    return _finite(method, row, modulation).advantages


def weight_range(
    method: str | Method | Weight, alpha: float | None, group_size: int, **options: Any
) -> tuple[float, float]:
    """Return the lowest and the highest weight that a method can give at this alpha and G.

    Every factor knows its own ends; those of several are multiplied. ``math.inf`` where nothing bounds a weight from
    above; (1, 1) for base methods, for methods that act on rewards, and for G = 1.

    Args:
        method: a name in ``METHODS``.
        alpha: alpha_base, or None for each factor's own; factors that have none do not read it.
        group_size: G.
        options: constants of the method, as in ``gcpo.methods.weights``.

    Raises:
        ValueError: unknown method or option (with the nearest valid name).
    """
    row = get_method(method, alpha=alpha, **options)
    ends = [factor.bounds(group_size) for factor in row.factors if group_size > 1]
    low, high = (math.prod(end) ** row.power for end in zip((1.0, 1.0), *ends, strict=True))
    return low, high
