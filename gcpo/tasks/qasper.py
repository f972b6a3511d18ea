"""Qasper: questions about papers in natural language processing (Hub: allenai/qasper).

The context is the evidence that annotators marked, then the abstract, then the paper, as far as the budget goes: a
whole paper is longer than a small model reads. GCPO does not say what it used. References are the official evaluator's
answer strings, one per annotator: Unanswerable, spans joined by ", ", the free text, Yes or No. Splits are the
Hub's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gcpo.tasks import narrativeqa
from gcpo.tasks.base import MalformedRowError, Record, Row, Source, field, reader, words

MAX_CONTEXT_WORDS = 1000
"""Words of evidence, abstract and paper that a prompt keeps, from the beginning; most papers have 3000 to 6000."""

PROMPT = """Read the excerpts of a paper and answer the question in a few words. Answer "Unanswerable" if they do not
say, and "Yes" or "No" if that is asked. Write the answer in the form "Answer: ...".

{context}

Question: {question}"""


def answer_string(answer: Record) -> str:
    """Return the one-line reference of Qasper's official evaluation, by the rules in the module's docstring.

    Raises:
        MalformedRowError: an answer that is none of the four kinds.
    """
    if field(answer, "unanswerable", bool):
        return "Unanswerable"
    if spans := field(answer, "extractive_spans", list, empty=True):
        return " ".join(", ".join(map(str, spans)).split())
    if text := field(answer, "free_form_answer", str, empty=True).split():
        return " ".join(text)
    if isinstance(answer.get("yes_no"), bool):
        return "Yes" if answer["yes_no"] else "No"
    raise MalformedRowError("an answer has no spans, no text, no yes or no, and is not unanswerable")


def convert(record: Record) -> list[Row]:
    """Return all questions of a paper."""
    paper = [f"{field(record, 'title', str).strip()}\n{field(record, 'abstract', str, empty=True).strip()}"]
    for section in field(record, "full_text.paragraphs", list, empty=True):
        paper += [paragraph for paragraph in section if paragraph.strip()]
    questions = field(record, "qas.question", list)
    return [_row(record, number, paper) for number in range(len(questions))]


def _row(record: Record, number: int, paper: list[str]) -> Row:
    annotated = field(record, f"qas.answers.{number}.answer", list)
    evidence: dict[Any, None] = {}  # of all annotators, each passage once, in their order
    for answer in annotated:
        evidence |= dict.fromkeys(answer.get("evidence") or ())
    whole = "\n\n".join([*map(str, evidence), *(text for text in paper if text not in evidence)])
    context, cut = words(whole, MAX_CONTEXT_WORDS)
    prompt = PROMPT.format(context=context, question=field(record, f"qas.question.{number}", str).strip())
    return Row(field(record, f"qas.question_id.{number}", str), prompt, tuple(map(answer_string, annotated)), cut)


SPLITS = {name: Source("qasper", name, "allenai/qasper") for name in ("train", "validation", "test")}
TASK = replace(narrativeqa.TASK, name="qasper", load=reader(SPLITS, convert))
