"""Whole runs on the embedded world: repeated, killed and resumed, failing, by papermill and by the runner."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import papermill
import pytest

from gcpo import paths, records
from gcpo.__main__ import main
from gcpo.runs import manifest, runner
from gcpo.runs.gradient_statistics import gradient_statistics
from gcpo.runs.params import load_profile, validate
from gcpo.runs.plan import Plan
from gcpo.runs.train import train

pytestmark = pytest.mark.slow

LONGER = {"max_steps": 8, "save_steps": 2}


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paths, "OUTPUTS", tmp_path / "outputs")
    monkeypatch.setenv("GCPO_OUTPUTS", str(tmp_path / "outputs"))
    return tmp_path / "outputs"


def params(**changes: Any) -> Any:
    return validate({**load_profile("smoke"), **changes})


def in_process(kind: str, values: dict[str, Any], outputs: Path) -> subprocess.Popen[bytes]:
    """A run in a process of its own, so that it can be killed."""
    function = {
        "train": "runs.train import train",
        "gradients": "runs.gradient_statistics import gradient_statistics as train",
    }
    code = f"from gcpo.{function[kind]}; from gcpo.runs.params import validate; train(validate({values!r}))"
    environment = {**os.environ, "GCPO_OUTPUTS": str(outputs)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)


def kill_when(process: subprocess.Popen[bytes], reached: Any) -> None:
    deadline = time.monotonic() + 240
    while not reached():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_two_runs_of_the_same_parameters_give_the_same_files(outputs: Path) -> None:
    first = train(params(**LONGER))
    kept = {name: (first.folder / name).read_bytes() for name in ("metrics.csv", "eval.csv")}
    shutil.rmtree(first.folder)
    second = train(params(**LONGER))
    assert kept == {name: (second.folder / name).read_bytes() for name in kept}
    metrics = pd.read_csv(second.folder / "metrics.csv")
    assert list(metrics["step"]) == list(range(1, 9)) and metrics["reward"].nunique() > 1
    assert train(params(**LONGER)).manifest["attempts"] == 1  # a finished run is only read
    other = train(params(**LONGER, seed=1))
    assert (other.folder / "metrics.csv").read_bytes() != kept["metrics.csv"]


def test_a_killed_and_resumed_training_run_ends_as_an_uninterrupted_one(outputs: Path, tmp_path: Path) -> None:
    values = {**load_profile("smoke"), **LONGER}
    folder = Plan("train", validate(values)).folder
    kill_when(in_process("train", values, outputs), (folder / "checkpoint-4" / "trainer_state.json").exists)
    killed = manifest.load(folder)
    assert killed.manifest["status"] == "running" and not (folder / "eval.csv").exists()
    resumed = train(validate(values))
    assert resumed.finished and resumed.manifest["attempts"] == 2
    kept = {name: (folder / name).read_bytes() for name in ("metrics.csv", "eval.csv")}
    shutil.rmtree(folder)
    whole = train(validate(values))
    assert whole.manifest["attempts"] == 1
    assert kept == {name: (folder / name).read_bytes() for name in kept}


def test_two_processes_that_want_the_same_run_make_it_once(outputs: Path) -> None:
    values = {**load_profile("smoke"), **LONGER}
    both = [in_process("train", values, outputs) for _ in range(2)]
    assert [process.wait(timeout=240) for process in both] == [0, 0]
    run = manifest.load(Plan("train", validate(values)).folder)
    assert run.finished and run.manifest["attempts"] == 1
    assert not list(run.folder.glob("checkpoint-*"))


@pytest.mark.parametrize("kind", ["train", "gradients"])
def test_a_finished_run_stays_finished_whatever_fails_around_it(
    kind: str, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(kind, validate({**load_profile("smoke"), "max_steps": 0, "eval_limit": 2}))

    def breaks_after_the_run(*_: Any) -> None:
        {"train": train, "gradients": gradient_statistics}[kind](plan.params)
        raise OSError("no space left to write the notebook")

    monkeypatch.setattr(runner, "execute", breaks_after_the_run)
    assert runner.run(plan).finished and manifest.load(plan.folder).finished


def test_killed_and_resumed_gradient_statistics_end_as_uninterrupted_ones(outputs: Path) -> None:
    values = {**load_profile("smoke"), "eval_limit": 35}
    folder = Plan("gradients", validate(values)).folder
    kill_when(in_process("gradients", values, outputs), (folder / "chunks" / "000010.csv").exists)
    assert not manifest.load(folder).finished
    kept = (gradient_statistics(validate(values)).folder / "queries.csv").read_bytes()
    shutil.rmtree(folder)
    queries = gradient_statistics(validate(values)).folder / "queries.csv"
    assert queries.read_bytes() == kept
    table = pd.read_csv(queries)
    assert len(table) == 35 and (table["V"] >= 0).all()
    assert (table.loc[table["zero_variance"], "V"] == 0).all() and (table.loc[~table["zero_variance"], "V"] > 0).all()


def test_papermill_alone_runs_the_training_notebook_from_anywhere(
    outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["-m", "papermill", str(paths.NOTEBOOKS / "10_train.ipynb"), "out.ipynb", "--no-progress-bar"]
    command += ["-f", str(paths.PARAMS / "smoke.yaml"), "-p", "method", "se", "-p", "learning_rate", "5e-5"]
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    (run,) = (outputs / "smoke" / "runs").iterdir()
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "finished" and manifest["params"]["learning_rate"] == 5e-5
    expected = {
        "code",
        "commit",
        "dirty",
        "packages",
        "hardware",
        "seconds",
        "peak_memory_gb",
        "data",
        "models",
        "resolved",
    }
    assert expected <= set(manifest)
    ran, resolved = manifest["trl"], manifest["resolved"]["trainer"]
    assert {key: ran[key] for key in resolved} == resolved and ran["reward_range"] == [0, 2] and "output_dir" not in ran
    assert set(records.find("smoke")["method"]) == {"se"}
    completions = pd.read_parquet(next((run / "completions").glob("*.parquet")))
    assert {"prompt", "completion", "se", "w_se", "weight", "advantage"} <= set(completions)


def test_a_misspelt_parameter_stops_the_notebook_before_any_work(outputs: Path, tmp_path: Path) -> None:
    with pytest.raises(papermill.PapermillExecutionError, match="learning_rate"):
        papermill.execute_notebook(
            str(paths.NOTEBOOKS / "10_train.ipynb"),
            str(tmp_path / "out.ipynb"),
            {"learning_rte": 0.1},
            progress_bar=False,
        )
    assert not outputs.exists()


def test_a_grid_goes_on_after_a_failure_and_says_what_failed(
    outputs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(paths.PARAMS, tmp_path / "params")
    monkeypatch.setattr(paths, "PARAMS", tmp_path / "params")
    (tmp_path / "params" / "grids" / "broken.yaml").write_text(
        "- {kind: train, method: [grpo], policy: [no/such-policy, tiny], max_steps: [1]}\n"
    )
    assert main(["grid", "broken", "--profile", "smoke", "--jobs", "1"]) == 1
    printed = capsys.readouterr()
    assert "no/such-policy" in printed.err and "finished in" in printed.out
    states = {run.manifest["status"]: run for run in records.runs("smoke")}
    assert set(states) == {"finished", "failed"}
    assert "Hub name" in states["failed"].manifest["exit"]
    assert (states["failed"].folder / "notebook.ipynb").exists()


def processes_of(outputs: Path) -> list[int]:
    """The processes that work for these outputs."""
    mark = f"GCPO_OUTPUTS={outputs}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(("sent", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGKILL", -9)])
def test_a_signal_ends_a_grid_with_all_that_it_started(sent: str, status: int, outputs: Path, tmp_path: Path) -> None:
    (tmp_path / "long.yaml").write_text("- {kind: train, method: [grpo], seed: [0, 1, 2, 3], max_steps: [4000]}\n")
    command = ["-m", "gcpo", "grid", str(tmp_path / "long.yaml"), "--profile", "smoke", "--jobs", "2"]
    environment = {**os.environ, "GCPO_OUTPUTS": str(outputs)}
    grid = subprocess.Popen([sys.executable, *command], env=environment, stderr=subprocess.DEVNULL, cwd=tmp_path)
    deadline = time.monotonic() + 240
    while len(list(outputs.glob("smoke/runs/*/progress"))) < 2:
        assert grid.poll() is None, "the grid ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.2)
    grid.send_signal(signal.Signals[sent])
    start = time.monotonic()
    assert grid.wait(timeout=10) == status
    while processes_of(outputs) and time.monotonic() - start < 10:
        time.sleep(0.2)
    assert processes_of(outputs) == []
    assert len(list(outputs.glob("smoke/runs/*/manifest.json"))) == 2  # no other was begun


def test_bad_parameters_end_the_command_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--profile", "lptop"]) == 2
    assert "laptop" in capsys.readouterr().err
    assert main(["run", "-p", "method", "gcpo_bt"]) == 2
    assert "gcpo_bot" in capsys.readouterr().err


@pytest.mark.data
@pytest.mark.skipif("GCPO_DATA_DIR" not in os.environ, reason="needs GCPO_DATA_DIR")
def test_notebook_10_trains_on_real_narrativeqa_rows(outputs: Path, tmp_path: Path) -> None:
    papermill.execute_notebook(
        str(paths.NOTEBOOKS / "10_train.ipynb"),
        str(tmp_path / "out.ipynb"),
        {
            "task": "narrativeqa",
            "policy": "scratch",
            "method": "gcpo_bot",
            "train_split": "validation",
            "max_steps": 3,
            "train_limit": 20,
            "eval_limit": 4,
            "max_completion_length": 12,
        },
        progress_bar=False,
    )
    (run,) = [manifest.load(path) for path in (outputs / "smoke" / "runs").iterdir()]
    assert run.finished and run.manifest["data"]["train"]["sha256"]
    assert len(pd.read_csv(run.folder / "metrics.csv")) == 3
    assert set(pd.read_csv(run.folder / "eval.csv")["decoding"]) == {"greedy", "sampled"}
