"""Grids: the runs behind a table, as blocks of parameter lists in ``params/grids/*.yaml``."""

from __future__ import annotations

import itertools
from typing import Any

import yaml

from gcpo import paths
from gcpo.errors import nearest
from gcpo.runs.manifest import KINDS
from gcpo.runs.params import ParameterError, Params, load_profile, validate


def grids() -> list[str]:
    """Names of the grids in ``params/grids/``."""
    return sorted(path.stem for path in (paths.PARAMS / "grids").glob("*.yaml"))


def expand(grid: str, profile: str, overrides: dict[str, Any] | None = None) -> list[tuple[str, Params]]:
    """Every run of a grid as (kind, parameters), checked: the profile's values, the grid's, then ``overrides``.

    A grid is a list of blocks; a block names a ``kind`` ("train" or "gradients") and gives lists of values for any
    parameters, and every combination is a run.

    Raises:
        ParameterError: no such grid, a block without a kind, or a bad parameter.
    """
    path = paths.PARAMS / "grids" / f"{grid}.yaml"
    if not path.is_file():
        raise ParameterError(f"Unknown grid {grid!r}.{nearest(grid, grids())}")
    base = load_profile(profile)
    found: dict[tuple[str, str], tuple[str, Params]] = {}
    for block in yaml.safe_load(path.read_text()) or []:
        kind, axes = block.get("kind"), {key: value for key, value in block.items() if key != "kind"}
        if kind not in KINDS:
            raise ParameterError(f"{path}: kind must be one of {', '.join(KINDS)}, got {kind!r}.")
        if bad := [key for key, value in axes.items() if not isinstance(value, list)]:
            raise ParameterError(f"{path}: {bad[0]} must be a list of values.")
        for values in itertools.product(*axes.values()):
            chosen = {**base, **dict(zip(axes, values, strict=True)), **(overrides or {})}
            params = validate(chosen, f"run of {path.name} with {profile}.yaml")
            found[kind, params.digest()] = (kind, params)
    return list(found.values())
