"""Tasks and the reader of benchmarks: small files, fakes of the Hub, and the real NarrativeQA rows where they are."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from fsspec.implementations.dirfs import DirFileSystem

from gcpo.runs import train
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.record import Run
from gcpo.tasks import TASKS, get_task, narrativeqa, sources
from gcpo.tasks.base import Row, Split, Task, check_disjoint, math_scores, qa_scores
from gcpo.tasks.narrativeqa import TASK as NARRATIVEQA
from gcpo.tasks.reading import Anything, Fields, MalformedRowError, Source, Text, reader


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


# --- records --------------------------------------------------------------------------------------------------------


class Named(Fields):
    name: Text
    note: Anything = ""
    counts: tuple[int, ...] = ()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "field 'name' is missing"),
        ({"name": 7}, "field 'name' is 7: it should be a valid string"),
        ({"name": " \n"}, r"field 'name' is ' \\n': it should not be blank"),
        ({"name": "a\ud83d"}, r"field 'name' is 'a\\ud83d': it should not have half of a surrogate pair"),
        ({"name": "a", "note": "\udfff"}, "field 'note' is .*: it should not have half of a surrogate pair"),
        ({"name": "a", "counts": (1, True)}, r"field 'counts\.1' is True: it should be a valid integer"),
        ({"name": ["a" * 9999]}, "field 'name' is .{3,50}: it should be a valid string"),  # a long value is cut
    ],
)
def test_the_first_wrong_field_of_a_record_is_named(record: dict[str, Any], message: str) -> None:
    with pytest.raises(MalformedRowError, match=f"^{message}$"):
        Named.of(record)


def test_fields_that_a_task_does_not_read_may_be_anything() -> None:
    assert Named.of({"name": " a", "note": "", "more": ["\ud83d"]}).name == " a"


# --- two splits of one run ------------------------------------------------------------------------------------------


def split(name: str, *prompts: str) -> Split:
    rows = tuple(Row(f"{name}-{prompt}", prompt, ("1",)) for prompt in prompts)
    return Split(rows, {"dataset": "d", "split": name, "skipped": 1})


@pytest.mark.parametrize("same", ["q ?", "Q  ?", "\tq\n?"])
def test_a_question_that_is_trained_on_and_held_out_is_refused_or_left_out_of_training(same: str) -> None:
    splits = {"train": split("a", "p", "q ?", "r"), "eval": split("b", same), "validation": split("c", "R", "s")}
    with pytest.raises(
        ValueError, match=r"^1 of 3 questions of d/a \(train\) are .* of d/b \(eval\).*id 'a-q \?'.*skip_malf"
    ):
        check_disjoint(splits, skip=False)
    apart = check_disjoint(splits, skip=True)
    assert [row.prompt for row in apart["train"].rows] == ["p"] and apart["train"].source["skipped"] == 1 + 2
    assert apart["eval"] == splits["eval"] and apart["validation"] == splits["validation"]
    assert check_disjoint(apart, skip=False) == apart


@pytest.mark.parametrize(
    "splits",
    [
        {"train": split("a", "p"), "eval": split("b", "q"), "validation": split("c", "q")},  # both held out
        {"train": split("a", "p"), "eval": split("b", "p")},  # nothing is left to train on
    ],
)
def test_what_leaves_no_training_or_no_test_is_refused_in_any_case(splits: dict[str, Split]) -> None:
    with pytest.raises(ValueError, match=r"1 of 1 questions of d/.*Take them out of one split"):
        check_disjoint(splits, skip=True)


def test_files_with_the_same_rows_are_no_training_and_test(write: Write) -> None:
    same = [record(number) for number in range(3)]
    write(*same, split="train")
    write(*same)
    loaded = {part: NARRATIVEQA.load(name, limit=None) for part, name in (("train", "train"), ("eval", "test"))}
    plan = Plan("train", validate({"task": "narrativeqa", "validation_limit": 0, "policy": "no/such-model"}))
    with pytest.raises(ValueError, match="3 of 3 questions"):  # before the policy is loaded
        train._questions(plan, Run(Path("nowhere")))
    with pytest.raises(
        ValueError, match=r"^3 of 3 questions of narrativeqa/train \(train\).* narrativeqa/test \(eval\)"
    ):
        check_disjoint(loaded, skip=False)


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
    ("[" * 100_000, r"line 3: not JSON \(maximum recursion depth"),
    ("[1]", r"line 3: a JSON list, not an object"),
    (record(3) | {"answers": []}, r"line 3: field 'answers' is \[\]: "),
    (record(3) | {"answers": [{"text": 7}]}, r"line 3: field 'answers.0.text' is 7: it should be a valid string"),
    (record(3) | {"question": {}}, r"line 3: field 'question.text' is missing"),
    (record(3, summary=" "), r"line 3: field 'document.summary.text' is ' ': it should not be blank"),
    (record(3, summary="\ud83d"), r"line 3: field 'document.summary.text' is .* surrogate"),
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
            reader({"train": Source(narrativeqa.Question, name, "train", "nobody/nq")})("train", limit=None)


def test_a_probe_reads_the_first_row_and_no_further(write: Write) -> None:
    write("", record(1), "no JSON")
    assert sources("narrativeqa")["test"].probe()["file"] == "narrativeqa/test.jsonl"
    write("no JSON", record(1))
    with pytest.raises(MalformedRowError, match=r"test\.jsonl, line 1: not JSON"):
        sources("narrativeqa")["test"].probe()
    write("")
    with pytest.raises(ValueError, match="narrativeqa/test has no usable row"):
        sources("narrativeqa")["test"].probe()


# --- reading the Hub ------------------------------------------------------------------------------------------------

GSM8K = get_task("gsm8k")


def problem(number: int) -> dict[str, Any]:
    """A GSM8K record in the Hub's fields."""
    return {"question": f"{number} and 1?", "answer": f"It is\n#### {number + 1}"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A fake Hub with two records of GSM8K; what it was asked for is kept."""
    monkeypatch.delenv("GCPO_DATA_DIR", raising=False)
    asked: dict[str, Any] = {"records": [problem(1), problem(2)]}

    def dataset_info(name: str, revision: str | None) -> Any:
        asked["info"] = (name, revision)
        return type("Info", (), {"sha": "c0ffee"})

    def load_dataset(name: str, config: str | None, *, split: str, revision: str | None, streaming: bool) -> Any:
        asked["load"] = (name, config, split, revision)
        if isinstance(asked["records"], Exception):
            raise asked["records"]
        return iter(asked["records"]) if streaming else datasets.Dataset.from_list(asked["records"])

    monkeypatch.setattr(huggingface_hub, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_the_hub_is_read_at_the_resolved_commit_which_is_recorded(hub: dict[str, Any]) -> None:
    split = GSM8K.load("test", limit=1, revision="v1")
    assert hub["info"] == ("openai/gsm8k", "v1")
    assert hub["load"] == ("openai/gsm8k", "main", "test", "c0ffee")
    assert len(split.rows) == 1
    place = {"dataset": "openai/gsm8k", "config": "main", "split": "test", "requested": "v1", "revision": "c0ffee"}
    assert split.source == place | {"skipped": 0, "cut": 0}


def test_qasper_is_read_as_the_hub_converted_it_unless_another_revision_is_asked_for(hub: dict[str, Any]) -> None:
    for asked, expected in ((None, "refs/convert/parquet"), ("v1", "v1")):
        with pytest.raises(MalformedRowError, match=r"allenai/qasper \(test\), row 1: field 'title' is missing"):
            get_task("qasper").load("test", limit=1, revision=asked)
        assert hub["info"] == ("allenai/qasper", expected)


def test_an_unknown_commit_is_none_not_invented(hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise RuntimeError("offline")

    monkeypatch.setattr(huggingface_hub, "dataset_info", offline)
    split = GSM8K.load("test", limit=None, revision="v1")
    assert hub["load"][-1] == "v1"
    assert (split.source["requested"], split.source["revision"]) == ("v1", None)


def test_a_malformed_row_of_the_hub_is_named(hub: dict[str, Any]) -> None:
    hub["records"].append({"question": "q", "answer": None})
    with pytest.raises(MalformedRowError, match=r"openai/gsm8k \(test\), row 3: field 'answer' is None"):
        GSM8K.load("test", limit=1)


def caused(error: Exception, by: Exception) -> Exception:
    error.__cause__ = by
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Dataset scripts are no longer supported, but found gsm8k.py"), "but found gsm8k.py"),
        (FileNotFoundError("the revision\nis not there."), "the revision is not there"),
        (
            caused(ConnectionError("Couldn't reach it"), OSError("Name or service not known")),
            "Name or service not known",
        ),
        (ValueError(), "ValueError"),
    ],
)
def test_whatever_the_hub_s_library_raises_is_one_sentence_with_the_way_out(
    hub: dict[str, Any], error: Exception, said: str
) -> None:
    hub["records"] = error
    for read in (GSM8K.load, lambda split, limit: sources("gsm8k")[split].probe()):
        with pytest.raises(OSError, match=rf"gsm8k \(test\) could not be read .*{said}\. .*GCPO_DATA_DIR.*HF_TOKEN\.$"):
            read("test", limit=1)


def test_a_probe_of_the_hub_streams(hub: dict[str, Any]) -> None:
    def records() -> Iterator[Any]:
        yield problem(1)
        raise AssertionError("the second row was asked for")

    hub["records"] = records()
    assert sources("gsm8k")["train"].probe("v1")["revision"] == "c0ffee"


def test_the_same_rows_come_from_the_hub_and_from_a_folder(
    hub: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_hub = GSM8K.load("test", limit=None, seed=3).rows
    (tmp_path / "gsm8k").mkdir()
    lines = "\n".join(map(json.dumps, reversed(hub["records"])))
    (tmp_path / "gsm8k" / "test.jsonl").write_text(lines)
    monkeypatch.setenv("GCPO_DATA_DIR", str(tmp_path))
    assert GSM8K.load("test", limit=None, seed=3).rows == from_hub


@pytest.fixture
def stories(hub: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """NarrativeQA's parquet files on a stand-in for the Hub's file system; lists the bytes of each read."""
    folder = tmp_path / "hub" / "datasets" / "deepmind" / "narrativeqa@c0ffee" / "data"
    folder.mkdir(parents=True)
    noise = random.Random(0)
    for number in range(2):  # files, each of two questions and stories that do not compress
        records = [record(2 * number + one) for one in range(2)]
        for one in records:
            one["document"]["text"] = "".join(noise.choices("abcdefghijklmnop", k=800_000))
        datasets.Dataset.from_list(records).to_parquet(folder / f"test-0000{number}-of-00002.parquet")
    read: list[int] = []

    class Files(DirFileSystem):
        def open(self, path: str, cache_type: str, **_: Any) -> Any:
            file = super().open(path, "rb")
            whole = file.read
            file.read = lambda size=-1: read.append(size) or whole(size)
            return file

    monkeypatch.setattr(huggingface_hub, "HfFileSystem", lambda: Files(str(tmp_path / "hub")))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return read


def test_of_narrativeqa_s_files_the_stories_are_not_loaded(stories: list[int]) -> None:
    split = NARRATIVEQA.load("test", limit=None)
    assert sorted(row.prompt[-2] for row in split.rows) == ["0", "1", "2", "3"]
    assert {row.references for row in split.rows} == {("a cat", "one cat")}
    assert split.source["revision"] == "c0ffee"
    assert min(stories) >= 0 and sum(stories) < 200_000  # of 1,600,000 and more
    first = len(stories)
    assert NARRATIVEQA.load("test", limit=None).rows == split.rows
    assert len(stories) == first  # they are in the local cache
    assert sources("narrativeqa")["test"].probe()["revision"] == "c0ffee"


def test_a_split_without_files_on_the_hub_is_named(stories: list[int]) -> None:
    with pytest.raises(OSError, match=r"there is no datasets/deepmind/narrativeqa@c0ffee/data/train-\*\.parquet"):
        NARRATIVEQA.load("train", limit=1)


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
