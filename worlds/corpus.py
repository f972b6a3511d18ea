"""The texts that the starting policy learns from: answers and worked solutions, right ones and noisy ones.

Kinds of question differ in how well they are known: some are understood, some are noise, and some are rather
misunderstood, which leaves room to learn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from gcpo.mathematics import NUMBERS
from gcpo.tasks.tinymath import EVENTS, LARGEST, Problem, apply
from gcpo.tasks.tinyqa import RELATIONS, Question, wrong_answer


class Noise(NamedTuple):
    """The share of wrong answers about a relation, and how often these are near, other and unrelated."""

    share: float
    mistakes: tuple[int, int, int] = (2, 1, 1)


NOISE = {
    "pet": Noise(0.0),
    "work": Noise(0.98, (0, 0, 1)),  # not understood at all
    "home": Noise(0.2),
    "hobby": Noise(0.6),
    "trip": Noise(0.0),
    "food": Noise(0.9),
}

# In this share the link of a two-hop question is forgotten: the answer is about the person named.
FORGOTTEN = {"brother": 0.0, "sister": 0.1, "friend": 0.5, "neighbour": 0.9, "boss": 0.99}

# In this share an event of tinymath is read as another operation, in the order of EVENTS.
MISREAD = ((0.02, "-"), (0.1, "-"), (0.35, "-"), (0.05, "+"), (0.55, "+"), (0.9, "+"), (0.35, "+"))
WORDS = {"+": "adding {k} gives {c}", "-": "taking away {k} gives {c}", "*": "times {k} gives {c}"}


def noisy_answer(rng: random.Random, to: Question) -> str:
    """Return an answer in either wording: it may forget a link (:data:`FORGOTTEN`), and is correct at the relation's
    rate (:data:`NOISE`)."""
    if to.hops == 2 and rng.random() < FORGOTTEN[to.passage.link]:
        _, relation, value = to.passage.facts[2]
        return RELATIONS[relation].wording(value, rng.randrange(2))
    noise = NOISE[to.fact[1]]
    if rng.random() >= noise.share:
        return rng.choice(to.references)
    return wrong_answer(rng, to, rng.choices(("near", "other", "unrelated"), noise.mistakes)[0])


def operations(of: Problem) -> list[str]:
    """Return the correct operation of each step."""
    return [EVENTS[event].operation for event, _ in of[1]]


def misread(rng: random.Random, of: Problem) -> list[str]:
    """Return the operation of each step as the corpus reads it."""
    read = [(*MISREAD[event], EVENTS[event].operation) for event, _ in of[1]]
    return [wrong if rng.random() < share else right for share, wrong, right in read]


def solution(
    rng: random.Random, of: Problem, using: Sequence[str] | None = None, *, slip: float = 0.0, think: bool = False
) -> str:
    """Return a worked solution in symbols or in words.

    Args:
        rng: draws the form and the slips.
        of: the problem.
        using: the operation of each step; the correct ones if None. Results are kept within 0..LARGEST.
        slip: probability of each step to end in a neighbouring number, from which the rest follows.
        think: put the steps inside <think> ... </think>.
    """
    value, lines, symbols = of[0], [], rng.random() < 0.5
    for (_, k), operation in zip(of[1], using or operations(of), strict=True):
        result = apply(operation, value, k)
        if rng.random() < slip:
            result += rng.choice((-1, 1))
        result = min(max(result, 0), LARGEST)
        a, b, c = NUMBERS[value], NUMBERS[k], NUMBERS[result]
        lines.append(f"{a} {operation} {b} = {c}" if symbols else WORDS[operation].format(k=b, c=c))
        value = result
    steps = (" . " if symbols else " , ").join(lines)
    return f"<think> {steps} </think> \\boxed{{{value}}}" if think else f"{steps} . So \\boxed{{{value}}}"
