"""AIME 2024: thirty problems whose answers are integers (Hub: HuggingFaceH4/aime_2024; its one split is our test)."""

from __future__ import annotations

from dataclasses import replace

from gcpo.tasks import math
from gcpo.tasks.base import Row, math_row
from gcpo.tasks.reading import Record, Source, Text, reader


class Problem(Record):
    """A record of the Hub."""

    id: int
    problem: Text
    answer: Text

    def rows(self) -> list[Row]:
        """Return its problem."""
        return [math_row(str(self.id), self.problem, self.answer.strip())]


SPLITS = {"test": Source(Problem, "aime24", "train", "HuggingFaceH4/aime_2024")}
TASK = replace(math.TASK, name="aime24", load=reader(SPLITS))
