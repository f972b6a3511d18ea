"""Rehearsals: every run of a profile's grids at toy size, before any hour of a GPU is spent on it.

A rehearsal is the run itself, by the same notebook on the same rows, with nothing changed but size (:func:`shrink`):
an untrained policy in Hub format stands for the real one and the embedded entailment model for the large one; method,
constants, group size, prompts, rewards and embedder are the run's own. Runs that differ in nothing else but their seed
and what was shrunk share a rehearsal. Records lie in a profile folder of their own, apart from real runs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from gcpo import io, paths, world
from gcpo.runs.grids import expand
from gcpo.runs.params import ParameterError, Params, profile_name, validate, yaml_text
from gcpo.runs.plan import UNREAD, Plan
from gcpo.runs.policies import quiet
from gcpo.runs.record import Run, code_hash, load
from gcpo.tasks import sources
from gcpo.tasks.base import DATA_DIR

PREFIX = "rehearse-"  # of the profile that rehearsals are recorded under
AT_MOST = {
    **{"max_steps": 2, "at_step": 2, "prompts_per_step": 2, "save_steps": 2, "train_limit": 20},
    **{"validation_limit": 2, "eval_limit": 4, "eval_samples": 1, "processes": 1},
}
TOKENS = 12  # of a completion by a policy that knows nothing
TEXTS = 20  # prompts that the tokenizer of such a policy is trained on
_GRADED = ("eval", "queries", "answers")  # tables with a line or more for each held-out question
_ON_A_GPU = ("use_vllm", "vllm_")  # fields of GRPOConfig that begin so need one


@dataclass(frozen=True)
class Rehearsal:
    """A small run, and the runs that it stands for."""

    plan: Plan
    stands_for: tuple[Plan, ...]

    @cached_property
    def replaced(self) -> dict[str, str]:
        """What is not as in the first of these runs, as "was → is" by parameter."""
        was, now = (plan.params.model_dump() for plan in (self.stands_for[0], self.plan))
        was["policy_revision"] = now["policy_revision"]  # which belongs to the policy's name
        unread = {"profile", "seed", *UNREAD[self.plan.kind]}
        differ = {key: (was[key], now[key]) for key in was if was[key] != now[key] and key not in unread}
        if "policy" in differ:
            differ["policy"] = differ["policy"][0], "untrained Qwen2"
        return {key: f"{before} → {after}" for key, (before, after) in differ.items()}

    @property
    def said(self) -> str:
        """One line for it: which, for how many, and what was replaced."""
        number = len(self.stands_for)
        runs = "1 run" if number == 1 else f"{number} runs"
        return f"{self.plan.id} stands for {runs}: " + ", ".join(f"{k} {v}" for k, v in self.replaced.items())


def rehearsals(profile: str, grids: Sequence[str], overrides: dict[str, Any] | None = None) -> list[Rehearsal]:
    """The rehearsals of every run of some grids, expanded with ``overrides``; makes the policies that they need.

    Raises:
        ParameterError: a bad parameter, or rows that cannot be read as the task wants them.
        OSError: the rows of a task are not at hand; says where they are looked for, and the way out.
    """
    real = {plan.id: plan for grid in grids for plan in expand(grid, profile, overrides)}
    policy = _policy([plan for plan in real.values() if "policy" not in plan.embedded])
    small: dict[str, Plan] = {}
    found: dict[str, list[Plan]] = {}
    for plan in real.values():
        made = shrink(plan, policy)
        small[made.id] = made
        found.setdefault(made.id, []).append(plan)
    return [Rehearsal(small[id_], tuple(plans)) for id_, plans in found.items()]


def shrink(plan: Plan, policy: str | None = None) -> Plan:
    """The rehearsal of a run: nothing is larger than :data:`AT_MOST`, and no model larger than the embedded ones.

    Args:
        plan: the run.
        policy: the folder of the policy that stands for its own, unless that is embedded.
    """
    params = plan.params
    small: dict[str, Any] = {key: min(getattr(params, key), most) for key, most in AT_MOST.items()}
    small |= {"profile": _name(params), "seed": 0, **_at_hand(plan)}
    if params.micro_batch and params.group_size * small["prompts_per_step"] % params.micro_batch:
        small["micro_batch"] = params.group_size
    if "policy" not in plan.embedded:
        length = min(params.max_completion_length, TOKENS)
        small |= {"policy": policy, "policy_revision": None, "max_completion_length": length}
    if "entailment" not in plan.embedded:
        small["entailment"] = world.TINY
    small["grpo"] = {key: value for key, value in params.grpo.items() if not key.startswith(_ON_A_GPU)}
    return Plan(plan.kind, validate({**params.model_dump(), **small}, f"rehearsal of {plan.id}"))


def _name(params: Params) -> str:
    return f"{PREFIX}{params.profile}"


def _at_hand(plan: Plan) -> dict[str, Any]:
    """Other splits in place of those that ``$GCPO_DATA_DIR`` has no file of, as far as it has any."""
    params, folder = plan.params, os.environ.get(DATA_DIR)
    if not folder or not sources(params.task):
        return {}
    listed = sources(params.task).items()
    there = [name for name, source in listed if source.file(folder).is_file()]
    chosen: dict[str, Any] = {}
    for name, other in (("eval_split", "train_split"), ("train_split", "eval_split")):
        taken = chosen.get(other, getattr(params, other))
        if getattr(params, name) not in there and (left := [split for split in there if split != taken]):
            chosen[name] = left[-1]
    if params.validation_split not in there or params.validation_split == chosen.get("train_split"):
        chosen["validation_limit"] = 0
    return chosen


def _policy(plans: Sequence[Plan]) -> str | None:
    """The folder of an untrained policy whose tokenizer is trained on prompts of each task of the plans."""
    quiet()
    prompts: list[str] = []
    for plan in {plan.params.task: plan for plan in plans}.values():
        params = plan.params
        split = _at_hand(plan).get("eval_split", params.eval_split)
        try:
            prompts += [row.prompt for row in plan.load(split, TEXTS).rows]
        except ValueError as error:
            raise ParameterError(f"Task {params.task!r} cannot be rehearsed: {error}") from error
    if not plans:
        return None
    return str(world.untrained_policy(paths.OUTPUTS / _name(plans[0].params) / "policy", prompts))


def prepare(profile: str, listed: Sequence[Rehearsal]) -> tuple[Path, Path]:
    """Remove rehearsals of other code of this package, which prove nothing of this one, and write the profile and the
    grid of these: two parameter files that reports read, and that make every rehearsal again."""
    folder = paths.OUTPUTS / f"{PREFIX}{profile_name(profile)}"
    code = code_hash(Path(__file__).parents[1])
    blocks = []
    for one in listed:
        if load(one.plan.folder).manifest.get("code", code) != code:
            shutil.rmtree(one.plan.folder)
        values = one.plan.params.model_dump(mode="json", exclude={"profile"})
        blocks.append({"kind": one.plan.kind, **{key: [value] for key, value in values.items()}})
    own, grid = folder / "profile.yaml", folder / "grid.yaml"
    io.write(own, yaml_text({"profile": folder.name}))
    io.write(grid, yaml_text(blocks))
    return own, grid


def outcome(listed: Sequence[Rehearsal]) -> pd.DataFrame:
    """What became of rehearsals, a line each: id, stands_for (how many runs), status, seconds, graded (held-out
    questions), cut and skipped (rows read whose context was cut, and malformed ones left out), replaced, error."""
    return pd.DataFrame([{"id": one.plan.id, **_became(one, load(one.plan.folder))} for one in listed])


def _became(one: Rehearsal, run: Run) -> dict[str, Any]:
    read = [source for source in run.manifest.get("data", {}).values() if "cut" in source]
    graded = [pd.read_csv(path)["query"].nunique() for path in run.folder.glob("*.csv") if path.stem in _GRADED]
    return {
        "stands_for": len(one.stands_for),
        "status": run.manifest.get("status", "not run"),
        "seconds": run.manifest.get("seconds"),
        "graded": sum(graded),
        "cut": sum(source["cut"] for source in read),
        "skipped": sum(source["skipped"] for source in read),
        "replaced": "; ".join(f"{key} {text}" for key, text in one.replaced.items()),
        "error": run.manifest.get("exit") or "",
    }
