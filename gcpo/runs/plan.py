"""Plan of a run: its parameters with every value resolved, and the id that names them all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gcpo import paths, seeds, updates, world
from gcpo.methods import BASES, Method
from gcpo.runs.params import ADDRESSES, PINNED, Params, validate
from gcpo.runs.profiles import ParameterError, accelerate_file, read_yaml
from gcpo.tasks import get_task
from gcpo.tasks.base import Split, Task

COPIES = "MULTI_GPU"  # accelerate's name of processes that have a whole policy each
WARM_START, WARM_ROWS = "warm_start", 5  # the kind of run, and the rows of one of its steps
SCHEMA = 2  # version of records; raised when the meaning of a record changes
SAME = ("seed", "max_steps", "learning_rate", "beta", "temperature", "max_completion_length", "save_steps")  # as TRL's

_KNOWN: dict[str, Any] = read_yaml(Path(__file__).with_name("plan.yaml"))
KINDS: dict[str, str] = _KNOWN["notebooks"]  # kind -> its notebook
READ = {kind: {name for kinds, names in _KNOWN["read"] if kind in kinds for name in names} for kind in KINDS}
# Values that mean "as before", by path in `Plan.values` from the kind of run on (of a part of a method by its `kind`).
SINCE = {f"{kind}.{path}": value for kinds, path, value in _KNOWN["since"] for kind in kinds}


@dataclass(frozen=True)
class Plan:
    """A run before it is made: its kind and parameters, and what follows from them.

    Attributes:
        kind: a key of :data:`KINDS`.
        params: the parameters.
        varied: the parameters that its grid varies beside task, method and seed; they are part of its label.
        asked: what its grid asks for, which a run of toy size has not.
    """

    kind: str
    params: Params
    varied: tuple[str, ...] = ()
    asked: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        params = self.params
        held_out = ["eval_split", *["validation_split"] * bool(params.validation_limit)]
        trains = params.max_steps if self.kind == "train" else params.at_step or self.kind == "one_step"
        for name in held_out:
            if trains and getattr(params, name) == params.train_split:
                raise ParameterError(f"train_split and {name} are both {params.train_split!r}: it cannot be held out.")
        if self.kind == "one_step":
            try:
                updates.of_one_step(params.compared)
            except ValueError as error:
                raise ParameterError(f"compared: {error}") from None
        if self.kind == WARM_START and not params.warm_steps:
            raise ParameterError("warm_steps: 0, and a warm start has some.")
        if params.world_seed and not self.embedded:
            raise ParameterError(f"world_seed: {params.world_seed} has no use: no model of the run is an embedded one.")

    @cached_property
    def warm(self) -> Plan | None:
        """The warm start whose policy is its starting policy, one for all seeds; None without one."""
        if self.training:
            return self.training.warm
        if self.kind == WARM_START or not self.params.warm_steps:
            return None
        return Plan(WARM_START, self.params.model_copy(update={"seed": 0, "at_step": 0}))

    @cached_property
    def taken(self) -> frozenset[str]:
        """The questions of its warm start, which are none of its own."""
        if not self.warm:
            return frozenset()
        params = self.warm.params
        rows = self.warm.load(params.train_split, WARM_ROWS * params.warm_steps).rows
        return frozenset(row.prompt for row in rows)

    @property
    def before(self) -> list[Plan]:
        """The runs that it starts from, in their order."""
        last = self.training or self.warm
        return [*last.before, last] if last else []

    @cached_property
    def training(self) -> Plan | None:
        """The training run whose policy is looked at; None where it is the starting policy, or this is that run."""
        if self.kind == "train" or not self.params.at_step:
            return None
        params = self.params
        theirs = {
            "task": params.trained_on or params.task,
            "seed": params.seed if params.training_seed is None else params.training_seed,
            "max_steps": params.at_step,
            **{"at_step": 0, "trained_on": None, "training_seed": None, "training_values": {}},
            **params.training_values,
        }
        return Plan("train", validate({**params.model_dump(), **theirs}, "parameters of its training"))

    @cached_property
    def task(self) -> Task:
        """The task."""
        params = self.params
        chosen, context = params.full_completion, params.context
        return get_task(params.task, reward=params.reward, full_completion=chosen, context=context)

    def load(self, split: str, limit: int, seed: int = 0) -> Split:
        """Return rows of a split of its task, in the order or of the draw that a seed decides in its world, of the
        revision, with the care for malformed rows and in the words that it asks for."""
        params = self.params
        own = {"revision": params.data_revision, "skip_malformed": params.skip_malformed}
        taken = self.taken if split == params.train_split else frozenset()
        seed = seeds.of_world(seed, params.world_seed)
        found = self.task.load(split, limit=limit + len(taken), seed=seed, **own)
        rows = (row.asked(params.prompt_template, params.system_prompt) for row in found.rows)
        return Split(tuple(row for row in rows if row.prompt not in taken)[:limit], found.source)

    @cached_property
    def accelerate_config(self) -> dict[str, Any]:
        """Accelerate's configuration of several processes that train together; empty for one process."""
        several = self.kind == "train" and self.params.processes > 1
        return read_yaml(accelerate_file(self.params.accelerate)) if several else {}

    @cached_property
    def method(self) -> Method:
        """The method with its constants, alpha, seed and the loss's own clip of the ratio bound."""
        row = self.params.resolved
        settings = {**PINNED, **BASES[row.base], **self.params.grpo}
        own = "clip" in self.params.method_options
        return row if own else row.clipped(settings["epsilon"], settings.get("epsilon_high"))

    @property
    def trainer(self) -> dict[str, Any]:
        """The settings of TRL's config that decide the run."""
        params = self.params
        share = params.group_size * params.prompts_per_step // params.processes
        at_once = params.micro_batch or share
        return {
            **PINNED,
            **{name: getattr(params, name) for name in SAME},
            "num_generations": params.group_size,
            "per_device_train_batch_size": at_once,
            "gradient_accumulation_steps": share // at_once,
            "bf16": params.dtype == "bfloat16",
            **BASES[self.method.base],
            **self.method.trl,
            **params.grpo,
        }

    @property
    def embedded(self) -> dict[str, str]:
        """The keys of the embedded models that it needs, by kind."""
        named = {"policy": self.params.policy, "entailment": self.params.entailment}
        return {
            kind: world.key(name, self.params.world_seed)
            for kind, name in named.items()
            if kind in READ[self.kind] and name in world.POLICIES
        }

    @cached_property
    def values(self) -> dict[str, Any]:
        """Every value that decides the result, resolved: what the id is a hash of."""
        task, trains = self.task, self.kind == "train"
        values = {
            "schema": SCHEMA,
            "kind": self.kind,
            "params": self.params.model_dump(mode="json", include=READ[self.kind]),
            "method": self.method.constants() if trains else None,
            "trainer": {key: one for key, one in self.trainer.items() if key not in ADDRESSES} if trains else None,
            **({"accelerate": self.accelerate_config} if self.accelerate_config else {}),
            "task": {
                "reward_range": list(task.reward_range),
                "reward_metric": task.reward_metric,
                "full_completion": task.full_completion,
            },
            "world": self.embedded,
            **({"warm_start": self.warm.values} if self.warm else {}),
            **({"training": self.training.values} if self.training else {}),
            **({"one_step": self._one_step} if self.kind == "one_step" else {}),
        }
        return dict(_without_as_before(values, self.kind))

    @property
    def _one_step(self) -> dict[str, Any]:
        """Constants of the methods and settings of the optimiser that one step reads."""
        methods = updates.of_one_step(self.params.compared)
        optimiser = ("max_grad_norm", "adam_beta2", "adam_epsilon")
        constants = {name: row.constants() for name, row in methods.items()}
        return {"methods": constants, **{key: self.trainer[key] for key in optimiser}}

    @cached_property
    def id(self) -> str:
        """task-method-seed-hash for training, task-kind-seed-hash for others."""
        name = self.params.method.rpartition(":")[2] if self.kind == "train" else self.kind
        return f"{self.params.task}-{name}-{self.params.seed}-{digest(self.values)}"

    @property
    def folder(self) -> Path:
        """Folder of the run's record."""
        return paths.OUTPUTS / self.params.profile / "runs" / self.id

    @property
    def label(self) -> str:
        """Label of the run in tables."""
        return label(self.kind, self.params.model_dump(), self.varied)


def with_others(plans: Sequence[Plan]) -> list[Plan]:
    """Return runs, and after them those that they start from."""
    return [*plans, *(one for plan in plans for one in plan.before)]


def quarters(max_steps: int) -> list[int]:
    """Return the steps at 0, 25, 50, 75 and 100 % of a training."""
    return sorted({round(quarter * max_steps / 4) for quarter in range(5)})


def _without_as_before(value: Any, path: str) -> Any:
    """Resolved values without those of :data:`SINCE` that mean "as before"."""
    if isinstance(value, list):
        paths_of = [f"{path}.{one.get('part')}" if isinstance(one, dict) else path for one in value]
        return [_without_as_before(one, place) for one, place in zip(value, paths_of, strict=True)]
    if not isinstance(value, dict):
        return value
    inside = {key: _without_as_before(one, f"{path}.{key}") for key, one in value.items()}
    missing = object()  # equal to no value
    return {key: one for key, one in inside.items() if SINCE.get(f"{path}.{key}", missing) != one}


def digest(values: dict[str, Any]) -> str:
    """Return the hash of resolved values that ends a run's id."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def recorded(params: Mapping[str, Any], key: str) -> Any:
    """Return a parameter of a record, which may be older than the parameter: it ran with what is now its default."""
    return params.get(key, Params.model_fields[key].default)


def label(kind: str, params: Mapping[str, Any], varied: Sequence[str] = ()) -> str:
    """Return the label of a run in tables: its kind, "no training", or its method, with what its grid varies."""
    if kind == "train" and not params["max_steps"]:
        name, shown = "no training", [key for key in varied if key != "max_steps"]
    else:
        name, shown = params["method"] if kind == "train" else kind, list(varied)
        if kind == "evaluate" and params["at_step"]:
            name += f" {params['method']}"
    settings: dict[str, Any] = {}
    for key in shown:
        value = recorded(params, key)
        settings = settings | (value if isinstance(value, dict) else {key: value}) | settings  # its own go first
    return " ".join([name, *(f"{key}={value}" for key, value in settings.items())])
