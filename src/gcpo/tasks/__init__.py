"""The benchmarks by name. To add one: a module ``gcpo/tasks/<name>.py`` with a ``TASK``, and its name below."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from gcpo.errors import nearest

if TYPE_CHECKING:
    from gcpo.tasks.base import Task

TASKS = ("tinyqa", "tinymath", "narrativeqa")


def get_task(name: str) -> Task:
    """The task of that name. Raises ``ValueError`` with the nearest valid name for an unknown one."""
    if name not in TASKS:
        raise ValueError(f"Unknown task {name!r}.{nearest(name, TASKS)}")
    return importlib.import_module(f"gcpo.tasks.{name}").TASK
