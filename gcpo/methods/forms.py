"""From an uncertainty score u(q) to the weight of a group."""

import math
from collections.abc import Callable
from numbers import Real
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor


def check_alpha(alpha: float, name: str = "alpha") -> None:
    """Refuse a strength that would turn a weight around, or into no number."""
    number = isinstance(alpha, Real)
    if not (number and 0 <= alpha < math.inf):
        raise ValueError(f"{name} must be at least 0, got {alpha!r}{'' if number else ', which is no number'}.")


def alpha_g(alpha: float, group_size: int) -> float:
    """The group-size normalised strength: alpha_G = alpha / log G (GCPO, section 3.4).

    Args:
        alpha: alpha_base, 0.6 in the paper; no unit.
        group_size: G, at least 1.

    Returns:
        alpha / log G; 0.0 for G = 1, where there is nothing to compare and nothing is modulated.

    Raises:
        ValueError: ``group_size`` below 1, or ``alpha`` negative or not finite.
    """
    check_alpha(alpha)
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


def reciprocal(score: Float[Tensor, "*groups"], strength: float) -> Float[Tensor, "*groups"]:
    """1 / (1 + strength * u): the form in SEED-GRPO's code; its paper prints the linear one."""
    return 1 / (1 + strength * score)


def exponential(score: Float[Tensor, "*groups"], strength: float) -> Float[Tensor, "*groups"]:
    """exp(-strength * u): SEED-GRPO's "exponential" (section 4.3), and Q-Hawkeye's own weight."""
    return torch.exp(-strength * score)


def focal(score: Float[Tensor, "*groups"], strength: float) -> Float[Tensor, "*groups"]:
    """clip(1 - strength * u, 0, 1)^2: SEED-GRPO's "focal", which it names and does not define; 2 is the focal loss's
    own exponent."""
    return damp(score, strength).square()


Form = Literal["linear", "square", "reciprocal", "exponential", "focal", "boost"]
FORMS: dict[Form, Callable[[Tensor, float], Tensor]] = {
    "linear": damp,
    "square": damp_square,
    "reciprocal": reciprocal,
    "exponential": exponential,
    "focal": focal,
    "boost": boost,
}
