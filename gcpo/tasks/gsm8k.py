"""GSM8K: school problems in several steps, with whole numbers as answers (Hub: openai/gsm8k, main).

The official evaluation takes the first number after "####", so that "#### 12 - 3 = 9" is right for 12. Here the whole
line is the answer, read as mathematics: it is 9. Where a line is one number, as in the benchmark itself, both agree.
"""

import re

from gcpo.rewards import boxed_answer
from gcpo.tasks.base import Row, math_row, math_task
from gcpo.tasks.reading import MalformedRowError, Source, Text, fields, reader, text_id

_GOLD = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*", re.ASCII)


def final_line(text: str) -> str | None:
    """Return the line after the last "####", or what follows its last "="; None without one."""
    _, hashes, rest = text.rpartition("####")
    line = next(iter(rest.strip().splitlines()), "").rpartition("=")[2]
    return line.strip().strip("*").strip() or None if hashes else None


def extract(completion: str) -> str | None:
    """Return the boxed answer, which the prompt asks for, or the line after "####"."""
    return boxed_answer(completion) or final_line(completion)


@fields
def rows(question: Text, answer: Text) -> list[Row]:
    """Return the problem of a record, whose solution, called answer, ends in "#### 72"."""
    gold = _GOLD.fullmatch("".join(answer.rpartition("####")[1:]))
    if not gold:
        raise MalformedRowError(f"field 'answer' does not end in '####' and one number: {answer[-99:]!r}")
    return [math_row(text_id(question), question, gold[1].replace(",", ""))]


SPLITS = {name: Source(rows, "gsm8k", name, "openai/gsm8k", "main") for name in ("train", "test")}
TASK = math_task("gsm8k", reader(SPLITS), extract=extract)
