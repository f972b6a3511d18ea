"""The benchmarks by name. To add one: a module ``gcpo/tasks/<name>.py`` with a ``TASK``, and its name below."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gcpo.tasks.base import Task

TASKS = ("tinyqa", "tinymath", "narrativeqa")


def get_task(name: str) -> Task:
    """The task of that name. Raises ``ValueError`` with the nearest valid name for an unknown one."""
    if name not in TASKS:
        nearest = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(f"unknown task {name!r}: {hint}Tasks: {', '.join(TASKS)}")
    return importlib.import_module(f"gcpo.tasks.{name}").TASK
