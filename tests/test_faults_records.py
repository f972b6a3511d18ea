"""Records that were damaged, edited, copied or overtaken: named, left out, counted, kept; never shown as results."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from filelock import Timeout
from hypothesis import given, settings
from hypothesis import strategies as st
from record_builders import failed, finished, planned, write_grid

from gcpo import io, paths
from gcpo.cli import main
from gcpo.reports import records
from gcpo.runs import record
from gcpo.runs.contents import contents
from gcpo.runs.params import validate
from gcpo.runs.plan import SCHEMA

pytestmark = pytest.mark.usefixtures("places")

TABLES = {"eval": pd.DataFrame({"query": ["a", "b"], "decoding": "greedy", "f1": [0.25, 0.5]})}


def edit(folder: Path, sealed: bool = False, **values: Any) -> None:
    """Change values of a manifest, by hand or (``sealed``) as the package would write them."""
    run = record.Run(folder, json.loads((folder / "manifest.json").read_text()))
    run.manifest |= values
    if sealed:
        run.write()
    else:
        (folder / "manifest.json").write_text(json.dumps(run.manifest))


def halve(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a table halved": (lambda f: halve(f / "eval.csv"), "eval.csv was changed"),
    "a table deleted": (lambda f: (f / "eval.csv").unlink(), "eval.csv is missing"),
    "a result edited": (lambda f: edit(f, results={"greedy_f1": 0.99}), "manifest.json was edited"),
    "a manifest that is []": (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json holds no mapping"),
    "a manifest cut": (lambda f: halve(f / "manifest.json"), "manifest.json cannot be read (JSONDecodeError)"),
    "a manifest not UTF-8": (lambda f: (f / "manifest.json").write_bytes(b"\xff{}"), "read (UnicodeDecodeError)"),
    "a manifest nested deep": (lambda f: (f / "manifest.json").write_text("[" * 10**5), "read (RecursionError)"),
    "a manifest that is a folder": (
        lambda f: ((f / "manifest.json").unlink(), (f / "manifest.json").mkdir()),
        "manifest.json cannot be read (IsADirectoryError)",
    ),
    "another id": (lambda f: edit(f, sealed=True, id="x-y-0-abc"), "the record of x-y-0-abc, in a folder of another"),
    "other values under the id": (
        lambda f: edit(f, sealed=True, resolved={"schema": SCHEMA}),
        "its id is not the hash of what ran",
    ),
    "no parameters": (lambda f: edit(f, sealed=True, params={}), "is no record of a run (KeyError: 'task')"),
    "no list of files": (lambda f: edit(f, sealed=True, files=3), "is no record of a run (AttributeError"),
    "an odd status": (lambda f: edit(f, sealed=True, status="weird"), "its status is 'weird'"),
    "an older version": (lambda f: edit(f, schema=None), "made by an older version of gcpo: move it away and run it"),
    "an odd version": (lambda f: edit(f, schema="new"), "made by an older version of gcpo"),
    "a newer version": (
        lambda f: edit(f, schema=SCHEMA + 1),
        f"made by a newer version of gcpo (schema {SCHEMA + 1}; this one reads up to {SCHEMA})",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_record_that_cannot_be_trusted_is_named_left_out_and_counted(
    fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_grid("g", [{"kind": "train", "seed": [0, 1, 2]}])
    bad, good = (finished(seed=seed, tables=TABLES).folder for seed in (0, 1))
    damage, message = FAULTS[fault]
    damage(bad)
    run = record.load(bad)
    assert not run.finished and message in str(run.fault)
    for found in (records.find("p"), records.find("p", "g")):
        assert found["id"].tolist() == [good.name]
        assert len(records.gather(found, "eval", ["seed"])) == 2
    (row,) = records.coverage("g", "p").to_dict("records")
    assert (row["wanted"], row["finished"], row["failed"], row["left_out"]) == (3, 1, 0, 1)
    assert row["why"].startswith(f"{bad.name}: ") and message in row["why"]
    assert main(["check", "g", "--profile", "p"]) == 0
    printed = capsys.readouterr().out
    assert "3 runs (1 left out, 1 finished, 1 not run)" in printed and f"left out: {bad.name}: " in printed


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if "folder" not in fault])
def test_what_cannot_be_trusted_is_kept_aside_when_the_run_is_made_again(fault: str) -> None:
    damage, message = FAULTS[fault]
    folder = finished(tables=TABLES).folder
    damage(folder)
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    with record.claim(planned()) as run:
        assert run.manifest == {} and not run.finished
    aside = folder / "set-aside-1"
    assert message in (aside / "why.txt").read_text()
    assert {path.name: path.read_bytes() for path in aside.iterdir() if path.name != "why.txt"} == kept
    assert [path.name for path in folder.iterdir()] == ["set-aside-1"]
    again = finished(tables=TABLES)
    assert again.manifest["attempts"] == 1 and record.load(folder).finished
    (folder / "eval.csv").write_text("")
    with record.claim(planned()):
        assert (folder / "set-aside-2" / "eval.csv").exists() and aside.exists()


MADE: dict[str, tuple[Callable[[Path], object], str]] = {
    "another policy": (lambda f: (f / "policy" / "model").write_text("b"), "policy/model was changed"),
    "no weights": (lambda f: (f / "policy" / "model").unlink(), "policy/model is missing"),
    "no policy": (lambda f: shutil.rmtree(f / "policy"), "policy/config is missing"),
    "one file more": (
        lambda f: (f / "policy" / "adapter_config.json").write_text("{}"),
        "adapter_config.json was added",
    ),
    "completions cut": (lambda f: (f / "completions" / "1.parquet").write_text(""), "completions was changed"),
    "no completions": (lambda f: shutil.rmtree(f / "completions"), "completions is missing"),
}


@pytest.mark.parametrize("fault", MADE)
def test_a_policy_or_completions_that_are_not_the_run_s_are_made_again(fault: str) -> None:
    with record.record(planned()) as run:
        for name, text in {"policy/config": "c", "policy/model": "a", "completions/1.parquet": "x"}.items():
            (run.folder / name).parent.mkdir(exist_ok=True)
            (run.folder / name).write_text(text)
    damage, said = MADE[fault]
    assert record.load(run.folder).finished
    damage(run.folder)
    assert said in str(record.load(run.folder).fault)
    assert records.find("p")["id"].tolist() == [run.folder.name]  # tables do not need them: no listing reads gigabytes
    with record.claim(planned()) as again:
        assert again.manifest == {} and (run.folder / "set-aside-1" / "why.txt").exists()


def test_an_evaluation_s_completions_are_the_run_s() -> None:
    with record.record(planned("evaluate")) as run:
        (run.folder / "completions.parquet").write_text("x")
    (run.folder / "completions.parquet").write_text("y")
    assert record.load(run.folder).fault == "completions was changed"


def test_a_record_older_than_such_hashes_is_as_good_as_it_was() -> None:
    run = finished(tables=TABLES)
    del run.manifest["made"]
    run.write()
    (run.folder / "policy").mkdir()
    (run.folder / "policy" / "model").write_text("any")
    assert record.load(run.folder).finished


@pytest.mark.parametrize("name", ["checkpoint-4", "policy", "completions", "validation", "parts"])
def test_a_file_in_the_place_of_a_folder_is_told_before_any_work(name: str) -> None:
    planned().folder.mkdir(parents=True)
    (planned().folder / name).write_text("")
    with pytest.raises(FileExistsError, match=f"{name} is a file, .*: remove it"), record.record(planned()):
        raise AssertionError("begun")
    assert f"{name} is a file" in record.load(planned().folder).manifest["exit"]


def test_a_record_does_not_keep_what_an_error_says_of_a_password() -> None:
    with pytest.raises(OSError, match="SECRET"), record.record(planned()) as run:
        raise OSError("cannot reach http://bob:SECRET@host:8000/x")
    assert "SECRET" not in (run.folder / "manifest.json").read_text()
    assert run.manifest["exit"] == "OSError: cannot reach http...host:8000/x"


def test_a_server_s_address_is_in_no_record() -> None:
    where = {"vllm_server_host": "gpu7.internal", "ddp_timeout": 7}
    with record.record(planned(grpo={**where, "epsilon": 0.3})) as run:
        run.manifest["trl"] = record.placeless({**where, "epsilon": 0.3})
    assert run.manifest["params"]["grpo"] == run.manifest["trl"] == {"epsilon": 0.3}
    assert "gpu7.internal" in (run.folder / "params.yaml").read_text()  # for processes that train together
    assert run.manifest["id"] == planned(grpo={"epsilon": 0.3}).id


def test_a_copy_under_another_name_is_foreign() -> None:
    write_grid("g", [{"kind": "train", "seed": [0]}])
    folder = finished(tables=TABLES).folder
    whole = records.coverage("g", "p")
    assert "why" not in whole and whole["left_out"].tolist() == [0]
    shutil.copytree(folder, folder.with_name("copy of it"))
    assert records.find("p", "g")["id"].tolist() == [folder.name] == records.find("p")["id"].tolist()
    own, foreign = records.coverage("g", "p").to_dict("records")
    assert (own["finished"], own["left_out"], foreign["wanted"], foreign["left_out"]) == (1, 0, 0, 1)
    assert foreign["why"] == f"copy of it: the record of {folder.name}, in a folder of another name"


def test_a_failed_run_that_was_edited_is_left_out_too() -> None:
    write_grid("g", [{"kind": "train", "seed": [0]}])
    edit(failed().folder, status="finished")
    assert records.find("p", "g").empty
    assert records.coverage("g", "p")[["finished", "failed", "left_out"]].values.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("begin", ["=", "+", "-", "@", "\t"])
def test_a_text_that_a_spreadsheet_would_execute_is_escaped(begin: str) -> None:
    table = pd.DataFrame({"query": [f"{begin}cmd|' /C calc'!A0", "a\r=b", None], "f1": [-0.5, 1.0, 2.0]})
    run = finished(tables={"eval": table})
    found = pd.read_csv(run.folder / "eval.csv")
    assert found["query"].tolist()[:2] == [f"'{begin}cmd|' /C calc'!A0", "a =b"] and found["query"].isna()[2]
    assert found["f1"].tolist() == [-0.5, 1.0, 2.0]


# --- models and data under an unchanged name ------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Parameters of a run with a policy and data of its own; files that stand for them."""
    for name in ("policy", "embedder", "entailment"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
        (tmp_path / name / "tokenizer.json").write_text("{}")
        (tmp_path / name / "README.md").write_text("no part of the model")
    data = tmp_path / "data" / "narrativeqa"
    data.mkdir(parents=True)
    for split in ("validation", "test"):
        (data / f"{split}.jsonl").write_text("{}\n")
    monkeypatch.setenv("GCPO_DATA_DIR", str(tmp_path / "data"))
    models = {name: str(tmp_path / name) for name in ("policy", "embedder", "entailment")}
    return {"task": "narrativeqa", "train_split": "validation", "validation_limit": 0, **models}


def test_a_manifest_says_what_models_and_data_were(own: dict[str, Any]) -> None:
    found = finished(**own).manifest["contents"]
    assert set(found) == {"policy", "embedder", "entailment", "data (validation)", "data (test)"}
    assert set(found["policy"]) == {"model.safetensors", "tokenizer.json"}
    assert found["data (test)"] == {"test.jsonl": io.sha256(Path(own["policy"]).parent / "data/narrativeqa/test.jsonl")}


@pytest.mark.parametrize(
    ("task", "listed"),
    [
        ("math", {"train": "math_train/train.jsonl", "test": "math500/test.jsonl"}),
        ("olympiadbench", {"train": "olympiadbench/train.jsonl", "test": "olympiadbench/train.jsonl"}),
        ("minerva", {"test": "minerva_math/train.jsonl"}),
    ],
)
def test_data_files_are_kept_whatever_their_folder(task: str, listed: dict[str, str], own: dict[str, Any]) -> None:
    folder = Path(own["policy"]).parent / "data"
    for name in set(listed.values()):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    values = {**own, "task": task, "train_split": "train", "eval_split": "test"}
    found = contents(validate(values).model_dump())
    kept = {key.removeprefix("data (").rstrip(")"): value for key, value in found.items() if key.startswith("data")}
    expected = {split: {Path(name).name: io.sha256(folder / name)} for split, name in listed.items()}
    assert kept == expected


CHANGES = {
    "policy/model.safetensors": "policy is not what it was made of: {0}/policy has another model.safetensors",
    "policy/tokenizer.json": "policy is not what it was made of: {0}/policy has another tokenizer.json",
    "policy/adapter.json": "policy is not what it was made of: {0}/policy has another adapter.json",
    "embedder/model.safetensors": "embedder is not what it was made of: {0}/embedder has another model.safetensors",
    "entailment/tokenizer.json": "entailment is not what it was made of: {0}/entailment has another tokenizer.json",
    "data/narrativeqa/test.jsonl": "data (test) is not what it was made of: narrativeqa has another test.jsonl",
    "data/narrativeqa/validation.jsonl": "data (validation) is not what it was made of: narrativeqa has another val",
}


@pytest.mark.parametrize("changed", CHANGES)
@pytest.mark.parametrize("status", ["finished", "failed"])
def test_other_weights_or_data_under_the_same_name_are_a_new_run(
    changed: str, status: str, own: dict[str, Any], tmp_path: Path
) -> None:
    run = finished(**own) if status == "finished" else failed(**own)
    assert record.load(run.folder).fault is None
    (tmp_path / changed).write_text("something else")
    assert CHANGES[changed].format(tmp_path) in str(record.load(run.folder).fault)
    with record.claim(planned(**own)) as again:
        assert again.manifest == {}
    assert finished(**own).manifest["attempts"] == 1


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
    (tmp_path / "world" / "policy").mkdir(parents=True)
    weights = tmp_path / "world" / "policy" / "model.safetensors"
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
    said = f"{run.folder.name}: {why}; it is kept in set-aside-1 and made again\n"
    assert capsys.readouterr().out == said


def test_what_is_not_on_this_machine_is_not_held_against_a_record(
    own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished(**own)
    monkeypatch.delenv("GCPO_DATA_DIR")
    shutil.rmtree(tmp_path / "policy")
    assert record.load(run.folder).finished


def test_data_from_a_file_are_not_those_of_the_hub(own: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as hub:
        hub.delenv("GCPO_DATA_DIR")
        run = finished(**own)
    assert "data (validation) is not what it was made of" in str(record.load(run.folder).fault)


def test_a_model_that_changes_during_the_run_fails_it(own: dict[str, Any]) -> None:
    with (
        pytest.raises(record.RecordError, match="While the run was made, policy is not"),
        record.record(planned(**own)),
    ):
        Path(own["policy"], "model.safetensors").write_bytes(b"other weights")


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


# --- the reference --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [("runs.jsonl", "{}\n"), ("runs.jsonl", "[\n"), ("eval.parquet", "x"), ("eval.parquet", None), (io.SUMS, None)],
)
def test_an_edited_reference_is_left_out_and_says_so(name: str, content: str | None) -> None:
    write_grid("g", [{"kind": "train", "seed": [0, 1]}])
    runs = [finished(seed=seed, tables=TABLES) for seed in (0, 1)]
    folder = paths.REFERENCE / "p"
    records.write_reference(folder, runs)
    assert len(records.find("p", "g", reference=True)) == 2
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    assert records.find("p", "g", reference=True).empty
    assert records.coverage("g", "p", reference=True)["left_out"].sum() > 0
    assert all("restore it from the repository, or publish again" in line for line in records.faults("p", True))


def test_lines_of_a_reference_by_another_version_are_left_out_one_by_one() -> None:
    run = finished(tables=TABLES)
    folder = paths.REFERENCE / "p"
    records.write_reference(folder, [run])
    newer = json.dumps({**run.manifest, "id": "newer", "schema": SCHEMA + 1})
    (folder / "runs.jsonl").write_text((folder / "runs.jsonl").read_text() + f"{newer}\n3\n")
    (folder / io.SUMS).unlink()
    io.seal(folder)
    assert records.find("p", reference=True)["id"].tolist() == [run.folder.name]
    assert records.faults("p", reference=True) == [
        f"newer: made by a newer version of gcpo (schema {SCHEMA + 1}; this one reads up to {SCHEMA}): update gcpo",
        "line 3: not readable",
    ]


# --- claims ---------------------------------------------------------------------------------------------------------


def test_a_claim_names_process_and_host_and_is_gone_afterwards() -> None:
    plan = planned()
    with record.claim(plan):
        text = (plan.folder / record.CLAIM).read_text()
        assert "pid=" in text and "host=" in text and "start=" in text
        with pytest.raises(Timeout), record.claim(plan, timeout=0):
            pass
    assert not (plan.folder / record.CLAIM).exists()


def claim_of(**values: object) -> str:
    known = {"pid": 1, "host": "another-machine", "mode": "lease", "token": "0" * 32, "duration": record.LEASE}
    return "filelock/2\n" + "".join(f"{key}={value}\n" for key, value in {**known, **values}.items())


def test_a_claim_of_another_machine_is_taken_over_after_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned()
    plan.folder.mkdir(parents=True)
    path = plan.folder / record.CLAIM
    path.write_text(claim_of())
    with pytest.raises(Timeout), record.claim(plan, timeout=0.3):
        pass
    monkeypatch.setattr(record, "LEASE", 1.0)
    path.write_text(claim_of(duration=1.0))
    with record.claim(plan, timeout=60):
        assert "another-machine" not in path.read_text()


@pytest.mark.parametrize("content", ["", "filelock/2\npid="])
def test_a_claim_that_a_kill_left_without_a_name_is_void_after_seconds(
    content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned()
    plan.folder.mkdir(parents=True)
    (plan.folder / record.CLAIM).write_text(content)
    with pytest.raises(Timeout), record.claim(plan, timeout=0):
        pass  # perhaps its process is just about to write it
    monkeypatch.setattr(record, "EMPTY", 1.0)
    with record.claim(plan, timeout=60):
        assert f"pid={os.getpid()}\n" in (plan.folder / record.CLAIM).read_text()


# --- anything at all ------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = ["schema", "id", "kind", "params", "resolved", "contents", "status", "files", "results", "sha256", "seconds"]


@settings(max_examples=150, deadline=None)
@given(values=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=4))
def test_any_edit_of_a_manifest_is_a_fault_and_never_an_error(values: dict[str, Any]) -> None:
    run = finished(tables=TABLES)
    before = run.manifest
    write_grid("g", [{"kind": "train"}])
    edit(run.folder, **values)
    same = json.dumps({**before, **values}, sort_keys=True) == json.dumps(before, sort_keys=True)
    found = record.load(run.folder)
    assert (found.fault is None) == same and "\n" not in str(found.fault)
    assert len(records.find("p", "g")) == same == len(records.find("p"))
    assert records.coverage("g", "p")["left_out"].tolist() == [not same]
    shutil.rmtree(run.folder)


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_in_place_of_a_manifest_are_a_fault_and_never_an_error(content: bytes) -> None:
    folder = paths.OUTPUTS / "p" / "runs" / "odd"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_bytes(content)
    assert record.load(folder).fault is not None
    assert records.find("p").empty
    (line,) = records.faults("p")
    assert line.startswith("odd: ") and "\n" not in line


def test_no_file_of_many_records_is_hashed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    one = finished(tables=TABLES)
    for seed in range(1, 50):
        plan = planned(seed=seed)
        shutil.copytree(one.folder, plan.folder)
        params = {**one.manifest["params"], "seed": seed}
        edit(plan.folder, sealed=True, id=plan.id, resolved=plan.values, params=params)
    hashed: list[str] = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: (hashed.append(file.name), digest(file, name))[1])
    assert len(records.find("p")) == 50
    assert len(hashed) == len(set(hashed)) and len(hashed) >= 50 * len(TABLES) - 2
    hashed.clear()
    assert len(records.find("p")) == 50 and hashed == []
