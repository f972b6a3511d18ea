"""Peak memory of a step over TRL's, above what is there before it: weights, states of the optimiser, a batch's texts.

A step is a generation, its scores, its loss and the update, and then the loss and gradient alone at prompts of 512
tokens. On a CPU torch's profiler counts every allocation of a tensor, so that the figure is exact and the same on every
machine; on a GPU it is the peak that torch's allocator keeps. It writes `benchmarks/results/memory.csv`, and ends with
1 where a step needs more than TRL's.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path

import torch
from overhead import Case, generations, make
from parts import group, loss_of_group, scored
from timing import Line, peak, quartiles, report

from gcpo.runs.policies import quiet

ROUNDS = 7
METHODS = ("grpo", "gcpo_cd", "gcpo_bot")


def steps(task: str) -> list[Line]:
    """Whole steps of trainers that see the same random numbers."""
    cases = [Case(task, None, False, 1), *(Case(task, name, own, 1) for name in METHODS for own in (False, True))]
    peaks: dict[Case, list[float]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            running = generations(make(case, Path(folder)))
            for round_ in range(ROUNDS + 1):
                torch.manual_seed(round_)
                found = peak(functools.partial(next, running))
                if round_:  # the states of the optimiser are there
                    peaks[case].append(found)
    own = peaks.pop(cases[0])
    lines = [Line(f"{task} TRL's step", "", *quartiles(size / 2**20 for size in own), "MiB", rounds=ROUNDS)]
    for case, sizes in peaks.items():
        name = f"{task} {case.method}" + (", shared" if case.shares else "")
        shares = quartiles(size / other for size, other in zip(sizes, own, strict=True))
        lines.append(Line(name, "TRL's GRPOTrainer", *shares, limit=1.0 if case.shares else None, rounds=ROUNDS))
    return lines


def long_prompts() -> list[Line]:
    """Loss and gradient of 16 answers of 64 tokens to one prompt of 512."""
    lines = []
    for size in ("1M", "19M"):
        model = scored(size)
        ids = group(model, 16, 512, 64)[0]
        loss_of_group(model, ids, 512, True)  # gradients have their place
        plain, shared = (peak(functools.partial(loss_of_group, model, ids, 512, shares)) for shares in (False, True))
        lines.append(Line(f"{size}, prompt of 512 tokens, G = 16, plain", "", *quartiles([plain / 2**20]), "MiB"))
        case = f"{size}, prompt of 512 tokens, G = 16, shared"
        lines.append(Line(case, "plain", *quartiles([shared / plain]), limit=1.0))
    return lines


def main() -> int:
    """Print and write a line per case."""
    quiet()
    torch.set_num_threads(1)
    return 1 if report("memory", [*steps("tinyqa"), *steps("tinymath"), *long_prompts()]) else 0


if __name__ == "__main__":
    sys.exit(main())
