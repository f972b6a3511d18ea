"""From the texts of groups of completions to the features that methods read."""

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from gcpo.clustering import THRESHOLD, cluster_nli, clusters_by, exact_clusters, math_clusters
from gcpo.rollouts import Rollouts
from gcpo.semantics.models import Embedder, Entailment, check_rows

Extractor = Callable[[str], str | None]  # text -> answer, or None when there is none
END_OF_THOUGHT = "</think>"  # of reasoning models
NO_ANSWER = "no answer"  # the text that stands for a missing answer in embeddings


def group_nli(groups: Sequence[Sequence[str | None]], entailment: Entailment) -> Float[Tensor, "B G G 3"]:
    """Entailment probabilities within each of B groups of G texts, all asked in one go.

    Returns (B, G, G, 3) float32 as in ``Entailment.pairwise``. A missing text (``None``) contradicts all others,
    missing ones too. The groups are of one size.
    """
    size = max(map(len, groups), default=0)
    pairs = [pair for group in groups for pair in itertools.product(group, repeat=2)]
    asked = {at: (one, two) for at, (one, two) in enumerate(pairs) if one is not None and two is not None}
    nli = torch.tensor([0.0, 0.0, 1.0]).repeat(len(pairs), 1)
    nli[list(asked)] = entailment.pairs([one for one, _ in asked.values()], [two for _, two in asked.values()])
    nli = nli.reshape(len(groups), size, size, 3)
    nli[:, range(size), range(size)] = torch.tensor([1.0, 0.0, 0.0])
    return nli


def cluster_texts(
    texts: Sequence[str | None], entailment: Entailment, threshold: float = THRESHOLD
) -> Int64[Tensor, " G"]:
    """Return the semantic clusters of one group, as used in training (GCPO App. E.3): greedy on its distinct texts in
    the order of first appearance, equal texts together, missing ones (``None``) alone. Returns (G,) labels."""
    return cluster_groups([texts], entailment, threshold)[0]


def cluster_groups(
    groups: Sequence[Sequence[str | None]], entailment: Entailment, threshold: float = THRESHOLD
) -> Int64[Tensor, "B G"]:
    """Return :func:`cluster_texts` of each of B groups of G texts. Of the pairs that the rule does not compare, a text
    with one that opens no cluster, the model is not asked; the first texts of all groups take their turn together, then
    the second ones, and so on.
    """
    leaders: list[dict[str | None, str]] = [{} for _ in groups]  # of each text, the first one of its cluster
    for turn in itertools.zip_longest(*(filter(None.__ne__, dict.fromkeys(group)) for group in groups)):
        opened = [list(dict.fromkeys(leader.values())) for leader in leaders]
        asked = [(first, text) for own, text in zip(opened, turn, strict=True) if text is not None for first in own]
        found = iter(entailment.pairs([first for first, _ in asked], [text for _, text in asked])[:, 0])
        for own, leader, text in zip(opened, leaders, turn, strict=True):
            if text is not None:
                entails = list(itertools.islice(found, len(own)))
                joins = bool(entails) and max(entails) >= threshold
                leader[text] = own[entails.index(max(entails))] if joins else text
    led = [[known.get(text) for text in group] for group, known in zip(groups, leaders, strict=True)]
    return torch.stack([clusters_by(group, str.__eq__) for group in led])


@dataclass(eq=False)
class TextFeatures:
    """Features of the texts of B groups of G completions; each is computed once, when first read.

    Extracted answers are embedded and clustered by entailment, or whole completions with ``full_completion`` (GCPO,
    App. E.3: mathematics); exact and mathematical clusters are of answers. A completion
    without an answer is a cluster of its own; it is embedded as :data:`NO_ANSWER`, a fixed text, unless the whole
    completion is embedded.

    Args:
        groups: B lists of G texts.
        extract: text -> answer, or None when there is none.
        full_completion: embed and cluster whole completions instead of answers.
        embedder, entailment: the models; a feature of one that is None cannot be read.
        threshold: a response joins a cluster at this entailment probability or above.

    Raises:
        TypeError: ``extract`` returns something that is neither text nor None.
    """

    groups: Sequence[Sequence[str]]
    _: KW_ONLY
    extract: Extractor
    full_completion: bool
    embedder: Embedder | None
    entailment: Entailment | None
    threshold: float

    def __post_init__(self) -> None:
        self.answers = [[_answer(self.extract, text) for text in group] for group in self.groups]
        self.answered = torch.tensor([[answer is not None for answer in group] for group in self.answers]).bool()

    @property
    def readable(self) -> tuple[str, ...]:
        """Return the names of the features that can be read with the given models."""
        by_embedder = ("embeddings",) if self.embedder else ()
        by_entailment = ("nli", "clusters") if self.entailment else ()
        by_task = ("task_clusters",) if self.full_completion or self.entailment else ()
        return (*by_embedder, *by_entailment, "exact_clusters", "math_clusters", *by_task, "answered")

    @property
    def shown(self) -> Sequence[Sequence[str | None]]:
        """Return the texts that are embedded and clustered by entailment."""
        return self.groups if self.full_completion else self.answers

    @cached_property
    def embeddings(self) -> Float[Tensor, "B G d"]:
        """Embeddings of the shown texts."""
        assert self.embedder is not None
        flat = [NO_ANSWER if text is None else text for group in self.shown for text in group]
        return check_rows(self.embedder(flat), flat, "the embedder").unflatten(0, self.answered.shape)

    @cached_property
    def nli(self) -> Float[Tensor, "B G G 3"]:
        """Entailment probabilities within groups."""
        assert self.entailment is not None
        return group_nli(self.shown, self.entailment)

    @cached_property
    def clusters(self) -> Int64[Tensor, "B G"]:
        """Clusters by entailment, greedy (GCPO, App. E.3)."""
        assert self.entailment is not None
        # Fewer pairs in turns, or all at once: many small batches of one length, as on a CPU, would take longer.
        if self.entailment.pads and "nli" not in self.__dict__:
            return cluster_groups(self.shown, self.entailment, self.threshold)
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


def _answer(extract: Extractor, text: str) -> str | None:
    answer = extract(text)
    if not isinstance(answer, str | None):
        raise TypeError(f"answer_extractor returned {answer!r} for {text[:60]!r}: return text, or None without one.")
    return answer


def from_texts(
    rewards: Float[Tensor, "B G"],
    groups: Sequence[Sequence[str]],
    *,
    reward_range: tuple[float, float],
    **arguments: Any,
) -> Rollouts:
    """Return rollouts whose features come from texts, when first read.

    ``arguments`` are those of :class:`TextFeatures`, and any other feature of :class:`gcpo.rollouts.Rollouts`.
    """
    own = {field.name: arguments.pop(field.name) for field in fields(TextFeatures) if field.name in arguments}
    texts = TextFeatures(groups, **own)
    arguments |= {name: partial(getattr, texts, name) for name in texts.readable}
    return Rollouts(rewards, reward_range=reward_range, **arguments)


def answer_mask(
    ids: Sequence[Sequence[int]], decode: Callable[[Sequence[int]], str], extract: Extractor | None = None
) -> Bool[Tensor, "N T"]:
    """Return True for the answer's tokens of N completions; T is the longest completion's length.

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
