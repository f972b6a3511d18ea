"""NarrativeQA: questions about books and films, answered from a summary (Hub: deepmind/narrativeqa).

The context is the summary, not the full story, which no small model can hold; GCPO does not say which it used. Every
question has two references. Splits are the Hub's: train, validation and test.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from gcpo.tasks.base import Record, Row, Split, Task, field, qa_answer, qa_scores, read_rows

MAX_CONTEXT_WORDS = 1000
"""Words of the summary that a prompt keeps, from its beginning. Most summaries have 400 to 900; a longer one is cut,
which can cost the passage that has the answer."""

CHARACTERS_PER_WORD = 10
"""A text of few and endless words is cut to as many characters per word allowed. English has about 6, space included,
so that no ordinary summary is cut by it."""

PROMPT = """Read the summary and answer the question in a few words. Write the answer in the form "Answer: ...".

Summary: {summary}

Question: {question}"""


def _convert(max_context_words: int) -> Callable[[Record], list[Row]]:
    def convert(record: Record) -> list[Row]:
        summary = field(record, "document.summary.text", str).strip()
        question = field(record, "question.text", str).strip()
        answers = range(len(field(record, "answers", list)))
        references = tuple(field(record, f"answers.{number}.text", str).strip() for number in answers)
        words = summary.split()
        if len(words) > max_context_words:
            summary = " ".join(words[:max_context_words])
        summary = summary[: CHARACTERS_PER_WORD * max_context_words]
        # The data set numbers documents, not questions.
        row_id = f"{field(record, 'document.id', str)}:{hashlib.sha256(question.encode()).hexdigest()[:12]}"
        return [Row(row_id, PROMPT.format(summary=summary, question=question), references)]

    return convert


def load(
    split: str,
    *,
    limit: int | None,
    seed: int = 0,
    revision: str | None = None,
    skip_malformed: bool = False,
    max_context_words: int = MAX_CONTEXT_WORDS,
) -> Split:
    """Rows of a split; see ``gcpo.tasks.base.read_rows`` for their order and for errors."""
    return read_rows(
        "narrativeqa",
        split,
        _convert(max_context_words),
        hub=("deepmind/narrativeqa", None),
        limit=limit,
        seed=seed,
        revision=revision,
        skip_malformed=skip_malformed,
    )


TASK = Task(
    name="narrativeqa",
    metrics=("accuracy", "bleu1", "f1"),
    load=load,
    extract=qa_answer,
    score=qa_scores,
    reward_metric="f1",
)
