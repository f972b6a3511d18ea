"""This machine's numbers beside the committed ones: identical, within their interval, or not."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import fmean, stdev
from typing import Any

import pandas as pd
from scipy import stats

from gcpo.reports import records
from gcpo.runs.grids import expand
from gcpo.runs.params import Params
from gcpo.runs.plan import recorded
from gcpo.runs.record import Run
from gcpo.tasks import get_task

IDENTICAL, WITHIN, OUTSIDE, UNKNOWN = "identical", "within", "NOT within", "no interval"
EXPLAINED = {
    IDENTICAL: "every table of these runs has the committed SHA-256.",
    WITHIN: "the runs differ, as on another kind of processor, and their mean is where as many fresh seeds of the "
    "committed runs would lie (95 %).",
    OUTSIDE: "the mean lies where one in twenty would by chance. Several such lines are no chance: see that `git "
    "status` is clean and that .venv has the versions of requirements.lock (make clean setup), then let "
    "`gcpo check --replay 9` say which tables differ, and report it with this table.",
    UNKNOWN: "the reference has too few seeds to say.",
}


def compare(profile: str, grid: str) -> pd.DataFrame:
    """Return a line per task and run of a grid that has finished here and in the reference.

    Columns: task, run, figure (a key of the manifest's results), runs (finished here, of those asked for), here and
    committed (means in per cent over the runs that both have), expected (the 95 % prediction interval of as many
    fresh seeds, from all committed seeds), and found: a key of :data:`EXPLAINED`.
    """
    here = {run.manifest["id"]: run for run in records.runs(profile) if run.finished}
    kept = {run.manifest["id"]: run for run in records.runs(profile, reference=True) if run.finished}
    groups: dict[tuple[str, str], list[str]] = {}
    for plan in expand(grid, profile):
        groups.setdefault((plan.params.task, plan.label), []).append(plan.id)
    rows = []
    for (task, label), ids in groups.items():
        pairs = [(here[id_], kept[id_]) for id_ in ids if id_ in here and id_ in kept]
        if pairs:
            made = f"{sum(id_ in here for id_ in ids)} of {len(ids)}"
            rows.append({"task": task, "run": label, "runs": made, **_row(pairs, [*kept.values()])})
    return pd.DataFrame(rows)


def _row(pairs: Sequence[tuple[Run, Run]], kept: Sequence[Run]) -> dict[str, Any]:
    figure = _figure(
        pairs[0][1].manifest, set.intersection(*(set(run.manifest["results"]) for pair in pairs for run in pair))
    )
    same = {_settings(committed.manifest) for _, committed in pairs}
    alike = [run for run in kept if _settings(run.manifest) in same]
    ours, theirs, seeds = (
        [100 * run.manifest["results"].get(figure, math.nan) for run in part]
        for part in (*zip(*pairs, strict=True), alike)
    )
    identical = all(one.manifest["files"] == other.manifest["files"] for one, other in pairs)
    interval = predicted(seeds, len(pairs))
    inside = interval and interval[0] <= fmean(ours) <= interval[1]
    return {
        "figure": figure,
        "here": round(fmean(ours), 1),
        "committed": round(fmean(theirs), 1),
        "expected": "{:.1f} to {:.1f}".format(*interval) if interval else "",
        "found": IDENTICAL if identical else UNKNOWN if interval is None else WITHIN if inside else OUTSIDE,
    }


def _figure(manifest: dict[str, Any], names: Collection[str]) -> str:
    """Return the result that says how a run of any kind ended, of those that runs have; "" where there is none."""
    metric = get_task(manifest["params"]["task"]).reward_metric
    scores = [f"{how}_{metric}" for how in ("sampled", f"avg@{recorded(manifest['params'], 'eval_samples')}", "greedy")]
    gains = ["gain_gcpo_bot", *sorted(name for name in names if name.startswith("gain_"))]
    return next((name for name in (*scores, "pair_spearman", *gains) if name in names), "")


def _settings(manifest: dict[str, Any]) -> str:
    """Return what a run was, but for its seed and the profile's name."""
    every = Params.model_fields.keys() - {"seed", "profile", "report_to"}
    return repr([manifest["kind"], *((key, recorded(manifest["params"], key)) for key in sorted(every))])


def predicted(values: Sequence[float], fresh: int) -> tuple[float, float] | None:
    """Return the 95 % prediction interval of the mean of so many fresh values, from normal ones; None below two."""
    if len(values) < 2 or not math.isfinite(sum(values)):
        return None
    width = stats.t.ppf(0.975, len(values) - 1) * stdev(values) * math.sqrt(1 / len(values) + 1 / fresh)
    return fmean(values) - width, fmean(values) + width


def said(table: pd.DataFrame) -> str:
    """Return the table in words for a terminal, with the meaning of each of its findings; "" where it is empty."""
    if table.empty:
        return ""
    meant = [f"{found}: {EXPLAINED[found]}" for found in EXPLAINED if found in set(table["found"])]
    shown = table[["task", "run", "figure", "runs", "here", "committed", "expected", "found"]]
    return "\n".join(["This machine's runs beside the committed ones:", shown.to_string(index=False), *meant])
