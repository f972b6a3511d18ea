"""Cases that the papers' formulas leave open: edges, clamps, draws and unknown outcomes, on groups computed by hand."""

import math
import random
from statistics import fmean, pvariance
from typing import Any

import papers
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from papers import Group, features

from gcpo.methods import METHODS, advantages, base_advantages, get_method, modulate, weights
from gcpo.rollouts import Rollouts
from gcpo.weights import weight_range

NAN, INF = math.nan, math.inf
EGPOS = [name for name in METHODS if name.startswith("egpo")]
ENTROPY = ["egspo", "edge_grpo", *EGPOS]
each_egpo = pytest.mark.parametrize("method", EGPOS)
each_entropy = pytest.mark.parametrize("method", ENTROPY)


def rollouts(reward_range: tuple[float, float] = (0.0, 2.0), longest: int | None = None, **lists: Any) -> Rollouts:
    return Rollouts(**features(Group(**lists)), reward_range=reward_range, max_completion_length=longest)


def weight(method: str, group: Rollouts, **options: Any) -> float:
    """The one weight of the group."""
    (found,) = set(weights(method, group, **options).flatten().tolist())
    return found


def measured(method: str, group: Rollouts, **options: Any) -> list[float]:
    """The measure behind the weights of the responses, or of the group."""
    row = get_method(method, **options)
    return modulate(row, group).columns[row.factors[0].measure][0].tolist()


# --- one weight per group -------------------------------------------------------------------------------------------


def test_the_reward_range_normalises_reward_dispersion_and_variance() -> None:
    a = 0.6 / math.log(4)
    wide, narrow = (rollouts(ends, rewards=[2, 2, 0, 0]) for ends in ((-1.0, 3.0), (0.0, 2.0)))
    assert [weight("rd_only", group) for group in (wide, narrow)] == pytest.approx([1 + a / 2, 1 + a])
    assert [weight("qhawkeye", group) for group in (wide, narrow)] == pytest.approx([1 - 0.2 / 4, 1 - 0.2])


def test_seed_grpo_eq5_is_cut_at_0() -> None:
    """Five times the same likely answer: p(C) = 5 * 0.8 is above 1, and -log p(C) below 0."""
    sure = rollouts(rewards=[0] * 5, clusters=[0] * 5, logps=[[math.log(0.8)]] * 5)
    assert weight("seed_grpo", sure, estimator="mc") == 1


def test_an_impossible_token_leaves_the_other_responses_shares_alone() -> None:
    """Likelihoods of 1/8, 1/2, none and 1/4 a token: log 0 has no share."""
    logps = [[-math.log(2), -math.log(8), -math.log(32)], [-math.log(2)], [-INF, -1], [0, -math.log(16)]]
    group = rollouts(rewards=[2, 0, 0, 1], exact_clusters=[0, 1, 0, 2], logps=logps)
    found = modulate(get_method("seed_grpo"), group).columns["se"].item()
    assert found == pytest.approx(papers.entropy([1 / 7, 4 / 7, 2 / 7]))


def test_half_of_the_groups_drawn_by_the_seed_have_no_weight() -> None:
    rewards = torch.arange(20.0).view(5, 4)
    dropped = torch.stack([weights("drop_half", Rollouts(rewards), seed=seed)[:, 0] == 0 for seed in range(400)])
    assert dropped.sum(1).eq(2).all()  # half of five, rounded down
    assert (dropped.float().mean(0) - 0.4).abs().max() < 0.12  # five standard deviations
    rewards[1] = torch.nan
    assert all(weights("drop_half", Rollouts(rewards), seed=seed)[1].eq(1).all() for seed in range(9))


def test_a_power_raises_weights_and_their_range() -> None:
    group = rollouts(rewards=[0, 2], embeddings=[[1, 0], [0, 1]], clusters=[0, 1])
    own, (low, high) = weights("gcpo_bot", group), weight_range("gcpo_bot", None, 2)
    for power in (1, 4, 16):
        torch.testing.assert_close(weights("gcpo_strong", group, power=power), own**power)
        assert weight_range("gcpo_strong", None, 2, power=power) == pytest.approx((low**power, high**power))


# --- one weight per response: EGPO, EDGE-GRPO, EG-SPO ---------------------------------------------------------------


def spoken(*responses: tuple[float, float], **lists: Any) -> Rollouts:
    """A group of (entropy, reward); Shannon's entropy and the likelihood's are the same, on average over tokens."""
    tokens = [[h * (2 * t + 1) / (1 + i % 4) for t in range(1 + i % 4)] for i, (h, _) in enumerate(responses)]
    logps = [[-h for h in row] for row in tokens]
    return rollouts(rewards=[r for _, r in responses], logps=logps, entropies=tokens, **lists)


def found(method: str, group: Rollouts, **options: Any) -> list[float]:
    return weights(method, group, **options)[0].tolist()


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
    group = rollouts(rewards=[2, 0, 0], logps=logps, answer_mask=answers)
    expected = {"joint": [4, 3, 6], "thinking": [2, 3, 6], "answer": [8, 3, 6]}
    for scope, means in expected.items():
        assert measured("egpo", group, scope=scope) == pytest.approx(means), scope


# Mean H is 4, and mean H / H is 4, 1.6, 0.5 for the right responses and 2, 8/9, 2/3 for the wrong ones.
SIX = ((1, 2), (2.5, 1.5), (8, 2), (2, 0.5), (4.5, 1), (6, 0))


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


@each_egpo
def test_a_response_that_is_not_known_to_be_right_or_wrong_has_weight_1(method: str) -> None:
    """The first is right and the last wrong, and of the others nobody says it. C1's clamp is one for all: it asks
    nobody; C5 divides by the mean of those that are known."""
    one_clamp = [2, 1.6, 0.8, 2, 8 / 9, 0.8]
    some = {"egpo_c1": one_clamp, "egpo_c5": [2 / 1.4, 1, 1, 1, 1, 0.8 / 1.4]}.get(method, [2, 1, 1, 1, 1, 0.8])
    assert found(method, spoken(*SIX, correctness=[1, NAN, NAN, NAN, NAN, 0])) == pytest.approx(some, abs=5e-5)
    nobody = one_clamp if method == "egpo_c1" else [1] * 6
    assert found(method, spoken(*SIX, correctness=[NAN] * 6)) == pytest.approx(nobody, abs=5e-5)


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
        assert measured(method, group)[0] == 0


@each_entropy
def test_a_response_whose_entropy_is_infinite_has_weight_1_and_no_part_in_the_mean(method: str) -> None:
    with_it = found(method, spoken((1, 2), (INF, 0), (3, 0), (4, 2)))
    without = found(method, spoken((1, 2), (3, 0), (4, 2)))
    assert [with_it[0], *with_it[2:]] == pytest.approx(without)
    assert with_it[1] == 1


def test_r2vpo_with_another_lambda() -> None:
    """Var of (0.5, 1.5) is 1/4; of one token, 0; of (1, 1, 2.5), 1/2; with a fresh policy, exactly 0."""
    group = rollouts(rewards=[2, 0, 0, 0], ratios=[[0.5, 1.5], [3], [1, 1, 2.5], [1, 1]])
    assert found("r2vpo", group, lambda_=3) == pytest.approx([1 / 1.75, 1, 1 / 2.5, 1])
    assert found("r2vpo", group)[3] == 1


# --- rules for rewards ----------------------------------------------------------------------------------------------


def rewards_of(method: str, group: Rollouts, **options: Any) -> list[float]:
    """Rewards that the method makes of the task's rewards."""
    return get_method(method, **options).reward(group)[0].tolist()


def answers(*clusters: int, rewards: list[float] | None = None, **lists: Any) -> Rollouts:
    size = len(clusters)
    return rollouts(rewards=rewards or [0] * size, clusters=clusters, **{"answered": [1] * size, **lists})


def test_empo_of_agreement_and_of_responses_without_a_reward() -> None:
    group = answers(4, 4, 1, -3, 9, rewards=[0, 2, 0, 2, NAN], answered=[1, 1, 1, 1, 0])
    assert rewards_of("empo", group) == pytest.approx([1 / 2, 1 / 2, 1 / 4, 1 / 4, NAN], nan_ok=True)
    assert rewards_of("empo", answers(0, 1, 2, 3, 4)) == [0] * 5
    assert rewards_of("empo", answers(0)) == [1]  # there is nobody to differ from
    assert rewards_of("empo", answers(0, 0, rewards=[2, NAN])) == pytest.approx([1, NAN], nan_ok=True)


def test_empo_reads_the_tasks_clusters_unless_told_otherwise() -> None:
    group = answers(0, 1, 2, 3, task_clusters=[0, 0, 0, 1], math_clusters=[0, 0, 1, 1])
    assert rewards_of("empo", group) == [0.75, 0.75, 0.75, 0.25]
    assert rewards_of("empo", group, clusters="math") == [0.5] * 4
    assert rewards_of("empo", group, clusters="greedy") == [0] * 4


def sure(*responses: tuple[float, float], **settings: Any) -> Rollouts:
    """Responses of (reward, confidence of the answer under the reference); the reasoning has another likelihood."""
    halves = [math.log(confidence) / 2 for _, confidence in responses]
    tokens = {"ref_logps": [[-3.0, h * 3, h] for h in halves], "answer_mask": [[0, 1, 1]] * len(responses)}
    return rollouts(rewards=[reward for reward, _ in responses], **{**tokens, **settings})


def test_grpo_care_confidence_is_capped_at_0_95() -> None:
    """Without the cap the mean were 0.98 and the second would be more than 0.01 below it."""
    assert rewards_of("care", sure((2, 1.0), (2, 0.96))) == pytest.approx([3, 3])
    # With the cap at 0.95 the mean is 0.9445, and 0.939 is within 0.01 of it; 0.929 is not.
    assert rewards_of("care", sure((2, 1.0), (2, 0.939))) == pytest.approx([3, 3])
    assert rewards_of("care", sure((2, 1.0), (2, 0.929))) == pytest.approx([3, 2])


def test_grpo_care_accurate_is_above_0_1_and_at_least_the_mean_and_has_an_answer() -> None:
    assert rewards_of("care", sure((0.2, 0.5), (0.2, 0.5))) == pytest.approx([0.2, 0.2])  # acc = 0.1
    assert rewards_of("care", sure((0.22, 0.5), (0.22, 0.5))) == pytest.approx([0.33, 0.33])
    assert rewards_of("care", sure((1.0, 0.5), (2, 0.5), (1.2, 0.5))) == pytest.approx([1, 3, 1.2])
    assert rewards_of("care", sure((1.0, 0.5), (2, 0.5), (1.5, 0.5))) == pytest.approx([1, 3, 2.25])
    empty = sure((2, 0.5), (2, 0.99), (0, 0.5), answer_mask=[[0, 1, 1], [0, 0, 0], [0, 1, 1]])
    assert rewards_of("care", empty) == pytest.approx([3, 2, 0])
    assert rewards_of("care", sure((0, 0.5), (0, 0.9))) == [0, 0]  # no accurate response, no mean


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
    three = ((2, 0.8), (2, 0.6), (0, 0.1))
    assert rewards_of("care", sure(*three), coefficient=1.0) == pytest.approx([4, 2, 0])
    assert rewards_of("care", sure(*three), margin=0.1) == pytest.approx([3, 3, 0])
    assert rewards_of("care", sure(*three), cap=0.6) == pytest.approx([3, 3, 0])
    # From -1 to 3: acc is 3/4, 3/4 and 1/4, and half of it, times 4, is 1.5.
    assert rewards_of("care", sure(*three, reward_range=(-1.0, 3.0))) == pytest.approx([3.5, 2, 0])


def at(*angles: float, **settings: Any) -> Rollouts:
    """Answers whose embeddings are at these angles, in degrees, and of several lengths."""
    embeddings = [[n * math.cos(r), n * math.sin(r)] for n, r in enumerate(map(math.radians, angles), 1)]
    return rollouts(**{"rewards": [2] * len(angles), "embeddings": embeddings, **settings})


def test_gcpo_appendix_e2_agreement_has_the_unit_of_the_rewards() -> None:
    """Mean cosines with the three others, at 0, 0, 60 and 90 degrees: 1/2, 1/2, (1 + sqrt(3)/2)/3 = 0.62 and 0.29,
    0.477 on average."""
    rewards = [2, 1, 1.5, 2]  # 1 is not right, the last does not agree
    assert rewards_of("care_agreement", at(0, 0, 60, 90, rewards=rewards), coefficient=1) == pytest.approx([4, 1, 3, 2])
    # From 0 to 3: acc is 2/3, 1/3, 1/2 (not right) and 2/3.
    of_three = at(0, 0, 60, 90, rewards=rewards, reward_range=(0.0, 3.0))
    assert rewards_of("care_agreement", of_three) == pytest.approx([3, 1, 1.5, 2])


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7])
def test_gcpo_appendix_e2_answers_that_agree_equally_agree(size: int) -> None:
    """Equal answers, and answers evenly round the circle, whose mean cosines differ by rounding alone."""
    for first in (0.0, 0.1, 17.0, 233.0):
        assert rewards_of("care_agreement", at(*[first] * size)) == [3] * size
        assert rewards_of("care_agreement", at(*[first + 360 * i / size for i in range(size)])) == [3] * size


def test_dapo_eq13_of_other_lengths_shares_and_ranges() -> None:
    """Up to 16 of 20 tokens are free, 20 cost 1; at 19 tokens 15.2 are free and 3.8 lie between."""

    def long(**settings: Any) -> Rollouts:
        return rollouts(rewards=[2, 2, 0, 2, 0], logps=[[-1.0] * tokens for tokens in (0, 16, 17, 18, 20)], **settings)

    assert rewards_of("dapo", long()) == pytest.approx([2, 2, -0.25, 1.5, -1])  # the longest is as long as can be
    assert rewards_of("dapo", long(longest=40)) == [2, 2, 0, 2, 0]
    at_19 = [2, 2 - 0.8 / 3.8, -1.8 / 3.8, 2 - 2.8 / 3.8, -1]
    assert rewards_of("dapo", long(longest=19)) == pytest.approx(at_19)
    assert rewards_of("dapo", long(longest=20), share=0.5) == pytest.approx([2, 1.4, -0.7, 1.2, -1])
    # Rewards that span 4 are twice DAPO's own, -1 and 1.
    assert rewards_of("dapo", long(reward_range=(-1.0, 3.0))) == pytest.approx([2, 2, -0.5, 1, -2])


# --- one weight per token: CW-GRPO ----------------------------------------------------------------------------------


def cw_grpo(rewards: list[float], *logps: list[float], dtype: torch.dtype = torch.float64) -> list[float]:
    """The weights of all tokens, one response after the other."""
    exact = rollouts(rewards=rewards, logps=logps)
    group = Rollouts(exact.rewards.to(dtype), logps=exact.logps.to(dtype), mask=exact.mask)
    return weights("cw_grpo", group)[group.mask].tolist()


def over_mean(kernels: list[float]) -> list[float]:
    return [w / fmean(kernels) for w in kernels]


def test_cw_grpo_means_of_tokens_and_of_responses() -> None:
    """The mean of log pi is over tokens, that of A over responses: with three tokens and one they are not the same.
    Mean log pi is -3 and mean A is 0: c is (2, 1, -3) a and 0, its mean 0 and sigma^2 = 14/4 a^2."""
    expected = over_mean([math.exp(-4 / 7), math.exp(-1 / 7), math.exp(-9 / 7), 1])
    assert cw_grpo([2, 0], [-1, -2, -6], [-3]) == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("half", [1, 2, 3, 8])
@pytest.mark.parametrize(("yes", "no"), [(-0.4, -1.2), (-0.1, -2.3), (-3.3, -0.04)])
def test_cw_grpo_sigma_0_up_to_rounding_weighs_1(yes: float, no: float, half: int, dtype: torch.dtype) -> None:
    """Answers of one token, half of them "yes" and right, half "no" and wrong: c = A_i (log pi - mean) is the same for
    all, and what is left of sigma is rounding."""
    weighed = cw_grpo([2, 0] * half, *[[yes], [no]] * half, dtype=dtype)
    assert weighed == pytest.approx([1] * 2 * half, abs=1e-3)


@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 0.1), (torch.float64, 1e-5)])
def test_cw_grpo_of_covariances_far_from_0_and_close_together_does_not_underflow(
    dtype: torch.dtype, gap: float
) -> None:
    """Every exponent is so low that the kernel itself is 0 in floating point."""
    mean = -(4 + gap) / 4
    c = [-mean, -mean, 2 + mean, 2 + gap + mean]
    exponents = [-(x**2) / (2 * pvariance(c)) for x in c]
    assert math.exp(max(exponents)) < torch.finfo(dtype).tiny
    expected = over_mean([math.exp(x - max(exponents)) for x in exponents])
    assert cw_grpo([2, 0], [0, 0], [-2, -2 - gap], dtype=dtype) == pytest.approx(expected, rel=1e-3, abs=1e-6)


# --- Clip-Cov and KL-Cov --------------------------------------------------------------------------------------------

# A is a, a, -a, -a, with a = 0.866; its mean over these ten tokens is a/5. log pi is log pi_old + log ratio, here
# -7.5 + 0.223 and -12.1 - 0.288, and its mean -8.976. 4/5 a = 0.693 times the deviations of the first two responses is
# 1.37, -0.02, -0.71, 5.53 and 1.18, -0.71; -6/5 a times those of the others, 1.58, 3.14 and 1.69, 3.54.
WIDE = {
    "rewards": [2, 2, 0, 0],
    "logps": [[-7, -9, -10, -1], [-7.5, -10], [-10.5, -12], [-10.6, -12.1]],
    "ratios": [[1, 1, 1, 1], [1.25, 1], [1, 1], [1, 0.75]],
}
CANDIDATES = [[0, 0], [2, 0], [2, 1], [3, 0]]


def dropped(**options: Any) -> list[list[int]]:
    """Tokens that Clip-Cov drops: [response, token]."""
    return weights("clip_cov", rollouts(**WIDE), **options)[0].eq(0).nonzero().tolist()


def test_clip_cov_candidates_are_tokens_in_the_band_that_ppo_does_not_stop() -> None:
    """A ratio of 1.25 is stopped where A > 0, and one of 0.75 where A < 0."""
    assert dropped(share=1.0) == CANDIDATES
    assert dropped(share=1.0, band=(1.5, 3.0)) == [[2, 0], [3, 0]]
    assert dropped(share=1.0, clip=(0.2, 0.28)) == sorted([*CANDIDATES, [1, 0]])
    everywhere = rollouts(**WIDE).mask[0].nonzero().tolist()  # never what is no token, whose covariance is 0
    assert dropped(share=1.0, band=(-9.0, 9.0)) == [token for token in everywhere if token not in ([1, 0], [3, 1])]
    calm = rollouts(rewards=[2, 0], logps=[[-1, -1.1]] * 2, ratios=[[1, 1]] * 2)
    assert weights("clip_cov", calm).eq(1).all()


def test_clip_cov_candidates_lie_inside_the_band_and_beyond_ppos_clip() -> None:
    """A token at the very edge of the band is none, and a ratio at the very edge of the clip stops nothing."""
    edge = base_advantages(torch.tensor([[2, 0]], dtype=torch.float64))[0, 0].item() / 2
    # of covariances a/2, -a/2, a/2, -a/2
    still = rollouts(rewards=[2, 0], logps=[[0.0, -1.0], [-1.0, 0.0]], ratios=[[1.0, 1.0], [1.0, 1.0]])

    def count(**options: Any) -> int:
        return int(weights("clip_cov", still, share=1.0, **options).eq(0).sum())

    assert count(band=(edge, 5.0)) == count(band=(0.0, edge)) == 0
    assert count(band=(edge - 1e-9, 5.0)) == count(band=(0.0, edge + 1e-9)) == 2
    assert count(band=(0.0, 5.0), clip=(0.0, 0.0)) == 2


def test_clip_cov_drops_a_share_of_all_tokens_and_at_least_one_by_its_seed() -> None:
    for share, count in ((2e-4, 1), (0.19, 1), (0.2, 2), (0.35, 3), (0.45, 4), (0.9, 4)):  # of ten tokens
        tokens = dropped(share=share)
        assert len(tokens) == count and all(token in CANDIDATES for token in tokens)
    before = torch.get_rng_state()
    drawn = [tuple(dropped(seed=seed)[0]) for seed in range(40)]
    assert torch.equal(before, torch.get_rng_state())  # the global generator was left alone
    assert drawn == [tuple(dropped(seed=seed)[0]) for seed in range(40)] and len({*drawn}) == 4  # every candidate comes


def test_the_default_shares_are_2e_4_and_2e_3_of_the_tokens() -> None:
    """Three of 15000 tokens are dropped, about a third of which is in the band; 30 pay."""
    rng = random.Random(0)
    logps = [[-rng.uniform(0, 6) for _ in range(3750)] for _ in range(4)]
    group = rollouts(rewards=[2, 2, 0, 0], logps=logps, ratios=[[1.0] * 3750] * 4)
    assert weights("clip_cov", group).eq(0).sum() == 3
    assert len(paid(group)) == 30


def paid(group: Rollouts, **options: Any) -> list[list[int]]:
    """Tokens that pay, all of them the same coefficient: [response, token]."""
    penalty = get_method("kl_cov", **options).penalty
    coefficients = penalty.coefficients(group, base_advantages(group.rewards))[0]
    assert set(coefficients.flatten().tolist()) <= {0.0, options.get("coefficient", 1.0)}
    return coefficients.nonzero().tolist()


def test_kl_cov_of_the_same_tokens() -> None:
    """The largest covariances are 5.53, 3.54, 3.14 and 1.69, whatever PPO's clip does; at least one token pays."""
    group = rollouts(**WIDE)
    assert paid(group) == [[0, 3]]
    assert paid(group, share=0.2, coefficient=0.1) == [[0, 3], [3, 1]]
    assert paid(group, share=0.45) == [[0, 3], [2, 1], [3, 0], [3, 1]]
    assert paid(group, share=1.0) == group.mask[0].nonzero().tolist()  # also those below 0, and never padding
