"""Small real models for tests: an untrained byte-level policy, and stand-ins for semantic models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: threads would only wait for one another
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collectstart(collector: Any) -> None:
    """Warnings in a notebook's stderr are no part of its results."""
    if getattr(collector, "skip_compare", None) is not None:
        collector.skip_compare += ("stderr",)


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the untrained byte-level policy."""
    from gcpo.world import scratch_policy

    return scratch_policy(tmp_path_factory.mktemp("world"))
