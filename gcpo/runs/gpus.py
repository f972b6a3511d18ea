"""Which GPUs a run sees: transformers would spread the policy of one process over all of them, which TRL refuses."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from gcpo.runs.plan import Plan

VISIBLE = "CUDA_VISIBLE_DEVICES"  # read when a process first uses CUDA, and not again


def visible() -> list[str]:
    """The GPUs that this process sees, named as for ``CUDA_VISIBLE_DEVICES``. Counting them does not start CUDA."""
    count, named = torch.cuda.device_count(), os.environ.get(VISIBLE)
    return [name.strip() for name in named.split(",")][:count] if named else [str(i) for i in range(count)]


def needed(plan: Plan) -> int:
    """How many GPUs a run uses, with the training that it makes first."""
    training = plan if plan.kind == "train" else plan.training
    return training.params.processes if training else 1


def at_once(plans: Sequence[Plan]) -> int:
    """How many runs at a time this machine has room for: GPUs for each, or without any a core for each of at most 4."""
    if found := visible():
        return max(1, len(found) // max(map(needed, plans)))
    return max(1, min(os.cpu_count() or 1, 4))


def shares(jobs: int, plans: Sequence[Plan]) -> list[list[str]]:
    """The GPUs of each of ``jobs`` at a time; more jobs than there are GPUs for share them in turn."""
    found = visible()
    each = min(len(found), max(map(needed, plans)))
    return [[found[(job * each + i) % len(found)] for i in range(each)] for job in range(jobs)]


def take_one() -> None:
    """Let this process see one GPU, the first that it is given.

    Raises:
        ValueError: it sees several and uses CUDA already, which has looked.
    """
    found = visible()
    if len(found) > 1:
        if torch.cuda.is_initialized():
            raise ValueError(
                f"processes: 1, and this Python sees {len(found)} GPUs and uses CUDA already, so that TRL would refuse "
                f"to train: start it again with {VISIBLE}={found[0]}"
            )
        os.environ[VISIBLE] = found[0]


def peak_memory() -> float:
    """GB (10^9 bytes) that tensors of this process have held of its GPU at most, since the last ``forget_peak``."""
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_initialized() else 0.0


def forget_peak() -> None:
    """Let :func:`peak_memory` begin anew: one process may make several runs."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
