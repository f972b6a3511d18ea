"""Parameters of a run: read from YAML files and notebooks, checked before any work starts.

pydantic checks types and ranges; what it cannot know stands here: fields of TRL's GRPOConfig (``grpo``, by grpo.yaml),
secrets, values by task, and values that do not go together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.type_adapter import TypeAdapter

from gcpo import world
from gcpo.errors import nearest
from gcpo.methods import Method, get_method
from gcpo.runs.profiles import ParameterError, is_file_name, load_profile, read_yaml
from gcpo.tasks import TASKS, check_task, get_task

# Keys that no mapping from task to value can give.
WHOLE = ("grpo", "method_options", "chat_template_kwargs", "task", "trained_on", "training_values")
LENGTHS = ("short", "solution")  # lengths of a task's answers: keys beside names of tasks

KNOWN: dict[str, Any] = read_yaml(Path(__file__).with_name("grpo.yaml"))
PINNED: dict[str, Any] = KNOWN["pinned"]
WRITTEN: dict[str, Any] = KNOWN["written"]
ADDRESSES = frozenset(KNOWN["addresses"].split())
BOUNDS = {name: Field(**bounds) for bounds, names in KNOWN["ranges"] for name in names.split()}
REFUSED = {
    parameter: {name: why for why, names in reasons.items() for name in names.split()}
    for parameter, reasons in KNOWN["refused"].items()
}

# Texts that nobody is to read: user:password@host, and tokens in URLs, in headers, or by what they begin with.
SECRET = re.compile(
    r"(?i)(?::/{2}(?:[^/\s@]+|[^/\s:@]+:(?!\d*/)[^\s@]+)|^[^/\s:@]+:[^/\s@]+)@"
    r"|[?&;#](?:[\w-]*[_-])?(?:token|key|apikey|secret|password|passwd|pwd|sig|signature|credential)=[^&\s]"
    r"|\bauthorization\W{1,4}\w+\s+\S{8}|\bbearer\s+[\w.~+/-]{16}"
    r"|\b(?:hf_|gh[pousr]_|github_pat_|glpat-)\w{20}|\bsk-(?=[\w-]*\d)[\w-]{20}"
)
_SECRET_KEY = re.compile(r"(?i)(.+[_-])?(api[_-]?key|authorization|passw(or)?d|secret)|((access|auth|hf)[_-])?token")


def refuse_secrets(value: Any, where: str = "", key: str = "") -> None:
    """Raise :class:`ParameterError` that names the key, and not the value, of a text with a password or a token."""
    if isinstance(value, str):
        name = key.rpartition(".")[2]
        if SECRET.search("://" * (name in ADDRESSES) + value) or (value and _SECRET_KEY.fullmatch(name)):
            why = "a password or token, which every record would keep: set it in the environment"
            raise ParameterError(f"{where}{key or 'a key'}: {why}")
    elif isinstance(value, Mapping):
        for name, one in value.items():
            refuse_secrets(name, where, key)
            refuse_secrets(one, where, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for one in value:
            refuse_secrets(one, where, key)


def _number(value: Any) -> Any:
    """Refuse a truth value, which pydantic would read as 0 or 1."""
    if isinstance(value, bool):
        raise ValueError("Input should be a number")
    return value


def _known(refused: Mapping[str, str], given: dict[str, Any], valid: Iterable[str] = ()) -> dict[str, Any]:
    """Return a mapping none of whose names is refused, after the reason why, or unknown among valid ones, if any."""
    for name in given:
        if name in refused:
            raise ValueError(f"{name!r} {refused[name]}")
        if valid and name not in valid:
            raise ValueError(f"there is no {name!r}.{nearest(name, valid)[:200]}")
    return given


def _grpo_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields of GRPOConfig as values of the types that TRL declares, within their ranges."""
    from transformers import GenerationConfig  # seconds to import, so only when used
    from trl import GRPOConfig

    kinds = get_type_hints(GRPOConfig) | {"alpha_end": float | None, "drop_equal_groups": bool}  # GCPOConfig's own
    own = dict.fromkeys(Params.model_fields, "is set by the parameter of that name: set that instead")
    _known(own | REFUSED["grpo"], fields, sorted(kinds))
    found = {name: _typed(name, value, kinds[name]) for name, value in fields.items()}
    names = () if found.get("use_vllm") else sorted(vars(GenerationConfig()))  # vLLM has others
    _known(REFUSED["generation_kwargs"], found.get("generation_kwargs") or {}, names)
    return found


def _typed(name: str, value: Any, kind: Any) -> Any:
    kinds = get_args(kind) or (kind,)
    if str in kinds and dict in [get_origin(one) or one for one in kinds]:
        kind = dict[str, Any] | None  # a text would be JSON, or a file, that no record has
    try:
        if bool not in kinds and {int, float}.intersection(kinds):
            _number(value)
        kind = Annotated[kind, BOUNDS[name]] if name in BOUNDS else kind
        return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValueError as error:
        message = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ValueError(f"{name}: {message} (got {value!r:.400})") from None


def _not_reserved(name: str) -> str:
    if name in ("reference", "world"):
        raise ValueError(f"outputs/{name} has another use; choose another name")
    return name


def _path_or_name(name: str) -> str:
    """Return a path as seen from here, since notebooks work in another folder; a name as it is."""
    path = Path(name).expanduser() if name.startswith("~/") else Path(name)
    if not name.startswith(("./", "../", "~/")) and (world.embedded(name, "policy") or not path.exists()):
        return name
    if (path / "adapter_config.json").exists():
        raise ValueError(
            "it holds LoRA adapters, and no record would say what they are put on: merge the two (peft's "
            "merge_and_unload), save the whole model (save_pretrained), and take its folder"
        )
    return str(path.resolve())


def _constant(value: Any) -> Any:
    """Return a text that stands for a number as that number: papermill reads 5e-5, by YAML 1.1, as a text."""
    for one in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(one, str | int | float | None):
            raise ValueError(f"{one!r:.400} is no number, word or list of them")
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _value_for(task: str, key: str, values: Mapping[str, Any]) -> Any:
    """Return the value for a task: its own, that of the length of its answers, or the default."""
    if unknown := [str(name) for name in values if name not in (*TASKS, *LENGTHS, "default")]:
        raise ValueError(f"{key}: unknown task {unknown[0]!r}.{nearest(unknown[0], TASKS)}")
    length = get_task(task).answer_length if task in TASKS else ""
    for name in (task, length, "default"):
        if name in values:
            return values[name]
    raise ValueError(
        f"{key}: no value for task {task!r}, {length!r} answers, and no default, only for {', '.join(values)}"
    )


Whole = Annotated[int, BeforeValidator(_number)]
Real = Annotated[float, BeforeValidator(_number)]
Positive = Annotated[Whole, Field(gt=0)]
Count = Annotated[Whole, Field(ge=0)]
Steps = Annotated[Whole, Field(ge=0, le=10**7)]
Number = Annotated[Real, Field(ge=0, allow_inf_nan=False)]
Seed = Annotated[Whole, Field(ge=0, lt=2**32)]  # numpy's range
Fraction = Annotated[Real, Field(ge=0, le=1)]
TaskName = Annotated[str, AfterValidator(check_task)]
PathOrName = Annotated[str, Field(min_length=1), AfterValidator(_path_or_name)]
TemplateOptions = Annotated[dict[str, Any], AfterValidator(partial(_known, REFUSED["chat_template_kwargs"]))]


class Params(BaseModel):
    """Every parameter of a run; the defaults are the smoke profile.

    In a file, any value but ``task``, ``trained_on``, ``method_options``, ``chat_template_kwargs`` and ``grpo`` may be
    a mapping from task to value, with ``short`` and ``solution`` for the other tasks whose answers are so long
    (``Task.answer_length``), and ``default`` for the rest.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)

    profile: Annotated[str, Field(pattern=r"^[\w-]{1,60}$"), AfterValidator(_not_reserved)] = "smoke"
    """names the folder of outputs"""
    task: TaskName = "tinyqa"
    """a name in gcpo.tasks.TASKS"""
    method: str = "gcpo_bot"
    """a name in gcpo.methods.METHODS"""
    method_options: dict[str, Annotated[Any, AfterValidator(_constant)]] = {}
    """constants of the method"""
    seed: Seed = 0
    """of everything random in the run"""

    policy: PathOrName = "tiny"
    """starting policy: path, Hub name or a name in gcpo.world.POLICIES"""
    world_seed: Count = 0
    """seed that draws the embedded world: tiny policies, entailment model"""
    policy_revision: str | None = None
    """commit or branch of a policy on the Hub"""
    lora_rank: Count = Field(0, le=1024)
    """of LoRA adapters, which alone are trained; 0 trains all weights"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the policy's weights"""
    system_prompt: str | None = None
    """the system's message, before every question"""
    # A template without a part would make one of all questions.
    prompt_template: Annotated[str, Field(pattern=r"(^|\W)\{[a-z]+\}")] | None = None
    """the user's message: {prompt} is the task's own, {problem}, {question}, {context} ... its parts"""
    chat_template_kwargs: TemplateOptions = {}
    """what the policy's chat template is given beside messages, such as enable_thinking"""
    context: Literal["text", "evidence", "supporting"] = "text"
    """a question's context: the text; first what annotators marked in it (qasper); or only the passages that matter"""
    warm_steps: Steps = 0
    """supervised steps that make the policy answer shortly first, on training questions that no other run then sees"""
    embedder: PathOrName = "all-MiniLM-L6-v2"
    """sentence-transformers path or Hub name"""
    entailment: PathOrName = "tiny"
    """sequence classifier: "tiny", path or Hub name; or a rule in its place: token_f1, cosine"""
    entailment_threshold: Fraction = 0.35
    """to join a cluster (GCPO App. E.3)"""
    entailment_error: Fraction = 0.0
    """share of pairs that the entailment model is made to get wrong"""

    reward: Literal["metric", "binary"] = "metric"
    """the task's metric, or right and wrong alone"""
    format_reward: Literal["think", "think_answer"] | None = None
    """tags that a completion is rewarded for beside its answer (CW-GRPO App. C)"""
    format_weight: Number = 1.0
    """weight of that reward; the answer's, as large, has 1"""
    full_completion: bool | None = None
    """embed and cluster whole completions, not answers; as the task does it if null"""
    alpha: Number | None = None
    """alpha_base; the method's own if null (GCPO App. E.3: 0.6)"""
    equalize_mean: bool = False
    """divide weights by their mean over the batch"""
    group_size: Whole = Field(4, ge=2, le=4096)
    """G, responses per prompt"""
    prompts_per_step: Positive = Field(2, le=10**5)
    """prompts per optimiser step"""
    micro_batch: Count = 0
    """completions per forward and backward pass; 0 is all that a process has"""
    share_prompts: bool = False
    """read a prompt once for all its answers, and take their gradients in one pass: faster, with other last bits"""
    processes: Positive = 1
    """that train together, one per GPU; accelerate starts more than one"""
    accelerate: PathOrName = "ddp"
    """how several share the policy: a file of params/accelerate, or a path"""
    max_steps: Steps = 4
    """optimiser steps; 0 evaluates the starting policy"""
    learning_rate: Number = Field(1e-3, le=1)
    """of AdamW"""
    beta: Number = 0.0
    """weight of the KL term"""
    temperature: Real = Field(0.9, ge=1e-6, le=100)
    """of sampling, in training and evaluation"""
    max_completion_length: Positive = 16
    """tokens"""
    save_steps: Positive = Field(2, le=10**7)
    """steps between checkpoints"""
    grpo: Annotated[dict[str, Any], AfterValidator(_grpo_fields)] = {}
    """any other field of TRL's GRPOConfig; or alpha_end, drop_equal_groups of GCPOConfig"""
    report_to: str = "none"
    """a tracker that transformers knows: trackio, wandb, tensorboard ..."""

    train_split: str = "train"
    """split to train on"""
    train_limit: Positive = 200
    """prompts of it"""
    validation_split: str = "validation"
    """held-out split that is looked at while training"""
    validation_limit: Count = 8
    """questions of it, asked at 0, 25, 50, 75 and 100 % of the steps; 0 for none"""
    eval_split: str = "test"
    """held-out split"""
    eval_limit: Whole = Field(16, ge=2)
    """questions of it, for evaluation and gradient statistics"""
    eval_samples: Count = 2
    """sampled answers per question beside the greedy one"""
    data_revision: str | None = None
    """commit of the data set on the Hub"""
    skip_malformed: bool = False
    """leave out, and count, malformed rows, and training questions that are held out"""
    at_step: Steps = 0
    """optimiser steps of ``method`` before the policy is looked at"""
    trained_on: TaskName | None = None
    """the task of that training, if another than ``task``"""
    training_seed: Seed | None = None
    """of the training whose policy is looked at; the run's if null"""
    training_values: dict[str, Any] = {}
    """of that training's parameters, those that its task has others of; found where given by task"""
    gradient_parameters: list[str] | None = None
    """patterns of names for V(q) and for one step; all that train if null"""
    memory_limit: Annotated[Real, Field(gt=0, allow_inf_nan=False)] | None = None
    """GB that gradients may take beside the policy; if null, three quarters of what is free"""
    compared: list[str] = ["gcpo_bot", "gcpo_cd", "rd_only", "se"]
    """methods whose first step is compared with GRPO's"""
    step_batches: Positive = Field(4, le=10**5)
    """batches of that step, of prompts_per_step each"""
    reward_noise: Fraction = 0.0
    """share of their questions that get the rewards of another question's answers (GCPO App. F.1)"""
    noise_among: Literal["all", "dispersed"] = "all"
    """which of them may: all, or a batch's third with the largest CD"""

    @model_validator(mode="before")
    @classmethod
    def _for_its_task(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Replace each mapping from task to value by the value for the task; ``training_values`` get those of
        ``trained_on`` that are others."""
        refuse_secrets(values)
        by_task = {key: value for key, value in values.items() if isinstance(value, Mapping) and key not in WHOLE}

        def chosen(task: Any) -> dict[str, Any]:
            return {key: _value_for(str(task), key, value) for key, value in by_task.items()}

        resolved = chosen(values.get("task", cls.model_fields["task"].default))
        if by_task and (trained_on := values.get("trained_on")):
            others = {key: value for key, value in chosen(trained_on).items() if value != resolved[key]}
            resolved["training_values"] = {**others, **values.get("training_values", {})}
        return {**values, **resolved}

    @model_validator(mode="after")
    def _possible(self) -> Params:
        try:
            self.resolved  # noqa: B018 (it raises)
        except ValueError as error:
            raise ValueError(f"method: {error}") from None
        except TypeError as error:  # a constant of another type, or a parameter of its own, such as alpha
            raise ValueError(f"method_options: {self.method_options} cannot be set there ({error})") from None
        for name in ("trained_on", "training_seed"):
            if getattr(self, name) is not None and not self.at_step:
                raise ValueError(f"{name}: says whose policy is looked at, and at_step after how many steps: set both")
        completions = self.group_size * self.prompts_per_step
        for name, divisor in (("processes", self.processes), ("micro_batch", self.processes * (self.micro_batch or 1))):
            if completions % divisor:
                raise ValueError(
                    f"{name}: {getattr(self, name)} does not divide the completions of a step, {completions} "
                    f"(group_size x prompts_per_step) among {self.processes} processes"
                )
        self._check_checkpoints(completions // self.processes)
        return self

    @cached_property
    def resolved(self) -> Method:
        """The method with its constants, alpha and seed bound: everything else of a run takes it from here."""
        return get_method(self.method, alpha=self.alpha, seed=self.seed, **self.method_options)

    def _check_checkpoints(self, share: int) -> None:
        """Refuse checkpoints amid the steps that TRL takes on one generation: going on from one, it samples anew.

        TRL counts backward passes, from zero again after each start (``GRPOTrainer._prepare_inputs``).
        """
        at_once = self.micro_batch or share
        passes = share // at_once  # of a step
        batch = self.grpo.get("generation_batch_size") or 0
        generation = self.grpo.get("steps_per_generation") or batch // (at_once * self.processes) or passes
        generation *= self.grpo.get("num_iterations", 1)
        if self.save_steps < max(self.max_steps, self.at_step) and self.save_steps * passes % generation:
            steps = generation // math.gcd(generation, passes)
            raise ValueError(
                f"save_steps: a run that goes on from step {self.save_steps} would sample anew amid a generation; use "
                f"a multiple of {steps} (by num_iterations and steps_per_generation of grpo)"
            )


def validate(values: Mapping[str, Any], source: str = "parameters") -> Params:
    """Check values and fill in defaults.

    Raises:
        ParameterError: listing every problem with its key and value, and the nearest valid name for unknown keys.
    """
    try:
        return Params.model_validate(dict(values))
    except ValidationError as error:
        problems = []
        for detail in error.errors(include_url=False):
            key = ".".join(map(str, detail["loc"]))
            message = detail["msg"].removeprefix("Value error, ")
            if detail["type"] == "extra_forbidden":
                message = f"unknown parameter.{nearest(key, Params.model_fields)}"
            elif key and not isinstance(detail["input"], Mapping):
                message += f" (got {detail['input']!r:.400})"
            problems.append(f"{key}: {message}" if key else message)
        raise ParameterError(f"Bad {source}: " + "\n  ".join(problems)) from None


def from_notebook(namespace: Mapping[str, Any]) -> Params:
    """Return the parameters of a notebook: every plain value in its globals, as its cell and papermill set them.

    Called before the notebook defines anything else, it also catches what papermill only warns of: a misspelt name.
    """
    plain = (str, int, float, bool, list, dict, tuple, type(None))
    own = {name: value for name, value in namespace.items() if not name.startswith("_") and name not in ("In", "Out")}
    return validate({name: one for name, one in own.items() if isinstance(one, plain)}, "notebook parameters")


def profile_name(profile: str) -> str:
    """Return the name that runs of a profile go by: the name itself, or what a file given by its path says."""
    return validate(load_profile(profile), profile).profile if is_file_name(profile) else profile
