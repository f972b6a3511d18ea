"""The methods that read rewards alone, as SkyRL's estimators: ``trainer.algorithm.advantage_estimator=gcpo/rd_only``.

Import this module before SkyRL's entry point. The environment variable ``GCPO_SETTINGS`` holds the method's constants
(:class:`gcpo.engines.rows.Settings`) as JSON: ``{"reward_range": [0, 1]}``.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import register_advantage_estimator
from torch import Tensor

from gcpo.engines import asks, refusal
from gcpo.engines.rows import Settings, advantages
from gcpo.methods import METHODS


def estimate(
    method: str, *, token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[str], **_: Any
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns (N, T), as SkyRL asks of its estimators."""
    settings = Settings.of({**json.loads(os.environ.get("GCPO_SETTINGS", "{}")), "method": method}, "GCPO_SETTINGS")
    # SkyRL pads with copies of the first row, mask included, whose keys are pad0, pad1, ...
    real = torch.tensor([not re.fullmatch(r"pad\d+", str(key)) for key in index], device=response_mask.device)
    found, _logged = advantages(settings, token_level_rewards.sum(-1), response_mask * real.unsqueeze(1), list(index))
    return found, found


for _name, _row in METHODS.items():
    if not refusal(_row) and not asks(_row):
        register_advantage_estimator(f"gcpo/{_name}")(functools.partial(estimate, _name))
