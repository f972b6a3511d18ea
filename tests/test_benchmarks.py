"""The benchmarks of the papers: how a record becomes a question, what counts as right, and real rows of each."""

import copy
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.record import Run
from gcpo.runs.train import _questions
from gcpo.tasks import (
    TASKS,
    amc23,
    get_task,
    gsm8k,
    hotpotqa,
    minerva,
    mmlu_stem,
    olympiadbench,
    openr1,
    qasper,
    sources,
)
from gcpo.tasks import math as math_task
from gcpo.tasks.base import Row, check_disjoint
from gcpo.tasks.reading import MalformedRowError, reader

# --- questions about texts ------------------------------------------------------------------------------------------

ANSWER = {"unanswerable": False, "extractive_spans": [], "free_form_answer": "", "yes_no": None, "evidence": []}
READ = {context: qasper.rows_of(context == "evidence") for context in ("text", "evidence")}


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
        *(({"extractive_spans": blank}, None) for blank in ([], [""], [" ", ""])),
    ],
)
def test_qasper_compares_with_the_official_answer_strings(changes: dict[str, Any], expected: str | None) -> None:
    record = paper([ANSWER | changes], [["p"]])
    if expected:
        assert READ["text"](record)[0].references == (expected,)
    else:
        with pytest.raises(MalformedRowError, match="no spans, no text, no yes or no"):
            READ["text"](record)


def test_qasper_puts_evidence_first_and_each_passage_once_or_hands_over_the_paper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = [ANSWER | {"yes_no": True, "evidence": ["e two"]}, ANSWER | {"yes_no": False, "evidence": ["e two", "e one"]}]
    record = paper(two, [["p one", "e one"], ["e two", " "]])
    ((plain,), (marked,)) = (read(record) for read in READ.values())
    assert marked.references == plain.references == ("Yes", "No") and marked.id == "q1" and not marked.cut
    assert "e two\n\ne one\n\nT\nA b.\n\np one\n\nQuestion: why ?" in marked.prompt
    assert "T\nA b.\n\np one\n\ne one\n\ne two\n\nQuestion: why ?" in plain.prompt and not plain.cut
    monkeypatch.setattr(qasper, "MAX_EVIDENCE_WORDS", 5)
    monkeypatch.setattr(qasper, "MAX_CONTEXT_WORDS", 4)
    ((plain,), (marked,)) = (read(record) for read in READ.values())
    assert marked.cut and "e two e one T\n\nQuestion" in marked.prompt
    assert plain.cut and "T A b. p\n\nQuestion" in plain.prompt
    assert get_task("qasper").load is qasper.TASK.load
    assert get_task("qasper", context="evidence").load is qasper.CONTEXTS["evidence"]


def hotpot(words: int, titles: Any = ("one", "two", "three")) -> dict[str, Any]:
    context = {"title": [*titles], "sentences": [[f"{title} " * words] for title in ("one", "two", "three")]}
    return {"id": "h", "question": "q", "answer": "yes", "supporting_facts": {"title": ["three"]}, "context": context}


def test_hotpotqa_leaves_out_what_does_not_support_the_answer_first(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = hotpotqa.rows_of(supporting=False)(hotpot(3))
    assert not row.cut and "one: one one one\n\ntwo: two two two\n\nthree: three" in row.prompt
    monkeypatch.setattr(hotpotqa, "MAX_CONTEXT_WORDS", 8)
    (row,) = hotpotqa.rows_of(supporting=False)(hotpot(3))
    assert row.cut and "one: one one one\n\nthree: three three three\n\nQuestion" in row.prompt
    for titles, counts in (("ab", "2 titles, 2 .* and 3"), ("aab", "3 titles, 2")):
        with pytest.raises(MalformedRowError, match=f"'context' has {counts}"):
            hotpotqa.rows_of(supporting=False)(hotpot(3, titles))


def test_hotpotqa_has_the_yes_and_no_rule_and_qasper_has_not() -> None:
    said = "yes it is"
    assert hotpotqa.TASK.score(said, ("yes",)) == {"accuracy": 0, "em": 0, "f1": 0}
    assert qasper.TASK.score(said, ("Yes",))["f1"] == pytest.approx(0.5)
    assert hotpotqa.TASK.score("The Yes.", ("yes",)) == {"accuracy": 1, "em": 1, "f1": 1}


# --- mathematics ----------------------------------------------------------------------------------------------------


RIGHT = {r"\boxed{42} #### 7": "42", "12 - 2 = 10\n#### 1,234.": "1234", "#### 3\n#### -4": "-4", "#### −5": "-5"}
RIGHT |= {"#### **$1,234.50**": "1234.50", r"#### \(18\)": "18", "####\n18\nfor 3 days": "18", "#### 72 clips": "72"}
RIGHT |= {"#### x = 5": "5", "#### 4 + 1 = 5": "5"}
# Of most of these the official evaluation takes the first number.
WRONG_TEXTS = {"#### 12 - 3 = 9": "12", "#### 12-15": "12", "#### 5/2": "5", "#### 5 or 6": "5", "#### 2^3": "2"}
WRONG_TEXTS |= {"#### 3:30": "3", "#### 1e2": "1", "####": "5", "it is 5": "5"}


def test_gsm8k_reads_the_box_or_the_line_after_the_hashes() -> None:
    for cases, expected in ((RIGHT, 1), (WRONG_TEXTS, 0)):
        found = {text: gsm8k.TASK.score(gsm8k.extract(text), (gold,))["accuracy"] for text, gold in cases.items()}
        assert found == dict.fromkeys(cases, expected)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("It is\n#### 1,234", "1234"), ("####-5 ", "-5"), ("#### 2.50", "2.50")]
    + [(f"#### {wrong}", None) for wrong in ("1/2", "1e3", "1 000", "5 or 6", "")]
    + [("5", None), ("#### 5\nso 6", None)],
)
def test_gsm8k_s_gold_answer_is_one_number_after_the_hashes(answer: str, gold: str | None) -> None:
    record = {"question": "q", "answer": answer}
    if gold:
        assert gsm8k.rows(record)[0].references == (gold,)
    else:
        with pytest.raises(MalformedRowError, match="'answer' does not end in '####' and one number"):
            gsm8k.rows(record)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [(27.0, "27"), (27, "27"), (0.5, "0.5"), (123456.789, "123456.789"), (999999.5, "999999.5"), (1e6, "1000000")],
)
def test_amc_s_gold_answer_keeps_its_digits(answer: float, gold: str) -> None:
    assert amc23.rows({"problem": "p", "answer": answer})[0].references == (gold,)


READ_AS: list[tuple[str | None, list[str]]] = [
    ("A", ["**Answer: A**", "(A) as f is even"]),
    ("B", ["A or B?\nAnswer: (B). Because", "**Answer**: B", "ANSWER : B", "B. True, False"]),
    ("B", ["A function f is continuous, so the answer is B.", "Answer: B because it is larger\nthan A"]),
    ("C", ["Answer: C", r"\boxed{\textbf{C}}", r"\boxed{\mathrm{C}}", r"\boxed{\text{(C)}}", "C - text", "C – text"]),
    ("C", ["Answer: Option C", "Answer: option (C)", "Answer: Choice C", "Answer: c", "Answer: (c) as", r"\boxed{c}"]),
    ("C", ["A. is wrong, and the correct Answer is **(C)**", "Answer: **C**. A proof follows"]),
    ("D", [r"so \boxed{\text{D}}", "The answer is option D.", "D\nA proof follows"]),
    (None, ["Answer: Because", "A's", "", "Answer: a function", "a. True", "A function f is continuous."]),  # words
    (None, ["Option B is wrong", "A - B is the set", "the answer is not A", r"\boxed{A, B}"]),  # others' letters
    (None, ["Answer: A and B are wrong, so C"]),
]


@pytest.mark.parametrize(("letter", "texts"), READ_AS)
def test_mmlu_reads_one_letter(letter: str | None, texts: list[str]) -> None:
    assert [text for text in texts if mmlu_stem.extract(text) != letter] == []


def test_mmlu_s_answer_is_the_place_of_a_choice() -> None:
    record = {"question": "q", "subject": "s", "choices": ["w", "x", "y", "z"], "answer": 2}
    (row,) = mmlu_stem.rows(record)
    assert row.references == ("C",) and "C. y" in row.prompt
    answers, choices = (4, -1, True), (list("vwxyz"), list("xyz"))
    for wrong in (*({"answer": one} for one in answers), *({"choices": one} for one in choices)):
        with pytest.raises(MalformedRowError, match=f"^field '{next(iter(wrong))}' is "):
            mmlu_stem.rows(record | wrong)


def test_minerva_allows_one_per_cent_of_a_number() -> None:
    assert minerva.TASK.score("4.06e3", ("4100",)) == {"accuracy": 1}
    assert minerva.TASK.score("4.05e3", ("4100",)) == {"accuracy": 0}


def problem(number: int, answer: str, error: Any = None) -> dict[str, Any]:
    return {"id": number, "context": None, "question": "q", "answer": answer, "error": error}


def test_olympiadbench_has_its_own_tolerance_and_wants_every_part() -> None:
    score: Callable[..., dict[str, float]] = olympiadbench.TASK.score
    (row,) = olympiadbench.rows(problem(7, "4.2", "1e-1"))
    assert row.references == ("4.2", "0.1") and score("4.25", row.references) == {"accuracy": 1}
    assert score("4.31", row.references) == score("4.25", ("4.2",)) == {"accuracy": 0}
    (row,) = olympiadbench.rows(problem(8, r"$a=2$, $a=-6-4 \sqrt{2}$"))
    assert score(r"a = -6-4\sqrt{2} \text{ or } a = 2", row.references) == {"accuracy": 1}
    assert score("a=2", row.references) == {"accuracy": 0}
    for none in (None, "", "0", 0.0):
        assert olympiadbench.rows(problem(9, "1", none))[0].references == ("1",)
    for wrong in ("small", "inf", "1e400", "nan", "-1", -0.5, True, []):
        with pytest.raises(MalformedRowError, match="field 'error' is "):
            olympiadbench.rows(problem(9, "1", wrong))


def test_olympiadbench_is_divided_by_the_hash_of_an_id() -> None:
    ids = [str(number) for number in range(3000)]
    assert 0.27 < sum(map(olympiadbench.of_test, ids)) / len(ids) < 0.33
    assert [id_ for id_ in ids[:12] if olympiadbench.of_test(id_)] == HASHED


HASHED = ["4", "8", "9", "10"]  # whose SHA-256 begins with less than 4ccc (sha256sum)


# --- training sets --------------------------------------------------------------------------------------------------

Write = Callable[..., Path]
WORDS = "one two three four five six seven eight nine ten".split()


def solved(number: int, level: int = 3) -> dict[str, Any]:
    return {"problem": f"Problem {number}?", "level": f"Level {level}", "solution": rf"So \boxed{{{number}}}."}


def test_math_is_read_in_three_ways_and_what_is_tested_on_is_left_out(write: Write, tmp_path: Path) -> None:
    write(*(solved(number, level=number) for number in (1, 2, 3, 4, 5)), file="math_train/train")
    write(*(solved(number, level=number - 5) for number in (6, 7, 8, 9, 10)), file="math_train/test")
    write(*({"unique_id": str(n), "problem": f"Problem {n}?", "answer": str(n)} for n in (8, 10)), file="math500/test")
    splits = ("train", "train_all", "train_12k")
    loaded = {split: math_task.TASK.load(split, limit=None) for split in splits}
    golds = {split: sorted(int(row.references[0]) for row in rows.rows) for split, rows in loaded.items()}
    assert golds == {"train": [3, 4, 5], "train_all": [1, 2, 3, 4, 5], "train_12k": [3, 4, 5, 8, 9, 10]}
    with pytest.raises(ValueError, match=r"2 of 6 questions .* skip_malformed: true"):
        check_disjoint({"train": loaded["train_12k"], "eval": math_task.TASK.load("test", limit=None)}, skip=False)
    values = {"task": "math", "train_split": "train_12k", "validation_limit": 0, "policy": "scratch"}
    trained_on, held_out, _ = _questions(
        Plan("train", validate({**values, "skip_malformed": True})), run := Run(tmp_path / "run", {})
    )
    assert {row.references[0] for row in trained_on} == {"3", "4", "5", "9"} and len(held_out) == 2
    source = run.manifest["data"]["train"]
    files = [one["file"] for one in (source, *source["more"])]
    assert source["skipped"] == 2 and files == ["math_train/train.jsonl", "math_train/test.jsonl"]


def test_a_solution_has_its_answer_in_its_boxes() -> None:
    (row,) = math_task.solved({"problem": "p", "solution": r"so \boxed{1} or \boxed{\frac{1}{2}}"})
    assert row.references == (r"1, \frac{1}{2}",) and row.prompt.endswith("\n\np") and r"\boxed{}" in row.prompt
    with pytest.raises(MalformedRowError, match=r"'solution' has no closed \\boxed"):
        math_task.solved({"problem": "p", "solution": "so 1"})


def test_open_rs_is_tested_on_math_500(write: Write) -> None:
    write({**solved(7), "solution": "So it is seven.", "answer": " 7 ", "level": "Hard"}, file="open_rs/train")
    write({"unique_id": "a", "problem": "1 + 1?", "answer": "2"}, file="math500/test")
    (row,), (asked,) = (get_task("open_rs").load(split, limit=None).rows for split in ("train", "test"))
    assert row.parts == {"problem": "Problem 7?"} and row.references == ("7",) and asked.id == "a"


def generated(number: int, right: list[bool | None] | None, answer: str = "7", text: str = "") -> dict[str, Any]:
    # No two have a word in common but those of a longer text.
    problem = text or " ".join(f"{word}{number}" for word in WORDS)
    return {"uuid": f"u{number}", "problem": problem, "answer": answer, "correctness_math_verify": right}


MIXED, CORRECT = [True, False], [True, True, True]
BUCKETS: dict[str | None, list[dict[str, Any]]] = {
    "mixed": [
        generated(1, MIXED),
        generated(1, [True, None]),
        *(generated(1, MIXED, answer) for answer in (r"\frac{1}{2}", "1,000")),
    ],
    "correct": [generated(1, CORRECT)],
    None: [
        *(generated(1, right) for right in ([False, False], [True], None)),
        *(generated(1, MIXED, answer) for answer in (" ", "1, 2", r"1 \text{ or } 2", r"\pm 3")),
        generated(1, MIXED, text="a" * 4097),
    ],
}


@pytest.mark.parametrize("bucket", BUCKETS)
def test_a_problem_of_openr1_belongs_to_a_bucket_or_is_left_out(bucket: str | None) -> None:
    for record in BUCKETS[bucket]:
        ids = [row.id for row in openr1.rows_of("default")(record)]
        assert ids == ([f"default-{bucket}-u1"] if bucket else []), record


def test_the_pool_has_the_papers_shares_and_the_validation_split_128_of_10000(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openr1, "POOL", 20)
    monkeypatch.setattr(openr1, "VALIDATION", 5)
    write(*(generated(number, [True, number % 2 == 0]) for number in range(40)), file="openr1/train")
    write(*(generated(number, [True, number % 2 == 0]) for number in range(40, 50)), file="openr1_extended/train")
    task = get_task("openr1")
    train, validation = (task.load(split, limit=None).rows for split in ("train", "validation"))
    counts = Counter(row.id.rpartition("-")[0] for row in (*train, *validation))
    # 20 x 0.85 x 0.6 = 10.2, x 0.4 = 6.8; 20 x 0.15 x 0.6 = 1.8, x 0.4 = 1.2
    assert counts == {"default-mixed": 10, "default-correct": 7, "extended-mixed": 2, "extended-correct": 1}
    assert len(validation) == 5 and not {row.id for row in train} & {row.id for row in validation}
    other = task.load("train", limit=None, seed=3).rows
    assert {row.id for row in other} == {row.id for row in train} and other != train
    assert task.load("train", limit=4, seed=3).rows == other[:4]


def test_of_openr1_a_problem_that_could_be_chosen_makes_room_for_the_next(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openr1, "POOL", 20)  # of which 10 are mixed ones of the default
    monkeypatch.setattr(openr1, "VALIDATION", 0)
    write(*(generated(n, [True, False], r"\text{}" if n % 2 else "7") for n in range(20)), file="openr1/train")
    write(generated(99, [True, False]), file="openr1_extended/train")
    load = get_task("openr1").load
    with pytest.raises(MalformedRowError, match=r"openr1/train\.jsonl, line \d+, id 'default-mixed-u"):
        load("train", limit=None)
    rows = load("train", limit=None, skip_malformed=True).rows
    assert {int(row.id.rpartition("u")[2]) for row in rows} == {*range(0, 20, 2), 99}


def test_a_near_duplicate_is_left_out_and_too_few_problems_are_no_validation_split(write: Write) -> None:
    text = " ".join(f"word{number}" for number in range(40))
    texts = [text, text.replace("word7", "other").upper(), text.replace("word", "term")]
    write(*(generated(number, [True, False], text=text) for number, text in enumerate(texts)), file="openr1/train")
    write(generated(9, [True, False], text="another one"), file="openr1_extended/train")
    kept = [row.parts["problem"] for row in get_task("openr1").load("train", limit=None).rows]
    assert len(kept) == 3 and texts[2] in kept and "another one" in kept
    with pytest.raises(ValueError, match=r"openr1/validation is empty: the 3 problems"):
        get_task("openr1").load("validation", limit=8)


# --- real rows ------------------------------------------------------------------------------------------------------

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
    ("amc23", "test"): (40, 0),
    ("minerva", "test"): (172, 0),
    ("gsm8k", "train"): (150, 0),
    ("gsm8k", "test"): (150, 0),
    ("mmlu_stem", "test"): (300, 0),
}


WRONG = (None, True, 0, -1, 1.5, math.nan, math.inf, 10**40)
WRONG += ("", " ", "text", "#### 1/2", "a\ud83d", [], [None], [""], {})


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
