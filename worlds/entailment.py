"""The entailment model of the embedded world, trained on generated pairs."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import corpus
import torch
from policy import PAD, SEP, Settings, fit, tokenizer

from gcpo.processes import exit_with_parent
from gcpo.tasks import tinymath, tinyqa

LABELS = ("contradiction", "neutral", "entailment")  # in the order of roberta-large-mnli


# Relations of two answers of tinyqa, or of two solutions of one problem of tinymath: label, and share in per cent.
KINDS = {
    "other wording": ("entailment", 14),
    "attribute dropped": ("entailment", 4),
    "attribute added": ("neutral", 4),
    "near miss": ("contradiction", 16),
    "other relation": ("neutral", 6),
    "same steps": ("entailment", 18),
    "other steps": ("neutral", 18),
    "other result": ("contradiction", 20),
}


def entailment_pair(rng: random.Random, strange: float = 0.0) -> tuple[str, str, str]:
    """(premise, hypothesis, kind), the kind one of :data:`KINDS`.

    Answers entail one another when they word the same value, and an answer entails what is left of it when an
    attribute is dropped (the reverse is neutral); another value of the same relation contradicts, another relation is
    neutral. Solutions entail one another when they reach the same result by the same operations; by other operations
    the same result is neutral, and another result contradicts.

    In the share ``strange`` of the answers the attributes are any relation's ("the soup by Rome"): a relation has some
    thirty values, which would be learnt by heart instead of the rule.
    """
    (kind,) = rng.choices(list(KINDS), [share for _, share in KINDS.values()])
    if kind in ("same steps", "other steps", "other result"):
        return *_solutions(rng, kind), kind
    relation = rng.choice(list(tinyqa.RELATIONS))
    spec = tinyqa.RELATIONS[relation]
    if rng.random() < strange:
        every = tinyqa.RELATIONS.values()
        first, second = (tuple(a for r in every for a in getattr(r, name)) for name in ("first", "second"))
        spec = replace(spec, first=first, second=second)
    value = (rng.randrange(len(spec.first)), rng.randrange(len(spec.second)))
    form, other_form = rng.randrange(2), rng.randrange(2)
    premise = spec.wording(value, form)
    if kind == "other wording":
        return premise, spec.wording(value, other_form), kind
    if kind == "near miss":
        return premise, spec.wording(tinyqa.near_miss(rng, spec, value), other_form), kind
    if kind == "other relation":
        other = rng.choice([name for name in tinyqa.RELATIONS if name != relation])
        return premise, tinyqa.RELATIONS[other].wording(rng.choice(tinyqa.values("", other, "train")), form), kind
    general = spec.general.format(a=spec.first[value[0]][other_form], b=spec.second[value[1]][other_form])
    return (premise, general, kind) if kind == "attribute dropped" else (general, premise, kind)


def _solutions(rng: random.Random, kind: str) -> tuple[str, str]:
    """Two solutions of one problem that are of this kind, with misread events and slips as a policy makes them."""
    while True:
        drawn = tinymath.problem(rng, "train")
        readings = [
            [rng.choice("+-*") if rng.random() < 0.3 else operation for operation in corpus.operations(drawn)]
            for _ in range(2)
        ]
        if kind == "same steps":
            readings[1] = readings[0]
        first, second = (corpus.solution(rng, drawn, read, slip=0.1) for read in readings)
        same_result = first.split("{")[1] == second.split("{")[1]
        found = "other result" if not same_result else "same steps" if readings[0] == readings[1] else "other steps"
        if found == kind:
            return first, second


def _held_out(premise: str, hypothesis: str) -> bool:
    """Return True for pairs of the test set: one in five, by a hash."""
    return hashlib.sha256(f"{premise}\n{hypothesis}".encode()).digest()[0] < 51


def _pairs(rng: random.Random, size: int, held_out: bool) -> list[tuple[str, str, str]]:
    pairs: list[tuple[str, str, str]] = []
    while len(pairs) < size:
        premise, hypothesis, kind = entailment_pair(rng, strange=0.0 if held_out else 0.5)
        if _held_out(premise, hypothesis) == held_out:
            pairs.append((premise, hypothesis, kind))
    return pairs


def _tokenizer(settings: Settings) -> Any:
    from tokenizers import normalizers, processors
    from transformers import PreTrainedTokenizerFast

    # The plain class, asked for token types, which tell premise and hypothesis apart; Qwen2's gives none.
    tokens = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(settings).backend_tokenizer,
        pad_token=PAD,
        model_max_length=256,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    # A word is the same token at the beginning of a text as inside it, where a space is part of it.
    tokens.backend_tokenizer.normalizer = normalizers.Prepend(" ")
    tokens.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SEP} $A {SEP}",
        pair=f"{SEP} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(SEP, tokens.convert_tokens_to_ids(SEP))],
    )
    return tokens


def _classifier(settings: Settings, tokens: Any) -> Any:
    """Return an untrained classifier, in whose attention queries and keys are equal (see make.py)."""
    from transformers import BertConfig, BertForSequenceClassification

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
    return model


def make_entailment(settings: Settings, draft: Path) -> dict[str, Any]:
    """Train the entailment model, save it in ``draft`` and return its accuracy on held-out pairs, of each kind too."""
    tokens = _tokenizer(settings)
    model = _classifier(settings, tokens)

    def logits(pairs: Sequence[tuple[str, str, str]]) -> torch.Tensor:
        premises, hypotheses, _ = zip(*pairs, strict=True)
        return model(**tokens(list(premises), list(hypotheses), padding=True, return_tensors="pt")).logits

    def wanted(pairs: Sequence[tuple[str, str, str]]) -> torch.Tensor:
        return torch.tensor([LABELS.index(KINDS[kind][0]) for _, _, kind in pairs])

    rng = random.Random(settings.seed)

    def loss(step: int) -> torch.Tensor:
        batch = _pairs(rng, settings.entailment_batch, held_out=False)
        return torch.nn.functional.cross_entropy(logits(batch), wanted(batch))

    fit(model, loss, settings.entailment_steps, settings, settings.entailment_slower)
    model.save_pretrained(draft / "entailment")
    tokens.save_pretrained(draft / "entailment")
    test = _pairs(rng, settings.quality_pairs, held_out=True)
    with torch.no_grad():
        correct = logits(test).argmax(1) == wanted(test)
    kinds = {kind: correct[torch.tensor([kind == pair[2] for pair in test])].float().mean().item() for kind in KINDS}
    return {"accuracy": correct.float().mean().item(), "kinds": kinds}


def main(settings: str, draft: str, parent: str) -> None:
    """Make the entailment model as a process of its own; ``settings`` are JSON, ``parent`` is the process it serves."""
    exit_with_parent(int(parent))
    chosen = Settings(**json.loads(settings))
    torch.set_num_threads(chosen.threads)
    quality = make_entailment(chosen, Path(draft))
    (Path(draft) / "entailment.json").write_text(json.dumps(quality))


if __name__ == "__main__":
    main(*sys.argv[1:])
