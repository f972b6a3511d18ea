"""Runs of a grid as a report notebook shows them, with what stands at the head of every report."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import nan
from pathlib import Path

import pandas as pd

from gcpo.reports import evidence, headline, power, records, tables
from gcpo.reports.claims import Verdict
from gcpo.reports.gate import Gate, gate
from gcpo.reports.margins import margins
from gcpo.runs.params import profile_name
from gcpo.runs.record import RecordError


@dataclass(frozen=True)
class Report:
    """A report, as :func:`gcpo.reports.open` returns it.

    Attributes:
        profile: a profile's name, or a parameter file.
        grid: whose runs are shown.
        reference: show the committed reference in place of this machine's runs.
        any_code: compare runs of different code of this package.
        write_to: folder for tables, figures and verdicts; None writes nothing.
    """

    profile: str
    grid: str
    reference: bool = False
    any_code: bool = False
    write_to: str | None = None

    @property
    def source(self) -> str:
        """Whose runs these are, in words."""
        return records.source(self.profile, self.reference)

    @property
    def folder(self) -> Path | None:
        """``write_to`` as a path."""
        return Path(self.write_to) if self.write_to else None

    @property
    def command(self) -> str:
        """The command that makes the runs of the grid."""
        return f"python -m gcpo grid {self.grid} --profile {self.profile}"

    @cached_property
    def waiting(self) -> dict[str, str]:
        """Why the runs of a task are not compared yet, by task (:func:`gcpo.reports.headline.waiting`)."""
        each = records.runs(self.profile, self.reference)
        return headline.waiting(self.grid, self.profile, {run.manifest["id"] for run in each if run.finished})

    @cached_property
    def metric(self) -> dict[str, str]:
        """The metric that each task of the grid is trained and judged on; of tasks whose runs are compared."""
        every = tables.metrics(self.grid, self.profile)
        return {task: metric for task, metric in every.items() if task not in self.waiting}

    @property
    def margin(self) -> dict[str, float]:
        """The margin of equivalence of each task in that metric, in points."""
        return {task: margins()[task][metric] for task, metric in self.metric.items()}

    @property
    def coverage(self) -> pd.DataFrame:
        """Wanted and finished runs, as :func:`gcpo.records.coverage` counts them, and runs that are not the protocol's
        (:func:`gcpo.reports.headline.unnamed`; no reference has any)."""
        each = [] if self.reference else records.runs(self.profile)
        return records.coverage(self.grid, self.profile, self.reference, headline.unnamed(self.profile, each))

    @cached_property
    def gate(self) -> Gate:
        """Test of whether GRPO learns on the tasks of the grid (:func:`gcpo.reports.gate.gate`)."""
        found = gate(self.profile, self.grid, self.reference, self.any_code)
        compared = found.table[~found.table["task"].isin([*self.waiting])]
        return replace(found, table=compared, missing=found.missing | self.waiting)

    @cached_property
    def controls(self) -> dict[str, headline.Controls]:
        """The positive controls of each task of the grid: runs of it, or of the grid ``headline``; none that wait."""
        each = [replace(self, grid=grid)._compared for grid in dict.fromkeys([self.grid, headline.GRID])]
        found = pd.concat(each).drop_duplicates("id").query("kind == 'train'")
        scores = records.gather(found, "eval", ["task", "label", "seed"])
        sampled = scores[scores["decoding"] == "sampled"] if len(scores) else found
        return {
            task: headline.controls(task, sampled[sampled["task"] == task], metric)
            for task, metric in self.metric.items()
        }

    def decide(
        self,
        task: str,
        comparisons: Collection[evidence.Comparison],
        effects: Sequence[float] = (),
        *,
        closed: str | None = None,
        margin: float | None = None,
        claim: str = "",
    ) -> Verdict:
        """Return the verdict of training runs on a task (:func:`gcpo.reports.evidence.decide`).

        It is not tested where the gate is closed, and rules nothing out where no positive control was seen.

        Args:
            task: the task.
            comparisons: of its runs; none where they wait.
            effects: the paper's, in their order.
            closed: another reason why there is no verdict.
            margin: the smallest effect that would matter; the task's own unless given.
            claim: of those whose power the protocol printed, which then stands beside a verdict of its runs.
        """
        decided = evidence.decide(
            comparisons,
            effects,
            self.gate.closed(task) or closed,
            self.command,
            self.margin.get(task, nan) if margin is None else margin,
            self.controls[task].blind if task in self.controls else "",
        )
        ready = headline.decides(self.grid, self.profile) and task not in self.waiting
        return power.beside(decided, claim, task) if ready else decided

    def in_both_worlds(self, table: pd.DataFrame, name: str, second: str) -> pd.DataFrame:
        """Write a table, and return it with its world's name as first column; below it that of a second world, if both
        are the protocol's and that one is written."""
        tables.write_table(table, self.folder, name, self.source)
        worlds = {profile_name(self.profile): table}
        if worlds.keys() <= headline.WORLDS.keys() - {second}:
            worlds[second] = tables.written(second, name, self.reference, keep_default_na=False)
        named = [part.assign(world=headline.WORLDS.get(profile, profile)) for profile, part in worlds.items()]
        return pd.concat([part for part in named if len(part)] or named[:1], ignore_index=True)[["world", *table]]

    def runs(self, which: str = "kind == 'train'") -> pd.DataFrame:
        """Finished runs of the grid for which a query of their columns is true, without those that wait.

        Raises:
            RecordError: there is none, with the command that makes them; or as :func:`gcpo.records.find` does.
        """
        found = self._compared.query(which)
        if found.empty:
            raise RecordError(f"nothing to report: {self.command}")
        return found

    @property
    def _compared(self) -> pd.DataFrame:
        found = records.find(self.profile, self.grid, self.reference, self.any_code)
        return found[~found["task"].isin([*self.waiting])]
