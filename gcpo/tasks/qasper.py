"""Qasper: questions about papers in natural language processing (Hub: allenai/qasper).

The context is the paper from its beginning, as far as :data:`MAX_CONTEXT_WORDS` go. ``context: evidence`` puts what
annotators marked as the place of the answer before it, at :data:`MAX_EVIDENCE_WORDS`: shorter, and part of the task is
done; ``context: supporting`` likewise at :data:`gcpo.tasks.base.MAX_SUPPORTING_WORDS`, without questions
whose marked passages are longer. GCPO does not say what it used. References are the official evaluator's
answer strings, one per annotator: Unanswerable, spans joined by ", ", the free text, Yes or No. Splits are the
Hub's.
"""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from gcpo.tasks import narrativeqa
from gcpo.tasks.base import MAX_SUPPORTING_WORDS, Row, made_of, text_task, words
from gcpo.tasks.reading import CONVERTED, Anything, Fields, MalformedRowError, Rows, Source, Text, fields, reader

MAX_CONTEXT_WORDS = 2400
"""Words of the paper that a prompt keeps, some 3,300 tokens of Qwen2.5, which fit a GPU of 24 GB with a step of
answers; most papers have 3,000 to 6,000."""

MAX_EVIDENCE_WORDS = 1000
"""Words of evidence and paper that a prompt keeps with ``context: evidence``."""

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


def rows_of(evidence: bool = False, whole: bool = False) -> Rows:
    """Return the function that makes the questions of a record; with ``evidence`` its marked passages go first, and
    those of a question are ``whole``, and little else, or it is left out."""

    @fields
    def rows(title: Text, abstract: Anything, full_text: Sections, qas: Questions, id: Text = "") -> list[Row]:
        most = MAX_SUPPORTING_WORDS if whole else MAX_EVIDENCE_WORDS if evidence else MAX_CONTEXT_WORDS
        paper = [f"{title.strip()}\n{abstract.strip()}"]
        paper += [paragraph for section in full_text.paragraphs for paragraph in section if paragraph.strip()]
        if not len(qas.question) == len(qas.question_id) == len(qas.answers):
            counts = f"{len(qas.question)} questions, {len(qas.question_id)} ids and {len(qas.answers)} answers"
            raise MalformedRowError(f"field 'qas' has {counts}")
        made = []
        for question, row_id, annotated in zip(qas.question, qas.question_id, qas.answers, strict=True):
            # Of all annotators, each passage once, in their order.
            marked = dict.fromkeys(text for answer in annotated.answer for text in answer.evidence if evidence)
            text = "\n\n".join([*marked, *(text for text in paper if text not in marked)])
            context, cut = words(text, most)
            references = [*map(str, annotated.answer)]
            parts: dict[str, Any] = {"document": id, "context": context, "question": question.strip()}
            if not (whole and words(" ".join(marked), most)[1]):
                made.append(made_of(PROMPT, row_id, references, cut=cut, **parts))
        return made

    return rows


_SOURCE = Source(rows_of(), "qasper", "", "allenai/qasper", revision=CONVERTED)
SPLITS = {name: replace(_SOURCE, split=name) for name in narrativeqa.SPLITS}
CONTEXTS = {
    "evidence": reader(SPLITS, rows=rows_of(evidence=True)),
    "supporting": reader(SPLITS, rows=rows_of(evidence=True, whole=True)),
}
TASK = text_task("qasper", reader(SPLITS))
