"""The gate: training verdicts are given only where GRPO, at the profile's settings, learns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from gcpo.reports import evidence, records
from gcpo.runs.grids import expand
from gcpo.runs.record import RecordError
from gcpo.tasks import get_task

GRID = "table1"  # whose plain runs of GRPO, and of no training, are the protocol's own
START, BASE = "no training", "grpo"
COLUMNS = "task decoding metric seeds start grpo gain low high std passes runs".split()


@dataclass(frozen=True)
class Gate:
    """Return GRPO's gain over the starting policy on the test split, per task and decoding.

    Attributes:
        profile: whose runs.
        table: task, decoding, metric, seeds (that both have), start and grpo (means in per cent), gain with low and
            high (points, 95 %, paired by seed and question), std (of grpo's seeds, points), passes, and runs (how many
            of grpo's are finished, of those that the grid asks for).
        missing: of each task that cannot be judged, which runs it lacks.
    """

    profile: str
    table: pd.DataFrame
    missing: dict[str, str]

    @property
    def tasks(self) -> list[str]:
        """The tasks that it was asked about."""
        return list(dict.fromkeys([*self.table["task"], *self.missing]))

    @property
    def passed(self) -> bool:
        """Return True if the gate is open on every task."""
        return bool(self.tasks) and all(self.closed(task) is None for task in self.tasks)

    def said(self, tasks: Iterable[str]) -> str:
        """A line per task: that it is open, or why it is not."""
        return "\n".join(self.closed(task) or f"The gate is open on {task}." for task in tasks)

    def closed(self, task: str) -> str | None:
        """Why no training verdict is given on a task, in a sentence; None where GRPO learns in both decodings."""
        if task in self.missing:
            return f"The gate cannot be judged on {task}: {self.missing[task]}"
        rows = self.table[self.table["task"] == task]
        if rows.empty:
            return f"The gate was not judged on {task}: its runs are not part of the grid."
        failed = [
            f"{row.decoding} {row.gain:+.1f} [{row.low:+.1f}, {row.high:+.1f}]"
            for row in rows[~rows["passes"].astype(bool)].itertuples()
        ]
        if failed:
            return f"The gate failed on {task}: GRPO's gain over the starting policy is {', '.join(failed)} points."
        return None


def gate(profile: str, grid: str = GRID, reference: bool = False, any_code: bool = False) -> Gate:
    """Test that GRPO learns: its gain, sampled and greedy, has an interval above zero on each task of the grid.

    Args:
        profile: a profile's name, or a parameter file.
        grid: where plain GRPO and the starting policy are; of its runs these two are read.
        reference: read the committed reference.
        any_code: compare runs of different code.

    Raises:
        RecordError: runs of different code, unless ``any_code``; or a grid without training.
    """
    asked = Counter((plan.params.task, plan.label) for plan in expand(grid, profile) if plan.kind == "train")
    if not asked:
        raise RecordError(f"Grid {grid} trains nothing, and a gate is judged on training: name another grid, or none")
    runs = records.find(profile, grid, reference, any_code)
    runs = runs[(runs["kind"] == "train") & runs["label"].isin([START, BASE])]
    rows, missing = [], {}
    for task in dict.fromkeys(task for task, _ in asked):
        of_task = runs[runs["task"] == task]
        counts = {label: f"{(of_task['label'] == label).sum()} of {asked[task, label]}" for label in (BASE, START)}
        gains = _gains(records.gather(of_task, "eval", ["label", "seed"]), get_task(task).reward_metric)
        rows += [{"task": task, **gain, "runs": counts[BASE]} for gain in gains]
        if not (asked[task, BASE] and asked[task, START]):
            missing[task] = f"grid {grid} does not ask there for plain GRPO and for the starting policy"
        elif not gains:
            have = f"{counts[BASE]} runs of plain GRPO and {counts[START]} of the starting policy are finished"
            missing[task] = f"{have}, and two seeds of both are needed: python -m gcpo grid {grid} --profile {profile}"
    return Gate(profile, pd.DataFrame(rows, columns=COLUMNS), missing)


def _gains(scores: pd.DataFrame, metric: str) -> list[dict[str, Any]]:
    """A row per decoding; none where fewer than two seeds have both."""
    rows = []
    for decoding in ("sampled", "greedy") if len(scores) else ():
        part = scores[scores["decoding"] == decoding]
        found = evidence.paired_comparisons(part, metric, [(BASE, START)])[BASE, START]
        if found.tested:
            runs = part.groupby(["seed", "label"])[metric].mean().mul(100).unstack()[[START, BASE]].dropna()
            # Means are over the seeds that both have, as the gain is.
            row: dict[str, Any] = {"decoding": decoding, "metric": metric, "seeds": found.seeds}
            row |= {"start": runs[START].mean(), "grpo": runs[BASE].mean(), "std": runs[BASE].std(ddof=1)}
            row |= dict(zip(("gain", "low", "high"), found.interval, strict=True))
            rows.append({**row, "passes": found.interval.low > 0})
    return rows
