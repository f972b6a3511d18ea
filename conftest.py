"""Settings of pytest for tests and for notebooks under nbval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

WORLD = Path(__file__).parent / "outputs" / "reference" / "laptop" / "world"  # that of the stored outputs
_OTHER = pytest.StashKey[int]()  # cells of another world


def pytest_collectstart(collector: Any) -> None:
    """Warnings in a notebook's stderr are no part of its results."""
    if getattr(collector, "skip_compare", None) is not None:
        collector.skip_compare += ("stderr",)


def pytest_collection_modifyitems(items: list[Any], config: Any) -> None:
    """Compare what the embedded models decide and sample only where they are the reference's, as in stored outputs."""
    cells = [item for item in items if "compared-in-the-same-world" in _tags(item)]
    if cells:
        same = _same_world()
        for cell in cells:
            cell.options["check"] = same
        if not same:
            config.stash[_OTHER] = len(cells)


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """Say what was not compared."""
    if count := config.stash.get(_OTHER, 0):
        terminalreporter.line(f"{count} cells not compared: the embedded models were made on another kind of machine")


def _tags(item: Any) -> list[str]:
    return getattr(item, "cell", {}).get("metadata", {}).get("tags", [])


def _same_world() -> bool:
    from gcpo import files, world

    made = world.folder("policy").parent
    return made.is_dir() and files.hashes(made) == files.hashes(WORLD / made.name)
