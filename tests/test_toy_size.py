"""Toy size: what params/toy.yaml changes of a profile and of a grid, and every benchmark so on real rows."""

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gcpo import paths
from gcpo.reports.publish import publish
from gcpo.runs.evaluate import evaluation
from gcpo.runs.gradients import gradient_statistics
from gcpo.runs.grids import expand
from gcpo.runs.record import RecordError, Run, load
from gcpo.runs.train import train
from gcpo.tasks.reading import GENERATED

REAL = pytest.mark.skipif("GCPO_DATA_DIR" not in os.environ, reason="needs GCPO_DATA_DIR")


def test_runs_of_toy_size_are_never_published() -> None:
    with pytest.raises(RecordError, match="holds runs of toy size, which show nothing of a method: never published"):
        publish("paper-toy")


# A benchmark of each kind with a method of each family; AIME24 has nothing to train on. Rows of the three (or two)
# splits whose contexts were cut, of the 20 trained on, the 4 graded, and 2 along the way.
HERE = {"train_split": "validation", "validation_limit": 0}  # of NarrativeQA's splits two are here
ONE_EACH: dict[str, tuple[dict[str, Any], int]] = {
    "narrativeqa": ({"method": "gcpo_bot", **HERE}, 3),
    "math": ({"method": "egpo"}, 0),
    "gsm8k": ({"method": "r2vpo", "grpo": {"num_iterations": 2, "bf16": True}}, 0),
    "aime24": ({}, 0),
}


def read(run: Run) -> tuple[int, int, int]:
    """Held-out questions that were graded, rows read whose context was cut, and malformed ones left out."""
    rows = [source for source in run.manifest["data"].values() if "cut" in source]
    tables = [path for path in run.folder.glob("*.csv") if path.stem in ("eval", "queries", "answers")]
    graded = max(pd.read_csv(path)["query"].nunique() for path in tables)
    return graded, sum(source["cut"] for source in rows), sum(source["skipped"] for source in rows)


@pytest.mark.data
@pytest.mark.slow
@REAL
@pytest.mark.parametrize("task", ONE_EACH)
def test_each_benchmark_at_toy_size(task: str, outputs: Path, tmp_path: Path) -> None:
    changes, cut = ONE_EACH[task]
    kind = "train" if changes else "gradients"
    grid = tmp_path / "own.yaml"
    grid.write_text(str([{"kind": kind, **{key: [one] for key, one in {**changes, "task": task, "seed": 0}.items()}}]))
    (one,) = expand(str(grid), "paper-toy")
    run = load({"train": train, "gradients": gradient_statistics}[kind](one.params).folder)
    assert run.finished and run.folder.parent == paths.OUTPUTS / "paper-toy" / "runs"
    assert read(run) == (4, cut, 0)
    by_meaning = ["Embedder", "Entailment"] if task in ("narrativeqa", "aime24") else []
    assert sorted(run.manifest["cut"]) == by_meaning
    # Where no answer is found, or all are one, the entailment model is asked nothing.
    assert all(0 <= counted["cut"] <= counted["read"] for counted in run.manifest["cut"].values())
    if kind == "train":
        steps = pd.read_csv(run.folder / "metrics.csv")
        assert list(steps["step"]) == list(range(1, len(steps) + 1)) and len(steps) == 2


@pytest.mark.slow
def test_a_paper_s_own_training_at_toy_size_without_its_data(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CW-GRPO's, on generated rows."""
    monkeypatch.delenv("GCPO_DATA_DIR", raising=False)
    plan = next(one for one in expand("paper_cw_table2", "paper_cw-toy") if one.label.startswith("evaluate cw_grpo"))
    run, trained = load(evaluation(plan.params).folder), load(plan.training.folder)
    assert run.finished and trained.finished and read(run) == read(trained) == (4, 0, 0)
    assert {source["dataset"] for one in (run, trained) for source in one.manifest["data"].values()} == {GENERATED}
    steps = pd.read_csv(trained.folder / "metrics.csv")
    assert len(steps) == 2 and "rewards/format_think/mean" in steps
    completions = pd.concat(map(pd.read_parquet, (trained.folder / "completions").glob("*.parquet")))
    assert all("Note that respond by English" in messages[0]["content"] for messages in completions["prompt"])
