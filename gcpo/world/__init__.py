"""The embedded world: generated tasks' starting policy and entailment model, and policies small enough to be exact."""

from gcpo.world.build import (
    POLICIES,
    SCRATCH,
    TINY,
    World,
    bootstrap,
    embedded,
    folder,
    key,
    resolve,
    restore_reference,
    scratch_policy,
    settings_of,
)
from gcpo.world.policy import Settings

__all__ = [
    "POLICIES",
    "SCRATCH",
    "TINY",
    "Settings",
    "World",
    "bootstrap",
    "embedded",
    "folder",
    "key",
    "resolve",
    "restore_reference",
    "scratch_policy",
    "settings_of",
]
