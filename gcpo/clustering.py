"""Clusterings by rules on entailment probabilities, on strings or on mathematical answers; no model is loaded.

Labels count from 0 in the order of first appearance. The text ``None`` stands for a completion without an answer: each
one is a cluster of its own.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from gcpo.mathematics import same_answer

THRESHOLD = 0.35
"""Entailment probability from which a response joins a cluster (GCPO App. E.3)."""


def _greedy(
    p_entail: Float[Tensor, "*groups U U"], threshold: float, first: Int64[Tensor, "*groups U"]
) -> Int64[Tensor, "*groups U"]:
    """Greedy clusters in which item i takes the label of the earlier item ``first[i]``, unless that is i itself."""
    labels = torch.zeros_like(first)
    count = labels.new_zeros(labels.shape[:-1])
    represents = torch.zeros_like(first, dtype=torch.bool)
    for item in range(first.shape[-1]):
        best, nearest = p_entail[..., item].masked_fill(~represents, -torch.inf).max(dim=-1, keepdim=True)
        new = first[..., item] == item
        joins = (best >= threshold).squeeze(-1)
        followed = torch.where(new.unsqueeze(-1), nearest, first[..., item : item + 1])
        opens = new & ~joins
        labels[..., item] = torch.where(opens, count, labels.gather(-1, followed).squeeze(-1))
        represents[..., item] = opens
        count = count + opens
    return labels


def _check(p_entail: Tensor, threshold: float) -> None:
    shape = tuple(p_entail.shape)
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise ValueError(f"entailment probabilities have shape {shape}: (..., U, U) is needed, one per ordered pair")
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold is {threshold}: a probability in [0, 1] is needed")
    if (places := p_entail.isnan().nonzero()).numel():
        raise ValueError(f"the entailment probability at {tuple(places[0].tolist())} is NaN: it tells no cluster")


def _check_outcomes(nli: Tensor) -> None:
    if nli.shape[-1:] != (3,):
        raise ValueError(f"nli has shape {tuple(nli.shape)}: its last dimension must be (entail, neutral, contradict)")


def _apart(answered: Tensor) -> Tensor:
    """Pairs of different texts of which one is no answer."""
    itself = torch.eye(answered.shape[-1], dtype=torch.bool, device=answered.device)
    return ~(answered.unsqueeze(-1) & answered.unsqueeze(-2) | itself)


def greedy_clusters(p_entail: Float[Tensor, "*groups U U"], threshold: float = THRESHOLD) -> Int64[Tensor, "*groups U"]:
    """GCPO's clustering (App. E.3): one-way, best match, dependent on the order.

    ``p_entail[..., i, j]`` is the probability that text i (premise) entails text j (hypothesis). In order, each text is
    compared with the first member of every cluster so far as the premise, and joins the cluster with the largest
    probability (the earliest of equal ones) if that is at least ``threshold``; otherwise it opens a cluster.

    Permuting the texts can change the result, and so can repeated texts: a cluster that was opened between two
    occurrences may attract the second one only. ``cluster_nli`` clusters distinct texts and keeps occurrences together.

    Returns (..., U) labels. Raises ``ValueError`` if the matrix is not square or has NaN, or the threshold is not in
    [0, 1].
    """
    _check(p_entail, threshold)
    own = torch.arange(p_entail.shape[-1], device=p_entail.device).expand(p_entail.shape[:-1])
    return _greedy(p_entail, threshold, own)


def bidirectional_clusters(
    nli: Float[Tensor, "*groups U U 3"], strict: bool = True, *, answered: Bool[Tensor, "*groups U"] | None = None
) -> Int64[Tensor, "*groups U"]:
    """Clusters of semantic entropy (Kuhn et al. 2023; Farquhar et al. 2024): equivalent if entailed both ways.

    ``nli`` as from ``Entailment.pairwise``. Strict: entailment is the likeliest outcome both ways. Loose: contradiction
    is the likeliest neither way, and neutral not both ways. The first text without a cluster represents a new one and
    takes all texts without a cluster that are equivalent to it; a text never leaves its cluster again. Where
    ``answered`` is False the text is a cluster of its own.

    Returns (..., U) labels. Raises ``ValueError`` if ``nli`` is not (..., U, U, 3), or NaN for two answered texts.
    """
    _check_outcomes(nli)
    answered = torch.ones_like(nli[..., 0, 0], dtype=torch.bool) if answered is None else answered
    apart = _apart(answered)
    _check(nli.sum(dim=-1).masked_fill(apart | ~answered.unsqueeze(-1), 0), 1.0)
    outcome = nli.argmax(dim=-1)
    reverse = outcome.mT
    if strict:
        equivalent = (outcome == 0) & (reverse == 0)
    else:
        equivalent = (outcome != 2) & (reverse != 2) & ~((outcome == 1) & (reverse == 1))
    return greedy_clusters((equivalent & ~apart).to(nli.dtype), threshold=1.0)


def cluster_nli(
    nli: Float[Tensor, "*groups G G 3"], answered: Bool[Tensor, "*groups G"] | None = None, threshold: float = THRESHOLD
) -> Int64[Tensor, "*groups G"]:
    """``greedy_clusters`` of the distinct texts of each group, with equal texts always together.

    Equal texts are recognised by their probabilities, which agree exactly with those of every other text, in both
    roles; a model cannot tell such texts apart. Where ``answered`` is False the text is a cluster of its own.

    Returns (..., G) labels. Raises as ``greedy_clusters``.
    """
    _check_outcomes(nli)
    p_entail = nli[..., 0]
    if answered is not None:
        p_entail = p_entail.masked_fill(_apart(answered), -1.0)  # below every threshold
    _check(p_entail, threshold)
    by_premise = (p_entail.unsqueeze(-2) == p_entail.unsqueeze(-3)).all(dim=-1)
    by_hypothesis = (p_entail.mT.unsqueeze(-2) == p_entail.mT.unsqueeze(-3)).all(dim=-1)
    return _greedy(p_entail, threshold, (by_premise & by_hypothesis).int().argmax(dim=-1))


def clusters_by(items: Sequence[str | None], same: Callable[[str, str], bool]) -> Int64[Tensor, " U"]:
    """Greedy clusters by a relation with the first member of each cluster; ``None`` is never the same as anything."""
    firsts: list[str | None] = []  # the first member of each cluster
    labels: list[int] = []
    for item in items:
        alike = (k for k, first in enumerate(firsts) if first is not None and item is not None and same(first, item))
        labels.append(next(alike, len(firsts)))
        if labels[-1] == len(firsts):
            firsts.append(item)
    return torch.tensor(labels, dtype=torch.int64)


def exact_clusters(texts: Sequence[str | None]) -> Int64[Tensor, " U"]:
    """Clusters of equal strings, apart from surrounding white space (SEED-GRPO); ``None``: each one alone.

    Returns (U,) labels.
    """
    return clusters_by(texts, lambda member, text: member.strip() == text.strip())


def math_clusters(answers: Sequence[str | None]) -> Int64[Tensor, " U"]:
    """Clusters of equal mathematical answers by Math-Verify, each answer compared with the first member of every
    cluster and equal only if both ways round are (``gcpo.rewards.same_answer``); ``None``: each one alone.

    Returns (U,) labels.
    """
    return clusters_by(answers, same_answer)
