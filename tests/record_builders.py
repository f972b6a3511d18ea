"""Records made in a test's own folders: profiles, grids, and runs that finish, fail or leave tables."""

import json
import shutil
from typing import Any

import pandas as pd
import pytest

from gcpo import paths
from gcpo.reports import records
from gcpo.runs import record
from gcpo.runs.params import Params, validate
from gcpo.runs.plan import Plan
from gcpo.runs.profiles import load_profile, yaml_text

Tables = dict[str, pd.DataFrame]
TINY = {"profile": "p", "task": "tinyqa"}


def write_profile(name: str, values: dict[str, Any]) -> None:
    (paths.PARAMS / f"{name}.yaml").write_text(yaml_text({"profile": name, **values}))


def write_grid(name: str, blocks: Any) -> None:
    (paths.PARAMS / "grids" / f"{name}.yaml").write_text(yaml_text(blocks))


def planned(kind: str = "train", **values: Any) -> Plan:
    return Plan(kind, validate({**TINY, **values}))


def finished(kind: str = "train", results: Any = None, tables: Tables | None = None, **values: Any) -> record.Run:
    with record.record(planned(kind, **values)) as run:
        run.manifest["results"] = results or {"greedy_f1": 0.5}
        for name, table in (tables or {}).items():
            run.table(f"{name}.csv", table)
    return run


def publish() -> None:
    """Makes the finished runs the reference, without its pages."""
    shutil.rmtree(paths.REFERENCE / "p", ignore_errors=True)
    records.write_reference(paths.REFERENCE / "p", [run for run in records.runs("p") if run.finished])


def failed(**values: Any) -> record.Run:
    with pytest.raises(RuntimeError), record.record(planned(**values)) as run:
        raise RuntimeError("out of luck")
    return run


def scored(means: dict[str, list[float]], questions: int = 24, metric: str = "f1", noise: float = 0.02) -> pd.DataFrame:
    """Lines of evaluations, both decodings: label -> the mean score of each seed, spread evenly over questions."""
    shape = [noise * (2 * number / (questions - 1) - 1) for number in range(questions)]
    rows = [
        (label, seed, f"q{n}", decoding, mean + shape[(n + 7 * seed) % questions])
        for label, runs in means.items()
        for seed, mean in enumerate(runs)
        for decoding in ("greedy", "sampled")
        for n in range(questions)
    ]
    return pd.DataFrame(rows, columns=["label", "seed", "query", "decoding", metric])


def evaluated(mean: float, greedy: float | None = None, metric: str = "f1", questions: int = 24) -> Tables:
    """The table eval of one run, for ``finished(tables=...)``, of these mean scores."""
    lines = scored({"": [mean]}, questions, metric).drop(columns=["label", "seed"])
    shift = (mean if greedy is None else greedy) - mean
    return {"eval": lines.assign(**{metric: lines[metric] + shift * (lines["decoding"] == "greedy"), "answered": 1.0})}


def on_disk(run: record.Run) -> dict[str, Any]:
    return json.loads((run.folder / "manifest.json").read_text())


def smoke(**changes: Any) -> Params:
    """Parameters of the smoke profile, but for these."""
    return validate({**load_profile("smoke"), **changes})
