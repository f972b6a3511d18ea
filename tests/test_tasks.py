"""Tasks and the reader of benchmarks: small files, fakes of the Hub, and the real NarrativeQA rows where they are."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pytest

from gcpo.tasks import TASKS, get_task, narrativeqa
from gcpo.tasks.base import MalformedRowError, Source, Split, Task, field, math_scores, qa_scores, reader
from gcpo.tasks.narrativeqa import TASK as NARRATIVEQA


def record(number: int, summary: str = "Ada has a cat.") -> dict[str, Any]:
    """A NarrativeQA record in the Hub's fields."""
    return {
        "document": {"id": "d1", "summary": {"text": summary}},
        "question": {"text": f"Question {number}?"},
        "answers": [{"text": "a cat "}, {"text": "one cat"}],
    }


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes records, or lines as they are, to a split of NarrativeQA in a data folder that is in use."""
    monkeypatch.setenv("GCPO_DATA_DIR", str(tmp_path))

    def to(*lines: Any, split: str = "test") -> Path:
        path = tmp_path / "narrativeqa" / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
        return path

    return to


# --- tasks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_every_name_gives_its_task(name: str) -> None:
    task = get_task(name)
    assert task.name == name
    assert tuple(task.score(None, ("1",))) == task.metrics
    assert set(task.score(None, ("1",)).values()) == {0.0}


@pytest.mark.parametrize("name", ["tinyqa", "tinymath"])
def test_the_right_answer_to_a_generated_question_earns_2(name: str) -> None:
    task = get_task(name)
    for row in task.load("test", limit=5).rows:
        for reference in row.references:
            completion = f"So \\boxed{{{reference}}}" if task.full_completion else f"Answer: {reference}"
            assert task.reward(completion, row.references) == 2.0
        assert task.reward("", row.references) == 0.0


def test_table5_reward_is_twice_the_metric() -> None:
    f1 = 2 * 2 / (2 + 3)  # "black cat" against "black cat sat": 2 common tokens
    assert NARRATIVEQA.reward("Answer: the black cat", ("dog", "a black cat sat")) == pytest.approx(2 * f1)
    assert NARRATIVEQA.reward("  ", ("dog",)) == 0.0


def test_accuracy_is_f1_strictly_above_one_half() -> None:
    assert qa_scores("cat dog map", ("cat",)) == {"accuracy": 0.0, "bleu1": pytest.approx(1 / 3), "f1": 0.5}
    assert qa_scores("cat dog", ("cat",))["accuracy"] == 1.0  # F1 = 2/3


def test_math_scores_have_one_reference_and_perhaps_a_tolerance() -> None:
    assert math_scores("0.5", (r"\frac12",)) == {"accuracy": 1.0}
    assert math_scores(None, ("9",)) == {"accuracy": 0.0}
    assert math_scores("9.05", ("9", "0.1")) == {"accuracy": 1.0}
    with pytest.raises(ValueError, match="too many values"):
        math_scores("9", ("9", "8", "7"))


def test_a_reward_metric_that_is_not_scored_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'t': reward_metric 'em' is not among \('f1',\)"):
        Task("t", ("f1",), lambda: Split((), {}), str, lambda *_: {}, "em", "short")


# --- fields ---------------------------------------------------------------------------------------------------------


def test_field_follows_a_path_through_objects_and_lists() -> None:
    assert field(record(1), "answers.1.text", str) == "one cat"
    assert field({"a": {"b": 0}}, "a.b", int) == 0
    assert field({"a": " "}, "a", str, empty=True) == " "


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("document.title", str, "'title' is missing"),
        ("answers.2.text", str, "'2' is missing"),
        ("question.text.more", str, "'more' is missing"),
        ("question", str, "is {'text': 'Question 1\\?'}, not of type str"),
        ("none", list, "is empty"),
    ],
)
def test_a_wrong_field_is_named(path: str, kind: type, message: str) -> None:
    with pytest.raises(MalformedRowError, match=f"field '{path}'.*{message}"):
        field(record(1) | {"none": []}, path, kind)


# --- reading a folder -----------------------------------------------------------------------------------------------


def test_narrativeqa_rows_and_source(write: Write) -> None:
    path = write(record(1))
    split = NARRATIVEQA.load("test", limit=None)
    (row,) = split.rows
    assert row.references == ("a cat", "one cat")
    assert row.id.startswith("d1:")
    assert "Ada has a cat." in row.prompt
    assert row.prompt.endswith("Question: Question 1?")
    assert split.source == {
        "dataset": "narrativeqa",
        "split": "test",
        "file": "narrativeqa/test.jsonl",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "skipped": 0,
        "cut": 0,
    }


@pytest.mark.parametrize(
    ("summary", "most", "kept"),
    [
        ("one two\nthree four", 3, "one two three"),
        ("one two\nthree four", 4, "one two\nthree four"),
        ("x" * 100_000, 3, "x" * 30),  # without words: cut by characters
    ],
    ids=["cut", "whole", "endless"],
)
def test_a_context_is_cut_to_its_first_words_and_counted(
    write: Write, monkeypatch: pytest.MonkeyPatch, summary: str, most: int, kept: str
) -> None:
    monkeypatch.setattr(narrativeqa, "MAX_CONTEXT_WORDS", most)
    write(record(1, summary), record(2, "short"))
    split = NARRATIVEQA.load("test", limit=None)
    (row,) = (row for row in split.rows if "Question 1?" in row.prompt)
    assert f"Summary: {kept}\n\nQuestion" in row.prompt
    assert row.cut == (kept != summary) and split.source["cut"] == row.cut


def test_a_limit_is_a_nested_subset_that_does_not_depend_on_the_file_s_order(write: Write) -> None:
    records = [record(number) for number in range(12)]
    write(*records)
    every = NARRATIVEQA.load("test", limit=None, seed=1).rows
    assert len(every) == 12
    for limit in (1, 5, 12, 99):
        assert NARRATIVEQA.load("test", limit=limit, seed=1).rows == every[:limit]
    write(*reversed(records))
    assert NARRATIVEQA.load("test", limit=5, seed=1).rows == every[:5]
    other = NARRATIVEQA.load("test", limit=None, seed=2).rows
    assert other != every
    assert set(other) == set(every)


def test_repeated_ids_are_numbered(write: Write) -> None:
    write(record(1), record(2), record(1), record(1))
    ids = sorted(row.id for row in NARRATIVEQA.load("test", limit=None).rows)
    base = {name.split(":")[1].split("-")[0] for name in ids}
    assert len(base) == 2
    assert sum(name.endswith("-2") for name in ids) == sum(name.endswith("-3") for name in ids) == 1


MALFORMED = [
    ('{"document": ', r"line 3: not JSON"),
    ("[1]", r"line 3: a JSON list, not an object"),
    (record(3) | {"answers": []}, r"line 3: field 'answers' is empty"),
    (record(3) | {"answers": [{"text": 7}]}, r"line 3: field 'answers.0.text' is 7, not of type str"),
    (record(3) | {"question": {}}, r"line 3: field 'question.text': 'text' is missing"),
    (record(3, summary=" "), r"line 3: field 'document.summary.text' is empty"),
]


@pytest.mark.parametrize(("bad", "message"), MALFORMED)
def test_a_malformed_row_is_named_and_skipped_only_on_request(write: Write, bad: Any, message: str) -> None:
    write(record(1), "", bad, record(4))  # an empty line is no row, but it is a line
    with pytest.raises(MalformedRowError, match=r"test\.jsonl, " + message):
        NARRATIVEQA.load("test", limit=1)
    split = NARRATIVEQA.load("test", limit=None, skip_malformed=True)
    assert len(split.rows) == 2
    assert split.source["skipped"] == 1


def test_a_missing_file_is_an_error_that_lists_what_there_is(write: Write) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no <benchmark>/<split>\.jsonl"):
        NARRATIVEQA.load("train", limit=None)
    write(record(1), split="validation")
    write(record(1))
    for name, there in (("narrativeqa", "narrativeqa/test.jsonl, narrativeqa/validation.jsonl"), ("nq", "narrativeqa")):
        with pytest.raises(FileNotFoundError, match=rf"{name}/train\.jsonl does not exist.* has {there}"):
            reader({"train": Source(name, "train", "nobody/nq")}, lambda _: [])("train", limit=None)


# --- reading the Hub ------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A fake Hub with two records; what it was asked for is kept."""
    monkeypatch.delenv("GCPO_DATA_DIR", raising=False)
    asked: dict[str, Any] = {"records": [record(1), record(2)]}

    def dataset_info(name: str, revision: str | None) -> Any:
        asked["info"] = (name, revision)
        return type("Info", (), {"sha": "c0ffee"})

    def load_dataset(name: str, config: str | None, *, split: str, revision: str | None) -> datasets.Dataset:
        asked["load"] = (name, config, split, revision)
        return datasets.Dataset.from_list(asked["records"])

    monkeypatch.setattr(huggingface_hub, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_the_hub_is_read_at_the_resolved_commit_which_is_recorded(hub: dict[str, Any]) -> None:
    split = NARRATIVEQA.load("validation", limit=1, revision="v1")
    assert hub["info"] == ("deepmind/narrativeqa", "v1")
    assert hub["load"] == ("deepmind/narrativeqa", None, "validation", "c0ffee")
    assert len(split.rows) == 1
    assert split.source == {
        "dataset": "deepmind/narrativeqa",
        "config": None,
        "split": "validation",
        "requested": "v1",
        "revision": "c0ffee",
        "skipped": 0,
        "cut": 0,
    }


def test_an_unknown_commit_is_none_not_invented(hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise RuntimeError("offline")

    monkeypatch.setattr(huggingface_hub, "dataset_info", offline)
    split = NARRATIVEQA.load("test", limit=None, revision="v1")
    assert hub["load"][-1] == "v1"
    assert (split.source["requested"], split.source["revision"]) == ("v1", None)


def test_a_malformed_row_of_the_hub_is_named(hub: dict[str, Any]) -> None:
    hub["records"].append({"document": {}})
    with pytest.raises(MalformedRowError, match=r"deepmind/narrativeqa \(test\), row 3: field 'document.summary.text'"):
        NARRATIVEQA.load("test", limit=1)


def test_the_same_rows_come_from_the_hub_and_from_a_folder(hub: dict[str, Any], write: Write) -> None:
    write(*reversed(hub["records"]))
    from_folder = NARRATIVEQA.load("test", limit=None, seed=3).rows
    os.environ.pop("GCPO_DATA_DIR")  # monkeypatch restores it
    assert NARRATIVEQA.load("test", limit=None, seed=3).rows == from_folder


def test_the_stories_are_not_even_decoded(hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stories = pa.array([b"\xff"], pa.binary()).view(pa.string())  # an error where it is read
    summaries = pa.array([{"text": "Ada has a cat."}])
    documents = pa.StructArray.from_arrays([pa.array(["d1"]), summaries, stories], ["id", "summary", "text"])
    columns = {name: pa.array([record(1)[name]]) for name in ("question", "answers")}
    table = datasets.Dataset(pa.table({"document": documents, **columns}))
    expected = NARRATIVEQA.load("test", limit=1).rows[0].references
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
    assert NARRATIVEQA.load("test", limit=1).rows[0].references == expected


# --- the real rows --------------------------------------------------------------------------------------------------

DATA = os.environ.get("GCPO_DATA_DIR", "")


@pytest.mark.data
@pytest.mark.skipif(not DATA, reason="needs GCPO_DATA_DIR")
@pytest.mark.parametrize("split", ["validation", "test"])
def test_real_narrativeqa_rows(split: str) -> None:
    path = Path(DATA) / "narrativeqa" / f"{split}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    loaded = NARRATIVEQA.load(split, limit=None)
    assert len(loaded.rows) == len({row.id for row in loaded.rows}) == len(records)
    expected = {(r["question"]["text"].strip(), tuple(a["text"].strip() for a in r["answers"])) for r in records}
    assert {(row.prompt.rsplit("Question: ", 1)[1], row.references) for row in loaded.rows} == expected
    assert all(len(row.references) == 2 for row in loaded.rows)
    assert max(len(row.prompt.split()) for row in loaded.rows) < 1100
    for row in loaded.rows[:20]:
        assert NARRATIVEQA.score(NARRATIVEQA.extract(f"Answer: {row.references[1]}"), row.references) == {
            "accuracy": 1.0,
            "bleu1": pytest.approx(1.0),
            "f1": 1.0,
        }
