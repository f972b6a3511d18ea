"""tinymath: multi-step integer problems, small enough for a very small model.

A problem is a start value and two or three events, each of which says an operation. A solution (worlds/corpus.py) walks
through the steps in symbols or in words and ends in a boxed answer; a variant of the task (tinymath_think) has the
steps inside <think> ... </think>. Splits are disjoint by problem (start value and events).
"""

import hashlib
import random
from collections.abc import Sequence
from typing import NamedTuple

from gcpo.mathematics import NUMBERS  # words, but in the boxed answer: one token each, where digits are two or three
from gcpo.tasks.base import SHARES, generator, math_task

PEOPLE = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivan", "Jane"]
THINGS = ["coins", "maps", "toys", "lamps", "shoes", "clocks"]
LARGEST = len(NUMBERS) - 1


class Event(NamedTuple):
    """How a problem says an operation; {k} is the operand."""

    words: str
    operation: str


_WORDS = {
    "+": ("gets {k} more", "finds {k}", "buys {k} more"),
    "-": ("loses {k}", "gives {k} away", "sells {k}"),
    "*": ("then has {k} times as many",),
}
EVENTS = tuple(Event(words, operation) for operation, listed in _WORDS.items() for words in listed)
OFTEN = (2, 2, 2, 2, 2, 2, 3)  # how often each event is drawn

Problem = tuple[int, tuple[tuple[int, int], ...]]  # (start, ((position in EVENTS, operand), ...))


def apply(operation: str, a: int, k: int) -> int:
    """Return the result of one step."""
    return {"+": a + k, "-": a - k, "*": a * k}[operation]


def split_of(problem: Problem) -> str:
    """Return the split a problem belongs to, by a hash of its numbers and events."""
    share = hashlib.sha256(repr(problem).encode()).digest()[0] / 256
    return next(name for name, (low, high) in SHARES.items() if low <= share < high)


def problem(rng: random.Random, split: str) -> Problem:
    """Draw a problem of a split whose running value stays within 0..LARGEST."""
    while True:
        start = value = rng.randrange(1, 10)
        steps = []
        for _ in range(rng.choice((2, 2, 3))):
            (event,) = rng.choices(range(len(EVENTS)), OFTEN)
            operation = EVENTS[event].operation
            k = rng.choice((2, 3)) if operation == "*" else rng.randrange(1, 10)
            value = apply(operation, value, k)
            steps.append((event, k))
            if not 0 <= value <= LARGEST:
                break
        else:
            if split_of((start, tuple(steps))) == split:
                return start, tuple(steps)


def text(rng: random.Random, of: Problem) -> str:
    """Return the problem in words."""
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    events = " , ".join(EVENTS[event].words.format(k=NUMBERS[k]) for event, k in of[1])
    return f"{who} has {NUMBERS[of[0]]} {things} . {who} {events} . How many {things} ?"


def answer(of: Problem) -> int:
    """Return the correct answer."""
    value = of[0]
    for event, k in of[1]:
        value = apply(EVENTS[event].operation, value, k)
    return value


def draw(rng: random.Random, split: str) -> tuple[str, Sequence[str]]:
    """Draw a question of a split, and its reference."""
    drawn = problem(rng, split)
    return text(rng, drawn), (str(answer(drawn)),)


TASK = math_task("tinymath", generator("tinymath", draw), answer_length="short")
