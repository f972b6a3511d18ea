"""Run records, the writing side: one folder for each run, written atomically, and records that prove themselves."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from filelock import FileLock
from huggingface_hub import try_to_load_from_cache
from tqdm import tqdm

from gcpo import io, paths, world
from gcpo.errors import UserError
from gcpo.runs import distributed
from gcpo.runs.params import ADDRESSES, SECRET
from gcpo.runs.plan import SCHEMA, Plan, digest, recorded
from gcpo.runs.profiles import read_yaml, yaml_text
from gcpo.semantics.models import embedder_path
from gcpo.tasks import sources
from gcpo.tasks.base import DATA_DIR

# Places and credentials in TRL's config, left out of manifests; params and contents name the models.
PLACES = ADDRESSES.union("output_dir run_name logging_dir hub_token hub_model_id hub_revision entailment_model".split())
PACKAGES = "accelerate datasets gcpo math-verify numpy peft sentence-transformers torch transformers trl vllm".split()
CODES = "codes.yaml"  # file of a reference: codes that give the same numbers
LOCKS = (".claim", ".job")  # held by the process that makes a run, and by the runner that has it made
EVERY = 10.0  # seconds between two states of a bar
ASIDE = "set-aside-"  # folders of what could not be trusted, kept inside the run's own


@dataclass
class Run:
    """One run's folder and manifest. ``manifest["status"]`` is running, finished or failed; ``fault`` says why the
    record is not to be trusted, None if it is."""

    folder: Path
    manifest: dict[str, Any] = field(default_factory=dict)
    fault: str | None = None
    bar: tqdm[Any] | None = field(default=None, repr=False, compare=False)

    @property
    def finished(self) -> bool:
        """Return True for a complete run with a valid record; such a run is never run again."""
        return self.fault is None and self.manifest.get("status") == "finished"

    def write(self) -> None:
        """Replace the manifest in one step, so that a kill leaves the old or the new one."""
        self.manifest = json.loads(json.dumps(self.manifest, default=str))
        self.manifest["sha256"] = _own_hash(self.manifest)
        io.write(self.folder / "manifest.json", json.dumps(self.manifest, indent=1, sort_keys=True) + "\n")

    def progress(self, done: int, total: int, what: str, **values: float) -> None:
        """Show how far a part of the run is, with values of its last step."""
        if self.bar is None or self.bar.desc != what:
            if self.bar is not None:
                self.bar.close()
            self.bar = tqdm(total=total, initial=done, desc=what, leave=False, mininterval=EVERY, miniters=1)
        self.bar.set_postfix(values, refresh=False)
        self.bar.update(done - self.bar.n)

    def table(self, name: str, data: pd.DataFrame) -> None:
        """Write one of the run's CSV files in one step, and its SHA-256 into the manifest.

        Floats keep 9 significant digits, enough for float32.
        """
        with io.replacing(self.folder / name) as draft:
            data.to_csv(draft, index=False, float_format="%.9g")
        self.manifest.setdefault("files", {})[name] = io.sha256(self.folder / name)


def read_table(path: Path) -> pd.DataFrame:
    """Return one of a run's CSV files. Ids of questions and of documents are text, though some benchmarks number theirs
    and one may be called "nan"; only "" is missing."""
    return pd.read_csv(path, dtype={"query": str, "document": str}, keep_default_na=False, na_values=[""])


class RecordError(UserError):
    """Records that must not be compared with others, or a reference that must not be replaced; says what to do."""


# --- reading one record ---------------------------------------------------------------------------------------------


def load(folder: Path, whole: bool = True) -> Run:
    """Return the checked run of a folder, empty if there is no manifest.

    A record that cannot be read, was edited, cut or copied here from elsewhere, or whose models or data have changed
    since, has a ``fault`` that says so: it counts as not run. Its policy and completions, gigabytes that tables do not
    need, are read only if ``whole``.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        return Run(folder, manifest, another_version(manifest) or _fault(folder, manifest, whole))
    except FileNotFoundError:
        return Run(folder)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        return Run(folder, fault=f"manifest.json is no record of a run ({type(error).__name__}: {error})")


def states(plans: Iterable[Plan]) -> list[str]:
    """Return the state of each run: "not run", "running" (or killed), "finished", "failed", or "left out (why)"."""
    runs = [load(plan.folder, whole=False) for plan in plans]
    return [f"left out ({run.fault})" if run.fault else run.manifest.get("status", "not run") for run in runs]


def another_version(manifest: dict[str, Any]) -> str | None:
    """Return why this version cannot read a record, or None if it can."""
    if (schema := manifest.get("schema")) == SCHEMA:
        return None
    return f"made by another version of gcpo (schema {schema}, not {SCHEMA}): move it away and run it again"


def _fault(folder: Path, manifest: dict[str, Any], whole: bool) -> str | None:
    if manifest.get("sha256") != _own_hash(manifest):
        return "manifest.json was edited"
    if manifest["id"] != folder.name:
        return f"the record of {manifest['id']}, in a folder of another name"
    if not folder.name.endswith(f"-{digest(manifest['resolved'])}"):
        return "its id is not the hash of what ran"
    if manifest["status"] == "finished":
        before = manifest.get("files", {})
        now = {name: io.sha256(folder / name) for name in before if (folder / name).is_file()}
        if whole and "made" in manifest:  # which older records have not
            before, now = before | manifest["made"], now | _made(folder)
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                how = "was changed" if name in before else "was added"
                return f"{name} {how if name in now else 'is missing'}"
    return changed(manifest.get("contents", {}), manifest["params"])


def _made(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a run's policy, and one of all completions."""
    made = {f"policy/{name}": value for name, value in io.hashes(folder / "policy").items()}
    completions = io.hashes(folder / "completions") | io.hashes(folder / "completions.parquet")
    return made | ({"completions": _own_hash(completions)} if completions else {})


def _own_hash(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# --- what a run is made of ------------------------------------------------------------------------------------------


def fingerprints(params: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of every file of a run's policy, embedder, entailment model and data, by name.

    Models from the Hub have their commit instead. Files that are not on this machine are left out.
    """
    seed = recorded(params, "world_seed")
    found = {
        "policy": _model(params["policy"], "policy", seed, params["policy_revision"]),
        "embedder": _model(str(embedder_path(params["embedder"])), "embedder", seed),
        "entailment": _model(params["entailment"], "entailment", seed),
    }
    for split, source in sources(params["task"]).items() if DATA_DIR in os.environ else ():
        if split in (params["train_split"], params["validation_split"], params["eval_split"]):
            files = [one.file(os.environ[DATA_DIR]) for one in (source, *source.more)]
            found[f"data ({split})"] = {name: value for path in files for name, value in io.hashes(path).items()}
    return {key: value for key, value in found.items() if value}


def _model(name: str, kind: str, seed: int, revision: str | None = None) -> dict[str, str]:
    place = world.folder(kind, name, seed) if world.embedded(name, kind) else Path(name)
    if place.exists():
        return {file: value for file, value in io.hashes(place).items() if not file.endswith(".md")}
    with contextlib.suppress(ValueError):  # a path that is not there
        config = try_to_load_from_cache(name, "config.json", revision=revision)
        return {"commit": Path(config).parent.name} if isinstance(config, str) else {}
    return {}


def changed(before: Mapping[str, dict[str, str]], params: Mapping[str, Any], embedded: bool = False) -> str | None:
    """Return the first model or data set that has changed since the run, as far as this machine can tell, or None.

    The embedded models are left out unless asked for: their settings are part of the id, their folder checks itself,
    and made on another processor they may differ in a last bit.
    """
    for key, now in fingerprints(params).items():
        old = before.get(key, {} if key.startswith("data") else now)
        if old != now and (embedded or not world.embedded(params.get(key, ""), key)):
            name = next(name for name in sorted({*old, *now}) if old.get(name) != now.get(name))
            return f"{key} is not what it was made of: {params.get(key, params['task'])} has another {name}"
    return None


def describe(plan: Plan) -> dict[str, Any]:
    """Return a manifest's part about its plan: given parameters, resolved values, and hashes of models and data."""
    given = plan.params.model_dump(mode="json")
    given["grpo"] = placeless(given["grpo"])  # params.yaml has all of it
    named = {"schema": SCHEMA, "id": plan.id, "kind": plan.kind}
    return {**named, "params": given, "resolved": plan.values, "contents": fingerprints(given)}


def placeless(config: dict[str, Any]) -> dict[str, Any]:
    """Return TRL's config as a manifest keeps it, without :data:`PLACES`."""
    return {key: value for key, value in config.items() if key not in PLACES}


def environment() -> dict[str, Any]:
    """Return code, package versions and hardware, as a manifest keeps them."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    hardware: dict[str, Any] = {"processor": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    hardware["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "code": code_hash(Path(__file__).parents[1]),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "packages": versions,
        "hardware": hardware,
    }


@functools.cache
def code_hash(package: Path) -> str:
    """Return a hash of what the package's files compute: their syntax without docstrings and comments, reports and
    command line left out, since those only read."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if not name.startswith(("reports/", "cli", "__main__")):
            tree = ast.parse(path.read_bytes())
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                    node.body = node.body[1:]
            digest.update(f"{name}\n{ast.dump(tree)}".encode())
    return digest.hexdigest()[:12]


def same_numbers(profile: str) -> frozenset[str]:
    """Return the codes known to give the same numbers: ``codes.yaml`` of a profile's reference, which runs made again
    (``gcpo replay``) have entered."""
    path = paths.REFERENCE / profile / CODES
    return frozenset(read_yaml(path) or ()) if path.exists() else frozenset()


def _git(*words: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(["git", *words], cwd=paths.ROOT, stderr=subprocess.DEVNULL, text=True).strip()
    return None


def _processor() -> str:
    with contextlib.suppress(OSError):
        if named := re.search(r"model name\s*:(.*)", Path("/proc/cpuinfo").read_text()):
            return named[1].strip()
    return platform.processor() or platform.machine()


# --- making one record ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def claim(plan: Plan) -> Iterator[Run]:
    """Yield the run while no other process works on it; a lock is free again however its process ends. A record that
    cannot be trusted is moved into a folder inside the run's own."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(plan.folder / LOCKS[0]):
        run = load(plan.folder)
        yield _set_aside(run, run.fault) if run.fault else run


def _set_aside(run: Run, why: str) -> Run:
    target = run.folder / f"{ASIDE}{1 + len(list(run.folder.glob(f'{ASIDE}*')))}"
    target.mkdir()
    for path in run.folder.iterdir():
        if path.name not in LOCKS and not path.name.startswith(ASIDE):
            path.rename(target / path.name)
    (target / "why.txt").write_text(f"{why}\n")
    print(f"{run.folder.name}: {why}; it is kept in {target.name} and made again", flush=True)
    return Run(run.folder)


@contextlib.contextmanager
def record(plan: Plan) -> Iterator[Run]:
    """Open a run: its manifest says running now, and finished or failed (and why) at the end.

    The run continues an earlier attempt. An attempt begun with other code, packages or models is set aside, since the
    record names one of each.

    Seconds and processor seconds (``cpu_seconds``: fewer than ``seconds`` times threads where the machine did other
    work) add up over attempts; a killed attempt could not write its own.
    """
    if plan.kind == "train" and plan.params.processes == 1:
        distributed.take_one_gpu()
    here, run = environment(), load(plan.folder)
    if run.manifest and (why := _begun_elsewhere(run.manifest, here)):
        run = _set_aside(run, why)
    io.write(run.folder / "params.yaml", yaml_text(plan.params.model_dump(mode="json")))
    distributed.forget_peak()
    before, start = run.manifest, _clocks()
    run.manifest = {**describe(plan), **here, "status": "running", "exit": None, "pid": os.getpid()}
    run.manifest |= {"started": before.get("started") or _now(), "attempts": before.get("attempts", 0) + 1}
    run.manifest |= {name: before.get(name, 0.0) for name in start}
    run.write()
    try:
        yield run
        # By now all models and data are on this machine; of one that has changed meanwhile, what it was at first.
        made_of = fingerprints(run.manifest["params"]) | run.manifest["contents"]
        run.manifest |= {"contents": made_of, "made": _made(run.folder), "status": "finished"}
    except BaseException as error:
        run.manifest |= {"status": "failed", "exit": SECRET.sub("...", f"{type(error).__name__}: {error}")}
        raise
    finally:
        if run.bar is not None:
            run.bar.close()
        spent = {name: round(before.get(name, 0.0) + now - start[name], 1) for name, now in _clocks().items()}
        run.manifest |= {**spent, "ended": _now(), "peak_memory_gb": round(_peak_memory(), 2)}
        of_gpu = [one.get("peak_gpu_memory_gb", 0.0) for one in (before, run.manifest)]  # of before, of its processes
        if peak := max(*of_gpu, distributed.peak_memory()):
            run.manifest["peak_gpu_memory_gb"] = round(peak, 2)
        run.write()


def _begun_elsewhere(manifest: dict[str, Any], here: dict[str, Any]) -> str | None:
    """Return why an unfinished run cannot continue in this environment (``here``), or None if it can."""
    code = manifest.get("code", here["code"])
    if code != here["code"] and not {code, here["code"]} <= same_numbers(manifest["params"]["profile"]):
        return f"begun by other code of this package ({code}; this is {here['code']})"
    before, now = manifest.get("packages", {}), here.get("packages", {})
    for name in before.keys() & now.keys():
        if before[name] != now[name]:
            return f"begun with {name} {before[name]}, and this is {now[name]}"
    return changed(manifest.get("contents", {}), manifest["params"], embedded=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _clocks() -> dict[str, float]:
    return {"seconds": time.monotonic(), "cpu_seconds": sum(os.times()[:4])}  # of it and its ended children


def _peak_memory() -> float:
    # Bytes on a Mac, kilobytes on Linux.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 ** (3 if sys.platform == "darwin" else 2)
