"""Minerva: problems of undergraduate science courses (Hub: knoveleng/Minerva-Math, whose only split is our test).

Answers are numbers given to two or three digits, or expressions. A number is right within 1 % of the gold one.
"""

from collections.abc import Sequence

from gcpo.rewards import math_correct
from gcpo.tasks import math
from gcpo.tasks.base import math_task
from gcpo.tasks.reading import Source, reader

TOLERANCE = 0.01
"""Relative tolerance of a number, as two or three digits allow. The papers state none; ours."""


def score(prediction: str | None, references: Sequence[str]) -> dict[str, float]:
    """Accuracy within :data:`TOLERANCE` of the gold answer, the only reference."""
    (gold,) = references
    return {"accuracy": math_correct(prediction, gold, relative=TOLERANCE)}


SPLITS = {"test": Source(math.solved, "minerva_math", "train", "knoveleng/Minerva-Math")}
TASK = math_task("minerva", reader(SPLITS), score=score)
