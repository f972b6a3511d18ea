"""OlympiadBench: the 675 competition problems in English that are text alone (Hub: knoveleng/OlympiadBench).

The Hub has one split, and none to train on; GCPO trains on it and does not say how it was divided. Here a problem
belongs to the test split by the hash of its id (:func:`of_test`), three in ten, for ever; a run's ``eval.csv`` has the
ids that it was tested on. The split ``whole`` has all 675: SEED-GRPO and CW-GRPO, which train on
other problems, test on them. An answer with several parts is right if all of them are there, in any order; where the
benchmark states an error it is an absolute tolerance.
"""

import hashlib
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, FiniteFloat

from gcpo.tasks.base import Row, math_row, math_task
from gcpo.tasks.reading import Anything, Rows, Source, Text, fields, reader

TEST_SHARE = 0.3


def of_test(row_id: str) -> bool:
    """Return True for problems of the test split: the id's hash, read as a fraction, is below :data:`TEST_SHARE`."""
    return int.from_bytes(hashlib.sha256(row_id.encode()).digest()[:8]) / 2**64 < TEST_SHARE


def _number(error: Any) -> Any:
    return (float(error) if error else None) if isinstance(error, str) else error


Error = Annotated[FiniteFloat | None, Field(ge=0), BeforeValidator(_number)]  # text in the data, such as 1e-1


@fields
def rows(id: int, question: Text, answer: Text, context: Anything | None = None, error: Error = None) -> list[Row]:
    """Return the problem of a record, the answer, and the tolerance if it has one."""
    problem = f"{context}\n\n{question}" if context else question
    return [math_row(str(id), problem, answer.strip(), *([str(error)] if error else []))]


def part(test: bool) -> Rows:
    """Return the function that makes the problem of a record if it belongs to the test split, or if it does not."""
    return lambda record: [row for row in rows(record) if of_test(row.id) == test]


_WHOLE = Source(rows, "olympiadbench", "train", "knoveleng/OlympiadBench")
SPLITS = {"train": replace(_WHOLE, rows=part(False)), "test": replace(_WHOLE, rows=part(True)), "whole": _WHOLE}
TASK = math_task("olympiadbench", reader(SPLITS))
