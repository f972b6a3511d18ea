"""Estimates of a run on a GPU, before it is started: memory, disk, tokens and hours.

Estimates, from counting and from the numbers of ``estimates.yaml``, where each has its source; notebook 29 compares
them with steps on an H200. What ``benchmarks/gpu_check.py`` has measured on this machine's replaces the shares and
seconds that were chosen (:func:`measured`). Units: bytes, seconds; GB are 10^9 bytes.

*Memory* of training, at its highest: weights, of which adapters train a part; a gradient and two Adam states for each
weight that is trained, in its type; a copy of the policy for the KL term, unless adapters can be switched off instead;
the embedder and the entailment model; and the larger of these two, which do not coincide:

- generation keeps keys and values of every completion of a step: 2 x layers x key-value heads x head size for a token;
  vLLM instead keeps its share of the GPU (``vllm_gpu_memory_utilization``) all the time;
- a backward pass keeps, for each of ``micro_batch`` completions and each token of prompt and completion, what the
  layers save (:func:`kept_by_a_layer`); with gradient checkpointing the input of each layer, and one layer as a whole.
  Logits are not among it: TRL projects tiles of them (its ``chunked_logprob``), never prompt x vocabulary.

*Time* of training: a pass over a token takes 2 operations for each weight and 4 x hidden for each token before it and
each layer, half of which is masked (Kaplan et al. 2020, section 2.1); a backward pass twice that, of which adapters
spare the weights' half; checkpointing repeats the forward pass, a KL term adds one. Generation takes a step for each
token, in which all weights are read. The entailment model counts with every ordered pair of a group's answers
(whole completions on mathematics), 512 tokens of it at most and in bfloat16: it reads fewer where answers are equal or
short, and half of them at most where clusters alone are read. vLLM
(``engine``) makes some hundred answers in the steps of one. Training computes in bfloat16 where it says ``bf16``,
evaluations and gradient statistics in the type of the weights.

*Several processes* each train on their share of a step. ``accelerate: zero3`` and ``fsdp`` share weights, gradients and
optimiser out over them, ``ddp`` gives each a copy; memory is that of one GPU, and GPU-hours count all of them while the
first evaluates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from gcpo import paths, world
from gcpo.gradients import chosen_parameters
from gcpo.runs.plan import BACKWARD, CHUNK, COPIES, Plan
from gcpo.runs.profiles import ParameterError, read_yaml
from gcpo.semantics.loading import explain_loading
from gcpo.tasks.sampling import TOKENS
from gcpo.tasks.vllm import SHARE

GB = 1e9
KNOWN = SimpleNamespace(**read_yaml(Path(__file__).with_suffix(".yaml")))
# Of a table of runs: memory of one GPU, disk for good, and disk until a run is finished.
COLUMNS = {"runs": "sum", "GPU": "max", "disk": "sum", "checkpoints": "max", "tokens": "sum", "GPU-hours": "sum"}
MEASURED = "gpu.yaml"  # of outputs: what benchmarks/gpu_check.py has measured there
SMALLER = "a lower micro_batch, prompts_per_step or max_completion_length, lora_rank: 32, or accelerate: zero3"


@cache
def policy(
    name: str, revision: str | None = None, rank: int = 0, chosen: tuple[str, ...] = ()
) -> tuple[PretrainedConfig, int, int]:
    """Return a policy's configuration, how many weights it has, and how many of them have a gradient: adapters of this
    rank on all linear layers but the output's or, with rank 0, the parameters that ``chosen`` names (all if it is
    empty). Counted on the model itself, without any memory.

    Raises:
        OSError: the policy is neither on this machine nor known.
    """
    if name in KNOWN.policies:
        config = AutoConfig.for_model("qwen2", **{**KNOWN.of_policies, **KNOWN.policies[name]})
    else:
        with explain_loading(name, "policy"):
            config = AutoConfig.from_pretrained(world.resolve(name, "policy"), revision=revision, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in name]
    adapters = sum(rank * (layer.in_features + layer.out_features) for layer in linear)
    trained = adapters or sum(parameter.numel() for parameter in chosen_parameters(model, chosen or None))
    return config, sum(parameter.numel() for parameter in model.parameters()), trained


def kept_by_a_layer(config: PretrainedConfig, size: int) -> float:
    """Return the bytes that the backward pass of one layer needs for each token, in numbers of ``size`` bytes.

    Inputs of the seven projections (two norms' outputs, which three and two of them share, attention's output, and the
    gated product), of the gate's activation and product (three of its width), queries, keys and values before and after
    rotation; and of the norms, computed in float32, input and normalised input.
    """
    hidden, wide = config.hidden_size, config.intermediate_size
    pairs = 2 * config.num_key_value_heads * (hidden // config.num_attention_heads)
    return size * (5 * hidden + 2 * pairs + 4 * wide) + 4 * 4 * hidden


def operations(weights: float, layers: int, hidden: int, tokens: float, masked: bool = True) -> float:
    """Return the operations of a forward pass of a text: two for each weight and token, and attention, half of which is
    masked where a token sees those before it alone."""
    return 2 * (weights + (1 if masked else 2) * layers * hidden * tokens) * tokens


def of_a_pair(tokens: float) -> float:
    """Return the operations by which the entailment model reads two answers of so many tokens together."""
    known = KNOWN.entailment
    both = min(known["tokens"], tokens)
    return operations(known["weights"], known["layers"], known["hidden"], both, masked=False)


def measured(like: str) -> dict[str, Any]:
    """Return what was measured on a GPU of this machine: ``name``, and ``chosen``, numbers by the names that
    estimates.yaml has them under. Empty where nothing was, or on another kind than ``like``."""
    path = paths.OUTPUTS / MEASURED
    found = read_yaml(path) if path.exists() else None
    return dict(found) if isinstance(found, Mapping) and found.get("like") == like else {}


class Estimate:
    """The cost of a run on a GPU of so many GB, as fast as the known one ``like`` (by default that which is nearest in
    GB); without that of a training run whose policy it looks at (``at_step``).

    ``chosen`` replaces numbers of estimates.yaml of that name.

    Attributes:
        memory: bytes of each GPU, by what holds them; at most ``peak`` at once.
        seconds: of each phase; ``hours`` of all GPUs together.
        tokens: that it reads and generates, at most.
        disk: bytes for good; that of ``checkpoints`` beside it until it is finished.
    """

    def __init__(
        self, plan: Plan, gpu: float = 80.0, like: str | None = None, chosen: Mapping[str, float] | None = None
    ) -> None:
        self.like, self.chosen = like or nearest(gpu), {**KNOWN.chosen, **(chosen or {})}
        self.plan, self.gpu, params = plan, gpu, plan.params
        self.training, gradients = plan.kind == "train" and params.max_steps > 0, plan.kind in BACKWARD
        some = tuple(params.gradient_parameters or ()) if gradients else ()
        counts = policy(params.policy, params.policy_revision, params.lora_rank, some)
        self.config, self.weights, self.trained = counts
        self.size = 2 if params.dtype == "bfloat16" else 4  # bytes of a weight
        self.computed = 2 if self.training and plan.trainer["bf16"] else self.size  # of what is computed with it
        self.gpus = params.processes if self.training else 1
        known = KNOWN.benchmarks.get(params.task, KNOWN.others)
        read = known["prompt"] / self.chosen["bytes_per_token"]
        self.context = read + params.max_completion_length  # tokens of a prompt and its answer
        steps, group = params.max_steps * self.training, params.group_size
        self.completions = steps * params.prompts_per_step * group
        # Questions that are asked outside training: those of validation five times.
        self.asked = min(params.eval_limit, known.get(params.eval_split, known["test"]))
        self.asked += 5 * self.training * min(params.validation_limit, known["validation"])
        self.asked += (plan.kind == "one_step") * params.step_batches * params.prompts_per_step
        self.answers = self.asked * (group if gradients else 1 + params.eval_samples)
        each, most = (group, CHUNK) if gradients else (max(1, params.eval_samples), 32)
        self.together = max(1, min(most, TOKENS // (each * self.context)))
        self.at_once = params.prompts_per_step * group / self.gpus if self.training else each * self.together
        entails = gradients or plan.method.needs_entailment(plan.task.full_completion)
        self.pairs = entails * (group - 1) * (self.answers if gradients else self.completions)
        self.tokens = round((self.completions + self.answers) * self.context)
        self.disk = self.training * (4 if params.lora_rank else self.size) * self.trained
        self.memory, self.seconds = self._memory(), self._seconds()
        self.hours = self.gpus * sum(self.seconds.values()) / 3600
        # Generation and backward passes do not coincide; vLLM takes its share at once.
        used = {"backward": 0.0, "vllm": 0.0, **self.memory}
        held = sum(used.values()) - used["vllm"] - min(used["generation"], used["backward"])
        self.peak = self.chosen["context"] + used["vllm"] + self.chosen["fragments"] * held

    def _memory(self) -> dict[str, float]:
        params, settings, config = self.plan.params, self.plan.trainer, self.config
        layers, whole = config.num_hidden_layers, self.size * self.weights
        trained = (4 if params.lora_rank else self.size) * self.trained
        shared = self.plan.sharing.get("distributed_type", COPIES)
        parts = 1 if shared == COPIES else self.gpus
        layer, inputs = kept_by_a_layer(config, self.computed), self.computed * config.hidden_size  # of each token
        cache = 2 * layers * inputs * config.num_key_value_heads / config.num_attention_heads
        # TRL puts a policy that DeepSpeed has shared out together to generate.
        memory = {
            "weights": (whole + trained * bool(params.lora_rank)) / parts,
            "judges": KNOWN.judges if self.pairs else 0.0,
            "generation": self.at_once * self.context * cache + (shared == "DEEPSPEED") * whole,
        }
        if self.plan.kind in BACKWARD:
            # In float32 a gradient of each answer, a row of zeros, and the one that is being made; or of each fold of
            # held-out questions, question and method, scaled too. Of one answer, or of a group.
            one = self.plan.kind == "one_step"
            held = 20 + 2 * (params.prompts_per_step + len(params.compared)) if one else params.group_size + 2
            memory["gradients"] = 4 * held * self.trained
            logits = 2 * 4 * params.max_completion_length * config.vocab_size
            memory["backward"] = (params.group_size if one else 1) * (self.context * layers * layer + logits)
        elif self.training:
            copies = bool(settings["beta"]) and not params.lora_rank
            memory |= {"optimizer": 3 * trained / parts, "reference": copies * whole / parts}
            kept = layers * inputs + layer if settings["gradient_checkpointing"] else layers * layer
            casts = 2 * self.weights if self.computed < self.size else 0  # a pass's weights in bfloat16
            logits = 4 * KNOWN.tile + 4 * config.vocab_size * config.hidden_size
            memory["backward"] = settings["per_device_train_batch_size"] * self.context * kept + logits + casts
            if settings.get("use_vllm"):
                colocated = settings.get("vllm_mode", "colocate") == "colocate"
                memory["vllm"] = colocated * settings.get("vllm_gpu_memory_utilization", 0.3) * self.gpu * GB
                memory["generation"] = 0.0
        if self.plan.kind in ("evaluate", "gradients") and params.engine == "vllm":
            memory |= {"vllm": SHARE * self.gpu * GB, "generation": 0.0}
        return memory

    def _seconds(self) -> dict[str, float]:
        params, settings, layers = self.plan.params, self.plan.trainer, self.config.num_hidden_layers
        gpu, chosen = KNOWN.gpus[self.like], self.chosen
        speed = {2: chosen["utilisation"] * gpu["bfloat16"], 4: chosen["utilisation"] * gpu["float32"]}
        forward = operations(self.weights, layers, self.config.hidden_size, self.context)
        token = max(chosen["decoding"], self.size * self.weights / gpu["bandwidth"]) * params.max_completion_length
        passes = 3 + settings["gradient_checkpointing"] - bool(params.lora_rank) + bool(settings["beta"])
        trained_on = self.completions * settings["num_iterations"] * passes
        gradients, judged = self.plan.kind in BACKWARD, chosen["judging"] * gpu["bfloat16"]
        if gradients:  # two for each answer: two temperatures, or two sets of coefficients
            trained_on = 2 * self.answers * 3
        passes_over = 1 if gradients or not params.eval_samples else 2  # sampled, and greedy
        steps = math.ceil(self.asked / self.together) * passes_over * token
        if params.engine == "vllm" and not self.training:
            steps = math.ceil(self.answers / KNOWN.together) * params.max_completion_length * chosen["vllm"]
        return {
            "generate": params.max_steps * self.training * token
            + self.completions / self.gpus * forward / speed[self.computed],
            "train": trained_on * forward / speed[self.computed] / self.gpus,
            "judge": self.pairs * of_a_pair(2 * params.max_completion_length) / judged / self.gpus,
            "evaluate": steps + self.answers * forward / speed[self.size],
        }

    def row(self) -> list[Any]:
        """Return its row of a table of :data:`COLUMNS`, after its task."""
        disk = self.disk / GB
        return [self.plan.params.task, 1, self.peak / GB, disk, KNOWN.checkpoints * disk, self.tokens / 1e6, self.hours]

    def misfit(self) -> str | None:
        """Return why the run does not fit the GPU, and which settings to change; None where it fits."""
        if self.peak <= self.gpu * GB:
            return None
        held = ", ".join(f"{name} {size / GB:.1f}" for name, size in self.memory.items() if size)
        return f"{self.peak / GB:.0f} GB of {self.gpu:g} ({held}): try {SMALLER}"


def nearest(gpu: float) -> str:
    """Return the name of the known GPU that is nearest in GB."""
    return str(min(KNOWN.gpus, key=lambda name: abs(KNOWN.gpus[name]["GB"] - gpu)))


def of_grid(plans: Sequence[Plan], gpu: float | None = None) -> tuple[list[str], list[str]]:
    """Return what the runs of a grid take of a GPU of so many GB (the profile's if None), as lines of a table, and for
    each task the largest run that does not fit; embedded policies need none.

    Raises:
        ParameterError: no GPU has so many GB.
    """
    if gpu is not None and not 0 < gpu < math.inf:
        raise ParameterError(f"--gpu-memory {gpu:g}: give the GB of a GPU, a number above 0.")
    large = [plan for plan in plans if "policy" not in plan.embedded]
    if not large:
        return [], []
    gpu = gpu or KNOWN.of_profile.get(large[0].params.profile, KNOWN.of_other_profiles)
    known = measured(nearest(gpu))
    found = [Estimate(plan, gpu, chosen=known.get("chosen")) for plan in large]
    rows = pd.DataFrame([one.row() for one in found], columns=["task", *COLUMNS])
    table = pd.concat([rows, rows.assign(task="all")]).groupby("task", sort=False).agg(COLUMNS).round().astype(int)
    largest = [found[place] for place in rows.groupby("task", sort=False)["GPU"].idxmax()]
    misfits = [f"DOES NOT FIT: {one.plan.id}: {why}" for one in largest if (why := one.misfit())]
    how = f"by what was measured on {known['name']} ({paths.OUTPUTS / MEASURED})" if known else "not measured"
    return [
        f"  estimated, {how}, for a GPU of {gpu:g} GB as fast as an {nearest(gpu)} (GB; millions of tokens):",
        *(f"  {line}" for line in table.reset_index().to_string(index=False).splitlines()),
        f"  GPU-hours by GPU: {_of_each_gpu(large)}",
    ], misfits


def _of_each_gpu(plans: Sequence[Plan]) -> str:
    """Return the hours of runs on each known GPU, or that one of them does not fit."""
    said = []
    for name, known in KNOWN.gpus.items():
        found = [Estimate(plan, known["GB"], name, measured(name).get("chosen")) for plan in plans]
        fits = not any(one.misfit() for one in found)
        said.append(f"{name} {sum(one.hours for one in found):.0f}" if fits else f"{name} too small")
    return ", ".join(said)
