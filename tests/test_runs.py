"""Whole runs on the embedded world: repeated, killed and resumed, failing, by papermill and by the runner."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from record_builders import smoke
from transformers.integrations import integration_utils

from gcpo import io, paths, records
from gcpo.runs import record
from gcpo.runs.evaluate import evaluation
from gcpo.runs.gradients import gradient_statistics
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.profiles import load_profile
from gcpo.runs.train import train, weights_arithmetic
from gcpo.tasks import sampling

pytestmark = pytest.mark.slow

RECORDS = ("metrics.csv", "validation.csv", "eval.csv")
LONGER = {"max_steps": 8, "save_steps": 2}
MAKE: dict[str, Any] = {"train": train, "gradients": gradient_statistics, "evaluate": evaluation}


def in_process(values: dict[str, Any]) -> subprocess.Popen[bytes]:
    """A training in a process of its own, so that it can be killed."""
    code = f"from gcpo.runs import params, train; train.train(params.validate({values!r}))"
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)


def tables(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in RECORDS}


def kill_when(process: subprocess.Popen[bytes], reached: Any) -> None:
    deadline = time.monotonic() + 240
    while not reached():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> record.Run:
    """An uninterrupted run, which resumed ones are compared with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "OUTPUTS", tmp_path_factory.mktemp("whole"))
        run = train(smoke(**LONGER))
        assert train(smoke(**LONGER)).manifest["attempts"] == 1  # a finished run is only read
    return run


def test_a_run_has_every_step_and_its_scores_along_the_way(whole: record.Run) -> None:
    along = pd.read_csv(whole.folder / "validation.csv")
    assert sorted(set(along["step"])) == [0, 2, 4, 6, 8] and along["query"].str.startswith("validation").all()
    assert len(along) == 5 * 2 * 8 and set(along["decoding"]) == {"greedy", "sampled"}
    metrics = pd.read_csv(whole.folder / "metrics.csv")
    assert list(metrics["step"]) == list(range(1, 9)) and metrics["reward"].nunique() > 1
    assert not list(whole.folder.glob("checkpoint-*"))


def test_a_killed_and_resumed_run_ends_as_an_uninterrupted_one(outputs: Path, whole: record.Run, capsys: Any) -> None:
    """From the checkpoint before the newest, which is cut."""
    values = {**load_profile("smoke"), **LONGER}
    folder = Plan("train", validate(values)).folder
    kill_when(in_process(values), (folder / "checkpoint-4" / "SHA256SUMS").exists)
    killed = record.load(folder)
    assert killed.manifest["status"] == "running" and not (folder / "eval.csv").exists()
    cut = max(folder.glob("checkpoint-*")) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:1000])
    resumed = train(validate(values))
    assert f"{cut} is not what was written: going on from before it" in capsys.readouterr().out
    assert resumed.finished and resumed.manifest["attempts"] == 2
    assert tables(folder) == tables(whole.folder)


def test_a_run_that_is_stopped_after_its_last_step_ends_as_an_uninterrupted_one(
    outputs: Path, whole: record.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = smoke(**LONGER)
    with monkeypatch.context() as patch:
        patch.setattr("gcpo.runs.train.summary", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(values)
    folder = Plan("train", values).folder
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-6", "checkpoint-8"}
    assert tables(train(values).folder) == tables(whole.folder)


@pytest.mark.parametrize("kind", ["gradients", "evaluate"])
def test_a_run_that_is_stopped_goes_on_from_its_parts_and_its_training_is_made_once(
    kind: str, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "TOKENS", 2**10)  # two or three questions at a time
    values = smoke(policy="scratch", method="egpo", at_step=2, learning_rate=1e-2, eval_limit=12, eval_samples=3)
    plan, progress = Plan(kind, values), record.Run.progress

    def stop(run: Any, done: int, total: int, what: str, **shown: float) -> None:
        if what == "questions" and done > 10:
            raise KeyboardInterrupt
        progress(run, done, total, what, **shown)

    def csv_of(run: record.Run) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in run.folder.glob("*.csv")}

    with monkeypatch.context() as patch:
        patch.setattr(record.Run, "progress", stop)
        with pytest.raises(KeyboardInterrupt):
            MAKE[kind](values)
    assert list((plan.folder / "parts").iterdir()) and not list(plan.folder.glob("*.csv"))
    run, training = MAKE[kind](values), plan.training
    assert run.finished and run.manifest["attempts"] == 2 and not (run.folder / "parts").exists()
    assert training is not None
    assert run.manifest["training"] == {"run": training.id, "policy": io.hashes(training.folder / "policy")}
    kept = csv_of(run)
    shutil.rmtree(run.folder)
    shutil.rmtree(training.folder)
    assert csv_of(MAKE[kind](values)) == kept and len(kept) >= 2


def test_papermill_alone_runs_the_training_notebook_from_anywhere(outputs: Path, tmp_path: Path) -> None:
    command = ["-m", "papermill", str(paths.NOTEBOOKS / "10_train.ipynb"), "out.ipynb", "--no-progress-bar"]
    command += ["-f", str(paths.PARAMS / "smoke.yaml"), "-p", "method", "se", "-p", "learning_rate", "5e-5"]
    subprocess.run([sys.executable, *command], check=True, capture_output=True, cwd=tmp_path)
    found = records.find("smoke")
    assert found["method"].tolist() == ["se"] and found["learning_rate"].tolist() == [5e-5]
    (run,) = [record.load(path) for path in (outputs / "smoke" / "runs").iterdir()]
    expected = "code commit dirty packages hardware seconds peak_memory_gb data models resolved"
    assert {*expected.split()} <= set(run.manifest)
    ran, resolved = run.manifest["trl"], run.manifest["resolved"]["trainer"]
    assert {key: ran[key] for key in resolved} == resolved and ran["reward_range"] == [0, 2] and "output_dir" not in ran
    completions = pd.read_parquet(next((run.folder / "completions").glob("*.parquet")))
    assert {"prompt", "completion", "se", "w_se", "weight", "advantage"} <= set(completions)


def test_a_tracker_gets_what_is_logged(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker of our own in the place of one that is not installed here."""
    seen: list[dict[str, Any]] = []

    class Tracker(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.append({"name": args.run_name, **logs})

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "mlflow", Tracker)
    run = train(smoke(policy="scratch", max_steps=1, validation_limit=0, eval_limit=2, report_to="mlflow"))
    rewards = [entry["reward"] for entry in seen if "loss" in entry]
    assert rewards == pd.read_csv(run.folder / "metrics.csv")["reward"].tolist()
    assert {entry["name"] for entry in seen} == {run.folder.name}


def test_a_policy_trained_in_bfloat16_is_scored_in_the_type_of_its_weights() -> None:
    AcceleratorState._reset_state(True)
    model = torch.nn.Linear(8, 8)
    x = torch.randn(4, 8)
    exact = model(x)
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)
    AcceleratorState._reset_state(True)
    rounded = prepared(x)
    assert not torch.equal(rounded, exact)
    with weights_arithmetic(prepared):
        assert torch.equal(prepared(x), exact)
    assert torch.equal(prepared(x), rounded)  # training goes on as before
