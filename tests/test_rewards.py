"""Scores of answers: hand-computed values, and formulas written down a second time."""

import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcpo import mathematics
from gcpo.grader import GraderProcess
from gcpo.rewards import any_answer, bleu1, boxed_answer, exact_match, final_answer, math_correct, same_answer, token_f1
from gcpo.runs.profiles import read_yaml
from gcpo.tasks import gsm8k, mmlu_stem

ANSWERS = read_yaml(Path(__file__).with_name("golden") / "answers.yaml")
WORDS = st.lists(st.sampled_from(["cat", "dog", "map", "toy", "red"]), max_size=6)
SOME_WORDS = WORDS.filter(bool)


def overlap(first: list[str], second: list[str]) -> int:
    """Tokens in common, with multiplicity, by striking them out one by one."""
    rest, common = list(second), 0
    for word in first:
        if word in rest:
            rest.remove(word)
            common += 1
    return common


# --- token F1, exact match and BLEU-1 ---------------------------------------------------------------------------------

BY_HAND = {
    token_f1: [
        ("a black cat", "black cat", 1.0),
        ("the black cat sat", "a black dog", 0.4),  # 1 common token; precision 1/3, recall 1/2
        ("ha ha ha", "ha ha", 0.8),  # 2 common tokens; precision 2/3, recall 1
        ("The  U.S.A.!", "usa", 1.0),
        ("theatre", "atre", 0.0),  # "the" is an article only as a word of its own
        ("", "cat", 0.0),
        ("the", "a", 0.0),  # nothing left on either side
    ],
    exact_match: [
        ("The Cat!", "a cat", 1.0),
        ("the cat sat", "cat", 0.0),
        ("a. cat", "cat", 1.0),  # articles go after punctuation
        ("a-cat", "cat", 0.0),  # the hyphen goes first, and "acat" has no article
    ],
    bleu1: [
        ("the cat sat", "The Cat sat", 1.0),  # lower-cased
        ("the cat", "the cat sat", math.exp(1 - 3 / 2)),  # brevity penalty
        ("the the the cat", "the cat", 2 / 4),  # counts are clipped, a longer prediction has no penalty
        ("cat.", "cat", 1 / 2),  # punctuation is a token
        ("dog", "cat", 0.0),  # no smoothing
        ("", "cat", 0.0),
    ],
}


@pytest.mark.parametrize("score", BY_HAND)
def test_scores_by_hand(score: Callable[..., float]) -> None:
    for prediction, reference, expected in BY_HAND[score]:
        found = score(prediction, reference), score(prediction, [reference])
        assert found == pytest.approx((expected, expected), abs=1e-12), (prediction, reference)
    assert score(None, ["cat"]) == 0.0
    with pytest.raises(ValueError, match="references is empty"):
        score("cat", [])


@given(SOME_WORDS, SOME_WORDS)
def test_f1_is_the_mean_of_precision_and_recall_and_bleu1_precision_with_a_penalty(
    prediction: list[str], reference: list[str]
) -> None:
    common = overlap(prediction, reference)
    precision, recall = common / len(prediction), common / len(reference)
    expected = 2 * precision * recall / (precision + recall) if common else 0.0
    assert token_f1(" ".join(prediction), " ".join(reference)) == pytest.approx(expected)
    penalty = min(1.0, math.exp(1 - len(reference) / len(prediction)))
    assert bleu1(" ".join(prediction), " ".join(reference)) == pytest.approx(precision * penalty, abs=1e-9)


@given(WORDS, st.lists(SOME_WORDS, min_size=1, max_size=4))
def test_every_score_is_the_maximum_over_references(prediction: list[str], references: list[list[str]]) -> None:
    answer, listed = " ".join(prediction), [" ".join(reference) for reference in references]
    for score in BY_HAND:
        assert score(answer, listed) == max(score(answer, reference) for reference in listed)


@pytest.mark.parametrize(
    ("prediction", "reference", "plain", "ruled"),
    [
        ("cat", "no cat", 2 / 3, 2 / 3),  # "no" is not the whole reference
        ("no", "no cat", 2 / 3, 0.0),
        ("noanswer", "no answer", 0.0, 0.0),
    ],
)
def test_hotpotqa_yes_no_rule(prediction: str, reference: str, plain: float, ruled: float) -> None:
    assert token_f1(prediction, reference) == pytest.approx(plain)
    assert token_f1(prediction, reference, yes_no_rule=True) == pytest.approx(ruled)


# --- extraction -----------------------------------------------------------------------------------------------------


READ = {"boxed": boxed_answer, "final": final_answer, "any": any_answer}


@pytest.mark.parametrize("kind", READ)
def test_the_answer_in_a_text(kind: str) -> None:
    assert {text: READ[kind](text) for text in ANSWERS[kind]} == ANSWERS[kind]


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "a", " "]), max_size=9).map("".join))
def test_the_last_tagged_answer_is_the_one_that_a_pattern_finds(text: str) -> None:
    found = re.findall("<answer>(.*?)</answer>", text)
    assert any_answer(text) == ((found[-1] if found else text).strip() or None)


@pytest.mark.parametrize(
    "repeated", ["<answer>", "</answer>", "answer ", "\\boxed{", "\\boxed{1} ", "#### ", "((", "\\text{", "{", "}"]
)
@pytest.mark.parametrize("extract", [any_answer, final_answer, boxed_answer, gsm8k.extract, mmlu_stem.extract])
def test_every_extraction_ends_whatever_a_policy_repeats(extract: Callable[[str], str | None], repeated: str) -> None:
    few, many = repeated * 3, repeated * 200_000
    # The answer found in a few, or the whole text where that is the answer. A time that grows with the square of the
    # length would be half an hour.
    assert extract(many) == (many.strip() if extract(few) == few.strip() else extract(few))


# --- mathematics ----------------------------------------------------------------------------------------------------


GRADED = [(kind, verdict) for verdict in ("accepted", "rejected") for kind in ANSWERS[verdict]]


@pytest.mark.parametrize(("kind", "verdict"), GRADED)
def test_answers_are_graded_as_a_careful_person_would(kind: str, verdict: str) -> None:
    expected = float(verdict == "accepted")
    assert [pair for pair in ANSWERS[verdict][kind] if math_correct(*pair) != expected] == []


@pytest.mark.parametrize("bare", ANSWERS["scaled"])
def test_a_number_with_words_on_a_scale_is_their_product_and_not_the_bare_number(bare: str) -> None:
    for written, meant in ANSWERS["scaled"][bare].items():
        assert math_correct(written, meant) == math_correct(meant, written) == 1.0, written
        assert math_correct(written, bare) == math_correct(bare, written) == 0.0, written
        assert math_correct(gsm8k.extract(f"#### {written}"), meant) == 1.0, written


@pytest.mark.parametrize("unit", ANSWERS["units"])
def test_a_unit_is_none(unit: str) -> None:
    assert math_correct(f"12{unit}", "12") == math_correct("12", f"12{unit}") == 1.0


@pytest.mark.parametrize("repeated", ["(", "~", r"\,", r"\text{", " ", "{"])
def test_an_answer_is_read_at_once_whatever_it_repeats(repeated: str) -> None:
    begins = time.process_time()
    mathematics.read((repeated * 2000)[:2000])
    assert time.process_time() - begins < 0.2  # it was a second where each place was tried from each before it


def test_math_correct_passes_the_gold_answer_first() -> None:
    # Math-Verify takes an interval for an inequality, but not an inequality for an interval.
    assert math_correct("(1,2)", "1<x<2") == 1.0
    assert math_correct("1<x<2", "(1,2)") == 0.0


@pytest.mark.parametrize("gold", [r"\boxed{}", "no number here", r"nothing \boxed{1", r"\text{}", "$$"])
def test_an_unreadable_gold_answer_is_an_error_that_names_it(gold: str) -> None:
    for prediction in ("9", None):
        with pytest.raises(ValueError, match=f"gold answer {re.escape(repr(gold))} cannot be parsed"):
            math_correct(prediction, gold)
    with pytest.raises(ValueError, match=r"gold answer '1{99}' has 2001 characters"):
        math_correct("1", "1" * 2001)


ENDLESS = {
    "a tower of powers": r"\boxed{9^{9^{9^9}}}",
    "brackets": "(" * 900 + ")" * 900,
    "a polynomial": "(x+y+z+w)^{60}",
    "ten thousand characters": "1+" * 5000 + "1",
    "factorials": "9!!!!",
}


@pytest.mark.parametrize("answer", ENDLESS.values(), ids=ENDLESS)
def test_an_answer_that_takes_too_long_is_wrong_in_a_thread_too(answer: str, caplog: pytest.LogCaptureFixture) -> None:
    found: list[float] = []
    asked = [(answer, "x^2+1"), (r"\frac{2}{4}", "1/2")]  # the next is graded as ever
    thread = threading.Thread(target=lambda: found.extend(math_correct(*pair) for pair in asked))
    thread.start()
    thread.join(timeout=60)
    assert found == [0.0, 1.0] and not caplog.records


def test_a_tolerance_is_absolute_or_relative() -> None:
    assert math_correct("4.1", "4.2") == math_correct("105", "100", relative=0.01) == 0.0
    assert math_correct("4.1", "4.2", absolute=0.1000001) == math_correct(r"\frac{201}{2}", "100", relative=0.01) == 1.0
    assert math_correct("(4.1, 7)", "(4.2, 7)", absolute=0.11) == 1.0
    assert math_correct("4.2, 9", "4.2", absolute=0.1) == 0.0


def test_same_answer_is_symmetric() -> None:
    pairs = [("0.5", r"\frac12", True), ("x=5", "5", True), ("(1,2)", "1<x<2", False), ("???", "???", True)]
    for first, second, expected in pairs:
        assert same_answer(first, second) is expected
        assert same_answer(second, first) is expected


# --- the process that grades ----------------------------------------------------------------------------------------


@pytest.fixture
def grader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GraderProcess]:
    code = """
import os, time
from gcpo import grader
print("an import that talks")
def serve():
    grader.serve({"same": lambda said: said, "late": lambda said: time.sleep(0.5) or said, "pid": os.getpid})
"""
    (tmp_path / "grader.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("gcpo.grader.SERVE", "from grader import serve; serve()")
    made = GraderProcess()
    yield made
    made.close()


def test_an_interrupted_question_leaves_no_answer_for_the_next(grader: GraderProcess) -> None:
    def interrupt(*_: Any) -> None:
        raise InterruptedError

    assert grader.ask("same", 1) == 1
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(InterruptedError):
            grader.ask("late", 2)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [grader.ask("same", said) for said in (3, 4)] == [3, 4]


def test_a_grader_that_is_killed_between_questions_shifts_no_answer(grader: GraderProcess) -> None:
    os.kill(grader.ask("pid"), signal.SIGKILL)
    time.sleep(0.3)
    assert [grader.ask("same", said) for said in (1, 2)] == [1, 2]


def test_a_grader_that_cannot_start_is_no_grade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text('raise ModuleNotFoundError("No module named math_verify")')
    with monkeypatch.context() as without:
        without.syspath_prepend(str(tmp_path))
        without.setattr(mathematics, "_ask", GraderProcess().ask)
        for grade in (math_correct, same_answer):
            with pytest.raises(RuntimeError, match=r'No module named math_verify\..*pip install "gcpo\[trl\]"'):
                grade("0.53125", r"\frac{17}{32}")
    assert same_answer("0.53125", r"\frac{17}{32}")  # nothing of it was kept
