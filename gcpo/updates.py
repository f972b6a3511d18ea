"""Updates that methods make of the same rollouts, and the most that any weights of a range could gain in one step.

An update moves the parameters by u = sum_q w_q g_q, where g_q is question q's part of minus GRPO's gradient and w_q
its weight. With h the gradient of the expected reward on held-out questions, the reward gains <h, u> / |u| per unit of
step, to first order; a preconditioner, as Adam has one, stands before every g_q.
"""

import math
from collections.abc import Iterable

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from gcpo.methods import BASES, Method, base_advantages, expand, get_method, modulate
from gcpo.rollouts import Rollouts

Array = NDArray[np.float64]


def of_one_step(names: Iterable[str]) -> dict[str, Method]:
    """Return methods by name, each once, with their own constants.

    Raises:
        ValueError: an unknown name, or a method that one step does not show: it acts in the loss, on the ratios of
            later steps, has settings of TRL's loss, or reads a reference policy or the tokens of the answer.
    """
    methods = {name: get_method(name) for name in dict.fromkeys(names)}
    for name, row in methods.items():
        for refused, why in (
            (row.in_loss, "acts on the ratios of later steps"),
            (row.reads & {"ref_logps", "answer_mask"}, "reads a reference policy"),
            (row.trl, "has settings of TRL's loss"),
        ):
            if refused:
                raise ValueError(f"{name} {why}, which one step does not have; leave it out")
    return methods


def one_family(row: Method) -> bool:
    """Return True for a method that weighs the questions of plain GRPO and changes nothing else."""
    plain = row.base == "grpo" and row.reward is None and row.penalty is None
    return plain and all(factor.granularity == "group" for factor in row.factors)


def token_coefficients(row: Method, rollouts: Rollouts) -> Float[Tensor, "B G T"]:
    """Return c of u = sum c grad log pi(token), minus the gradient of TRL's loss where the ratio is 1.

    c is the modulated advantage over the loss's normaliser: the completions of the batch and the length of each (grpo),
    or ``max_completion_length`` (dr_grpo), or the tokens of the batch (dapo). 0 outside ``rollouts.mask``.

    The method is one of :func:`of_one_step`.
    """
    mask = rollouts.mask.to(rollouts.rewards.dtype)
    lengths, count = mask.sum(-1, keepdim=True), rollouts.rewards.numel()
    loss = BASES[row.base]["loss_type"]
    tokens = lengths.clamp(min=1) * count if loss == "grpo" else lengths.sum().clamp(min=1)
    if loss == "dr_grpo":
        tokens = torch.tensor(float(count * (rollouts.max_completion_length or mask.shape[-1])))
    return expand(modulate(row, rollouts).advantages, 3) * mask / tokens


def reward_coefficients(rollouts: Rollouts) -> Float[Tensor, "B G T"]:
    """Return c of grad E[r] = sum c grad log pi(token) for each question, without bias: (r_i - mean r) / (G - 1).

    The baseline of a completion is the mean reward of the others. Rewards without a number count as the mean.
    """
    valid = ~rollouts.rewards.isnan()
    deviation = base_advantages(rollouts.rewards, "none")
    return expand(deviation / (valid.sum(1, keepdim=True) - 1).clamp(min=1), 3) * rollouts.mask


def gain(weights: Array, dots: Array, gram: Array) -> float:
    """Return <h, u> / |u| for u = sum_q w_q g_q; 0 where u is.

    ``dots`` are the <h, g_q>, and ``gram`` the <g_p, g_q>, both after the preconditioner.
    """
    square = weights @ gram @ weights
    return float(weights @ dots / np.sqrt(square)) if square > 0 else 0.0


def total_gain(dots: Array, squares: Array, batches: Array | None = None, folds: Array | None = None) -> Array:
    """Return sum_b <h, u_b> / sqrt(sum_b |u_b|^2) of updates of several batches, for the mean h of F gradients, in n
    resamples; 0 where no update moves.

    Args:
        dots: (b, F), the inner products.
        squares: (b,), the squared lengths.
        batches: (n, b), how often each batch counts; None: once, in one row.
        folds: (n, F), how often each gradient counts; likewise.
    """
    batches = np.ones((1, len(squares))) if batches is None else batches
    folds = np.ones((1, dots.shape[1])) if folds is None else folds
    along = (batches @ dots * folds).sum(1) / np.maximum(folds.sum(1), 1)
    lengths = np.sqrt(batches @ squares)
    return np.divide(along, lengths, out=np.zeros_like(along), where=lengths > 0)


def ceiling(dots: Array, gram: Array, low: float = 0.0, high: float = np.inf) -> Array:
    """Return the weights in [low, high] with the largest :func:`gain`; without an end, of all that are at least 0.

    Only ratios of weights count. The gain is a linear over a convex function, so that Dinkelbach's iteration ends at
    the largest one: w maximises <h, u> - r |u|, which is concave, for r the gain of the last w. Where no weights of the
    range gain, those are returned that lose least to first order; 0 where the range has it.
    """
    low, high = (low, high) if np.isfinite(high) else (0.0, 1.0)
    dots, gram = dots / (np.abs(dots).max() or 1.0), gram / (np.trace(gram) or 1.0)
    weights = np.where(dots > 0, high, low)

    def lost(weights: Array, rate: float) -> tuple[float, Array]:
        inner = gram @ weights
        norm = math.sqrt(max(float(weights @ inner), 1e-30))
        return rate * norm - float(weights @ dots), rate * inner / norm - dots

    rate, before = gain(weights, dots, gram), 0.0
    while rate > before * (1 + 1e-9):
        found = minimize(lost, weights, args=(rate,), jac=True, bounds=[(low, high)] * len(dots), method="L-BFGS-B")
        if gain(found.x, dots, gram) <= rate:
            break
        weights, before, rate = found.x, rate, gain(found.x, dots, gram)
    return weights
