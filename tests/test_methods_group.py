"""One weight per group, on groups small enough to compute by hand."""

from __future__ import annotations

import math
from typing import Any

import papers
import pytest
import torch
from papers import Group, features

from gcpo.methods import get_method, modulate, weights
from gcpo.rollouts import Rollouts
from gcpo.weights import weight_range

A = 0.6 / math.log(4)  # alpha_G of four responses


def rollouts(reward_range: tuple[float, float] = (0.0, 2.0), **lists: Any) -> Rollouts:
    return Rollouts(**features(Group(**lists)), reward_range=reward_range)


def weight(method: str, group: Rollouts, **options: Any) -> float:
    """The one weight of the group."""
    (found,) = set(weights(method, group, **options).flatten().tolist())
    return found


def score(method: str, group: Rollouts, **options: Any) -> float:
    """Score that the weight is made from."""
    row = get_method(method, **options)
    return modulate(row, group).columns[row.factors[0].measure].item()


ENTAIL, CONTRADICT = (1, 0, 0), (0, 0, 1)
# Two answers twice, at right angles, one right and one wrong.
PAIRS = {
    "rewards": [2, 2, 0, 0],
    "embeddings": [[3, 0], [1, 0], [0, 1], [0, 2]],
    "clusters": [0, 0, 1, 1],
    "nli": [[ENTAIL if i // 2 == j // 2 else CONTRADICT for j in range(4)] for i in range(4)],
}


def test_weights_of_two_orthogonal_pairs() -> None:
    """Every score is a round number: CD = 8/16, BoT = (1 - sqrt(1/2))/2, RD = 1, SE = log 2 = (log 4)/2, Var = 1."""
    cd, bot, rd = 1 - A / 4, 1 - A * (1 - math.sqrt(0.5)) ** 2 / 4, 1 + A
    expected = {"se": 0.7, "cd_only": cd, "bot_only": bot, "rd_only": rd, "gcpo_cd": cd * rd, "gcpo_bot": bot * rd}
    for method, value in (expected | {"qhawkeye": 0.8}).items():
        assert weight(method, rollouts(**PAIRS)) == pytest.approx(value, abs=1e-7), method


def test_the_reward_range_normalises_reward_dispersion_and_variance() -> None:
    wide, narrow = rollouts((-1.0, 3.0), **PAIRS), rollouts(**PAIRS)
    assert [weight("rd_only", group) for group in (wide, narrow)] == pytest.approx([1 + A / 2, 1 + A])
    assert [weight("qhawkeye", group) for group in (wide, narrow)] == pytest.approx([1 - 0.2 / 4, 1 - 0.2])


# --- SEED-GRPO ------------------------------------------------------------------------------------------------------


# Exact answers 0, 1, 0, 2, of likelihoods 1/8, 1/2, 1/8, 1/4 per token, which sum to 1.
LIKELY = {
    "rewards": [2, 0, 0, 1],
    "clusters": [0, 0, 5, 5],
    "exact_clusters": [0, 1, 0, 2],
    "logps": [[-math.log(2), -math.log(8), -math.log(32)], [-math.log(2)], [-math.log(8)] * 2, [0, -math.log(16)]],
}
RAO = papers.entropy([2 / 8, 4 / 8, 2 / 8])
COUNTS = papers.entropy([2 / 4, 1 / 4, 1 / 4])
MC = (math.log(4) + math.log(2) + math.log(4)) / 3  # Eq. 5: mean over clusters of -log p(C_k)


@pytest.mark.parametrize(("estimator", "expected"), [("rao", RAO), ("counts", COUNTS), ("mc", MC)])
def test_seed_grpo_estimators_on_length_normalised_likelihoods(estimator: str, expected: float) -> None:
    assert score("seed_grpo", rollouts(**LIKELY), estimator=estimator) == pytest.approx(expected, rel=1e-6)


def test_seed_grpo_eq5_is_cut_at_0() -> None:
    """Five times the same likely answer: p(C) = 5 * 0.8 is above 1, and -log p(C) below 0."""
    sure = rollouts(rewards=[0] * 5, clusters=[0] * 5, logps=[[math.log(0.8)]] * 5)
    assert weight("seed_grpo", sure, estimator="mc") == 1


@pytest.mark.parametrize("alpha", [None, 0.5])
def test_seed_grpo_eq6_forms(alpha: float | None) -> None:
    x = (0.0417 if alpha is None else alpha) * RAO / math.log(4)
    expected = {"linear": 1 - x, "exponential": math.exp(-x), "focal": (1 - x) ** 2, "reciprocal": 1 / (1 + x)}
    for form, value in expected.items():
        assert weight("seed_grpo", rollouts(**LIKELY), alpha=alpha, form=form) == pytest.approx(value), form


def test_an_impossible_token_leaves_the_other_responses_shares_alone() -> None:
    """A log-likelihood of log 0 has no share of the likelihood."""
    broken = LIKELY | {"logps": [*LIKELY["logps"][:2], [-math.inf, -1], LIKELY["logps"][3]]}
    assert score("seed_grpo", rollouts(**broken)) == pytest.approx(papers.entropy([1 / 7, 4 / 7, 2 / 7]))


def test_half_of_the_groups_drawn_by_the_seed_have_no_weight() -> None:
    rewards = torch.arange(20.0).view(5, 4)
    dropped = torch.stack([weights("drop_half", Rollouts(rewards), seed=seed)[:, 0] == 0 for seed in range(400)])
    assert dropped.sum(1).eq(2).all()  # half of five, rounded down
    assert (dropped.float().mean(0) - 0.4).abs().max() < 0.12  # five standard deviations
    rewards[1] = torch.nan
    assert all(weights("drop_half", Rollouts(rewards), seed=seed)[1].eq(1).all() for seed in range(9))


def test_a_power_raises_weights_and_their_range() -> None:
    x = Rollouts(
        torch.tensor([[0.0, 2.0], [1.0, 1.0]]),
        embeddings=torch.eye(2).expand(2, 2, 2),
        clusters=torch.arange(2).expand(2, 2),
    )
    own = weights("gcpo_bot", x)
    for power in (1, 4, 16):
        torch.testing.assert_close(weights("gcpo_strong", x, power=power), own**power)
        low, high = weight_range("gcpo_bot", None, 2)
        assert weight_range("gcpo_strong", None, 2, power=power) == pytest.approx((low**power, high**power))
    with pytest.raises(ValueError, match="power must be at least 0, got -1"):
        weights("gcpo_strong", x, power=-1)
