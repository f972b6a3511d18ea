"""Minerva: problems of undergraduate science courses (Hub: knoveleng/Minerva-Math, whose only split is our test).

Answers are numbers given to two or three digits, or expressions. A number is right within 1 % of the gold one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gcpo.rewards import math_correct
from gcpo.tasks import math
from gcpo.tasks.base import Row, math_row
from gcpo.tasks.reading import Record, Source, Text, boxed_gold, reader, text_id

TOLERANCE = 0.01
"""Relative tolerance of a number, as two or three digits allow. The papers state none; ours."""


class Problem(Record):
    """A record of the Hub."""

    problem: Text
    solution: Text

    def rows(self) -> list[Row]:
        """Return its problem."""
        return [math_row(text_id(self.problem), self.problem, boxed_gold(self.solution))]


def score(prediction: str | None, references: Sequence[str]) -> dict[str, float]:
    """Accuracy within :data:`TOLERANCE` of the gold answer, the only reference."""
    (gold,) = references
    return {"accuracy": math_correct(prediction, gold, relative=TOLERANCE)}


SPLITS = {"test": Source(Problem, "minerva_math", "train", "knoveleng/Minerva-Math")}
TASK = replace(math.TASK, name="minerva", load=reader(SPLITS), score=score)
