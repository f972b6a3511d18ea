"""AMC 2023: the forty problems of AMC 12 with numbers as answers (Hub: knoveleng/AMC-23, whose only split is our test).

Papers also use a set of 83; these are the 40 of Qwen's evaluation.
"""

from __future__ import annotations

from dataclasses import replace

from gcpo.tasks import math
from gcpo.tasks.base import Record, Row, Source, field, math_row, reader, text_id


def convert(record: Record) -> list[Row]:
    """Return the problem of a record, whose answer is a float: 27.0."""
    problem, answer = field(record, "problem", str), field(record, "answer", float)
    return [math_row(text_id(problem), problem, f"{answer:g}" if answer < 1e6 else f"{answer:.0f}")]


SPLITS = {"test": Source("amc23", "train", "knoveleng/AMC-23")}
TASK = replace(math.TASK, name="amc23", load=reader(SPLITS, convert))
