"""Grids: the runs behind a table, as blocks of parameter lists in ``params/grids/*.yaml``."""

import functools
import itertools
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gcpo import paths, world
from gcpo.runs.params import Params, refuse_secrets, validate
from gcpo.runs.plan import KINDS, Plan, recorded
from gcpo.runs.profiles import TOY, ParameterError, file_of, load_profile, names_in, over, profiles, read_yaml
from gcpo.tasks import GENERATED

COUNTS = ("max_steps", "at_step")  # of steps
END, HALF = "max_steps", "max_steps / 2"  # as a grid's at_step: the profile's max_steps, or half of them


def grids() -> list[str]:
    """Names of the grids in ``params/grids/``."""
    return names_in(paths.PARAMS / "grids")


def expand(grid: str, profile: str, overrides: dict[str, Any] | None = None) -> list[Plan]:
    """Return every run of a grid, checked: the profile's values, the grid's, then ``overrides``, by ``profiles.over``.

    A grid is a list of blocks; a block names a ``kind`` (a key of ``KINDS``) and gives lists of values for any
    parameters, and every combination is a run. An ``at_step`` of "max_steps" is the end of the profile's training,
    whose runs the grid may have too, and one of "max_steps / 2" its middle. A plan's ``varied`` are the parameters
    that its block lists and that differ within the grid, beside task, method and seed.

    Raises:
        ParameterError: no such grid, a block without a kind, or a bad parameter.
    """
    path, blocks = _read(grid)
    toy = [load_profile(name) for name in ("toy", profile.removesuffix(TOY)) if profile.endswith(TOY)]
    # A report asks for one grid many times: its runs are resolved once, until one of the files holds something else.
    return list(_expand(path, profile, pickle.dumps((blocks, load_profile(profile), toy, overrides or {}))))


@functools.cache
def _expand(path: Path, profile: str, held: bytes) -> list[Plan]:
    blocks, base, toy, overrides = pickle.loads(held)
    steps = dict.fromkeys(step for block in blocks for key in COUNTS for step in block.get(key, ()))
    listed: dict[str, tuple[Plan, set[str]]] = {}
    for block in blocks:
        kind, axes = _axes(block, path, overrides)
        for values in itertools.product(*axes.values()):
            asked = dict(zip(axes, values, strict=True))
            small = _small(toy[0], toy[1], asked, [*steps]) if toy else asked
            chosen = over(base, small, overrides)
            if (step := chosen.get("at_step")) in (END, HALF):
                whole = chosen.get("max_steps", Params.model_fields["max_steps"].default)
                chosen["at_step"] = whole // (1 if step == END else 2)
            plan = Plan(kind, validate(chosen, f"run of {path.name} with {profile}.yaml"), asked=asked)
            listed[plan.id] = plan, set(small)
    differing = varied((plan.kind, plan.params.model_dump()) for plan, _ in listed.values())

    def labelled(plan: Plan, named: set[str]) -> Plan:
        shown = differing[comparison_key(plan.kind, plan.params.max_steps)]
        return replace(plan, varied=tuple(key for key in shown if key in named))

    return [labelled(plan, named) for plan, named in listed.values()]


def _axes(block: dict[str, Any], path: Path, overrides: Mapping[str, Any]) -> tuple[str, dict[str, list[Any]]]:
    """Return a block's kind, and the values of each parameter that it lists."""
    refuse_secrets(block, f"{path}: ")
    kind, axes = block.get("kind"), {key: value for key, value in block.items() if key != "kind"}
    if kind not in [*KINDS]:
        raise ParameterError(f"{path}: kind must be one of {', '.join(KINDS)}, got {kind!r}.")
    for key, value in axes.items():
        if not isinstance(value, list) or not value:
            raise ParameterError(f"{path}: {key} must be a list of values, got {value!r}.")
        if key in ("profile", *overrides):
            raise ParameterError(f"{path} lists {key}, which --profile or -p gives one value for all its runs.")
    return kind, axes


def _read(grid: str) -> tuple[Path, list[dict[str, Any]]]:
    """Return a grid's file and its blocks, unchecked."""
    path = file_of(grid, "grid", paths.PARAMS / "grids")
    blocks = read_yaml(path)
    if not blocks or not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise ParameterError(f"{path}: expected a list of blocks, each a mapping with a kind and lists of values.")
    return path, blocks


def _small(toy: dict[str, Any], own: dict[str, Any], asked: dict[str, Any], steps: list[Any]) -> dict[str, Any]:
    """Return a grid's values at toy size: none larger than in ``params/toy.yaml``, but each number of steps another,
    and in the place of models from elsewhere the toy's, with the name of the one that they stand for as revision."""
    small, order = {"policy_revision": own.get("policy"), **asked}, [*dict.fromkeys([own.get("max_steps"), *steps])]
    for key, value in asked.items():
        most = toy.get("max_steps" if key in COUNTS else key)
        if isinstance(value, int) and isinstance(most, int):
            small[key] = most + order.index(value) if value and key in COUNTS else min(value, most)
        elif most and key in ("policy", "entailment") and value not in world.POLICIES:
            small |= {key: most} | ({"policy_revision": value} if key == "policy" else {})
    return small


def owner(grid: str) -> str | None:
    """Return the profile that a grid is named for, as paper_seed_table2 is for paper_seed; None without one."""
    return max((name for name in profiles() if grid.startswith(f"{name}_")), key=len, default=None)


def fitting(profile: str) -> list[str]:
    """Return the grids that suit a profile: those named for it or, of the others, those of generated tasks where its
    policy is embedded, else of GCPO's benchmarks."""
    if named := [grid for grid in grids() if owner(grid) == profile.removesuffix(TOY)]:
        return named
    own = validate(load_profile(profile.removesuffix(TOY)), profile)

    def fits(task: Any) -> bool:
        return (task in GENERATED) == (own.policy in world.POLICIES)

    blocks = {grid: _read(grid)[1] for grid in grids() if owner(grid) in (None, "paper")}
    return [grid for grid, listed in blocks.items() if all(fits(t) for b in listed for t in b.get("task", [own.task]))]


def comparison_key(kind: str, max_steps: int) -> tuple[str, bool]:
    """Return the key of runs that share a table: their kind, and whether they train."""
    return kind, kind == "train" and max_steps > 0


def varied(runs: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[tuple[str, bool], list[str]]:
    """Return the parameters that differ between runs of one task and key, except those that every table names."""
    keys = [key for key in Params.model_fields if key not in ("task", "method", "seed", "profile", "report_to")]
    seen: dict[tuple[str, bool], dict[str, dict[str, str]]] = {}
    found: dict[tuple[str, bool], set[str]] = {}
    for kind, params in runs:
        table = comparison_key(kind, params["max_steps"])
        first = seen.setdefault(table, {}).setdefault(params["task"], {})
        values = {key: repr(recorded(params, key)) for key in keys}
        found.setdefault(table, set()).update(key for key in keys if first.setdefault(key, values[key]) != values[key])
    return {table: [key for key in keys if key in differing] for table, differing in found.items()}
