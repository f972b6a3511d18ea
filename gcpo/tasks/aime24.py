"""AIME 2024: thirty problems whose answers are integers (Hub: HuggingFaceH4/aime_2024; its one split is our test)."""

from __future__ import annotations

from dataclasses import replace

from gcpo.tasks import math
from gcpo.tasks.reading import Source, reader


class Problem(math.Answered):
    """A record of the Hub."""

    id: int
    row_id = property(lambda self: str(self.id))


SPLITS = {"test": Source(Problem, "aime24", "train", "HuggingFaceH4/aime_2024")}
TASK = replace(math.TASK, name="aime24", load=reader(SPLITS))
