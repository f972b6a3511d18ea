"""A training step at the size of GCPO's experiments, on one GPU: time of its phases, memory, and V(q).

The policy has the shape of Qwen2.5-1.5B and random weights, which take as long as trained ones; settings are those of
`params/paper.yaml`, prompts have 512 tokens and answers 256. Entailment model and embedder have the shapes of
roberta-large and MiniLM. The first trainer samples, and all others are given its answers; generation is measured with
prompts that each row reads and with shared ones, by one trainer each, and its median counts in every step. As
sampling varies, the part `sampling` lets both take turns.

`python benchmarks/paper_scale.py` writes `paper_training.csv`, `paper_sampling.csv`, `paper_passes.csv` and
`paper_variance.csv` to `benchmarks/results` after every case, and ends with 1 where a limit is missed; what does not
fit the GPU is named and left out. `--micro-batch N` takes another size than that profile's, and adds it to the files'
names. `--rehearse` does all of it at toy size, and writes nothing.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import torch
import trl.trainer.grpo_trainer
from datasets import Dataset
from parts import group, loss_of_group
from peft import LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from timing import Line, alternating, now, quartiles, ratio, report
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.autograd import DeviceType
from torch.profiler import profile
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from gcpo.gradients import gradient_variance
from gcpo.one_pass import gradient_grams
from gcpo.runs.distributed import forget_peak, peak_memory
from gcpo.runs.policies import quiet
from gcpo.runs.profiles import load_profile
from gcpo.semantics import Embedder, Entailment
from gcpo.trainer import GCPOConfig, GCPOTrainer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 4  # of each trainer, of which the first counts not


class Size(NamedTuple):
    """How large everything is."""

    policy: dict[str, int]
    encoder: dict[str, int]  # the entailment model
    group: int
    prompts: int
    batch: int
    prompt: int
    answer: int


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TOY = Size(
    policy={**SMALL, "num_key_value_heads": 1, "vocab_size": 600},
    encoder={**SMALL, "vocab_size": 600},
    **{"group": 4, "prompts": 2, "batch": 2, "prompt": 32, "answer": 16},
)
PAPER = Size(
    policy={  # as config.json of Qwen/Qwen2.5-1.5B-Instruct has it
        **{"vocab_size": 151936, "tie_word_embeddings": True, "hidden_size": 1536, "num_hidden_layers": 28},
        **{"num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960},
    },
    encoder={
        **{"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        **{"vocab_size": 50_265},
    },
    **{"group": 16, "prompts": 8, "batch": load_profile("paper")["micro_batch"], "prompt": 512, "answer": 256},
)


class Case(NamedTuple):
    """A trainer that is measured, and the most that its step may take of TRL's."""

    method: str | None  # None: TRL's own
    shares: bool = False
    whole: bool = False  # embeds and clusters whole answers, as for mathematics, and not their first words
    limit: float | None = None

    def __str__(self) -> str:
        of = ", whole answers" if self.whole else ""
        return f"{self.method or 'TRL'}{of}{', shared' if self.shares else ''}"


# Limits were set before anything had run on a GPU: what a method that reads nothing, embeddings or entailment may add.
# TRL's own comes first, in the middle and last, so that a machine that grows faster or slower shows.
CASES = [
    Case(None),
    Case("grpo", shares=True, limit=1.0),
    Case("gcpo_bot", shares=True, limit=1.0),
    Case("gcpo_cd", shares=True, limit=1.0),
    Case("grpo", limit=1.02),
    Case("gcpo_bot", limit=1.10),
    Case("gcpo_cd", limit=1.03),
    Case("cw_grpo", limit=1.25),
    Case(None),
    Case("gcpo_bot", whole=True, shares=True, limit=1.0),
    Case("gcpo_bot", whole=True, limit=1.10),
    Case("egpo", limit=1.25),
    Case("egpo", shares=True),
    Case("cw_grpo", shares=True),
    Case(None),
]


# --- what is trained and what judges ----------------------------------------------------------------------------------


def policy(size: Size, dtype: torch.dtype = torch.float32) -> Any:
    """Return a policy with random weights, always the same."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", **size.policy, max_position_embeddings=2048)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


@cache
def words(count: int, longest: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of so many words, which are w4, w5, ..."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = {word: place for place, word in enumerate([*special, *(f"w{i}" for i in range(4, count))])}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokens, model_max_length=longest, **named)


def judges(size: Size, folder: Path) -> tuple[Embedder, Entailment]:
    """Return an embedder and an entailment model with random weights."""
    tokens = words(size.encoder["vocab_size"], 512)
    pair = {"single": "<s> $A </s>", "pair": "<s> $A </s> </s> $B </s>"}
    tokens.backend_tokenizer.post_processor = processors.TemplateProcessing(
        **pair, special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    labels = {0: "contradiction", 1: "neutral", 2: "entailment"}
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "entailment": (AutoModelForSequenceClassification, {"id2label": labels, "num_labels": 3, **size.encoder}),
        "encoder": (AutoModel, {**size.encoder, "hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536,
                                "num_attention_heads": 12}),
    }  # fmt: skip
    for name, (kind, settings) in kinds.items():
        config = AutoConfig.for_model("roberta", max_position_embeddings=514, type_vocab_size=1, **settings)
        torch.manual_seed(0)
        with torch.device(DEVICE):
            kind.from_config(config).save_pretrained(folder / name)
        tokens.save_pretrained(folder / name)
    encoder = Transformer(str(folder / "encoder"), max_seq_length=256)
    SentenceTransformer(modules=[encoder, Pooling(384)], device="cpu").save(str(folder / "embedder"))
    return Embedder(folder / "embedder", cache_size=1), Entailment(folder / "entailment", cache_size=1)


def reward(completions: list[str], **_: Any) -> list[float]:
    """Call half of all texts right."""
    return [float(zlib.crc32(text.encode()) % 2) for text in completions]


reward.reward_range = (0.0, 1.0)  # type: ignore[attr-defined]


# --- a step -----------------------------------------------------------------------------------------------------------


class Clock(TrainerCallback):  # type: ignore[misc]
    """Seconds of each step of a trainer, and of the calls within it that are watched."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.peak = 0.0

    def watch(self, trainer: Any, name: str) -> None:
        """Measure a method of the trainer."""
        call: Callable[..., Any] = getattr(trainer, name)

        def measured(*arguments: Any, **keywords: Any) -> Any:
            started = now()
            found = call(*arguments, **keywords)
            self.steps[-1][name] += now() - started
            return found

        setattr(trainer, name, measured)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.steps:  # the optimiser's states are there
            forget_peak()
        self.steps.append(defaultdict(float, step=-now()))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps[-1]["step"] += now()
        self.peak = peak_memory()

    def seconds(self, name: str) -> list[float]:
        """Return the seconds of each step but the first."""
        return [step[name] for step in self.steps[1:]]

    def less(self, part: str, whole: str) -> list[float]:
        """Return the seconds of each step but the first in the whole, without those in its part."""
        return [every - some for some, every in zip(self.seconds(part), self.seconds(whole), strict=True)]


SAMPLES, SCORES = "_generate_single_turn", "_generate_and_score_completions"


def trained(
    case: Case, size: Size, folder: Path, judging: Any, sample: Callable[..., Any], steps: int = STEPS
) -> Clock:
    """Train a new policy for a few steps. `sample` gets the trainer, its own way to sample, and what that is given."""
    trl.trainer.grpo_trainer.create_model_from_path = lambda *_, **__: policy(size)  # the reference: it has no path
    profile = load_profile("paper")
    settings: dict[str, Any] = {
        **{"per_device_train_batch_size": size.batch, "num_generations": size.group, "max_steps": steps},
        **{"gradient_accumulation_steps": size.prompts * size.group // size.batch, "report_to": "none"},
        **{"max_completion_length": size.answer, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True},
        **{key: profile[key] for key in ("learning_rate", "beta", "temperature")},
        **{**profile["grpo"], "bf16": DEVICE == "cuda"},
    }
    prompts = [" ".join(f"w{4 + (7 * i + 31 * j) % 500}" for j in range(size.prompt)) for i in range(size.prompts)]
    given: dict[str, Any] = {
        **{"reward_funcs": reward, "train_dataset": Dataset.from_dict({"prompt": prompts})},
        "processing_class": words(size.policy["vocab_size"], 2048),
    }
    if case.method is None:
        trainer = GRPOTrainer(policy(size), args=GRPOConfig(str(folder), loss_type="grpo", **settings), **given)
    else:
        own = {"method": case.method, "share_prompts": case.shares, "use_full_completion_for_clustering": case.whole}
        own["entailment_threshold"] = 1.0  # none follows from another: as many questions as GCPO's rule can ask
        args = GCPOConfig(str(folder), **own, **settings)
        given |= {"embedder": judging[0], "entailment": judging[1], "answer_extractor": first_words}
        trainer = GCPOTrainer(policy(size), args=args, **given)
    clock = Clock()
    setattr(trainer, SAMPLES, partial(sample, trainer, getattr(trainer, SAMPLES)))
    clock.watch(trainer, SAMPLES)
    clock.watch(trainer, SCORES)
    trainer.add_callback(clock)
    trainer.train()
    return clock


def first_words(text: str) -> str:
    """Return an answer of a few words."""
    return " ".join(text.split()[:6])


def generation_of(size: Size) -> str:
    """Return what lines call the sampling of a step."""
    return f"generation of {size.prompts * size.group} answers"


def free() -> None:
    """Give back what was held before."""
    gc.collect()
    torch.cuda.empty_cache()  # without a GPU it does nothing


def training(size: Size, lines: list[Line], write: Callable[[], object]) -> None:
    """Make the lines of all cases anew after each."""
    generation: dict[bool, list[float]] = {}
    found: dict[Case, list[Clock]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        judging, answers = judges(size, Path(folder)), []
        for case in CASES:
            samples = case.shares not in generation

            def sample(_: Any, sampled: Callable[..., Any], *given: Any, samples: bool = samples, **named: Any) -> Any:
                if samples:
                    answers[:] = sampled(*given, **named)
                return tuple(answers)

            try:
                clock = trained(case, size, Path(folder), judging, sample)
            except torch.cuda.OutOfMemoryError as error:  # what the others take is still worth knowing
                print(f"{case}: {error}", flush=True)
                continue
            finally:
                free()
            if samples:
                generation[case.shares] = clock.seconds(SAMPLES)
            found[case].append(clock)
            lines[:] = [
                Line(generation_of(size) + ", shared" * shares, "", *quartiles(taken), "s", rounds=len(taken))
                for shares, taken in generation.items()
            ]
            for one, clocks in found.items():
                lines += of_case(one, clocks, found[CASES[0]], generation)
            write()


def of_case(case: Case, clocks: list[Clock], own: list[Clock], generation: dict[bool, list[float]]) -> list[Line]:
    """Return the lines of one case: a step over TRL's, and what it is made of."""
    sampling = {shares: statistics.median(taken) for shares, taken in generation.items()}
    whole = sampling[False] + statistics.median(rest for clock in own for rest in clock.less(SAMPLES, "step"))
    rest = [seconds for clock in clocks for seconds in clock.less(SAMPLES, "step")]
    scoring = [seconds for clock in clocks for seconds in clock.less(SAMPLES, SCORES)]
    ratios = [(sampling[case.shares] + seconds) / whole for seconds in rest]
    return [
        Line(f"{case}, step", "TRL", *quartiles(ratios), limit=case.limit, rounds=len(rest)),
        Line(f"{case}, without generation", "", *quartiles(rest), "s", rounds=len(rest)),
        Line(f"{case}, of it rewards and scores", "", *quartiles(scoring), "s", rounds=len(rest)),
        Line(f"{case}, memory", "", *quartiles([max(clock.peak for clock in clocks)]), "GB"),
    ]


def sampling(size: Size, lines: list[Line], write: Callable[[], object]) -> None:
    """Add the lines of a step's answers, sampled with prompts that each row reads and with shared ones in turn."""
    name = generation_of(size)

    def in_turn(trainer: Any, sampled: Callable[..., Any], *given: Any, **named: Any) -> Any:
        def call(shares: bool) -> Any:
            trainer._shares = shares
            return sampled(*given, **named)

        times = alternating({name: partial(call, False), f"{name}, shared": partial(call, True)}, rounds=9)
        lines.extend(Line(case, "", *quartiles(taken), "s", rounds=len(taken)) for case, taken in times.items())
        lines.append(ratio(f"{name}, shared", name, times))
        write()
        return call(True)

    with tempfile.TemporaryDirectory() as folder:
        trained(Case("grpo", shares=True), size, Path(folder), (None, None), in_turn, steps=1)
    free()


# --- single passes ----------------------------------------------------------------------------------------------------


def passes(size: Size, lines: list[Line], write: Callable[[], object]) -> None:
    """Add the lines of one micro-batch, its loss and gradient, and of the entailment model on all pairs of a step."""
    model = policy(size)
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs",))
    model.gradient_checkpointing_enable()
    model.train()
    for prompts, shares in ((size.batch, False), (1, True)):
        ids = group(model, size.batch, size.prompt, size.answer, prompts)[0]
        step = partial(loss_of, model, ids, size.prompt, shares)
        times = alternating({"": step}, rounds=5, warm=2)[""]
        name = f"{size.batch} answers to {prompts} prompt{'s' * (prompts > 1)}, {'shared' if shares else 'plain'}"
        lines.append(Line(name, "", *quartiles(times), "s", rounds=len(times)))
        with profile() as profiler:
            step()
        events = profiler.key_averages()
        busy = sum(event.self_device_time_total for event in events if event.device_type == DeviceType.CUDA) / 1e6
        lines.append(Line(f"{name}, of it the GPU computes", "", *quartiles([busy]), "s"))
        write()
    del model, step
    free()
    with tempfile.TemporaryDirectory() as folder:
        entailment = judges(size, Path(folder))[1]
        rows = torch.randint(4, size.encoder["vocab_size"], (size.prompts * size.group, size.answer)).tolist()
        texts = [" ".join(f"w{word}" for word in row) for row in rows]
        groups = [texts[start : start + size.group] for start in range(0, len(texts), size.group)]
        pairs = [pair for group in groups for pair in permutations(group, 2)]
        times = alternating({"": lambda: entailment.pairs(*zip(*pairs, strict=True))}, rounds=2)[""]
    lines.append(Line(f"entailment of {len(pairs)} pairs", "", *quartiles(times), "s", rounds=len(times)))
    write()


def loss_of(model: Any, ids: torch.Tensor, width: int, shares: bool) -> None:
    """Compute the loss and its gradient, as in training."""
    with torch.autocast(DEVICE, torch.bfloat16):
        loss_of_group(model, ids, width, shares)


# --- V(q) -------------------------------------------------------------------------------------------------------------


def variance(size: Size, lines: list[Line], write: Callable[[], object]) -> None:
    """Add the lines of V(q) of one group, by one pass and by a backward pass for each answer."""
    advantages = torch.linspace(-1.0, 1.5, size.group)
    adapters = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
    for what in ("all weights", "adapters"):
        model = policy(size, torch.bfloat16).eval()
        batch = group(model, size.group, size.prompt, size.answer)
        model = get_peft_model(model, adapters).eval() if what == "adapters" else model
        calls: dict[str, Callable[[], Any]] = {
            "one pass": partial(gradient_grams, model, *batch),
            "a pass for each": partial(gradient_variance, model, *batch, advantages),
        }
        for name, call in calls.items():
            free()
            forget_peak()
            try:
                times = alternating({"": call}, rounds=2)[""]
            except torch.cuda.OutOfMemoryError as error:
                print(f"V(q), {what}, {name}: {error}", flush=True)
                continue
            lines.append(Line(f"V(q), {what}, {name}", "", *quartiles(times), "s", rounds=len(times)))
            lines.append(Line(f"V(q), {what}, {name}, memory", "", *quartiles([peak_memory()]), "GB"))
            write()
        del model, calls, call


PARTS = {"training": training, "sampling": sampling, "passes": passes, "variance": variance}


def main() -> int:
    """Print and write the lines of the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} [all]")
    parser.add_argument("--micro-batch", type=int, default=PAPER.batch, metavar="N", help="[%(default)s]")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    if DEVICE == "cpu" and not options.rehearse:
        sys.exit("paper_scale.py: torch sees no GPU here; --rehearse tries it at toy size")
    quiet()
    size = TOY if options.rehearse else PAPER._replace(batch=options.micro_batch)
    other = "" if options.micro_batch == PAPER.batch else f"_{options.micro_batch}"
    missed = 0
    for part in options.parts or PARTS:
        lines: list[Line] = []

        def write(part: str = part, lines: list[Line] = lines) -> int:
            return 0 if options.rehearse else report(f"paper_{part}{other}", lines)

        PARTS[part](size, lines, write)
        if options.rehearse:
            print(*lines, sep="\n")
        missed += write()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
