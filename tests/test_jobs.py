"""Runs as jobs: their plans as JSON, a run made from one, and jobs that leave what another live job makes."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from record_builders import finished, planned, write_grid
from test_faults_records import claim_of
from test_runner import executed

from gcpo import paths
from gcpo.cli import main
from gcpo.runs import jobs, record, runner

pytestmark = pytest.mark.usefixtures("places")
__all__ = ["executed"]  # the fixture: runs that are recorded without being made


@pytest.fixture(autouse=True)
def accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gcpo.cli._refuse", lambda _: None)  # test_cli.py asks TRL


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["grid", "g", "--profile", "p", "--dry-run", "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def write_plan(tmp_path: Path, entry: Any) -> Path:
    (path := tmp_path / "plan.json").write_text(json.dumps(entry))
    return path


def test_a_plan_in_json_has_what_a_run_needs_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    write_grid("g", [{"kind": "evaluate", "at_step": [2, 3]}, {"kind": "train", "max_steps": [3]}])
    finished(max_steps=3)
    entries = listed(capsys)
    trained = [planned(max_steps=2).id, planned(max_steps=3).id]
    looked = [planned("evaluate", at_step=step).id for step in (2, 3)]
    assert [entry["id"] for entry in entries] == [trained[0], looked[0], trained[1], looked[1]]
    assert [entry["needs"] for entry in entries] == [[], [trained[0]], [], [trained[1]]]
    assert [entry["state"] for entry in entries] == ["not run", "not run", "finished", "not run"]
    assert entries[1]["parameters"]["at_step"] == 2 and entries[1]["kind"] == "evaluate"
    assert entries[0]["resources"] == {"gpus": 0, "gpu_memory_gb": None, "hours": None}  # the embedded policy


def test_a_policy_of_the_hub_asks_for_gpus() -> None:
    known = jobs.resources(planned(policy="Qwen/Qwen2.5-1.5B-Instruct"))
    assert known["gpus"] == 1 and known["gpu_memory_gb"] > 3  # two bytes of each of 1.5e9 weights at the least
    assert jobs.resources(planned(policy="nobody/knows")) == {"gpus": 1, "gpu_memory_gb": None, "hours": None}


def test_a_run_is_made_from_its_plan(executed: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_grid("g", [{"kind": "train", "seed": [0, 1]}])
    path = write_plan(tmp_path, listed(capsys)[1])
    assert main(["run", "--plan", str(path)]) == 0
    assert executed.read_text().split() == [planned(seed=1).id]
    assert main(["run", "--plan", str(path)]) == 0
    assert executed.read_text().split() == [planned(seed=1).id]  # finished


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"id": "tinyqa-grpo-0-00000000"}, r"plan.json: the run tinyqa-grpo-0-00000000 is tinyqa-\S+ to this version"),
        ({"parameters": {"sed": 1}}, r"plan.json: sed: .*'seed'"),
        *(
            (change, r"plan.json: expected one line of gcpo grid NAME --dry-run --json\.")
            for change in ({"kind": None}, {"kind": "x"}, {"kind": [1]}, {"parameters": [1]}, {"parameters": "x"})
        ),
        (None, r"absent.json cannot be read: No such file or directory; .* a disk that all nodes share: GCPO_OUTPUTS"),
    ],
)
def test_a_bad_plan_is_one_line(change: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned()
    entry = {"id": plan.id, "kind": "train", "parameters": plan.params.model_dump(mode="json"), **(change or {})}
    path = write_plan(tmp_path, {key: value for key, value in entry.items() if value is not None})
    assert main(["run", "--plan", str(path if change else tmp_path / "absent.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(said, line), line


@pytest.mark.parametrize("text", [b"", b"[", b"[1]", b'"x"', b"\xff", b"[" * 10**5, b"9" * 5000, b'{"a": 1}\n{}'])
def test_a_file_that_is_no_plan_is_one_line(text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "plan.json").write_bytes(text)
    assert main(["run", "--plan", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gcpo: {path}: expected one line of ")


def test_a_plan_says_all_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--plan", "x.json", "-p", "seed", "1"]) == 2
    assert "leave --profile, --kind, --toy and -p out" in capsys.readouterr().err
    write_grid("g", [{"kind": "train"}])
    assert main(["grid", "g", "--profile", "p", "--json"]) == 2
    assert "--json is for --dry-run" in capsys.readouterr().err


# --- two live jobs on one run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [record.claim, record.job])
def test_a_job_leaves_a_run_that_another_one_makes(
    held: Any, executed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_grid("g", [{"kind": "train", "seed": [0, 1]}])
    entries = listed(capsys)
    with held(planned(seed=0)):
        assert main(["run", "--plan", str(write_plan(tmp_path, entries[0]))]) == 0
        *_, line = capsys.readouterr().out.splitlines()
        assert line == f"{entries[0]['id']}: another process makes it, and it is left to that one"
        assert main(["grid", "g", "--profile", "p", "--jobs", "1", "--no-wait"]) == 0
    assert executed.read_text().split() == [entries[1]["id"]]


def test_of_two_runners_one_starts_a_run(executed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes while the first one's kernel starts, which has not claimed the run yet."""
    found: list[Any] = []
    execute = runner.execute

    def starts(notebook: str, output: Path, *rest: Any) -> None:
        second = threading.Thread(target=lambda: found.append(runner.run(planned(), wait=False)))
        second.start()
        second.join(60)
        execute(notebook, output, *rest)

    monkeypatch.setattr(runner, "execute", starts)
    done = runner.run(planned(), wait=False)
    assert found == [None] and done is not None and done.finished and done.manifest["attempts"] == 1
    assert {path.name for path in done.folder.iterdir() if path.name[0] == "."} == set()


def test_a_worker_leaves_a_run_whose_training_another_makes_and_takes_it_when_that_has_ended(executed: Path) -> None:
    training, looks, other = planned(max_steps=2), planned("evaluate", at_step=2), planned(seed=1)
    with record.claim(training):
        assert runner.run(looks, wait=False) is None
        assert runner.run_grid([looks, other], jobs=1, wait=False) == []
    assert executed.read_text().split() == [other.id]
    assert runner.run_grid([looks], jobs=1, wait=False) == []
    assert executed.read_text().split() == [other.id, looks.id]
    finished(max_steps=2)
    again = planned("evaluate", at_step=2, seed=5, training_seed=0)
    assert again.training == training
    with record.claim(training):  # as another run does that looks at it: one that is there many may look at
        assert runner.run(again, wait=False).finished  # type: ignore[union-attr]


def test_a_claim_that_has_been_silent_too_long_is_void_at_once_for_a_process_that_does_not_wait() -> None:
    plan = planned()
    plan.folder.mkdir(parents=True)
    path = plan.folder / record.CLAIM
    path.write_text(claim_of())
    for silence, void in ((record.LEASE - 60, False), (record.LEASE + 60, True)):
        if not path.exists():
            path.write_text(claim_of())
        then = path.stat().st_ctime - silence
        os.utime(path, (then, then))
        if void:
            with record.claim(plan, timeout=0):
                assert "another-machine" not in path.read_text()
        else:
            with pytest.raises(record.Timeout), record.claim(plan, timeout=0):
                pass


def test_outputs_are_not_touched_by_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    write_grid("g", [{"kind": "evaluate", "at_step": [2]}])
    listed(capsys)
    assert list(paths.OUTPUTS.rglob("*")) == []
