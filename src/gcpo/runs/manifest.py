"""Run records, the writing side: one folder for each run, written atomically."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from filelock import FileLock

from gcpo import paths
from gcpo.runs.plan import SCHEMA, Plan

PACKAGES = "accelerate datasets gcpo math-verify numpy peft sentence-transformers torch transformers trl".split()


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


class RecordError(ValueError):
    """A record that this version cannot read, or must not put beside others; the message says what to do."""


def load(path: Path) -> Run:
    """A run from its folder; an unreadable or missing manifest gives an empty one.

    Raises:
        RecordError: it was written by an older or a newer version.
    """
    try:
        run = Run(path, json.loads((path / "manifest.json").read_text()))
    except (OSError, json.JSONDecodeError):
        return Run(path)
    check_schema(run.manifest, str(path))
    return run


def check_schema(manifest: dict[str, Any], where: str, oldest: int = SCHEMA) -> None:
    """Refuse what was written by another version; raises :class:`RecordError` that says which."""
    schema = manifest.get("schema")
    if schema is None or schema < oldest:
        raise RecordError(
            f"{where} was made by an older version of gcpo, and its name does not say what ran: move it away and run "
            "it again."
        )
    if schema > SCHEMA:
        raise RecordError(
            f"{where} was made by a newer version of gcpo (schema {schema}; this one reads up to {SCHEMA}): update it."
        )


@contextlib.contextmanager
def claim(plan: Plan) -> Iterator[Run]:
    """The run, which no other process works on meanwhile: one that does is waited for, and has then finished it, or has
    died, which frees its claim."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(plan.folder / ".lock"):
        yield load(plan.folder)


@contextlib.contextmanager
def record(plan: Plan) -> Iterator[Run]:
    """Open a run: its manifest says running now, and finished or failed (and why) at the end.

    Seconds add up over attempts; one that was killed could not write its own.
    """
    run = load(plan.folder)
    run.folder.mkdir(parents=True, exist_ok=True)
    before = run.manifest.get("seconds", 0.0)
    start = time.monotonic()
    run.manifest = {
        **describe(plan),
        "status": "running",
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


def describe(plan: Plan) -> dict[str, Any]:
    """What a manifest says of its plan: the parameters as given, and every value as resolved."""
    given = plan.params.model_dump(mode="json")
    return {"schema": SCHEMA, "id": plan.id, "kind": plan.kind, "params": given, "resolved": plan.values}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _peak_memory() -> float:
    unit = 1024**3 if sys.platform == "darwin" else 1024**2  # bytes there, kilobytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def environment() -> dict[str, Any]:
    """Code, package versions and hardware, as a manifest keeps them."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "code": code_hash(Path(__file__).parents[1]),
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


@functools.cache
def code_hash(package: Path) -> str:
    """A hash of the package's files that can take part in a run: all but the reports, which only read."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if not name.startswith("reports/"):
            digest.update(f"{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


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
