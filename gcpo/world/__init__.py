"""The embedded world: generated tasks' starting policy and entailment model, and policies small enough to be exact."""

from gcpo.world.build import (
    POLICIES,
    SCRATCH,
    TINY,
    World,
    adopt,
    bootstrap,
    embedded,
    folder,
    key,
    resolve,
    scratch_policy,
    untrained_policy,
)
from gcpo.world.policy import Settings

__all__ = [
    "POLICIES",
    "SCRATCH",
    "TINY",
    "Settings",
    "World",
    "adopt",
    "bootstrap",
    "embedded",
    "folder",
    "key",
    "resolve",
    "scratch_policy",
    "untrained_policy",
]
