r"""Scores of an answer against its references, and the answer of a completion.

Every score takes the *extracted* answer (``None``: no answer was found) and returns a float in [0, 1], higher is
better. A missing answer scores 0. What the papers leave open, and what is chosen here:

- Token F1 and exact match normalise as HotpotQA's official evaluation does: lower case, then no ASCII punctuation,
  then no articles, then single spaces. Of several references the best counts. Curly quotes are no ASCII: “Paris” is
  not Paris, as in the official evaluation, and references of Qasper have them too.
- BLEU-1 is sentence level, on lower-cased text, without smoothing and with the standard brevity penalty; of several
  references the best counts. sacrebleu computes exactly this at maximal order 1, with a fixed tokeniser (13a) that
  needs no downloaded tables, hence no implementation of our own.
- Mathematics is in ``gcpo.mathematics``: Math-Verify, gold first.
"""

import functools
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gcpo.mathematics import boxed_answer, math_correct, same_answer

__all__ = ["any_answer", "bleu1", "boxed_answer", "exact_match", "final_answer"]
__all__ += ["keeps_format", "math_correct", "same_answer", "token_f1"]

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED_ANSWERS = {"yes", "no", "noanswer"}

ANSWER_MARKER = re.compile(r"answer[ \t*]*:", re.IGNORECASE)
"""What says that an answer follows, as people and chat models write it: "ANSWER :", "**Answer**:"."""


def _as_list(references: str | Sequence[str]) -> list[str]:
    listed = [references] if isinstance(references, str) else list(references)
    if not listed:
        raise ValueError("references is empty: an answer needs at least one reference to be scored against")
    return listed


def normalise(text: str) -> str:
    """HotpotQA's normalisation. The order matters: "a." loses its stop first and then counts as an article."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _f1(prediction: str, reference: str, yes_no_rule: bool) -> float:
    prediction, reference = normalise(prediction), normalise(reference)
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
    return float(prediction is not None and normalise(prediction) in {normalise(reference) for reference in listed})


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


def final_answer(text: str) -> str | None:
    """The free-form answer of a completion: the first non-empty line after the last "Answer:" (in any case), or of
    the whole completion when it has no such marker; without the space and the asterisks around it (chat models write
    "**Answer:** Paris"); ``None`` when nothing is left."""
    lines = (line.strip().strip("*").strip() for line in ANSWER_MARKER.split(text)[-1].splitlines())
    return next(filter(None, lines), None)


def _tagged(text: str) -> str | None:
    """Return the content of the last ``<answer>...</answer>``; each part of the text is looked at once."""
    *closed, _ = text.split("</answer>")
    return next((part.partition("<answer>")[2] for part in reversed(closed) if "<answer>" in part), None)


def keeps_format(text: str, tags: str) -> bool:
    """Return True for a completion in the wanted tags (CW-GRPO, App. C: "properly matched <think> tags").

    Args:
        text: the completion.
        tags: "think": one ``</think>``, and one ``<think>`` at the beginning or none, as chat templates of reasoning
            models write that themselves; "think_answer": after it, one ``<answer>...</answer>`` and nothing else.
    """
    thinking, closed, rest = text.partition("</think>")
    others = thinking.strip().removeprefix("<think>") + rest
    proper = bool(closed) and "<think>" not in others and "</think>" not in others
    if tags == "think":
        return proper
    answer = rest.strip()
    once = answer.count("<answer>") == answer.count("</answer>") == 1
    return proper and once and answer.startswith("<answer>") and answer.endswith("</answer>")


def any_answer(text: str) -> str | None:
    r"""The answer of a completion in one of the usual formats; ``None`` when nothing is left.

    Of what follows the last ``</think>``: the last ``<answer>...</answer>``, else what :func:`final_answer` finds after
    "Answer:", else the last ``\boxed{...}``, else the line after the last "####", else all of it, stripped.
    """
    text = text.rpartition("</think>")[2]
    if (tagged := _tagged(text)) is not None:
        return tagged.strip() or None
    if ANSWER_MARKER.search(text):
        return final_answer(text)
    if boxed := boxed_answer(text):
        return boxed
    _, hashes, rest = text.rpartition("####")
    return (rest.strip().split("\n")[0] if hashes else rest).strip() or None
