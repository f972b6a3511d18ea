"""Training sets of the papers: which of the Hub's records belong to them, on hand-made rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gcpo import mathematics
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.record import Run
from gcpo.runs.train import _questions
from gcpo.tasks import get_task, math, openr1
from gcpo.tasks.base import check_disjoint
from gcpo.tasks.reading import MalformedRowError

Write = Callable[[str, list[dict[str, Any]]], None]
WORDS = "one two three four five six seven eight nine ten".split()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes records to a file of a data folder that is in use."""
    monkeypatch.setenv("GCPO_DATA_DIR", str(tmp_path))

    def to(file: str, records: list[dict[str, Any]]) -> None:
        path = tmp_path / f"{file}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    return to


# --- MATH and Open-RS -----------------------------------------------------------------------------------------------


def solved(number: int, level: int = 3) -> dict[str, Any]:
    return {"problem": f"Problem {number}?", "level": f"Level {level}", "solution": rf"So \boxed{{{number}}}."}


def test_math_is_read_in_three_ways(write: Write) -> None:
    write("math_train/train", [solved(number, level=number) for number in (1, 2, 3, 4, 5)])
    write("math_train/test", [solved(number, level=number - 5) for number in (6, 7, 8, 9, 10)])
    golds = {
        split: sorted(int(row.references[0]) for row in get_task("math").load(split, limit=None).rows)
        for split in ("train", "train_all", "train_12k")
    }
    assert golds == {"train": [3, 4, 5], "train_all": [1, 2, 3, 4, 5], "train_12k": [3, 4, 5, 8, 9, 10]}


def test_of_all_12500_problems_a_run_leaves_out_those_that_are_tested_on(write: Write, tmp_path: Path) -> None:
    write("math_train/train", [solved(number) for number in range(4)])
    write("math_train/test", [solved(number) for number in range(4, 8)])
    asked = [{"unique_id": str(n), "problem": f"Problem {n}?", "answer": str(n)} for n in (5, 7)]
    write("math500/test", asked)
    values = {"task": "math", "train_split": "train_12k", "validation_limit": 0, "policy": "scratch"}
    splits = {"train": math.TASK.load("train_12k", limit=None), "eval": math.TASK.load("test", limit=None)}
    with pytest.raises(ValueError, match=r"2 of 8 questions .* set skip_malformed: true"):
        check_disjoint(splits, skip=False)
    plan = Plan("train", validate({**values, "skip_malformed": True}))

    run = Run(tmp_path / "run", {})
    trained_on, held_out, _ = _questions(plan, run)
    assert {row.references[0] for row in trained_on} == {"0", "1", "2", "3", "4", "6"} and len(held_out) == 2
    source = run.manifest["data"]["train"]
    assert source["skipped"] == 2 and [one["file"] for one in (source, *source["more"])] == [
        "math_train/train.jsonl",
        "math_train/test.jsonl",
    ]


def test_open_rs_is_tested_on_math_500(write: Write) -> None:
    write("open_rs/train", [{**solved(7), "solution": "So it is seven.", "answer": " 7 ", "level": "Hard"}])
    write("math500/test", [{"unique_id": "a", "problem": "1 + 1?", "answer": "2"}])
    (row,), (asked,) = (get_task("open_rs").load(split, limit=None).rows for split in ("train", "test"))
    assert row.parts == {"problem": "Problem 7?"} and row.references == ("7",) and asked.id == "a"


# --- gold answers that no answer can equal --------------------------------------------------------------------------

# A benchmark's file, its split, and a record of it with a number and a gold answer.
Made = Callable[[int, str], dict[str, Any]]
MATHEMATICS: dict[str, tuple[str, str, Made]] = {
    "math": ("math_train/train", "train", lambda n, gold: solved(n) | {"solution": rf"So \boxed{{{gold}}}."}),
    "aime24": ("aime24/train", "test", lambda n, gold: {"id": n, "problem": f"P {n}?", "answer": gold}),
    "olympiadbench": ("olympiadbench/train", "whole", lambda n, gold: {"id": n, "question": f"{n}?", "answer": gold}),
    "minerva": ("minerva_math/train", "test", lambda n, gold: solved(n) | {"solution": rf"\boxed{{{gold}}}"}),
    "gsm8k": ("gsm8k/train", "train", lambda n, gold: {"question": f"{n}?", "answer": f"So\n#### {gold}"}),
    "open_rs": ("open_rs/train", "train", lambda n, gold: {"problem": f"P {n}?", "answer": gold}),
}
MATH_500 = "math500/test", "test", lambda n, gold: {"unique_id": str(n), "problem": f"{n}?", "answer": gold}
UNREADABLE = [(name, *of, gold) for name, of in MATHEMATICS.items() if name != "gsm8k" for gold in (r"\text{}", "$$")]
TOO_LONG = [(name, *of, "1" * 2001) for name, of in MATHEMATICS.items()]


@pytest.mark.parametrize(("name", "file", "split", "made", "gold"), [*UNREADABLE, *TOO_LONG, ("math", *MATH_500, "$$")])
def test_a_row_whose_gold_answer_no_answer_can_equal_is_malformed(
    write: Write, name: str, file: str, split: str, made: Made, gold: str
) -> None:
    write(file, [made(1, "3"), made(2, gold), made(3, r"\frac{1}{2}" if name != "gsm8k" else "0.5")])
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


def test_numbers_and_fractions_are_gold_answers_for_which_math_verify_does_not_start(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mathematics, "_ask", lambda *_: 1 / 0)
    mathematics._known.cache_clear()
    file, split, made = MATHEMATICS["math"]
    write(file, [made(n, gold) for n, gold in enumerate(("-7", "1000000", "2.5", r"\frac{1}{2}", r"-\dfrac34"))])
    assert len(get_task("math").load(split, limit=None).rows) == 5


def test_of_openr1_a_problem_that_could_be_chosen_makes_room_for_the_next(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openr1, "POOL", 20)  # of which 10 are mixed ones of the default
    monkeypatch.setattr(openr1, "VALIDATION", 0)
    write("openr1/train", [generated(n, [True, False], r"\text{}" if n % 2 else "7") for n in range(20)])
    write("openr1_extended/train", [generated(99, [True, False])])
    load = get_task("openr1").load
    with pytest.raises(MalformedRowError, match=r"openr1/train\.jsonl, line \d+, id 'default-mixed-u"):
        load("train", limit=None)
    rows = load("train", limit=None, skip_malformed=True).rows
    assert {int(row.id.rpartition("u")[2]) for row in rows} == {*range(0, 20, 2), 99}


# --- OpenR1-Math's stable 10k ---------------------------------------------------------------------------------------


def generated(number: int, right: list[bool | None] | None, answer: str = "7", text: str = "") -> dict[str, Any]:
    # No two have a word in common but those of a longer text.
    problem = text or " ".join(f"{word}{number}" for word in WORDS)
    return {"uuid": f"u{number}", "problem": problem, "answer": answer, "correctness_math_verify": right}


KEPT = {
    "mixed": generated(1, [True, False]),
    "correct": generated(1, [True, True, True]),
    "mixed with one unknown": generated(1, [True, None]),
    "a fraction": generated(1, [True, False], r"\frac{1}{2}"),
    "thousands": generated(1, [True, False], "1,000"),
}
LEFT_OUT = {
    "entirely incorrect": generated(1, [False, False]),
    "one generation": generated(1, [True]),
    "not verified": generated(1, None),
    "no answer": generated(1, [True, False], " "),
    "two values": generated(1, [True, False], "1, 2"),
    "two in words": generated(1, [True, False], r"1 \text{ or } 2"),
    "plus and minus": generated(1, [True, False], r"\pm 3"),
    "long": generated(1, [True, False], text="a" * 4097),
}


@pytest.mark.parametrize("case", KEPT)
def test_a_problem_belongs_to_a_bucket(case: str) -> None:
    (row,) = openr1.Problem.of(KEPT[case]).rows()
    assert row.id == f"default-{case.split()[0] if case in ('mixed', 'correct') else 'mixed'}-u1"


@pytest.mark.parametrize("case", LEFT_OUT)
def test_a_problem_that_belongs_to_none_is_left_out(case: str) -> None:
    assert openr1.Problem.of(LEFT_OUT[case]).rows() == []


def test_the_pool_has_the_papers_shares_and_the_validation_split_128_of_10000(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openr1, "POOL", 20)
    monkeypatch.setattr(openr1, "VALIDATION", 5)
    write("openr1/train", [generated(number, [True, number % 2 == 0]) for number in range(40)])
    write("openr1_extended/train", [generated(number, [True, number % 2 == 0]) for number in range(40, 50)])
    task = get_task("openr1")
    train, validation = (task.load(split, limit=None).rows for split in ("train", "validation"))
    counts = Counter(row.id.rpartition("-")[0] for row in (*train, *validation))
    # 20 x 0.85 x 0.6 = 10.2, x 0.4 = 6.8; 20 x 0.15 x 0.6 = 1.8, x 0.4 = 1.2
    assert counts == {"default-mixed": 10, "default-correct": 7, "extended-mixed": 2, "extended-correct": 1}
    assert len(validation) == 5 and not {row.id for row in train} & {row.id for row in validation}
    other = task.load("train", limit=None, seed=3).rows
    assert {row.id for row in other} == {row.id for row in train} and other != train
    assert task.load("train", limit=4, seed=3).rows == other[:4]


def test_a_near_duplicate_is_left_out(write: Write) -> None:
    text = " ".join(f"word{number}" for number in range(40))
    texts = [text, text.replace("word7", "other").upper(), text.replace("word", "term")]
    write("openr1/train", [generated(number, [True, False], text=text) for number, text in enumerate(texts)])
    write("openr1_extended/train", [generated(9, [True, False], text="another one")])
    kept = [row.parts["problem"] for row in get_task("openr1").load("train", limit=None).rows]
    assert len(kept) == 3 and texts[2] in kept and "another one" in kept


def test_too_few_problems_for_a_validation_split_is_an_error(write: Write) -> None:
    write("openr1/train", [generated(1, [True, False])])
    write("openr1_extended/train", [generated(2, [True, False])])
    with pytest.raises(ValueError, match=r"openr1/validation is empty: the 2 problems here are too few for it"):
        get_task("openr1").load("validation", limit=8)


def test_the_hub_s_files_are_those_of_each_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GCPO_DATA_DIR", raising=False)
    asked: list[str] = []

    class Files:
        def glob(self, pattern: str) -> list[str]:
            asked.append(pattern)
            return []

    monkeypatch.setattr("huggingface_hub.HfFileSystem", Files)
    for source in (openr1.SPLITS["train"], *openr1.SPLITS["train"].more):
        with pytest.raises(OSError, match="could not be read from the Hub: there is no datasets/open-r1"):
            source.probe("abc")
    assert asked == [
        f"datasets/open-r1/OpenR1-Math-220k@abc/{folder}/train-*.parquet" for folder in ("data", "extended")
    ]
