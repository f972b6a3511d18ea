"""AMC 2023: the forty problems of AMC 12 with numbers as answers (Hub: knoveleng/AMC-23, whose only split is our test).

Papers also use a set of 83; these are the 40 of Qwen's evaluation.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import FiniteFloat

from gcpo.tasks import math
from gcpo.tasks.base import Row, math_row
from gcpo.tasks.reading import Record, Source, Text, reader, text_id


class Problem(Record):
    """A record of the Hub, whose answer is a float: 27.0."""

    problem: Text
    answer: FiniteFloat

    def rows(self) -> list[Row]:
        """Return its problem."""
        return [math_row(text_id(self.problem), self.problem, repr(self.answer).removesuffix(".0"))]


SPLITS = {"test": Source(Problem, "amc23", "train", "knoveleng/AMC-23")}
TASK = replace(math.TASK, name="amc23", load=reader(SPLITS))
