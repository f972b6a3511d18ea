"""Run records, the reading side: finished runs as a tidy table, from run folders or from the committed reference.

A reference holds the runs of a profile in few files: ``runs.jsonl.gz``, a manifest per line, and a parquet file for
each of :data:`TABLES`, the tables of all runs with the run's id as a column; ``SHA256SUMS`` says what they were when
they were published. What is damaged, edited or foreign is left out, and counted with its fault.
"""

import gzip
import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Collection
from functools import lru_cache
from math import nan
from pathlib import Path
from typing import Any

import pandas as pd

from gcpo import io, paths
from gcpo.runs.grids import comparison_key, expand, fitting, varied
from gcpo.runs.params import Params, profile_name, refuse_secrets
from gcpo.runs.plan import digest, label, recorded
from gcpo.runs.record import CODES, RecordError, Run, another_version, load, read_table, same_numbers

Runs = list[Run] | None
RUNS = "runs.jsonl.gz"
TABLES = (*"eval validation metrics queries rivals pairs answers updates questions grams".split(),)  # beside manifests
WAYS_OUT = {  # of runs that cannot be compared, by what differs
    "code": "Show that they give the same numbers (gcpo replay --profile {profile} 9) or run them again",
    "models": "Put one world in the place of the other, and run them again",
    "data": "Set data_revision and run them again on one",
}


def runs(profile: str, reference: bool = False) -> list[Run]:
    """Return all runs of a profile: those in this machine's outputs or, only when asked for, the reference's.

    Each is checked: one that is not to be trusted has a ``fault``, and is not ``finished``.
    """
    name = profile_name(profile)
    if not reference:
        places = sorted((paths.OUTPUTS / name / "runs").glob("*/manifest.json"))
        return [load(path.parent, whole=False) for path in places]
    folder = paths.REFERENCE / name
    if not (path := folder / RUNS).exists():
        return []
    if broken := io.broken(folder):
        return [Run(folder, {"id": name}, f"{broken}: restore it by git, or publish again")]
    manifests = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
    return [Run(folder, manifest, another_version(manifest)) for manifest in manifests]


def faults(profile: str, reference: bool = False) -> list[str]:
    """Return the records that every report leaves out, and why; a line each."""
    return list(dict.fromkeys(f"{_name(run)}: {run.fault}" for run in runs(profile, reference) if run.fault))


def _name(run: Run) -> str:
    """Return the name of a record: its folder's or, in a reference, its manifest's."""
    return str(run.manifest.get("id")) if (run.folder / RUNS).exists() else run.folder.name


def source(profile: str, reference: bool = False) -> str:
    """Whose runs a page shows, in words that tables and figures made from them carry."""
    return ("reference" if reference else "this machine's runs") + f" of profile {profile_name(profile)}"


def find(
    profile: str, grid: str | None = None, reference: bool = False, any_code: bool = False, every: Runs = None
) -> pd.DataFrame:
    """Return finished runs of a profile, one line each, or those of a grid; ``reference`` as in :func:`runs`.

    ``every`` are the runs if they were read before. Columns: id, kind, label (the method, with what varies among these
    runs), every parameter and every setting of TRL's config, as resolved (alpha is the alpha that ran), reward_range,
    every figure of the manifest's ``results``, hardware (a mapping), started, seconds and cpu_seconds (NaN of a run
    that was interrupted), peak_memory_gb (of the machine) and peak_gpu_memory_gb (NaN without a GPU), code, commit,
    dirty, schema, folder (a Path) and reference (bool). Empty where nothing has run.

    Raises:
        RecordError: with a grid and unless ``any_code``, runs of different code of this package, or of different models
            or data under one name, which are not to be compared.
    """
    finished = [run for run in (runs(profile, reference) if every is None else every) if run.finished]
    if grid is None:
        each = {run.manifest["id"]: (run.manifest["kind"], run.manifest["params"]) for run in finished}
        axes = varied(each.values())
        labels = {id_: label(k, p, axes[comparison_key(k, p["max_steps"])]) for id_, (k, p) in each.items()}
    else:
        labels = {plan.id: plan.label for plan in expand(grid, profile)}
        finished = [run for run in finished if run.manifest["id"] in labels]
        if not any_code:
            _refuse_mixtures(profile, [run.manifest for run in finished])
    rows = [_columns(run.manifest) | {"folder": run.folder} for run in finished]
    table = pd.DataFrame(rows, columns=None if rows else [*Params.model_fields, "id", "kind", "folder"])
    return table.assign(label=table["id"].map(labels), reference=reference)


def _columns(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return what a manifest says of its run, as :func:`find` shows it.

    Times are unknown of a run that was interrupted: they add up over attempts that failed, but one that was killed
    could not write its own, and what an attempt made again counts twice.
    """
    resolved, timed = manifest["resolved"], manifest if manifest.get("attempts", 1) == 1 else {}
    found = {key: recorded(manifest["params"], key) for key in Params.model_fields} | (resolved["trainer"] or {})
    found |= {"alpha": (resolved["method"] or {}).get("alpha"), "reward_range": resolved["task"]["reward_range"]}
    found |= manifest.get("results", {})
    found |= {name: manifest.get(name) for name in "id kind hardware started code commit dirty schema".split()}
    found |= {name: manifest.get(name, nan) for name in ("peak_memory_gb", "peak_gpu_memory_gb")}
    return found | {name: timed.get(name, nan) for name in ("seconds", "cpu_seconds")}


def _refuse_mixtures(profile: str, manifests: list[dict[str, Any]]) -> None:
    """Raise RecordError for runs made by different code, or that differ in what one name stands for."""
    known = same_numbers(profile_name(profile))
    versions: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for key, version in (item for manifest in manifests for item in _shared(manifest, known).items()):
        versions[key][version] += 1
    for (what, name), counts in versions.items():
        if len(counts) > 1:
            made = ", ".join(f"{count} with {version}" for version, count in counts.items())
            said = f"These runs of profile {profile!r} were made with different {what} of one name, {name}: {made}."
            way = f"{WAYS_OUT[what].format(profile=profile)}, or ask for any_code=True to compare them all the same."
            raise RecordError(f"{said} {way}")


def _shared(manifest: dict[str, Any], known: Collection[str] = ()) -> dict[tuple[str, str], str]:
    """Return what runs must share to be compared, by kind and name: their code (one where it is ``known`` to give the
    same numbers), each model, of which a name has one in each embedded world, and each split of the data but for its
    seed."""
    params, code, seed = manifest["params"], manifest.get("code"), recorded(manifest["params"], "world_seed")
    of = f" of world {seed}" if seed else ""
    made_by = "certified code" if code in known else f"code {code}"
    found: dict[tuple[str, str], str] = {("code", "gcpo"): made_by}
    for kind in ("policy", "embedder", "entailment"):
        if made := manifest.get("contents", {}).get(kind):
            found["models", f"{kind} {params[kind]!r}{of}"] = digest(made)
    for part, source in manifest.get("data", {}).items():
        version = {key: value for key, value in source.items() if key not in ("generator_seed", "cut")}
        found["data", f"{params['task']}, {part}: {source.get('split')}"] = json.dumps(version, sort_keys=True)
    return found


def coverage(grid: str, profile: str, reference: bool = False, every: Runs = None) -> pd.DataFrame:
    """Return the coverage of a grid: its runs by status, per task and label, with remarks on them.

    ``left_out`` counts records that are damaged, edited, incomplete or foreign; ``why`` names them, and those that
    belong to no run of the grid have a row of their own. ``dirty`` counts runs made with uncommitted changes.
    ``source`` says "this machine" or "reference". ``every`` are the runs if they were read before.
    """
    found = {_name(run): run for run in (runs(profile, reference) if every is None else every)}
    each = [(p.params.task, p.label, 1, p.id, found.pop(p.id, Run(p.folder))) for p in expand(grid, profile)]
    each += [("", "(of no run here)", 0, name, run) for name, run in found.items() if run.fault]
    rows = []
    for task, label_, wanted, name, run in each:
        said = {} if run.fault else run.manifest
        status, commit = said.get("status"), said.get("commit") or "none"
        counts = wanted, status == "finished", status == "failed", bool(run.fault), bool(status and said.get("dirty"))
        rows.append((task, label_, *counts, commit[:7] if status else "", f"{name}: {run.fault}" if run.fault else ""))
    ways: dict[str, Any] = dict.fromkeys(["wanted", "finished", "failed", "left_out", "dirty"], "sum")
    ways |= dict.fromkeys(["commits", "why"], lambda texts: ", ".join(sorted({*texts} - {""})))
    counted = pd.DataFrame(rows, columns=["task", "run", *ways]).groupby(["task", "run"], sort=False).agg(ways)
    return counted.assign(source="reference" if reference else "this machine").reset_index()


def gather(table: pd.DataFrame, name: str, keys: list[str], optional: bool = False) -> pd.DataFrame:
    """One of :data:`TABLES` of all runs of a table from :func:`find`, with the run's ``keys`` as columns.

    With ``optional``, a run without that table is left out: records may be older than the table.

    Raises:
        FileNotFoundError: a run has no such table, unless ``optional``.
    """
    parts = []
    for _, run in table.iterrows():
        if (part := table_of(Run(run["folder"], {"id": run["id"]}), name)) is not None:
            parts.append(part.assign(**{key: run[key] for key in keys}))
        elif not optional:
            raise FileNotFoundError(f"run {run['id']} has no table {name!r}")
    # An empty table would make text of the others' numbers.
    return pd.concat([p for p in parts if len(p)] or parts, ignore_index=True) if parts else pd.DataFrame()


def table_of(run: Run, name: str) -> pd.DataFrame | None:
    """A run's own table of this name, from its folder or from its lines in a reference; None if it has none."""
    if (run.folder / RUNS).exists():
        whole = run.folder / f"{name}.parquet"
        part = _parts(whole, whole.stat().st_mtime_ns).get(run.manifest["id"]) if whole.exists() else None
        return None if part is None else part.dropna(axis="columns", how="all")  # columns that other runs have
    path = run.folder / f"{name}.csv"
    return read_table(path) if path.exists() else None


@lru_cache(maxsize=len(TABLES))
def _parts(path: Path, changed: int) -> dict[str, pd.DataFrame]:
    return {str(id_): part.drop(columns="run") for id_, part in pd.read_parquet(path).groupby("run")}


def to_publish(profile: str) -> list[Run]:
    """Return this machine's finished runs of a profile, and those of its reference that can stand beside them: not made
    again here, of the same models, and in no grid with runs of this machine that other code has made."""
    own, known = [run for run in runs(profile) if run.finished], same_numbers(profile_name(profile))
    made = {run.manifest["id"]: _shared(run.manifest, known) for run in own}
    models = {what: version for shared in made.values() for what, version in shared.items() if what[0] == "models"}
    together = [{plan.id for plan in expand(grid, profile)} for grid in fitting(profile)]

    def comparable(manifest: dict[str, Any]) -> bool:
        shared, code = _shared(manifest, known), ("code", "gcpo")
        beside = {id_ for asked in together if manifest["id"] in asked for id_ in asked & made.keys()}
        same_models = all(models.get(what, version) == version for what, version in shared.items())
        return same_models and {made[id_][code] for id_ in beside} <= {shared[code]}

    old = [run for run in runs(profile, reference=True) if run.finished and run.manifest["id"] not in made]
    return own + [run for run in old if comparable(run.manifest)]


def write_reference(folder: Path, finished: list[Run]) -> None:
    """Write runs in the form of a reference, into a new folder.

    Raises:
        ParameterError: a record holds a password or a token.
    """
    for run in finished:
        refuse_secrets(run.manifest, f"the record of {run.manifest['id']}: ")
    folder.mkdir(parents=True)
    for name in TABLES:
        tables = ((run.manifest["id"], table_of(run, name)) for run in finished)
        if parts := [table.assign(run=id_) for id_, table in tables if table is not None]:
            whole, path = pd.concat(parts, ignore_index=True), folder / f"{name}.parquet"
            whole.to_parquet(path, index=False, compression="zstd", compression_level=15)
    lines = "".join(json.dumps(run.manifest, sort_keys=True) + "\n" for run in finished)
    (folder / RUNS).write_bytes(gzip.compress(lines.encode(), mtime=0))
    io.seal(folder)
    if (codes := paths.REFERENCE / folder.name / CODES).exists():  # grows with each code that is shown to be the same
        shutil.copy(codes, folder)
