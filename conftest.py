"""Settings of pytest for tests and for notebooks under nbval."""

from __future__ import annotations

from typing import Any


def pytest_collectstart(collector: Any) -> None:
    """Warnings in a notebook's stderr are no part of its results."""
    if getattr(collector, "skip_compare", None) is not None:
        collector.skip_compare += ("stderr",)
