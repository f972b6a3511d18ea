"""Rollouts: shapes are checked, features are evaluated once and only if read, and texts become features."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers import case_id, last_word
from torch import Tensor

from gcpo.methods import advantages
from gcpo.rollouts import MissingFeatureError, Rollouts
from gcpo.semantics import NO_ANSWER, Embedder, Entailment, answer_mask, from_texts
from gcpo.tasks.sampling import load_policy

REWARDS = torch.tensor([[0.0, 1.0, 2.0, math.nan], [0.5, 0.5, 0.5, 0.5]])
SHAPES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys("clusters exact_clusters math_clusters task_clusters bidirectional_clusters".split(), (2, 4)),
    **dict.fromkeys("answered correctness".split(), (2, 4)),
    **dict.fromkeys("logps entropies mask answer_mask ref_logps ratios".split(), (2, 4, 5)),
    "embeddings": (2, 4, 3),
    "nli": (2, 4, 4, 3),
}


# --- features -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_a_feature_is_given_as_it_is_or_evaluated_once_when_first_read(name: str) -> None:
    value = torch.ones(SHAPES[name])
    assert getattr(Rollouts(REWARDS, **{name: value}), name) is value
    feature = Mock(return_value=value)
    rollouts = Rollouts(REWARDS, **{name: feature})
    assert rollouts.rewards is REWARDS and not feature.called
    assert getattr(rollouts, name) is getattr(rollouts, name) is value
    assert feature.call_count == 1


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "correctness"])  # the reward says that one
def test_reading_an_absent_feature_names_it_and_what_there_is(name: str) -> None:
    present = "mask" if name != "mask" else "logps"
    rollouts = Rollouts(REWARDS, **{present: torch.ones(2, 4, 5)})
    with pytest.raises(MissingFeatureError, match=rf"no '{name}'.*rewards, {present}, correctness"):
        getattr(rollouts, name)
    assert not hasattr(rollouts, name)


def test_an_attribute_that_is_no_feature_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match=r"no 'embedings'\. Did you mean") as raised:
        Rollouts(REWARDS).embedings  # noqa: B018
    assert not isinstance(raised.value, MissingFeatureError)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_does_not_fit_the_rewards_is_an_error(name: str) -> None:
    good = SHAPES[name]
    bad = [(3, *good[1:]), (2, 5, *good[2:]), (*good, 2), good[:1]]
    bad += [(2, 4, 3, 3), (2, 4, 4, 2)] if name == "nli" else []
    for shape in bad:
        with pytest.raises(ValueError, match=f"^{name} has shape"):
            Rollouts(REWARDS, **{name: torch.zeros(shape)})
        lazy = Rollouts(REWARDS, **{name: Mock(return_value=torch.zeros(shape))})
        with pytest.raises(ValueError, match=f"^{name} has shape"):
            getattr(lazy, name)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("late", [False, True])
def test_nan_is_refused_where_a_feature_enters_and_not_where_nothing_reads_it(name: str, late: bool) -> None:
    def rollouts(feature: str, value: Tensor, **others: Tensor) -> Rollouts:
        given: Any = (lambda: value) if late else value
        made = Rollouts(REWARDS, **{feature: given}, **others)
        getattr(made, feature)
        return made

    value = torch.ones(SHAPES[name])
    value[0, 3] = math.nan  # of a response without a reward
    if name == "nli":
        value[0, :, 3] = math.nan  # and of pairs with it
    rollouts(name, value)
    value[1, 2].view(-1)[0] = math.nan
    if name == "correctness":  # which may be unknown
        rollouts(name, value)
        value[1, 2] = math.inf
    with pytest.raises(ValueError, match=rf"^{name} is (nan|inf) for response 2 of group 1, \(1, 2"):
        rollouts(name, value)
    if name in ("logps", "entropies", "ref_logps", "ratios", "answer_mask"):
        rollouts(name, value, mask=torch.ones(2, 4, 5).index_fill(2, torch.tensor([0]), 0))  # where no token is


@pytest.mark.parametrize(("name", "value"), [("embeddings", math.inf), ("nli", -math.inf), ("clusters", math.inf)])
def test_infinity_is_refused_where_it_would_decide_a_cluster_or_a_direction(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} is {value} for response 0 of group 0"):
        Rollouts(REWARDS, **{name: torch.full(SHAPES[name], value)})
    Rollouts(REWARDS, logps=torch.full((2, 4, 5), -math.inf))  # log 0


@pytest.mark.parametrize("given", [[[0, 1, 2, 3]] * 2, "clusters", 3])
def test_a_feature_that_is_no_tensor_is_refused(given: Any) -> None:
    about = rf"^clusters must be a tensor.*got a {type(given).__name__}\.$"
    with pytest.raises(TypeError, match=about):
        Rollouts(REWARDS, clusters=given)
    with pytest.raises(TypeError, match=about):
        Rollouts(REWARDS, clusters=lambda: given).clusters  # noqa: B018
    with pytest.raises(ValueError, match=r"^rewards must be a tensor of shape \(B, G\), got a list"):
        Rollouts([[1.0, 2.0]])  # type: ignore[arg-type]


def test_clusters_are_of_the_kind_that_is_asked_for_or_else_the_clusters() -> None:
    kinds = {name: torch.zeros(2, 4) for name in ("exact", "math", "task", "bidirectional")}
    features, clusters = {f"{name}_clusters": kind for name, kind in kinds.items()}, torch.ones(2, 4)
    rollouts = Rollouts(REWARDS, clusters=clusters, **features)
    assert rollouts.cluster_labels("greedy") is rollouts.cluster_labels(None) is clusters
    assert all(rollouts.cluster_labels(name) is kind for name, kind in kinds.items())
    rollouts = Rollouts(REWARDS, clusters=clusters, exact_clusters=kinds["exact"])
    assert rollouts.cluster_labels("math") is rollouts.cluster_labels("task") is clusters
    with pytest.raises(MissingFeatureError, match=r"no 'clusters'.*rewards, exact_clusters"):
        Rollouts(REWARDS, exact_clusters=kinds["exact"]).cluster_labels("math")


def test_bidirectional_clusters_are_made_from_nli_once_where_they_are_not_given() -> None:
    nli = torch.tensor([0.9, 0.05, 0.05]).repeat(2, 4, 4, 1)
    nli[0, 3] = nli[0, :, 3] = math.nan  # of the response without a reward, which joins none
    rollouts = Rollouts(REWARDS, nli=nli, clusters=torch.zeros(2, 4))
    assert rollouts.cluster_labels("bidirectional").tolist() == [[0, 0, 0, 1], [0] * 4]
    assert rollouts.cluster_labels("bidirectional") is rollouts.cluster_labels("bidirectional")
    silent = Rollouts(REWARDS, nli=nli, answered=torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1]]))
    assert silent.cluster_labels("bidirectional").tolist() == [[0, 1, 0, 2], [0] * 4]
    with pytest.raises(MissingFeatureError, match=r"no 'nli'.*rewards, clusters"):
        Rollouts(REWARDS, clusters=torch.zeros(2, 4)).cluster_labels("bidirectional")


# --- rewards --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(0.0, 2.0), (-1.0, 1.0), (0.0, 1.0), (-3.0, 7.0)])
def test_correctness_is_the_rewards_place_in_its_range(low: float, high: float) -> None:
    rewards = torch.tensor([[low, high, (low + high) / 2, math.nan]])
    found = Rollouts(rewards, reward_range=(low, high)).correctness
    assert found[0, :3].tolist() == pytest.approx([0, 1, 0.5])
    assert found[0, 3].isnan()


# --- texts ----------------------------------------------------------------------------------------------------------

GROUPS = [
    ["Answer: a cat", "so, Answer: cat", "no idea", "Answer: a cat"],
    ["no idea", "Answer: Rome", "no idea", "Answer: a dog"],
]
SCORES = torch.tensor([[2.0, 2.0, 0.0, 2.0], [0.0, 2.0, 0.0, 0.0]])


def extract(text: str) -> str | None:
    return text.split("Answer: ")[1] if "Answer: " in text else None


class Models:
    """Fakes that remember what they were asked: a text's embedding is its length, "a cat" entails "cat"."""

    def __init__(self) -> None:
        self.embedded: list[str] = []
        self.asked: list[tuple[str, str]] = []

    def embed(self, texts: list[str]) -> Tensor:
        self.embedded += texts
        return torch.tensor([[1.0, len(text)] for text in texts])

    def classify(self, pairs: list[tuple[str, str]]) -> Tensor:
        self.asked += pairs
        entails = [premise.endswith("a cat") and hypothesis.endswith("cat") for premise, hypothesis in pairs]
        return torch.tensor([[0.9, 0.1, 0.0] if e else [0.1, 0.2, 0.7] for e in entails])

    def rollouts(self, **changes: Any) -> Rollouts:
        return rollouts_of(GROUPS, embedder=Embedder(self.embed), entailment=Entailment(self.classify), **changes)


def rollouts_of(groups: Sequence[Sequence[str]], **changes: Any) -> Rollouts:
    usual = {"full_completion": False, "embedder": None, "entailment": None, "threshold": 0.35}
    return from_texts(SCORES, groups, **{"extract": extract, "reward_range": (0.0, 2.0), **usual, **changes})


def test_models_are_asked_only_when_a_method_reads_what_they_give() -> None:
    models = Models()
    rollouts = models.rollouts()
    advantages("rd_only", rollouts)
    assert models.embedded == models.asked == []
    advantages("cd_only", rollouts)
    assert models.asked == []
    advantages("gcpo_bot", rollouts)
    advantages("kle", rollouts)
    assert len(models.embedded) == len(set(models.embedded))
    assert len(models.asked) == len(set(models.asked)) == 4  # a cat and cat, Rome and a dog, both ways round


def test_without_a_model_its_features_are_absent_and_all_else_is_passed_on() -> None:
    logps = torch.zeros(2, 4, 5)
    rollouts = rollouts_of(GROUPS, reward_range=(-1.0, 3.0), logps=logps)
    assert rollouts.reward_range == (-1.0, 3.0) and rollouts.logps is logps and rollouts.rewards is SCORES
    assert not {"embeddings", "nli", "clusters"} & set(rollouts.features)


def test_clusters_of_answers_need_no_model() -> None:
    groups = [["Answer: 0.5", "Answer: 1/2", "so, Answer: 0.5", "no idea"], ["no idea"] * 4]
    rollouts = rollouts_of(groups, full_completion=True)
    exact, mathematical = rollouts.exact_clusters.tolist(), rollouts.math_clusters.tolist()
    assert exact[0][0] == exact[0][2] and len(set(exact[0])) == 3
    assert mathematical[0][0] == mathematical[0][1] == mathematical[0][2] != mathematical[0][3]
    assert len(set(exact[1])) == len(set(mathematical[1])) == 4  # whoever says nothing agrees with nobody
    assert rollouts.cluster_labels("task").tolist() == mathematical


@pytest.mark.parametrize("full_completion", [False, True])
def test_clusters_of_texts_are_those_of_the_task(full_completion: bool) -> None:
    """ "a cat" entails "cat" and not the other way round; whoever says nothing is alone, whatever is shown."""
    models = Models()
    rollouts = models.rollouts(full_completion=full_completion)
    found = {kind: rollouts.cluster_labels(kind).tolist() for kind in ("greedy", "bidirectional", "exact", "task")}
    assert found["greedy"] == [[0, 0, 1, 0], [0, 1, 2, 3]]
    assert found["bidirectional"] == found["exact"] == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert found["task"] == found["exact" if full_completion else "greedy"]  # where it is mathematics, or not
    shown = [[text if full_completion else extract(text) or NO_ANSWER for text in group] for group in GROUPS]
    assert rollouts.embeddings[..., 1].tolist() == [[len(text) for text in group] for group in shown]
    assert (("Answer: a cat", "so, Answer: cat") in models.asked) == full_completion


# --- the tokens of the answer ---------------------------------------------------------------------------------------

WORDS = ("", "the ", "ans", "wer", " is ", "4", "2", "</think>", " so ", "r i", "s 4")


def decode(ids: Sequence[int]) -> str:
    return "".join(WORDS[number] for number in ids)


def tokens_of(texts: Sequence[str]) -> list[int]:
    return [WORDS.index(text) for text in texts]


@pytest.mark.parametrize(
    ("tokens", "answer", "expected"),
    [
        (["the ", "ans", "wer", " is ", "4", "2", ""], "42", [0, 0, 0, 0, 1, 1, 1]),  # and its end of sequence
        (["4", "2", " is ", "4", "2", " so ", ""], "42", [0, 0, 0, 1, 1, 0, 0]),  # where it occurs last
        (["ans", "r i", "s 4", "2", " so "], "is 4", [0, 1, 1, 0, 0]),  # tokens of which it is a part
        (["", "the ", "", "4", "", "2", " so "], "42", [0, 0, 0, 1, 1, 1, 0]),
        (["the ", "4"], None, [1, 1]),
        (["the ", "4"], "", [1, 1]),
        (["the ", "4"], "2", [1, 1]),  # an extractor may write the answer in its own way
    ],
    ids=case_id,
)
def test_the_answers_tokens_are_those_of_its_last_occurrence(
    tokens: list[str], answer: str | None, expected: list[int]
) -> None:
    found = answer_mask([tokens_of(tokens)], decode, lambda text: answer)
    assert found.dtype == torch.bool
    assert found.int().tolist() == [expected]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["the ", "</think>", "4", "2", ""], [0, 0, 1, 1, 1]),
        (["</think>", "the ", "</think>", "4"], [0, 0, 0, 1]),
        (["the ", "4"], [1, 1]),
        (["the ", "</think>"], [0, 0]),  # it stopped before the answer
    ],
    ids=case_id,
)
def test_without_an_extractor_the_answer_follows_the_thought(tokens: list[str], expected: list[int]) -> None:
    assert answer_mask([tokens_of(tokens)], decode).int().tolist() == [expected]


def test_rows_are_padded_to_the_longest() -> None:
    found = answer_mask([tokens_of(["4"]), [], tokens_of([" is ", "4", "2"])], decode, last_word)
    assert found.int().tolist() == [[1, 0, 0], [0, 0, 0], [0, 1, 1]]
    assert answer_mask([], decode).shape == (0, 0)
    assert answer_mask([[], []], decode).shape == (2, 0)


def test_an_answer_that_ends_the_text_takes_one_search_through_its_prefixes() -> None:
    asked: list[int] = []

    def counted(ids: Sequence[int]) -> str:
        asked.append(len(ids))
        return "".join("so </think> 42".ljust(1000, "4")[i] for i in ids)

    assert answer_mask([range(1000)], counted).int().sum() == 1000 - len("so </think>")
    assert len(asked) <= 1 + 10  # the text, and a bisection


@pytest.mark.parametrize(("before", "answer", "after"), [("so ", "42", ""), ("é ", "né", ""), ("né ", "né", "}")])
def test_the_bytes_of_one_letter_belong_together(scratch: Path, before: str, answer: str, after: str) -> None:
    _, tokens = load_policy(str(scratch))  # a token is a byte
    ids = tokens(before + answer + after, add_special_tokens=False)["input_ids"]
    sizes = [len(part.encode()) for part in (before, answer, after)]
    assert len(ids) == sum(sizes)
    found = answer_mask([ids], tokens.decode, lambda _: answer)
    assert found.int().tolist() == [[0] * sizes[0] + [1] * sizes[1] + [0] * sizes[2]]
