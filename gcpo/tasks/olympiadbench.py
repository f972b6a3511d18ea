"""OlympiadBench: the 675 competition problems in English that are text alone (Hub: knoveleng/OlympiadBench).

The Hub has one split, and none to train on; GCPO trains on it and does not say how it was divided. Here a problem
belongs to the test split by the hash of its id (:func:`of_test`), three in ten, for ever; a run's ``eval.csv`` has the
ids that it was tested on. An answer with several parts is right if all of them are there, in any order; where the
benchmark states an error it is an absolute tolerance.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from gcpo.tasks import math
from gcpo.tasks.base import MalformedRowError, Record, Row, Source, field, math_row, reader

TEST_SHARE = 0.3


def of_test(row_id: str) -> bool:
    """Return True for problems of the test split: the id's hash, read as a fraction, is below :data:`TEST_SHARE`."""
    return int.from_bytes(hashlib.sha256(row_id.encode()).digest()[:8]) / 2**64 < TEST_SHARE


def convert(record: Record) -> list[Row]:
    """Return the problem of a record, its answer, and the tolerance if it has one."""
    context = record.get("context") or ""
    problem = f"{context}\n\n{field(record, 'question', str)}" if context else field(record, "question", str)
    references = [field(record, "answer", str).strip()]
    if record.get("error"):
        try:
            references.append(str(float(record["error"])))
        except (TypeError, ValueError):
            raise MalformedRowError(f"field 'error' is {record['error']!r:.40}, not a number") from None
    return [math_row(str(field(record, "id", int)), problem, *references)]


SPLITS = {name: Source("olympiadbench", "train", "knoveleng/OlympiadBench") for name in ("train", "test")}
TASK = replace(
    math.TASK,
    name="olympiadbench",
    load=reader(SPLITS, convert, lambda split, row: of_test(row.id) == (split == "test")),
)
