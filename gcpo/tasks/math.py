"""MATH: training problems (Hub: DigitalLearningGmbH/MATH-lighteval), tested on MATH-500.

Papers read "MATH, levels 3 to 5" in two ways. ``train`` has those of the 7,500 training problems, some 5,600, and
``train_12k`` those of all 12,500 problems, of which a run with ``skip_malformed`` leaves out MATH-500: the 8,500 of
Dr. GRPO and SEED-GRPO. ``train_all`` has the 7,500 of all levels.
"""

from __future__ import annotations

from dataclasses import replace

from gcpo.rewards import boxed_answer
from gcpo.tasks.base import Row, Task, math_row, math_scores
from gcpo.tasks.reading import Record, Source, Text, boxed_gold, reader, text_id

LEVELS = ("Level 3", "Level 4", "Level 5")
"""Levels of the training problems, as in the papers' companions; MATH-500 has all levels."""


class Solved(Record):
    """A problem and its solution, with the answer in a box."""

    problem: Text
    solution: Text

    def rows(self) -> list[Row]:
        """Return its problem."""
        return [math_row(text_id(self.problem), self.problem, boxed_gold(self.solution))]


class TrainingProblem(Solved):
    """A record of the data set, of which only the harder ones count."""

    level: Text

    def rows(self) -> list[Row]:
        """Return its problem, if it is of one of the :data:`LEVELS`."""
        return super().rows() if self.level in LEVELS else []


class Answered(Record):
    """A problem and its answer."""

    problem: Text
    answer: Text
    row_id = property(lambda self: text_id(self.problem))

    def rows(self) -> list[Row]:
        """Return its problem."""
        return [math_row(self.row_id, self.problem, self.answer.strip())]


class TestProblem(Answered):
    """A record of MATH-500."""

    unique_id: Text
    row_id = property(lambda self: self.unique_id)


_TRAIN = Source(TrainingProblem, "math_train", "train", "DigitalLearningGmbH/MATH-lighteval")
SPLITS = {
    "train": _TRAIN,
    "train_all": replace(_TRAIN, record=Solved),
    "train_12k": replace(_TRAIN, more=(replace(_TRAIN, split="test"),)),
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
