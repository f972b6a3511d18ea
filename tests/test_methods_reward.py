"""Rules that change rewards, on groups small enough to compute by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from papers import Group, features

from gcpo.methods import advantages, get_method
from gcpo.rollouts import Rollouts

NAN = math.nan


def rewards_of(
    method: str,
    group: Group,
    *,
    reward_range: tuple[float, float] = (0.0, 2.0),
    longest: int | None = None,
    **options: Any,
) -> list[float]:
    """Rewards that the method makes of the task's rewards."""
    rollouts = Rollouts(**features(group), reward_range=reward_range, max_completion_length=longest)
    return get_method(method, **options).reward(rollouts)[0].tolist()


# --- EMPO -----------------------------------------------------------------------------------------------------------


def answers(*clusters: int, rewards: list[float] | None = None, **lists: Any) -> Group:
    size = len(clusters)
    return Group(**{"rewards": rewards or [0] * size, "clusters": clusters, "answered": [1] * size, **lists})


def test_empo_rewards_the_share_of_the_own_cluster() -> None:
    said = [1, 1, 1, 1, 0]
    group = answers(4, 4, 1, -3, 9, rewards=[0, 2, 0, 2, 0], answered=said)
    assert rewards_of("empo", group) == pytest.approx([2 / 5, 2 / 5, 1 / 5, 1 / 5, 0])
    group = answers(4, 4, 1, -3, 9, rewards=[0, 2, 0, 2, NAN], answered=said)
    assert rewards_of("empo", group) == pytest.approx([1 / 2, 1 / 2, 1 / 4, 1 / 4, NAN], nan_ok=True)


def test_empo_gives_nothing_where_no_two_answers_agree() -> None:
    assert rewards_of("empo", answers(0, 1, 2, 3, 4)) == [0] * 5
    assert rewards_of("empo", answers(0)) == [1]  # there is nobody to differ from
    assert rewards_of("empo", answers(0, 0, rewards=[2, NAN])) == pytest.approx([1, NAN], nan_ok=True)


def test_empo_reads_the_tasks_clusters_unless_told_otherwise() -> None:
    group = answers(0, 1, 2, 3, task_clusters=[0, 0, 0, 1], math_clusters=[0, 0, 1, 1])
    assert rewards_of("empo", group) == [0.75, 0.75, 0.75, 0.25]
    assert rewards_of("empo", group, clusters="math") == [0.5] * 4
    assert rewards_of("empo", group, clusters="greedy") == [0] * 4


# --- GRPO-CARE ------------------------------------------------------------------------------------------------------


def sure(*responses: tuple[float, float]) -> Group:
    """Responses of (reward, confidence of the answer under the reference); the reasoning has another likelihood."""
    halves = [math.log(confidence) / 2 for _, confidence in responses]
    return Group(
        rewards=[reward for reward, _ in responses],
        ref_logps=[[-3.0, half * 3, half] for half in halves],
        answer_mask=[[0, 1, 1]] * len(responses),
    )


def test_grpo_care_bonus_by_hand() -> None:
    """Mean accuracy is 0.5: accurate are the first four. Their confidences, 0.95 at most, have the mean 0.6975, and
    those from 0.6875 on earn half of their accuracy, times the range of 2."""
    group = [(2, 0.99), (2, 0.69), (1, 0.68), (1, 0.47), (0, 0.9), (0, 0.9)]
    assert rewards_of("care", sure(*group)) == pytest.approx([3, 3, 1, 1, 0, 0])
    # With 0.75 for the third, the mean is 0.715 and the second is too far below it.
    assert rewards_of("care", sure(*group[:2], (1, 0.75), *group[3:])) == pytest.approx([3, 2, 1.5, 1, 0, 0])


def test_grpo_care_confidence_is_capped_at_0_95() -> None:
    """Without the cap the mean were 0.98 and the second would be more than 0.01 below it."""
    assert rewards_of("care", sure((2, 1.0), (2, 0.96))) == pytest.approx([3, 3])
    # With the cap at 0.95 the mean is 0.9445, and 0.939 is within 0.01 of it; 0.929 is not.
    assert rewards_of("care", sure((2, 1.0), (2, 0.939))) == pytest.approx([3, 3])
    assert rewards_of("care", sure((2, 1.0), (2, 0.929))) == pytest.approx([3, 2])


def test_grpo_care_accurate_is_above_0_1_and_at_least_the_mean() -> None:
    assert rewards_of("care", sure((0.2, 0.5), (0.2, 0.5))) == pytest.approx([0.2, 0.2])  # acc = 0.1
    assert rewards_of("care", sure((0.22, 0.5), (0.22, 0.5))) == pytest.approx([0.33, 0.33])
    assert rewards_of("care", sure((1.0, 0.5), (2, 0.5), (1.2, 0.5))) == pytest.approx([1, 3, 1.2])
    assert rewards_of("care", sure((1.0, 0.5), (2, 0.5), (1.5, 0.5))) == pytest.approx([1, 3, 2.25])
    assert rewards_of("care", sure((1.0, 0.5), (1.01, 0.5))) == pytest.approx([1, 1.515])  # acc = 0.0025 below it


@settings(deadline=None, max_examples=30)
@given(ninths=st.lists(st.integers(1, 9), min_size=2, max_size=6))
@example(ninths=[1, 1, 1, 2, 5])  # the mean of these in floating point is above 2/9
@example(ninths=[1, 1, 3, 7])
def test_grpo_care_an_accuracy_that_is_the_mean_counts_as_accurate(ninths: list[int]) -> None:
    """F1 scores are fractions such as 1/3, whose mean is rounded; the bonus should not hang on that."""
    accurate = [x * len(ninths) >= sum(ninths) for x in ninths]
    expected = [2 * x / 9 * (1.5 if ok else 1) for x, ok in zip(ninths, accurate, strict=True)]
    assert rewards_of("care", sure(*[(2 * x / 9, 0.5) for x in ninths])) == pytest.approx(expected)


def test_grpo_care_constants_are_options_and_the_bonus_has_the_unit_of_the_rewards() -> None:
    group = sure((2, 0.8), (2, 0.6), (0, 0.1))
    assert rewards_of("care", group, coefficient=1.0) == pytest.approx([4, 2, 0])
    assert rewards_of("care", group, margin=0.1) == pytest.approx([3, 3, 0])
    assert rewards_of("care", group, cap=0.6) == pytest.approx([3, 3, 0])
    # From -1 to 3: acc is 3/4, 3/4 and 1/4, and half of it, times 4, is 1.5.
    assert rewards_of("care", group, reward_range=(-1.0, 3.0)) == pytest.approx([3.5, 2, 0])


def test_grpo_care_an_empty_answer_is_not_accurate() -> None:
    group = sure((2, 0.5), (2, 0.99), (0, 0.5))
    group.answer_mask[1:2] = [[0, 0, 0]]
    assert rewards_of("care", group) == pytest.approx([3, 2, 0])
    assert rewards_of("care", sure((0, 0.5), (0, 0.9))) == [0, 0]  # no accurate response, no mean


# --- GRPO-CARE as GCPO describes it ---------------------------------------------------------------------------------


def at(*angles: float, rewards: list[float] | None = None, lengths: list[float] | None = None) -> Group:
    """Answers whose embeddings are at these angles, in degrees."""
    lengths = lengths or [1 + i for i in range(len(angles))]
    radians = [math.radians(angle) for angle in angles]
    embeddings = [[n * math.cos(r), n * math.sin(r)] for r, n in zip(radians, lengths, strict=True)]
    return Group(rewards=rewards or [2] * len(angles), embeddings=embeddings)


def test_gcpo_appendix_e2_agreement_bonus_by_hand() -> None:
    """Mean cosines with the three others, at 0, 0, 60 and 90 degrees: 1/2, 1/2, (1 + sqrt(3)/2)/3 = 0.62 and 0.29,
    0.477 on average."""
    group = at(0, 0, 60, 90, rewards=[2, 1, 1.5, 2])
    assert rewards_of("care_agreement", group) == pytest.approx([3, 1, 2.25, 2])  # 1 is not right, 2 does not agree
    assert rewards_of("care_agreement", group, coefficient=1) == pytest.approx([4, 1, 3, 2])
    # From 0 to 3: acc is 2/3, 1/3, 1/2 (not right) and 2/3.
    assert rewards_of("care_agreement", group, reward_range=(0.0, 3.0)) == pytest.approx([3, 1, 1.5, 2])


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7])
def test_gcpo_appendix_e2_answers_that_agree_equally_agree(size: int) -> None:
    """Equal answers, and answers evenly round the circle, whose mean cosines differ by rounding alone."""
    for first in (0.0, 0.1, 17.0, 233.0):
        assert rewards_of("care_agreement", at(*[first] * size)) == [3] * size
        assert rewards_of("care_agreement", at(*[first + 360 * i / size for i in range(size)])) == [3] * size


def test_gcpo_appendix_e2_is_of_directions() -> None:
    """A dissenter, also by 5 degrees, may have a long embedding, and no say for that."""
    for dissent in (100, 45):
        group = at(40, 40, 40, dissent, lengths=[0.1, 0.7, 1.3, 50.0])
        assert rewards_of("care_agreement", group) == [3, 3, 3, 2]


# --- DAPO -----------------------------------------------------------------------------------------------------------


def long(*responses: tuple[int, float]) -> Group:
    """Responses of (tokens, reward)."""
    return Group(rewards=[reward for _, reward in responses], logps=[[-1.0] * tokens for tokens, _ in responses])


def test_dapo_eq13_soft_overlong_punishment() -> None:
    """Up to 16 of 20 tokens are free, 20 cost 1."""
    group = long((0, 2), (16, 2), (17, 0), (18, 2), (20, 0))
    expected = [2, 2, -0.25, 1.5, -1]
    assert rewards_of("dapo", group) == pytest.approx(expected)  # the longest response is as long as can be
    assert rewards_of("dapo", group, longest=20) == pytest.approx(expected)
    assert rewards_of("dapo", group, longest=40) == group.rewards
    # At 19 tokens 15.2 are free and 3.8 lie between; 20 tokens cannot cost more than 1.
    at_19 = [2, 2 - 0.8 / 3.8, -1.8 / 3.8, 2 - 2.8 / 3.8, -1]
    assert rewards_of("dapo", group, longest=19) == pytest.approx(at_19)
    assert rewards_of("dapo", group, longest=20, share=0.5) == pytest.approx([2, 1.4, -0.7, 1.2, -1])
    # Rewards that span 4 are twice DAPO's own, -1 and 1.
    assert rewards_of("dapo", group, reward_range=(-1.0, 3.0)) == pytest.approx([2, 2, -0.5, 1, -2])


def test_dapo_leaves_groups_of_equal_rewards_untouched() -> None:
    group = long((1, 1.3), (5, 1.3), (5, NAN))
    assert rewards_of("dapo", group)[:2] == [1.3, 1.3]
    assert advantages("dapo", Rollouts(**features(group))).eq(0).all()
    varied = Rollouts(torch.tensor([[1.3, 1.2]]), mask=torch.ones(1, 2, 5))
    assert get_method("dapo").reward(varied).tolist()[0] == pytest.approx([0.3, 0.2])
