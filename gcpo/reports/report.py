"""A report: the runs of a grid, opened once, with what lets them decide a claim: the gate, the positive controls, the
margins and the protocol.

Labels are those of the grids ``headline`` and ``table1``.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from itertools import product
from math import nan
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import Field, TypeAdapter, ValidationError

from gcpo import paths
from gcpo.reports import records, verdicts
from gcpo.reports.verdicts import Pair, Verdict, clear, compare, differences
from gcpo.runs.grids import expand, fitting
from gcpo.runs.params import profile_name
from gcpo.runs.plan import Plan
from gcpo.runs.profiles import ParameterError, read_yaml
from gcpo.runs.record import RecordError, Run
from gcpo.tasks import get_task

WORLDS = {"world_a": "world A", "world_b": "world B"}  # profile -> as people call it
REAL = "real"  # the profile of the real model, whose part of the protocol is its own
CONTROL_GRID = "headline"  # where the controls are
GRIDS = (CONTROL_GRID, "others", "steps", "checkpoints", "planted_noise")  # whose runs decide by the protocol
START, BASE = "no training", "grpo"
GCPO = ("gcpo_cd", "gcpo_bot")
BASELINES = (BASE, "se", "kle", "empo", "care")  # of the paper's Table 1
RIGHT = ("care reward=binary", "grpo reward=binary")  # trained on right or wrong, as CARE's own paper does
# Pairs that differ by one weight, and what trains with that weight alone.
ALONE = {("gcpo_cd", "rd_only"): "cd_only", ("gcpo_bot", "rd_only"): "bot_only"}
CONTROLS = ("drop_half", "se_shuffled", "gcpo_strong power=4.0", "gcpo_strong power=16.0")
GATE = "world task decoding metric seeds start grpo gain low high std passes".split()

# The claims whose power PROTOCOL.md printed (power.csv).
UNCERTAIN = "all uncertainty-based methods but EMPO beat GRPO"
ALL = "GCPO beats all baselines"
RD = "GCPO beats RD alone"
SHUFFLED = "GCPO-BoT beats its shuffled weights"
GEOMETRY = "CD and BoT above Entropy and SE"  # of App. D.4
STEPS = {  # what a step of GCPO is compared with
    "rd_only": "a step of GCPO gains more than one of RD alone",
    "grpo": "a step of GCPO gains more than one of GRPO",
}


def claims_on(labels: Collection[str]) -> dict[str, list[Pair]]:
    """Return the pairs of each headline claim on one task, the first of which is claimed to be above the second.

    Args:
        labels: of the task's runs. Where they have a CARE that was trained on right or wrong, that one is compared with
            a GRPO trained so.
    """
    own = {method: (method, BASE) for method in (*BASELINES[1:], *GCPO) if method != "empo"}
    if {*RIGHT} <= {*labels}:
        own["care"] = RIGHT
    return {
        UNCERTAIN: [*own.values()],
        ALL: [(method, other) for method in GCPO for other in BASELINES],
        RD: [(method, "rd_only") for method in GCPO],
        SHUFFLED: [("gcpo_bot", "gcpo_shuffled")],
    }


def protocol_power() -> pd.DataFrame:
    """Return what PROTOCOL.md printed before its runs, made by ``benchmarks/protocol_power.py``: claim, task, supposed
    (the truth of the next number), and how many of 100 experiments say holds and ruled out, under it and under none."""
    return pd.read_csv(Path(__file__).parents[1] / "power.csv")


def with_power(verdict: Verdict, claim: str, task: str, realised: float) -> Verdict:
    """Return a verdict with ``power``: how many of 100 such experiments would say *holds* if the paper's numbers were
    true, or the effect as large as would matter, as planned in one world, and ``realised``, by the noise of the runs;
    as it is where the protocol printed no such thing."""
    row = protocol_power().query("claim == @claim and task == @task")
    return verdict if row.empty else {**verdict, "power": row["holds if the paper"].iloc[0], "realised": realised}


def decides(grid: str, profile: str) -> bool:
    """Return True for runs that the protocol decides by."""
    return grid in GRIDS and profile_name(profile) in WORLDS


def read_as(path: Path, kind: Any) -> Any:
    """Return what a YAML file declares, as a type says it.

    Raises:
        ParameterError: it is something else; with file, key and value.
    """
    try:
        return TypeAdapter(kind).validate_python(read_yaml(path))
    except ValidationError as error:
        raise ParameterError(f"{path}: {error}") from None


def margins(path: Path | None = None) -> dict[str, dict[str, float]]:
    """Return the largest difference that does not matter, in points above 0, by task and metric, as declared before any
    result in ``params/statistics/margins.yaml``.

    Raises:
        ParameterError: a margin that is no number above 0; with file, key and value.
    """
    margin = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
    return read_as(path or paths.PARAMS / "statistics" / "margins.yaml", dict[str, dict[str, margin]])


class Report:
    """A report, whose runs are found and checked once.

    Args:
        profile: a profile's name, or a parameter file.
        grid: whose runs are shown.
        reference: show the committed reference in place of this machine's runs.
        any_code: compare runs of different code of this package.
        write_to: folder for tables, figures and verdicts; None writes nothing.
        second: the profile of a second world, whose runs count beside those of the first if both are the protocol's and
            it has any: each run says in ``world`` which it is of.

    Attributes:
        worlds: of each profile what people call it.
        source: whose runs these are, in words.
        folder: ``write_to`` as a path.
        command: makes the runs of the grid.
    """

    def __init__(
        self,
        profile: str,
        grid: str,
        reference: bool = False,
        any_code: bool = False,
        write_to: str | None = None,
        second: str = "",
    ) -> None:
        self.profile, self.grid, self.reference, self.any_code = profile, grid, reference, any_code
        self.source = records.source(profile, reference)
        self.folder = Path(write_to) if write_to else None
        self.command = f"python -m gcpo grid {grid} --profile {profile}"
        self._every = {profile: records.runs(profile, reference)}
        if {profile_name(profile), second} == {*WORLDS} and (beside := records.runs(second, reference)):
            self._every[second] = beside
            self.source += f" and of {WORLDS[second]}"
        self.worlds = {each: WORLDS.get(profile_name(each), profile_name(each)) for each in self._every}

    @cached_property
    def waiting(self) -> dict[str, str]:
        """Why the runs of a task are not compared yet, by task: the protocol compares none before all are made. Of
        grids and profiles that are not the protocol's none wait."""
        return self._waiting(self.grid)

    def _waiting(self, grid: str) -> dict[str, str]:
        finished = {run.manifest["id"] for runs in self._every.values() for run in runs if run.finished}
        made: dict[str, list[bool]] = {}
        for plan in self._plans(grid) if decides(grid, self.profile) else ():
            made.setdefault(plan.params.task, []).append(plan.id in finished)
        said = "{} of {} runs are finished, and PROTOCOL.md compares none before all are."
        return {task: said.format(sum(each), len(each)) for task, each in made.items() if not all(each)}

    def _plans(self, grid: str) -> list[Plan]:
        return [plan for profile in self._every for plan in expand(grid, profile)]

    @cached_property
    def metric(self) -> dict[str, str]:
        """The metric that each task of the grid is trained and judged on; of tasks whose runs are compared."""
        trained = [plan.params.task for plan in self._plans(self.grid) if plan.kind == "train"]
        return {task: get_task(task).reward_metric for task in trained if task not in self.waiting}

    @cached_property
    def margin(self) -> dict[str, float]:
        """The margin of equivalence of each task in that metric, in points."""
        return {task: margins()[task][metric] for task, metric in self.metric.items()}

    @property
    def coverage(self) -> pd.DataFrame:
        """Wanted and finished runs of each world, as :func:`gcpo.records.coverage` counts them."""
        return self._each(lambda of, runs: records.coverage(self.grid, of, self.reference, runs))

    @cached_property
    def _compared(self) -> pd.DataFrame:
        return self._of(self.grid)

    def _of(self, grid: str) -> pd.DataFrame:
        found = self._each(lambda of, runs: records.find(of, grid, self.reference, self.any_code, runs))
        return found[~found["task"].isin([*self._waiting(grid)])]

    def _each(self, made: Callable[[str, list[Run]], pd.DataFrame]) -> pd.DataFrame:
        every = [made(profile, runs).assign(world=self.worlds[profile]) for profile, runs in self._every.items()]
        return pd.concat(every, ignore_index=True)

    def of_first(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the lines of the first world, which figures show."""
        return table[table["world"] == self.worlds[self.profile]] if len(table) else table

    def runs(self, which: str = "kind == 'train'") -> pd.DataFrame:
        """Return finished runs of the grid for which a query of their columns is true, without those that wait.

        Raises:
            RecordError: there is none, with the command that makes them; or as :func:`gcpo.records.find` does.
        """
        if (found := self._compared.query(which)).empty:
            raise RecordError(f"nothing to report: {self.command}")
        return found

    @cached_property
    def gate(self) -> pd.DataFrame:
        """GRPO's gain over the starting policy on the test split, a row per world, task and decoding with two seeds of
        both.

        Columns: world, task, decoding, metric, seeds (that both have), start and grpo (means in per cent), gain with
        low and high (points, 95 %, paired by seed and question), std (of grpo's seeds, points) and passes (the
        interval is above 0).
        """
        runs = self._compared.query("kind == 'train' and label in [@START, @BASE]")
        scores = records.gather(runs, "eval", ["world", "task", "label", "seed"])
        rows = []
        each = product(self.worlds.values(), self.metric, ("sampled", "greedy"))
        for world, task, decoding in each if len(scores) else ():
            part = scores.query("world == @world and task == @task and decoding == @decoding").drop(columns="world")
            of_both = part.groupby("seed")["label"].transform("nunique") == 2
            if part.loc[of_both, "seed"].nunique() < 2:
                continue
            found = differences(part[of_both], self.metric[task], {BASE: START}).set_index("label")
            gain = found.loc[BASE].drop("seeds").rename({"compared": "seeds", "mean": "grpo", "difference": "gain"})
            where = {"world": world, "task": task, "decoding": decoding, "metric": self.metric[task]}
            rows.append({**gain, **where, "start": found.loc[START, "mean"], "passes": gain["low"] > 0})
        return pd.DataFrame(rows, columns=GATE)

    def _counted(self, task: str, label: str) -> str:
        asked = sum((plan.params.task, plan.label) == (task, label) for plan in self._plans(self.grid))
        return f"{len(self._compared.query('task == @task and label == @label'))} of {asked}"

    @cached_property
    def closed(self) -> dict[str, str]:
        """Why no verdict on training is given, by task; "" where GRPO learns in both decodings."""
        found = dict(self.waiting)
        for task in self.metric:
            rows = self.gate[self.gate["task"] == task]
            made = f"{self._counted(task, BASE)} of plain GRPO, {self._counted(task, START)} of the starting policy"
            found[task] = "" if rows["passes"].all() else f"GRPO does not learn on {task}: no gain that is clear of 0."
            if rows.empty:
                found[task] = f"Two seeds of both are needed on {task}, and there are {made}. {self.command}"
        return found

    @cached_property
    def controls(self) -> dict[str, pd.DataFrame]:
        """Differences of the positive controls from GRPO, corrected together on each task of the grid, as
        :func:`gcpo.reports.verdicts.compare` gives them: runs of it, or of the grid ``headline``; none that wait."""
        found = pd.concat([self._compared, *map(self._of, {CONTROL_GRID} & {*fitting(self.profile)})])
        found = found[(found["kind"] == "train") & found["label"].isin([*CONTROLS, BASE])].drop_duplicates("id")
        scores = records.gather(found, "eval", ["world", "task", "label", "seed"])
        made = {}
        for task, metric in self.metric.items():
            part = scores.query("task == @task and decoding == 'sampled'") if len(scores) else found.iloc[:0]
            made[task] = compare(part, metric, [(name, BASE) for name in CONTROLS]).dropna(subset=["estimate"])
        return made

    @property
    def blind(self) -> dict[str, str]:
        """Why no null counts, by task: no positive control is told from GRPO; "" where one is."""
        said = "no positive control was trained on {0}, or none is clear of GRPO: a null says nothing"
        return {task: "" if clear(found).any() else said.format(task) for task, found in self.controls.items()}

    def decide(
        self,
        task: str,
        compared: pd.DataFrame | None = None,
        effects: Sequence[float] = (),
        *,
        closed: str | None = None,
        margin: float | None = None,
        claim: str = "",
        realised: float = nan,
    ) -> Verdict:
        """Return the verdict of training runs on a task (:func:`gcpo.reports.verdicts.decide`).

        It is not tested where the gate is closed, and rules nothing out where no positive control was seen.

        Args:
            task: the task.
            compared: comparisons of its runs; none where they wait.
            effects: the paper's, in their order.
            closed: another reason why there is no verdict.
            margin: the smallest effect that would matter; the task's own unless given.
            claim: of those whose power the protocol printed, which then stands beside a verdict of its runs.
            realised: that power by the noise of the runs.
        """
        matters = self.margin.get(task, nan) if margin is None else margin
        why = self.closed.get(task, f"Grid {self.grid} has no runs on {task}.") or closed
        decided = verdicts.decide(compared, effects, matters, why, self.blind.get(task, ""))
        ready = decides(self.grid, self.profile) and task not in self.waiting
        return with_power(decided, claim, task, realised) if ready else decided
