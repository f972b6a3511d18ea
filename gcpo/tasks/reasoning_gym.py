"""Procedural tasks of the package reasoning-gym, each with its own verifier: ``reasoning_gym:<name>``, its name there.

Questions are made, and answers judged, in a process of its own (:mod:`gcpo.grader`), so that a question is the same
whenever it is made again, and no answer can stop a run.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import random
from collections.abc import Callable, Sequence
from typing import Any

from gcpo import grader
from gcpo.errors import nearest
from gcpo.rewards import TAGGED
from gcpo.tasks.base import Row, Split, Task, boxed_answer, text_id

PACKAGE = "reasoning-gym"
PREFIX = "reasoning_gym:"
PROMPT = """{question}

Put the final answer, and nothing else, between <answer> and </answer>."""

SHARES = ("train", "train", "validation", "test")
"""The split of a question, by a hash of its text: no split has a question of another, whatever the seeds."""

BLOCK = 50  # questions that are made from one seed of the package
PATIENCE = 200  # questions in a row that are not new, after which a task has no more

EVALUATING = frozenset(
    "binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24 simple_integration "
    "spiral_matrix string_insertion".split()
)
"""Tasks whose verifier runs an answer as Python code, directly or through sympy's parser."""


def extract(completion: str) -> str | None:
    """What stands between the last <answer> and </answer>; without them the boxed answer, or else all of it."""
    tagged = TAGGED.findall(completion)
    found: str = tagged[-1] if tagged else boxed_answer(completion) or completion
    return found.strip() or None


def get(name: str) -> Task:
    """The task of a name that :func:`check` accepts. "score" is the verifier's, "accuracy" 1 where that is 1."""
    return Task(
        name=name,
        metrics=("accuracy", "score"),
        load=functools.partial(_load, name),
        extract=extract,
        score=functools.partial(_scores, name),
        reward_metric="score",
    )


def check(name: str) -> None:
    """Refuse a name.

    Raises:
        ValueError: the package is not installed, or has no task of that name, or one that runs answers as code.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError(f'task {name!r} needs the package reasoning-gym: pip install "gcpo[tasks]"')
    known = [known for known in _names() if known not in EVALUATING]
    short = name.removeprefix(PREFIX)
    if short in EVALUATING:
        raise ValueError(
            f"task {name!r} cannot be used: its verifier runs an answer as Python code, and a policy's answers are not "
            "to be trusted with that. Choose another task."
        )
    if short not in known:
        raise ValueError(f"reasoning-gym has no task {short!r}.{nearest(short, known)}")


@functools.cache
def _names() -> list[str]:
    try:
        found: list[str] | None = _ask("names")
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if found is None:
        raise ValueError("reasoning-gym is installed and cannot be used: python -c 'import reasoning_gym' says why")
    return found


def _load(
    name: str,
    split: str,
    *,
    limit: int | None = None,
    seed: int = 0,
    revision: str | None = None,
    skip_malformed: bool = False,
) -> Split:
    """Make ``limit`` different questions (default 1000), fewer where the task has no more; the same for the same split
    and seed, and at the beginning of any larger limit. A row's references are the answer that the package gives ("" if
    several are right) and where the question is: the package's seed and the place after it."""
    if split not in SHARES:
        raise ValueError(f"{name} has no split {split!r}; it has {', '.join(dict.fromkeys(SHARES))}.")
    rows: dict[str, Row] = {}
    drawn, last = 0, 0  # the last that was new
    while len(rows) < (1000 if limit is None else limit) and drawn - last < PATIENCE:
        block, index = divmod(drawn, BLOCK)
        start = int.from_bytes(hashlib.sha256(f"{name} {split} {seed} {block}".encode()).digest()[:3])
        place = f"{start * BLOCK}/{index}"
        if (made := _ask("row", name, place)) is None:
            raise ValueError(f"reasoning-gym cannot make question {place} of {name}: choose another task or seed.")
        question, answer = made
        drawn += 1
        key = text_id(question)
        if key not in rows and SHARES[int(key, 16) % len(SHARES)] == split:
            rows[key] = Row(key, PROMPT.format(question=question), (answer, place))
            last = drawn
    if not rows:
        raise ValueError(f"{name} has no question in its split {split!r}.")
    source = {"dataset": name, "split": split, "generator_seed": seed, "version": importlib.metadata.version(PACKAGE)}
    return Split(tuple(rows.values()), source)


def _scores(name: str, answer: str | None, references: Sequence[str]) -> dict[str, float]:
    """The verifier's score in [0, 1], and whether it is 1; 0 where it fails, takes too long or gives no such number."""
    score = 0.0 if answer is None else _verified(name, references[-1], answer)
    return {"accuracy": float(score == 1), "score": score}


@functools.lru_cache(maxsize=100_000)
def _verified(name: str, place: str, answer: str) -> float:
    found = _ask("score", name, place, answer)
    return float(found) if isinstance(found, int | float) and 0 <= found <= 1 else 0.0


# --- reasoning-gym, in a process of its own ------------------------------------------------------------------------

_ask = grader.GraderProcess("gcpo.tasks.reasoning_gym", extra="tasks").ask


def serve() -> None:
    """Answer the questions of :func:`_ask`, in a process of its own."""
    import numpy as np
    from reasoning_gym.factory import DATASETS, create_dataset

    grader.limit_memory()

    @functools.lru_cache(maxsize=100)
    def dataset(name: str, seed: int) -> Any:
        random.seed(seed)  # a few draw from the global generators
        np.random.seed(seed)
        return create_dataset(name.removeprefix(PREFIX), seed=seed, size=BLOCK)

    @functools.lru_cache(maxsize=20_000)
    def entry(name: str, place: str) -> dict[str, Any]:
        start, index = map(int, place.split("/"))
        made = dataset(name, start)
        random.seed(start + index)
        np.random.seed(start + index)
        found: dict[str, Any] = made[index]
        return found

    def row(name: str, place: str) -> list[str]:
        made = entry(name, place)
        return [str(made["question"]), "" if made["answer"] is None else str(made["answer"])]

    def score(name: str, place: str, answer: str) -> float:
        return float(dataset(name, int(place.split("/")[0])).score_answer(answer, entry(name, place)))

    def prepare(kind: str, *question: Any) -> None:
        if kind != "names":
            entry(*question[:2])

    answers: dict[str, Callable[..., Any]] = {
        "names": lambda: sorted(name for name in DATASETS if name != "composite"),
        "row": row,
        "score": score,
    }
    grader.serve(answers, prepare)
