"""Hashes of a run's models and data, independent of their names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gcpo import io, world
from gcpo.runs.plan import recorded
from gcpo.semantics.models import embedder_path
from gcpo.tasks import sources
from gcpo.tasks.base import DATA_DIR

Contents = dict[str, dict[str, str]]
Seen = dict[tuple[Any, ...], Contents]
_SPLITS = ("train_split", "validation_split", "eval_split")
# Parameters that name models and data.
_NAMES = ("task", *_SPLITS, "policy", "policy_revision", "embedder", "entailment")


def contents(params: Mapping[str, Any]) -> Contents:
    """Return the SHA-256 of every file of the policy, embedder, entailment model and data, by name.

    Models from the Hub have their commit instead. Files that are not on this machine are left out.
    """
    seed = recorded(params, "world_seed")
    found = {
        "policy": _model(params["policy"], "policy", seed, params["policy_revision"]),
        "embedder": _model(str(embedder_path(params["embedder"])), "embedder", seed),
        "entailment": _model(params["entailment"], "entailment", seed),
    }
    if folder := os.environ.get(DATA_DIR):
        for split, source in sources(params["task"]).items():
            if split in {params[name] for name in _SPLITS}:
                files = [path for one in (source, *source.more) if (path := one.file(folder)).is_file()]
                found[f"data ({split})"] = {name: value for path in files for name, value in io.hashes(path).items()}
    return {key: value for key, value in found.items() if value}


def _model(name: str, kind: str, seed: int, revision: str | None = None) -> dict[str, str]:
    place = world.folder(kind, name, seed) if world.embedded(name, kind) else Path(name)
    if place.exists():
        return {file: value for file, value in io.hashes(place).items() if not file.endswith(".md")}
    from huggingface_hub import try_to_load_from_cache  # slow to import, and unused in the embedded world
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # a path that is not there
        return {}
    return {"commit": Path(config).parent.name} if isinstance(config, str) else {}


def changed(
    made_of: Contents, params: Mapping[str, Any], seen: Seen | None = None, embedded: bool = False
) -> str | None:
    """Return the first model or data set that has changed since the run, as far as this machine can tell, or None.

    ``seen`` caches contents for many records that share models and data.

    The embedded models are left out unless asked for: their settings are part of the id, their folder checks itself,
    and made on another processor they may differ in a last bit.
    """
    seen = {} if seen is None else seen
    names = (*(params[name] for name in _NAMES), recorded(params, "world_seed"))
    if names not in seen:
        seen[names] = contents(params)
    for key, now in seen[names].items():
        before = made_of.get(key, {} if key.startswith("data") else now)
        if before != now and (embedded or not world.embedded(params.get(key, ""), key)):
            name = next(name for name in sorted({*before, *now}) if before.get(name) != now.get(name))
            return f"{key} is not what it was made of: {params.get(key, params['task'])} has another {name}"
    return None
