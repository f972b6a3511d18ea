"""Updates of methods, what they gain, and the most that weights could: by hand, by search and by autograd."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from helpers import for_all, seeds
from hypothesis import strategies as st

from gcpo.methods import METHODS, advantages
from gcpo.rollouts import Rollouts
from gcpo.updates import ceiling, gain, of_one_step, one_family, reward_coefficients, token_coefficients, total_gain


def problem(seed: int, questions: int, width: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    parts, h = rng.normal(size=(questions, width)) * rng.exponential(size=(questions, 1)), rng.normal(size=width)
    return parts @ h, parts @ parts.T


# --- what any weights could gain ------------------------------------------------------------------------------------


def test_the_gain_of_two_questions_by_hand() -> None:
    parts, h = np.array([[1.0, 0.0], [0.3, 1.0]]), np.array([1.0, 0.0])
    dots, gram = parts @ h, parts @ parts.T
    assert gain(np.ones(2), dots, gram) == pytest.approx(1.3 / np.sqrt(1.3**2 + 1))
    assert gain(np.array([7.0, 0.0]), dots, gram) == pytest.approx(1)  # the first alone lies along h, however long
    assert gain(np.zeros(2), dots, gram) == 0
    np.testing.assert_allclose(ceiling(dots, gram, 0.8, 1.2), [1.2, 0.8])
    np.testing.assert_allclose(ceiling(dots, gram)[1], 0, atol=1e-6)


@pytest.mark.parametrize("ends", [(0.0, np.inf), (0.8, 1.2), (1.0, 1.3)])
@for_all(seed=seeds, questions=st.integers(2, 3))
def test_no_weights_on_a_grid_gain_more_than_the_ceiling(seed: int, questions: int, ends: tuple[float, float]) -> None:
    dots, gram = problem(seed, questions)
    low, high = ends[0], min(ends[1], 1.0) if np.isinf(ends[1]) else ends[1]
    grid = itertools.product(np.linspace(low, high, 21), repeat=questions)
    most = max(gain(np.array(weights), dots, gram) for weights in grid)
    if most > 0:
        found = ceiling(dots, gram, *ends)
        assert gain(found, dots, gram) >= most * (1 - 1e-6)
        assert (found >= low - 1e-12).all() and (found <= high + 1e-12).all()


def test_where_nothing_gains_the_oracle_does_not_step() -> None:
    assert not ceiling(np.array([-1.0, -2.0]), np.eye(2)).any()
    np.testing.assert_array_equal(ceiling(np.array([-1.0, -2.0]), np.eye(2), 0.9, 1.1), [0.9, 0.9])


def test_the_gain_of_several_batches_by_hand() -> None:
    dots, squares = np.array([[1.0, 3.0], [0.0, 2.0]]), np.array([9.0, 16.0])  # means 2 and 1; lengths 3 and 4
    assert total_gain(dots, squares) == pytest.approx([3 / 5])


# --- the coefficients of tokens -------------------------------------------------------------------------------------


def rollouts_of(seed: int, groups: int = 2, size: int = 4, longest: int = 5) -> Rollouts:
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (groups, size, 1), generator=rng)
    return Rollouts(
        torch.rand(groups, size, generator=rng) * 2,
        mask=(torch.arange(longest) < lengths).long(),
        clusters=torch.randint(0, 3, (groups, size), generator=rng),
        exact_clusters=torch.randint(0, 3, (groups, size), generator=rng),
        embeddings=torch.randn(groups, size, 3, generator=rng),
        logps=-torch.rand(groups, size, longest, generator=rng),
        entropies=torch.rand(groups, size, longest, generator=rng),
        max_completion_length=longest,
    )


@pytest.mark.parametrize("method", ["grpo", "gcpo_bot", "dr_grpo", "seed_grpo", "egpo", "cw_grpo"])
@for_all(seed=seeds)
def test_coefficients_are_those_of_trls_loss_at_ratio_one(method: str, seed: int) -> None:
    """TRL, GRPOTrainer._compute_loss: the advantage times the ratio, over tokens, then over completions."""
    rollouts = rollouts_of(seed)
    modulated, mask = advantages(method, rollouts), rollouts.mask.double()
    ratios = torch.ones_like(mask).requires_grad_()
    per_token = -ratios * (modulated if modulated.ndim == 3 else modulated.unsqueeze(-1)) * mask
    if METHODS[method].base == "dr_grpo":
        loss = per_token.sum() / (mask.shape[0] * mask.shape[1] * rollouts.max_completion_length)
    else:
        loss = (per_token.sum(-1) / mask.sum(-1)).mean()
    loss.backward()
    torch.testing.assert_close(
        token_coefficients(METHODS[method], rollouts).double(), -ratios.grad, rtol=1e-5, atol=1e-7
    )


def test_rewards_gradient_has_the_others_as_baseline() -> None:
    rollouts = Rollouts(torch.tensor([[1.0, 0.0, 2.0]]), mask=torch.tensor([[[1, 1], [1, 0], [1, 1]]]))
    # By hand: r_i less the mean of the other two, over G = 3: 0, -1.5 and 1.5.
    expected = torch.tensor([[[0.0, 0.0], [-0.5, 0.0], [0.5, 0.5]]])
    torch.testing.assert_close(reward_coefficients(rollouts), expected)


def test_rewards_gradient_is_unbiased() -> None:
    """Over all pairs of answers of a policy with three, the mean is the exact gradient of the expected reward."""
    logits, rewards = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64), torch.tensor([0.0, 1.0, 2.0])
    logits.requires_grad_()
    p = logits.softmax(0)
    (exact,) = torch.autograd.grad((p * rewards).sum(), logits)
    mean = torch.zeros(3, dtype=torch.float64)
    for i, j in itertools.product(range(3), repeat=2):
        both = Rollouts(rewards[[i, j]].unsqueeze(0), mask=torch.ones(1, 2, 1))
        c = reward_coefficients(both)[0, :, 0].double()
        logs = logits.log_softmax(0)
        (own,) = torch.autograd.grad(c[0] * logs[i] + c[1] * logs[j], logits)
        mean += p[i].detach() * p[j].detach() * own
    torch.testing.assert_close(mean, exact, rtol=1e-6, atol=1e-8)


def test_methods_that_weigh_questions_of_plain_grpo() -> None:
    family = {name for name in METHODS if one_family(METHODS[name])}
    controls = {"gcpo_shuffled", "gcpo_strong", "se_shuffled", "drop_half"}
    assert (
        family == {"grpo", "se", "kle", "cd_only", "bot_only", "rd_only", "gcpo_cd", "gcpo_bot", "qhawkeye"} | controls
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["gcpo_bot", "clip_cov"], "clip_cov acts on the ratios of later steps, which one step does not have"),
        (["care"], "care reads a reference policy, which one step does not have; leave it out"),
        (["gcpo_bott"], "Unknown method 'gcpo_bott'. Did you mean 'gcpo_bot'"),
    ],
)
def test_methods_that_one_step_does_not_show_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        of_one_step(names)


def test_methods_are_compared_once_each() -> None:
    assert [*of_one_step(["grpo", "se", "grpo"])] == ["grpo", "se"]
