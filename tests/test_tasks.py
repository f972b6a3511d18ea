"""Tasks and the reader of benchmarks: small files, fakes of the Hub, and two splits of one run."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest
from fsspec.implementations.dirfs import DirFileSystem

from gcpo import io, mathematics
from gcpo.tasks import TASKS, get_task, narrativeqa, sources
from gcpo.tasks.base import Row, Split, check_disjoint, qa_scores
from gcpo.tasks.narrativeqa import TASK as NARRATIVEQA
from gcpo.tasks.reading import MalformedRowError, Source, reader


def record(number: int, summary: str = "Ada has a cat.") -> dict[str, Any]:
    """A NarrativeQA record in the Hub's fields."""
    return {
        "document": {"id": "d1", "summary": {"text": summary}},
        "question": {"text": f"Question {number}?"},
        "answers": [{"text": "a cat "}, {"text": "one cat"}],
    }


Write = Callable[..., Path]


# --- tasks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_every_name_gives_its_task_and_no_answer_scores_0(name: str) -> None:
    task = get_task(name)
    assert task.name == name
    assert task.score(None, ("1",)) == dict.fromkeys(task.metrics, 0.0)


def test_accuracy_is_f1_strictly_above_one_half_and_the_reward_twice_the_metric() -> None:
    assert qa_scores("cat dog map", ("cat",)) == {"accuracy": 0.0, "bleu1": pytest.approx(1 / 3), "f1": 0.5}
    assert qa_scores("cat dog", ("cat",))["accuracy"] == 1.0  # F1 = 2/3
    f1 = 2 * 2 / (2 + 3)  # "black cat" against "black cat sat": 2 common tokens
    assert NARRATIVEQA.reward("Answer: the black cat", ("dog", "a black cat sat")) == pytest.approx(2 * f1)
    assert NARRATIVEQA.reward("  ", ("dog",)) == 0.0


def test_a_binary_reward_is_the_largest_for_a_right_answer_and_the_smallest_for_any_other() -> None:
    plain, binary = get_task("tinyqa"), get_task("tinyqa", reward="binary")
    assert plain.reward("black dog", ["a black cat"]) == 1.0  # F1 is 1/2, which the papers do not call right
    assert binary.reward("black dog", ["a black cat"]) == 0.0
    assert binary.reward("big black cat", ["a black cat"]) == binary.reward("a black cat", ["a black cat"]) == 2.0
    for choice, whole in ((None, True), (True, True), (False, False)):
        assert get_task("tinymath", full_completion=choice).full_completion is whole


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "tinyq"}, "'tinyq'.*'tinyqa'"),
        ({"name": "tinyqa", "reward": "half"}, "reward is 'half', expected one of metric, binary"),
        ({"name": "math", "context": "evidence"}, r"context \(of math\)"),
    ],
)
def test_an_option_that_is_none_is_refused_with_those_that_are(options: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        get_task(**options)


# --- two splits of one run ------------------------------------------------------------------------------------------


def split(name: str, *prompts: str) -> Split:
    rows = tuple(Row(f"{name}-{prompt}", prompt, ("1",)) for prompt in prompts)
    return Split(rows, {"dataset": "d", "split": name, "skipped": 1})


@pytest.mark.parametrize("same", ["q ?", "Q  ?", "\tq\n?"])
def test_a_question_that_is_trained_on_and_held_out_is_refused_or_left_out_of_training(same: str) -> None:
    splits = {"train": split("a", "p", "q ?", "r"), "eval": split("b", same), "validation": split("c", "R", "s")}
    with pytest.raises(ValueError, match=r"1 of 3 .* d/a \(train\) .* d/b \(eval\).*'a-q \?'.*skip_malformed"):
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
    with pytest.raises(ValueError, match=r"1 of 1 questions of d/"):
        check_disjoint(splits, skip=True)


# --- reading a folder -----------------------------------------------------------------------------------------------


def test_narrativeqa_rows_and_source(write: Write) -> None:
    path = write(record(1))
    split = NARRATIVEQA.load("test", limit=None)
    (row,) = split.rows
    assert row.references == ("a cat", "one cat") and row.id.startswith("d1:")
    assert "Ada has a cat." in row.prompt and row.prompt.endswith("Question: Question 1?")
    file = {"dataset": "narrativeqa", "split": "test", "file": "narrativeqa/test.jsonl", "sha256": io.sha256(path)}
    assert split.source == {**file, "skipped": 0, "cut": 0}


@pytest.mark.parametrize(("most", "kept"), [(3, "one two three"), (4, "one two\nthree four")])
def test_a_context_is_cut_to_its_first_words_and_counted(
    write: Write, monkeypatch: pytest.MonkeyPatch, most: int, kept: str
) -> None:
    monkeypatch.setattr(narrativeqa, "MAX_CONTEXT_WORDS", most)
    write(record(1, "one two\nthree four"), record(2, "short"))
    split = NARRATIVEQA.load("test", limit=None)
    (row,) = (row for row in split.rows if "Question 1?" in row.prompt)
    assert f"Summary: {kept}\n\nQuestion" in row.prompt
    assert row.cut == split.source["cut"] == (most == 3)


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
    assert other != every and set(other) == set(every)


def test_repeated_ids_are_numbered(write: Write) -> None:
    write(record(1), record(2), record(1), record(1))
    ids = sorted(row.id for row in NARRATIVEQA.load("test", limit=None).rows)
    assert len({name.split(":")[1].split("-")[0] for name in ids}) == 2
    assert sum(name.endswith("-2") for name in ids) == sum(name.endswith("-3") for name in ids) == 1


MALFORMED = [
    ('{"document": ', "not JSON"),
    ("[" * 100_000, "not JSON"),
    ("[1]", "not an object"),
    (record(3) | {"answers": []}, r"'answers' is \[\]"),
    (record(3) | {"answers": [{"text": 7}]}, r"'answers\.0\.text' is 7"),
    (record(3) | {"question": {}}, r"'question\.text' is missing"),
    ({"question": {"text": "q"}, "answers": [{"text": "a"}]}, "'document' is missing"),
    (record(3, summary=" "), r"'document\.summary\.text' is ' ': it should not be blank"),
    (record(3, summary="\ud83d" + "x" * 999), r"'document\.summary\.text' is .{9,40}: "),  # a long value is cut
]


@pytest.mark.parametrize(("bad", "said"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_row_is_named_and_skipped_only_on_request(write: Write, bad: Any, said: str) -> None:
    write(record(1), "", bad, record(4) | {"more": "\ud83d"})  # an empty line is no row; other fields may be anything
    with pytest.raises(MalformedRowError, match=rf"test\.jsonl, line 3: .*{said}.*skip_malformed: true"):
        NARRATIVEQA.load("test", limit=1)
    split = NARRATIVEQA.load("test", limit=None, skip_malformed=True)
    assert len(split.rows) == 2 and split.source["skipped"] == 1


def test_a_missing_file_or_split_is_an_error_that_lists_what_there_is(write: Write) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no <benchmark>/<split>\.jsonl"):
        NARRATIVEQA.load("train", limit=None)
    write(record(1), file="narrativeqa/validation")
    write(record(1))
    for name in ("narrativeqa", "nq"):
        with pytest.raises(FileNotFoundError, match=rf"{name}/train\.jsonl does not exist.* narrativeqa/validation"):
            reader({"train": Source(narrativeqa.rows_of(supporting=False), name, "train", "nobody/nq")})(
                "train", limit=None
            )
    with pytest.raises(ValueError, match=r"no split 'validation' here: train \(.*\), test \(openai/gsm8k"):
        get_task("gsm8k").load("validation", limit=1)


# --- gold answers that no answer can equal --------------------------------------------------------------------------

# A file of a benchmark -> its task, its split, and a record of it with a number and a gold answer.
MATHEMATICS: dict[str, tuple[str, str, Callable[[int, str], dict[str, Any]]]] = {
    "math_train/train": (
        "math",
        "train",
        lambda n, gold: {"problem": f"P {n}?", "level": "Level 3", "solution": rf"So \boxed{{{gold}}}."},
    ),
    "math500/test": ("math", "test", lambda n, gold: {"unique_id": str(n), "problem": f"{n}?", "answer": gold}),
    "aime24/train": ("aime24", "test", lambda n, gold: {"id": n, "problem": f"P {n}?", "answer": gold}),
    "olympiadbench/train": ("olympiadbench", "whole", lambda n, gold: {"id": n, "question": f"{n}?", "answer": gold}),
}


@pytest.mark.parametrize("gold", ["$$", "1" * 2001])
@pytest.mark.parametrize("file", MATHEMATICS)
def test_a_row_whose_gold_answer_no_answer_can_equal_is_malformed(write: Write, file: str, gold: str) -> None:
    name, split, made = MATHEMATICS[file]
    write(made(1, "3"), made(2, gold), made(3, r"\frac{1}{2}"), file=file)
    load = get_task(name).load
    with pytest.raises(MalformedRowError) as error:
        load(split, limit=None)
    for part in (f"{file}.jsonl, line 2, id '", repr(gold[:99]), "skip_malformed: true"):
        assert part in str(error.value)
    left = load(split, limit=None, skip_malformed=True)
    assert len(left.rows) == 2 and left.source["skipped"] == 1
    for seed in range(4):  # the next in order takes its place, whichever comes first
        rows = load(split, limit=None, seed=seed, skip_malformed=True).rows
        assert load(split, limit=1, seed=seed, skip_malformed=True).rows == rows[:1]


def test_for_numbers_and_fractions_math_verify_does_not_start(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "_ask", lambda *_: 1 / 0)
    mathematics._known.cache_clear()
    _, split, made = MATHEMATICS["math_train/train"]
    golds = ("-7", "1000000", "2.5", r"\frac{1}{2}", r"-\dfrac34")
    write(*(made(n, gold) for n, gold in enumerate(golds)), file="math_train/train")
    assert len(get_task("math").load(split, limit=None).rows) == 5


# --- reading the Hub ------------------------------------------------------------------------------------------------

GSM8K = get_task("gsm8k")


def problem(number: int) -> dict[str, Any]:
    """A GSM8K record in the Hub's fields."""
    return {"question": f"{number} and 1?", "answer": f"It is\n#### {number + 1}"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A Hub of two GSM8K records; keeps what it was asked for."""
    asked: dict[str, Any] = {"records": [problem(1), problem(2)]}

    def load_dataset(*given: Any, split: str, revision: str | None) -> Any:
        asked["load"] = (*given, split, revision)
        if isinstance(asked["records"], Exception):
            raise asked["records"]
        return datasets.Dataset.from_list(asked["records"])

    def info(name: str, revision: str | None = None) -> Any:
        asked["info"] = (name, revision)
        return SimpleNamespace(sha="c0ffee")

    monkeypatch.delenv("GCPO_DATA_DIR", raising=False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub, "dataset_info", info)
    return asked


def test_the_hub_is_read_at_its_resolved_commit(hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    split = GSM8K.load("test", limit=None, revision="v1")
    assert hub["info"] == ("openai/gsm8k", "v1") and hub["load"] == ("openai/gsm8k", "main", "test", "c0ffee")
    at = {"requested": "v1", "revision": "c0ffee", "skipped": 0, "cut": 0}
    assert split.source == {"dataset": "openai/gsm8k", "config": "main", "split": "test", **at}
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda *_, **__: 1 / 0)  # offline: None, not invented
    split = GSM8K.load("test", limit=None, revision="v1")
    assert hub["load"][-1] == "v1" and (split.source["requested"], split.source["revision"]) == ("v1", None)


def test_qasper_is_read_as_the_hub_converted_it_unless_another_revision_is_asked_for(hub: dict[str, Any]) -> None:
    for asked, expected in ((None, "refs/convert/parquet"), ("v1", "v1")):
        with pytest.raises(MalformedRowError, match=r"allenai/qasper \(test\), row 1: field 'title' is missing"):
            get_task("qasper").load("test", limit=1, revision=asked)
        assert hub["info"] == ("allenai/qasper", expected)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError("the revision\nis not there."), "FileNotFoundError: the revision is not there"),
        (ValueError(), "ValueError"),
    ],
)
def test_whatever_the_hub_s_library_raises_is_one_sentence_with_the_way_out(
    hub: dict[str, Any], error: Exception, said: str
) -> None:
    hub["records"] = error
    with pytest.raises(OSError, match=rf"gsm8k \(test\) could not be read .*{said}\. .*GCPO_DATA_DIR.*HF_TOKEN\.$"):
        GSM8K.load("test", limit=1)


def test_the_same_rows_come_from_the_hub_and_from_a_folder(hub: dict[str, Any], write: Write) -> None:
    write(*reversed(hub["records"]), file="gsm8k/test")
    from_folder = GSM8K.load("test", limit=None, seed=3).rows
    with pytest.MonkeyPatch.context() as unset:
        unset.delenv("GCPO_DATA_DIR")
        assert GSM8K.load("test", limit=None, seed=3).rows == from_folder and hub["load"]


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
    assert {row.references for row in split.rows} == {("a cat", "one cat")} and split.source["revision"] == "c0ffee"
    assert min(stories) >= 0 and sum(stories) < 200_000  # of 1,600,000 and more
    first = len(stories)
    assert NARRATIVEQA.load("test", limit=None).rows == split.rows
    assert len(stories) == first  # they are in the local cache


def test_a_split_without_files_on_the_hub_is_named_with_the_place_of_each_configuration(stories: list[int]) -> None:
    places = {"narrativeqa": "deepmind/narrativeqa@c0ffee/data", "openr1": "open-r1/OpenR1-Math-220k@c0ffee/data"}
    for name, place in places.items():
        with pytest.raises(OSError, match=rf"there is no datasets/{place}/train-\*\.parquet"):
            get_task(name).load("train", limit=1)
    assert sources("openr1")["train"].more[0].config == "extended"
