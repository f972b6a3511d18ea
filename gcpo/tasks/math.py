"""MATH: training problems of levels 3 to 5 (Hub: DigitalLearningGmbH/MATH-lighteval), tested on MATH-500."""

from __future__ import annotations

from gcpo.rewards import boxed_answer
from gcpo.tasks.base import Row, Task, math_row, math_scores
from gcpo.tasks.reading import Record, Source, Text, boxed_gold, reader, text_id

LEVELS = ("Level 3", "Level 4", "Level 5")
"""Levels of the training problems, as in the papers' companions; MATH-500 has all levels."""


class TrainingProblem(Record):
    """A record of the training split."""

    problem: Text
    level: Text
    solution: Text

    def rows(self) -> list[Row]:
        """Return its problem, if it is of one of the :data:`LEVELS`."""
        if self.level not in LEVELS:
            return []
        return [math_row(text_id(self.problem), self.problem, boxed_gold(self.solution))]


class TestProblem(Record):
    """A record of MATH-500."""

    unique_id: Text
    problem: Text
    answer: Text

    def rows(self) -> list[Row]:
        """Return its problem."""
        return [math_row(self.unique_id, self.problem, self.answer.strip())]


SPLITS = {
    "train": Source(TrainingProblem, "math_train", "train", "DigitalLearningGmbH/MATH-lighteval"),
    "test": Source(TestProblem, "math500", "test", "HuggingFaceH4/MATH-500"),
}
TASK = Task(
    name="math",
    metrics=("accuracy",),
    load=reader(SPLITS),
    extract=boxed_answer,
    score=math_scores,
    reward_metric="accuracy",
    answer_length="solution",
    full_completion=True,
)
