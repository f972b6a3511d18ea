"""MMLU's subjects of science and mathematics: four choices (Hub: TIGER-Lab/MMLU-STEM, test)."""

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from gcpo.rewards import ANSWER_MARKER, boxed_answer
from gcpo.tasks.base import Row, made_of, text_task
from gcpo.tasks.reading import Anything, Source, Text, fields, reader, text_id

LETTERS = "ABCD"
PROMPT = """Answer the question with the letter of one choice. Write it in the form "Answer: ...".

{question}

{choices}"""
_LETTER = re.compile(
    r"(?:\\(?:text|textbf|mathrm|mathbf)\{|\W)*+(?:(?i:option|choice)\b\W*+)?([A-Da-d])(?![A-Za-z'])(.*)"
)
_ENDED = re.compile(r"[^\w\s]*[.):]|\W*$")  # what follows a letter that is no word of a sentence
_DASH = re.compile(r"\s*[-–—]\s")
_ANSWER_IS = re.compile("answer is", re.IGNORECASE)
_STANDING = re.compile(r"(?<![A-Za-z'])[A-D](?![A-Za-z'])")


def extract(completion: str) -> str | None:
    """Return the letter after the last "Answer:", or in the last box, or after the last "answer is", or that the
    completion begins with; None without one.

    It counts where a full stop, a bracket, a colon or the end of the line follows; a capital after a marker or in a
    box, or before a dash, also where no other choice's letter stands on its line. Neither "A function" nor "Answer: A
    and B are wrong" is one, nor a small letter that the completion begins with.
    """
    marked = (_after(ANSWER_MARKER, completion), boxed_answer(completion), _after(_ANSWER_IS, completion))
    for text in (*marked, completion):
        if text and (found := _LETTER.match(text)):
            letter, rest = found.groups()
            capital, begins = letter.isupper(), text is completion
            alone = capital and not {*_STANDING.findall(rest)} - {letter}
            if (_ENDED.match(rest) and (capital or not begins)) or (alone and (_DASH.match(rest) or not begins)):
                return letter.upper()
    return None


def _after(marker: re.Pattern[str], completion: str) -> str | None:
    """Return the text after the last marker; None without one."""
    _, *rest = marker.split(completion)
    return rest[-1] if rest else None


def score(prediction: str | None, references: Sequence[str]) -> dict[str, float]:
    """Return an accuracy of 1 for the correct letter."""
    return {"accuracy": float(prediction in references)}


Choices = Annotated[list[Anything], Field(min_length=len(LETTERS), max_length=len(LETTERS))]


@fields
def rows(
    question: Text, subject: Text, choices: Choices, answer: Annotated[int, Field(ge=0, lt=len(LETTERS))]
) -> list[Row]:
    """Return the question of a record, whose answer is the place of the correct choice."""
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True))
    row_id = text_id("\n".join([subject, question.strip(), *choices]))
    return [made_of(PROMPT, row_id, (LETTERS[answer],), question=question.strip(), choices=listed)]


SPLITS = {"test": Source(rows, "mmlu_stem", "test", "TIGER-Lab/MMLU-STEM")}
_BY_ACCURACY = {"metrics": ("accuracy",), "reward_metric": "accuracy"}
TASK = text_task("mmlu_stem", reader(SPLITS), extract=extract, score=score, **_BY_ACCURACY)
