"""Strengths and forms of a group's weight, and the range that a method's weight can reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gcpo.methods.advantages import get_method
from gcpo.methods.forms import FORMS, alpha_g, boost, damp, damp_square, exponential, focal, reciprocal

__all__ = [
    "FORMS",
    "alpha_g",
    "boost",
    "damp",
    "damp_square",
    "exponential",
    "focal",
    "reciprocal",
    "weight_range",
]


def weight_range(
    method: str | Sequence[str], alpha: float | None, group_size: int, **options: Any
) -> tuple[float, float]:
    """The lowest and the highest weight that a method can give at this alpha and G.

    Every factor knows its own ends; those of a product are multiplied. ``math.inf`` where nothing bounds a weight from
    above; (1, 1) for base methods, for methods that act on rewards, and for G = 1.

    Args:
        method: a name in ``METHODS``, a product of names ("bot_only*egpo") or a list of them.
        alpha: alpha_base, or None for each factor's own; factors that have none do not read it.
        group_size: G.
        options: constants of the method, as in ``gcpo.methods.weights``.

    Raises:
        ValueError: unknown method or option (with the nearest valid name).
    """
    low = high = 1.0
    if group_size > 1:
        for factor in get_method(method, alpha=alpha, **options).factors:
            lowest, highest = factor.bounds(group_size)
            low, high = low * lowest, high * highest
    return low, high
