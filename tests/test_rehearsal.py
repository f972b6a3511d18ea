"""Rehearsals: what is shrunk and what stays, and one of every benchmark on real rows."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gcpo.cli import main
from gcpo.reports.publish import publish
from gcpo.runs import rehearsal
from gcpo.runs.gradients import gradient_statistics
from gcpo.runs.grids import expand, fitting, grids
from gcpo.runs.params import load_profile, validate
from gcpo.runs.plan import Plan
from gcpo.runs.record import RecordError, load
from gcpo.runs.train import train

REAL = pytest.mark.skipif("GCPO_DATA_DIR" not in os.environ, reason="needs GCPO_DATA_DIR")


def plan(kind: str = "train", profile: str = "paper", **changes: Any) -> Plan:
    return Plan(kind, validate({**load_profile(profile), **changes}))


def test_every_grid_fits_some_profiles_and_not_the_others() -> None:
    ours, theirs = fitting("laptop"), fitting("paper")
    assert sorted([*ours, *theirs]) == grids() and {"table1", "figure1"} <= set(ours)
    assert {"paper_table1", "paper_table2", "paper_figure1"} <= set(theirs)
    assert fitting("smoke") == ours and fitting("single_gpu") == theirs


def test_size_is_shrunk_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GCPO_DATA_DIR", raising=False)
    real = plan(task="math", method="seed_grpo", method_options={"form": "linear"}, alpha=0.02, seed=3)
    small = rehearsal.shrink(real, "a/policy")
    assert small.method.constants() == real.method.constants() | {"seed": 0}
    kept = set(real.trainer) - {"max_steps", "save_steps", "per_device_train_batch_size", "max_completion_length"}
    kept -= {"gradient_accumulation_steps", "seed"}
    assert {key: small.trainer[key] for key in kept} == {key: real.trainer[key] for key in kept}
    assert small.trainer["num_generations"] == 16 and small.trainer["gradient_accumulation_steps"] == 4
    assert small.params.profile == "rehearse-paper" and small.params.max_steps == 2 and small.params.eval_limit == 4
    assert (small.params.policy, small.params.entailment, small.params.embedder) == (
        "a/policy",
        "tiny",
        real.params.embedder,
    )


def test_what_is_small_already_or_embedded_stays() -> None:
    start = rehearsal.shrink(plan(max_steps=0), "a/policy")
    assert start.params.max_steps == 0
    ours = rehearsal.shrink(plan(profile="laptop", policy="tiny-3m", task="tinymath"))
    assert ours.params.policy == "tiny-3m" and ours.params.max_completion_length == 40
    assert rehearsal.shrink(plan("gradients", "laptop", at_step=64)).params.at_step == 2


def test_what_needs_a_gpu_is_left_out() -> None:
    grpo = {"use_vllm": True, "vllm_mode": "colocate", "num_iterations": 2}
    assert rehearsal.shrink(plan(grpo=grpo), "a/policy").params.grpo == {"num_iterations": 2}


def test_runs_that_differ_in_seed_and_size_alone_share_a_rehearsal(
    outputs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    grid = tmp_path / "own.yaml"
    grid.write_text("- {kind: train, task: [tinyqa], method: [se, grpo], seed: [0, 1], max_steps: [64, 128]}\n")
    listed = rehearsal.rehearsals("laptop", [str(grid)])
    assert [len(one.stands_for) for one in listed] == [4, 4]
    assert listed[0].said.startswith(f"{listed[0].plan.id} stands for 4 runs: ")
    assert listed[0].replaced["max_steps"] == "64 → 2" and "policy" not in listed[0].replaced
    profile, own = rehearsal.prepare("laptop", listed)
    again = expand(str(own), str(profile))
    assert [one.id for one in again] == [one.plan.id for one in listed]
    assert set(rehearsal.outcome(listed)["status"]) == {"not run"}


def test_a_plan_of_a_benchmark_can_be_sent_to_another_process() -> None:
    real = plan(task="qasper")
    assert real.id and pickle.loads(pickle.dumps(real)) == real


def test_rehearsals_are_never_published(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("profile: rehearse-paper\n")
    with pytest.raises(RecordError, match="holds rehearsals, which show nothing of a method: never published"):
        publish(str(own))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--profile", "papr"], "Unknown profile 'papr'"),
        (["--profile", "paper", "paper_tabel1"], "Unknown grid 'paper_tabel1'"),
        (["--profile", "paper", "-p", "group_size", "1"], "G = 1 leaves nothing to compare"),
    ],
)
def test_bad_words_end_the_command(
    words: list[str], said: str, outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rehearse", *words]) == 2
    assert said in capsys.readouterr().err


def test_rows_that_are_not_at_hand_are_asked_for(
    outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["rehearse", "--profile", "paper", "paper_figure1"]
    monkeypatch.delenv("GCPO_DATA_DIR", raising=False)
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "deepmind/narrativeqa (test) could not be read from the Hub" in said
    assert "set GCPO_DATA_DIR to a folder that has narrativeqa/test.jsonl" in said
    monkeypatch.setenv("GCPO_DATA_DIR", str(tmp_path))
    assert main(command) == 2
    assert f"{tmp_path}/narrativeqa/test.jsonl does not exist" in capsys.readouterr().err
    (tmp_path / "narrativeqa").mkdir()
    (tmp_path / "narrativeqa" / "test.jsonl").write_text("{}\n")
    assert main(command) == 2
    assert "Task 'narrativeqa' cannot be rehearsed" in capsys.readouterr().err


# Each benchmark once, with a method of each family; those that have nothing to train on by gradient statistics. Rows of
# the three (or two) splits whose contexts were cut, of the 20 trained on, the 4 graded, and 2 along the way.
ONE_EACH: dict[str, tuple[dict[str, Any], int]] = {
    "narrativeqa": ({"method": "gcpo_bot"}, 3),
    "qasper": ({"method": "kle"}, 26),
    "hotpotqa": ({"method": "empo"}, 2),
    "math": ({"method": "egpo"}, 0),
    "olympiadbench": ({"method": "seed_grpo"}, 0),
    "gsm8k": ({"method": "r2vpo", "grpo": {"num_iterations": 2, "bf16": True}}, 0),
    "aime24": ({}, 0),
    "amc23": ({}, 0),
    "minerva": ({}, 0),
    "mmlu_stem": ({}, 0),
}


@pytest.mark.data
@pytest.mark.slow
@REAL
@pytest.mark.parametrize("task", ONE_EACH)
def test_a_rehearsal_of_each_benchmark(task: str, outputs: Path, tmp_path: Path) -> None:
    changes, cut = ONE_EACH[task]
    kind = "train" if changes else "gradients"
    grid = tmp_path / "own.yaml"
    grid.write_text(str([{"kind": kind, "task": [task], **{key: [value] for key, value in changes.items()}}]))
    (one,) = rehearsal.rehearsals("paper", [str(grid)])
    run = {"train": train, "gradients": gradient_statistics}[kind](one.plan.params)
    (line,) = rehearsal.outcome([one]).to_dict("records")
    assert (line["status"], line["graded"], line["cut"], line["skipped"]) == ("finished", 4, cut, 0)
    assert "policy Qwen/Qwen2.5-1.5B-Instruct → untrained Qwen2" in line["replaced"]
    assert run.folder.parts[-3] == "rehearse-paper" and load(run.folder).finished
    if kind == "train":
        steps = pd.read_csv(run.folder / "metrics.csv")
        assert list(steps["step"]) == list(range(1, len(steps) + 1)) and len(steps) == 2
        completions = pd.concat(map(pd.read_parquet, (run.folder / "completions").glob("*.parquet")))
        assert len(completions) in (32, 64)  # G = 16 of two prompts, at one step or at both
