"""From an uncertainty score u(q) to the weight of a group, and the range that weight can reach."""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor


def alpha_g(alpha: float, group_size: int) -> float:
    """The group-size normalised strength: alpha_G = alpha / log G (GCPO, section 3.4).

    Args:
        alpha: alpha_base, 0.6 in the paper; no unit.
        group_size: G, at least 1.

    Returns:
        alpha / log G; 0.0 for G = 1, where there is nothing to compare and nothing is modulated.

    Raises:
        ValueError: ``group_size`` below 1.
    """
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}.")
    return alpha / math.log(group_size) if group_size > 1 else 0.0


def damp(score: Float[Tensor, "*groups"], strength: float) -> Float[Tensor, "*groups"]:
    """clip(1 - strength * u, 0, 1): the linear form of SEED-GRPO's Eq. 6, used by ``se`` and ``kle``."""
    return (1 - strength * score).clamp(0, 1)


def damp_square(score: Float[Tensor, "*groups"], strength: float) -> Float[Tensor, "*groups"]:
    """clip(1 - strength * u^2, 0, 1): omega_CD and omega_BoT (GCPO, Eq. 8)."""
    return (1 - strength * score.square()).clamp(0, 1)


def boost(score: Float[Tensor, "*groups"], strength: float) -> Float[Tensor, "*groups"]:
    """1 + strength * u: omega_RD (GCPO, Eq. 11)."""
    return 1 + strength * score


def weight_range(method: str, alpha: float, group_size: int) -> tuple[float, float]:
    """The lowest and the highest weight that a method can give at this alpha and G.

    Every factor is monotone in its score, so its range is spanned by the score's two ends: CD reaches (G - 1)/G
    (the diagonal counts), BoT 1/2, RD 1, SE and KLE log G.

    Raises:
        ValueError: unknown method (with the nearest valid name).
    """
    from gcpo.methods import get_method  # methods are made of the shapes above

    low = high = 1.0
    for factor in get_method(method).factors:
        ends = [factor.at(end, alpha, group_size) for end in (0.0, factor.highest(group_size))]
        low, high = low * min(ends), high * max(ends)
    return low, high
