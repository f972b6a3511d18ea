"""AIME 2024: thirty problems whose answers are integers (Hub: HuggingFaceH4/aime_2024; its one split is our test)."""

from gcpo.tasks.base import Row, math_row, math_task
from gcpo.tasks.reading import Source, Text, fields, reader


@fields
def rows(id: int, problem: Text, answer: Text) -> list[Row]:
    """Return the problem of a record."""
    return [math_row(str(id), problem, answer.strip())]


SPLITS = {"test": Source(rows, "aime24", "train", "HuggingFaceH4/aime_2024")}
TASK = math_task("aime24", reader(SPLITS))
