"""Run records, the reading side: finished runs as a tidy table."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import pandas as pd

from gcpo import paths
from gcpo.runs.grids import expand
from gcpo.runs.manifest import Run, load, run_id
from gcpo.runs.params import Params

# What a reference keeps of a run: small, and enough for every table and figure.
PUBLISHED = ("manifest.json", "metrics.csv", "eval.csv", "queries.csv")


def label(kind: str, params: Mapping[str, Any]) -> str:
    """What tables call a run: its method with what is set beside it, "no training", or its kind."""
    if kind != "train":
        return kind
    if not params["max_steps"]:
        return "no training"
    settings = {**params.get("method_options", {}), **params["grpo"]}
    return " ".join([params["method"], *(f"{key}={value}" for key, value in settings.items())])


def runs(profile: str, reference: bool = False, wanted: set[str] | None = None) -> tuple[list[Run], bool]:
    """All runs of a profile, and whether they are those of the committed reference.

    The reference is read when asked for, and where no finished run (with an id in ``wanted``, if given) is on disk.
    """
    for root, committed in ((paths.OUTPUTS, False), (paths.REFERENCE, True)):
        if committed or not reference:
            found = [load(path.parent) for path in sorted((root / profile / "runs").glob("*/manifest.json"))]
            if any(run.finished and (wanted is None or run.folder.name in wanted) for run in found):
                return found, committed
    return [], reference


def find(profile: str, grid: str | None = None, reference: bool = False) -> pd.DataFrame:
    """Finished runs of a profile, one line each, or those of a grid; ``reference`` as in :func:`runs`.

    Columns: id, kind, label (as in :func:`label`), every parameter, every figure of the manifest's ``results``,
    seconds, peak_memory_gb, commit, dirty, folder (a Path) and reference (bool). Empty where nothing has run.
    """
    wanted = _wanted(grid, profile) if grid is not None else None
    found, committed = runs(profile, reference, wanted)
    lines = [
        {
            **run.manifest["params"],
            "label": label(run.manifest["kind"], run.manifest["params"]),
            **run.manifest.get("results", {}),
            **{key: run.manifest.get(key) for key in ("id", "kind", "seconds", "peak_memory_gb", "commit", "dirty")},
            "folder": run.folder,
            "reference": committed,
        }
        for run in found
        if run.finished and (wanted is None or run.folder.name in wanted)
    ]
    return pd.DataFrame(
        lines, columns=None if lines else [*Params.model_fields, "id", "kind", "label", "folder", "reference"]
    )


def _wanted(grid: str, profile: str) -> set[str]:
    return {run_id(kind, params) for kind, params in expand(grid, profile)}


def coverage(grid: str, profile: str, reference: bool = False) -> pd.DataFrame:
    """What a grid asks for and what there is: runs by status, per task and method (or kind), and what to know of them.

    ``source`` says "this machine" or "reference"; ``dirty`` counts runs made with uncommitted changes.
    """
    found, committed = runs(profile, reference, _wanted(grid, profile))
    by_id = {run.folder.name: run.manifest for run in found}
    rows = []
    for kind, params in expand(grid, profile):
        manifest = by_id.get(run_id(kind, params), {})
        rows.append(
            {
                "task": params.task,
                "run": label(kind, params.model_dump()),
                "wanted": 1,
                "finished": manifest.get("status") == "finished",
                "failed": manifest.get("status") == "failed",
                "dirty": bool(manifest.get("dirty")),
                "commit": (manifest.get("commit") or "none")[:7] if manifest else "",
            }
        )
    table = pd.DataFrame(rows).groupby(["task", "run"], sort=False)
    counts = table[["wanted", "finished", "failed", "dirty"]].sum()
    counts["commits"] = table["commit"].agg(lambda c: ", ".join(sorted(set(c) - {""})))
    return counts.assign(source="reference" if committed else "this machine").reset_index()


def gather(table: pd.DataFrame, name: str, keys: list[str]) -> pd.DataFrame:
    """One of the runs' CSV files, of all runs of a table from :func:`find`, with the run's ``keys`` as columns."""
    parts = []
    for _, run in table.iterrows():
        part = pd.read_csv(run["folder"] / name)
        parts.append(part.assign(**{key: run[key] for key in keys}))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def publish(profile: str) -> int:
    """Copy the small files of every finished run to the reference; returns how many runs."""
    found, committed = runs(profile)
    if committed or not found:
        raise FileNotFoundError(f"No finished runs of profile {profile!r} in {paths.OUTPUTS}; run a grid first.")
    target = paths.REFERENCE / profile / "runs"
    shutil.rmtree(target, ignore_errors=True)
    finished = [run for run in found if run.finished]
    for run in finished:
        (target / run.folder.name).mkdir(parents=True)
        for name in PUBLISHED:
            if (run.folder / name).exists():
                shutil.copy(run.folder / name, target / run.folder.name / name)
    return len(finished)
