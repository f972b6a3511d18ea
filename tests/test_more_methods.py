"""The example that adds methods of other papers: each by hand, through the functions and the trainer of users."""

import math
import runpy
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
from helpers import generate, loss_of
from papers import Group, features

from gcpo import paths
from gcpo.methods import METHODS, base_advantages, get_method, weights
from gcpo.rollouts import Rollouts
from gcpo.weights import weight_range


@pytest.fixture(autouse=True)
def added() -> Iterator[set[str]]:
    """Names of the example's methods, which no other test sees."""
    with patch.dict(METHODS):
        before = {*METHODS}
        runpy.run_path(str(paths.ROOT / "examples" / "more_methods.py"))
        yield {*METHODS} - before


def rewards_of(method: str, **lists: Any) -> list[float]:
    return get_method(method).reward(Rollouts(**features(Group(**lists))))[0].tolist()


def test_the_trainer_trains_with_each_of_them(added: set[str], make: Callable[..., Any]) -> None:
    assert added == {"gspo", "top_entropy", "dra_grpo", "grpo_s", "steer"}
    for name in added:
        trainer = make(name)
        assert loss_of(trainer, generate(trainer)).isfinite()
        assert trainer.args.top_entropy_quantile == (0.2 if name == "top_entropy" else 1.0)
        assert trainer.args.epsilon == (3e-4 if name == "gspo" else 0.2)


def test_dra_grpo_divides_by_what_is_alike() -> None:
    """At 0, 0, 60 and 180 degrees: the first two have cosines 1, 1 and 1/2, the third 1/2, 1/2 and 1; the last is
    alone, as cosines below 0 count as 0."""
    embeddings = [[1, 0], [2, 0], [1, math.sqrt(3)], [-1, 0]]
    for rewards, expected in (([2, 1, 2, 0.5], [0.8, 0.4, 1, 0.5]), ([2, math.nan, 2, 0], [4 / 3, math.nan, 4 / 3, 0])):
        found = rewards_of("dra_grpo", rewards=rewards, embeddings=embeddings)
        assert found == pytest.approx(expected, nan_ok=True)


def test_grpo_s_shapes_rewards_by_the_mean_entropy_of_a_response() -> None:
    """Mean entropies of the right ones are 3 and 1: shares 3/4 and 1/4, times 2. Those of the wrong ones are 4 and 1,
    whose inverses share 1/5 and 4/5."""
    found = rewards_of("grpo_s", rewards=[2, 1.5, 0, 1], entropies=[[2, 4], [1], [4], [0.5, 1.5]])
    assert found == pytest.approx([1.15, 1.05, -1.04, -1.16])
    empty = rewards_of("grpo_s", rewards=[2, 1.5, 0, 1], entropies=[[2, 4], [], [4], [0.5, 1.5]])
    assert empty[:2] == pytest.approx([1.1, 1.0])  # the share of the only one is 1
    assert rewards_of("grpo_s", rewards=[0, 0], entropies=[[1], [2]]) == [0, 0]


def test_steer_weighs_by_the_change_of_the_entropy() -> None:
    """A = +-0.707. Omega is A rho (1 - pi)(log pi + H): with pi = 1/2 and H = 1, 1/2 (1 - log 2) = 0.1534; with
    pi = 1/4 and H = log 4 nothing changes; with pi = 1/4, H = 0 and rho = 2, pi is 1/2: 2 times 1/2 log 2, the
    largest."""
    half, quarter = math.log(1 / 2), math.log(1 / 4)
    tokens = {"logps": [[half, quarter]] * 2, "entropies": [[1, -quarter], [1, 0]], "ratios": [[1, 1], [1, 2]]}
    group = Rollouts(**features(Group(rewards=[2, 0], **tokens)))
    ratio = 0.5 * (1 - math.log(2)) / math.log(2)
    assert weights("steer", group)[0].tolist() == [pytest.approx([0.8**ratio, 1]), pytest.approx([0.8**ratio, 0.8])]
    assert weights("steer", group, lowest=0.5)[0, 1].tolist() == pytest.approx([0.5**ratio, 0.5])
    assert weight_range("steer", None, 2, lowest=0.5) == (0.5, 1)


def test_steer_leaves_tokens_alone_that_hardly_change_anything() -> None:
    """With pi = 0.99 and H = 0.05, |Omega| = 0.707 * 0.01 * (0.05 - 0.01005) is far below 0.02."""
    tokens = {"logps": [[math.log(0.99)]] * 2, "entropies": [[0.05]] * 2, "ratios": [[1]] * 2}
    group = Rollouts(**features(Group(rewards=[2, 0], **tokens)))
    change = base_advantages(group.rewards)[0, 0].item() * 0.01 * (0.05 + math.log(0.99))
    assert weights("steer", group).flatten().tolist() == pytest.approx([0.8 ** (change / 0.02)] * 2)
