"""Parameters of a run: read from YAML files and notebooks, checked before any work starts."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from gcpo import world
from gcpo.errors import nearest
from gcpo.methods import Method, get_method
from gcpo.runs.fields import TEMPLATE, no_truth, refuse_secrets, typed
from gcpo.runs.profiles import NAME, ParameterError, is_file_name, load_profile, plain_name, sharing
from gcpo.tasks import check_task, get_task
from gcpo.tasks.base import parts_of

# Keys that no mapping from task to value can give.
WHOLE = ("grpo", "method_options", "chat_template_kwargs", "task", "trained_on", "training_values")
LENGTHS = ("short", "solution")  # lengths of a task's answers: keys beside names of tasks


Whole = Annotated[int, BeforeValidator(no_truth)]
Real = Annotated[float, BeforeValidator(no_truth)]
Positive = Annotated[Whole, Field(gt=0)]
Count = Annotated[Whole, Field(ge=0)]
Steps = Annotated[Whole, Field(ge=0, le=10**7)]
Number = Annotated[Real, Field(ge=0, allow_inf_nan=False)]
Seed = Annotated[Whole, Field(ge=0, lt=2**32)]  # numpy's range
Share = Annotated[Real, Field(ge=0, le=1)]
LISTED = 10  # problems of one source that a message names


def _not_reserved(name: str) -> str:
    if name in ("reference", "world"):
        raise ValueError(f"outputs/{name} has another use; choose another name")
    return name


def _model(name: str) -> str:
    """Return a path as seen from here, since notebooks work in another folder; a name as it is."""
    here, adapters = name.startswith(("./", "../", "~/")), False
    with contextlib.suppress(OSError, ValueError):  # too long for a path, or with a NUL in it
        here = here or (not world.embedded(name, "policy") and Path(name).exists())
        adapters = here and Path(name, "adapter_config.json").expanduser().exists()
    if adapters:
        raise ValueError(
            "it holds LoRA adapters, and no record would say what they are put on: merge the two (peft's "
            "merge_and_unload), save the whole model (save_pretrained), and take its folder"
        )
    return _resolved(name) if here else name


def _absolute_file(name: str) -> str:
    return _resolved(name) if is_file_name(name) else name


def _resolved(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _with_a_part(template: str) -> str:
    parts_of(template)
    return template


def _known_tracker(name: str) -> str:
    if name != "none":  # the machine of the run must have it installed, not this one
        from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

        if name not in INTEGRATION_TO_CALLBACK:
            raise ValueError(f"no tracker {name!r}.{nearest(name, ['none', *INTEGRATION_TO_CALLBACK])}")
    return name


def _to_template(values: dict[str, Any]) -> dict[str, Any]:
    if both := sorted(TEMPLATE & values.keys()):
        raise ValueError(f"{both[0]} is what a run gives the chat template itself: leave it out")
    return values


def _known_grpo(fields: dict[str, Any]) -> dict[str, Any]:
    return typed(fields, Params.model_fields)


def _value_for(task: str, key: str, values: Mapping[str, Any]) -> Any:
    """Return the value for a task: its own, that of the length of its answers, or the default."""
    try:
        for name in values.keys() - {"default", *LENGTHS}:
            check_task(str(name))
        length = "" if values.keys().isdisjoint(LENGTHS) else get_task(task).answer_length
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    for name in (task, length, "default"):
        if name in values:
            return values[name]
    whose = f"task {task!r}" + (f", {length!r} answers," if length else "")
    raise ValueError(f"{key}: no value for {whose} and no default, only for {', '.join(map(str, values))}")


def _constants(options: dict[str, Any]) -> dict[str, Any]:
    """Return constants of a method, a text that stands for a number as that number.

    papermill reads parameter files by YAML 1.1, for which 5e-5 is a text.
    """
    for name, value in options.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(one, str | int | float | None):
                raise ValueError(f"{name} is {value!r}: a number, a word or a list of them is wanted")
    return {name: _number_if_any(value) for name, value in options.items()}


def _number_if_any(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


ProfileName = Annotated[str, Field(pattern=f"^{NAME}$"), AfterValidator(_not_reserved)]
TaskName = Annotated[str, AfterValidator(check_task)]
ModelName = Annotated[str, Field(min_length=1), AfterValidator(_model)]
Sharing = Annotated[str, AfterValidator(_absolute_file)]
Tracker = Annotated[str, AfterValidator(_known_tracker)]
Constants = Annotated[dict[str, Any], AfterValidator(_constants)]
Template = Annotated[str, AfterValidator(_with_a_part)]
ConfigFields = Annotated[dict[str, Any], AfterValidator(_known_grpo)]
ForTemplate = Annotated[dict[str, Any], AfterValidator(_to_template)]


class Params(BaseModel):
    """Every parameter of a run; the defaults are the smoke profile.

    In a file, any value but ``task``, ``trained_on``, ``method_options``, ``chat_template_kwargs`` and ``grpo`` may be
    a mapping from task to value, with ``short`` and ``solution`` for the other tasks whose answers are so long
    (``Task.answer_length``), and ``default`` for the rest.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    profile: ProfileName = Field("smoke", description="names the folder of outputs")
    task: TaskName = Field("tinyqa", description="a name in gcpo.tasks.TASKS")
    method: str = Field("gcpo_bot", description="a name in gcpo.methods.METHODS")
    method_options: Constants = Field({}, description="constants of the method")
    seed: Seed = Field(0, description="of everything random in the run")

    policy: ModelName = Field("tiny", description="starting policy: path, Hub name or a name in gcpo.world.POLICIES")
    world_seed: Count = Field(0, description="seed that draws the embedded world: tiny policies, entailment model")
    policy_revision: str | None = Field(None, description="commit or branch of a policy on the Hub")
    lora_rank: Count = Field(0, le=1024, description="of LoRA adapters, which alone are trained; 0 trains all weights")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the policy's weights")
    system_prompt: str | None = Field(None, description="the system's message, before every question")
    prompt_template: Template | None = Field(
        None,
        description="the user's message: {prompt} is the task's own, {problem}, {question}, {context} ... its parts",
    )
    chat_template_kwargs: ForTemplate = Field(
        {}, description="what the policy's chat template is given beside messages, such as enable_thinking"
    )
    context: Literal["text", "evidence"] = Field(
        "text", description="a question's context: the text, or first what annotators marked in it (qasper)"
    )
    embedder: ModelName = Field("all-MiniLM-L6-v2", description="sentence-transformers path or Hub name")
    entailment: ModelName = Field("tiny", description='sequence classifier: path, Hub name or "tiny"')
    entailment_threshold: Share = Field(0.35, description="to join a cluster (GCPO App. E.3)")
    entailment_error: Share = Field(0.0, description="share of pairs that the entailment model is made to get wrong")

    reward: Literal["metric", "binary"] = Field("metric", description="the task's metric, or right and wrong alone")
    format_reward: Literal["think", "think_answer"] | None = Field(
        None, description="tags that a completion is rewarded for beside its answer (CW-GRPO App. C)"
    )
    format_weight: Number = Field(1.0, description="weight of that reward; the answer's, as large, has 1")
    full_completion: bool | None = Field(
        None, description="embed and cluster whole completions, not answers; as the task does it if null"
    )
    alpha: Number | None = Field(None, description="alpha_base; the method's own if null (GCPO App. E.3: 0.6)")
    equalize_mean: bool = Field(False, description="divide weights by their mean over the batch")
    group_size: Whole = Field(4, ge=2, le=4096, description="G, responses per prompt")
    prompts_per_step: Positive = Field(2, le=10**5, description="prompts per optimiser step")
    micro_batch: Count = Field(0, description="completions per forward and backward pass; 0 is all that a process has")
    share_prompts: bool = Field(
        False,
        description="read a prompt once for all its answers, and take their gradients in one pass: faster, with other "
        "last bits",
    )
    processes: Positive = Field(1, description="that train together, one per GPU; accelerate starts more than one")
    accelerate: Sharing = Field(
        "ddp", description="how several share the policy: a file of params/accelerate, or a path"
    )
    max_steps: Steps = Field(4, description="optimiser steps; 0 evaluates the starting policy")
    learning_rate: Number = Field(1e-3, le=1, description="of AdamW")
    beta: Number = Field(0.0, description="weight of the KL term")
    temperature: Real = Field(0.9, ge=1e-6, le=100, description="of sampling, in training and evaluation")
    max_completion_length: Positive = Field(16, description="tokens")
    save_steps: Positive = Field(2, le=10**7, description="steps between checkpoints")
    grpo: ConfigFields = Field({}, description="any other field of TRL's GRPOConfig")
    report_to: Tracker = Field("none", description="a tracker that transformers knows: trackio, wandb, tensorboard ...")

    train_split: str = Field("train", description="split to train on")
    train_limit: Positive = Field(200, description="prompts of it")
    validation_split: str = Field("validation", description="held-out split that is looked at while training")
    validation_limit: Count = Field(
        8, description="questions of it, asked at 0, 25, 50, 75 and 100 % of the steps; 0 for none"
    )
    eval_split: str = Field("test", description="held-out split")
    eval_limit: Whole = Field(16, ge=2, description="questions of it, for evaluation and gradient statistics")
    eval_samples: Count = Field(2, description="sampled answers per question beside the greedy one")
    engine: Literal["transformers", "vllm"] = Field(
        "transformers", description="what generates the answers of evaluations and of gradient statistics"
    )
    data_revision: str | None = Field(None, description="commit of the data set on the Hub")
    skip_malformed: bool = Field(
        False, description="leave out, and count, malformed rows, and training questions that are held out"
    )
    at_step: Steps = Field(0, description="optimiser steps of ``method`` before the policy is looked at")
    trained_on: TaskName | None = Field(None, description="the task of that training, if another than ``task``")
    training_seed: Seed | None = Field(None, description="of the training whose policy is looked at; the run's if null")
    training_values: dict[str, Any] = Field(
        {}, description="of that training's parameters, those that its task has others of; found where given by task"
    )
    gradient_parameters: list[str] | None = Field(
        None, description="patterns of names for V(q) and for one step; all that train if null"
    )
    memory_limit: Annotated[Real, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="GB that gradients may take beside the policy; if null, three quarters of what is free"
    )
    compared: list[str] = Field(
        ["gcpo_bot", "gcpo_cd", "rd_only", "se"], description="methods whose first step is compared with GRPO's"
    )
    step_batches: Positive = Field(4, le=10**5, description="batches of that step, of prompts_per_step each")

    @model_validator(mode="before")
    @classmethod
    def _for_task(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        refuse_secrets(values)
        task = str(values.get("task", cls.model_fields["task"].default))
        by_task = [key for key, value in values.items() if isinstance(value, Mapping) and key not in WHOLE]
        found = {**values, **{key: _value_for(task, key, values[key]) for key in by_task}}
        if by_task and (trained_on := values.get("trained_on")):
            theirs = {key: _value_for(str(trained_on), key, values[key]) for key in by_task}
            others = {key: value for key, value in theirs.items() if value != found[key]}
            found["training_values"] = {**others, **values.get("training_values", {})}
        return found

    @model_validator(mode="after")
    def _possible(self) -> Params:
        if both := {"alpha", "seed", "name"} & self.method_options.keys():
            raise ValueError(f"method_options: {min(both)} is a parameter of its own; set that instead")
        try:
            permuted = self.resolved.permuted
        except ValueError as error:
            raise ValueError(f"method: {error}") from None
        except TypeError as error:  # a part takes a constant for what it is not
            raise ValueError(f"method_options: {self.method_options} has a value of the wrong type ({error})") from None
        if self.train_limit < self.prompts_per_step:
            raise ValueError(
                f"train_limit: {self.train_limit} questions are fewer than the {self.prompts_per_step} of a step "
                "(prompts_per_step)"
            )
        for name in ("trained_on", "training_seed"):
            if getattr(self, name) is not None and not self.at_step:
                raise ValueError(f"{name}: says whose policy is looked at, and at_step after how many steps: set both")
        if self.processes > 1:
            sharing(self.accelerate)
        completions = self.group_size * self.prompts_per_step
        if completions % self.processes:
            raise ValueError(f"processes: {self.processes} do not divide the {completions} completions of a step")
        share = completions // self.processes
        if self.micro_batch and share % self.micro_batch:
            whose = "a step" if self.processes == 1 else f"a step that each of {self.processes} processes has"
            raise ValueError(f"micro_batch: {self.micro_batch} does not divide the {share} completions of {whose}")
        if self.micro_batch and "gradient_accumulation_steps" in self.grpo:
            raise ValueError("micro_batch: it sets gradient_accumulation_steps, which grpo sets too; keep one")
        self._checkpoints_between_generations(share)
        if permuted and self.prompts_per_step < 2:
            raise ValueError(f"prompts_per_step: {self.method} permutes weights across groups and needs at least 2")
        return self

    @cached_property
    def resolved(self) -> Method:
        """The method with its constants, alpha and seed bound: everything else of a run takes it from here."""
        return get_method(self.method, alpha=self.alpha, seed=self.seed, **self.method_options)

    def model_copy(self, **options: Any) -> Params:
        """Return a copy, whose method is resolved anew."""
        copied = super().model_copy(**options)
        copied.__dict__.pop("resolved", None)
        return copied

    def _checkpoints_between_generations(self, share: int) -> None:
        """Refuse checkpoints amid the steps that TRL takes on one generation: going on from one, it samples anew.

        TRL counts backward passes, from zero again after each start (``GRPOTrainer._prepare_inputs``).
        """
        grpo = {key: value for key, value in self.grpo.items() if isinstance(value, int)}
        at_once = self.micro_batch or share
        passes = grpo.get("gradient_accumulation_steps", share // at_once)  # passes of a step
        batch = grpo.get("generation_batch_size", 0) // (at_once * self.processes)
        generation = (grpo.get("steps_per_generation") or batch or passes) * grpo.get("num_iterations", 1)
        if self.save_steps < max(self.max_steps, self.at_step) and self.save_steps * passes % generation:
            steps = generation // math.gcd(generation, passes)
            raise ValueError(
                f"save_steps: a run that goes on from step {self.save_steps} would sample anew amid a generation; use "
                f"a multiple of {steps}, as {-(-self.save_steps // steps) * steps} (by num_iterations and "
                "steps_per_generation of grpo)"
            )


def validate(values: Mapping[str, Any], source: str = "parameters") -> Params:
    """Check values and fill in defaults.

    Raises:
        ParameterError: listing every problem with its key and value, and the nearest valid name for unknown keys.
    """
    try:
        return Params.model_validate(dict(values))
    except ValidationError as error:
        problems, details = [], error.errors(include_url=False)
        for detail in details[:LISTED]:
            key = ".".join(map(str, detail["loc"]))
            message = detail["msg"].removeprefix("Value error, ")
            if detail["type"] == "extra_forbidden":
                message = f"unknown parameter.{nearest(key, Params.model_fields)}"
            elif key and "input" in detail and not isinstance(detail["input"], Mapping):
                message += f" (got {detail['input']!r:.400})"
            problems.append(f"{key[:100] + ': ' if key else ''}{message[:4000]}")
        problems += [f"and {len(details) - LISTED} more"] * (len(details) > LISTED)
        listed = f" {problems[0]}" if len(problems) == 1 else "".join(f"\n  {problem}" for problem in problems)
        raise ParameterError(f"Bad {source}:{listed}") from None


def schema() -> dict[str, Any]:
    """Return the JSON schema of a parameter file, for editors: ``params/schema.json``, written by
    ``python -m gcpo.runs.params``."""
    made = Params.model_json_schema()
    for key, value in made["properties"].items():
        if key not in WHOLE:
            about = {name: value.pop(name) for name in ("description", "default") if name in value}
            for_each_task = {"type": "object", "additionalProperties": value}
            made["properties"][key] = {**about, "anyOf": [value, for_each_task]}
    return made


def from_notebook(namespace: Mapping[str, Any]) -> Params:
    """Return the parameters of a notebook: every plain value in its globals, as its cell and papermill set them.

    Called before the notebook defines anything else, it also catches what papermill only warns of: a misspelt name.
    """
    plain = (str, int, float, bool, list, dict, tuple, type(None))
    own = {name: value for name, value in namespace.items() if not name.startswith("_") and name not in ("In", "Out")}
    values = {name: value for name, value in own.items() if isinstance(value, plain)}
    return validate(values, "notebook parameters")


def profile_name(profile: str) -> str:
    """Return the name that runs of a profile go by: the name itself, or what a file given by its path says."""
    if is_file_name(profile):
        return validate(load_profile(profile), profile).profile
    return plain_name(profile, "profile")


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
