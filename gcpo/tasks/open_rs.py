"""Open-RS: 7,000 problems that CW-GRPO trains on (Hub: knoveleng/open-rs), tested on MATH-500."""

from __future__ import annotations

from dataclasses import replace

from gcpo.tasks import math
from gcpo.tasks.base import Row, math_row
from gcpo.tasks.reading import Record, Source, Text, reader, text_id


class Problem(Record):
    """A record of the Hub. It has a solution too, not always with a box, and a level, "Easy" or "Hard"."""

    problem: Text
    answer: Text

    def rows(self) -> list[Row]:
        """Return its problem."""
        return [math_row(text_id(self.problem), self.problem, self.answer.strip())]


SPLITS = {"train": Source(Problem, "open_rs", "train", "knoveleng/open-rs"), "test": math.SPLITS["test"]}
TASK = replace(math.TASK, name="open_rs", load=reader(SPLITS))
