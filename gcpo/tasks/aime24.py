"""AIME 2024: thirty problems whose answers are integers (Hub: HuggingFaceH4/aime_2024; its one split is our test)."""

from __future__ import annotations

from dataclasses import replace

from gcpo.tasks import math
from gcpo.tasks.base import Record, Row, Source, field, math_row, reader


def convert(record: Record) -> list[Row]:
    """Return the problem of a record."""
    return [
        math_row(str(field(record, "id", int)), field(record, "problem", str), field(record, "answer", str).strip())
    ]


SPLITS = {"test": Source("aime24", "train", "HuggingFaceH4/aime_2024")}
TASK = replace(math.TASK, name="aime24", load=reader(SPLITS, convert))
