"""Strengths and forms of a weight, and ranges that rollouts made for the purpose reach at both ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from papers import Group, features
from torch import Tensor

from gcpo.methods import METHODS, weights
from gcpo.rollouts import Rollouts
from gcpo.weights import FORMS, alpha_g, boost, damp, damp_square, exponential, focal, reciprocal, weight_range

INF = math.inf
GROUP_WEIGHTS = [name for name, row in METHODS.items() if row.alpha is not None]
OTHERS = [name for name in METHODS if name not in GROUP_WEIGHTS]
sizes = pytest.mark.parametrize("size", [2, 5, 16])


def scores(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- strength -------------------------------------------------------------------------------------------------------


def test_alpha_g_of_the_papers() -> None:
    assert alpha_g(0.6, 16) == pytest.approx(0.21640, abs=5e-6)
    assert alpha_g(0.6, 1) == 0  # a single response is not modulated
    assert alpha_g(0.0417, 8) == pytest.approx(0.02, abs=1e-4)  # the 0.02 of SEED-GRPO's paper, at its own group size


@pytest.mark.parametrize("size", [0, -1])
def test_alpha_g_of_no_response_is_an_error(size: int) -> None:
    with pytest.raises(ValueError, match=f"group_size must be at least 1, got {size}"):
        alpha_g(0.6, size)


# --- forms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "form", "expected"),  # of the scores -1, 0, 1, 2, 4, 8 at the strength 1/4
    [
        ("linear", damp, [1, 1, 0.75, 0.5, 0, 0]),  # SEED-GRPO Eq. 6
        ("square", damp_square, [0.75, 1, 0.75, 0, 0, 0]),  # GCPO Eq. 8
        ("boost", boost, [0.75, 1, 1.25, 1.5, 2, 3]),  # GCPO Eq. 11
        ("reciprocal", reciprocal, [1 / 0.75, 1, 0.8, 1 / 1.5, 0.5, 1 / 3]),  # SEED-GRPO's code
        ("exponential", exponential, [math.exp(-x / 4) for x in (-1, 0, 1, 2, 4, 8)]),  # SEED-GRPO section 4.3
        ("focal", focal, [1, 1, 0.5625, 0.25, 0, 0]),  # the linear form squared, which does not rise again
    ],
)
def test_forms_by_hand(name: str, form: Callable[..., Tensor], expected: list[float]) -> None:
    assert form(scores(-1, 0, 1, 2, 4, 8), 0.25).tolist() == pytest.approx(expected, abs=1e-15)
    assert FORMS[name] is form


# --- ranges ---------------------------------------------------------------------------------------------------------

AT_G_16 = {
    "cd_only": (0.80981, 1),  # 1 - 0.21640 (15/16)^2
    "bot_only": (0.94590, 1),  # 1 - 0.21640/4
    "rd_only": (1, 1.21640),
    "gcpo_cd": (0.80981, 1.21640),
    "gcpo_bot": (0.94590, 1.21640),
    "gcpo_shuffled": (0.94590, 1.21640),
    "se": (0.4, 1),
    "kle": (0.4, 1),
    "seed_grpo": (0.95997, 1),  # 1/1.0417
    "qhawkeye": (0.8, 1),
    "egspo": (0.5, 1),
    "edge_grpo": (0.0625, INF),  # H is at most 16 times the mean
    "egpo": (0.8, 2),
    "egpo_c1": (0.8, 2),
    "egpo_c2": (0.8, 2),
    "egpo_c3": (0.8, 2),
    "egpo_c4": (0.8, 2),
    "egpo_c5": (0.41558, 2.28571),  # 0.8 among fifteen of 2 has the mean 30.8/16, and 2 among fifteen of 0.8, 14/16
    "egpo_c6": (0.8, 2),
    "r2vpo": (0, 1),
    "cw_grpo": (0, INF),
    "clip_cov": (0, 1),
}


@pytest.mark.parametrize("method", [name for name in METHODS if name in AT_G_16 or not METHODS[name].factors])
def test_size_of_the_effects_at_g_16_and_the_methods_own_alpha(method: str) -> None:
    assert weight_range(method, None, 16) == pytest.approx(AT_G_16.get(method, (1, 1)), abs=1e-5)
    assert weight_range(method, None, 1) == weight_range(method, 0.6, 1) == (1, 1)


@pytest.mark.parametrize("method", GROUP_WEIGHTS)
def test_alpha_widens_the_range_of_a_group_weight_from_a_point_on(method: str) -> None:
    (low, high), (lower, higher) = (weight_range(method, alpha, 16) for alpha in (0.6, 1.2))
    assert weight_range(method, 0.0, 16) == (1, 1)
    assert lower <= low <= 1 <= high <= higher
    assert higher - lower > high - low


@pytest.mark.parametrize("method", OTHERS)
def test_ranges_of_methods_without_alpha_do_not_depend_on_it(method: str) -> None:
    for size in (2, 16):
        assert weight_range(method, 0.0, size) == weight_range(method, 7.0, size) == weight_range(method, None, size)


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("se", {"form": "linear"}, (0.4, 1)),
        ("se", {"form": "square"}, (0, 1)),  # 0.6 log 16 is above 1
        ("se", {"form": "reciprocal"}, (1 / 1.6, 1)),
        ("se", {"form": "exponential"}, (math.exp(-0.6), 1)),
        ("se", {"form": "focal"}, (0.16, 1)),
        ("se", {"form": "boost"}, (1, 1.6)),
        ("gcpo_bot", {"alpha_norm": "none"}, (1 - 0.6 / 4, 1.6)),
        ("gcpo_bot", {"alpha_geo": 0.0}, (1, 1.21640)),
        ("gcpo_cd", {"alpha_rd": 0.0}, (0.80981, 1)),
        ("qhawkeye", {"alpha_norm": "log_g"}, (1 - 0.2 / math.log(16), 1)),
        ("seed_grpo", {"form": "linear", "estimator": "counts", "alpha_norm": "none"}, (1 - 0.0417 * math.log(16), 1)),
        ("seed_grpo", {"estimator": "mc"}, (0, 1)),  # the Monte-Carlo entropy has no upper end
        ("seed_grpo", {"estimator": "mc", "form": "boost"}, (1, INF)),
        ("edge_grpo", {"epsilon": 1e-5}, (0, INF)),  # H may be below epsilon
        ("edge_grpo", {"renorm": "after"}, (0, 16)),  # all of the mean
        ("edge_grpo", {"correct": (0, 0.01), "wrong": (0, 0.01)}, (0.01, 0.01)),  # 1/16 is above both ends
    ],
)
def test_ranges_of_options_at_g_16(method: str, options: dict[str, Any], expected: tuple[float, float]) -> None:
    assert weight_range(method, None, 16, **options) == pytest.approx(expected, abs=1e-5)
    if options.get("estimator") == "mc":
        assert weight_range(method, 0.0, 16, **options) == (1, 1)


# --- rollouts at the ends of the ranges -----------------------------------------------------------------------------


def group_at(end: str, method: str, size: int) -> Rollouts:
    """The lowest weights have answers without anything in common that all earn the same; the highest one answer G
    times, and rewards that differ as much as they can. Q-Hawkeye damps just that."""
    differ = end == "low"
    # CD is largest for orthogonal answers, where every off-diagonal pair is at distance 1, and BoT for answers all
    # round the circle, where the barycentre vanishes.
    turns = [2 * math.pi * i / size for i in range(size)]
    circle, orthogonal = [[math.cos(t), math.sin(t)] for t in turns], torch.eye(size).tolist()
    right = size // 2 if differ == (method == "qhawkeye") else size
    group = Group(
        rewards=[2.0] * right + [0.0] * (size - right),
        embeddings=(circle if "clusters" in METHODS[method].reads else orthogonal) if differ else [[3, 4]] * size,
        clusters=list(range(size)) if differ else [5] * size,
        nli=[[[0, 0, 1] if differ else [1, 0, 0]] * size] * size,
        logps=[[-0.7] * 3] * size,
    )
    return Rollouts(**features(group))


@sizes
@pytest.mark.parametrize("alpha", [None, 0.6, 4.0])
@pytest.mark.parametrize("method", [name for name in GROUP_WEIGHTS if not METHODS[name].permuted])
def test_group_weights_reach_both_ends_of_their_range(method: str, alpha: float | None, size: int) -> None:
    low, high = weight_range(method, alpha, size)
    if method == "qhawkeye" and size == 5:
        low = max(0, 1 - (alpha or 0.2) * 24 / 25)  # two of five at one end have 24/25 of the variance of an even split
    found = weights(method, group_at("low", method, size), alpha=alpha)
    torch.testing.assert_close(found, torch.full_like(found, low), atol=1e-6, rtol=0)
    # Identical answers keep a rest of kernel entropy, which shrinks as e^(-2tG): only large groups come close to 1.
    slack = 1e-6 if method != "kle" else {2: 1.0, 5: 0.5, 16: 0.05}[size] * (alpha or 0.6)
    found = weights(method, group_at("high", method, size), alpha=alpha)
    torch.testing.assert_close(found, torch.full_like(found, high), atol=slack, rtol=0)


def extremes(method: str, *responses: tuple[float, float]) -> tuple[float, float]:
    """The lowest and the highest weight of a group of (entropy, reward), of one token each."""
    tokens, rewards = [[h] for h, _ in responses], [reward for _, reward in responses]
    group = Group(rewards=rewards, entropies=tokens, logps=[[-h] for h, _ in responses])
    found = weights(method, Rollouts(**features(group)))
    return found.min().item(), found.max().item()


@sizes
@pytest.mark.parametrize("method", ["egspo", "egpo", "egpo_c1", "egpo_c2", "egpo_c3", "egpo_c4", "egpo_c6"])
def test_clamped_weights_reach_both_ends_of_their_range(method: str, size: int) -> None:
    """A certain and right response beside uncertain ones of which one is wrong and most uncertain."""
    low, high = weight_range(method, None, size)
    if (method, size) == ("egpo_c6", 2):
        high = 10 / ((10 + 0.5) / 2)  # in pairs, a ratio cut at 10 is not that far above the mean of both
    found = extremes(method, (9.0, 0.0), *[(4.0, 2.0)] * (size - 2), (1e-6, 2.0))
    assert found == pytest.approx((low, high), abs=1e-5)


@sizes
def test_edge_grpo_comes_close_to_the_inverse_of_g_and_to_any_height(size: int) -> None:
    low, high = extremes("edge_grpo", (1.0, 0.0), *[(1e-9, 2.0)] * (size - 1))
    assert low == pytest.approx(1 / size, abs=1e-6)
    assert high > 1e7


@sizes
def test_egpo_c5_reaches_the_lower_end_and_in_small_groups_the_upper_one(size: int) -> None:
    low, high = weight_range("egpo_c5", None, size)
    assert extremes("egpo_c5", (1.0, 0.0), *[(1e-4, 2.0)] * (size - 1))[0] == pytest.approx(low)
    # Fifteen wrong responses of equal entropy have 16/15 times the mean of the group: they are not damped to 0.8.
    wrong = max(0.8, (size - 1) / size)
    reached = extremes("egpo_c5", (1e-9, 2.0), *[(1.0, 0.0)] * (size - 1))[1]
    assert reached == pytest.approx(2 * size / (2 + (size - 1) * wrong), rel=1e-4)
    assert reached == pytest.approx(high, rel=1e-4 if size < 16 else 0.2)


def test_r2vpo_comes_close_to_both_ends() -> None:
    group = Rollouts(**features(Group(rewards=[0, 2], ratios=[[1, 1], [0, 2e4]])))
    assert weights("r2vpo", group)[0].tolist() == pytest.approx([1, 0], abs=1e-7)


def test_cw_grpo_gives_one_token_nearly_all_of_the_mass() -> None:
    """One of 32 tokens has no covariance, and all others have about the same, which is many sigma away from 0."""
    group = Group(rewards=[2, 0], logps=[[0] + [1] * 15, [-1] * 16])
    found = weights("cw_grpo", Rollouts(**features(group)))
    assert found[0, 0, 0] > 31.9
    assert 0 < found.min() < 1e-4
