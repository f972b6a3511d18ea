"""The entailment model of the embedded world, trained on generated pairs."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gcpo.tasks import tinymath, tinyqa
from gcpo.world.policy import PAD, SEP, Settings, fit, tokenizer

LABELS = ("contradiction", "neutral", "entailment")  # in the order of roberta-large-mnli


def entailment_pair(rng: random.Random) -> tuple[str, str, str]:
    """(premise, hypothesis, label): two answers of tinyqa, or two solutions of one problem of tinymath.

    Answers entail one another when they word the same value, and an answer entails what is left of it when an
    attribute is dropped (the reverse is neutral); another value of the same relation contradicts, another relation is
    neutral. Solutions entail one another when they end in the same number.
    """
    kind = rng.random()
    if kind < 0.25:
        drawn = tinymath.problem(rng, "train")
        first, second = (tinymath.solution(rng, drawn, 0.3) for _ in range(2))
        same = first.split("{")[1] == second.split("{")[1]
        return first, second, "entailment" if same else "contradiction"
    relation = rng.choice(list(tinyqa.RELATIONS))
    spec = tinyqa.RELATIONS[relation]
    value = (rng.randrange(len(spec.first)), rng.randrange(len(spec.second)))
    form, other_form = rng.randrange(2), rng.randrange(2)
    premise = spec.wording(value, form)
    if kind < 0.52:
        return premise, spec.wording(value, other_form), "entailment"
    if kind < 0.63:
        general = spec.general.format(a=spec.first[value[0]][other_form], b=spec.second[value[1]][other_form])
        return (premise, general, "entailment") if rng.random() < 0.5 else (general, premise, "neutral")
    if kind < 0.88:
        return premise, spec.wording(tinyqa.near_miss(rng, relation, value), other_form), "contradiction"
    relation = rng.choice([name for name in tinyqa.RELATIONS if name != relation])
    return (
        premise,
        tinyqa.RELATIONS[relation].wording(rng.choice(tinyqa.values("", relation, "train")), form),
        "neutral",
    )


def _held_out(premise: str, hypothesis: str) -> bool:
    """Whether a pair belongs to the test set: one in five, by a hash."""
    return hashlib.sha256(f"{premise}\n{hypothesis}".encode()).digest()[0] < 51


def _pairs(rng: random.Random, size: int, held_out: bool) -> list[tuple[str, str, str]]:
    pairs: list[tuple[str, str, str]] = []
    while len(pairs) < size:
        premise, hypothesis, label = entailment_pair(rng)
        if _held_out(premise, hypothesis) == held_out:
            pairs.append((premise, hypothesis, label))
    return pairs


def make_entailment(settings: Settings, draft: Path) -> dict[str, Any]:
    """Train the entailment model, save it in ``draft`` and return its accuracy on held-out pairs."""
    from tokenizers import processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    # The plain class, asked for token types, which tell premise and hypothesis apart; Qwen2's gives none.
    tokens = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(settings).backend_tokenizer,
        pad_token=PAD,
        model_max_length=256,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    tokens.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SEP} $A {SEP}",
        pair=f"{SEP} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(SEP, tokens.convert_tokens_to_ids(SEP))],
    )
    torch.manual_seed(settings.seed)
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=settings.entailment_hidden,
        intermediate_size=2 * settings.entailment_hidden,
        num_hidden_layers=settings.entailment_layers,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=settings.init,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=tokens.pad_token_id,
        id2label=dict(enumerate(LABELS)),
        label2id={label: index for index, label in enumerate(LABELS)},
    )
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        weights = dict(model.named_parameters())
        for name, query in weights.items():
            if name.endswith("query.weight"):
                weights[name.replace("query", "key")].copy_(query)

    def logits(pairs: Sequence[tuple[str, str, str]]) -> torch.Tensor:
        premises, hypotheses, _ = zip(*pairs, strict=True)
        return model(**tokens(list(premises), list(hypotheses), padding=True, return_tensors="pt")).logits

    def wanted(pairs: Sequence[tuple[str, str, str]]) -> torch.Tensor:
        return torch.tensor([LABELS.index(label) for _, _, label in pairs])

    rng = random.Random(settings.seed)

    def loss(step: int) -> torch.Tensor:
        batch = _pairs(rng, settings.entailment_batch, held_out=False)
        return torch.nn.functional.cross_entropy(logits(batch), wanted(batch))

    fit(model, loss, settings.entailment_steps, settings)
    model.save_pretrained(draft / "entailment")
    tokens.save_pretrained(draft / "entailment")
    test = _pairs(rng, settings.quality_pairs, held_out=True)
    with torch.no_grad():
        right = logits(test).argmax(1) == wanted(test)
    answers = torch.tensor(["boxed" not in pair[0] for pair in test])
    return {
        "accuracy": round(right.float().mean().item(), 4),
        "answers": round(right[answers].float().mean().item(), 4),
        "solutions": round(right[~answers].float().mean().item(), 4),
    }
