"""Settings of pytest for tests and for notebooks under nbval."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

_OTHER = pytest.StashKey[int]()  # cells that another kind of machine computes


def pytest_collectstart(collector: Any) -> None:
    """Warnings in a notebook's stderr are no part of its results."""
    if getattr(collector, "skip_compare", None) is not None:
        collector.skip_compare += ("stderr",)


def pytest_collection_modifyitems(items: list[Any], config: Any) -> None:
    """Compare what the embedded models decide and sample only where they, and their arithmetic, are as when stored."""
    cells = [item for item in items if "compared-in-the-same-world" in _tags(item)]
    if cells:
        same = _same()
        for cell in cells:
            cell.options["check"] = same
        if not same:
            config.stash[_OTHER] = len(cells)


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """Say what was not compared."""
    if count := config.stash.get(_OTHER, 0):
        terminalreporter.line(f"{count} cells not compared: the models, or this machine's arithmetic, are not theirs")


def _tags(item: Any) -> list[str]:
    return getattr(item, "cell", {}).get("metadata", {}).get("tags", [])


def _same() -> bool:
    sys.path.insert(0, str(Path(__file__).parent / "tests"))
    from arithmetic import same

    from gcpo import world

    return world.folder("policy").parent.is_dir() and same()
