"""Trainings beside TRL's own: three steps each of GRPOTrainer, of GCPOTrainer without shared prompts, and with.

Each set of options, of data and tools, and each family of models or adapters is trained three times from the same tiny
model of random weights, with the same seeds, and rewards that the texts decide. Without shared prompts, all logs and
weights have to be TRL's bit for bit. With them, weights may end 1e-4 of the way that training took them from TRL's, or
the trainer has to say why it does not share. It writes ``benchmarks/results/beside_trl.csv``, and ends with 1 where a
set fails.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import fnmatch
import functools
import io
import logging
import math
import os
import re
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import peft
import torch
import transformers
import trl
from datasets import Dataset
from models import in_processes, random_model, said, tiny
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedTokenizerFast
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from trl import GRPOConfig, GRPOTrainer

from gcpo import GCPOConfig, GCPOTrainer

RESULTS = Path(__file__).parent / "results" / "beside_trl.csv"
NEAR = 1e-4  # of the way from the first weights to TRL's last ones
LIMIT = 900  # seconds of one set
Given = dict[str, Any]

# --- tokens, rewards and data -----------------------------------------------------------------------------------------

CALLS = [
    f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": {a}, "b": 2}}}}\n</tool_call>'
    for name, a in (("add", 1), ("add", 3), ("divide", 0), ("divide", 4), ("missing", 5))
]


@functools.cache
def tokens() -> Any:
    """Return a tokenizer of printable characters with Qwen 2.5's chat template, and a token for each call of a tool."""
    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    inner = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.add_tokens(CALLS)
    made.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text(encoding="utf-8")
    return made


def graded(salt: str, levels: int, missing: Callable[[int], bool] = lambda _: False) -> Callable[..., list[Any]]:
    """Return a reward function: a text decides its reward, or the row that it has none."""

    def reward(completions: list[Any], **_: Any) -> list[float | None]:
        values = [zlib.crc32((salt + str(one)).encode()) % levels / 2 for one in completions]
        return [None if missing(row) else value for row, value in enumerate(values)]

    return reward


def prompts(texts: list[str], chat: bool = False) -> Dataset:
    """Return a data set of prompts."""
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in texts] if chat else texts})


WORDS = ["Say one", "Count", "Name a tree", "Why is it", "A", "Two and two is", "Go on", "Where does it end"]
CHAT = {"train_dataset": prompts(WORDS, chat=True)}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.

    Returns:
        Their sum.
    """
    return a + b


def divide(a: int, b: int) -> float:
    """Divide two numbers, the second by the first.

    Args:
        a: the first.
        b: the second.

    Returns:
        The quotient.
    """
    return b / a


class Adder:
    """An environment that adds up."""

    total = 0

    def reset(self, **_: Any) -> str:
        self.total = 0
        return " Add."

    def add(self, a: int, b: int) -> int:
        """Add two numbers to the total.

        Args:
            a: the first.
            b: the second.

        Returns:
            The total.
        """
        self.total += a + b
        return self.total

    def get_reward(self) -> float:
        return float(self.total)


class Divider(Adder):
    """An environment with the same tool, and another beginning."""

    def reset(self, **_: Any) -> str:
        self.total = 7
        return " Start at seven."


def rolled(given: list[Any], trainer: Any) -> Given:
    """Return a rollout of its own: what the model samples, with log-probabilities of a sampler that is a little off."""
    ids = [tokens()(text)["input_ids"] for text in given]
    trainer.use_vllm = False
    completions, _ = trainer._generate_single_turn(ids, None, {}, trainer.num_generations)
    trainer.use_vllm = True
    off = [[-4.5 - 0.3 * math.sin(7 * token) for token in one] for one in completions]
    mask = [[int(token % 5 > 0) for token in one] for one in completions]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": off, "env_mask": mask}


def corrected(trainer: Any) -> None:
    """Have TRL correct for the sampler, which it does for vLLM's alone."""
    trainer.use_vllm, trainer.vllm_generation = True, SimpleNamespace(sync_weights=lambda: None)
    trainer._last_loaded_step, trainer.vllm_importance_sampling_mode = -1, "token_truncate"


# --- models -----------------------------------------------------------------------------------------------------------


def attention_of_its_own(model: Any) -> None:
    """Register an attention that is not torch's: half as sharp."""

    def own(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        return sdpa_attention_forward(module, query / 2, key, value, mask, **options)

    AttentionInterface.register("own", own)
    AttentionMaskInterface.register("own", sdpa_mask)
    model.set_attn_implementation("own")


def model_of(given: Given, folder: str) -> Any:
    """Return the tiny model of a set, and keep it for TRL's reference. Vowels and calls end its completions too."""
    special = {"pad_token_id": tokens().pad_token_id, "eos_token_id": tokens().eos_token_id, "bos_token_id": None}
    size = {"vocab_size": len(tokens()), "max_position_embeddings": 2048}
    model = random_model(tiny(given.get("kind", "qwen2"), **{**special, **size, **given.get("shape", {})}))
    ends = tokens().convert_tokens_to_ids([tokens().eos_token, *"aeiou", *CALLS])
    model.generation_config.eos_token_id = given.get("ends", ends)
    given.get("model", lambda _: None)(model)
    if given.get("beta"):
        model.save_pretrained(folder)
        model.config._name_or_path = folder
    return model


# --- what is trained --------------------------------------------------------------------------------------------------


def sizes(rows: int, accumulated: int = 1, **more: Any) -> Given:
    """Return the sizes of a micro-batch and of a step."""
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulated, **more}


def lora(modules: Any = "all-linear", **more: Any) -> Given:
    """Return the adapters of a set."""
    return {"peft_config": LoraConfig(task_type="CAUSAL_LM", target_modules=modules, **more)}


IN_THREE = sizes(4, 3)
IN_PARTS = sizes(4, steps_per_generation=3, num_iterations=2)
LOSSES = ("grpo", "dr_grpo", "bnpo", "dapo", "cispo", "sapo", "luspo", "vespo")
LEVEL = {"luspo": {"importance_sampling_level": "sequence"}}
TWO = {"reward_funcs": [graded("", 5), graded("other", 3)]}
SAVED = {"save_strategy": "steps", "save_steps": 1}
# Llama has no weight whose gradient is 0 but for rounding, of which AdamW would make a whole step.
ADAMW = {"kind": "llama", "optim": "adamw_torch", "learning_rate": 1e-3}
OPTIONS: dict[str, Given] = {
    **{f"{loss}, accumulated": {"loss_type": loss, **IN_THREE, **LEVEL.get(loss, {})} for loss in LOSSES},
    **{f"{loss}, off-policy": {"loss_type": loss, **IN_PARTS, **LEVEL.get(loss, {}), "beta": 0.1} for loss in LOSSES},
    "scale_rewards batch": {"scale_rewards": "batch"},
    "scale_rewards none": {"scale_rewards": "none", **IN_THREE},
    "GSPO": {"loss_type": "grpo", "importance_sampling_level": "sequence", **IN_PARTS, "epsilon": 1e-3},
    "delta": {"delta": 1.1, **IN_PARTS},
    "epsilon_high": {"epsilon": 0.01, "epsilon_high": 0.02, **IN_PARTS},
    "three iterations": {"num_iterations": 3},
    "mask_truncated_completions": {"mask_truncated_completions": True},
    "mask_truncated_completions, accumulated": {"mask_truncated_completions": True, **IN_THREE},
    "top_entropy_quantile": {"top_entropy_quantile": 0.5},
    "top_entropy_quantile, accumulated": {"top_entropy_quantile": 0.5, **IN_THREE},
    "entropy_coef": {"entropy_coef": 0.1},
    "entropy_coef, accumulated": {"entropy_coef": 0.1, **IN_THREE},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 5.0, "entropy_coef_delta": 0.1, **IN_THREE},
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 1e-4, **IN_PARTS},
    "KL as it was": {"use_bias_correction_kl": False, "beta": 0.1, **IN_THREE},
    "KL with its bias corrected": {"use_bias_correction_kl": True, "beta": 0.1, **IN_PARTS},
    "normalize_then_sum": {"multi_objective_aggregation": "normalize_then_sum", **TWO},
    "reward_weights": {"reward_weights": [0.3, 2.0], **TWO},
    "rewards that are None": {"reward_funcs": [graded("", 5, lambda row: row % 3 == 1), graded("other", 3)]},
    "six steps of a generation, four accumulated": sizes(2, 4, steps_per_generation=6),
    "four steps of a generation, eight accumulated": sizes(3, 8, steps_per_generation=4),
    "generation_batch_size": {"generation_batch_size": 24},
    "sync_ref_model": {"sync_ref_model": True, "ref_model_sync_steps": 1, "beta": 0.1, **IN_THREE},
    "LoRA with KL": {**lora(), "beta": 0.1, **IN_THREE},
    **{f"checkpointing, reentrant: {how}": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": how}, **IN_THREE
    } for how in (False, True)},
    "AdamW": ADAMW,
    "AdamW with clip": {**ADAMW, "max_grad_norm": 0.01, **IN_THREE},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": prompts(WORDS[:4])},
    "epochs": {"max_steps": -1, "num_train_epochs": 2},
    "pad_to_multiple_of": {"pad_to_multiple_of": 8},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"generation_kwargs": {"use_cache": False}},
    "prompts in chunks": {"generation_kwargs": {"prefill_chunk_size": 4}},
    "beams": {"generation_kwargs": {"num_beams": 2}},
    "torch_compile": {"torch_compile": True, "torch_compile_backend": "eager"},
    "chat": CHAT,
    "shuffle off": {"shuffle_dataset": False, **IN_THREE},
    "nucleus": {"top_p": 0.8, "top_k": 20, "min_p": 0.01},
    "temperature, head in float32": {"temperature": 0.5, "cast_lm_head_to_fp32": True, **IN_THREE},
    "repetition_penalty": {"repetition_penalty": 1.3},
}  # fmt: skip
LIKELY = {"sequence_bias": [[[number], 2.0] for number in tokens().convert_tokens_to_ids(CALLS)]}
CALLING = {"generation_kwargs": LIKELY, "max_completion_length": 300, "max_tool_calling_iterations": 3}
TOOLS = {**CHAT, **CALLING, "tools": [add, divide]}
DATA: dict[str, Given] = {
    "iterable": {"train_dataset": prompts(WORDS * 9).to_iterable_dataset(), **IN_THREE},
    "resumed": {**SAVED, "resume": 2},
    "resumed in mid-generation": {**SAVED, "steps_per_generation": 2, "resume": 1},
    "tools": TOOLS,
    "tools, accumulated, with KL": {**TOOLS, **IN_THREE, "beta": 0.1},
    "tools, one turn": {**TOOLS, "max_tool_calling_iterations": 1},
    "environment": {**CHAT, "environment_factory": Adder, **CALLING},
    "two environments": {
        "train_dataset": Dataset.from_dict({"environment": ["add", "divide"] * 4}),
        "environment_factory": {"add": Adder, "divide": Divider}, **CALLING,
    },
    "rollout_func": {"rollout_func": rolled, "trainer": corrected, **IN_THREE},
    "no group has a reward": {"reward_funcs": [graded("", 5, lambda _: True)]},
    "one group has no reward": {"reward_funcs": [graded("", 5, lambda row: row < 4)]},
    "equal rewards": {"reward_funcs": [graded("", 1)], "beta": 0.1},
    "one prompt for all rows": {"train_dataset": prompts(["Say one"] * 8), **IN_THREE},
    "prompts of one token": {"train_dataset": prompts([*"ABCDEFGH"])},
    "prompts of 1 and 150 tokens": {"train_dataset": prompts(["A", "word " * 30] * 4), **IN_THREE},
    "one row per micro-batch": sizes(1, 12),
    "completions of one token": {"max_completion_length": 1},
    "completions end at once": {"ends": [*range(90)]},
}  # fmt: skip
VIRTUAL: Given = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
FAMILIES: dict[str, Given] = {
    **{kind: {"kind": kind} for kind in (
        "llama", "qwen3", "mistral", "gemma3_text", "cohere2", "olmo2", "smollm3", "deepseek_v3", "gpt_neox",
        "gemma2", "gpt_oss", "mamba", "jamba", "nemotron", "opt", "phimoe", "mixtral", "qwen3_moe", "gpt2",
    )},
    "doge": {"kind": "doge", "router_aux_loss_coef": 0.0},
    "opt without dropout": {"kind": "opt", "shape": {"dropout": 0.0}},
    "gpt2 without dropout": {"kind": "gpt2", "disable_dropout": True},
    "gpt_bigcode without dropout": {"kind": "gpt_bigcode", "disable_dropout": True},
    "qwen2, tied": {"shape": {"tie_word_embeddings": True}},
    "qwen2, dropout of attention": {"shape": {"attention_dropout": 0.1}},
    "qwen2_moe with a window": {
        "kind": "qwen2_moe", "router_aux_loss_coef": 0.0,
        "shape": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2, "decoder_sparse_step": 1},
    },
    "phimoe with a window": {"kind": "phimoe", "shape": {"sliding_window": 4, "router_jitter_noise": 0.0}},
    "phimoe without jitter": {"kind": "phimoe", "shape": {"router_jitter_noise": 0.0}},
    "mixtral with jitter": {"kind": "mixtral", "shape": {"router_jitter_noise": 0.1}},
    "qwen3_moe without auxiliary loss": {"kind": "qwen3_moe", "router_aux_loss_coef": 0.0, **IN_THREE},
    "qwen3_moe with auxiliary loss": {"kind": "qwen3_moe", "router_aux_loss_coef": 0.1, **IN_THREE},
    "phi3, LongRoPE": {"kind": "phi3", "shape": {"original_max_position_embeddings": 16, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}}},
    "eager attention": {"model": lambda model: model.set_attn_implementation("eager")},
    "attention of its own": {"model": attention_of_its_own},
    "NEFTune": {"neftune_noise_alpha": 5.0},
    "LoRA": lora(r=4),
    "LoRA with dropout": lora(lora_dropout=0.1),
    "LoRA and whole modules": lora(["q_proj"], modules_to_save=["embed_tokens"]),
    "LoRA of some layers": lora(["q_proj"], layers_to_transform=[1], use_rslora=True),
    "activated LoRA": {**CHAT, **lora(alora_invocation_tokens=tokens()("<|im_start|>assistant\n")["input_ids"])},
    "DoRA": lora(use_dora=True),
    "IA3": {"peft_config": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])},
    "VeRA": {"peft_config": peft.VeraConfig(target_modules=["q_proj"], r=4)},
    "OFT": {"peft_config": peft.OFTConfig(target_modules=["q_proj"], oft_block_size=8, r=0)},
    "prompt tuning": {"peft_config": peft.PromptTuningConfig(**VIRTUAL)},
    "prefix tuning": {"peft_config": peft.PrefixTuningConfig(**VIRTUAL)},
    "p-tuning": {"peft_config": peft.PromptEncoderConfig(**VIRTUAL, encoder_hidden_size=16)},
}  # fmt: skip
PARTS = {"options": OPTIONS, "data": DATA, "families": FAMILIES}
SETS = {f"{part}: {name}": given for part, sets in PARTS.items() for name, given in sets.items()}

BASE: Given = {
    **sizes(12, num_generations=4, max_completion_length=12, max_steps=3, gradient_checkpointing=False),
    **{"learning_rate": 0.1, "optim": "sgd", "loss_type": "dapo", "scale_rewards": "group", "logging_steps": 1},
    **{"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "seed": 7, "use_cpu": True, "bf16": False},
}
ARGUMENTS = ("eval_dataset", "peft_config", "tools", "rollout_func", "environment_factory")


class Training(NamedTuple):
    """Weights and logs of a training."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    logs: list[dict[str, float]]
    read: int  # tokens that the embedding has read
    why: str  # why prompts were not shared


class Said(logging.Handler):
    """Why the trainer does not share, from its log and its warnings."""

    why = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.hear(record.getMessage())

    def hear(self, message: object) -> None:
        if found := re.search(r"reads its prompt anew[:,].*?\bas (.*?)\.?$", str(message)):
            self.why = found[1]


def trainer_of(given: Given, folder: str, share: bool | None, own: bool) -> Any:
    """Return TRL's trainer or ours, on a model that is made anew."""
    config: Any = GCPOConfig if own else GRPOConfig
    settings = {name: value for name, value in given.items() if name in GRPOConfig.__dataclass_fields__}
    settings |= {"method": "grpo", "share_prompts": share} if own else {}
    arguments = {"reward_funcs": [graded("", 5)], "train_dataset": prompts(WORDS), "processing_class": tokens()}
    arguments |= {name: given[name] for name in (*arguments, *ARGUMENTS) if name in given}
    trainer = (GCPOTrainer if own else GRPOTrainer)(
        model_of(given, folder),
        args=config(output_dir=folder, **{**BASE, **copy.deepcopy(settings)}),
        **copy.deepcopy(arguments),
    )
    given.get("trainer", lambda _: None)(trainer)
    return trainer


def weights(trainer: Any) -> dict[str, Tensor]:
    """Return a copy of a trainer's weights by name."""
    return {name: value.detach().double() for name, value in trainer.model.named_parameters()}


def trained(given: Given, share: bool | None = None, own: bool = True) -> Training:
    """Train a set."""
    heard, log = Said(), logging.getLogger("trl.gcpo")
    log.handlers, log.propagate = [heard], False
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer = trainer_of(given, folder, share, own)
        if "resume" in given:
            trainer.train()
            trainer = trainer_of(given, folder, share, own)
        before, read = weights(trainer), [0]

        def count(_: nn.Module, ids: tuple[Tensor, ...], __: Any) -> None:
            read[0] += ids[0].numel()

        trainer.model.get_input_embeddings().register_forward_hook(count)
        checkpoint = f"{folder}/checkpoint-{given['resume']}" if "resume" in given else None
        trainer.train(resume_from_checkpoint=checkpoint)
    for warning in warned:
        heard.hear(warning.message)
    return Training(before, weights(trainer), trainer.state.log_history, read[0], heard.why)


# --- what is compared -------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A set and its three trainings, compared."""

    name: str
    off: str  # "equal bit for bit", or how far weights and logs are apart
    movement: float = math.nan  # of TRL's weights
    on: float = math.nan  # how far the weights are from TRL's, as a share of the movement
    logs: str = ""  # the number of the log that is furthest from TRL's
    shared: str = ""
    tokens_trl: int = 0
    tokens_off: int = 0
    tokens_on: int = 0
    passed: bool = False


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the Euclidean distance between weights."""
    return math.sqrt(sum(float((one[name] - value).square().sum()) for name, value in other.items()))


def furthest(one: Training, other: Training) -> str:
    """Return the number of the logs that differs most, or nothing; a number that a log lacks is NaN there."""
    worst, said = 0.0, ""
    for first, second in zip(one.logs, other.logs, strict=True):
        for name in sorted(first.keys() | second.keys()):
            a, b = first.get(name, math.nan), second.get(name, math.nan)
            if a == b or (math.isnan(a) and math.isnan(b)) or re.search("time|per_second", name):
                continue
            apart = abs(a - b) / max(abs(a), abs(b), 1e-3)
            if not apart <= worst:  # NaN is furthest
                worst, said = apart, f"{name} {a:.6g} / {b:.6g}"
    return said


def examine(name: str) -> Row:
    """Train a set three times and compare."""
    given = SETS[name]
    plain = trained(given, own=False)
    off, on = trained(given, False), trained(given)
    moved, away = distance(plain.before, plain.after), distance(plain.after, on.after)
    apart, logs = distance(plain.after, off.after), furthest(plain, off)
    said = f"weights {apart:.2g} apart, {logs}" if apart or logs else "equal bit for bit"
    share = away / moved if moved else away
    why = f"fallen back: {on.why}" if on.why else "shared" if on.read < off.read else "not shared"
    figures = float(f"{moved:.3g}"), float(f"{share:.2g}"), furthest(plain, on), why
    return Row(name, said, *figures, plain.read, off.read, on.read, not (apart or logs) and share <= NEAR)


def tried(name: str) -> Row:
    """Return what became of a set, also where a training ends with an error."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return examine(name)
    except Exception as error:
        return Row(name, said(error))


def main() -> int:
    """Print a line per set, and write the table where all sets were tried."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help='a pattern, such as "families: *" or "*tools*"')
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    transformers.logging.set_verbosity_error()
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    names = [name for name in SETS if fnmatch.fnmatch(name, options.only)]
    rows = {}
    for name, row in in_processes(tried, names, options.jobs, LIMIT, Row):
        rows[name] = row
        told = f"{row.off}; on {row.on:.2g}, {row.shared}, {row.tokens_on} of {row.tokens_trl} tokens; {row.logs}"
        print(f"{'' if row.passed else 'FAILED '}{name}: {told}", flush=True)
    if len(rows) == len(SETS):
        with RESULTS.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            versions = {library.__name__: library.__version__.split("+")[0] for library in (trl, transformers, torch)}
            writer.writerow([*Row._fields, *versions])
            writer.writerows([*rows[name], *versions.values()] for name in names)
    failed = [name for name, row in rows.items() if not row.passed]
    print(f"{len(rows) - len(failed)} of {len(rows)} sets pass" + "".join(f"\n  not: {name}" for name in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
