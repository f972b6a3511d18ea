"""Rules in place of an entailment model, for short answers: the probability that one entails the other is their token
F1, or the cosine of their embeddings; what is left of 1 is that they contradict each other."""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from gcpo.rewards import exact_match, token_f1
from gcpo.semantics.models import Embedder, Entailment, Pair

TOKEN_F1, COSINE = RULES = ("token_f1", "cosine")  # as names of an entailment model


def by_rule(name: str, embedder: str, error: float = 0.0) -> Entailment:
    """Return the judge of a rule of :data:`RULES`; both are symmetric.

    Args:
        name: "token_f1" is 1 for answers that are equal after HotpotQA's normalisation; "cosine" counts below 0 as 0.
        embedder: the embedding model whose cosine it is.
        error: as that of :class:`gcpo.semantics.Entailment`.
    """
    rule = _token_f1 if name == TOKEN_F1 else partial(_cosine, Embedder(embedder))
    return Entailment(partial(_outcomes, rule), error=error)


def _outcomes(rule: Callable[[list[Pair]], Tensor], pairs: list[Pair]) -> Float[Tensor, "N 3"]:
    entail = rule(pairs)
    return torch.stack([entail, torch.zeros_like(entail), 1 - entail], dim=-1)


def _token_f1(pairs: list[Pair]) -> Float[Tensor, " N"]:
    return torch.tensor([max(exact_match(one, other), token_f1(one, other)) for one, other in pairs])


def _cosine(embedder: Embedder, pairs: list[Pair]) -> Float[Tensor, " N"]:
    premises, hypotheses = (embedder(texts) for texts in zip(*pairs, strict=True))
    return torch.cosine_similarity(premises, hypotheses).clamp(0, 1)
