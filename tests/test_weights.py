"""Weights of a score: the constants of the paper, and ranges that rollouts made for the purpose reach at both ends."""

from __future__ import annotations

import math

import pytest
import torch

from gcpo.methods import METHODS, weights
from gcpo.rollouts import Rollouts
from gcpo.weights import alpha_g, boost, damp, damp_square, weight_range

ENTAIL, CONTRADICT = (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)


def scores(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rewards_at(size: int, share: float) -> torch.Tensor:
    """A share of the rewards at the top of [0, 2], the rest at the bottom."""
    return torch.tensor([[2.0 if i < share * size else 0.0 for i in range(size)]], dtype=torch.float64)


def agreeing(size: int) -> Rollouts:
    """One answer G times, with rewards that differ as much as they can: the weights are at their highest."""
    return Rollouts(
        rewards_at(size, 0.5),
        embeddings=torch.tensor([3.0, 4.0], dtype=torch.float64).expand(1, size, 2),
        clusters=torch.full((1, size), 5),
        nli=torch.tensor(ENTAIL, dtype=torch.float64).expand(1, size, size, 3),
    )


def disagreeing(size: int, embeddings: torch.Tensor) -> Rollouts:
    """Answers without anything in common that all earn the same: the weights are at their lowest."""
    return Rollouts(
        rewards_at(size, 1.0),
        embeddings=embeddings.unsqueeze(0),
        clusters=torch.arange(size).unsqueeze(0),
        nli=torch.tensor(CONTRADICT, dtype=torch.float64).expand(1, size, size, 3),
    )


def lowest(method: str, size: int) -> Rollouts:
    # CD is largest for orthogonal answers, where every off-diagonal pair is at distance 1, and BoT for answers all
    # round the circle, where the barycentre vanishes.
    turns = 2 * math.pi * torch.arange(size, dtype=torch.float64) / size
    circle = torch.stack([turns.cos(), turns.sin()], -1)
    orthogonal = torch.eye(size, dtype=torch.float64)
    return disagreeing(size, circle if "clusters" in METHODS[method].reads else orthogonal)


# --- strength -------------------------------------------------------------------------------------------------------


def test_alpha_g_of_the_paper_is_0_2164() -> None:
    assert alpha_g(0.6, 16) == pytest.approx(0.21640, abs=5e-6)


@pytest.mark.parametrize("size", [2, 3, 8, 64])
def test_alpha_g_times_the_largest_entropy_is_alpha(size: int) -> None:
    uniform_entropy = -sum(math.log(1 / size) / size for _ in range(size))
    assert alpha_g(0.6, size) * uniform_entropy == pytest.approx(0.6, abs=1e-12)


def test_a_single_response_is_not_modulated() -> None:
    assert alpha_g(0.6, 1) == 0.0


@pytest.mark.parametrize("size", [0, -1])
def test_alpha_g_of_no_response_is_an_error(size: int) -> None:
    with pytest.raises(ValueError, match=f"group_size must be at least 1, got {size}"):
        alpha_g(0.6, size)


# --- shapes ---------------------------------------------------------------------------------------------------------


def test_seed_grpo_eq6_is_linear_and_clipped() -> None:
    assert damp(scores(0, 0.5, 2, 4, 5), 0.25).tolist() == [1, 0.875, 0.5, 0, 0]
    assert damp(scores(-1), 0.25).tolist() == [1]  # clipped above


def test_eq8_squares_the_score_and_is_clipped() -> None:
    assert damp_square(scores(0, 0.5, 1, 2, 3), 0.25).tolist() == [1, 0.9375, 0.75, 0, 0]


def test_eq11_boosts() -> None:
    assert boost(scores(0, 0.5, 1), 0.25).tolist() == [1, 1.125, 1.25]


@pytest.mark.parametrize("shape", [damp, damp_square, boost])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shapes_keep_batch_dimensions_and_precision(shape, dtype: torch.dtype) -> None:
    values = torch.rand(2, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = shape(values, 0.2)
    assert weight.shape == (2, 3)
    assert weight.dtype == dtype
    assert shape(values, 0.0).eq(1).all()


# --- ranges ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "low", "high"),
    [
        ("grpo", 1, 1),
        ("cd_only", 0.80981, 1),  # 1 - 0.21640 (15/16)^2
        ("bot_only", 0.94590, 1),  # 1 - 0.21640/4
        ("rd_only", 1, 1.21640),
        ("gcpo_cd", 0.80981, 1.21640),
        ("gcpo_bot", 0.94590, 1.21640),
        ("gcpo_shuffled", 0.94590, 1.21640),
        ("se", 0.4, 1),
        ("kle", 0.4, 1),
    ],
)
def test_size_of_the_effects_at_g_16(method: str, low: float, high: float) -> None:
    assert weight_range(method, 0.6, 16) == pytest.approx((low, high), abs=1e-5)


@pytest.mark.parametrize("size", [2, 5, 16])
@pytest.mark.parametrize("alpha", [0.6, 4.0])
@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if not row.permuted])
def test_both_ends_of_the_range_are_reached(method: str, alpha: float, size: int) -> None:
    low, high = weight_range(method, alpha, size)
    reached_low = weights(method, lowest(method, size), alpha=alpha)
    reached_high = weights(method, agreeing(size), alpha=alpha)
    # Identical answers keep a rest of kernel entropy, which shrinks as e^(-2tG): only large groups come close to 1.
    slack = 1e-6 if "nli" not in METHODS[method].reads else {2: 1.0, 5: 0.5, 16: 0.05}[size] * alpha
    torch.testing.assert_close(reached_low, torch.full_like(reached_low, low), atol=1e-6, rtol=0)
    torch.testing.assert_close(reached_high, torch.full_like(reached_high, high), atol=slack, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_without_strength_the_range_is_a_point(method: str) -> None:
    assert weight_range(method, 0.0, 16) == (1.0, 1.0)
    assert weight_range(method, 0.6, 1) == (1.0, 1.0)


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.factors])
def test_more_strength_widens_the_range(method: str) -> None:
    low, high = weight_range(method, 0.6, 16)
    wider_low, wider_high = weight_range(method, 1.2, 16)
    assert wider_low <= low
    assert wider_high >= high
    assert wider_high - wider_low > high - low


def test_the_range_of_an_unknown_method_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"Unknown method 'gcpo_bt'\. Did you mean 'gcpo_bot'\?"):
        weight_range("gcpo_bt", 0.6, 16)
