"""Small real models for tests: an untrained byte-level policy, and stand-ins for semantic models."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: threads would only wait for one another
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the untrained byte-level policy."""
    from gcpo.world import scratch_policy

    return scratch_policy(tmp_path_factory.mktemp("world"))
