"""The embedded world: generated tasks' starting policy and entailment model, and policies small enough to be exact."""

from gcpo.world.bootstrap import SCRATCH, TINY, World, bootstrap, key, resolve, scratch_policy
from gcpo.world.policy import Settings

__all__ = ["SCRATCH", "TINY", "Settings", "World", "bootstrap", "key", "resolve", "scratch_policy"]
