"""Runs of the reference made again: the proof that this version of the code gives the same numbers."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from gcpo import io, paths
from gcpo.reports import records
from gcpo.runs import record
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.profiles import read_yaml
from gcpo.runs.record import CODES, RecordError, Run, load
from gcpo.runs.runner import run_grid

HEAD = """# Codes of this package that give the same numbers: runs of the reference, made again with each, had tables
# of the same SHA-256. Written by python -m gcpo check --replay N.
"""


# The proof behind every clean-up of profile laptop: one run of each kind of advantage, reward, loss and measurement.
NINE = (
    "tinyqa-grpo-0-02b2564b",
    "tinyqa-gcpo_bot-0-b537f065",
    "tinymath-egpo-0-b5dcb914",
    "tinyqa-care-0-15e36e8c",
    "tinyqa-clip_cov-3-318d92ee",
    "tinymath-dapo-0-e325906e",
    "tinymath-seed_grpo-0-e7178415",
    "tinyqa-gradients-0-2e09766c",
    "tinymath_think-evaluate-0-7eac3130",
)


def chosen(profile: str, number: int) -> list[Run]:
    """Return finished runs of a profile's reference to make again: :data:`NINE`, then measurements, then trainings by
    each method in turn, the cheapest of each; of policies that no training has to make first."""
    finished = [run for run in records.runs(profile, reference=True) if run.finished]
    fixed = [run for run in finished if run.manifest["id"] in NINE]
    turns: Counter[str] = Counter()
    others = []
    for run in sorted(finished, key=lambda run: float(run.manifest["cpu_seconds"])):
        kind, params = run.manifest["kind"], run.manifest["params"]
        if run not in fixed and not params["at_step"]:
            which = params["method"] if kind == "train" else kind
            others.append((turns[which], kind == "train", run))
            turns[which] += 1
    return [*fixed, *(run for *_, run in sorted(others, key=lambda entry: entry[:2]))][:number]


def replay(profile: str, runs: Sequence[Run], jobs: int | None = None) -> dict[str, str]:
    """Make runs of a profile's reference again, into ``outputs/<profile>-replay``; return how each differs, by id.

    "" says that every table has the SHA-256 of the reference's. A replay that this code has made before is not made
    again.

    Raises:
        RecordError: a run whose parameters have another id by now.
    """
    plans = []
    for run in runs:
        manifest = run.manifest
        plan = Plan(manifest["kind"], validate({**manifest["params"], "profile": f"{profile}-replay"}))
        if plan.id != manifest["id"]:
            raise RecordError(
                f"{manifest['id']} has become {plan.id}: a value that counts was added or changed. Give what was "
                "added a line in gcpo.runs.plan.SINCE, with the value that means as before."
            )
        if load(plan.folder).manifest.get("code") != record.environment()["code"]:
            shutil.rmtree(plan.folder, ignore_errors=True)
        plans.append(plan)
    os.environ["OMP_NUM_THREADS"] = str(runs[0].manifest["hardware"]["threads"] if runs else 1)
    run_grid(plans, jobs)
    return {plan.id: _differs(run, load(plan.folder)) for plan, run in zip(plans, runs, strict=True)}


def _differs(before: Run, after: Run) -> str:
    """Say how a run made again differs from its record; "" where no table does."""
    if not after.finished:
        return f"it did not finish: {after.fault or after.manifest.get('exit')}"
    files = after.manifest["files"]
    others = [name for name, value in before.manifest["files"].items() if files.get(name) != value]
    found = [f"{name}: {_difference(before, after, Path(name).stem)}" for name in others]
    if found and before.manifest["contents"].get("policy") != after.manifest["contents"].get("policy"):
        found.append("it began from other models (python -m gcpo world --reference takes the reference's)")
    return "; ".join(found)


def _difference(before: Run, after: Run, name: str) -> str:
    """The column that differs most, by how much of its size."""
    old, new = (records.table_of(run, name) for run in (before, after))
    if old is None or new is None or list(old.columns) != list(new.columns) or len(old) != len(new):
        return "other lines or columns"
    old, new = (part.select_dtypes("number").reset_index(drop=True) for part in (old, new))
    size = pd.concat([old.abs(), new.abs()]).groupby(level=0).max()
    worst = ((old - new).abs() / size).max().fillna(0.0)
    return f"{worst.idxmax()} by up to {worst.max():.0e} of its size" if worst.max() else "other texts"


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
