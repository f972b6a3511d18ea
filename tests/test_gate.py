"""The gate: open where GRPO learns in both decodings, closed where it does not or where runs are missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from record_builders import evaluated, finished, write_grid

from gcpo import paths
from gcpo.cli import main
from gcpo.reports import records
from gcpo.reports.evidence import Comparison, decide
from gcpo.reports.gate import gate
from gcpo.statistics import Interval

CLEAR = Comparison("a", "b", 3, "3 seeds each", Interval(2, 1, 3), Interval(2, 1, 3), 0.001)
LEARNS = {"start": (0.40, 0.50), "grpo": (0.60, 0.62)}  # sampled and greedy


@pytest.fixture(autouse=True)
def grid(places: Path) -> None:
    task = {"task": ["tinyqa", "tinymath"]}
    write_grid(
        "table1",
        [
            {"kind": "train", **task, "method": ["grpo", "se"], "seed": [0, 1, 2]},
            {"kind": "train", **task, "method": ["grpo"], "seed": [0, 1, 2], "max_steps": [0]},
        ],
    )


def made(task: str, grpo: tuple[float, float], start: tuple[float, float] = LEARNS["start"], seeds: int = 3) -> None:
    metric = {"tinyqa": "f1", "tinymath": "accuracy"}[task]
    for seed in range(seeds):
        wobble = 0.004 * (seed - 1)
        finished(task=task, method="grpo", seed=seed, tables=evaluated(grpo[0] + wobble, grpo[1] - wobble, metric))
        finished(task=task, method="grpo", seed=seed, max_steps=0, tables=evaluated(*start, metric))


def test_it_is_open_where_sampled_and_greedy_rise(capsys: pytest.CaptureFixture[str]) -> None:
    made("tinyqa", LEARNS["grpo"])
    made("tinymath", LEARNS["grpo"])
    found = gate("p")
    assert found.passed and found.missing == {} and found.closed("tinyqa") is None
    row = found.table.set_index(["task", "decoding"]).loc[("tinyqa", "sampled")]
    assert row[["start", "grpo", "gain"]].tolist() == pytest.approx([40, 60, 20])
    assert 0 < row["low"] < 20 < row["high"] < 25
    assert row["std"] == pytest.approx(0.4)
    assert row["runs"] == "3 of 3" and row["seeds"] == 3
    assert found.table["metric"].tolist() == ["f1", "f1", "accuracy", "accuracy"]
    assert main(["check", "--gate", "p"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == "task decoding metric seeds start grpo gain low high std passes runs".split()
    assert "40.0" in lines[0] and "60.0" in lines[0] and "The gate is open on tinymath." in lines


@pytest.mark.parametrize(
    "grpo", [(0.60, 0.48), (0.60, 0.50), (0.38, 0.62)], ids=["greedy falls", "stays", "sampled falls"]
)
def test_one_decoding_that_does_not_rise_closes_it(
    grpo: tuple[float, float], capsys: pytest.CaptureFixture[str]
) -> None:
    made("tinyqa", LEARNS["grpo"])
    made("tinymath", grpo)
    found = gate("p")
    assert not found.passed and found.closed("tinyqa") is None
    assert (found.closed("tinymath") or "").startswith("The gate failed on tinymath: GRPO's gain over the starting")
    words = [decide([CLEAR], closed=found.closed(task)).label for task in ("tinyqa", "tinymath")]
    assert words == ["holds", "not tested"]
    assert main(["check", "--gate", "p"]) == 1
    printed = capsys.readouterr().out
    assert "The gate is open on tinyqa." in printed and "The gate failed on tinymath" in printed


@pytest.mark.parametrize("seeds", [0, 1])
def test_missing_runs_close_it_with_a_sentence_and_exit_2(seeds: int, capsys: pytest.CaptureFixture[str]) -> None:
    made("tinyqa", LEARNS["grpo"])
    made("tinymath", LEARNS["grpo"], seeds=seeds)
    found = gate("p")
    assert not found.passed and list(found.missing) == ["tinymath"]
    why = found.closed("tinymath")
    assert f"{seeds} of 3 runs of plain GRPO" in why and "python -m gcpo grid table1 --profile p" in why
    assert main(["check", "--gate", "p"]) == 2
    said = capsys.readouterr()
    assert "gcpo: tinymath: " in said.err and "two seeds of both are needed" in said.err
    assert len(said.err.splitlines()) == 1 and "tinyqa" in said.out


def test_nothing_at_all_is_not_open() -> None:
    found = gate("p")
    assert not found.passed and set(found.missing) == {"tinyqa", "tinymath"}
    assert "was not judged on narrativeqa" in (found.closed("narrativeqa") or "")


def test_a_grid_that_asks_for_no_baseline_on_a_task_says_so() -> None:
    write_grid("own", [{"kind": "train", "task": ["tinymath"], "method": ["se"]}])
    why = gate("p", "own").closed("tinymath") or ""
    assert why.endswith("grid own does not ask there for plain GRPO and for the starting policy")


def test_other_settings_are_not_the_gates() -> None:
    made("tinyqa", LEARNS["grpo"])
    for seed in range(3):  # of another rate, and twice as good
        finished(method="grpo", seed=seed, learning_rate=0.01, tables=evaluated(0.9))
    assert gate("p").table["grpo"].tolist() == pytest.approx([60, 62])


def test_a_grid_of_ones_own_and_one_that_trains_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    write_grid("own", [{"kind": "train", "method": ["grpo"], "seed": [0, 1], "max_steps": [4, 0]}])
    made("tinyqa", LEARNS["grpo"], seeds=2)
    assert main(["check", "own", "--gate", "p"]) == 0
    write_grid("figure1", [{"kind": "gradients", "seed": [0]}])
    assert main(["check", "figure1", "--gate", "p"]) == 2
    assert "Grid figure1 trains nothing" in capsys.readouterr().err


def test_the_reference_is_read_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    made("tinyqa", LEARNS["grpo"])
    made("tinymath", LEARNS["grpo"])
    records.write_reference(paths.REFERENCE / "p", records.runs("p"))
    assert main(["check", "--gate", "p", "--reference"]) == 0
    for run in records.runs("p"):
        (run.folder / "manifest.json").unlink()
    assert (main(["check", "--gate", "p"]), main(["check", "--gate", "p", "--reference"])) == (2, 0)


def test_scores_are_of_the_seeds_that_both_have() -> None:
    made("tinyqa", LEARNS["grpo"])
    made("tinymath", LEARNS["grpo"], seeds=2)
    finished(task="tinymath", method="grpo", seed=2, tables=evaluated(0.9, 0.9, "accuracy"))
    row = gate("p").table.set_index(["task", "decoding"]).loc[("tinymath", "sampled")]
    assert row["seeds"] == 2 and row["start"] + row["gain"] == pytest.approx(row["grpo"])
