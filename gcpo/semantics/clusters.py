"""Clusterings of texts by meaning: through an entailment model, or as strings.

Labels count from 0 in the order of first appearance. ``None`` stands for a completion without an answer: it always has
a cluster of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from gcpo.clustering import THRESHOLD, cluster_nli
from gcpo.rewards import same_answer
from gcpo.semantics.models import Entailment


def group_nli(groups: Sequence[Sequence[str | None]], entailment: Entailment) -> Float[Tensor, "B G G 3"]:
    """Entailment probabilities within each of B groups of G texts, all asked in one go.

    Returns (B, G, G, 3) float32 as in ``Entailment.pairwise``. A missing text (``None``) contradicts all others,
    missing ones too. Raises ``ValueError`` if the groups differ in size.
    """
    sizes = {len(group) for group in groups}
    if len(sizes) > 1:
        raise ValueError(f"groups have {sorted(sizes)} texts: all must have the same number")
    size = sizes.pop() if sizes else 0
    pairs = [pair for group in groups for pair in itertools.product(group, repeat=2)]
    answered = [
        (at, premise, hypothesis)
        for at, (premise, hypothesis) in enumerate(pairs)
        if premise is not None and hypothesis is not None
    ]
    nli = torch.tensor([0.0, 0.0, 1.0]).repeat(len(pairs), 1)
    nli[[at for at, _, _ in answered]] = entailment.pairs([p for _, p, _ in answered], [h for _, _, h in answered])
    nli = nli.reshape(len(groups), size, size, 3)
    nli[:, range(size), range(size)] = torch.tensor([1.0, 0.0, 0.0])
    return nli


def cluster_texts(
    texts: Sequence[str | None], entailment: Entailment, threshold: float = THRESHOLD
) -> Int64[Tensor, " G"]:
    """The semantic clusters of one group, as used in training (GCPO App. E.3): greedy on its distinct texts in the
    order of first appearance, equal texts together, missing ones (``None``) alone. Returns (G,) labels."""
    if not texts:
        return torch.zeros(0, dtype=torch.int64)
    answered = torch.tensor([[text is not None for text in texts]])
    return cluster_nli(group_nli([texts], entailment), answered, threshold)[0]


def _clusters(items: Sequence[str | None], same: Callable[[str, str], bool]) -> Int64[Tensor, " U"]:
    """Greedy clusters by a relation with the first member of each cluster; ``None`` is never the same as anything."""
    members: dict[int, str] = {}  # label -> first member
    labels: list[int] = []
    for item in items:
        new = max(labels, default=-1) + 1
        label = next((k for k, member in members.items() if item is not None and same(member, item)), new)
        if label == new and item is not None:
            members[label] = item
        labels.append(label)
    return torch.tensor(labels, dtype=torch.int64)


def exact_clusters(texts: Sequence[str | None]) -> Int64[Tensor, " U"]:
    """Clusters of equal strings, apart from surrounding white space (SEED-GRPO); ``None``: each one alone.

    Returns (U,) labels.
    """
    return _clusters(texts, lambda member, text: member.strip() == text.strip())


def math_clusters(answers: Sequence[str | None]) -> Int64[Tensor, " U"]:
    """Clusters of equal mathematical answers by Math-Verify, each answer compared with the first member of every
    cluster and equal only if both ways round are (``gcpo.rewards.same_answer``); ``None``: each one alone.

    Returns (U,) labels.
    """
    return _clusters(answers, same_answer)
