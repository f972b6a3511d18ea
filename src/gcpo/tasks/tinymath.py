"""tinymath: multi-step integer problems with worked solutions, small enough for a very small model.

A problem is a start value and two or three operations. A solution walks through the steps in symbols or in words and
ends in a boxed answer. Splits are disjoint by problem (start value and operations).
"""

from __future__ import annotations

import hashlib
import random

from gcpo.tasks.base import Row, Split, Task, boxed_answer, math_scores

PEOPLE = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivan", "Jane"]
THINGS = ["coins", "maps", "toys", "lamps", "shoes", "clocks"]
# Numbers are words everywhere but in the boxed answer: one token each, where digits would be two or three.
NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty""".split()
LARGEST = len(NUMBERS) - 1

# operation -> how the problem says it; {k} is the operand
EVENTS = {
    "+": ("gets {k} more", "finds {k}", "buys {k} more"),
    "-": ("loses {k}", "gives {k} away", "sells {k}"),
    "*": ("then has {k} times as many",),
}
WORDS = {"+": "adding {k} gives {c}", "-": "taking away {k} gives {c}", "*": "times {k} gives {c}"}

SHARES = {"train": (0.0, 0.7), "validation": (0.7, 0.8), "test": (0.8, 1.0)}

Problem = tuple[int, tuple[tuple[str, int], ...]]  # (start, ((operation, operand), ...))


def apply(operation: str, a: int, k: int) -> int:
    """The result of one step."""
    return {"+": a + k, "-": a - k, "*": a * k}[operation]


def split_of(problem: Problem) -> str:
    """The split a problem belongs to, by a hash of its numbers and operations."""
    share = hashlib.sha256(repr(problem).encode()).digest()[0] / 256
    return next(name for name, (low, high) in SHARES.items() if low <= share < high)


def problem(rng: random.Random, split: str) -> Problem:
    """Draw a problem of a split whose running value stays within 0..LARGEST."""
    while True:
        start = value = rng.randrange(1, 10)
        steps = []
        for _ in range(rng.choice((2, 2, 3))):
            operation = rng.choice("++--*")
            k = rng.choice((2, 3)) if operation == "*" else rng.randrange(1, 10)
            value = apply(operation, value, k)
            steps.append((operation, k))
            if not 0 <= value <= LARGEST:
                break
        else:
            if split_of((start, tuple(steps))) == split:
                return start, tuple(steps)


def text(rng: random.Random, of: Problem) -> str:
    """The problem in words."""
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    events = " , ".join(rng.choice(EVENTS[operation]).format(k=NUMBERS[k]) for operation, k in of[1])
    return f"{who} has {NUMBERS[of[0]]} {things} . {who} {events} . How many {things} does {who} have ?"


def solution(rng: random.Random, of: Problem, slip: float = 0.0) -> str:
    """A worked solution in symbols or in words; each step slips with probability ``slip`` to a neighbouring number
    or a wrong operation, and the rest follows from the slip."""
    value, lines, symbols = of[0], [], rng.random() < 0.5
    for operation, k in of[1]:
        used = operation
        if rng.random() < slip and rng.random() < 0.5:
            used = rng.choice([o for o in "+-*" if o != operation])
        result = apply(used, value, k)
        if rng.random() < slip / 2:
            result += rng.choice((-1, 1))
        result = min(max(result, 0), LARGEST)
        a, b, c = NUMBERS[value], NUMBERS[k], NUMBERS[result]
        lines.append(f"{a} {used} {b} = {c}" if symbols else WORDS[used].format(k=b, c=c))
        value = result
    if symbols:
        return " . ".join(lines) + f" . The answer is \\boxed{{{value}}}"
    return f"Start with {NUMBERS[of[0]]} , " + " , ".join(lines) + f" . So we get \\boxed{{{value}}}"


def answer(of: Problem) -> int:
    """The right answer."""
    value = of[0]
    for operation, k in of[1]:
        value = apply(operation, value, k)
    return value


def load(
    split: str, *, limit: int | None = None, seed: int = 0, revision: str | None = None, skip_malformed: bool = False
) -> Split:
    """Generate ``limit`` problems (default 1000); the same for the same split and seed."""
    if split not in SHARES:
        raise ValueError(f"tinymath has no split {split!r}; it has {', '.join(SHARES)}.")
    rng = random.Random(f"tinymath {split} {seed}")
    rows = []
    for number in range(1000 if limit is None else limit):
        drawn = problem(rng, split)
        rows.append(Row(f"{split}-{seed}-{number}", text(rng, drawn), (str(answer(drawn)),)))
    return Split(tuple(rows), {"dataset": "tinymath", "split": split, "generator_seed": seed})


TASK = Task(
    name="tinymath",
    metrics=("accuracy",),
    load=load,
    extract=boxed_answer,
    score=math_scores,
    reward_metric="accuracy",
    full_completion=True,
)
