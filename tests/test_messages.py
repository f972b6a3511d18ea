"""Every message that a user can meet, word for word: errors, warnings, and what the command line refuses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from gcpo import GCPOConfig, GCPOTrainer, gradients, measures, rewards, semantics, statistics
from gcpo.cli import main
from gcpo.methods import advantages, base_advantages, get_method, weights
from gcpo.rollouts import Rollouts
from gcpo.tasks import get_task
from gcpo.tasks.base import Row, field, read_rows
from gcpo.weights import alpha_g

GOLDEN = json.loads((Path(__file__).parent / "golden" / "messages.json").read_text(encoding="utf-8"))
TMP = re.compile(rf"{re.escape(tempfile.gettempdir())}[/\\]gcpo-messages-\w+")
# What a model library or the Hub's client gives as its reason is theirs to word.
CAUSE = re.compile(r"(cannot be loaded|could not be read from the Hub): .*?\. (?=Without |Is the folder )", re.DOTALL)

Z, ONES, NAN = torch.zeros, torch.ones, float("nan")
SIZES = {"vocab_size": 4, "hidden_size": 2, "intermediate_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1}

folder = partial(tempfile.TemporaryDirectory, prefix="gcpo-messages-")


# --- how a message is made ------------------------------------------------------------------------------------------


def rollouts(**features: Tensor) -> Rollouts:
    """Three groups of two, all with the same reward."""
    return Rollouts(ONES(3, 2), **features)


def directionless(method: str) -> Tensor:
    """Weights where the embeddings of the last group are zeros, which makes its dispersion NaN."""
    embeddings = ONES(3, 2, 4)
    embeddings[2] = 0
    return weights(method, rollouts(embeddings=embeddings, clusters=Z(3, 2).long()))


def variance(
    ids: tuple[int, ...] = (2, 3),
    attended: Tensor | None = None,
    scored: Tensor | None = None,
    scale: tuple[float, ...] = (1.0, 1.0),
    params: str | list[str] | None = None,
    temperature: float = 1.0,
) -> object:
    """The gradient variance of two rows of three tokens, of which the last is the completion."""
    attended = ONES(2, 3) if attended is None else attended
    scored = torch.tensor([[0, 0, 1]] * 2) if scored is None else scored
    model = nn.ModuleDict({"embed": nn.Embedding(5, 2).requires_grad_(False), "head": nn.Linear(2, 5)})
    chosen: dict[str, Any] = {"params": params, "temperature": temperature}
    return gradients.gradient_variance(model, Z(*ids).long(), attended, scored, scale, **chosen)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a", pad_token="a", eos_token="a")


def inside(use: Callable[[Path], object], name: str = "absent", content: str | None = None) -> Any:
    """``use`` with a path in a folder of its own, where a file of this content is, or nothing."""
    with folder() as path:
        if content is not None:
            Path(path, name).write_text(content)
        return use(Path(path, name))


def classifier(*labels: str) -> object:
    """An entailment model whose labels have these names."""
    from transformers import BertConfig, BertForSequenceClassification

    with folder() as path:
        tokenizer().save_pretrained(path)
        BertForSequenceClassification(BertConfig(**SIZES, id2label=dict(enumerate(labels)))).save_pretrained(path)
        return semantics.Entailment(path, device="cpu")


def config(**changes: Any) -> GCPOConfig:
    """Settings of two groups of four per step."""
    usual = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none"}
    return GCPOConfig(**{**usual, "per_device_train_batch_size": 8, "num_generations": 4, **changes})


def trainer(**changes: Any) -> GCPOTrainer:
    """A trainer with two reward functions."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    def brevity(**_: Any) -> list[float]:
        return []

    def exactness(**_: Any) -> list[float]:
        return []

    policy, prompts = LlamaForCausalLM(LlamaConfig(**SIZES)), Dataset.from_list([{"prompt": "a"}] * 8)
    with folder() as path:
        args = config(output_dir=path, **changes)
        return GCPOTrainer(policy, [brevity, exactness], args, train_dataset=prompts, processing_class=tokenizer())


def quiz(record: Any) -> list[Row]:
    return [Row(field(record, "id", str), "What is it?", ("a quiz",))]


def rows(content: str | None, **settings: Any) -> object:
    """The split "test" of a data folder that has this content for it; None: a folder that has another split only."""
    with folder() as path, mock.patch.dict(os.environ, GCPO_DATA_DIR=path):
        Path(path, "quiz").mkdir()
        Path(path, "quiz", "train.jsonl" if content is None else "test.jsonl").write_text(content or "")
        return read_rows("quiz", "test", quiz, hub=("", None), **settings)


def hub(path: Path) -> object:
    with mock.patch.dict(os.environ, GCPO_DATA_DIR=""):
        return read_rows("quiz", "test", quiz, hub=(str(path), None))


def command(*arguments: str, open_list: bool = False) -> dict[str, Any]:
    """Exit status and stderr of the command line; a list of names that may grow is left out."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        status = main(list(arguments))
    said = stderr.getvalue()
    return {"exit": status, "stderr": "".join(said.partition("Valid names:")[:2]) if open_list else said}


def given(*pairs: str, open_list: bool = False) -> dict[str, Any]:
    """A run with these parameters: key, value, key, value and so on."""
    options = [word for at in range(0, len(pairs), 2) for word in ("-p", pairs[at], pairs[at + 1])]
    return command("run", *options, open_list=open_list)


def profile(content: str, open_list: bool = False) -> dict[str, Any]:
    return inside(lambda file: command("run", "--profile", str(file), open_list=open_list), "mine.yaml", content)


def grid(content: str) -> dict[str, Any]:
    return inside(lambda file: command("grid", str(file)), "mine.yaml", content)


# --- the cases ------------------------------------------------------------------------------------------------------

# Products that make no sense.
PRODUCTS = "se*se empo*care dr_grpo*dapo gcpo_shuffled*egpo egpo*egpo_c1 dapo*egpo bot_only*gcpo_bot".split()

# Options that a method does not have, and values that an option cannot have.
OPTIONS: list[tuple[str, str, Any]] = [
    ("se", "from", "linear"),
    ("bot_only", "estimator", "rao"),
    ("grpo", "form", "linear"),
    ("se", "form", "cubic"),
    ("se", "estimator", "bayes"),
    ("gcpo_bot", "clusters", "fuzzy"),
    ("egpo", "renorm", "always"),
    ("egpo", "correct", [2.0, 1.0]),
    ("dapo", "share", 0.0),
    ("gcpo_bot", "alpha_norm", "log"),
    ("gcpo_bot", "alpha_geo", "0.6"),
    ("se", "alpha_rd", 0.6),
    ("kle", "t", -0.3),
    ("gcpo_bot", "shuffle", "geo"),
    ("gcpo_shuffled", "shuffle", "cd"),
    ("edge_grpo", "epsilon", -1e-5),
]

# Settings that GCPOConfig refuses, or warns of.
CONFIGS: dict[str, dict[str, Any]] = {
    "unknown method": {"method": "gcpo_bod"},
    "options as text": {"method_options": "form=linear"},
    "negative alpha": {"alpha": -0.1},
    "alpha without effect": {"method": "egpo", "alpha": 0.6},
    "empty reward_range": {"reward_range": (1.0, 1.0)},
    "empty correctness_range": {"correctness_range": (1.0, 0.0)},
    "threshold above 1": {"entailment_threshold": 1.5},
    "one generation": {"num_generations": 1},
    "shuffled with one group": {"method": "gcpo_shuffled", "per_device_train_batch_size": 4},
    "care without a KL term": {"method": "care"},
    "token weights of sequence ratios": {"method": "cw_grpo", "importance_sampling_level": "sequence"},
    "rewards never summed": {"method": "empo", "multi_objective_aggregation": "normalize_then_sum"},
    "dapo without what is cut off": {"method": "dapo", "mask_truncated_completions": True},
    "covariances of one row": {
        "method": "clip_cov",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
    },
    "r2vpo on-policy": {"method": "r2vpo"},
    "a product with kl_cov on-policy": {"method": "rd_only*kl_cov"},
}

# Parameters that a run refuses.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "seed as text": ("seed", "x"),
    "learning rate as a truth value": ("learning_rate", "true"),
    "two at once": ("seed", "x", "dtype", "float16"),
    "unknown method": ("method", "gcpo_bott"),
    "unknown option": ("method_options", "{forn: linear}"),
    "unknown task": ("task", "tinyqaa"),
    "group size 1": ("group_size", "1"),
    "temperature 0": ("temperature", "0"),
    "shuffled with one group": ("method", "gcpo_shuffled", "prompts_per_step", "1"),
    "grpo with a field of ours": ("grpo", "{beta: 1}"),
    "no value for the task": ("max_completion_length", "{tinymath: 3}"),
}

CASES: dict[str, Callable[[], object]] = {
    # measures
    "measures: clusters": lambda: measures.barycentric_transport(Z(2, 3, 4), Z(2, 4).long()),
    "measures: estimator": lambda: measures.semantic_entropy(Z(2, 3).long(), estimator="bayes"),
    "measures: no logps": lambda: measures.semantic_entropy(Z(2, 3).long(), estimator="rao"),
    "measures: likelihoods": lambda: measures.predictive_entropy(Z(2, 3)),
    "measures: no lengths": lambda: measures.sequence_entropy(Z(2, 3), normalise=True),
    "measures: kernel": lambda: measures.kernel_language_entropy(Z(3, 3, 3), kernel="cauchy"),
    "measures: t": lambda: measures.kernel_language_entropy(Z(3, 3, 3), t=-0.5),
    "measures: nli": lambda: measures.kernel_language_entropy(Z(3, 2, 3)),
    "measures: reward_range": lambda: measures.reward_dispersion(Z(2, 3), (2.0, 0.0)),
    # methods and their weights
    "alpha_g: no group": lambda: alpha_g(0.6, 0),
    "method: unknown": lambda: get_method("gcpo_bott"),
    "method: unlike any": lambda: get_method("12345"),
    **{f"method: {product}": partial(get_method, product) for product in PRODUCTS},
    **{f"method: {name}, {key}={value}": partial(get_method, name, **{key: value}) for name, key, value in OPTIONS},
    "method: one mask of the answer": lambda: get_method("care*egpo", scope="answer"),
    "base_advantages: scale": lambda: base_advantages(Z(2, 2), "token"),
    "weights: one group": lambda: weights(
        "gcpo_shuffled", Rollouts(Z(1, 2), embeddings=ONES(1, 2, 4), clusters=Z(1, 2))
    ),
    "weights: not finite": lambda: directionless("cd_only"),
    "weights: not finite, moved": lambda: directionless("gcpo_shuffled"),
    "weights: both ways without nli": lambda: weights(
        "se", rollouts(clusters=Z(3, 2).long()), clusters="bidirectional"
    ),
    "advantages: missing feature": lambda: advantages("cd_only", rollouts(clusters=Z(3, 2).long())),
    # rollouts
    "rollouts: rewards": lambda: Rollouts(Z(4)),
    "rollouts: reward_range": lambda: Rollouts(Z(2, 2), reward_range=(1.0, 1.0)),
    "rollouts: nli": lambda: rollouts(nli=Z(3, 2, 3, 3)),
    "rollouts: computed embeddings": lambda: Rollouts(Z(3, 2), embeddings=lambda: Z(3, 2)).embeddings,
    # statistics
    "statistics: lengths": lambda: statistics.spearman([1, 2, 3], [1, 2, 3, 4]),
    "statistics: too few": lambda: statistics.spearman([1, 2], [1, 2]),
    "statistics: not finite": lambda: statistics.paired_bootstrap([1, 2, NAN], [1, 2, 3], [3, 1, 2]),
    "statistics: a table": lambda: statistics.spearman_interval(Z(3, 2), [1, 2, 3]),
    "statistics: q": lambda: statistics.top_auc([1, 2, 3], [1, 2, 3], q=1.0),
    "statistics: one fold": lambda: statistics.heldout_prediction([1, 2, 3], [1, 2, 3], folds=1),
    "statistics: n": lambda: statistics.spearman_interval([1, 2, 3], [1, 2, 3], n=0),
    "statistics: no value": lambda: statistics.interquartile_mean([]),
    "statistics: no task": lambda: statistics.stratified_bootstrap([]),
    "statistics: one run": lambda: statistics.stratified_bootstrap([[1.0, 2.0], [1.0]]),
    "statistics: tasks": lambda: statistics.probability_of_improvement(Z(2, 2), Z(2, 3)),
    # gradients
    "gradients: ids": lambda: variance(ids=(6,)),
    "gradients: attention_mask": lambda: variance(attended=ONES(2, 4)),
    "gradients: not attended": lambda: variance(attended=torch.tensor([[1, 1, 1], [1, 1, 0]])),
    "gradients: nothing before": lambda: variance(scored=ONES(2, 3)),
    "gradients: advantages": lambda: variance(scale=(1.0,)),
    "gradients: advantage not finite": lambda: variance(scale=(1.0, NAN)),
    "gradients: params that fit nothing": lambda: variance(params="haed.weight"),
    "gradients: params without gradient": lambda: variance(params=["head.bias", "embed.*"]),
    "gradients: no params": lambda: variance(params=[]),
    "gradients: temperature": lambda: variance(temperature=0.0),
    "decomposition: clusters": lambda: gradients.variance_decomposition(Z(4, 2), Z(3).long()),
    "decomposition: negative weights": lambda: gradients.variance_decomposition(Z(4, 2), Z(4).long(), -ONES(4)),
    # rewards and meaning
    "rewards: no reference": lambda: rewards.token_f1("a", []),
    "rewards: gold": lambda: rewards.math_correct("1", ""),
    "clusters: not square": lambda: semantics.greedy_clusters(Z(2, 3)),
    "clusters: threshold": lambda: semantics.greedy_clusters(Z(2, 2), threshold=1.5),
    "clusters: nli": lambda: semantics.bidirectional_clusters(Z(2, 2)),
    "nli: groups of two sizes": lambda: semantics.group_nli([["a"], ["a", "b"]], semantics.Entailment(lambda _: Z(0))),
    "embedder: absent": lambda: inside(semantics.Embedder),
    "entailment: absent": lambda: inside(semantics.Entailment),
    "entailment: an empty folder": lambda: inside(semantics.Entailment, name=""),
    "entailment: labels without a meaning": lambda: classifier("LABEL_0", "LABEL_1", "LABEL_2"),
    # tasks
    "task: unknown": lambda: get_task("tinyqaa"),
    "task: split of tinymath": lambda: get_task("tinymath").load("dev"),
    "rows: limit": lambda: rows("", limit=0),
    "rows: not JSON": lambda: rows('{"id": "a"}\nid: b\n'),
    "rows: missing field": lambda: rows('{"name": "a"}\n'),
    "rows: none usable": lambda: rows("[1]\n", skip_malformed=True),
    "rows: another split": lambda: rows(None),
    "rows: no Hub": lambda: inside(hub),
    "field: type": lambda: field({"answers": "a" * 100}, "answers", list),
    "field: blank": lambda: field({"answers": " "}, "answers", str),
    # training
    **{f"config: {name}": partial(config, **settings) for name, settings in CONFIGS.items()},
    "trainer: args": lambda: GCPOTrainer("policy", args={"alpha": 0.6}),
    "trainer: which reward is right": lambda: trainer(method="egpo"),
    "trainer: unknown reward": lambda: trainer(method="egpo", correctness_reward="exactnes"),
    # command line
    **{f"run: {name}": partial(given, *pairs) for name, pairs in PARAMETERS.items()},
    "run: unknown parameter": lambda: given("sede", "1", open_list=True),
    "run: grpo with an unknown field": lambda: given("grpo", "{lerning_rate: 1}", open_list=True),
    "run: unknown profile": lambda: command("run", "--profile", "smok", open_list=True),
    "run: a file with a list": lambda: profile("- seed: 1\n"),
    "run: a file with an unknown key": lambda: profile("sead: 1\n", open_list=True),
    "grid: unknown": lambda: command("grid", "zooo", open_list=True),
    "grid: bad parameter": lambda: command("grid", "smoke", "-p", "group_size", "many"),
    "grid: kind": lambda: grid("- kind: trian\n"),
    "grid: no list": lambda: grid("- kind: train\n  seed: 1\n"),
}


def outcome(case: Callable[[], object]) -> Any:
    """What a user reads: "Type: message" of an error, "Warning: message", or a command's exit status and stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = case()
        except Exception as error:
            return plain(f"{type(error).__name__}: {error}")
    if isinstance(result, dict):
        return {"exit": result["exit"], "stderr": plain(result["stderr"])}
    # Ours point at the line that gave the settings, which is in this file; libraries' own warnings do not.
    return "\n".join(f"Warning: {warning.message}" for warning in caught if warning.filename == __file__)


def plain(message: str) -> str:
    return CAUSE.sub(r"\1: CAUSE. ", TMP.sub("TMP", message))


@pytest.mark.parametrize("name", CASES)
def test_the_message_is_the_golden_one(name: str) -> None:
    assert outcome(CASES[name]) == GOLDEN[name]


def test_every_case_is_golden_and_every_golden_message_has_a_case() -> None:
    assert set(CASES) == set(GOLDEN)
