"""Run records, the reading side: finished runs as a tidy table, from run folders or from the committed reference.

A reference holds the runs of a profile in few files: ``runs.jsonl``, a manifest per line, and a parquet file for each
of :data:`TABLES`, the tables of all runs with the run's id as a column; ``SHA256SUMS`` says what they were when they
were published. What is damaged, edited or foreign is left out, and counted with its fault.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from math import nan
from pathlib import Path
from typing import Any

import pandas as pd

from gcpo import io, paths
from gcpo.runs.grids import comparison_key, expand, fitting, varied
from gcpo.runs.params import Params, profile_name, refuse_secrets
from gcpo.runs.plan import label, recorded
from gcpo.runs.record import CODES, RecordError, Run, another_version, load, read_table, same_numbers

TABLES = ("eval", "validation", "metrics", "queries", "rivals", "pairs", "answers", "updates")  # beside manifests


def runs(profile: str, reference: bool = False) -> list[Run]:
    """All runs of a profile: those in this machine's outputs, or, only when asked for, the committed reference's.

    Each is checked: one that is not to be trusted has a ``fault``, and is not ``finished``.
    """
    name = profile_name(profile)
    places = sorted((paths.OUTPUTS / name / "runs").glob("*/manifest.json"))
    found = _committed(paths.REFERENCE / name) if reference else [load(path.parent, whole=False) for path in places]
    for run in found:
        try:
            if run.finished:
                _read(run.manifest)
        except (KeyError, TypeError, AttributeError) as error:  # the hash is right, but the record is not one of ours
            run.fault = f"no record of a run ({type(error).__name__}: {error})"
    return found


def _read(m: dict[str, Any]) -> None:
    """Read of a manifest all that a report does: its columns, and what runs are told apart and counted by."""
    _columns(m), label(m["kind"], m["params"]), _models(m), _data(m), _made_with(m)
    hash((m["id"], m["kind"], m.get("code"), (m.get("commit") or "")[:7]))


def _committed(folder: Path) -> list[Run]:
    path = folder / "runs.jsonl"
    if not path.exists():
        return []
    if broken := io.broken(folder):
        broken += ": restore it from the repository, or publish again"
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            manifest = dict(json.loads(line))
            found.append(Run(folder, manifest, broken or another_version(manifest)))
        except (ValueError, TypeError, RecursionError):
            found.append(Run(folder, {"id": f"line {number}"}, broken or "not readable"))
    return found


def faults(profile: str, reference: bool = False) -> list[str]:
    """Return the records that every report leaves out, and why; a line each."""
    return list(dict.fromkeys(f"{_name(run)}: {run.fault}" for run in runs(profile, reference) if run.fault))


def _name(run: Run) -> str:
    """Return the name of a record: its folder's or, in a reference, its manifest's."""
    return str(run.manifest.get("id")) if _is_reference(run.folder) else run.folder.name


def _is_reference(folder: Path) -> bool:
    return (folder / "runs.jsonl").exists()


def source(profile: str, reference: bool = False) -> str:
    """Whose runs a page shows, in words that tables and figures made from them carry."""
    name = profile_name(profile)
    return f"reference of profile {name}" if reference else f"this machine's runs of profile {name}"


def find(profile: str, grid: str | None = None, reference: bool = False, any_code: bool = False) -> pd.DataFrame:
    """Finished runs of a profile, one line each, or those of a grid; ``reference`` as in :func:`runs`.

    Columns: id, kind, label (the method, with what varies among these runs), every parameter and every setting of
    TRL's config, as resolved (alpha is the alpha that ran), reward_range, every figure of the manifest's ``results``,
    hardware (a mapping), started, seconds and cpu_seconds (NaN of a run that was
    interrupted), peak_memory_gb (of the machine) and peak_gpu_memory_gb (NaN without a GPU), code,
    commit, dirty, schema, folder (a Path) and reference (bool). Empty where nothing has run.

    Raises:
        RecordError: with a grid and unless ``any_code``, runs of different code of this package, or of different models
            or data under one name, which are not to be compared.
    """
    finished = [run for run in runs(profile, reference) if run.finished]
    if grid is None:
        each = {run.manifest["id"]: (run.manifest["kind"], run.manifest["params"]) for run in finished}
        axes = varied(each.values())
        labels = {id_: label(k, p, axes[comparison_key(k, p["max_steps"])]) for id_, (k, p) in each.items()}
    else:
        labels = {plan.id: plan.label for plan in expand(grid, profile)}
        finished = [run for run in finished if run.manifest["id"] in labels]
        if not any_code and (why := next(_mixtures(profile, [run.manifest for run in finished]), None)):
            otherwise = "or ask for any_code=True to compare them all the same."
            raise RecordError(f"These runs of profile {profile!r} {why}, {otherwise}")
    nothing = [*Params.model_fields, "id", "kind"]
    table = pd.DataFrame([_columns(run.manifest) for run in finished], columns=None if finished else nothing)
    folders = pd.Series([run.folder for run in finished], dtype=object)
    return table.assign(label=table["id"].map(labels), folder=folders, reference=reference)


def _columns(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return what a manifest says of its run, as :func:`find` shows it.

    Times are unknown of a run that was interrupted: they add up over attempts that failed, but one that was killed
    could not write its own, and what an attempt made again counts twice.
    """
    resolved, timed = manifest["resolved"], manifest if manifest.get("attempts", 1) == 1 else {}
    said = {name: manifest.get(name) for name in ("hardware", "started", "code", "commit", "dirty", "schema")}
    measured = {name: manifest.get(name, nan) for name in ("peak_memory_gb", "peak_gpu_memory_gb")}
    return {
        **{key: recorded(manifest["params"], key) for key in Params.model_fields},
        **(resolved["trainer"] or {}),
        **{"alpha": (resolved["method"] or {}).get("alpha"), "reward_range": resolved["task"]["reward_range"]},
        **manifest.get("results", {}),
        **{"id": manifest["id"], "kind": manifest["kind"], **said, **measured},
        **{name: timed.get(name, nan) for name in ("seconds", "cpu_seconds")},
    }


def _mixtures(profile: str, manifests: list[dict[str, Any]]) -> Iterator[str]:
    """Yield why runs must not be compared: they were made by different code, or differ in what one name stands for."""
    known = same_numbers(profile_name(profile))
    codes = Counter((m.get("code"), (m.get("commit") or "no commit")[:7]) for m in manifests)
    if len({"certified" if code in known else code for code, _ in codes}) > 1:
        made = ", ".join(f"{count} at {commit} (code {code})" for (code, commit), count in codes.items())
        yield (
            f"were made by different code of this package: {made}. Show that they give the same numbers (python -m "
            f"gcpo replay --profile {profile} 9), run them again with one"
        )
    # Runs made on two kinds of processor start from two worlds, unless one took the other's.
    for (kind, name), counts in _ambiguous(model for m in manifests for model in _models(m).items()):
        made = ", ".join(f"{count} with {digest}" for digest, count in counts.items())
        yield (
            f"were made with different models of one name, {kind} {name!r}: {made}. Take one world for all (python -m "
            "gcpo world --reference takes the reference's) and run them again"
        )
    for (task, part), versions in _ambiguous(data for m in manifests for data in _data(m).items()):
        yield (
            f"have different data of one name, {task}, {part}: {' and '.join(sorted(versions))}. Set data_revision and "
            "run them again on one"
        )


def _ambiguous(named: Iterable[tuple[tuple[str, str], str]]) -> Iterator[tuple[tuple[str, str], Counter[str]]]:
    """Yield each name that stands for several versions, with the number of runs that have each of them."""
    versions: dict[tuple[str, str], Counter[str]] = {}
    for name, version in named:
        versions.setdefault(name, Counter())[version] += 1
    return ((name, counts) for name, counts in versions.items() if len(counts) > 1)


def _data(manifest: dict[str, Any]) -> dict[tuple[str, str], str]:
    """Return the source of each part of a run's data, by task and part; the seed of generated training data is the
    run's own."""
    task, sources, varies = manifest["params"]["task"], manifest.get("data", {}), {"generator_seed"}
    return {
        (task, part): json.dumps({key: source[key] for key in source.keys() - varies}, sort_keys=True)
        for part, source in sources.items()
    }


def _models(manifest: dict[str, Any]) -> dict[tuple[str, str], str]:
    """Return the models of a run, by kind and name: a digest of the hashes of their files. A name has one model in each
    embedded world."""
    seed = recorded(manifest["params"], "world_seed")
    of = f" of world {seed}" if seed else ""
    return {
        (kind, manifest["params"][kind] + of): hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:7]
        for kind in ("policy", "embedder", "entailment")
        if (made := manifest.get("contents", {}).get(kind))
    }


def coverage(
    grid: str, profile: str, reference: bool = False, unasked: Mapping[str, str] | None = None
) -> pd.DataFrame:
    """Return the coverage of a grid: its runs by status, per task and label, with remarks on them.

    ``left_out`` counts records that are damaged, edited, incomplete or foreign, and those of ``unasked`` (id -> why
    they count for nothing); where there are any, ``why`` names them, and those that belong to no run of the grid have
    a row of their own. ``dirty`` counts runs made with uncommitted changes. ``source`` says "this machine" or
    "reference". ``made_with`` is there only where runs of the grid differ in it: versions of what trains, and hardware.
    """
    found = {_name(run): run for run in runs(profile, reference)}
    each = [
        (plan.params.task, plan.label, 1, plan.id, found.pop(plan.id, Run(plan.folder)))
        for plan in expand(grid, profile)
    ]
    said = {name: run.fault or (unasked or {}).get(name) for name, run in found.items()}
    each += [("", "(of no run here)", 0, name, found[name]) for name, why in said.items() if why]
    rows = []
    for task, label_, wanted, name, run in each:
        why = run.fault or said.get(name)
        status = None if why else run.manifest.get("status")
        row = {"task": task, "run": label_, "wanted": wanted, "left_out": bool(why)}
        row |= {"finished": status == "finished", "failed": status == "failed"}
        row |= {"dirty": bool(status and run.manifest.get("dirty"))}
        row |= {"commit": (run.manifest.get("commit") or "none")[:7] if status else ""}
        row |= {"why": f"{name}: {why}" if why else ""}
        rows.append({**row, "made_with": _made_with(run.manifest) if status == "finished" else ""})
    table = pd.DataFrame(rows).groupby(["task", "run"], sort=False)
    counts = table[["wanted", "finished", "failed", "left_out", "dirty"]].sum()
    counts["commits"] = table["commit"].agg(lambda c: ", ".join(sorted(set(c) - {""})))
    counts["source"] = "reference" if reference else "this machine"
    if counts["left_out"].any():
        counts["why"] = table["why"].agg(lambda w: "; ".join(filter(None, w)))
    if len({row["made_with"] for row in rows} - {""}) > 1:
        counts["made_with"] = table["made_with"].agg(lambda w: "; ".join(sorted(set(w) - {""})))
    return counts.reset_index()


def _made_with(manifest: dict[str, Any]) -> str:
    packages, hardware = manifest.get("packages", {}), manifest.get("hardware", {})
    versions = [f"{name} {packages[name]}" for name in ("torch", "transformers", "trl") if name in packages]
    where = ", ".join(hardware.get("gpus", [])) or f"{hardware.get('threads')} x {hardware.get('processor')}"
    return ", ".join([*versions, where])


def gather(table: pd.DataFrame, name: str, keys: list[str], optional: bool = False) -> pd.DataFrame:
    """One of :data:`TABLES` of all runs of a table from :func:`find`, with the run's ``keys`` as columns.

    With ``optional``, a run without that table is left out: records may be older than the table.

    Raises:
        FileNotFoundError: a run has no such table, unless ``optional``.
    """
    parts = []
    for _, run in table.iterrows():
        part = table_of(Run(run["folder"], {"id": run["id"]}), name)
        if part is not None:
            parts.append(part.assign(**{key: run[key] for key in keys}))
        elif not optional:
            raise FileNotFoundError(f"run {run['id']} has no table {name!r}")
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def transfer_scores(table: pd.DataFrame) -> pd.DataFrame:
    """Return scores of policies on another task than they were trained on (``trained_on``), by sampled answers.

    Args:
        table: runs from :func:`find`.

    Returns:
        task, label (the method, or "no training"), seed, query and the task's metrics, means over the samples.
    """
    asked = table[table["kind"] == "evaluate"].reindex(columns=table.columns.union(["trained_on"], sort=False))
    asked = asked[asked["task"].isin(asked.loc[asked["trained_on"].notna(), "task"])]
    asked = asked.assign(label=asked["method"].where(asked["at_step"] > 0, "no training"))
    keys = ["task", "label", "seed"]
    answers = gather(asked, "answers", keys)
    if answers.empty:
        return pd.DataFrame(columns=[*keys, "query"])
    sampled = answers[answers["decoding"] == "sampled"]
    return sampled.groupby([*keys, "query"], sort=False).mean(numeric_only=True).reset_index()


def table_of(run: Run, name: str) -> pd.DataFrame | None:
    """A run's own table of this name, from its folder or from its lines in a reference; None if it has none."""
    if _is_reference(run.folder):
        whole = run.folder / f"{name}.parquet"
        part = _parts(whole, whole.stat().st_mtime_ns).get(run.manifest["id"]) if whole.exists() else None
        return None if part is None else part.dropna(axis="columns", how="all")  # columns that other runs have
    path = run.folder / f"{name}.csv"
    return read_table(path) if path.exists() else None


@lru_cache(maxsize=len(TABLES))
def _parts(path: Path, changed: int) -> dict[str, pd.DataFrame]:
    return {str(id_): part.drop(columns="run") for id_, part in pd.read_parquet(path).groupby("run")}


def to_publish(profile: str) -> list[Run]:
    """This machine's finished runs of a profile, and those of its reference that can stand beside them: not made again
    here, of the same models, and in no grid with runs of this machine that other code has made."""
    own, known = [run for run in runs(profile) if run.finished], same_numbers(profile_name(profile))

    def code_of(manifest: dict[str, Any]) -> str:
        return "certified" if manifest["code"] in known else str(manifest["code"])

    codes = {run.manifest["id"]: code_of(run.manifest) for run in own}
    models = {model: digest for run in own for model, digest in _models(run.manifest).items()}
    together = [{plan.id for plan in expand(grid, profile)} for grid in fitting(profile)]

    def comparable(manifest: dict[str, Any]) -> bool:
        beside = {codes[made] for asked in together if manifest["id"] in asked for made in asked & codes.keys()}
        same_models = all(models.get(model, digest) == digest for model, digest in _models(manifest).items())
        return same_models and beside <= {code_of(manifest)}

    old = [run for run in runs(profile, reference=True) if run.finished and run.manifest["id"] not in codes]
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
        tables = [(run.manifest["id"], table_of(run, name)) for run in finished]
        parts = [table.assign(run=id_) for id_, table in tables if table is not None]
        if parts:
            pd.concat(parts, ignore_index=True).to_parquet(folder / f"{name}.parquet", index=False)
    lines = "".join(json.dumps(run.manifest, sort_keys=True) + "\n" for run in finished)
    (folder / "runs.jsonl").write_text(lines, encoding="utf-8")
    io.seal(folder)
    if (codes := paths.REFERENCE / folder.name / CODES).exists():  # grows with each code that is shown to be the same
        shutil.copy(codes, folder)
