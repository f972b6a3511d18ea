"""From the texts of groups of completions to the features that methods read."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gcpo.rollouts import Rollouts
from gcpo.semantics.clusters import cluster_nli, exact_clusters, group_nli, math_clusters
from gcpo.semantics.models import Embedder, Entailment

END_OF_THOUGHT = "</think>"  # of reasoning models
NO_ANSWER = "no answer"  # the text that stands for a missing answer in embeddings


def from_texts(
    rewards: Float[Tensor, "B G"],
    groups: Sequence[Sequence[str]],
    *,
    extract: Callable[[str], str | None],
    full_completion: bool,
    embedder: Embedder | None,
    entailment: Entailment | None,
    threshold: float,
    reward_range: tuple[float, float],
    **features: Any,
) -> Rollouts:
    """Rollouts whose embeddings, NLI and clusters come from the texts of B groups of G completions, when first read.

    What is embedded and clustered by entailment is the extracted answer, or the whole completion with
    ``full_completion`` (GCPO, App. E.3: mathematics); exact and mathematical clusters are of answers. A completion
    without an answer is a cluster of its own; it is embedded as :data:`NO_ANSWER`, a fixed text, unless the whole
    completion is embedded.
    """
    answers = [[extract(text) for text in group] for group in groups]
    answered = torch.tensor([[answer is not None for answer in group] for group in answers], dtype=torch.bool)
    shown: Sequence[Sequence[str | None]] = groups if full_completion else answers
    size = rewards.shape[1]

    def embeddings() -> Tensor:
        assert embedder is not None
        flat = [NO_ANSWER if text is None else text for group in shown for text in group]
        return embedder(flat).cpu().unflatten(0, (len(groups), size))

    def nli() -> Tensor:
        assert entailment is not None
        return group_nli(shown, entailment)

    def by_entailment() -> Tensor:
        return cluster_nli(rollouts.nli, answered, threshold)

    def by_mathematics() -> Tensor:
        return torch.stack([math_clusters(group) for group in answers])

    rollouts = Rollouts(
        rewards,
        embeddings=embeddings if embedder else None,
        nli=nli if entailment else None,
        clusters=by_entailment if entailment else None,
        exact_clusters=lambda: torch.stack([exact_clusters(group) for group in answers]),
        math_clusters=by_mathematics,
        task_clusters=by_mathematics if full_completion else (by_entailment if entailment else None),
        answered=answered,
        reward_range=reward_range,
        **features,
    )
    return rollouts


def answer_mask(
    ids: Sequence[Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    extract: Callable[[str], str | None] | None = None,
) -> Bool[Tensor, "N T"]:
    """Which tokens of N completions are the answer's; T is the longest completion's length.

    With ``extract``: the tokens of the extracted answer, where it occurs last. Without: what follows the last
    ``</think>``. All tokens of a completion in which neither is found.
    """
    found = torch.zeros(len(ids), max(map(len, ids), default=0), dtype=torch.bool)
    for row, tokens in enumerate(ids):
        text = decode(tokens)
        start, stop = 0, len(text)
        if extract is None:
            start = text.rfind(END_OF_THOUGHT) + len(END_OF_THOUGHT) if END_OF_THOUGHT in text else 0
        elif (answer := extract(text)) and answer in text:
            start = text.rfind(answer)
            stop = start + len(answer)

        def length(count: int, tokens: Sequence[int] = tokens) -> int:
            return len(decode(tokens[:count]))

        # Prefixes only grow: the first token is the one whose prefix passes the start. The last one reaches the stop,
        # or adds nothing to a prefix that has: a letter's further bytes, or an end-of-sequence token.
        counts = range(len(tokens) + 1)
        first = bisect.bisect_right(counts, start, key=length) - 1 if start else 0
        reached, passed = bisect.bisect_left(counts, stop, key=length), bisect.bisect_right(counts, stop, key=length)
        found[row, first : max(reached, passed - 1)] = True
    return found
