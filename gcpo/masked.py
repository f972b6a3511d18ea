"""Means and deviations of the values that a mask keeps."""

import torch
from torch import Tensor


def mean(values: Tensor, kept: Tensor, dims: int | tuple[int, ...] = -1) -> Tensor:
    """Mean over ``dims`` of the kept values, 0 where none is kept; the dimensions stay."""
    total = torch.where(kept, values, 0).sum(dims, keepdim=True)
    return total / kept.sum(dims, keepdim=True).clamp(min=1)


def deviations(values: Tensor, kept: Tensor, dims: int | tuple[int, ...] = -1) -> Tensor:
    """Kept values minus their mean, 0 elsewhere; exactly 0 for equal values, whose rounded mean could differ."""
    if not values.numel():
        return values
    lowest = values.masked_fill(~kept, torch.inf).amin(dims, keepdim=True)
    gain = torch.where(kept, values - lowest, 0)
    return torch.where(kept, gain - mean(gain, kept, dims), 0)
