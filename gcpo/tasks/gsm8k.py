"""GSM8K: school problems in several steps, with whole numbers as answers (Hub: openai/gsm8k, main).

The official evaluation takes the first number after "####", so that "#### 12 - 3 = 9" is right for 12. Here the whole
line is the answer, read as mathematics: it is 9. Where a line is one number, as in the benchmark itself, both agree.
"""

from __future__ import annotations

import re
from dataclasses import replace

from gcpo.rewards import boxed_answer
from gcpo.tasks import math
from gcpo.tasks.base import Row, math_row
from gcpo.tasks.reading import MalformedRowError, Record, Source, Text, reader, text_id

_GOLD = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*", re.ASCII)


def final_line(text: str) -> str | None:
    """Return the line after the last "####", or what follows its last "="; None without one."""
    _, hashes, rest = text.rpartition("####")
    line = next(iter(rest.strip().splitlines()), "").rpartition("=")[2]
    return line.strip().strip("*").strip() or None if hashes else None


def extract(completion: str) -> str | None:
    """Return the boxed answer, which the prompt asks for, or the line after "####"."""
    return boxed_answer(completion) or final_line(completion)


class Problem(Record):
    """A record of the Hub; the solution, called answer, ends in "#### 72"."""

    question: Text
    answer: Text

    def rows(self) -> list[Row]:
        """Return its problem."""
        gold = _GOLD.fullmatch("".join(self.answer.rpartition("####")[1:]))
        if not gold:
            raise MalformedRowError("field 'answer' does not end in '####' and one number")
        return [math_row(text_id(self.question), self.question, gold[1].replace(",", ""))]


SPLITS = {name: Source(Problem, "gsm8k", name, "openai/gsm8k", "main") for name in ("train", "test")}
TASK = replace(math.TASK, name="gsm8k", load=reader(SPLITS), extract=extract)
