r"""Scores of an answer against its references, and the answer of a completion.

Every score takes the *extracted* answer (``None``: no answer was found) and returns a float in [0, 1], higher is
better. A missing answer scores 0. What the papers leave open, and what is chosen here:

- Token F1 and exact match normalise as HotpotQA's official evaluation does: lower case, then no ASCII punctuation,
  then no articles, then single spaces. Of several references the best counts.
- BLEU-1 is sentence level, on lower-cased text, without smoothing and with the standard brevity penalty; of several
  references the best counts. sacrebleu computes exactly this at maximal order 1, with a fixed tokeniser (13a) that
  needs no downloaded tables, hence no implementation of our own.
- Mathematics is graded by Math-Verify, gold first: its comparison is not symmetric.
"""

from __future__ import annotations

import functools
import logging
import re
import string
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

TIMEOUT_SECONDS = 5
"""How long Math-Verify may take to parse or compare one answer; a longer one counts as wrong."""

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED_ANSWERS = {"yes", "no", "noanswer"}

_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # a brace, or what a backslash escapes
_ANSWER_MARKER = re.compile("answer:", re.IGNORECASE)
_INTEGER = re.compile(r"[+-]?[0-9]{1,15}", re.ASCII)
_DELIMITED = re.compile(r"(?<!\\)\$|\\\(|\\\[")
_COMMAND = re.compile(r"\\[A-Za-z]+(\{[^{}]*\})?")
_PROSE = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}")


def _as_list(references: str | Sequence[str]) -> list[str]:
    listed = [references] if isinstance(references, str) else list(references)
    if not listed:
        raise ValueError("references is empty: an answer needs at least one reference to be scored against")
    return listed


def _normalise(text: str) -> str:
    """HotpotQA's normalisation. The order matters: "a." loses its stop first and then counts as an article."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _f1(prediction: str, reference: str, yes_no_rule: bool) -> float:
    prediction, reference = _normalise(prediction), _normalise(reference)
    if yes_no_rule and prediction != reference and _CLOSED_ANSWERS & {prediction, reference}:
        return 0.0
    predicted, expected = prediction.split(), reference.split()
    common = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * common / (len(predicted) + len(expected)) if common else 0.0


def token_f1(prediction: str | None, references: str | Sequence[str], *, yes_no_rule: bool = False) -> float:
    """Token F1, the harmonic mean of token precision and recall, of the best reference (GCPO Table 5).

    Tokens are counted with their multiplicity after HotpotQA's normalisation. No common token gives 0, also when both
    sides are empty. With ``yes_no_rule`` (HotpotQA's official evaluation; Qasper has none) a prediction or reference
    that reads yes, no or noanswer must be equal to the other side, else the score is 0.

    Returns a float in [0, 1]; ``None`` scores 0. Raises ``ValueError`` without references.
    """
    listed = _as_list(references)
    return 0.0 if prediction is None else max(_f1(prediction, reference, yes_no_rule) for reference in listed)


def exact_match(prediction: str | None, references: str | Sequence[str]) -> float:
    """1.0 if the prediction equals a reference after HotpotQA's normalisation, else 0.0 (``None``: 0.0).

    Raises ``ValueError`` without references.
    """
    listed = _as_list(references)
    return float(prediction is not None and _normalise(prediction) in {_normalise(reference) for reference in listed})


@functools.cache
def _bleu1() -> Any:
    from sacrebleu.metrics import BLEU  # an extra, of no use to who trains on mathematics

    return BLEU(lowercase=True, tokenize="13a", smooth_method="none", max_ngram_order=1, effective_order=True)


def bleu1(prediction: str | None, references: str | Sequence[str]) -> float:
    """Sentence-level BLEU-1 of the best reference, lower-cased, not smoothed (GCPO Table 1, column BLEU).

    Clipped unigram precision times the brevity penalty exp(1 - reference length / prediction length) of a prediction
    that is shorter than the reference. The paper does not say which BLEU it reports; its values beside its F1, on
    answers of a few words, fit BLEU-1.

    Returns a float in [0, 1]; ``None`` and the empty string score 0. Raises ``ValueError`` without references.
    """
    listed = _as_list(references)
    if prediction is None:
        return 0.0
    best = max(_bleu1().sentence_score(prediction, [reference]).score for reference in listed)
    return min(best / 100, 1.0)


def boxed_answer(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` with balanced braces, stripped; ``None`` without one or if it is empty.

    Escaped braces (``\{``) do not count. A box that the end of the text cuts off is passed over.
    """
    starts = {box.end() for box in _BOXED.finditer(text)}
    last, opened = (0, 0), []  # the content of the box that begins last, among those that are closed
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif brace[0] == "}" and opened and (start := opened.pop()) in starts and start > last[0]:
            last = start, brace.start()
    return text[slice(*last)].strip() or None


def final_answer(text: str) -> str | None:
    """The free-form answer of a completion: the first non-empty line after the last "Answer:" (in any case), or of
    the whole completion when it has no such marker; stripped; ``None`` when nothing is left."""
    lines = _ANSWER_MARKER.split(text)[-1].splitlines()
    return next((line.strip() for line in lines if line.strip()), None)


def _timeout() -> int | None:
    """Math-Verify's time-out is a signal, which only the main thread can receive; other threads run without one."""
    if threading.current_thread() is threading.main_thread():
        return TIMEOUT_SECONDS
    for module in ("parser", "grader"):
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)  # it warns that there is no time-out
    return None


def _answer_text(text: str) -> str:
    """The content of the last box, or the text itself when it has none."""
    if _BOXED.search(text):
        return boxed_answer(text) or ""
    return text.strip()


@functools.lru_cache(maxsize=20_000)
def _parse(answer: str) -> tuple[Any, ...]:
    """What Math-Verify reads in an answer: expressions, then the string it read them from; empty: nothing."""
    import math_verify  # an extra, slow to import

    prose = _PROSE.search(_COMMAND.sub("", answer))
    # A bare answer such as \frac{1}{2} or 2x+1 is only read as mathematics inside a box.
    delimited = answer if prose or _DELIMITED.search(answer) else f"\\boxed{{{answer.rstrip('. ')}}}"
    return tuple(math_verify.parse(delimited, parsing_timeout=_timeout()))


@functools.lru_cache(maxsize=100_000)
def _equal(gold: str, answer: str) -> bool:
    import math_verify

    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
        return int(gold) == int(answer)
    return math_verify.verify(list(_parse(gold)), list(_parse(answer)), timeout_seconds=_timeout())


def math_correct(prediction: str | None, gold: str) -> float:
    r"""1.0 if Math-Verify finds the prediction equal to the gold answer, else 0.0 (``None``: 0.0).

    Both may be a bare answer (``9``, ``\frac{1}{2}``), one in ``$...$``, or a text with a ``\boxed{...}``, of which the
    last counts. In prose without a box Math-Verify's own extraction decides, which ends at the last number; a task
    that wants boxed answers only passes ``boxed_answer(completion)``. Math-Verify compares numbers after rounding to
    6 decimals, and accepts both ``10`` and ``0.1`` for ``10\%``. Expressions it cannot read are compared as strings.

    An answer that takes longer than ``TIMEOUT_SECONDS`` counts as wrong. The time-out works in the main thread only;
    in other threads there is none.

    Raises ``ValueError`` if the gold answer cannot be parsed.
    """
    expected = _answer_text(gold)
    if not _parse(expected):
        raise ValueError(f"gold answer {gold!r} cannot be parsed by Math-Verify: repair the row or leave it out")
    return float(prediction is not None and _equal(expected, _answer_text(prediction)))


def same_answer(first: str, second: str) -> bool:
    """Whether two mathematical answers are the same: equal strings, or equal for Math-Verify with either as the gold
    answer. Symmetric, where Math-Verify's comparison is not."""
    first, second = _answer_text(first), _answer_text(second)
    return first == second or (_equal(first, second) and _equal(second, first))
