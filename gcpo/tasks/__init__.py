"""The benchmarks by name. To add one: a module ``gcpo/tasks/<name>.py`` with a ``TASK``, and its name below."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING

from gcpo.errors import nearest, one_of

if TYPE_CHECKING:
    from gcpo.tasks.base import Task
    from gcpo.tasks.reading import Source

GENERATED = ("tinyqa", "tinymath", "tinymath_think")  # by this package, without a file
PUBLIC = "narrativeqa qasper hotpotqa math aime24 olympiadbench amc23 minerva gsm8k mmlu_stem open_rs openr1".split()
TASKS = (*GENERATED, *PUBLIC)
REWARDS = ("metric", "binary")


def check_task(name: str) -> str:
    """Return the name of a task.

    Raises:
        ValueError: it is no task's, with the nearest valid name.
    """
    if name not in TASKS:
        raise ValueError(f"Unknown task {name!r}.{nearest(name, TASKS)}")
    return name


def get_task(name: str, *, reward: str = "metric", full_completion: bool | None = None, context: str = "text") -> Task:
    """Return the task of that name.

    Args:
        name: one of :data:`TASKS`.
        reward: "metric" is the task's own, from its metric; "binary" gives the largest reward where the accuracy is 1
            and the smallest elsewhere, as papers that ask "right or wrong" train.
        full_completion: embed and cluster whole completions, or the answers in them; None is the task's own choice.
        context: what a question is asked about: the text; "evidence", what annotators marked as the answer's place
            before it (qasper); or "supporting", few words that matter (hotpotqa, narrativeqa, qasper).

    Raises:
        ValueError: an unknown task (:func:`check_task`), reward or context.
    """
    check_task(name)
    one_of("reward", reward, REWARDS)
    module = importlib.import_module(f"gcpo.tasks.{name}")
    contexts = {"text": module.TASK.load, **getattr(module, "CONTEXTS", {})}
    one_of(f"context (of {name})", context, contexts)
    task: Task = replace(module.TASK, load=contexts[context])
    if reward == "binary":
        task = replace(task, reward_metric="accuracy")
    return task if full_completion is None else replace(task, full_completion=full_completion)


def sources(name: str) -> dict[str, Source]:
    """Return the source of each split of a task; none for a generated task."""
    return getattr(importlib.import_module(f"gcpo.tasks.{name}"), "SPLITS", {})
