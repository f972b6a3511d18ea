"""The comparisons of PROTOCOL.md: pairs of the headline claims on training, and the controls that let a null count.

Labels are those of the grids ``headline`` and ``table1``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import pandas as pd

from gcpo.reports.evidence import Comparison, Pair, paired_comparisons
from gcpo.runs.grids import expand, grids
from gcpo.runs.params import profile_name
from gcpo.runs.plan import recorded, with_trainings
from gcpo.runs.record import Run

GRID = "headline"  # where the controls are
GRIDS = (GRID, "others", "steps", "checkpoints")  # whose runs decide by the protocol, in these worlds
CHOICE = "operating_point"  # the grid that chose how all of them train
WORLDS = {"world_a": "world A", "world_b": "world B"}  # profile -> as people call it
GCPO = ("gcpo_cd", "gcpo_bot")
BASELINES = ("grpo", "se", "kle", "empo", "care")  # of the paper's Table 1
RIGHT = ("care reward=binary", "grpo reward=binary")  # trained on right or wrong, as CARE's own paper does
# Pairs that differ by one weight, and what trains with that weight alone.
ALONE = {("gcpo_cd", "rd_only"): "cd_only", ("gcpo_bot", "rd_only"): "bot_only"}
CONTROLS = ("drop_half", "se_shuffled", "gcpo_strong power=4.0", "gcpo_strong power=16.0")

UNCERTAIN, ALL, RD, SHUFFLED = (
    "all uncertainty-based methods beat GRPO",
    "GCPO beats all baselines",
    "GCPO beats RD alone",
    "GCPO-BoT beats its shuffled weights",
)


def claims_on(labels: Collection[str]) -> dict[str, list[Pair]]:
    """Return the pairs of each headline claim on one task, the first of which is claimed to be above the second.

    Args:
        labels: of the task's runs. Where they have a CARE that was trained on right or wrong, that one is compared with
            a GRPO trained so.
    """
    own = {method: (method, "grpo") for method in (*BASELINES[1:], *GCPO)}
    if {*RIGHT} <= {*labels}:
        own["care"] = RIGHT
    return {
        UNCERTAIN: [*own.values()],
        ALL: [(method, other) for method in GCPO for other in BASELINES],
        RD: [(method, "rd_only") for method in GCPO],
        SHUFFLED: [("gcpo_bot", "gcpo_shuffled")],
    }


def decides(grid: str, profile: str) -> bool:
    """Return True for runs that the protocol decides by."""
    return grid in GRIDS and profile_name(profile) in WORLDS


def waiting(grid: str, profile: str, finished: Collection[str]) -> dict[str, str]:
    """Return why the runs of a task are not compared yet, by task: the protocol compares none before all are made.

    Args:
        grid: whose runs are asked for; of grids and profiles that are not the protocol's none wait.
        profile: a profile's name, or a parameter file.
        finished: ids of the runs that are.
    """
    if not decides(grid, profile):
        return {}
    made: dict[str, list[bool]] = {}
    for plan in expand(grid, profile):
        made.setdefault(plan.params.task, []).append(plan.id in finished)
    return {
        task: f"{sum(each)} of {len(each)} runs are finished, and PROTOCOL.md compares none before all are."
        for task, each in made.items()
        if not all(each)
    }


def unnamed(profile: str, runs: Iterable[Run]) -> dict[str, str]:
    """Return why finished runs of a world count for nothing, by id: the protocol names no such run.

    They have other seeds than its grids ask for, are another world's, or were made with other settings. Of a profile
    that is no world of the protocol there are none.
    """
    finished = {run.manifest["id"]: run.manifest["params"] for run in runs if run.finished}
    if not finished or profile_name(profile) not in WORLDS:
        return {}
    own = [plan for name in (*GRIDS, CHOICE) if name in grids() for plan in expand(name, profile)]
    named = {plan.id for plan in with_trainings(own)}
    return {
        id_: f"PROTOCOL.md names no such run of {WORLDS[profile_name(profile)]} (seed {params['seed']}, world_seed "
        f"{recorded(params, 'world_seed')})"
        for id_, params in finished.items()
        if id_ not in named
    }


@dataclass(frozen=True)
class Controls:
    """Differences of the positive controls from GRPO on one task, corrected together by Holm.

    Attributes:
        task: the task.
        found: of each control that has runs with GRPO's seeds.
    """

    task: str
    found: Mapping[str, Comparison]

    @property
    def told(self) -> list[str]:
        """The controls whose corrected interval is clear of zero, on either side."""
        return [name for name, one in self.found.items() if one.clear]

    @property
    def blind(self) -> str:
        """A sentence that says why no null counts on the task; nothing where a control is told from GRPO."""
        if self.told:
            return ""
        if not self.found:
            return f"No positive control was trained on {self.task}, so a null says nothing."
        seen = max(abs(one.corrected.estimate) for one in self.found.values())
        return (
            f"None of {len(self.found)} positive controls is clear of GRPO on {self.task} (the largest difference is "
            f"{seen:.1f} points), so a null says nothing."
        )

    @property
    def table(self) -> pd.DataFrame:
        """task, control, difference with low and high (points, 95 %, corrected), seeds, mde and seen."""
        rows = [
            (self.task, name, *one.corrected, one.seeds, one.mde, name in self.told) for name, one in self.found.items()
        ]
        return pd.DataFrame(rows, columns="task control difference low high seeds mde seen".split())


def controls(task: str, scores: pd.DataFrame, metric: str) -> Controls:
    """Return the controls of a task.

    Args:
        task: the task.
        scores: lines of its evaluations with columns label, seed, query and the metric, of one decoding.
        metric: the column that says how an answer was scored.
    """
    pairs = [(name, "grpo") for name in CONTROLS if name in set(scores["label"])]
    found = paired_comparisons(scores, metric, pairs)
    return Controls(task, {name: one for (name, _), one in found.items() if one.tested})
