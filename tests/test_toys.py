"""Exact toy policies: every enumeration is compared with a brute-force or closed-form computation."""

from itertools import product
from math import log, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gcpo import toys
from gcpo.methods import base_advantages


def double(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_eq16_entropy_by_hand() -> None:
    p = double([[0.5, 0.25, 0.25], [1, 0, 0]])
    torch.testing.assert_close(toys.entropy(p), double([1.5 * log(2), 0]))


def test_score_gradients_are_those_of_a_log_softmax() -> None:
    features = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 3)))
    theta = double([0.3, -1.0, 2.0])
    expected = torch.func.jacrev(lambda t: (features @ t).log_softmax(0))(theta)
    torch.testing.assert_close(toys.score_gradients((features @ theta).softmax(0), features), expected)


def test_sequence_policy_lists_every_sequence_once_with_score_of_mean_zero() -> None:
    policy = toys.sequence_policy(vocabulary=3, length=3, width=4, seed=1)
    assert len({tuple(row) for row in policy.sequences.tolist()}) == 27
    assert policy.gradients.shape == (27, 4 * 4 + 4 * 4 + 4 * 3)
    torch.testing.assert_close(policy.probabilities.sum(), double(1.0))
    assert (policy.probabilities @ policy.gradients).abs().max() < 1e-12
    second = policy.probabilities.reshape(9, 3) / policy.probabilities.reshape(9, 3).sum(1, keepdim=True)
    assert (second[0] - second[1]).abs().max() > 0.01  # it depends on the tokens before


def test_sequence_policy_of_one_token_is_a_softmax_of_its_first_state() -> None:
    policy = toys.sequence_policy(vocabulary=2, length=1, width=3, seed=4)
    rng = np.random.default_rng(4)
    embedding, _, head = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((3, 3), (3, 3), (3, 2)))
    state = embedding[2].tanh()
    p = (state @ head).softmax(0)
    torch.testing.assert_close(policy.probabilities, p)
    # d log p_k / d head = state (e_k - p)^T, the last block of the gradient.
    head_gradient = torch.einsum("w,kv->kwv", state, torch.eye(2, dtype=torch.float64) - p)
    torch.testing.assert_close(policy.gradients[:, -6:], head_gradient.flatten(1))


def test_prompts_tie_entropy_to_reward_as_documented() -> None:
    ordinary, hopeless, trivial = (toys.prompts(kind, 400) for kind in ("ordinary", "half hopeless", "trivial stakes"))
    for p, features, rewards in (ordinary, hopeless, trivial):
        torch.testing.assert_close(p.sum(1), torch.ones(400, dtype=torch.float64))
        torch.testing.assert_close(features.norm(dim=-1), torch.ones(400, 4, dtype=torch.float64))
        assert rewards.min() >= 0 and rewards.max() <= 2 and p.min() >= 0
    assert (ordinary.rewards.sum(1) == 2).all() and (ordinary.rewards.amax(1) == 2).all()
    favoured = (ordinary.probabilities * ordinary.rewards / 2).sum(1).mean()
    assert favoured > 0.4
    lost = hopeless.rewards.sum(1) == 0
    assert 0.4 < lost.double().mean() < 0.6
    assert ((hopeless.probabilities > 0).sum(1)[~lost] == 2).all()
    assert ((hopeless.probabilities > 0).sum(1)[lost] == 4).all()
    torch.testing.assert_close(trivial.probabilities, ordinary.probabilities)
    assert 0.005 < (trivial.rewards - 1).std() < 0.02
    with pytest.raises(KeyError, match="dreaming"):
        toys.prompts("dreaming", 3)


@given(st.floats(1, 179), st.floats(0, 2))
@settings(max_examples=30, deadline=None)
def test_two_modes_keep_their_angle_whatever_the_scatter(angle: float, scatter: float) -> None:
    rows = toys.two_modes(angle, scatter, group_size=8)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(8, dtype=torch.float64))
    first, second = rows[:4].mean(0), rows[4:].mean(0)
    assert float(first @ second / first.norm() / second.norm()) == pytest.approx(np.cos(np.radians(angle)), abs=1e-9)
    assert float(first.norm()) == pytest.approx(1 / sqrt(1 + scatter**2))


def test_group_probabilities_count_every_order() -> None:
    p = double([0.5, 0.3, 0.2])
    groups = toys.all_groups(3, 4)
    brute = dict.fromkeys(map(tuple, groups.tolist()), 0.0)
    for draw in product(range(3), repeat=4):
        brute[tuple(sorted(draw))] += float(p[list(draw)].prod())
    torch.testing.assert_close(toys.group_probabilities(groups, p), double(list(brute.values())))


def test_eq1_update_moments_match_all_ordered_groups() -> None:
    rng = np.random.default_rng(5)
    p = torch.from_numpy(rng.dirichlet(np.ones(3), 2))
    g = toys.score_gradients(p, torch.from_numpy(rng.standard_normal((2, 3, 4))))
    rewards = double([[2, 1, 0], [0.3, 0.3, 1]])
    groups = toys.all_groups(3, 4)
    moments = toys.update_moments(groups, p, g, toys.group_advantages(groups, rewards))
    orders = torch.tensor(list(product(range(3), repeat=4)))
    for prompt in range(2):
        weight = p[prompt][orders].prod(-1)
        terms = base_advantages(rewards[prompt][orders]).unsqueeze(-1) * g[prompt][orders]
        update = terms.mean(1)
        mean = weight @ update
        torch.testing.assert_close(moments.mean[prompt], mean)
        torch.testing.assert_close(moments.variance[prompt], weight @ (update - mean).square().sum(-1))
        torch.testing.assert_close(moments.norm[prompt], weight @ update.norm(dim=-1))
        torch.testing.assert_close(moments.spread[prompt], weight @ terms.var(1, correction=0).sum(-1))
