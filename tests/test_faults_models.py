"""Broken models and folders are refused when they are loaded, with what is missing; whole ones of any make are not."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import WORDS, save_classifier, save_embedder
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig

from gcpo.semantics import Embedder, Entailment
from gcpo.tasks.base import Row
from gcpo.tasks.sampling import check_lengths, load_policy

Break = Callable[[Path], object]
HUGE = 3e38  # finite, and what follows is not


# --- how a model is broken ------------------------------------------------------------------------------------------


def weights(change: Callable[[dict[str, Tensor]], object]) -> Break:
    """Changes the tensors of a folder."""

    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return apply


def drop(part: str) -> Break:
    """Without the tensors that have ``part`` in their names."""

    def change(tensors: dict[str, Tensor]) -> None:
        gone = [name for name in tensors if part in name]
        assert gone
        for name in gone:
            del tensors[name]

    return weights(change)


def add(**tensors: Tensor) -> Break:
    """With more tensors, "__" for dots."""
    return weights(lambda known: known.update({name.replace("__", "."): value for name, value in tensors.items()}))


def fill(name: str, value: float) -> Break:
    return weights(lambda tensors: tensors[name].fill_(value))


def put_before(prefix: str) -> Break:
    """Renames the tensors to those of a model that has a head around this one."""
    return weights(lambda known: known.update({prefix + name: known.pop(name) for name in list(known)}))


def config(**changes: Any) -> Break:
    """Changes values of config.json; None removes one."""

    def apply(folder: Path) -> None:
        path = folder / "config.json"
        values = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return apply


def remove(*names: str) -> Break:
    return lambda folder: [(folder / name).unlink() for name in names]


def cut(name: str, size: int) -> Break:
    """A file's first bytes, as a full disk leaves them."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


TOKENIZER = ("tokenizer.json", "tokenizer_config.json")

# What fails in any model with an OSError that asks whether the folder is whole.
FILES: dict[str, Break] = {
    "weights cut": cut("model.safetensors", 3000),
    "weights empty": cut("model.safetensors", 0),
    "no weights": remove("model.safetensors"),
    "no config": remove("config.json"),
    "config cut": cut("config.json", 100),
    "tokenizer cut": cut("tokenizer.json", 500),
}

# What fails in one kind with a ValueError, and what it names.
FAULTS: dict[str, dict[str, tuple[Break, str]]] = {
    "policy": {
        "without a layer's matrices": (drop("layers.1.mlp"), "lack 3 tensors (model.layers.1.mlp.down_proj.weight, "),
        "without a head that is its own": (config(tie_word_embeddings=False), "lack 1 tensors (lm_head.weight)"),
        "another size": (config(intermediate_size=64), "6 tensors (model.layers.0.mlp.down_proj.weight, "),
        "another architecture": (
            config(model_type="llama", architectures=None),
            "have 6 tensors (model.layers.0.self_attn.k_proj.bias, ",
        ),
        "NaN": (fill("model.layers.0.mlp.up_proj.weight", torch.nan), "logits are not finite"),
        "NaN logits": (fill("model.norm.weight", HUGE), "logits are not finite with dtype float32"),
        "no tokenizer": (remove(*TOKENIZER), "its tokenizer has no vocabulary"),
        "no tokenizer_config.json": (remove("tokenizer_config.json"), "a token 262, but it has embeddings for 262"),
        "no chat template": (remove("chat_template.jinja"), "its tokenizer has no chat template"),
    },
    "entailment": {
        "without its classifier": (drop("classifier"), "lack 2 tensors (classifier.bias, classifier.weight)"),
        "NaN": (fill("classifier.weight", torch.nan), "gave [nan, nan, nan] for ('the cat', 'a dog')"),
        "no tokenizer": (remove(*TOKENIZER), "its tokenizer has no vocabulary"),
    },
    "embedding": {
        "no modules.json": (remove("modules.json"), "no modules.json"),
        "without a layer's matrices": (drop("layer.1.output"), "lack 4 tensors (encoder.layer.1.output."),
        "fewer layers, saved with a head": (
            lambda folder: [config(num_hidden_layers=1)(folder), put_before("bert.")(folder)],
            "have 16 tensors (bert.encoder.layer.1.",
        ),
        "NaN": (fill("embeddings.LayerNorm.weight", torch.nan), "gave [nan, nan, nan] for 'the cat'"),
        "no tokenizer": (remove(*TOKENIZER), "its tokenizer has no vocabulary"),
    },
}

# Kind -> what loads it and uses it once.
USE: dict[str, Callable[[Path], torch.Tensor]] = {
    "policy": lambda folder: load_policy(str(folder))[0].get_input_embeddings().weight,
    "entailment": lambda folder: Entailment(folder, device="cpu").pairs(["the cat"], ["a dog"]),
    "embedding": lambda folder: Embedder(folder, device="cpu")(["the cat"]),
}


@pytest.fixture(scope="module")
def whole(scratch: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A whole model of each kind, and one of another architecture."""
    folder = tmp_path_factory.mktemp("whole")
    return {
        "policy": scratch,
        "entailment": save_classifier(folder / "bert"),
        "embedding": save_embedder(folder / "embedder"),
        "roberta": save_classifier(folder / "roberta", "roberta"),
    }


@pytest.mark.parametrize(("kind", "fault"), [(kind, name) for kind in FAULTS for name in (*FILES, *FAULTS[kind])])
def test_a_broken_model_says_what_is_wrong(kind: str, fault: str, whole: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole[kind], folder)
    change, message = (FILES[fault], "Is the folder whole?") if fault in FILES else FAULTS[kind][fault]
    change(folder)
    with pytest.raises(OSError if fault in FILES else ValueError) as raised:
        USE[kind](folder)
    said = str(raised.value)
    assert said.startswith(f"{kind} model {str(folder)!r} ") and message in said and "\n" not in said


# What real models on the Hub are like: parts left out on purpose, tensors of old versions, both names of a tied one.
FINE: dict[str, tuple[str, str, Break]] = {
    "a pooler that is not used": ("entailment", "roberta", add(roberta__pooler__dense__weight=torch.ones(32, 32))),
    "the head of its pre-training": ("entailment", "entailment", add(cls__predictions__bias=torch.ones(14))),
    "no pooler where none is used": ("embedding", "embedding", drop("pooler")),
    "saved with a head": ("embedding", "embedding", put_before("bert.")),
    "a tied tensor under both names": (
        "policy",
        "policy",
        weights(lambda known: known.update({"lm_head.weight": known["model.embed_tokens.weight"].clone()})),
    ),
}


@pytest.mark.parametrize("case", FINE)
def test_a_whole_model_is_loaded(case: str, whole: dict[str, Path], tmp_path: Path) -> None:
    kind, model, change = FINE[case]
    folder = tmp_path / "model"
    shutil.copytree(whole[model], folder)
    change(folder)
    given = USE[kind](folder)
    assert given.numel() and given.isfinite().all()


# --- prompts that are longer than the model -------------------------------------------------------------------------


def rows_of(prompts: Sequence[str]) -> list[Row]:
    return [Row(f"q{number}", prompt, ("a",)) for number, prompt in enumerate(prompts)]


def test_a_prompt_that_the_policy_has_no_positions_for_is_refused(scratch: Path) -> None:
    model, tokens = load_policy(str(scratch))
    room = 8192 - len(tokens("<|user|><|end|><|assistant|>").input_ids) - 48  # a byte is a token
    check_lengths(model, tokens, rows_of(["a" * room, "short"]), 48)
    check_lengths(model, tokens, [], 48)
    with pytest.raises(ValueError, match=r"'q1' \(2 of 3 rows\): a prompt of 8145 tokens and max_completion_length 48"):
        check_lengths(model, tokens, rows_of(["short", "a" * (room + 1), "a" * 100_000]), 48)
    with pytest.raises(ValueError, match=r"are more than the 8192 positions of the policy \(max_position_embeddings\)"):
        check_lengths(model, tokens, rows_of(["a" * room]), 49)


def test_a_token_of_several_bytes_counts_once(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = load_policy(str(scratch))
    read = len(tokens(f"<|user|>{' '.join(WORDS)}<|end|><|assistant|>").input_ids)
    monkeypatch.setattr(model.config, "max_position_embeddings", read + 1)
    check_lengths(model, tokens, rows_of([" ".join(WORDS)]), 1)  # of more bytes: a special token is one


def test_a_policy_without_a_limit_takes_any_prompt(scratch: Path) -> None:
    _, tokens = load_policy(str(scratch))
    check_lengths(SimpleNamespace(config=PreTrainedConfig()), tokens, rows_of(["a" * 100_000]), 48)
