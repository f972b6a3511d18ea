"""What a run will take of a GPU, estimated before it is started: tokens, memory, disk and hours.

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
token, in which all weights are read. Training computes in bfloat16 where it says ``bf16``, evaluations and gradient
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
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from gcpo import world
from gcpo.gradients import chosen_parameters
from gcpo.runs.plan import CHUNK, COPIES, Plan
from gcpo.tasks.evaluation import TOKENS

GB = 1e9
# The papers' policies as their config.json on the Hub has them, for a machine that has neither.
KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": {
        **{"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
        **{"intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True},
    },
    "Qwen/Qwen2.5-1.5B-Instruct": {
        **{"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2},
        **{"intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True},
    },
}
JUDGES = (355e6 + 23e6) * 4  # roberta-large-mnli and MiniLM in float32, by their model cards
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


@dataclass(frozen=True)
class Questions:
    """A benchmark on the Hub: questions to train on, to validate and to test with, and bytes of a prompt.

    The counts are the data sets' own (OlympiadBench's by the share of ids that are tested on; of MATH all levels),
    bytes the mean of the prompts of 30 to 300 rows of each.
    """

    train: int
    validation: int
    test: int
    prompt: int


BENCHMARKS = {
    "narrativeqa": Questions(32747, 3461, 10557, 3909),
    "qasper": Questions(2593, 1005, 1451, 6880),
    "hotpotqa": Questions(90447, 0, 7405, 5832),
    "math": Questions(7500, 0, 500, 263),
    "olympiadbench": Questions(472, 0, 203, 353),
    "gsm8k": Questions(7473, 0, 1319, 304),
    "aime24": Questions(0, 0, 30, 401),
    "amc23": Questions(0, 0, 40, 336),
    "minerva": Questions(0, 0, 272, 470),
    "mmlu_stem": Questions(0, 0, 3153, 350),
}


@dataclass(frozen=True)
class Estimate:
    """What a run takes: ``tokens`` that it generates at most, ``read`` tokens of prompts beside them, ``memory`` by
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
        """Of GPUs, times their number."""
        return self.gpus * sum(self.seconds.values()) / 3600


def shape(name: str, revision: str | None = None) -> PretrainedConfig:
    """A policy's configuration: from its folder or the local cache of the Hub, else from :data:`KNOWN`.

    Raises:
        OSError: it is neither on this machine nor known.
    """
    try:
        return AutoConfig.from_pretrained(world.resolve(name, "policy"), revision=revision, local_files_only=True)
    except (OSError, ValueError) as error:
        if name in KNOWN:
            return AutoConfig.for_model("qwen2", **KNOWN[name])
        raise OSError(
            f"policy model {name!r} is neither a folder nor in the local Hub cache, so that its size is unknown: "
            f"download it, or take one of {', '.join(KNOWN)}"
        ) from error


@cache
def weights(config: str, rank: int) -> tuple[int, int]:
    """How many weights a policy of this configuration (as JSON) has, counted on the model itself without any memory;
    and those of adapters of this rank on all linear layers but the output's."""
    model = _empty(config)
    linear = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in name]
    adapters = sum(rank * (layer.in_features + layer.out_features) for layer in linear)
    return sum(parameter.numel() for parameter in model.parameters()), adapters


def _empty(config: str) -> Any:
    """A policy of this configuration that takes no memory."""
    from transformers import AutoModelForCausalLM  # every architecture with it: seconds to import

    values = json.loads(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))


def kept_by_a_layer(config: PretrainedConfig, size: int) -> float:
    """Bytes that the backward pass of one layer needs for each token, in numbers of ``size`` bytes.

    Inputs of the seven projections (two norms' outputs, which three and two of them share, attention's output, and the
    gated product), of the gate's activation and product (three of its width), queries, keys and values before and after
    rotation; and of the norms, computed in float32, input and normalised input.
    """
    hidden, wide = config.hidden_size, config.intermediate_size
    pairs = 2 * config.num_key_value_heads * (hidden // config.num_attention_heads)
    return size * (5 * hidden + 2 * pairs + 4 * wide) + 4 * 4 * hidden


def nearest(gpu: float) -> tuple[str, float, float, float]:
    """Of :data:`GPUS`, the one that is nearest in GB."""
    return GPUS[min(GPUS, key=lambda known: abs(known - gpu))]


def estimate(plan: Plan, gpu: float = 80.0) -> Estimate:
    """What a run takes of a GPU with so many GB: the nearest of :data:`GPUS`. That of a training run which it looks at
    (``at_step``) is not part of it.

    Raises:
        OSError: as :func:`shape`.
    """
    params, settings = plan.params, plan.trainer
    config = shape(params.policy, params.policy_revision)
    text = config.to_json_string(use_diff=False)
    total, adapters = weights(text, params.lora_rank)
    size = 2 if params.dtype == "bfloat16" else 4  # of a weight
    training, gradients = plan.kind == "train" and params.max_steps > 0, plan.kind == "gradients"
    # Of an activation: autocast is training's, and evaluations and statistics compute in the type of the weights.
    number = 2 if size == 2 or (training and settings["bf16"]) else 4
    prompt, length = _prompt(plan), params.max_completion_length
    trained, of_one = (adapters, 4) if params.lora_rank else (total, size)
    covered = trained  # by gradient statistics
    if gradients and params.gradient_parameters and not params.lora_rank:
        covered = sum(one.numel() for one in chosen_parameters(_empty(text), params.gradient_parameters))
    group, micro = params.group_size, settings["per_device_train_batch_size"]
    gpus = params.processes if training else 1
    way = plan.sharing.get("distributed_type", COPIES) if training else COPIES
    parts = 1 if way == COPIES else gpus
    n, most = (group, CHUNK) if gradients else (max(1, params.eval_samples), 32)
    together = max(1, min(most, int(TOKENS // (n * (prompt + length)))))  # questions of a batch
    generated = params.prompts_per_step * group / gpus if training else n * together
    layers, hidden = config.num_hidden_layers, config.hidden_size
    per_layer, cache_size = kept_by_a_layer(config, number), 2 * layers * number * hidden
    cache_size *= config.num_key_value_heads / config.num_attention_heads
    held = (micro if training else 1) * (prompt + length)
    saved = (number * hidden * layers + per_layer) if settings["gradient_checkpointing"] else per_layer * layers
    casts = 2 * total if settings["bf16"] and size == 4 else 0  # autocast keeps weights in bfloat16 for a pass
    memory = {
        "weights": (size * total + of_one * (trained if params.lora_rank else 0)) / parts,
        # Statistics hold in float32 a gradient of each answer, a row of zeros, and the one that is being made.
        "gradients": of_one * trained / parts if training else 4 * (group + 2) * covered if gradients else 0.0,
        "optimizer": 2 * of_one * trained / parts if training else 0.0,
        "reference": size * total / parts if training and settings["beta"] and not params.lora_rank else 0.0,
        "judges": JUDGES if gradients or (training and plan.method.entails(plan.task.full_completion)) else 0.0,
        # TRL puts a policy that DeepSpeed has shared out together to generate.
        "generation": generated * (prompt + length) * cache_size + (way == "DEEPSPEED") * size * total,
        "backward": 0.0,
    }
    vllm = 0.0
    if training and settings.get("use_vllm"):  # generates in memory of its own, on a GPU of its own as a server
        memory["generation"] = 0.0
        if settings.get("vllm_mode", "colocate") == "colocate":
            vllm = settings.get("vllm_gpu_memory_utilization", 0.3) * gpu * GB
    if training:
        memory["backward"] = held * saved + 2 * 4 * TILE[0] * TILE[1] + 4 * config.vocab_size * hidden + casts
    elif gradients:  # without checkpointing, and of the answer's logits
        memory["backward"] = held * per_layer * layers + length * 2 * 4 * config.vocab_size
    _, half, single, bandwidth = nearest(gpu)
    peak, own = (half if arithmetic == 2 else single for arithmetic in (number, size))
    forward = (2 * total + 2 * layers * hidden * (prompt + length)) * (prompt + length)  # of one completion

    def sampling(completions: float, at_once: float, peak: float) -> float:
        """Seconds to generate: a step for each token of each batch, and the reading of prompts."""
        step = max(DECODING, size * total / bandwidth)
        return math.ceil(completions / at_once) * length * step + completions * forward / (UTILISATION * peak)

    steps = params.max_steps if plan.kind == "train" else 0
    completions = steps * params.prompts_per_step * group
    asked = _questions(plan)
    answers = asked * (group if gradients else 1 + params.eval_samples)
    passes = 3 + settings["gradient_checkpointing"] - bool(params.lora_rank) + bool(settings["beta"])
    trained_on = completions * settings["num_iterations"] * passes * forward
    if gradients:  # a backward pass for each answer, at two temperatures
        trained_on = 2 * answers * 3 * forward
    return Estimate(
        tokens=(completions + answers) * length,
        read=round((completions + answers) * prompt),
        memory=memory,
        disk=of_one * trained if training else 0.0,
        checkpoints=2 * 3 * of_one * trained if training else 0.0,  # two, with Adam's states
        seconds={
            "generate": sampling(completions / gpus, generated, peak) if completions else 0.0,
            "train": trained_on / (UTILISATION * peak) / gpus,
            "evaluate": sampling(answers, together * (n if gradients else (1 + n) / 2), own),
        },
        gpus=gpus,
        vllm=vllm,
    )


def _prompt(plan: Plan) -> float:
    """Tokens of a question's prompt, in the mean."""
    known = BENCHMARKS.get(plan.params.task)
    return known.prompt / BYTES_PER_TOKEN if known else 48.0  # chosen: of the generated tasks'


def _questions(plan: Plan) -> int:
    """How many held-out questions a run asks; those along the way are asked five times."""
    params = plan.params
    there = BENCHMARKS.get(params.task)
    sizes = {} if there is None else vars(there)
    asked = min(params.eval_limit, sizes.get(params.eval_split, params.eval_limit))
    along = min(params.validation_limit, sizes.get(params.validation_split, params.validation_limit))
    return asked + 5 * along if plan.kind == "train" and params.max_steps else asked


def misfit(plan: Plan, gpu: float) -> str | None:
    """Why a run does not fit a GPU of so many GB, and which setting to change; None where it fits."""
    found = estimate(plan, gpu)
    if found.peak <= gpu * GB:
        return None
    params = plan.params
    largest = max(found.memory, key=lambda name: found.memory[name])
    ways = {
        "backward": [
            *([] if plan.trainer["gradient_checkpointing"] else ["grpo: {gradient_checkpointing: true}"]),
            f"a micro_batch below {plan.trainer['per_device_train_batch_size']}",
            f"a max_completion_length below {params.max_completion_length}",
        ],
        "generation": [f"prompts_per_step below {params.prompts_per_step}", "a smaller max_completion_length"],
    }
    fewer = [] if params.lora_rank else ["lora_rank: 32 (adapters)"]
    if plan.kind == "train" and not params.lora_rank:
        fewer.append("processes on more GPUs with accelerate: zero3")
    if plan.kind == "gradients":
        fewer.append("gradient_parameters of fewer layers")
    types = [] if params.dtype == "bfloat16" or not params.lora_rank else ["dtype: bfloat16"]
    way = ways.get(largest) or [*fewer, *types] or ["a smaller policy"]
    if found.vllm > found.memory[largest]:
        way = ["a lower vllm_gpu_memory_utilization"]
    listed = {**found.memory, "vllm": found.vllm}
    held = ", ".join(f"{name} {size / GB:.1f}" for name, size in listed.items() if size)
    return f"{found.peak / GB:.0f} GB of {gpu:g} ({held}): try {', or '.join(way)}"


def total(found: Sequence[Estimate]) -> str:
    """What some runs take together, in words."""
    tokens = sum(one.tokens + one.read for one in found)
    disk = sum(one.disk for one in found) + max(one.checkpoints for one in found)
    return (
        f"at most {max(one.peak for one in found) / GB:.0f} GB of memory, {disk / GB:.0f} GB of disk, "
        f"{tokens / 1e6:,.0f} million tokens, {sum(one.hours for one in found):,.0f} GPU-hours"
    )
