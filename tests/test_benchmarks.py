"""The benchmarks of the papers: how a record becomes a question, what counts as right, and real rows of each."""

from __future__ import annotations

import copy
import importlib
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gcpo.tasks import TASKS, amc23, get_task, gsm8k, hotpotqa, minerva, mmlu_stem, olympiadbench, qasper, sources
from gcpo.tasks import math as math_task
from gcpo.tasks.base import Row
from gcpo.tasks.reading import MalformedRowError, reader

ANSWER = {"unanswerable": False, "extractive_spans": [], "free_form_answer": "", "yes_no": None, "evidence": []}


def paper(answers: list[dict[str, Any]], paragraphs: list[list[str]]) -> dict[str, Any]:
    asked = {"question": ["why ?"], "question_id": ["q1"], "answers": [{"answer": answers}]}
    return {"title": "T", "abstract": "A b.", "full_text": {"paragraphs": paragraphs}, "qas": asked}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"unanswerable": True, "extractive_spans": ["x"]}, "Unanswerable"),
        ({"extractive_spans": ["two", "three\nfour"], "free_form_answer": "x"}, "two, three four"),
        ({"free_form_answer": " in a\nlist "}, "in a list"),
        ({"yes_no": True}, "Yes"),
        ({"yes_no": False}, "No"),
    ],
)
def test_qasper_compares_with_the_official_answer_strings(changes: dict[str, Any], expected: str) -> None:
    assert str(qasper.Answer.of(ANSWER | changes)) == expected


def test_a_qasper_answer_of_no_kind_is_malformed() -> None:
    for blank in ([], [""], [" ", ""]):
        with pytest.raises(MalformedRowError, match="no spans, no text, no yes or no"):
            str(qasper.Answer.of(ANSWER | {"extractive_spans": blank}))


def test_qasper_puts_evidence_first_and_each_passage_once(monkeypatch: pytest.MonkeyPatch) -> None:
    two = [ANSWER | {"yes_no": True, "evidence": ["e two"]}, ANSWER | {"yes_no": False, "evidence": ["e two", "e one"]}]
    record = paper(two, [["p one", "e one"], ["e two", " "]])
    (row,) = qasper.WithEvidence.of(record).rows()
    assert row.references == ("Yes", "No") and row.id == "q1" and not row.cut
    assert "e two\n\ne one\n\nT\nA b.\n\np one\n\nQuestion: why ?" in row.prompt
    monkeypatch.setattr(qasper, "MAX_EVIDENCE_WORDS", 5)
    (row,) = qasper.WithEvidence.of(record).rows()
    assert row.cut and "e two e one T\n\nQuestion" in row.prompt


def test_qasper_hands_the_paper_over_and_not_what_annotators_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ANSWER | {"yes_no": True, "evidence": ["e two", "a table's caption"]}
    record = paper([found], [["p one", "e one"], ["e two", " "]])
    (row,) = qasper.Paper.of(record).rows()
    assert not row.cut and "T\nA b.\n\np one\n\ne one\n\ne two\n\nQuestion: why ?" in row.prompt
    monkeypatch.setattr(qasper, "MAX_CONTEXT_WORDS", 4)
    (row,) = qasper.Paper.of(record).rows()
    assert row.cut and "T A b. p\n\nQuestion" in row.prompt
    assert get_task("qasper").load is qasper.TASK.load
    assert get_task("qasper", context="evidence").load is qasper.CONTEXTS["evidence"]
    with pytest.raises(ValueError, match=r"context \(of math\)"):
        get_task("math", context="evidence")


def hotpot(words: int) -> dict[str, Any]:
    titles = ["one", "two", "three"]
    context = {"title": titles, "sentences": [[f"{title} " * words] for title in titles]}
    return {"id": "h", "question": "q", "answer": "yes", "supporting_facts": {"title": ["three"]}, "context": context}


def test_hotpotqa_leaves_out_what_does_not_support_the_answer_first(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = hotpotqa.Question.of(hotpot(3)).rows()
    assert not row.cut and "one: one one one\n\ntwo: two two two\n\nthree: three" in row.prompt
    monkeypatch.setattr(hotpotqa, "MAX_CONTEXT_WORDS", 8)
    (row,) = hotpotqa.Question.of(hotpot(3)).rows()
    assert row.cut and "one: one one one\n\nthree: three three three\n\nQuestion" in row.prompt
    for titles, sentences, counts in (
        (["a", "b"], [["x"]], "2 titles, 2 .* and 1"),
        (["a", "a"], [[], []], "2 titles, 1"),
    ):
        context = {"title": titles, "sentences": sentences}
        with pytest.raises(MalformedRowError, match=f"'context' has {counts}"):
            hotpotqa.Question.of(hotpot(3) | {"context": context}).rows()


def test_hotpotqa_has_the_yes_and_no_rule_and_qasper_has_not() -> None:
    said = "yes it is"
    assert hotpotqa.TASK.score(said, ("yes",)) == {"accuracy": 0, "em": 0, "f1": 0}
    assert qasper.TASK.score(said, ("Yes",))["f1"] == pytest.approx(0.5)
    assert hotpotqa.TASK.score("The Yes.", ("yes",)) == {"accuracy": 1, "em": 1, "f1": 1}


def test_math_is_trained_on_levels_3_to_5() -> None:
    record = {"problem": "p", "level": "Level 3", "solution": r"so \boxed{1} or \boxed{\frac{1}{2}}"}
    (row,) = math_task.TrainingProblem.of(record).rows()
    assert row.references == (r"1, \frac{1}{2}",) and row.prompt.endswith("\n\np") and r"\boxed{}" in row.prompt
    assert math_task.TrainingProblem.of(record | {"level": "Level 2"}).rows() == []
    with pytest.raises(MalformedRowError, match=r"'solution' has no closed \\boxed"):
        math_task.TrainingProblem.of(record | {"solution": "so 1"}).rows()


def test_a_split_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"no split 'validation' here: train \(.*\), test \(HuggingFaceH4/MATH-500"):
        math_task.TASK.load("validation", limit=1)


@pytest.mark.parametrize(
    ("text", "gold", "expected"),
    [
        (r"\boxed{42} #### 7", "42", 1),
        ("12 - 2 = 10\n#### 1,234.", "1234", 1),
        ("#### 3\n#### -4", "-4", 1),
        ("#### **$1,234.50**", "1234.50", 1),
        (r"#### \(18\)", "18", 1),
        ("####\n18\nfor 3 days", "18", 1),
        ("#### −5", "-5", 1),
        ("#### x = 5", "5", 1),
        ("#### 4 + 1 = 5", "5", 1),
        ("#### 72 clips", "72", 1),
        # the official evaluation takes the first number of each
        ("#### 12 - 3 = 9", "12", 0),
        ("#### 12-15", "12", 0),
        ("#### 5/2", "5", 0),
        ("#### 5 or 6", "5", 0),
        ("#### 2^3", "2", 0),
        ("#### 3:30", "3", 0),
        ("#### 1e2", "1", 0),
        ("####", "5", 0),
        ("it is 5", "5", 0),
    ],
)
def test_gsm8k_reads_the_box_or_the_line_after_the_hashes(text: str, gold: str, expected: int) -> None:
    assert gsm8k.TASK.score(gsm8k.extract(text), (gold,)) == {"accuracy": expected}


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("It is\n#### 1,234", "1234"), ("####-5 ", "-5"), ("#### 2.50", "2.50")]
    + [(f"#### {wrong}", None) for wrong in ("1/2", "1e3", "1 000", "5 or 6", "")]
    + [("5", None), ("#### 5\nso 6", None)],
)
def test_gsm8k_s_gold_answer_is_one_number_after_the_hashes(answer: str, gold: str | None) -> None:
    record = gsm8k.Problem.of({"question": "q", "answer": answer})
    if gold:
        assert record.rows()[0].references == (gold,)
    else:
        with pytest.raises(MalformedRowError, match="'answer' does not end in '####' and one number"):
            record.rows()


@pytest.mark.parametrize(
    ("answer", "gold"),
    [(27.0, "27"), (27, "27"), (0.5, "0.5"), (123456.789, "123456.789"), (999999.5, "999999.5"), (1e6, "1000000")],
)
def test_amc_s_gold_answer_keeps_its_digits(answer: float, gold: str) -> None:
    assert amc23.Problem.of({"problem": "p", "answer": answer}).rows()[0].references == (gold,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Answer: C", "C"),
        ("A or B?\nAnswer: (B). Because", "B"),
        (r"so \boxed{\text{D}}", "D"),
        (r"\boxed{\textbf{C}}", "C"),
        (r"\boxed{\mathrm{C}}", "C"),
        (r"\boxed{\text{(C)}}", "C"),
        ("**Answer: A**", "A"),
        ("**Answer**: B", "B"),
        ("ANSWER : B", "B"),
        ("B. True, False", "B"),
        ("Answer: Because", None),
        ("A's", None),
        ("", None),
        # the word before a letter, and small letters
        ("Answer: Option C", "C"),
        ("Answer: option (C)", "C"),
        ("Answer: Choice C", "C"),
        ("The answer is option D.", "D"),
        ("Option B is wrong", None),
        ("Answer: c", "C"),
        ("Answer: (c) as", "C"),
        (r"\boxed{c}", "C"),
        ("Answer: a function", None),
        ("a. True", None),
        # a dash
        ("C - text", "C"),
        ("C – text", "C"),
        ("A - B is the set", None),
        # an English "A", and letters of choices that are not chosen
        ("A function f is continuous.", None),
        ("A function f is continuous, so the answer is B.", "B"),
        ("A. is wrong, and the correct Answer is **(C)**", "C"),
        ("Answer: B. The answer is clear", "B"),
        ("the answer is not A", None),
        ("Answer: A and B are wrong, so C", None),
        (r"\boxed{A, B}", None),
        ("Answer: B because it is larger\nthan A", "B"),
        ("Answer: **C**. A proof follows", "C"),
        ("(A) as f is even", "A"),
        ("D\nA proof follows", "D"),
    ],
)
def test_mmlu_reads_one_letter(text: str, expected: str | None) -> None:
    assert mmlu_stem.extract(text) == expected


def test_mmlu_s_answer_is_the_place_of_a_choice() -> None:
    record = {"question": "q", "subject": "s", "choices": ["w", "x", "y", "z"], "answer": 2}
    (row,) = mmlu_stem.Question.of(record).rows()
    assert row.references == ("C",) and "C. y" in row.prompt
    for wrong in (
        {"answer": 4},
        {"answer": -1},
        {"answer": True},
        {"choices": list("vwxyz")},
        {"choices": list("xyz")},
    ):
        with pytest.raises(MalformedRowError, match=f"^field '{next(iter(wrong))}' is "):
            mmlu_stem.Question.of(record | wrong)


def test_minerva_allows_one_per_cent_of_a_number() -> None:
    assert minerva.TASK.score("4.06e3", ("4100",)) == {"accuracy": 1}
    assert minerva.TASK.score("4.05e3", ("4100",)) == {"accuracy": 0}


def problem(number: int, answer: str, error: Any = None) -> dict[str, Any]:
    return {"id": number, "context": None, "question": "q", "answer": answer, "error": error}


def test_olympiadbench_has_its_own_tolerance_and_wants_every_part() -> None:
    score: Callable[..., dict[str, float]] = olympiadbench.TASK.score
    (row,) = olympiadbench.Problem.of(problem(7, "4.2", "1e-1")).rows()
    assert row.references == ("4.2", "0.1") and score("4.25", row.references) == {"accuracy": 1}
    assert score("4.31", row.references) == score("4.25", ("4.2",)) == {"accuracy": 0}
    (row,) = olympiadbench.Problem.of(problem(8, r"$a=2$, $a=-6-4 \sqrt{2}$")).rows()
    assert score(r"a = -6-4\sqrt{2} \text{ or } a = 2", row.references) == {"accuracy": 1}
    assert score("a=2", row.references) == {"accuracy": 0}
    for none in (None, "", "0", 0.0):
        assert olympiadbench.Problem.of(problem(9, "1", none)).rows()[0].references == ("1",)
    for wrong in ("small", "inf", "1e400", "nan", "-1", -0.5, True, []):
        with pytest.raises(MalformedRowError, match="field 'error' is "):
            olympiadbench.Problem.of(problem(9, "1", wrong))


def test_olympiadbench_is_divided_by_the_hash_of_an_id() -> None:
    assert olympiadbench.SPLITS["whole"] == olympiadbench.SPLITS["test"]
    ids = [str(number) for number in range(3000)]
    assert 0.27 < sum(map(olympiadbench.of_test, ids)) / len(ids) < 0.33
    assert [id_ for id_ in ids[:12] if olympiadbench.of_test(id_)] == HASHED


HASHED = ["4", "8", "9", "10"]  # whose SHA-256 begins with less than 4ccc (sha256sum)

# Rows of each split of the files at hand, and how many contexts were cut.
REAL = {
    ("narrativeqa", "validation"): (100, 15),
    ("narrativeqa", "test"): (200, 0),
    ("qasper", "train"): (105, 78),
    ("qasper", "validation"): (55, 46),
    ("qasper", "test"): (80, 70),
    ("hotpotqa", "train"): (100, 13),
    ("hotpotqa", "test"): (100, 18),
    ("math", "train"): (300, 0),
    ("math", "test"): (500, 0),
    ("aime24", "test"): (30, 0),
    ("olympiadbench", "train"): (218, 0),
    ("olympiadbench", "test"): (82, 0),
    ("olympiadbench", "whole"): (300, 0),
    ("amc23", "test"): (40, 0),
    ("minerva", "test"): (172, 0),
    ("gsm8k", "train"): (150, 0),
    ("gsm8k", "test"): (150, 0),
    ("mmlu_stem", "test"): (300, 0),
}


WRONG = (
    None,
    True,
    0,
    -1,
    1.5,
    math.nan,
    math.inf,
    10**40,
    "",
    " ",
    "text",
    "#### 1/2",
    "a\ud83d",
    [],
    [None],
    [""],
    {},
)


def mutations(value: Any) -> Iterator[Any]:
    """Everything that a value becomes when it, or one thing within it, is replaced by each of WRONG or is not there."""
    yield from WRONG
    places = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, inside in places[:40] if isinstance(value, dict) else places[:2]:
        for changed in mutations(inside):
            whole = copy.copy(value)
            whole[key] = changed
            yield whole
        whole = copy.copy(value)
        del whole[key]
        yield whole
    if isinstance(value, list):
        yield value + value


@pytest.mark.data
@pytest.mark.skipif("GCPO_DATA_DIR" not in os.environ, reason="needs GCPO_DATA_DIR")
@pytest.mark.parametrize("name", [name for name in TASKS if sources(name)])
def test_a_row_with_anything_wrong_is_a_row_or_the_one_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = os.environ["GCPO_DATA_DIR"]
    monkeypatch.setenv("GCPO_DATA_DIR", str(tmp_path))
    for source in sources(name).values():
        if source.file(folder).exists():
            with source.file(folder).open() as lines:
                record = json.loads(next(lines))
            source.file(tmp_path).parent.mkdir(exist_ok=True)
            source.file(tmp_path).write_text("\n".join(map(json.dumps, [record, *mutations(record)])))
            loaded = reader({"only": replace(source, more=())})("only", limit=None, skip_malformed=True)
            assert loaded.source["skipped"] > len(WRONG)
            for row in loaded.rows:
                assert row.id.encode() and row.prompt.encode() and all(text.strip() for text in row.references)


def as_written(row: Row, reference: str) -> str:
    """A completion that gives this answer in the form that the prompt asks for."""
    return f"So \\boxed{{{reference}}}." if "boxed" in row.prompt else f"Answer: {reference}"


@pytest.mark.data
@pytest.mark.skipif("GCPO_DATA_DIR" not in os.environ, reason="needs GCPO_DATA_DIR")
@pytest.mark.parametrize(("name", "split"), REAL, ids=" ".join)
def test_gold_answers_of_real_rows_are_right_and_those_of_others_are_not(name: str, split: str) -> None:
    task = get_task(name)
    assert split in importlib.import_module(f"gcpo.tasks.{name}").SPLITS
    loaded = task.load(split, limit=None)
    rows = loaded.rows
    assert (len(rows), loaded.source["cut"], loaded.source["skipped"]) == (*REAL[name, split], 0)
    tolerance = name == "olympiadbench"  # its second reference is none
    wrong = [
        (row.id, reference)
        for row in rows
        for reference in (row.references[:1] if tolerance else row.references)
        if set(task.score(task.extract(as_written(row, reference)), row.references).values()) != {1.0}
    ]
    assert wrong == []
    shuffled = [as_written(row, other.references[0]) for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)]
    scores = [
        task.score(task.extract(text), row.references)["accuracy"] for text, row in zip(shuffled, rows, strict=True)
    ]
    chance = 0.25 if name == "mmlu_stem" else 0.0
    assert abs(sum(scores) / len(rows) - chance) <= 0.11
