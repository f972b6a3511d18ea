"""One weight per response, on groups small enough to compute by hand."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import pytest
import torch
from helpers import for_all, seeds
from hypothesis import strategies as st
from papers import Group, features, sampled

from gcpo.methods import METHODS, advantages, entirely_incorrect, get_method, is_correct, modulate, weights
from gcpo.rollouts import Rollouts

NAN, INF = math.nan, math.inf
EGPOS = [name for name in METHODS if name.startswith("egpo")]
ENTROPY = ["egspo", "edge_grpo", *EGPOS]
each_egpo = pytest.mark.parametrize("method", EGPOS)
each_entropy = pytest.mark.parametrize("method", ENTROPY)


def spoken(*responses: tuple[float, float], **lists: Any) -> Rollouts:
    """A group of (entropy, reward); Shannon's entropy and the likelihood's are the same, on average over tokens."""
    tokens = [
        [entropy * (2 * t + 1) / (1 + i % 4) for t in range(1 + i % 4)] for i, (entropy, _) in enumerate(responses)
    ]
    logps = [[-h for h in row] for row in tokens]
    return Rollouts(**features(Group(rewards=[r for _, r in responses], logps=logps, entropies=tokens, **lists)))


def found(method: str, group: Rollouts, **options: Any) -> list[float]:
    return weights(method, group, **options)[0].tolist()


def entropies(method: str, group: Rollouts, **options: Any) -> list[float]:
    return modulate(get_method(method, **options), group).columns["entropy"][0].tolist()


# Mean H is 4, and mean H / H is 4, 1.6, 0.5 for the right responses and 2, 8/9, 2/3 for the wrong ones.
SIX = ((1, 2), (2.5, 1.5), (8, 2), (2, 0.5), (4.5, 1), (6, 0))
EGPO = [2, 1.6, 1, 1, 8 / 9, 0.8]
TABLE_2 = {
    "edge_grpo": [4, 1.6, 0.5, 2, 8 / 9, 2 / 3],
    "egspo": [0.5, 0.625, 1, 0.5, 1, 1],
    "egpo": EGPO,
    "egpo_c1": [2, 1.6, 0.8, 2, 8 / 9, 0.8],
    "egpo_c2": [2, 1.6, 0.8, 1, 8 / 9, 0.8],
    "egpo_c3": [2, 1.6, 1, 2, 8 / 9, 0.8],
    "egpo_c4": EGPO,
    "egpo_c5": [w / fmean(EGPO) for w in EGPO],
    "egpo_c6": [2, 1, 1, 1, 0.8, 0.8],  # the mean ratio is 1.609, and 1.6 over it is below 1
}


@each_entropy
def test_egpo_table_2_edge_grpo_and_eg_spo_on_a_mixed_group(method: str) -> None:
    # epsilon = 1e-5 moves a ratio by less than 4e-5 here
    assert found(method, spoken(*SIX)) == pytest.approx(TABLE_2[method], abs=5e-5)


@each_entropy
@pytest.mark.parametrize("entropy", [0.02, 1.0, 3.0])
def test_equal_entropies_give_weight_1(method: str, entropy: float) -> None:
    # epsilon shifts the ratio by epsilon / H
    assert found(method, spoken(*[(entropy, r) for r in (2, 0, 1, 2)])) == pytest.approx([1] * 4, abs=1.01e-5 / entropy)


@for_all(seed=seeds, size=st.integers(1, 8))
def test_edge_grpo_has_a_mean_of_at_least_1_and_egpo_eq9_one_of_1(seed: int, size: int) -> None:
    """mean_i(H-bar / H_i) is the arithmetic over the harmonic mean: it is not scale-preserving."""
    rollouts = Rollouts(**features(*sampled(seed, 3, size)))
    assert weights("edge_grpo", rollouts).mean(1).min() >= 1 - 1e-12
    assert weights("egpo_c5", rollouts).mean(1).tolist() == pytest.approx([1, 1, 1])


def test_egpo_eq7_epsilon_is_1e_5() -> None:
    """Mean H is 3e-5: 3/2 and 3/6, where without epsilon they would be 3 and 3/5."""
    group, open_ended = spoken((1e-5, 2), (5e-5, 0)), {"correct": (0, INF), "wrong": (0, INF)}
    assert found("egpo_c1", group) == pytest.approx([1.5, 0.8])
    assert found("egpo_c1", group, **open_ended) == pytest.approx([1.5, 0.5])
    assert found("egpo_c1", group, epsilon=1e-4, **open_ended) == pytest.approx([3 / 11, 3 / 15])


def test_egpo_c6_cuts_a_ratio_at_10_before_the_mean() -> None:
    """One response is next to certain; its ratio of about 1200 would set all others to the lowest weight."""
    certain = spoken((0.001, 2), (2.4, 2), (0.6, 0), (1.799, 0))  # mean H is 1.2
    mean = (10 + 0.5 + 2 + 1.2 / 1.799) / 4
    expected = [2, 1, 2 / mean, 1.2 / 1.799 / mean]
    assert found("egpo_c6", certain, wrong=(0, 5)) == pytest.approx(expected, abs=1e-4)


def test_entropies_scope_counts_the_answer_or_what_comes_before_it() -> None:
    """Table 3's signals: all tokens, the reasoning, the answer; the second response has no reasoning, the third no
    answer: all of their tokens count."""
    logps, answers = [[-1, -3, -8], [-2, -4], [-5, -7]], [[0, 0, 1], [1, 1], [0, 0]]
    group = Rollouts(**features(Group(rewards=[2, 0, 0], logps=logps, answer_mask=answers)))
    expected = {"joint": [4, 3, 6], "thinking": [2, 3, 6], "answer": [8, 3, 6]}
    for scope, means in expected.items():
        assert entropies("egpo", group, scope=scope) == pytest.approx(means), scope
    assert entropies("egpo", group) == entropies("egpo", group, scope="joint")


# --- right and wrong ------------------------------------------------------------------------------------------------


def test_right_is_above_the_middle_and_who_has_no_reward_is_neither() -> None:
    rollouts = Rollouts(torch.tensor([[0.0, 1.0, 1.1, NAN], [0.0, NAN, 1.0, 0.5], [2.0, NAN, 2.0, 2.0], [NAN] * 4]))
    assert is_correct(rollouts).tolist() == [
        [False, False, True, False],
        [False] * 4,
        [True, False, True, True],
        [False] * 4,
    ]
    assert entirely_incorrect(rollouts).tolist() == [[False], [True], [False], [False]]


@each_egpo
def test_egpo_eq13_right_and_wrong_are_said_by_correctness_where_it_is_given(method: str) -> None:
    """One of whom nobody says that it is wrong, NaN, is not reinforced as wrong."""
    assert advantages(method, spoken(*SIX))[0, 0] > 0
    assert advantages(method, spoken(*SIX, correctness=[0, 0.2, 0.5, 0, 0, 0])).lt(0).all()
    unknown = advantages(method, spoken(*SIX, correctness=[0, 0.2, NAN, 0, 0, 0]))[0]
    assert unknown.lt(0).tolist() == [True, True, False, True, True, True]


def test_egpo_c4_locks_groups_that_are_known_to_be_wrong_alone() -> None:
    unknown = {"correct": (0.8, 0.8), "wrong": (0.8, 0.8)}
    assert found("egpo_c4", spoken(*SIX, correctness=[NAN] * 6), **unknown) == pytest.approx([0.8] * 6)
    assert found("egpo_c4", spoken(*SIX, correctness=[NAN, 0, 0, 0, 0, 0]), **unknown) == [1] * 6


# SIX, of which the first is right and the last wrong, and of the others nobody says it.
SOME = {"correctness": [1, NAN, NAN, NAN, NAN, 0]}
UNKNOWN = {
    **{name: [2, 1, 1, 1, 1, 0.8] for name in EGPOS},
    "egpo_c1": TABLE_2["egpo_c1"],  # one clamp for all: it asks nobody
    "egpo_c5": [2 / 1.4, 1, 1, 1, 1, 0.8 / 1.4],  # over the mean of those that are known
}


@each_entropy
def test_a_response_that_is_not_known_to_be_right_or_wrong_has_weight_1(method: str) -> None:
    assert found(method, spoken(*SIX, **SOME)) == pytest.approx(UNKNOWN.get(method, TABLE_2[method]), abs=5e-5)
    nobody = [1] * 6 if method in EGPOS and method != "egpo_c1" else TABLE_2[method]
    assert found(method, spoken(*SIX, correctness=[NAN] * 6)) == pytest.approx(nobody, abs=5e-5)


# --- responses without a usable entropy -----------------------------------------------------------------------------


@each_entropy
def test_a_group_of_certain_responses_has_the_lower_clamps(method: str) -> None:
    """Mean H and H are 0: 0 / 1e-5 is 0, and 0 / 0 is no ratio at all."""
    expected = {
        **{name: [1, 1, 1] for name in ("egspo", "edge_grpo", "egpo_c6")},
        **{name: [0.8, 0.8, 0.8] for name in ("egpo_c1", "egpo_c2")},
        "egpo_c5": [3 / 2.6, 2.4 / 2.6, 2.4 / 2.6],
    }
    assert found(method, spoken((0, 2), (0, 0), (0, 1))) == pytest.approx(expected.get(method, [1, 0.8, 0.8]))


@each_entropy
def test_a_certain_response_has_the_upper_clamp(method: str) -> None:
    """Mean H is 2 and EGPO's ratios 2e5, 1, 1, 1/2, of which C6 counts the first as 10 in a mean of 3.125."""
    expected = {
        "egspo": [0.5, 1, 1, 1],  # H / mean H is 0, 1, 1, 2
        "edge_grpo": [1, 1, 1, 0.5],  # which has no epsilon: 2 / 0 is no ratio
        "egpo_c1": [2, 1, 1, 0.8],
        "egpo_c3": [2, 1, 1, 0.8],
        "egpo_c5": [1 / 0.95, 1 / 0.95, 1 / 0.95, 0.8 / 0.95],
        "egpo_c6": [1, 1, 0.8, 0.8],
    }
    for certain in (0, -1e-9):  # which rounding may make of it
        group = spoken((certain, 0), (2, 2), (2, 0), (4, 0))
        assert found(method, group) == pytest.approx(expected.get(method, [1, 1, 1, 0.8]), abs=2e-5)
        assert entropies(method, group)[0] == 0


def test_edge_grpo_with_an_epsilon_follows_the_formula_at_h_0() -> None:
    """Mean H is 2: 2 / (0 + 1/2), 2 / 2.5 twice, 2 / 4.5; and 0 / epsilon for a group that is certain throughout."""
    group = spoken((0, 0), (2, 2), (2, 0), (4, 0))
    assert found("edge_grpo", group, epsilon=0.5) == pytest.approx([4, 0.8, 0.8, 2 / 4.5])
    assert found("edge_grpo", spoken((0, 2), (0, 0)), epsilon=0.5) == [0, 0]


@each_entropy
def test_a_response_whose_entropy_is_infinite_has_weight_1_and_no_part_in_the_mean(method: str) -> None:
    with_it = found(method, spoken((1, 2), (INF, 0), (3, 0), (4, 2)))
    without = found(method, spoken((1, 2), (3, 0), (4, 2)))
    assert [with_it[0], *with_it[2:]] == pytest.approx(without)
    assert with_it[1] == 1


# --- R2VPO ----------------------------------------------------------------------------------------------------------


def test_r2vpo_of_ratios_half_above_and_half_below() -> None:
    """Var of (0.5, 1.5) is 1/4; of one token, 0; of (1, 1, 2.5), 1/2; with a fresh policy, exactly 0."""
    group = Rollouts(**features(Group(rewards=[2, 0, 0, 0], ratios=[[0.5, 1.5], [3], [1, 1, 2.5], [1, 1]])))
    assert found("r2vpo", group) == pytest.approx([1 / 1.25, 1, 1 / 1.5, 1])
    assert found("r2vpo", group, lambda_=3) == pytest.approx([1 / 1.75, 1, 1 / 2.5, 1])
    assert found("r2vpo", group)[3] == 1
