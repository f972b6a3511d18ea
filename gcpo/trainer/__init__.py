"""GCPOConfig and GCPOTrainer: TRL's GRPO with the advantages of every method."""

from gcpo.trainer.config import GCPOConfig
from gcpo.trainer.trainer import GCPOTrainer

__all__ = ["GCPOConfig", "GCPOTrainer"]
