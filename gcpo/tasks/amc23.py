"""AMC 2023: the forty problems of AMC 12 with numbers as answers (Hub: knoveleng/AMC-23, whose only split is our test).

Papers also use a set of 83; these are the 40 of Qwen's evaluation.
"""

from pydantic import FiniteFloat

from gcpo.tasks.base import Row, math_row, math_task
from gcpo.tasks.reading import Source, Text, fields, reader, text_id


@fields
def rows(problem: Text, answer: FiniteFloat) -> list[Row]:
    """Return the problem of a record, whose answer is a float: 27.0."""
    return [math_row(text_id(problem), problem, repr(answer).removesuffix(".0"))]


SPLITS = {"test": Source(rows, "amc23", "train", "knoveleng/AMC-23")}
TASK = math_task("amc23", reader(SPLITS))
