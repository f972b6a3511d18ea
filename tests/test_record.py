"""A run's record: written atomically, proof of itself, continued only by what began it, and one process's at a time."""

import json
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from filelock import FileLock, Timeout
from hypothesis import given, settings
from hypothesis import strategies as st
from record_builders import failed, finished, on_disk, planned, write_grid
from test_params import NESTED

from gcpo import io
from gcpo.reports import records
from gcpo.runs import record
from gcpo.runs.params import validate
from gcpo.runs.plan import SCHEMA

TABLES = {"eval": pd.DataFrame({"query": ["a", "b"], "decoding": "greedy", "f1": [0.25, 0.5]})}

pytestmark = pytest.mark.usefixtures("places")


# --- written ----------------------------------------------------------------------------------------------------------


def test_a_manifest_says_running_while_it_runs_and_finished_after() -> None:
    plan = planned()
    with record.record(plan) as run:
        during = on_disk(run)
        assert during["status"] == "running" and "ended" not in during and not run.finished
        run.manifest["results"] = {"greedy_f1": 0.25}
    after = on_disk(run)
    assert (after["status"], after["exit"], after["attempts"]) == ("finished", None, 1)
    assert after["id"] == run.folder.name == plan.id and after["kind"] == "train"
    assert validate(after["params"]) == plan.params
    assert after["schema"] == SCHEMA and after["resolved"] == plan.values
    assert after["results"] == {"greedy_f1": 0.25} and after["commit"] == "c0ffee"
    assert after["peak_memory_gb"] > 0.01 and after["started"] <= after["ended"]
    assert record.load(run.folder).finished


@pytest.mark.parametrize("error", [RuntimeError("no memory left"), KeyboardInterrupt(), SystemExit(3)])
def test_a_failure_is_recorded_with_its_reason_and_goes_on_to_the_caller(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, record.record(planned()) as run:
        raise error
    assert raised.value is error
    after = on_disk(run)
    assert (after["status"], after["exit"]) == ("failed", f"{type(error).__name__}: {error}") and "ended" in after
    assert not record.load(run.folder).finished


def test_the_peak_of_a_gpu_is_kept_where_one_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "peak_gpu_memory_gb" not in finished(seed=1).manifest
    forgotten: list[int] = []
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: 2e9)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: forgotten.append(1))
    assert failed().manifest["peak_gpu_memory_gb"] == 2.0 and forgotten  # what another run in this process took
    with record.record(planned()) as run:
        run.manifest["peak_gpu_memory_gb"] = 3.254  # of the processes that trained
    assert run.manifest["peak_gpu_memory_gb"] == 3.25


def test_seconds_add_up_over_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 107.25, 500.0, 502.5])
    monkeypatch.setattr(record, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    first = failed()
    assert on_disk(first)["seconds"] == pytest.approx(7.25, abs=0.05)
    after = on_disk(finished())
    assert after["seconds"] == pytest.approx(7.25 + 2.5, abs=0.1)
    assert (after["status"], after["exit"], after["attempts"]) == ("finished", None, 2)
    assert after["started"] == first.manifest["started"]


def test_a_write_that_is_cut_short_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished(tables=TABLES)
    before = {path.name: path.read_text() for path in run.folder.iterdir()}

    def never(*_: Any) -> None:
        raise OSError("disk full")

    run.manifest["status"] = "running"
    monkeypatch.setattr(Path, "replace", never)
    for write in (run.write, lambda: run.table("eval.csv", TABLES["eval"])):
        with pytest.raises(OSError, match="disk full"):
            write()
    assert {path.name: path.read_text() for path in run.folder.iterdir()} == before


def test_a_table_keeps_float32_to_the_last_bit() -> None:
    values = pd.Series([1 / 3, 1e-20, 16777217.0, 0.1, -0.5, 2.0], dtype="float32")
    found = pd.read_csv(finished(tables={"eval": values.to_frame("x")}).folder / "eval.csv")
    assert found["x"].astype("float32").tolist() == values.tolist()


def test_code_is_what_the_package_computes_without_words_and_reports(tmp_path: Path) -> None:
    def hashed(**files: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in files.items():
            path = folder / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return record.code_hash(folder)

    one = hashed(a="1", runs__b="2", reports__c="3")
    assert one == hashed(a="1", runs__b="2", reports__c="4", reports__d="5", cli="6")
    assert one == hashed(a="'Words.'\n\n1  # and a comment", runs__b="2")
    inside = hashed(a="def f():\n    return 1")
    assert inside == hashed(a="def f():\n    'Return one.'\n    return (1)") != hashed(a="def f():\n    return 2")
    assert len({one, hashed(a="2", runs__b="2"), hashed(a="1", runs__b="3"), hashed(a="1", b="2"), hashed(a="1")}) == 5


def test_a_password_in_an_error_and_a_server_s_address_are_in_no_record() -> None:
    with pytest.raises(OSError, match="SECRET"), record.record(planned()) as run:
        raise OSError("cannot reach http://bob:SECRET@host:8000/x")
    assert "SECRET" not in (run.folder / "manifest.json").read_text()
    where = {"vllm_server_host": "gpu7.internal", "vllm_server_port": 8123, "vllm_server_timeout": 9.0}
    where |= {"vllm_group_port": 51000, "ddp_timeout": 7}
    with record.record(planned(grpo={**where, "epsilon": 0.3})) as run:
        run.manifest["trl"] = record.placeless({**where, "epsilon": 0.3})
    assert run.manifest["params"]["grpo"] == run.manifest["trl"] == {"epsilon": 0.3}
    assert "gpu7.internal" in (run.folder / "params.yaml").read_text()  # for processes that train together
    assert run.manifest["id"] == planned(grpo={"epsilon": 0.3}).id


# --- records that cannot be trusted -----------------------------------------------------------------------------------


def edit(folder: Path, sealed: bool = False, **values: Any) -> None:
    """Change values of a manifest, by hand or (``sealed``) as the package would write them."""
    run = record.Run(folder, json.loads((folder / "manifest.json").read_text()) | values)
    run.write() if sealed else (folder / "manifest.json").write_text(json.dumps(run.manifest))


def halve(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a table halved": (lambda f: halve(f / "eval.csv"), "eval.csv was changed"),
    "a table deleted": (lambda f: (f / "eval.csv").unlink(), "eval.csv is missing"),
    "a result edited": (lambda f: edit(f, results={"greedy_f1": 0.99}), "manifest.json was edited"),
    "a manifest that is []": (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json is no record"),
    "a manifest cut": (lambda f: halve(f / "manifest.json"), "manifest.json is no record of a run (JSONDecodeError"),
    "another id": (lambda f: edit(f, sealed=True, id="x-y-0-abc"), "the record of x-y-0-abc"),
    "other values": (lambda f: edit(f, sealed=True, resolved={"schema": SCHEMA}), "not the hash of what ran"),
    "no parameters": (lambda f: edit(f, sealed=True, params={}), "is no record of a run (KeyError"),
    "an older version": (lambda f: edit(f, schema=None), "another version of gcpo (schema None"),
}


@pytest.mark.parametrize(("damage", "message"), FAULTS.values(), ids=FAULTS)
def test_a_record_that_cannot_be_trusted_is_named_left_out_counted_and_kept_aside(
    damage: Callable[[Path], object], message: str, call: Any
) -> None:
    write_grid("g", [{"kind": "train", "seed": [0, 1, 2]}])
    bad, good = (finished(seed=seed, tables=TABLES).folder for seed in (0, 1))
    damage(bad)
    kept = {path.name: path.read_bytes() for path in bad.iterdir()}
    run = record.load(bad)
    assert not run.finished and message in str(run.fault)
    for found in (records.find("p"), records.find("p", "g")):
        assert found["id"].tolist() == [good.name]
    (row,) = records.coverage("g", "p").to_dict("records")
    assert (row["wanted"], row["finished"], row["failed"], row["left_out"]) == (3, 1, 0, 1)
    assert row["why"].startswith(f"{bad.name}: ") and message in row["why"]
    assert f"left out: {bad.name}: " in call("check", "g", "--profile", "p").out
    with record.claim(planned(seed=0)) as again:
        assert again.manifest == {}
    aside = bad / "set-aside-1"
    assert message in (aside / "why.txt").read_text()
    assert {path.name: path.read_bytes() for path in aside.iterdir() if path.name != "why.txt"} == kept
    finished(seed=0)
    edit(bad, results={})
    with record.claim(planned(seed=0)):
        assert (bad / "set-aside-2" / "manifest.json").exists() and aside.exists()


MADE: dict[str, tuple[Callable[[Path], object], str]] = {
    "another policy": (lambda f: (f / "policy" / "model").write_text("b"), "policy/model was changed"),
    "no policy": (lambda f: shutil.rmtree(f / "policy"), "policy/config is missing"),
    "one file more": (lambda f: (f / "policy" / "adapter.json").write_text("{}"), "policy/adapter.json was added"),
    "completions cut": (lambda f: (f / "completions" / "1.parquet").write_text(""), "completions was changed"),
    "an evaluation's": (lambda f: (f / "completions.parquet").write_text("y"), "completions was changed"),
}


@pytest.mark.parametrize(("damage", "said"), MADE.values(), ids=MADE)
def test_a_policy_or_completions_not_of_the_run_are_made_again(damage: Callable[[Path], object], said: str) -> None:
    with record.record(planned()) as run:
        for name in ("policy/config", "policy/model", "completions/1.parquet", "completions.parquet"):
            (run.folder / name).parent.mkdir(exist_ok=True)
            (run.folder / name).write_text(name)
    assert record.load(run.folder).finished
    damage(run.folder)
    assert said in str(record.load(run.folder).fault)
    assert records.find("p")["id"].tolist() == [run.folder.name]  # tables do not need them: no listing reads gigabytes
    del run.manifest["made"]  # as in older records
    run.write()
    assert record.load(run.folder).finished


KEYS = ["schema", "id", "kind", "params", "resolved", "contents", "status", "files", "results", "sha256", "seconds"]


@settings(max_examples=60, deadline=None)
@given(values=st.dictionaries(st.sampled_from(KEYS), NESTED, min_size=1, max_size=4), content=st.binary(max_size=60))
def test_any_edit_of_a_manifest_is_a_fault_and_never_an_error(values: dict[str, Any], content: bytes) -> None:
    run = finished(tables=TABLES)
    edit(run.folder, **values)
    same = json.dumps({**run.manifest, **values}, sort_keys=True) == json.dumps(run.manifest, sort_keys=True)
    found = record.load(run.folder)
    assert (found.fault is None) == same == len(records.find("p")) and "\n" not in str(found.fault)
    (run.folder / "manifest.json").write_bytes(content)
    assert record.load(run.folder).fault is not None and records.find("p").empty
    shutil.rmtree(run.folder)


# --- what a run is made of --------------------------------------------------------------------------------------------


MODELS = ("policy", "embedder", "entailment")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Parameters of a run with models and data of its own; files that stand for them."""
    for name in MODELS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
        (tmp_path / name / "README.md").write_text("no part of the model")
    (data := tmp_path / "data" / "narrativeqa").mkdir(parents=True)
    for split in ("validation", "test"):
        (data / f"{split}.jsonl").write_text("{}\n")
    monkeypatch.setenv("GCPO_DATA_DIR", str(tmp_path / "data"))
    models = {name: str(tmp_path / name) for name in MODELS}
    return {"task": "narrativeqa", "train_split": "validation", "validation_limit": 0, **models}


CHANGES = {
    "policy/model.safetensors": "{0}/policy has another model.safetensors",
    "embedder/model.safetensors": "{0}/embedder has another model.safetensors",
    "data/narrativeqa/test.jsonl": "data (test) is not what it was made of: narrativeqa has another test.jsonl",
}


@pytest.mark.parametrize("changed", CHANGES)
@pytest.mark.parametrize("make", [finished, failed])
def test_other_weights_or_data_under_the_same_name_are_a_new_run(
    changed: str, make: Callable[..., record.Run], own: dict[str, Any], tmp_path: Path
) -> None:
    run = make(**own)
    assert record.load(run.folder).fault is None
    (tmp_path / changed).write_text("something else")
    assert CHANGES[changed].format(tmp_path) in str(record.load(run.folder).fault)
    again = finished(**own).manifest
    assert again["attempts"] == 1 and set(again["contents"]) == {*MODELS, "data (validation)", "data (test)"}
    assert "model.safetensors" in again["contents"]["policy"] and "README.md" not in again["contents"]["policy"]
    assert again["contents"]["data (test)"] == {"test.jsonl": io.sha256(tmp_path / "data/narrativeqa/test.jsonl")}


def test_what_is_not_on_this_machine_is_not_held_against_a_record_and_data_of_the_hub_are_others(
    own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished(**own)
    monkeypatch.delenv("GCPO_DATA_DIR")
    (tmp_path / "policy").rename(tmp_path / "away")
    assert record.load(run.folder).finished
    (tmp_path / "away").rename(tmp_path / "policy")
    shutil.rmtree(run.folder)
    run = finished(**own)
    monkeypatch.setenv("GCPO_DATA_DIR", str(tmp_path / "data"))
    assert "data (validation) is not what it was made of" in str(record.load(run.folder).fault)


def test_a_run_whose_model_changes_meanwhile_is_none_of_the_new_one(own: dict[str, Any]) -> None:
    with record.record(planned(**own)) as run:
        Path(own["policy"], "model.safetensors").write_bytes(b"other weights")
    assert "policy is not what" in str(record.load(run.folder).fault)


def test_a_model_of_the_hub_is_known_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "models--lab--policy"
    (cache / "refs").mkdir(parents=True)

    def is_at(commit: str) -> None:
        (cache / "refs" / "main").write_text(commit)
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "config.json").write_text("{}")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    is_at("a" * 40)
    run = finished(policy="lab/policy")
    assert run.manifest["contents"]["policy"] == {"commit": "a" * 40}
    is_at("b" * 40)
    assert "lab/policy has another commit" in str(record.load(run.folder).fault)


OTHERS = {
    "code": ({"code": "0ther"}, "begun by other code of this package (c0de; this is 0ther)"),
    "packages": ({"packages": {"trl": "2"}}, "begun with trl 1, and this is 2"),
    "world": ({}, "policy is not what it was made of: tiny has another model.safetensors"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_other_code_or_models_left_unfinished_is_set_aside_and_begun_anew(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = {"code": "c0de", "packages": {"trl": "1"}}
    monkeypatch.setattr(record, "environment", lambda: here)
    monkeypatch.setattr("gcpo.world.folder", lambda kind, name, seed: tmp_path / "world" / kind)
    (weights := tmp_path / "world" / "policy" / "model.safetensors").parent.mkdir(parents=True)
    weights.write_text("world A")
    run = failed()
    (run.folder / "checkpoint-2").mkdir()
    again = failed()  # nothing has changed: it goes on
    assert again.manifest["attempts"] == 2 and (run.folder / "checkpoint-2").exists()
    changes, why = OTHERS[other]
    here |= changes
    if other == "world":
        weights.write_text("world B")
    anew = finished()
    assert anew.manifest["attempts"] == 1 and anew.finished and (run.folder / "params.yaml").exists()
    assert not (run.folder / "checkpoint-2").exists() and (run.folder / "set-aside-1" / "checkpoint-2").exists()
    assert why in capsys.readouterr().out


def test_a_run_is_one_process_s_at_a_time() -> None:
    plan = planned()
    with record.claim(plan), pytest.raises(Timeout):
        FileLock(plan.folder / record.LOCKS[0]).acquire(timeout=0)
    with record.claim(plan) as run:
        assert run.manifest == {}
