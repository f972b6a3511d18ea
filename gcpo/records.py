"""Run records: one folder for each run, written atomically, found again as a tidy table."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from gcpo import paths
from gcpo.params import Params

KINDS = {"train": "10_train", "gradients": "11_gradient_statistics"}  # kind of run -> its notebook
PACKAGES = "accelerate datasets gcpo math-verify numpy peft sentence-transformers torch transformers trl".split()
# What a reference keeps of a run: small, and enough for every table and figure.
PUBLISHED = ("manifest.json", "metrics.csv", "eval.csv", "queries.csv")


@dataclass
class Run:
    """One run's folder and manifest. ``manifest["status"]`` is running, finished or failed."""

    folder: Path
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether the run is complete; such a run is never run again."""
        return self.manifest.get("status") == "finished"

    def write(self) -> None:
        """Replace the manifest in one step, so that a kill leaves the old or the new one."""
        draft = self.folder / "manifest.json.draft"
        draft.write_text(json.dumps(self.manifest, indent=1, sort_keys=True, default=str) + "\n")
        draft.replace(self.folder / "manifest.json")

    def progress(self, done: int, total: int, what: str = "") -> None:
        """Say how far the run is, for whoever waits; a line of text in ``progress``."""
        (self.folder / "progress").write_text(f"{done}/{total} {what}".strip())

    def table(self, name: str, data: pd.DataFrame) -> None:
        """Write one of the run's CSV files in one step; floats keep 9 significant digits, enough for float32."""
        draft = self.folder / f"{name}.draft"
        data.to_csv(draft, index=False, float_format="%.9g")
        draft.replace(self.folder / name)


def run_id(kind: str, params: Params) -> str:
    """task-method-seed-hash for training, task-gradients-seed-hash for gradient statistics; "a+b" for a product."""
    name = params.method.replace("*", "+") if kind == "train" else kind
    return f"{params.task}-{name}-{params.seed}-{params.digest()}"


def label(kind: str, params: Mapping[str, Any]) -> str:
    """What tables call a run: its method with what is set beside it, "no training", or its kind."""
    if kind != "train":
        return kind
    if not params["max_steps"]:
        return "no training"
    settings = {**params.get("method_options", {}), **params["grpo"]}
    return " ".join([params["method"], *(f"{key}={value}" for key, value in settings.items())])


def folder(kind: str, params: Params) -> Path:
    """The folder of a run."""
    return paths.OUTPUTS / params.profile / "runs" / run_id(kind, params)


def load(path: Path) -> Run:
    """A run from its folder; an unreadable or missing manifest gives an empty one."""
    try:
        return Run(path, json.loads((path / "manifest.json").read_text()))
    except (OSError, json.JSONDecodeError):
        return Run(path)


@contextlib.contextmanager
def record(kind: str, params: Params) -> Iterator[Run]:
    """Open a run: its manifest says running now, and finished or failed (and why) at the end.

    Seconds add up over attempts; one that was killed could not write its own.
    """
    run = load(folder(kind, params))
    run.folder.mkdir(parents=True, exist_ok=True)
    before = run.manifest.get("seconds", 0.0)
    start = time.monotonic()
    run.manifest = {
        "id": run.folder.name,
        "kind": kind,
        "status": "running",
        "params": params.model_dump(),
        "started": run.manifest.get("started") or _now(),
        "attempts": run.manifest.get("attempts", 0) + 1,
        "seconds": before,
        "pid": os.getpid(),
        "exit": None,
        **environment(),
    }
    run.write()
    try:
        yield run
        run.manifest["status"] = "finished"
    except BaseException as error:
        run.manifest["status"] = "failed"
        run.manifest["exit"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        (run.folder / "progress").unlink(missing_ok=True)
        run.manifest["ended"] = _now()
        run.manifest["seconds"] = round(before + time.monotonic() - start, 1)
        run.manifest["peak_memory_gb"] = round(_peak_memory(), 2)
        run.write()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _peak_memory() -> float:
    unit = 1024**3 if sys.platform == "darwin" else 1024**2  # bytes there, kilobytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def environment() -> dict[str, Any]:
    """Commit, package versions and hardware, as a manifest keeps them."""
    import torch

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "packages": versions,
        "hardware": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpus": gpus,
        },
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=paths.ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


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
    from gcpo.grids import expand  # grids are made of runs

    return {run_id(kind, params) for kind, params in expand(grid, profile)}


def coverage(grid: str, profile: str, reference: bool = False) -> pd.DataFrame:
    """What a grid asks for and what there is: runs by status, per task and method (or kind), and what to know of them.

    ``source`` says "this machine" or "reference"; ``dirty`` counts runs made with uncommitted changes.
    """
    from gcpo.grids import expand

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
