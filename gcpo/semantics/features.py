"""From the texts of groups of completions to the features that methods read."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from gcpo.clustering import cluster_nli
from gcpo.rollouts import Rollouts
from gcpo.semantics.clusters import exact_clusters, group_nli, math_clusters
from gcpo.semantics.models import Embedder, Entailment

END_OF_THOUGHT = "</think>"  # of reasoning models
NO_ANSWER = "no answer"  # the text that stands for a missing answer in embeddings


class TextFeatures:
    """What the texts of B groups of G completions mean; a property is computed once, when first read.

    What is embedded and clustered by entailment is the extracted answer, or the whole completion with
    ``full_completion`` (GCPO, App. E.3: mathematics); exact and mathematical clusters are of answers. A completion
    without an answer is a cluster of its own; it is embedded as :data:`NO_ANSWER`, a fixed text, unless the whole
    completion is embedded.

    Args:
        groups: B lists of G texts.
        extract: text -> answer, or None when there is none.
        full_completion: whether whole completions are embedded and clustered by entailment.
        embedder, entailment: the models; a feature of one that is None cannot be read.
        threshold: a response joins a cluster at this entailment probability or above.

    Raises:
        TypeError: ``extract`` returns something that is neither text nor None.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[str]],
        *,
        extract: Callable[[str], str | None],
        full_completion: bool,
        embedder: Embedder | None,
        entailment: Entailment | None,
        threshold: float,
    ) -> None:
        self.groups, self.full_completion, self.threshold = groups, full_completion, threshold
        self.embedder, self.entailment = embedder, entailment
        self.answers = [[_answer(extract, text) for text in group] for group in groups]
        self.answered = torch.tensor([[answer is not None for answer in group] for group in self.answers]).bool()

    @property
    def readable(self) -> tuple[str, ...]:
        """Names of the features that can be read with the models there are."""
        by_embedder = ("embeddings",) if self.embedder else ()
        by_entailment = ("nli", "clusters") if self.entailment else ()
        by_task = ("task_clusters",) if self.full_completion or self.entailment else ()
        return (*by_embedder, *by_entailment, "exact_clusters", "math_clusters", *by_task, "answered")

    @property
    def shown(self) -> Sequence[Sequence[str | None]]:
        """What is embedded and clustered by entailment."""
        return self.groups if self.full_completion else self.answers

    @cached_property
    def embeddings(self) -> Float[Tensor, "B G d"]:
        """Of what is shown."""
        assert self.embedder is not None
        flat = [NO_ANSWER if text is None else text for group in self.shown for text in group]
        return self.embedder(flat).cpu().unflatten(0, self.answered.shape)

    @cached_property
    def nli(self) -> Float[Tensor, "B G G 3"]:
        """Entailment probabilities within groups."""
        assert self.entailment is not None
        return group_nli(self.shown, self.entailment)

    @cached_property
    def clusters(self) -> Int64[Tensor, "B G"]:
        """Clusters by entailment, greedy (GCPO, App. E.3)."""
        return cluster_nli(self.nli, self.answered, self.threshold)

    @cached_property
    def exact_clusters(self) -> Int64[Tensor, "B G"]:
        """Clusters of equal answers."""
        return torch.stack([exact_clusters(group) for group in self.answers])

    @cached_property
    def math_clusters(self) -> Int64[Tensor, "B G"]:
        """Clusters of answers that are mathematically equal."""
        return torch.stack([math_clusters(group) for group in self.answers])

    @property
    def task_clusters(self) -> Int64[Tensor, "B G"]:
        """Clusters as the task does it: by mathematics where whole completions are shown, by entailment elsewhere."""
        return self.math_clusters if self.full_completion else self.clusters

    def rollouts(self, rewards: Float[Tensor, "B G"], **features: Any) -> Rollouts:
        """These features with rewards, and with whatever else :class:`gcpo.rollouts.Rollouts` takes."""
        own: dict[str, Any] = {name: partial(getattr, self, name) for name in self.readable}
        return Rollouts(rewards, **own, **features)


def _answer(extract: Callable[[str], str | None], text: str) -> str | None:
    answer = extract(text)
    if answer is not None and not isinstance(answer, str):
        raise TypeError(
            f"answer_extractor returned {answer!r}, a {type(answer).__name__}, for the completion {text[:60]!r}: "
            "return the answer as text, or None where there is none."
        )
    return answer


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
    """Rollouts whose features come from texts, when first read; arguments as in :class:`TextFeatures`."""
    texts = TextFeatures(
        groups,
        extract=extract,
        full_completion=full_completion,
        embedder=embedder,
        entailment=entailment,
        threshold=threshold,
    )
    return texts.rollouts(rewards, reward_range=reward_range, **features)


def answer_mask(
    ids: Sequence[Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    extract: Callable[[str], str | None] | None = None,
) -> Bool[Tensor, "N T"]:
    """Which tokens of N completions are the answer's; T is the longest completion's length.

    With ``extract``: the tokens of the extracted answer, where it occurs last. Without: what follows the last
    ``</think>``. All tokens of a completion in which neither is found.
    """
    answer_tokens = torch.zeros(len(ids), max(map(len, ids), default=0), dtype=torch.bool)
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
        last = len(tokens)
        if stop < len(text):
            reached, passed = (find(counts, stop, key=length) for find in (bisect.bisect_left, bisect.bisect_right))
            last = max(reached, passed - 1)
        answer_tokens[row, first:last] = True
    return answer_tokens
