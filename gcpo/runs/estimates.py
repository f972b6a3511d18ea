"""Estimates of a run on a GPU, before it is started: tokens, memory, disk and hours.

Estimates, from counting and from what vendors print; nothing here was measured on a GPU. Where a number is neither
counted nor printed somewhere it is marked "chosen". Units: bytes, seconds; GB are 10^9 bytes.

*Memory* of training, at its highest: weights, of which adapters train a part; a gradient and two Adam states for each
weight that is trained, in its type; a copy of the policy for the KL term, unless adapters can be switched off instead;
the models that judge answers; and the larger of what generation and what a backward pass hold:

- generation keeps keys and values of every completion of a step: 2 x layers x key-value heads x head size for a token;
  vLLM instead keeps its share of the GPU (``vllm_gpu_memory_utilization``) all the time;
- a backward pass keeps, for each of ``micro_batch`` completions and each token of prompt and completion, what the
  layers save (:func:`kept_by_a_layer`); with gradient checkpointing the input of each layer, and one layer as a whole.
  Logits are not among it: TRL projects tiles of :data:`TILE` (its ``chunked_logprob``), never prompt x vocabulary.

*Time* of training: a pass over a token takes 2 operations for each weight and 4 x hidden for each token before it and
each layer, half of which is masked (Kaplan et al. 2020, section 2.1); a backward pass twice that, of which adapters
spare the weights' half; checkpointing repeats the forward pass, a KL term adds one. Generation takes a step for each
token, in which all weights are read. The entailment model reads every ordered pair of a group's answers (whole
completions on mathematics), at most :data:`ENTAILMENT` tokens of it: fewer where answers are equal or short. Training
computes in bfloat16 where it says ``bf16``, evaluations and gradient
statistics in the type of the weights.

*Several processes* each train on their share of a step. ``accelerate: zero3`` and ``fsdp`` share weights, gradients and
optimiser out over them, ``ddp`` gives each a copy; memory is that of one GPU, and GPU-hours count all of them while the
first evaluates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from transformers import AutoConfig, PretrainedConfig

from gcpo import world
from gcpo.gradients import chosen_parameters
from gcpo.runs.plan import CHUNK, COPIES, Plan
from gcpo.tasks.sampling import TOKENS

GB = 1e9
# The papers' policies as their config.json on the Hub has them, for a machine that has neither: hidden size, layers,
# heads, key-value heads, width inside.
KNOWN = {
    "Qwen/Qwen2.5-0.5B-Instruct": (896, 24, 14, 2, 4864),
    "Qwen/Qwen2.5-1.5B-Instruct": (1536, 28, 12, 2, 8960),
}
FIELDS = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size".split()
JUDGES = (355e6 + 23e6) * 4  # roberta-large-mnli and MiniLM in float32, by their model cards
# Of roberta-large: weights that multiply (without its embeddings), layers, hidden size, and tokens that it reads.
ENTAILMENT = (303e6, 24, 1024, 512)
TILE = (4096, 8192)  # tokens x vocabulary of TRL's chunked_logprob, in float32: projection and its gradient
CONTEXT = 1.5 * GB  # chosen: CUDA, its libraries and kernels
FRAGMENTS = 1.1  # chosen: what an allocator asks for beyond what is used
BYTES_PER_TOKEN = 4.0  # chosen: of English, by a tokenizer of 150,000 tokens
# Peak operations a second in bfloat16 without sparsity and in float32, and bytes a second (NVIDIA's data sheets): H100
# SXM, RTX 4090.
GPUS = {80.0: ("H100", 989e12, 67e12, 3.35e12), 24.0: ("RTX 4090", 165e12, 82.6e12, 1.008e12)}
OF_PROFILE = {"single_gpu": 24.0}  # GB of the GPU that a profile is for; 80 for the others
UTILISATION = 0.35  # chosen: share of the peak that training of such models reaches
DECODING = 0.03  # chosen: seconds of a step of generation without vLLM, which Python and not the GPU decides


# Benchmarks on the Hub: questions of the splits to test and to validate with, and mean bytes of a prompt. The counts
# are the data sets' own (OlympiadBench's by the share of ids that are tested on), bytes of 30 to 300 rows of each.
BENCHMARKS = {
    "narrativeqa": (10557, 3461, 3909),
    "qasper": (1451, 1005, 6880),
    "hotpotqa": (7405, 0, 5832),
    "math": (500, 0, 263),
    "olympiadbench": (203, 0, 353),
    "gsm8k": (1319, 0, 304),
    "aime24": (30, 0, 401),
    "amc23": (40, 0, 336),
    "minerva": (272, 0, 470),
    "mmlu_stem": (3153, 0, 350),
}


@dataclass(frozen=True)
class Estimate:
    """The cost of a run: ``tokens`` that it generates at most, ``read`` tokens of prompts beside them, ``memory`` by
    what holds it on each GPU, ``disk`` for good and that of ``checkpoints`` until it is finished, in bytes,
    ``seconds`` by phase, ``gpus``, their number, and bytes that ``vllm`` keeps of each, also while others use it."""

    tokens: int
    read: int
    memory: dict[str, float]
    disk: float
    checkpoints: float
    seconds: dict[str, float]
    gpus: int = 1
    vllm: float = 0.0

    @property
    def peak(self) -> float:
        """Bytes of a GPU at the highest point: generation and backward passes do not coincide."""
        apart = {"generation", "backward"}
        used = sum(size for name, size in self.memory.items() if name not in apart)
        return CONTEXT + self.vllm + FRAGMENTS * (used + max(self.memory[name] for name in apart))

    @property
    def hours(self) -> float:
        """GPU-hours: hours times the number of GPUs."""
        return self.gpus * sum(self.seconds.values()) / 3600


def shape(name: str, revision: str | None = None) -> PretrainedConfig:
    """Return a policy's configuration: from its folder or the local cache of the Hub, else from :data:`KNOWN`.

    Raises:
        OSError: it is neither on this machine nor known.
    """
    try:
        return AutoConfig.from_pretrained(world.resolve(name, "policy"), revision=revision, local_files_only=True)
    except (OSError, ValueError) as error:
        if name in KNOWN:
            known = dict(zip(FIELDS, KNOWN[name], strict=True))
            return AutoConfig.for_model("qwen2", vocab_size=151936, tie_word_embeddings=True, **known)
        raise OSError(
            f"policy model {name!r} is neither a folder nor in the local Hub cache, so that its size is unknown: "
            f"download it, or take one of {', '.join(KNOWN)}"
        ) from error


@cache
def weights(config: str, rank: int = 0, chosen: tuple[str, ...] | None = None) -> tuple[int, int]:
    """Return how many weights a policy of this configuration (as JSON) has, and how many of them have a gradient.

    Those are adapters of this rank on all linear layers but the output's or, with rank 0, the chosen parameters (all if
    None). Counted on the model itself, without any memory.
    """
    from transformers import AutoModelForCausalLM  # every architecture with it: seconds to import

    values = json.loads(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    linear = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in name]
    adapters = sum(rank * (layer.in_features + layer.out_features) for layer in linear)
    trained = adapters or sum(parameter.numel() for parameter in chosen_parameters(model, chosen))
    return sum(parameter.numel() for parameter in model.parameters()), trained


def kept_by_a_layer(config: PretrainedConfig, size: int) -> float:
    """Return the bytes that the backward pass of one layer needs for each token, in numbers of ``size`` bytes.

    Inputs of the seven projections (two norms' outputs, which three and two of them share, attention's output, and the
    gated product), of the gate's activation and product (three of its width), queries, keys and values before and after
    rotation; and of the norms, computed in float32, input and normalised input.
    """
    hidden, wide = config.hidden_size, config.intermediate_size
    pairs = 2 * config.num_key_value_heads * (hidden // config.num_attention_heads)
    return size * (5 * hidden + 2 * pairs + 4 * wide) + 4 * 4 * hidden


def nearest(gpu: float) -> tuple[str, float, float, float]:
    """Return the GPU of :data:`GPUS` that is nearest in GB."""
    return GPUS[min(GPUS, key=lambda known: abs(known - gpu))]


class _Counts:
    """Weights, tokens, completions and GPUs of a run."""

    def __init__(self, plan: Plan) -> None:
        params, gradients = plan.params, plan.kind == "gradients"
        self.training = plan.kind == "train" and params.max_steps > 0
        self.config = shape(params.policy, params.policy_revision)
        chosen = tuple(params.gradient_parameters or ()) if gradients else ()
        self.total, self.trained = weights(self.config.to_json_string(use_diff=False), params.lora_rank, chosen or None)
        self.size = 2 if params.dtype == "bfloat16" else 4  # bytes of a weight
        self.size_trained = 4 if params.lora_rank else self.size
        # Autocast is training's, and evaluations and statistics compute in the type of the weights.
        self.size_kept = 2 if self.size == 2 or (self.training and plan.trainer["bf16"]) else 4
        test, validation, prompt = BENCHMARKS.get(params.task, (math.inf, math.inf, 48.0 * BYTES_PER_TOKEN))  # chosen
        self.prompt, self.length = prompt / BYTES_PER_TOKEN, params.max_completion_length
        self.tokens = self.prompt + self.length
        self.gpus = params.processes if self.training else 1
        self.way = plan.sharing.get("distributed_type", COPIES) if self.training else COPIES
        # vLLM generates on the GPU of training ("colocate") or on its own.
        used = self.training and plan.trainer.get("use_vllm")
        self.vllm = plan.trainer.get("vllm_mode", "colocate") if used else None
        group = params.group_size
        each, most = (group, CHUNK) if gradients else (max(1, params.eval_samples), 32)
        together = max(1, min(most, int(TOKENS // (each * self.tokens))))  # questions of a batch of evaluation
        self.batch = together * (each if gradients else (1 + each) / 2)  # greedy, and sampled
        self.at_once = params.prompts_per_step * group / self.gpus if self.training else each * together
        groups = params.max_steps * params.prompts_per_step if self.training else 0
        self.completions = groups * group
        # Those along the way are asked five times.
        asked = min(params.eval_limit, test) + 5 * self.training * min(params.validation_limit, validation)
        self.answers = int(asked * (group if gradients else 1 + params.eval_samples))
        entails = gradients or (self.training and plan.method.needs_entailment(plan.task.full_completion))
        self.pairs = entails * (asked if gradients else groups) * group * (group - 1)
        self.layer_inputs = self.size_kept * self.config.hidden_size * self.config.num_hidden_layers
        # Operations of a forward pass over one completion and its prompt.
        layers = self.config.num_hidden_layers * self.config.hidden_size
        self.forward = (2 * self.total + 2 * layers * self.tokens) * self.tokens


def estimate(plan: Plan, gpu: float = 80.0) -> Estimate:
    """Return what a run takes of a GPU with so many GB: the nearest of :data:`GPUS`. A training run that
    is looked at (``at_step``) is not part of it.

    Raises:
        OSError: as :func:`shape`.
    """
    counts, settings = _Counts(plan), plan.trainer
    share = settings.get("vllm_gpu_memory_utilization", 0.3) if counts.vllm == "colocate" else 0.0
    return Estimate(
        tokens=(counts.completions + counts.answers) * counts.length,
        read=round((counts.completions + counts.answers) * counts.prompt),
        memory=_memory(plan, counts),
        disk=counts.size_trained * counts.trained if counts.training else 0.0,
        checkpoints=2 * 3 * counts.size_trained * counts.trained if counts.training else 0.0,  # two, with Adam's states
        seconds=_seconds(plan, counts, gpu),
        gpus=counts.gpus,
        vllm=share * gpu * GB,
    )


def _memory(plan: Plan, counts: _Counts) -> dict[str, float]:
    """Return the bytes of each GPU, by what holds them."""
    params, settings, config, training = plan.params, plan.trainer, counts.config, counts.training
    parts = 1 if counts.way == COPIES else counts.gpus
    whole, trained = counts.size * counts.total, counts.size_trained * counts.trained
    per_layer = kept_by_a_layer(config, counts.size_kept)
    cache = 2 * counts.layer_inputs * config.num_key_value_heads / config.num_attention_heads  # of a token
    # TRL puts a policy that DeepSpeed has shared out together to generate; vLLM generates in memory of its own.
    generation = counts.at_once * counts.tokens * cache + (counts.way == "DEEPSPEED") * whole
    memory = {
        "weights": (whole + (trained if params.lora_rank else 0)) / parts,
        "gradients": trained / parts if training else 0.0,
        "optimizer": 2 * trained / parts if training else 0.0,
        "reference": whole / parts if training and settings["beta"] and not params.lora_rank else 0.0,
        "judges": JUDGES if counts.pairs else 0.0,
        "generation": 0.0 if counts.vllm else generation,
        "backward": 0.0,
    }
    if training:
        checkpointing = settings["gradient_checkpointing"]
        saved = counts.layer_inputs + per_layer if checkpointing else per_layer * config.num_hidden_layers
        casts = 2 * counts.total if settings["bf16"] and counts.size == 4 else 0  # a pass's weights in bfloat16
        logits = 2 * 4 * TILE[0] * TILE[1] + 4 * config.vocab_size * config.hidden_size
        memory["backward"] = settings["per_device_train_batch_size"] * counts.tokens * saved + logits + casts
    elif plan.kind == "gradients":
        # In float32 a gradient of each answer, a row of zeros, and the one that is being made; no checkpointing.
        memory["gradients"] = 4 * (params.group_size + 2) * counts.trained
        kept = counts.tokens * per_layer * config.num_hidden_layers
        memory["backward"] = kept + counts.length * 2 * 4 * config.vocab_size  # of the answer's logits
    return memory


def _seconds(plan: Plan, counts: _Counts, gpu: float) -> dict[str, float]:
    """Return the seconds of each phase on the nearest of :data:`GPUS`."""
    settings = plan.trainer
    _, half, single, bandwidth = nearest(gpu)
    kept, own = (UTILISATION * (half if size == 2 else single) for size in (counts.size_kept, counts.size))

    def sampling(completions: float, at_once: float, speed: float) -> float:
        """Return the seconds of a step for each token of each batch, and of the reading of prompts."""
        step = max(DECODING, counts.size * counts.total / bandwidth)
        return math.ceil(completions / at_once) * counts.length * step + completions * counts.forward / speed

    passes = 3 + settings["gradient_checkpointing"] - bool(plan.params.lora_rank) + bool(settings["beta"])
    trained_on = counts.completions * settings["num_iterations"] * passes * counts.forward
    if plan.kind == "gradients":  # a backward pass for each answer, at two temperatures
        trained_on = 2 * counts.answers * 3 * counts.forward
    # Nothing that the entailment model reads of two answers is masked.
    multiplied, layers, hidden, most = ENTAILMENT
    together = min(most, 2 * counts.length)
    of_a_pair = (2 * multiplied + 4 * layers * hidden * together) * together
    return {
        "generate": sampling(counts.completions / counts.gpus, counts.at_once, kept) if counts.completions else 0.0,
        "train": trained_on / kept / counts.gpus,
        "judge": counts.pairs * of_a_pair / (UTILISATION * single) / counts.gpus,
        "evaluate": sampling(counts.answers, counts.batch, own),
    }


def misfit(plan: Plan, gpu: float) -> str | None:
    """Return why a run does not fit a GPU of so many GB, and which setting to change; None where it fits."""
    found, params = estimate(plan, gpu), plan.params
    if found.peak <= gpu * GB:
        return None
    held = {**found.memory, "vllm": found.vllm}
    largest = max(held, key=held.__getitem__)
    checkpointing = "" if plan.trainer["gradient_checkpointing"] else "grpo: {gradient_checkpointing: true}, or "
    shorter = f"a max_completion_length below {params.max_completion_length}"
    ways = {
        "backward": f"{checkpointing}a micro_batch below {plan.trainer['per_device_train_batch_size']}, or {shorter}",
        "generation": f"prompts_per_step below {params.prompts_per_step}, or {shorter}",
        "vllm": "a lower vllm_gpu_memory_utilization",
    }
    other = (
        "gradient_parameters of fewer layers" if plan.kind == "gradients" else "more processes with accelerate: zero3"
    )
    fewer = "dtype: bfloat16, or a smaller policy" if params.lora_rank else f"lora_rank: 32 (adapters), or {other}"
    said = ", ".join(f"{name} {size / GB:.1f}" for name, size in held.items() if size)
    return f"{found.peak / GB:.0f} GB of {gpu:g} ({said}): try {ways.get(largest, fewer)}"


def total(found: Sequence[Estimate]) -> str:
    """Return the cost of some runs together, in words."""
    tokens = sum(one.tokens + one.read for one in found)
    disk = sum(one.disk for one in found) + max(one.checkpoints for one in found)
    return (
        f"at most {max(one.peak for one in found) / GB:.0f} GB of memory, {disk / GB:.0f} GB of disk, "
        f"{tokens / 1e6:,.0f} million tokens, {sum(one.hours for one in found):,.0f} GPU-hours"
    )


def of_grid(grid: str, plans: Sequence[Plan], gpu: float | None = None) -> tuple[list[str], list[str]]:
    """Return what a grid's runs take of a GPU of so many GB (the profile's if None), a line per task, and what does not
    fit, a line per reason; embedded policies need none."""
    large = [plan for plan in plans if "policy" not in plan.embedded]
    if not large:
        return [], []
    gpu = gpu or OF_PROFILE.get(large[0].params.profile, 80.0)
    every = [estimate(plan, gpu) for plan in large]
    said = [f"  estimated, not measured, for a GPU of {gpu:g} GB as fast as an {nearest(gpu)[0]}:"]
    for task in dict.fromkeys(plan.params.task for plan in large):
        found = [one for plan, one in zip(large, every, strict=True) if plan.params.task == task]
        said.append(f"  {task}, {len(found)} runs: {total(found)}")
    reasons: dict[str, list[str]] = {}
    for plan in large:
        if why := misfit(plan, gpu):
            reasons.setdefault(why, []).append(plan.id)
    misfits = [f"DOES NOT FIT: {ids[0]} and {len(ids) - 1} more of {grid}: {why}" for why, ids in reasons.items()]
    return [*said, f"  all of {grid}: {total(every)}"], misfits
