"""Run records, the reading side: finished runs as a tidy table, from run folders or from the committed reference.

A reference holds the runs of a profile in few files: ``runs.jsonl``, a manifest per line, and ``eval.parquet``,
``metrics.parquet`` and ``queries.parquet``, the tables of all runs with the run's id as a column.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from gcpo import paths
from gcpo.runs.grids import expand, likes, varied
from gcpo.runs.manifest import RecordError, Run, check_schema, load
from gcpo.runs.params import Params, profile_name
from gcpo.runs.plan import label

TABLES = ("eval", "metrics", "queries")  # what runs leave behind beside their manifests
OLDEST = 0  # schema of a reference that can still be read: 0 was converted from records without one


def runs(profile: str, reference: bool = False) -> list[Run]:
    """All runs of a profile: those in this machine's outputs, or, only when asked for, the committed reference's.

    Raises:
        RecordError: a record of another version.
    """
    name = profile_name(profile)
    if reference:
        return _committed(paths.REFERENCE / name)
    return [load(path.parent) for path in sorted((paths.OUTPUTS / name / "runs").glob("*/manifest.json"))]


def _committed(folder: Path) -> list[Run]:
    path = folder / "runs.jsonl"
    if not path.exists():
        return []
    manifests = [json.loads(line) for line in path.read_text().splitlines()]
    for number, manifest in enumerate(manifests, start=1):
        check_schema(manifest, f"{path}, line {number},", oldest=OLDEST)
    return [Run(folder, manifest) for manifest in manifests]


def find(profile: str, grid: str | None = None, reference: bool = False, any_code: bool = False) -> pd.DataFrame:
    """Finished runs of a profile, one line each, or those of a grid; ``reference`` as in :func:`runs`.

    Columns: id, kind, label (the method, with what varies among these runs), every parameter and every setting of
    TRL's config, as resolved (alpha is the alpha that ran), reward_range, every figure of the manifest's ``results``,
    seconds, peak_memory_gb, code, commit, dirty, schema, folder (a Path) and reference (bool). Empty where nothing has
    run.

    Raises:
        RecordError: a record of another version; or, with a grid and unless ``any_code``, runs of different code of
            this package, which are not to be compared.
    """
    labels = {plan.id: plan.label for plan in expand(grid, profile)} if grid is not None else None
    manifests = [(run.folder, run.manifest) for run in runs(profile, reference) if run.finished]
    if labels is None:
        axes = varied((manifest["kind"], manifest["params"]) for _, manifest in manifests)
        labels = {
            m["id"]: label(m["kind"], m["params"], axes[likes(m["kind"], m["params"]["max_steps"])])
            for _, m in manifests
        }
    elif not any_code:
        _one_code(profile, [manifest for _, manifest in manifests if manifest["id"] in labels])
    lines = [
        {
            **manifest["params"],
            **(manifest["resolved"]["trainer"] or {}),
            "alpha": (manifest["resolved"]["method"] or {}).get("alpha"),
            "reward_range": manifest["resolved"]["task"]["reward_range"],
            "label": labels[manifest["id"]],
            **manifest.get("results", {}),
            **{key: manifest.get(key) for key in ("id", "kind", "seconds", "peak_memory_gb")},
            **{key: manifest.get(key) for key in ("code", "commit", "dirty", "schema")},
            "folder": folder,
            "reference": reference,
        }
        for folder, manifest in manifests
        if manifest["id"] in labels
    ]
    nothing = [*Params.model_fields, "id", "kind", "label", "folder", "reference"]
    return pd.DataFrame(lines, columns=None if lines else nothing)


def _one_code(profile: str, manifests: Iterable[dict[str, Any]]) -> None:
    counts = Counter((m.get("code"), (m.get("commit") or "no commit")[:7]) for m in manifests)
    if len({code for code, _ in counts}) > 1:
        made = ", ".join(f"{count} at {commit} (code {code})" for (code, commit), count in counts.items())
        raise RecordError(
            f"These runs of profile {profile!r} were made by different code of this package: {made}. Run them again "
            "with one, or ask for any_code=True to compare them all the same."
        )


def coverage(grid: str, profile: str, reference: bool = False) -> pd.DataFrame:
    """What a grid asks for and what there is: runs by status, per task and label, and what to know of them.

    ``source`` says "this machine" or "reference"; ``dirty`` counts runs made with uncommitted changes.
    """
    plans = expand(grid, profile)
    by_id = {run.manifest.get("id"): run.manifest for run in runs(profile, reference)}
    rows = []
    for plan in plans:
        manifest = by_id.get(plan.id, {})
        rows.append(
            {
                "task": plan.params.task,
                "run": plan.label,
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
    return counts.assign(source="reference" if reference else "this machine").reset_index()


def gather(table: pd.DataFrame, name: str, keys: list[str]) -> pd.DataFrame:
    """One of :data:`TABLES` of all runs of a table from :func:`find`, with the run's ``keys`` as columns.

    Raises:
        FileNotFoundError: a run has no such table.
    """
    committed: dict[Path, dict[str, pd.DataFrame]] = {}
    parts = []
    for _, run in table.iterrows():
        folder = run["folder"]
        if run["reference"]:
            if folder not in committed:
                whole = pd.read_parquet(folder / f"{name}.parquet")
                committed[folder] = {str(id_): part.drop(columns="run") for id_, part in whole.groupby("run")}
            part = committed[folder].get(run["id"])
            part = None if part is None else part.dropna(axis="columns", how="all")  # columns that other runs have
        else:
            path = folder / f"{name}.csv"
            part = pd.read_csv(path) if path.exists() else None
        if part is None:
            raise FileNotFoundError(f"run {run['id']} has no table {name!r}")
        parts.append(part.assign(**{key: run[key] for key in keys}))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def publish(profile: str) -> int:
    """Make the finished runs of this machine the reference of a profile; returns how many runs.

    Raises:
        FileNotFoundError: there is none.
    """
    finished = [run for run in runs(profile) if run.finished]
    if not finished:
        raise FileNotFoundError(f"No finished runs of profile {profile!r} in {paths.OUTPUTS}; run a grid first.")
    write_reference(paths.REFERENCE / profile_name(profile), finished)
    return len(finished)


def write_reference(folder: Path, finished: list[Run]) -> None:
    """Write runs in the form of a reference, each file in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TABLES:
        parts = [
            pd.read_csv(path).assign(run=run.manifest["id"])
            for run in finished
            if (path := run.folder / f"{name}.csv").exists()
        ]
        path = folder / f"{name}.parquet"
        if parts:
            pd.concat(parts, ignore_index=True).to_parquet(path.with_suffix(".draft"), index=False)
            path.with_suffix(".draft").replace(path)
        else:
            path.unlink(missing_ok=True)
    lines = "".join(json.dumps(run.manifest, sort_keys=True) + "\n" for run in finished)
    (folder / "runs.draft").write_text(lines)
    (folder / "runs.draft").replace(folder / "runs.jsonl")
