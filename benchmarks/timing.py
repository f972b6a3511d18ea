"""Parts that benchmarks share: times of alternating calls, and a table of ratios with quartiles and limits."""

from __future__ import annotations

import csv
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from gcpo.runs.profiles import read_yaml
from gcpo.runs.record import environment

RESULTS = Path(__file__).parent / "results"
MISSES = RESULTS / "misses.yaml"  # part, case: why a limit is missed, in one sentence


def now() -> float:
    """Return the processor's time or, where there is a GPU, the clock's when all that was asked of it is done."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def peak(call: Callable[[], Any]) -> float:
    """Return the most bytes that a call has of its own at any time."""
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


class Line(NamedTuple):
    """A figure: the median over rounds, with its quartiles, and the most that it may be."""

    case: str
    over: str  # what it is a multiple of; "" where it is none
    figure: float
    low: float
    high: float
    unit: str = "ratio"
    limit: float | None = None
    rounds: int = 1

    @property
    def missed(self) -> bool:
        """Return whether the figure is above its limit."""
        return self.limit is not None and self.figure > self.limit


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    """Return the median, and the values a quarter from either end."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return statistics.median(ordered), ordered[quarter], ordered[-1 - quarter]


def alternating(calls: Mapping[str, Callable[[], Any]], rounds: int, warm: int = 1) -> dict[str, list[float]]:
    """Return the seconds of each call, in rounds of all calls: a slow minute of the machine hits all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(warm + rounds):
        for name, call in calls.items():
            start = now()
            call()
            if round_ >= warm:  # caches and allocators are warm
                seconds[name].append(now() - start)
    return seconds


def ratio(case: str, over: str, times: Mapping[str, Sequence[float]], limit: float | None = None) -> Line:
    """Return how many times as long one call takes as another, round by round."""
    own = [a / b for a, b in zip(times[case], times[over], strict=True)]
    return Line(case, over, *quartiles(own), limit=limit, rounds=len(own))


def report(part: str, lines: Sequence[Line]) -> int:
    """Print the figures of a part, write them to ``results``, and return how many limits are missed. What is known of a
    miss stands below it."""
    known = read_yaml(MISSES).get(part, {})
    machine = environment()["hardware"]
    names = [gpu if isinstance(gpu, str) else str(gpu) for gpu in machine["gpus"]] or [str(machine["processor"])]
    about = {
        "hardware": ", ".join(names),
        "clock": "wall" if torch.cuda.is_available() else "processor, one thread, on a machine shared with other work",
        "packages": f"Python {platform.python_version()}, torch {torch.__version__}",
    }
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{part}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*Line._fields, "missed", *about])
        for line in lines:
            numbers = [f"{value:.4g}" for value in (line.figure, line.low, line.high)]
            limit = "" if line.limit is None else line.limit
            writer.writerow(
                [line.case, line.over, *numbers, line.unit, limit, line.rounds, line.missed, *about.values()]
            )
    for line in lines:
        said = f"{part:9s} {line.case:42s} {line.figure:9.4g} {line.unit}"
        said += (f" of {line.over}" if line.over else "") + f" [{line.low:.4g}, {line.high:.4g}]"
        print(said + (f", limit {line.limit}{' MISSED' if line.missed else ''}" if line.limit else ""), flush=True)
        if line.missed:
            print(f"{'':9s} {known.get(line.case, 'not explained yet: misses.yaml')}", flush=True)
    return sum(line.missed for line in lines)


def children() -> float:
    """Return the processor seconds of all finished child processes."""
    times = os.times()
    return times.children_user + times.children_system
