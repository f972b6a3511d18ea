"""This machine's numbers beside the committed ones."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
from record_builders import finished, publish, write_grid

from gcpo.reports import records, reproduced

pytestmark = pytest.mark.usefixtures("places")


def scored(f1: float, **values: Any) -> None:
    table = pd.DataFrame({"query": ["a"], "decoding": ["sampled"], "f1": [f1]})
    finished(results={"greedy_f1": 0.1, "sampled_f1": f1}, tables={"eval": table}, max_steps=4, **values)


@pytest.fixture
def both() -> None:
    """Four committed seeds of two methods, of which two are made here again: one alike, one far from what it was."""
    write_grid("few", [{"kind": "train", "method": ["grpo", "se"], "seed": [0, 1]}])
    for seed, f1 in enumerate((0.50, 0.52, 0.54, 0.56)):
        for method in ("grpo", "se"):
            scored(f1, method=method, seed=seed)
    publish()
    for plan in [run for run in records.runs("p") if run.manifest["params"]["seed"] < 2]:
        if plan.manifest["params"]["method"] == "se":
            (plan.folder / "manifest.json").unlink()


def test_the_interval_of_fresh_seeds_is_that_of_student() -> None:
    # Mean 2, deviation 1, t(2; 0.975) = 4.3027; two fresh values: 4.3027 * sqrt(1/3 + 1/2).
    low, high = reproduced.predicted([1.0, 2.0, 3.0], 2) or (math.nan, math.nan)
    assert (low, high) == pytest.approx((2 - 3.92780, 2 + 3.92780), abs=1e-4)
    assert reproduced.predicted([1.0], 2) is None


@pytest.mark.parametrize(("f1", "found"), [(0.55, reproduced.WITHIN), (0.80, reproduced.OUTSIDE)])
def test_numbers_stand_beside_the_committed_ones(both: None, f1: float, found: str, capsys: Any) -> None:
    for seed in (0, 1):
        scored(f1, method="se", seed=seed)
    table = reproduced.compare("p", "few").set_index("run")
    assert table["found"].to_dict() == {"grpo": reproduced.IDENTICAL, "se": found}
    assert table.loc["se", ["runs", "here", "committed"]].tolist() == ["2 of 2", round(100 * f1, 1), 51.0]
    # Mean 53, deviation sqrt(20/3) = 2.582, t(3; 0.975) = 3.1824: 3.1824 * 2.582 * sqrt(1/4 + 1/2) = 7.12.
    assert table["expected"].tolist() == ["45.9 to 60.1"] * 2
    said = reproduced.said(reproduced.compare("p", "few"))
    assert (
        "identical: every table" in said
        and f"{found}: " in said
        and reproduced.EXPLAINED[reproduced.UNKNOWN] not in said
    )


def test_what_is_not_made_or_not_committed_has_no_line(both: None) -> None:
    scored(0.5, method="se", seed=0)
    write_grid("few", [{"kind": "train", "method": ["grpo", "se", "kle"], "seed": [0, 1]}])
    scored(0.5, method="kle", seed=0)
    table = reproduced.compare("p", "few").set_index("run")
    assert table["runs"].to_dict() == {"grpo": "2 of 2", "se": "1 of 2"}
    assert reproduced.said(reproduced.compare("p", "few").iloc[:0]) == ""


@pytest.mark.parametrize(
    ("kind", "results", "figure"),
    [
        ("evaluate", {"avg@4_f1": 0.5, "greedy_f1": 0.4, "questions": 9}, "avg@4_f1"),
        ("gradients", {"queries": 9, "pair_spearman": 0.5}, "pair_spearman"),
        ("one_step", {"batches": 3, "gain_rd_only": 0.4, "gain_gcpo_bot": 0.5}, "gain_gcpo_bot"),
        ("one_step", {"batches": 3, "gain_se": 0.5}, "gain_se"),
        ("one_step", {"batches": 3}, ""),
    ],
)
def test_runs_of_every_kind_have_a_number_to_compare(kind: str, results: dict[str, float], figure: str) -> None:
    write_grid("few", [{"kind": kind, "seed": [0, 1], "eval_samples": [4]}])
    for seed in (0, 1):
        finished(kind, results, {"eval": pd.DataFrame({"query": ["a"]})}, seed=seed, eval_samples=4)
    publish()
    (row,) = reproduced.compare("p", "few").to_dict("records")
    assert (row["figure"], row["runs"], row["found"]) == (figure, "2 of 2", reproduced.IDENTICAL)
    assert row["here"] == 50.0 if figure else math.isnan(row["here"])
