"""MATH: training problems of levels 3 to 5 (Hub: DigitalLearningGmbH/MATH-lighteval), tested on MATH-500."""

from __future__ import annotations

from gcpo.rewards import boxed_answer
from gcpo.tasks.base import Record, Row, Source, Task, field, gold_answer, math_row, math_scores, reader, text_id

LEVELS = ("Level 3", "Level 4", "Level 5")
"""Levels of the training problems, as in the papers' companions; MATH-500 has all levels."""


def convert(record: Record) -> list[Row]:
    """Return the problem of a record: of MATH-500, which has an id and an answer, or of the training split."""
    problem = field(record, "problem", str)
    if "unique_id" in record:
        return [math_row(field(record, "unique_id", str), problem, field(record, "answer", str).strip())]
    if field(record, "level", str) not in LEVELS:
        return []
    return [math_row(text_id(problem), problem, gold_answer(record, "solution"))]


SPLITS = {
    "train": Source("math_train", "train", "DigitalLearningGmbH/MATH-lighteval"),
    "test": Source("math500", "test", "HuggingFaceH4/MATH-500"),
}
TASK = Task(
    name="math",
    metrics=("accuracy",),
    load=reader(SPLITS, convert),
    extract=boxed_answer,
    score=math_scores,
    reward_metric="accuracy",
    answer_length="solution",
    full_completion=True,
)
