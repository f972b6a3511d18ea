"""The embedded world: its tokenizer, its determinism, and the quality that every result relies on."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from gcpo import world
from gcpo.semantics import Entailment
from gcpo.tasks import tinymath, tinyqa
from gcpo.tasks.evaluation import load_policy
from gcpo.world.bootstrap import check_quality
from gcpo.world.entailment import LABELS, _pairs, entailment_pair, make_entailment
from gcpo.world.policy import SEP, make_policy, tokenizer

SMALL = world.Settings(corpus=60, policy_steps=2, qa_batch=2, math_batch=2, entailment_steps=2, quality_queries=1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draft = tmp_path_factory.mktemp("small")
    make_policy(SMALL, draft)
    make_entailment(SMALL, draft)
    return draft


TEXTS = [
    "<|user|>Ada keeps a black cat . Ada keeps what ?<|end|><|assistant|>",
    "Start with seven , adding five gives twelve . So we get \\boxed{12}",
    "naïve façade, 3.14 ≠ π — and\nnew lines",
]


@pytest.mark.parametrize("text", TEXTS)
def test_saved_tokenizer_gives_the_same_ids_when_loaded_by_auto_tokenizer(small: Path, text: str) -> None:
    made, loaded = tokenizer(SMALL), AutoTokenizer.from_pretrained(small / "policy")
    assert made(text).input_ids == loaded(text).input_ids
    assert loaded.decode(loaded(text).input_ids) == text
    assert (made.eos_token_id, made.pad_token_id) == (loaded.eos_token_id, loaded.pad_token_id)


def test_numbers_and_attributes_are_single_tokens(small: Path) -> None:
    tokens = tokenizer(world.Settings(corpus=800))
    words = [*tinymath.NUMBERS, *(word for r in tinyqa.RELATIONS.values() for word, _ in r.first)]
    assert [w for w in words if len(tokens(f" {w}").input_ids) != 1] == []


def test_chat_template_and_entailment_pairs_survive_saving(small: Path) -> None:
    tokens = AutoTokenizer.from_pretrained(small / "policy")
    chat = tokens.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|user|>Hi<|end|><|assistant|>"
    pair = AutoTokenizer.from_pretrained(small / "entailment")("a cat", "a dog")
    assert sorted(set(pair["token_type_ids"])) == [0, 1]
    assert pair["input_ids"].count(tokens.convert_tokens_to_ids(SEP)) == 3


def test_repeating_the_bootstrap_gives_the_same_weights_bit_for_bit(small: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)  # whatever the state of the generator was before
    make_policy(SMALL, tmp_path)
    make_entailment(SMALL, tmp_path)
    for part in ("policy", "entailment"):
        weights = [(folder / part / "model.safetensors").read_bytes() for folder in (small, tmp_path)]
        assert weights[0] == weights[1]


def test_the_name_of_a_world_depends_on_its_settings() -> None:
    assert world.key(SMALL) == world.key(SMALL)
    assert world.key(SMALL) != world.key(dataclasses.replace(SMALL, seed=1))


@pytest.mark.parametrize(
    ("part", "task", "figure", "value", "message"),
    [
        ("policy", "tinyqa", "accuracy", 0.29, "tinyqa is 0.290"),
        ("policy", "tinymath", "accuracy", 0.61, "tinymath is 0.610"),
        ("policy", "tinymath", "zero_variance", 0.5, "50% of the groups on tinymath"),
        ("entailment", None, "accuracy", 0.89, "0.890 < 0.9"),
    ],
)
def test_quality_outside_its_bounds_is_an_error(
    part: str, task: str | None, figure: str, value: float, message: str
) -> None:
    good = {"accuracy": 0.45, "zero_variance": 0.2}
    quality = {"policy": {"tinyqa": dict(good), "tinymath": dict(good)}, "entailment": {"accuracy": 0.95}}
    check_quality(quality)
    (quality[part][task] if task else quality[part])[figure] = value
    with pytest.raises(RuntimeError, match=message):
        check_quality(quality)


def test_entailment_pairs_are_labelled_by_meaning() -> None:
    rng = random.Random(0)
    pairs = [entailment_pair(rng) for _ in range(3000)]
    by_label = {label: [pair for pair in pairs if pair[2] == label] for label in LABELS}
    assert all(len(found) > 300 for found in by_label.values())
    boxed = [(p.split("{")[1] == h.split("{")[1], label) for p, h, label in pairs if "boxed" in p]
    assert all(same == (label == "entailment") for same, label in boxed)
    assert not [p for p in pairs if p[0] == p[1] and p[2] != "entailment"]
    held_out = {(p, h) for p, h, _ in _pairs(rng, 200, held_out=True)}
    assert not held_out & {(p, h) for p, h, _ in _pairs(rng, 2000, held_out=False)}


def test_scratch_policy_takes_any_text(scratch: Path) -> None:
    model, tokens = load_policy(str(scratch))
    text = "Wer hat's gesagt? — 東京 ✓"
    assert tokens.decode(tokens(text).input_ids) == text
    assert len(tokens) < 300 and sum(p.numel() for p in model.parameters()) < 100_000


@pytest.mark.slow
def test_bootstrapped_models_keep_their_promises() -> None:
    made = world.bootstrap()
    check_quality(made.quality)
    model, _ = load_policy(str(made.policy))
    assert 0.8e6 < sum(p.numel() for p in model.parameters()) < 1.2e6
    entails = Entailment(str(made.entailment))
    pairs = entails.pairwise(["a black cat", "a cat that is black", "a grey cat", "a hotel nurse"])
    assert pairs[0, 1].argmax() == 0 and pairs[1, 0].argmax() == 0  # paraphrases entail one another
    assert pairs[0, 2].argmax() == 2  # a near miss contradicts
    assert pairs[0, 3].argmax() == 1  # another relation is neutral
