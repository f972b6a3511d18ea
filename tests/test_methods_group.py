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


def test_weights_of_one_answer_and_of_four() -> None:
    """Identical answers are damped by nothing but the rest of their kernel entropy, and RD boosts; answers without
    anything in common have SE = VNE = log 4, CD = 12/16 and BoT = (1 - 1/2)/2."""
    same = PAIRS | {"embeddings": [[3, 4]] * 4, "clusters": [5] * 4, "nli": [[ENTAIL] * 4] * 4}
    # All edges weigh 2: the heat kernel at t = 0.3 has the eigenvalues 1 and, three times, exp(-0.3 * 2 * 4).
    small = math.exp(-2.4)
    kle = papers.entropy([1 / (1 + 3 * small), *[small / (1 + 3 * small)] * 3])
    expected = {"se": 1, "cd_only": 1, "bot_only": 1, "gcpo_cd": 1 + A, "gcpo_bot": 1 + A, "kle": 1 - A * kle}
    for method, value in expected.items():
        assert weight(method, rollouts(**same)) == pytest.approx(value, abs=1e-9), method
    different = PAIRS | {"embeddings": torch.eye(4).tolist(), "clusters": [0, 1, 2, 3], "nli": [[CONTRADICT] * 4] * 4}
    expected = {"se": 0.4, "kle": 0.4, "cd_only": 1 - A * 9 / 16, "bot_only": 1 - A / 16}
    for method, value in expected.items():
        assert weight(method, rollouts(**different)) == pytest.approx(value, abs=1e-7), method


def test_the_reward_range_normalises_reward_dispersion_and_variance() -> None:
    wide, narrow = rollouts((-1.0, 3.0), **PAIRS), rollouts(**PAIRS)
    assert [weight("rd_only", group) for group in (wide, narrow)] == pytest.approx([1 + A / 2, 1 + A])
    assert [weight("qhawkeye", group) for group in (wide, narrow)] == pytest.approx([1 - 0.2 / 4, 1 - 0.2])


def test_gcpo_appendix_g_q_hawkeye_is_1_minus_0_2_u_without_log_g() -> None:
    """Var_pop of one right answer in four is 2^2 * 3/16, over (2/2)^2; its own form is the exponential."""
    for copies in (1, 3):
        group = rollouts(rewards=[2, 0, 0, 0] * copies)
        assert weight("qhawkeye", group) == pytest.approx(1 - 0.2 * 0.75)
        assert weight("qhawkeye", group, form="exponential") == pytest.approx(math.exp(-0.2 * 0.75))


# --- SEED-GRPO ------------------------------------------------------------------------------------------------------


def test_seed_grpo_is_1_for_one_answer_and_1_over_1_0417_for_distinct_and_equally_likely_ones() -> None:
    one = rollouts(rewards=[0] * 5, exact_clusters=[3] * 5, clusters=range(5), logps=[[-0.1 * i] for i in range(5)])
    assert weight("seed_grpo", one) == 1
    distinct = rollouts(rewards=[0] * 5, exact_clusters=range(5), logps=[[-0.7] * (1 + i) for i in range(5)])
    assert weight("seed_grpo", distinct) == pytest.approx(1 / 1.0417)


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


def test_seed_grpo_eq6_as_printed_is_1_minus_0_02_se_of_counts() -> None:
    """Linear, alpha = 0.02 as it is, counts of exact answers: the paper, not its code."""
    printed = {"form": "linear", "estimator": "counts", "alpha": 0.02, "alpha_norm": "none"}
    assert weight("seed_grpo", rollouts(**LIKELY), **printed) == pytest.approx(1 - 0.02 * COUNTS, abs=1e-7)
    four = rollouts(rewards=[0] * 4, exact_clusters=range(4))  # which needs no likelihoods
    assert weight("seed_grpo", four, **printed) == pytest.approx(1 - 0.02 * math.log(4), abs=1e-7)
    one = rollouts(rewards=[0] * 4, exact_clusters=[1] * 4)
    assert weight("seed_grpo", one, **printed) == 1


def test_an_impossible_token_leaves_the_other_responses_shares_alone() -> None:
    """A log-likelihood of log 0 has no share of the likelihood."""
    broken = LIKELY | {"logps": [*LIKELY["logps"][:2], [-math.inf, -1], LIKELY["logps"][3]]}
    assert score("seed_grpo", rollouts(**broken)) == pytest.approx(papers.entropy([1 / 7, 4 / 7, 2 / 7]))


def test_clusters_are_of_the_kind_that_is_asked_for() -> None:
    """Each kind has its own labels here, with a share of 1, 2, 3 or 4 quarters for the first cluster."""
    kinds = {"exact_clusters": [0, 0, 1, 2], "math_clusters": [0, 0, 0, 1], "task_clusters": [0, 0, 0, 0]}
    group = rollouts(rewards=[0] * 4, clusters=[0, 1, 2, 3], **kinds)
    by_hand = {"greedy": [1 / 4] * 4, "exact": [1 / 2, 1 / 4, 1 / 4], "math": [3 / 4, 1 / 4], "task": [1.0]}
    for kind, shares in by_hand.items():
        assert score("se", group, clusters=kind) == pytest.approx(papers.entropy(shares), abs=1e-6), kind
    assert score("se", group) == score("se", group, clusters="greedy")
    assert score("seed_grpo", group, estimator="counts") == score("se", group, clusters="exact")
    plain = rollouts(rewards=[0] * 4, clusters=[0, 0, 1, 2])  # a kind that was not given is what was
    assert score("se", plain, clusters="math") == score("se", group, clusters="exact")


def test_clusters_both_ways_are_made_from_the_entailment_probabilities() -> None:
    """The first entails the second and is entailed by it; the third is entailed by both, and entails neither."""
    sure, no = [0.9, 0.05, 0.05], [0.1, 0.8, 0.1]
    nli = [[sure, sure, sure], [sure, sure, sure], [no, no, sure]]
    lists = {"rewards": [0] * 3, "embeddings": [[1, 0], [0, 1], [1, 1]], "nli": nli}
    shares = papers.entropy([2 / 3, 1 / 3])
    group = rollouts(**lists)
    assert score("se", group, clusters="bidirectional") == pytest.approx(shares, abs=1e-6)
    expected = papers.bot(lists["embeddings"], [0, 0, 1])
    assert score("bot_only", group, clusters="bidirectional") == pytest.approx(expected, abs=1e-9)
    silent = rollouts(**lists, answered=[True, False, True])  # who says nothing agrees with nobody
    assert score("se", silent, clusters="bidirectional") == pytest.approx(math.log(3), abs=1e-6)
    given = rollouts(**lists, bidirectional_clusters=[4, 4, 4])
    assert score("se", given, clusters="bidirectional") == 0
