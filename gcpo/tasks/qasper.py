"""Qasper: questions about papers in natural language processing (Hub: allenai/qasper).

The context is the evidence that annotators marked, then the abstract, then the paper, as far as the budget goes: a
whole paper is longer than a small model reads. GCPO does not say what it used. References are the official evaluator's
answer strings, one per annotator: Unanswerable, spans joined by ", ", the free text, Yes or No. Splits are the
Hub's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from gcpo.tasks import narrativeqa
from gcpo.tasks.base import Row, made_of, words
from gcpo.tasks.reading import CONVERTED, Anything, Fields, MalformedRowError, Record, Source, Text, reader

MAX_CONTEXT_WORDS = 1000
"""Words of evidence, abstract and paper that a prompt keeps, from the beginning; most papers have 3000 to 6000."""

PROMPT = """Read the excerpts of a paper and answer the question in a few words. Answer "Unanswerable" if they do not
say, and "Yes" or "No" if that is asked. Write the answer in the form "Answer: ...".

{context}

Question: {question}"""


class Answer(Fields):
    """The answer of one annotator."""

    unanswerable: bool
    extractive_spans: list[Anything]
    free_form_answer: Anything
    yes_no: bool | None
    evidence: list[Anything]

    def __str__(self) -> str:
        """Return the one-line reference of Qasper's official evaluation, by the rules in the module's docstring."""
        if self.unanswerable:
            return "Unanswerable"
        for text in (", ".join(self.extractive_spans), self.free_form_answer):
            if text.strip(", \n"):
                return " ".join(text.split())
        if self.yes_no is None:
            raise MalformedRowError("an answer has no spans, no text, no yes or no, and is not unanswerable")
        return "Yes" if self.yes_no else "No"


class Annotations(Fields):
    """The answers to one question."""

    answer: Annotated[list[Answer], Field(min_length=1)]


class Questions(Fields):
    """The questions about a paper: their texts, ids and answers in the same order."""

    question: Annotated[list[Text], Field(min_length=1)]
    question_id: list[Text]
    answers: list[Annotations]


class Sections(Fields):
    """The paragraphs of each section."""

    paragraphs: list[list[Anything]]


class Paper(Record):
    """A record of the Hub."""

    title: Text
    abstract: Anything
    full_text: Sections
    qas: Questions

    def rows(self) -> list[Row]:
        """Return its questions."""
        paper = [f"{self.title.strip()}\n{self.abstract.strip()}"]
        paper += [paragraph for section in self.full_text.paragraphs for paragraph in section if paragraph.strip()]
        texts, ids, answers = self.qas.question, self.qas.question_id, self.qas.answers
        if not len(texts) == len(ids) == len(answers):
            counts = f"{len(texts)} questions, {len(ids)} ids and {len(answers)} answers"
            raise MalformedRowError(f"field 'qas' has {counts}")
        return [_row(paper, *question) for question in zip(texts, ids, answers, strict=True)]


def _row(paper: list[str], question: str, row_id: str, annotated: Annotations) -> Row:
    # Of all annotators, each passage once, in their order.
    evidence = dict.fromkeys(passage for answer in annotated.answer for passage in answer.evidence)
    context, cut = words("\n\n".join([*evidence, *(text for text in paper if text not in evidence)]), MAX_CONTEXT_WORDS)
    references = [*map(str, annotated.answer)]
    return made_of(PROMPT, row_id, references, cut=cut, context=context, question=question.strip())


SPLITS = {
    name: Source(Paper, "qasper", name, "allenai/qasper", revision=CONVERTED)
    for name in ("train", "validation", "test")
}
TASK = replace(narrativeqa.TASK, name="qasper", load=reader(SPLITS))
