"""GCPOConfig and GCPOTrainer: TRL's GRPO with the advantages of every method."""

import warnings

import trl
from packaging.version import Version

from gcpo.trainer.config import GCPOConfig
from gcpo.trainer.trainer import GCPOTrainer

NEWEST = "1.16"  # of TRL that the tests have seen

if Version(trl.__version__).release[:2] > Version(NEWEST).release:
    warnings.warn(f"TRL {trl.__version__} is newer than {NEWEST}, the newest that gcpo was tried with.", stacklevel=2)

__all__ = ["GCPOConfig", "GCPOTrainer"]
