"""Weights of a score: the constants of the papers, and ranges that rollouts made for the purpose reach at both ends."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gcpo.methods import METHODS, get_method, weights
from gcpo.methods.group import GroupFactor
from gcpo.rollouts import Rollouts
from gcpo.weights import (
    FORMS,
    alpha_g,
    boost,
    damp,
    damp_square,
    exponential,
    focal,
    reciprocal,
    weight_range,
)

ENTAIL, CONTRADICT = (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)
GROUP_WEIGHTS = [n for n, row in METHODS.items() if row.factors and row.granularity == "group"]
NO_ALPHA = [name for name in METHODS if name not in GROUP_WEIGHTS]
INF = math.inf


def scores(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rewards_at(size: int, share: float) -> Tensor:
    """A share of the rewards at the top of [0, 2], the rest at the bottom."""
    return torch.tensor([[2.0 if i < share * size else 0.0 for i in range(size)]], dtype=torch.float64)


def features(size: int, embeddings: Tensor, labels: Tensor, relation: tuple[float, float, float]) -> dict[str, Tensor]:
    return {
        "embeddings": embeddings.expand(1, size, -1),
        "clusters": labels.unsqueeze(0),
        "nli": torch.tensor(relation, dtype=torch.float64).expand(1, size, size, 3),
        "logps": torch.full((1, size, 3), -0.7, dtype=torch.float64),
        "mask": torch.ones(1, size, 3),
    }


def highest(method: str, size: int) -> Rollouts:
    """One answer G times, and rewards that differ as much as they can; Q-Hawkeye damps just that."""
    one = torch.tensor([3.0, 4.0], dtype=torch.float64)
    share = 1.0 if method == "qhawkeye" else 0.5
    return Rollouts(rewards_at(size, share), **features(size, one, torch.full((size,), 5), ENTAIL))


def lowest(method: str, size: int) -> Rollouts:
    """Answers without anything in common that all earn the same; for Q-Hawkeye, as different rewards as can be."""
    # CD is largest for orthogonal answers, where every off-diagonal pair is at distance 1, and BoT for answers all
    # round the circle, where the barycentre vanishes.
    turns = 2 * math.pi * torch.arange(size, dtype=torch.float64) / size
    circle = torch.stack([turns.cos(), turns.sin()], -1)
    orthogonal = torch.eye(size, dtype=torch.float64)
    embeddings = circle if "clusters" in METHODS[method].reads else orthogonal
    share = 0.5 if method == "qhawkeye" else 1.0
    return Rollouts(rewards_at(size, share), **features(size, embeddings, torch.arange(size), CONTRADICT))


# --- strength -------------------------------------------------------------------------------------------------------


def test_alpha_g_of_the_paper_is_0_2164() -> None:
    assert alpha_g(0.6, 16) == pytest.approx(0.21640, abs=5e-6)


def test_alpha_g_of_seed_grpo_at_its_own_group_size_is_the_0_02_of_its_paper() -> None:
    assert alpha_g(0.0417, 8) == pytest.approx(0.02, abs=1e-4)


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


# --- forms ----------------------------------------------------------------------------------------------------------


def test_seed_grpo_eq6_is_linear_and_clipped() -> None:
    assert damp(scores(0, 0.5, 2, 4, 5), 0.25).tolist() == [1, 0.875, 0.5, 0, 0]
    assert damp(scores(-1), 0.25).tolist() == [1]  # clipped above


def test_eq8_squares_the_score_and_is_clipped() -> None:
    assert damp_square(scores(0, 0.5, 1, 2, 3), 0.25).tolist() == [1, 0.9375, 0.75, 0, 0]


def test_eq11_boosts() -> None:
    assert boost(scores(0, 0.5, 1), 0.25).tolist() == [1, 1.125, 1.25]


def test_seed_grpo_reciprocal_is_what_its_code_computes() -> None:
    assert reciprocal(scores(0, 1, 4, 12), 0.25).tolist() == [1, 0.8, 0.5, 0.25]


def test_seed_grpo_section_4_3_exponential() -> None:
    expected = [1, math.exp(-0.25), math.exp(-1), math.exp(-3)]
    assert exponential(scores(0, 1, 4, 12), 0.25).tolist() == pytest.approx(expected)


def test_seed_grpo_section_4_3_focal_is_the_linear_form_squared_and_does_not_rise_again() -> None:
    assert focal(scores(-1, 0, 1, 2, 4, 8), 0.25).tolist() == [1, 1, 0.5625, 0.25, 0, 0]


def test_forms_by_name() -> None:
    named = {"linear": damp, "square": damp_square, "reciprocal": reciprocal, "exponential": exponential}
    assert named | {"focal": focal, "boost": boost} == FORMS


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forms_keep_batch_dimensions_and_precision(form: Callable[[Tensor, float], Tensor], dtype: torch.dtype) -> None:
    values = torch.rand(2, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = form(values, 0.2)
    assert weight.shape == (2, 3)
    assert weight.dtype == dtype
    assert form(values, 0.0).eq(1).all()


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


@pytest.mark.parametrize("method", METHODS)
def test_size_of_the_effects_at_g_16_and_the_methods_own_alpha(method: str) -> None:
    expected = AT_G_16.get(method, (1, 1))
    assert weight_range(method, None, 16) == pytest.approx(expected, abs=1e-5)
    assert (method in AT_G_16) == bool(METHODS[method].factors)


@pytest.mark.parametrize("size", [2, 5, 16])
@pytest.mark.parametrize("alpha", [None, 0.6, 4.0])
@pytest.mark.parametrize("method", [name for name in GROUP_WEIGHTS if not METHODS[name].permuted])
def test_group_weights_reach_both_ends_of_their_range(method: str, alpha: float | None, size: int) -> None:
    low, high = weight_range(method, alpha, size)
    reached_low = weights(method, lowest(method, size), alpha=alpha)
    reached_high = weights(method, highest(method, size), alpha=alpha)
    if method == "qhawkeye" and size == 5:
        # Three of five at one end have 24/25 of the variance of an even split.
        low = max(0, 1 - (alpha or 0.2) * 24 / 25)
    # Identical answers keep a rest of kernel entropy, which shrinks as e^(-2tG): only large groups come close to 1.
    slack = 1e-6 if method != "kle" else {2: 1.0, 5: 0.5, 16: 0.05}[size] * (alpha or 0.6)
    torch.testing.assert_close(reached_low, torch.full_like(reached_low, low), atol=1e-6, rtol=0)
    torch.testing.assert_close(reached_high, torch.full_like(reached_high, high), atol=slack, rtol=0)


def entropies_of(*values: tuple[float, float]) -> Rollouts:
    """One group of responses of one token, of which (entropy, reward) are given; NLL and Shannon's are the same."""
    entropy = torch.tensor([[[h] for h, _ in values]], dtype=torch.float64)
    rewards = torch.tensor([[reward for _, reward in values]], dtype=torch.float64)
    return Rollouts(rewards, logps=-entropy, entropies=entropy, mask=torch.ones_like(entropy))


@pytest.mark.parametrize("size", [2, 5, 16])
@pytest.mark.parametrize("method", ["egspo", "egpo", "egpo_c1", "egpo_c2", "egpo_c3", "egpo_c4", "egpo_c6"])
def test_clamped_weights_reach_both_ends_of_their_range(method: str, size: int) -> None:
    """A certain and right response beside uncertain ones of which one is wrong and most uncertain."""
    found = weights(method, entropies_of((9.0, 0.0), *[(4.0, 2.0)] * (size - 2), (1e-6, 2.0)))
    low, high = weight_range(method, None, size)
    if (method, size) == ("egpo_c6", 2):
        high = 10 / ((10 + 0.5) / 2)  # in pairs, a ratio cut at 10 is not that far above the mean of both
    assert (found.min().item(), found.max().item()) == pytest.approx((low, high), abs=1e-5)


@pytest.mark.parametrize("size", [2, 5, 16])
def test_edge_grpo_comes_close_to_the_inverse_of_g_and_to_any_height(size: int) -> None:
    found = weights("edge_grpo", entropies_of((1.0, 0.0), *[(1e-9, 2.0)] * (size - 1)))
    low, high = weight_range("edge_grpo", None, size)
    assert found.min().item() == pytest.approx(low, abs=1e-6)
    assert found.max() > 1e7
    assert high == INF


@pytest.mark.parametrize("size", [2, 5, 16])
def test_egpo_c5_reaches_the_lower_end_and_in_small_groups_the_upper_one(size: int) -> None:
    low, high = weight_range("egpo_c5", None, size)
    found = weights("egpo_c5", entropies_of((1.0, 0.0), *[(1e-4, 2.0)] * (size - 1)))
    assert found.min().item() == pytest.approx(low)
    found = weights("egpo_c5", entropies_of((1e-9, 2.0), *[(1.0, 0.0)] * (size - 1)))
    # Fifteen wrong responses of equal entropy have 16/15 times the mean of the group: they are not damped to 0.8.
    wrong = max(0.8, (size - 1) / size)
    assert found.max().item() == pytest.approx(2 * size / (2 + (size - 1) * wrong), rel=1e-4)
    assert found.max().item() == pytest.approx(high, rel=1e-4 if size < 16 else 0.2)


def test_r2vpo_comes_close_to_both_ends() -> None:
    ratios = torch.tensor([[[1.0, 1.0], [0.0, 2e4]]])
    found = weights("r2vpo", Rollouts(torch.tensor([[0.0, 2.0]]), ratios=ratios, mask=torch.ones_like(ratios)))
    low, high = weight_range("r2vpo", None, 2)
    assert found[0].tolist() == pytest.approx([high, low], abs=1e-7)


def test_cw_grpo_gives_one_token_nearly_all_of_the_mass() -> None:
    """Of 32 tokens one has no covariance, and all others have about the same, which is many sigma away from 0."""
    logps = torch.tensor([[[0.0] + [1.0] * 15, [-1.0] * 16]], dtype=torch.float64)
    found = weights("cw_grpo", Rollouts(torch.tensor([[2.0, 0.0]]), logps=logps, mask=torch.ones_like(logps)))
    assert found[0, 0, 0] > 31.9
    assert 0 < found.min() < 1e-4
    assert weight_range("cw_grpo", None, 2) == (0, INF)


@pytest.mark.parametrize("method", METHODS)
def test_a_single_response_has_no_range(method: str) -> None:
    assert weight_range(method, None, 1) == weight_range(method, 0.6, 1) == (1.0, 1.0)


@pytest.mark.parametrize("method", GROUP_WEIGHTS)
def test_without_strength_the_range_of_a_group_weight_is_a_point(method: str) -> None:
    assert weight_range(method, 0.0, 16) == (1.0, 1.0)


@pytest.mark.parametrize("method", GROUP_WEIGHTS)
def test_more_strength_widens_the_range(method: str) -> None:
    low, high = weight_range(method, 0.6, 16)
    wider_low, wider_high = weight_range(method, 1.2, 16)
    assert wider_low <= low
    assert wider_high >= high
    assert wider_high - wider_low > (high - low) + 0.05 * (method == "qhawkeye")


@pytest.mark.parametrize("size", [2, 16])
@pytest.mark.parametrize("method", NO_ALPHA)
def test_ranges_of_methods_without_alpha_do_not_depend_on_it(method: str, size: int) -> None:
    assert weight_range(method, 0.0, size) == weight_range(method, 7.0, size) == weight_range(method, None, size)


def test_the_monte_carlo_entropy_has_no_upper_end() -> None:
    (factor,) = get_method("seed_grpo", estimator="mc").factors
    assert factor.bounds(None, 16) == (0, 1)
    assert factor.bounds(0.0, 16) == (1, 1)
    (factor,) = get_method("seed_grpo", estimator="mc", form="boost").factors
    assert isinstance(factor, GroupFactor)
    assert factor.bounds(None, 16) == (1, INF)


@pytest.mark.parametrize(
    ("form", "low", "high"),
    [
        ("linear", 0.4, 1),
        ("square", 0, 1),  # 0.6 log 16 is above 1
        ("reciprocal", 1 / 1.6, 1),
        ("exponential", math.exp(-0.6), 1),
        ("focal", 0.16, 1),
        ("boost", 1, 1.6),
    ],
)
def test_ranges_of_the_forms_of_semantic_entropy_at_alpha_0_6(form: str, low: float, high: float) -> None:
    (factor,) = get_method("se", form=form).factors
    assert factor.bounds(None, 16) == pytest.approx((low, high))


def test_the_range_of_an_unknown_method_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"Unknown method 'gcpo_bt'\. Did you mean 'gcpo_bot'\?"):
        weight_range("gcpo_bt", 0.6, 16)
