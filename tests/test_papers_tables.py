"""The papers' own tables: each of their grids at toy size, from records of all its runs to the CSV of notebook 40."""

import json
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gcpo import paths
from gcpo.reports.publish import EXHIBITS, OF_PAPERS, PAPERS
from gcpo.reports.tables import reported
from gcpo.runs import record
from gcpo.runs.grids import expand, owner
from gcpo.runs.plan import Plan
from gcpo.tasks import get_task
from gcpo.tasks.reading import GENERATED

NUMBERS = {"train": ("eval", []), "evaluate": ("answers", ["nll", "nll_thinking", "nll_answer", "entropy", "tokens"])}


def finish(plan: Plan) -> None:
    """Write the record of a run that nobody made: six questions, with answers that are right by the run's id."""
    rng, (name, others) = np.random.default_rng(zlib.crc32(plan.id.encode())), NUMBERS[plan.kind]
    asked = pd.DataFrame({"query": [f"q{n}" for n in range(6)] * 2, "decoding": np.repeat(["greedy", "sampled"], 6)})
    scores = {metric: rng.integers(0, 2, 12) for metric in get_task(plan.params.task).metrics}
    with record.record(plan) as run:
        run.manifest |= {"results": {}, "data": {"eval": {"dataset": GENERATED, "split": plan.params.eval_split}}}
        run.table(f"{name}.csv", asked.assign(**scores, **{other: rng.random(12) for other in others}))
        if plan.kind == "train":
            run.table("metrics.csv", pd.DataFrame({"step": [1, 2], "reward": rng.random(2), "entropy": rng.random(2)}))


@pytest.fixture
def shown(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the table that notebook 40 writes of a grid of which some runs are finished."""
    monkeypatch.setattr(record, "environment", lambda: {"code": "c0de", "commit": "c0ffee", "dirty": False})

    def table(grid: str, made: Any = lambda plan: True) -> pd.DataFrame:
        profile = f"{owner(grid)}-toy"
        for plan in filter(made, expand(grid, profile)):
            finish(plan)
        cells = json.loads((paths.NOTEBOOKS / f"{PAPERS}.ipynb").read_text())["cells"]
        given = {"profile": profile, "only": grid, "reference": False, "any_code": False, "write_to": str(outputs)}
        for source in ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"][1:]:
            exec(source, given)  # a kernel for each grid would take longer than all of this
        return pd.read_csv(outputs / "papers_tables.csv")

    return table


@pytest.mark.slow
@pytest.mark.parametrize("grid", sorted(OF_PAPERS))
def test_a_paper_s_grid_ends_in_its_table(grid: str, shown: Any) -> None:
    table = shown(grid)
    assert {*table["exhibit"]} == {name for name, shows in EXHIBITS.items() if grid in shows["grids"]}
    assert (table["seeds"] == table["wanted"]).all() and table["records"].str.contains("on generated rows").all()
    assert (table.loc[table["benchmark"] != "openr1", "wanted"] == 2).all()  # EGPO's section 4.5 asks a policy once
    assert table.loc[table["against"].notna(), "low"].notna().all()
    for exhibit in {*table["exhibit"]} & {name for name, shows in EXHIBITS.items() if "table" in shows}:
        own = table[table["exhibit"] == exhibit].replace({"row": r" estimator=\S+"}, "", regex=True)
        printed = Counter(own.drop_duplicates([*"model row benchmark metric".split()])["printed"].dropna())
        paper = reported(EXHIBITS[exhibit]["table"]).query("metric in ['accuracy', 'bleu', 'em', 'f1']")
        paper = paper[paper["model"].isin(own["model"])] if "model" in paper else paper
        assert printed and not printed - Counter(paper["value"])  # each number beside one kind of run
        assert len(EXHIBITS[exhibit]["grids"]) > 1 or not Counter(paper.query("method != ''")["value"]) - printed


def test_a_number_stands_beside_the_run_that_it_is_printed_for_and_half_a_grid_is_shown(shown: Any) -> None:
    table = shown("paper_seed_table3", lambda plan: plan.params.group_size == 16 and plan.kind == "train")
    table = table[table["exhibit"] == "SEED-GRPO Table 3"].assign(G=table["row"].str.partition(" G=")[2])
    paper = {"16 steps=360": 56.7, "8 steps=928": 46.7, "8 steps=384": 40.0, "8 steps=400": 43.3}
    assert dict(table[table["benchmark"] == "aime24"][["G", "printed"]].to_numpy()) == paper
    made = table.dropna(subset=["mean"])[["G", "benchmark", "seeds"]]
    assert made.to_numpy().tolist() == [["16 steps=360", "math500", 2]]


@pytest.mark.slow
def test_figure_1_is_drawn_from_runs_of_toy_size(call: Any, outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GCPO_DATA_DIR", raising=False)  # sums are shorter than papers
    call("grid", "paper_figure1", "--profile", "paper", "--toy")
    call("report", "--profile", "paper", "--toy", "--grid", "paper_figure1")
    made = pd.read_csv(outputs / "paper-toy" / "reports" / "figure1_alignment.csv")
    assert {*made["task"]} == {plan.params.task for plan in expand("paper_figure1", "paper")}
    assert {path.name for path in (outputs / "paper-toy" / "reports").glob("figure1*.png")} >= {"figure1.png"}
