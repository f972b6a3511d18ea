"""MATH: training problems (Hub: DigitalLearningGmbH/MATH-lighteval), tested on MATH-500.

Papers read "MATH, levels 3 to 5" in two ways. ``train`` has those of the 7,500 training problems, some 5,600, and
``train_12k`` those of all 12,500 problems, of which a run with ``skip_malformed`` leaves out MATH-500: the 8,500 of
Dr. GRPO and SEED-GRPO. ``train_all`` has the 7,500 of all levels.
"""

from dataclasses import replace

from gcpo.tasks.base import Row, math_row, math_task
from gcpo.tasks.reading import Source, Text, boxed_gold, fields, reader, text_id

LEVELS = ("Level 3", "Level 4", "Level 5")
"""Levels of the training problems, as in the papers' companions; MATH-500 has all levels."""


@fields
def solved(problem: Text, solution: Text) -> list[Row]:
    """Return the problem of a record that has its solution, with the answer in a box."""
    return [math_row(text_id(problem), problem, boxed_gold(solution))]


@fields
def hard(level: Text, problem: Text, solution: Text) -> list[Row]:
    """Return the problem of a record that has its solution, if it is of one of the :data:`LEVELS`."""
    return [math_row(text_id(problem), problem, boxed_gold(solution))] if level in LEVELS else []


@fields
def answered(problem: Text, answer: Text) -> list[Row]:
    """Return the problem of a record that has its answer."""
    return [math_row(text_id(problem), problem, answer.strip())]


@fields
def of_math500(unique_id: Text, problem: Text, answer: Text) -> list[Row]:
    """Return the problem of a record of MATH-500."""
    return [math_row(unique_id, problem, answer.strip())]


_TRAIN = Source(hard, "math_train", "train", "DigitalLearningGmbH/MATH-lighteval")
SPLITS = {
    "train": _TRAIN,
    "train_all": replace(_TRAIN, rows=solved),
    "train_12k": replace(_TRAIN, more=(replace(_TRAIN, split="test"),)),
    "test": Source(of_math500, "math500", "test", "HuggingFaceH4/MATH-500"),
}
TASK = math_task("math", reader(SPLITS))
