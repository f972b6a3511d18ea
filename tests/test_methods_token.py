"""One weight, or one term of the loss, per token, on groups small enough to compute by hand."""

from __future__ import annotations

import math
import random
from statistics import pvariance
from typing import Any

import pytest
import torch
from papers import Group, features

from gcpo.methods import base_advantages, get_method, weights
from gcpo.rollouts import Rollouts


def rollouts(**lists: Any) -> Rollouts:
    return Rollouts(**features(Group(**lists)))


def cw_grpo(rewards: list[float], *logps: list[float], dtype: torch.dtype = torch.float64) -> list[float]:
    """The weights of all tokens, one response after the other."""
    exact = rollouts(rewards=rewards, logps=logps)
    group = Rollouts(exact.rewards.to(dtype), logps=exact.logps.to(dtype), mask=exact.mask)
    return weights("cw_grpo", group)[group.mask].tolist()


def over_mean(kernels: list[float]) -> list[float]:
    return [len(kernels) * w / sum(kernels) for w in kernels]


# --- CW-GRPO --------------------------------------------------------------------------------------------------------


def test_cw_grpo_section_2_3_on_two_responses() -> None:
    """With a = A_1 = -A_2, c is (2a, 0) and (a, a): its mean is a, sigma^2 = a^2/2, so the exponents are 4, 0, 1, 1."""
    expected = over_mean([math.exp(-4), 1, math.exp(-1), math.exp(-1)])
    assert cw_grpo([2, 0], [0, -2], [-3, -3]) == pytest.approx(expected)


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
    found = cw_grpo([2, 0] * half, *[[yes], [no]] * half, dtype=dtype)
    assert found == pytest.approx([1] * 2 * half, abs=1e-3)


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


# --- Clip-Cov -------------------------------------------------------------------------------------------------------

# A is a, a, -a, -a, with a = 0.866; its mean over these ten tokens is a/5.
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
    """log pi is log pi_old + log ratio, here -7.5 + 0.223 and -12.1 - 0.288, and its mean -8.976. 4/5 a = 0.693 times
    the deviations of the first two responses is 1.37, -0.02, -0.71, 5.53 and 1.18, -0.71; -6/5 a times those of the
    others, 1.58, 3.14 and 1.69, 3.54. A ratio of 1.25 is stopped where A > 0, and one of 0.75 where A < 0."""
    assert dropped(share=1.0) == CANDIDATES
    assert dropped(share=1.0, band=(1.5, 3.0)) == [[2, 0], [3, 0]]
    assert dropped(share=1.0, band=[1.0, 6.0]) == sorted([*CANDIDATES, [0, 3]])
    assert dropped(share=1.0, clip=(0.3, 0.3)) == sorted([*CANDIDATES, [1, 0], [3, 1]])
    assert dropped(share=1.0, clip=(0.2, 0.28)) == sorted([*CANDIDATES, [1, 0]])
    everywhere = rollouts(**WIDE).mask[0].nonzero().tolist()  # never what is no token, whose covariance is 0
    assert dropped(share=1.0, band=(-9.0, 9.0)) == [token for token in everywhere if token not in ([1, 0], [3, 1])]


def test_clip_cov_candidates_lie_inside_the_band_and_beyond_ppos_clip() -> None:
    """A token at the very edge of the band is none, and a ratio at the very edge of the clip stops nothing."""
    tokens = {"rewards": [2, 0], "logps": [[0.0, -1.0], [-1.0, 0.0]]}  # of covariances a/2, -a/2, a/2, -a/2
    edge = base_advantages(torch.tensor([[2, 0]], dtype=torch.float64))[0, 0].item() / 2
    still = {"ratios": [[1.0, 1.0], [1.0, 1.0]]}

    def count(fields: dict[str, Any], **options: Any) -> int:
        return int(weights("clip_cov", rollouts(**tokens, **fields), share=1.0, **options).eq(0).sum())

    assert count(still, band=(edge, 5.0)) == count(still, band=(0.0, edge)) == 0
    assert count(still, band=(edge - 1e-9, 5.0)) == count(still, band=(0.0, edge + 1e-9)) == 2
    assert count(still, band=(0.0, 5.0), clip=(0.0, 0.0)) == 2


def test_clip_cov_drops_a_share_of_all_tokens_and_at_least_one() -> None:
    for share, count in ((2e-4, 1), (0.19, 1), (0.2, 2), (0.35, 3), (0.45, 4), (0.9, 4)):  # of ten tokens
        tokens = dropped(share=share)
        assert len(tokens) == count
        assert all(token in CANDIDATES for token in tokens)


def test_clip_cov_default_share_is_2e_4_of_the_tokens() -> None:
    """Three of 15000 tokens are dropped, about a third of which is in the band."""
    rng = random.Random(0)
    logps = [[-rng.uniform(0, 6) for _ in range(3750)] for _ in range(4)]
    group = rollouts(rewards=[2, 2, 0, 0], logps=logps, ratios=[[1.0] * 3750] * 4)
    assert weights("clip_cov", group).eq(0).sum() == 3


def test_clip_cov_draws_by_its_seed_alone() -> None:
    group = rollouts(**WIDE)
    drawn = set()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    for seed in range(40):
        first, again = (weights("clip_cov", group, seed=seed) for _ in range(2))
        assert torch.equal(first, again)
        drawn.add(first.flatten().argmin().item())
    assert len(drawn) == 4  # every candidate comes up
    assert torch.equal(torch.rand(2), expected)  # the global generator was left alone


def test_clip_cov_without_a_candidate_drops_nothing() -> None:
    calm = rollouts(rewards=[2, 0], logps=[[-1, -1.1]] * 2, ratios=[[1, 1]] * 2)
    assert weights("clip_cov", calm).eq(1).all()


# --- KL-Cov ---------------------------------------------------------------------------------------------------------


def paid(group: Rollouts, **options: Any) -> list[list[int]]:
    """Tokens that pay, all of them the same coefficient: [response, token]."""
    penalty = get_method("kl_cov", **options).penalty
    found = penalty.coefficients(group, base_advantages(group.rewards))[0]
    assert set(found.flatten().tolist()) <= {0.0, options.get("coefficient", 1.0)}
    return found.nonzero().tolist()


def test_kl_cov_of_the_same_tokens() -> None:
    """The largest covariances are 5.53, 3.54, 3.14 and 1.69, whatever PPO's clip does; at least one token pays."""
    group = rollouts(**WIDE)
    assert paid(group) == [[0, 3]]
    assert paid(group, share=0.2) == [[0, 3], [3, 1]]
    assert paid(group, share=0.45) == [[0, 3], [2, 1], [3, 0], [3, 1]]
    assert paid(group, share=0.2, coefficient=0.1) == [[0, 3], [3, 1]]
    every = group.mask[0].nonzero().tolist()
    assert paid(group, share=1.0) == every  # also those below 0, and never what is no token


def test_kl_cov_default_share_is_2e_3_of_the_tokens() -> None:
    logps = [-0.001 * i for i in range(1250)]
    group = rollouts(rewards=[2, 0], logps=[logps] * 2, ratios=[[1.0] * 1250] * 2)
    assert len(paid(group)) == 5  # of 2500


def test_kl_cov_never_makes_padding_pay() -> None:
    """The right answer is the unlikely one, so that every covariance is below that of padding, 0."""
    one, mask = torch.ones(1, 2, 2), torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    logps = torch.tensor([[[-3.0, 0.0], [-1.0, 0.0]]])
    ((_, token),) = paid(Rollouts(torch.tensor([[2.0, 0.0]]), logps=logps, ratios=one, mask=mask))
    assert token == 0
