"""Numbers beside the reference's: runs of it made again, the proof that this version of the code gives the same ones,
and a grid that this machine has made: identical, within the interval of fresh seeds, or not."""

import itertools
import os
import shutil
from collections.abc import Sequence
from math import isnan, nan, sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from gcpo import io, paths
from gcpo.reports import records
from gcpo.runs import record
from gcpo.runs.grids import expand
from gcpo.runs.params import Params, validate
from gcpo.runs.plan import Plan, recorded
from gcpo.runs.profiles import read_yaml
from gcpo.runs.record import CODES, RecordError, Run, load
from gcpo.runs.runner import run_grid
from gcpo.tasks import get_task

HEAD = "# Codes that give the same numbers as those that made the reference. Written by python -m gcpo replay N.\n"

# The proof behind every clean-up of profile laptop: one run of each kind of advantage, reward, loss and measurement.
NINE = (
    "tinyqa-grpo-0-02b2564b tinyqa-gcpo_bot-0-b537f065 tinymath-egpo-0-b5dcb914 tinyqa-care-0-15e36e8c "
    "tinyqa-clip_cov-3-318d92ee tinymath-dapo-0-e325906e tinymath-seed_grpo-0-e7178415 tinyqa-gradients-0-2e09766c "
    "tinymath_think-evaluate-0-7eac3130"
).split()
IDENTICAL, WITHIN, OUTSIDE, UNKNOWN = "identical", "within", "NOT within", "no interval"


def chosen(profile: str, number: int) -> list[Run]:
    """Return finished runs of a profile's reference to make again: :data:`NINE`, then the cheapest measurement of each
    kind and training by each method, and so on; of policies that no training has to make first."""
    finished = [run for run in records.runs(profile, reference=True) if run.finished]
    kinds: dict[tuple[bool, str], list[Run]] = {}
    for run in sorted(finished, key=lambda run: float(run.manifest["cpu_seconds"])):
        kind, params = run.manifest["kind"], run.manifest["params"]
        if run.manifest["id"] not in NINE and not params["at_step"]:
            kinds.setdefault((kind == "train", params["method"] if kind == "train" else kind), []).append(run)
    in_turn = itertools.chain(*itertools.zip_longest(*(kinds[kind] for kind in sorted(kinds))))
    return [*(run for run in finished if run.manifest["id"] in NINE), *filter(None, in_turn)][:number]


def replay(profile: str, runs: Sequence[Run], jobs: int | None = None) -> dict[str, str]:
    """Make runs of a profile's reference again, into ``outputs/<profile>-replay``; return how each differs, by id.

    "" says that every table has the SHA-256 of the reference's. A replay that this code has made before is not made
    again.

    Raises:
        RecordError: a run whose parameters have another id by now.
    """
    plans = []
    for manifest in (run.manifest for run in runs):
        given = {key: value for key, value in manifest["params"].items() if key in Params.model_fields}
        plan = Plan(manifest["kind"], validate({**given, "profile": f"{profile}-replay"}))
        if plan.id != (before := manifest["id"]):
            raise RecordError(f"{before} has become {plan.id}: give what was added a line in plan.yaml (SINCE).")
        if load(plan.folder).manifest.get("code") != record.environment()["code"]:
            shutil.rmtree(plan.folder, ignore_errors=True)
        plans.append(plan)
    os.environ["OMP_NUM_THREADS"] = str(runs[0].manifest["hardware"]["threads"] if runs else 1)
    run_grid(plans, jobs)
    return {plan.id: _differs(run, load(plan.folder)) for plan, run in zip(plans, runs, strict=True)}


def _differs(before: Run, after: Run) -> str:
    """Return how a run made again differs from its record; "" where no table does."""
    if not after.finished:
        return f"it did not finish: {after.fault or after.manifest.get('exit')}"
    files = after.manifest["files"]
    others = [name for name, value in before.manifest["files"].items() if files.get(name) != value]
    found = [f"{name}: {_difference(before, after, Path(name).stem)}" for name in others]
    if found and before.manifest["contents"].get("policy") != after.manifest["contents"].get("policy"):
        found.append("it began from other models (python -m gcpo world --reference takes the reference's)")
    return "; ".join(found)


def _difference(before: Run, after: Run, name: str) -> str:
    """Return by how much of their size the numbers of a table differ at most."""
    found = (records.table_of(run, name) for run in (before, after))
    old, new = (pd.DataFrame(table).dropna(axis="columns", how="all") for table in found)  # as a reference keeps them
    if list(old.columns) != list(new.columns) or len(old) != len(new):
        return "other lines or columns"
    first, second = (table.select_dtypes("number").to_numpy(float) for table in (old, new))
    gaps = np.abs(first - second) / np.maximum(np.abs(first), np.abs(second)).clip(min=1e-300)
    return f"by up to {np.nanmax(gaps, initial=0):.0e} of a number's size"


def certify(profile: str, runs: Sequence[Run]) -> Path:
    """Enter this code, and those that made ``runs``, into ``codes.yaml`` of the profile's reference."""
    path, here = paths.REFERENCE / profile / CODES, record.environment()
    known = dict(read_yaml(path) or {}) if path.exists() else {}
    for run in runs:
        known.setdefault(run.manifest["code"], f"{run.manifest['commit'][:12]}, made the reference")
    commit = "uncommitted changes" if here["dirty"] else str(here["commit"])[:12]
    known.setdefault(here["code"], f"{commit}, made {len(runs)} runs again")
    io.write(path, HEAD + "".join(f'"{code}": {said}\n' for code, said in known.items()))
    return path


def compare(profile: str, grid: str) -> pd.DataFrame:
    """Return a line per task and run of a grid that has finished here and in the reference.

    Columns: task, run, figure (a key of the manifest's results), runs (finished here, of those asked for), here and
    committed (means in per cent over the runs that both have), expected (the 95 % prediction interval of as many
    fresh seeds, from all committed seeds), and found: identical where every table has the committed SHA-256; within
    that interval, or not; or no interval, where the reference has too few seeds.
    """
    made = records.runs(profile), records.runs(profile, reference=True)
    here, kept = ({run.manifest["id"]: run.manifest for run in each if run.finished} for each in made)
    plans = pd.DataFrame([(plan.params.task, plan.label, plan.id) for plan in expand(grid, profile)])
    rows = []
    for (task, label), asked in plans.groupby([0, 1], sort=False)[2]:
        if both := [name for name in asked if name in here and name in kept]:
            row = _beside([here[name] for name in both], [kept[name] for name in both], [*kept.values()])
            rows.append({"task": task, "run": label, "runs": f"{asked.isin([*here]).sum()} of {len(asked)}", **row})
    return pd.DataFrame(rows)


def _beside(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], kept: list[dict[str, Any]]) -> dict[str, Any]:
    figure = _figure(theirs[0], set.intersection(*({*manifest["results"]} for manifest in ours + theirs)))
    same = {_settings(manifest) for manifest in theirs}
    every = [manifest for manifest in kept if _settings(manifest) in same]
    here, committed, seeds = ([100 * m["results"].get(figure, nan) for m in each] for each in (ours, theirs, every))
    low, high = predicted(seeds, len(here))
    found = UNKNOWN if isnan(low) else WITHIN if low <= fmean(here) <= high else OUTSIDE
    if all(own["files"] | other["files"] == own["files"] for own, other in zip(ours, theirs, strict=True)):
        found = IDENTICAL
    row = {"figure": figure, "here": round(fmean(here), 1), "committed": round(fmean(committed), 1)}
    return row | {"expected": "" if isnan(low) else f"{low:.1f} to {high:.1f}", "found": found}


def _figure(manifest: dict[str, Any], names: set[str]) -> str:
    """Return the result that says how a run of any kind ended, of those that runs have; "" where there is none."""
    metric, samples = get_task(manifest["params"]["task"]).reward_metric, recorded(manifest["params"], "eval_samples")
    scores = [f"{how}_{metric}" for how in ("sampled", f"avg@{samples}", "greedy")]
    gains = ["gain_gcpo_bot", *sorted(name for name in names if name.startswith("gain_"))]
    return next((name for name in (*scores, "pair_spearman", *gains) if name in names), "")


def _settings(manifest: dict[str, Any]) -> str:
    """Return what a run was, except its seed and the profile's name."""
    every = Params.model_fields.keys() - {"seed", "profile", "report_to"}
    return repr([manifest["kind"], *((key, recorded(manifest["params"], key)) for key in sorted(every))])


def predicted(values: Sequence[float], fresh: int) -> tuple[float, float]:
    """Return the 95 % prediction interval of the mean of so many fresh values, from normal ones; nan below two."""
    if len(values) < 2:
        return nan, nan
    width = stats.t.ppf(0.975, len(values) - 1) * float(np.std(values, ddof=1)) * sqrt(1 / len(values) + 1 / fresh)
    return fmean(values) - width, fmean(values) + width
