"""Helpers of several test modules: tiny trainers, scripted completions, stand-ins for models, and a spy on TRL."""

import importlib
import re
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import trl
from datasets import Dataset
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

import gcpo
from gcpo.rollouts import Rollouts
from gcpo.semantics import NO_ANSWER, Entailment
from gcpo.tasks.sampling import load_policy

# --- property tests -------------------------------------------------------------------------------------------------

seeds = st.integers(0, 2**31 - 1)
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


def case_id(value: object) -> str:
    """A case's name without addresses in memory, which differ between the workers that must collect the same tests."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def for_all(examples: int = 30, **strategies: st.SearchStrategy) -> Callable:
    """A property test without a time limit: the first call also pays for what the libraries load lazily."""
    return lambda test: hypothesis_settings(deadline=None, max_examples=examples)(given(**strategies)(test))


# --- a generation batch ---------------------------------------------------------------------------------------------

G, PROMPTS, STEPS = 4, 3, 3
ROWS = G * PROMPTS
LONGEST = 6  # tokens of a completion; the untrained policy's token is a byte

OFF_POLICY = {"num_iterations": 2}
SPLIT = {"per_device_train_batch_size": G, "steps_per_generation": PROMPTS}  # off-policy: a step per group's worth
ACCUMULATED = {"per_device_train_batch_size": G, "gradient_accumulation_steps": PROMPTS}
# What a method cannot do without: two steps per generation for ratios other than 1, TRL's reference for GRPO-CARE.
NEEDS: dict[str, dict[str, Any]] = {
    "r2vpo": OFF_POLICY,
    "clip_cov": {**OFF_POLICY, "method_options": {"band": (0.01, 5.0)}},  # tokens of an untrained policy covary little
    "kl_cov": OFF_POLICY,
    "care": {"beta": 1e-3},
}

# Completions of all lengths, from none (an end-of-sequence token) to cut off. The answer is the last word.
TEXTS = ("ape", "to eat", "", "I ate", "no", "oh no", "io", "a ooo", "ooo", "at ease", "ae", "up")
# Entirely wrong, as 1 is not above the middle; mixed, and one without a reward; entirely right.
MIXED = ((0, 0.5, 0, 1), (0, None, 2, 0.5), (2, 2, 2, 2))
Rewards = Sequence[float | None]


def last_word(text: str) -> str | None:
    return text.split()[-1] if text.split() else None


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def draw(text: str, among: int) -> int:
    """A number of 0, ..., among - 1 that a text decides."""
    return zlib.crc32(text.encode()) % among


def letter(text: str) -> str | None:
    """An answer of four, or none."""
    return (None, "a", "e", "io", "oo")[draw(text, 5)]


def reward(completions: list[Any], **_: Any) -> list[float]:
    """0, 0.5, ..., 2: completions differ in it, and some are right."""
    return [draw(text_of(completion), 5) / 2 for completion in completions]


def table(*groups: Rewards) -> Callable[..., list[float | None]]:
    """A reward function that gives these rewards, whatever the completions."""

    def fixed(completions: list[Any], **_: Any) -> list[float | None]:
        assert len(completions) == ROWS
        return [value for group in groups for value in group]

    return fixed


def numbers(values: Any) -> Tensor:
    """Rewards as a tensor, NaN where there is none."""
    return torch.tensor([[torch.nan if value is None else float(value) for value in group] for group in values])


def by_group(rows: Any) -> Tensor:
    return torch.as_tensor(rows).unflatten(0, (PROMPTS, G))


# --- models of meaning ----------------------------------------------------------------------------------------------


def vowel_counts(texts: Sequence[str]) -> Tensor:
    """An embedder of four dimensions: how often each vowel occurs."""
    return torch.tensor([[1.0 + text.count(v) for v in "aeio"] for text in texts])


def first_letter(pairs: Sequence[tuple[str, str]]) -> Tensor:
    """An entailment model: texts entail one another when they begin alike, else they contradict."""
    return torch.tensor([[0.9, 0.05, 0.05] if p[:1] == h[:1] else [0.05, 0.05, 0.9] for p, h in pairs])


LABELS = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")
WORDS = ["a", "the", "cat", "dog", "house", "red", "blue", "by", "in", "sea"]


def save_classifier(folder: Path, kind: str = "bert", labels: Sequence[str] = LABELS) -> Path:
    """A random classifier of at most 16 tokens, in Hub format; the same weights whatever its labels are called."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)
    torch.manual_seed(0)
    positions = {"bert": 16, "roberta": 18}[kind]  # RoBERTa's begin after that of the padding token
    shape = {
        "vocab_size": len(vocabulary),
        "max_position_embeddings": positions,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "initializer_range": 0.5,  # far from uniform probabilities
        "pad_token_id": 1,
        "id2label": dict(enumerate(labels)),
    }
    AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **shape)).save_pretrained(folder)
    return folder


def save_embedder(folder: Path) -> Path:
    """A random encoder of sentences, the mean of its tokens, in the format of sentence-transformers."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    encoder = Transformer(str(save_classifier(folder.with_name("encoder"))))
    SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension())]).save(str(folder))
    return folder


# --- trainers -------------------------------------------------------------------------------------------------------


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS,
        "num_generations": G,
        "max_completion_length": LONGEST,
        "learning_rate": 1e-2,
        "max_steps": STEPS,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 7,
        "use_cpu": True,
        "bf16": False,
        **changes,
    }


def dataset(conversational: bool = True) -> Dataset:
    texts = [f"Say {word}" for word in "one two three four five six seven eight nine ten".split()]
    prompts = [[{"role": "user", "content": text}] if conversational else text for text in texts]
    return Dataset.from_dict({"prompt": prompts})


def script(path: str) -> Any:
    """A script of the repository, as a module that its own processes find too."""
    file = Path(gcpo.__file__).parents[1] / path
    sys.path.append(str(file.parent))
    return importlib.import_module(file.stem)


def make_trainer(scratch: Path, folder: Path, method: str, **changes: Any) -> gcpo.GCPOTrainer:
    """A GCPOTrainer of the untrained policy; what is no setting of GCPOConfig is an argument of the trainer."""
    model, tokens = load_policy(str(scratch))
    if made := changes.pop("made", None):  # a policy of another kind
        model = made(len(tokens))
    arguments: dict[str, Any] = {
        "reward_funcs": reward,
        "train_dataset": dataset(),
        "processing_class": tokens,
        "answer_extractor": letter,
        "embedder": vowel_counts,
        "entailment": Entailment(first_letter),
    }
    for name in {*arguments, "callback", "peft_config", "rollout_func"} & changes.keys():
        arguments[name] = changes.pop(name)
    # TRL's own pass, to compare with to the bit; test_prefix.py compares passes that share prompts with it.
    changes = {"reward_range": (0.0, 2.0), "share_prompts": False, **NEEDS.get(method, {}), **changes}
    args = gcpo.GCPOConfig(method=method, **settings(folder, **changes))
    return gcpo.GCPOTrainer(model, args=args, **arguments)


def losses(trainer: trl.GRPOTrainer) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """(loss, gradient norm) of each step of a training, and the trained weights."""
    trainer.train()
    steps = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    return steps, {name: value.clone() for name, value in trainer.model.state_dict().items()}


def check_finite(trainer: trl.GRPOTrainer) -> None:
    """Trains: every loss, gradient norm and parameter of it is finite."""
    steps, parameters = losses(trainer)
    assert len(steps) == trainer.args.max_steps
    assert torch.tensor(steps).isfinite().all()
    assert all(value.isfinite().all() for value in parameters.values())


def generate(trainer: trl.GRPOTrainer) -> dict[str, Any]:
    """The first generation batch in its order: every prompt's rows are next to one another."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    torch.manual_seed(3)
    return trainer._generate_and_score_completions([trainer.train_dataset[i] for i in range(PROMPTS) for _ in range(G)])


def loss_of(trainer: trl.GRPOTrainer, batch: dict[str, Any]) -> Tensor:
    return trainer._compute_loss(trainer.model, batch)


def move(trainer: trl.GRPOTrainer, by: float = 0.03) -> None:
    """Moves the policy, as steps of an optimiser would."""
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=noise))


def tokens_of(values: Tensor, mask: Tensor) -> Tensor:
    """The values of a batch, without those of padding where there is one per token."""
    return values[mask] if values.ndim == mask.ndim else values


def extra(trainer: gcpo.GCPOTrainer, column: str) -> Tensor:
    """A column of the completions table, by group."""
    return by_group(list(trainer._logs["extra"][column]))


def logged_advantages(trainer: gcpo.GCPOTrainer) -> Tensor:
    return by_group(list(trainer._logs["advantages"]))


def assert_close(found: Any, expected: Any, about: str = "") -> None:
    found, expected = (torch.as_tensor(values, dtype=torch.float64) for values in (found, expected))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4, equal_nan=True, msg=lambda why: f"{about}: {why}")


# --- what TRL was given and gave ------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """One forward pass that TRL made for log-probabilities."""

    model: Any
    logps: Tensor
    entropies: Tensor | None
    gradient: bool


class Spy:
    """TRL's own part: every pass, the batch it has generated, and the batch that each loss has read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.passes: list[Pass] = []
        self.generated: dict[str, Any] = {}
        self.reads: list[dict[str, Any]] = []
        own = trl.GRPOTrainer
        logps, loss = own._get_per_token_logps_and_entropies, own._compute_loss
        generates = own._generate_and_score_completions

        def seen_logps(trainer: Any, model: Any, *arguments: Any, **keywords: Any) -> Any:
            found = logps(trainer, model, *arguments, **keywords)
            self.passes.append(Pass(model, found[0], found[1], torch.is_grad_enabled()))
            return found

        def seen_generation(trainer: Any, inputs: Any) -> Any:
            output = generates(trainer, inputs)
            self.generated = dict(output)
            return output

        def seen_loss(trainer: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
            value = loss(trainer, model, inputs)
            self.reads.append({**inputs, "logps": self.passes[-1].logps.detach()})
            return value

        patch.setattr(own, "_get_per_token_logps_and_entropies", seen_logps)
        patch.setattr(own, "_generate_and_score_completions", seen_generation)
        patch.setattr(own, "_compute_loss", seen_loss)

    @property
    def read(self) -> dict[str, Any]:
        """Inputs of the last loss."""
        return self.reads[-1]

    @property
    def advantages(self) -> Tensor:
        """Those that the last loss has read, by group."""
        return by_group(self.read["advantages"])

    @property
    def mask(self) -> Tensor:
        """The tokens that are the policy's own, by group."""
        tools = self.generated.get("tool_mask", torch.ones(()))
        return by_group(self.generated["completion_mask"] * tools).bool()

    @property
    def ratios(self) -> Tensor:
        """pi / pi_old in the last loss, by group."""
        return by_group((self.read["logps"] - self.passes[0].logps).exp())

    def sampled(self, trainer: trl.GRPOTrainer) -> list[Pass]:
        """The passes through the policy that were made for the generation."""
        return [one for one in self.passes if one.model is trainer.model and not one.gradient]


def rollouts_of(trainer: gcpo.GCPOTrainer, spy: Spy, rewards: Any, begins: Any = None, **features: Tensor) -> Rollouts:
    """Rollouts for a method, put together by plain code from texts and from the passes that TRL has made.

    ``begins``: the place in a text where its answer does; None: the last word, which is the answer itself.
    """
    args, begins = trainer.args, begins or (lambda text: text.rfind(" ") + 1)
    texts = [text_of(completion) for completion in trainer._logs["completion"]]
    answers = [last_word(text) for text in texts]
    shown = texts if args.use_full_completion_for_clustering else answers

    def relation(i: int, j: int) -> list[float]:
        """Entailment of row j by row i; a missing answer contradicts all others."""
        if i == j:
            return [1.0, 0.0, 0.0]
        if answers[i] is None or answers[j] is None:
            return [0.0, 0.0, 1.0]
        return [1.0, 0.0, 0.0] if shown[i] == shown[j] else first_letter([(shown[i], shown[j])])[0].tolist()

    groups = [range(G * q, G * (q + 1)) for q in range(PROMPTS)]
    nli = torch.tensor([[[relation(i, j) for j in rows] for i in rows] for rows in groups])
    exact = [[next(j for j in rows if j == i or answers[j] == answers[i] is not None) for i in rows] for rows in groups]
    place = torch.arange(spy.mask.shape[-1])
    sampled = spy.sampled(trainer)
    references = [one.logps for one in spy.passes if one.model is trainer.ref_model]
    entropies = [one.entropies for one in sampled if one.entropies is not None]
    found = {
        "embeddings": by_group(vowel_counts([NO_ANSWER if text is None else text for text in shown])),
        "nli": nli,
        # Who begins alike entails one another, so that the first that entails a response represents its cluster.
        "clusters": (nli[..., 0] >= args.entailment_threshold).int().argmax(1),
        "exact_clusters": torch.tensor(exact),
        "answered": by_group([answer is not None for answer in answers]),
        "mask": spy.mask,
        "answer_mask": spy.mask & (place >= by_group([begins(text) for text in texts]).unsqueeze(-1)),
        **({"logps": by_group(sampled[0].logps)} if sampled else {}),
        **({"entropies": by_group(entropies[0])} if entropies else {}),
        **({"ref_logps": by_group(references[0])} if references else {}),
        **features,
    }
    limits = {"reward_range": args.reward_range, "max_completion_length": trainer.max_completion_length}
    return Rollouts(numbers(rewards), **limits, **found)


# --- two processes --------------------------------------------------------------------------------------------------

# Three groups of four rows over two processes of six: the middle group lies in both.
STRADDLING = {"per_device_train_batch_size": ROWS}
# All tokens of the band: which of them a smaller share is depends on the order into which TRL shuffles rows.
BAND = {"method_options": {"band": (0.01, 5.0), "share": 1.0}}

# Name -> method and settings of one process; each of several takes its share of per_device_train_batch_size.
DISTRIBUTED: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        method: (method, STRADDLING)
        for method in "dr_grpo dapo gcpo_bot gcpo_shuffled seed_grpo empo care edge_grpo egpo cw_grpo".split()
    },
    **{f"{method}, 2 iterations": (method, {**STRADDLING, **OFF_POLICY}) for method in ("egpo", "r2vpo", "kl_cov")},
    "clip_cov": ("clip_cov", {**STRADDLING, **BAND}),
    "gcpo_bot, one group": ("gcpo_bot", {"per_device_train_batch_size": G}),  # half of it in each process
    "gcpo_bot, shared prompts": ("gcpo_bot", {**STRADDLING, "share_prompts": True}),
    "dapo, accumulated": ("dapo", ACCUMULATED),
    "cw_grpo, accumulated": ("cw_grpo", ACCUMULATED),
    "egpo, equalised": ("egpo", {**STRADDLING, "equalize_mean": True}),
    "gcpo_bot, checkpointed": ("gcpo_bot", {**STRADDLING, "share_prompts": True, "gradient_checkpointing": True}),
}
# Of these, what is trained once more with weights that the processes share out.
SHARED_OUT = ("gcpo_bot", "gcpo_bot, shared prompts", "gcpo_bot, checkpointed", "cw_grpo")
