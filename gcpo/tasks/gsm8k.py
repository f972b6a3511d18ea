"""GSM8K: school problems in several steps, with whole numbers as answers (Hub: openai/gsm8k, main)."""

from __future__ import annotations

import re
from dataclasses import replace

from gcpo.rewards import boxed_answer
from gcpo.tasks import math
from gcpo.tasks.base import MalformedRowError, Record, Row, Source, field, math_row, reader, text_id

_GOLD = re.compile(r"####[\s$€£*\\(]*(-?[\d.,]*\d)")  # with what models write around it; the benchmark has none of that


def final_number(text: str) -> str | None:
    """Return the number after the last "####", commas removed, as the official evaluation has it; None without one."""
    found = _GOLD.findall(text)
    return found[-1].replace(",", "") if found else None


def extract(completion: str) -> str | None:
    """Return the boxed answer, which the prompt asks for, or the number after "####"."""
    return boxed_answer(completion) or final_number(completion)


def convert(record: Record) -> list[Row]:
    """Return the problem of a record."""
    problem, gold = field(record, "question", str), final_number(field(record, "answer", str))
    if not gold:
        raise MalformedRowError("field 'answer' has no number after '####'")
    return [math_row(text_id(problem), problem, gold)]


SPLITS = {name: Source("gsm8k", name, "openai/gsm8k", "main") for name in ("train", "test")}
TASK = replace(math.TASK, name="gsm8k", load=reader(SPLITS, convert), extract=extract)
