"""Small real models for tests: an untrained byte-level policy, and stand-ins for semantic models."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

# The same examples every time, so that a run of the tests is decided by the code and not by luck.
# `pytest --hypothesis-profile default` draws new ones: do that after changing a formula.
hypothesis.settings.register_profile("fixed", derandomize=True)
hypothesis.settings.load_profile("fixed")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: threads would only wait for one another
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the untrained byte-level policy."""
    from gcpo.world import scratch_policy

    return scratch_policy(tmp_path_factory.mktemp("world"))
