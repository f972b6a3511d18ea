"""NarrativeQA: questions about books and films, answered from a summary (Hub: deepmind/narrativeqa).

The context is the summary, not the full story, which no small model can hold; GCPO does not say which it used. Every
question has two references. Splits are the Hub's: train, validation and test.
"""

from __future__ import annotations

from gcpo.rewards import final_answer
from gcpo.tasks.base import Record, Row, Source, Task, field, qa_scores, reader, text_id, words

MAX_CONTEXT_WORDS = 1000
"""Words of the summary that a prompt keeps, from its beginning. Most summaries have 400 to 900; a longer one is cut,
which can cost the passage that has the answer."""

PROMPT = """Read the summary and answer the question in a few words. Write the answer in the form "Answer: ...".

Summary: {summary}

Question: {question}"""


def convert(record: Record) -> list[Row]:
    """Return the question of a record."""
    summary, cut = words(field(record, "document.summary.text", str).strip(), MAX_CONTEXT_WORDS)
    question = field(record, "question.text", str).strip()
    answers = range(len(field(record, "answers", list)))
    references = tuple(field(record, f"answers.{number}.text", str).strip() for number in answers)
    # The data set numbers documents, not questions.
    row_id = f"{field(record, 'document.id', str)}:{text_id(question)}"
    return [Row(row_id, PROMPT.format(summary=summary, question=question), references, cut)]


STORIES = ("document.text",)  # 11 GB of them in train
SPLITS = {
    name: Source("narrativeqa", name, "deepmind/narrativeqa", unread=STORIES)
    for name in ("train", "validation", "test")
}
TASK = Task(
    name="narrativeqa",
    metrics=("accuracy", "bleu1", "f1"),
    load=reader(SPLITS, convert),
    extract=final_answer,
    score=qa_scores,
    reward_metric="f1",
    answer_length="short",
)
