"""MMLU's subjects of science and mathematics: four choices (Hub: TIGER-Lab/MMLU-STEM, test)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from gcpo.rewards import boxed_answer
from gcpo.tasks import math
from gcpo.tasks.base import MalformedRowError, Record, Row, Source, field, reader, text_id

LETTERS = "ABCD"
PROMPT = """Answer the question with the letter of one choice. Write it in the form "Answer: ...".

{question}

{choices}"""
_LETTER = re.compile(r"\W*(?:\\text\{)?\W*([A-D])(?![A-Za-z'])(.*)")
_ENDED = re.compile(r"[^\w\s]*[.):]|\W*$")  # what follows a letter that is no word of a sentence
_STANDING = re.compile(r"(?<![A-Za-z'])[A-D](?![A-Za-z'])")


def extract(completion: str) -> str | None:
    """Return the letter after the last "Answer:", or in the last box, or after the last "answer is", or that the
    completion begins with; None without one.

    It counts where a full stop, a bracket, a colon or the end of the line follows; after a marker and in a box
    also where no other choice's letter stands on its line. Neither "A function" nor "Answer: A and B are
    wrong" is one.
    """
    for text in (_after("answer:", completion), boxed_answer(completion), _after("answer is", completion), completion):
        if text and (found := _LETTER.match(text)):
            letter, rest = found.groups()
            if _ENDED.match(rest) or (text is not completion and not {*_STANDING.findall(rest)} - {letter}):
                return letter
    return None


def _after(marker: str, completion: str) -> str | None:
    """Return the text after the last marker, in capitals or not."""
    _, *rest = re.split(marker, completion, flags=re.IGNORECASE)
    return rest[-1] if rest else None


def score(prediction: str | None, references: Sequence[str]) -> dict[str, float]:
    """Return an accuracy of 1 for the correct letter."""
    return {"accuracy": float(prediction in references)}


def convert(record: Record) -> list[Row]:
    """Return the question of a record, whose answer is the place of the correct choice."""
    question, answer = field(record, "question", str).strip(), field(record, "answer", int)
    choices = [field(record, f"choices.{number}", str, empty=True) for number in range(len(LETTERS))]
    if not 0 <= answer < len(LETTERS):
        raise MalformedRowError(f"field 'answer' is {answer}, not the place of one of {len(LETTERS)} choices")
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True))
    row_id = text_id("\n".join([field(record, "subject", str), question, *choices]))
    return [Row(row_id, PROMPT.format(question=question, choices=listed), (LETTERS[answer],))]


SPLITS = {"test": Source("mmlu_stem", "test", "TIGER-Lab/MMLU-STEM")}
TASK = replace(
    math.TASK,
    name="mmlu_stem",
    load=reader(SPLITS, convert),
    extract=extract,
    score=score,
    answer_length="short",
    full_completion=False,
)
