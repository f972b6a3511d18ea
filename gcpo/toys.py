"""Policies small enough to compute everything exactly: every response, every gradient, every group of G rollouts.

They stand in for a language model where a claim is about all policies, so that one exact counter-example decides it.
Everything is float64; sums over responses or groups are complete, never sampled.
"""

from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gcpo.methods import base_advantages


class SequencePolicy(NamedTuple):
    """All responses of one policy to one prompt."""

    sequences: Int[Tensor, "N T"]
    probabilities: Float[Tensor, " N"]
    gradients: Float[Tensor, "N P"]  # of the log-probability of each sequence, in all parameters


class Prompts(NamedTuple):
    """Prompts whose policy chooses among K answers; `features` are those of a log-linear policy, of unit length."""

    probabilities: Float[Tensor, "n K"]
    features: Float[Tensor, "n K P"]
    rewards: Float[Tensor, "n K"]


class Moments(NamedTuple):
    """Exact moments of the GRPO update g = (1/G) sum_i A_i g_i of a prompt over all its groups of rollouts."""

    mean: Float[Tensor, "*prompts P"]
    variance: Float[Tensor, "*prompts"]  # trace of the covariance of g
    norm: Float[Tensor, "*prompts"]  # expected length |g|
    spread: Float[Tensor, "*prompts"]  # expected V(q), GCPO Eq. 20: the variance of A_i g_i inside a group


def entropy(probabilities: Float[Tensor, "*groups K"]) -> Float[Tensor, "*groups"]:
    """Shannon entropy H in nats, GCPO Eq. 16; 0 log 0 = 0."""
    return torch.special.entr(probabilities).sum(-1)


def score_gradients(
    probabilities: Float[Tensor, "*prompts K"], features: Float[Tensor, "*prompts K P"]
) -> Float[Tensor, "*prompts K P"]:
    """Gradients of log pi_k for the log-linear policy pi = softmax(features @ theta): phi_k - sum_j pi_j phi_j.

    They depend on theta through pi alone. With linearly independent features every pi is reached by some theta, so
    probabilities and geometry can be chosen freely: g_i - g_j = phi_i - phi_j. Features = identity is the table of
    logits, where all g_i are sqrt(2) apart.
    """
    return features - probabilities.unsqueeze(-2) @ features


def sequence_policy(vocabulary: int = 3, length: int = 3, width: int = 4, *, seed: int = 0) -> SequencePolicy:
    """Return a random recurrent network over `vocabulary` tokens: all vocabulary^length sequences, and their gradients.

    Weights are standard normal. The last token plays the answer.
    """
    rng = np.random.default_rng(seed)
    shapes = ((vocabulary + 1, width), (width, width), (width, vocabulary))
    weights = tuple(torch.from_numpy(rng.standard_normal(shape)) for shape in shapes)
    sequences = torch.cartesian_prod(*[torch.arange(vocabulary)] * length).reshape(-1, length)

    def log_likelihoods(embedding: Tensor, recurrence: Tensor, head: Tensor) -> Tensor:
        state = embedding[vocabulary].tanh().expand(len(sequences), width)
        total = torch.zeros(len(sequences), dtype=state.dtype)
        for tokens in sequences.T:
            total = total + (state @ head).log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
            state = (embedding[tokens] + state @ recurrence).tanh()
        return total

    blocks = torch.func.jacrev(log_likelihoods, argnums=(0, 1, 2))(*weights)
    gradients = torch.cat([block.flatten(1) for block in blocks], 1)
    return SequencePolicy(sequences, log_likelihoods(*weights).exp(), gradients)


def prompts(kind: str, count: int, *, n_answers: int = 4, width: int = 8, seed: int = 0) -> Prompts:
    """Return a population of prompts with rewards in [0, 2], one of three kinds that tie entropy to reward differently.

    - "ordinary": one answer is right (reward 2) and favoured; the policy ranges from sure to undecided.
    - "half hopeless": half of the prompts split two ways, right or wrong; in the others all answers are wrong.
    - "trivial stakes": probabilities as in "ordinary", but every answer earns 1 up to a difference of about 0.01.

    Raises KeyError for another kind.
    """
    rng = np.random.default_rng(seed)
    right = np.eye(n_answers)[rng.integers(0, n_answers, count)]
    features = _unit(rng.standard_normal((count, n_answers, width)))
    temperature = np.exp(rng.uniform(np.log(0.1), np.log(4.0), (count, 1)))
    logits = (rng.standard_normal((count, n_answers)) + 1.5 * right) / temperature
    sure = np.exp(logits - np.logaddexp.reduce(logits, -1, keepdims=True))
    share, lost = rng.uniform(0.2, 0.8, (count, 1)), rng.random((count, 1)) < 0.5
    split = share * right + (1 - share) * np.roll(right, 1, -1)
    spread = rng.dirichlet(np.full(n_answers, 4.0), count)
    probabilities, rewards = {
        "ordinary": (sure, 2 * right),
        "half hopeless": (np.where(lost, spread, split), np.where(lost, 0, 2 * right)),
        "trivial stakes": (sure, 1 + 0.01 * rng.standard_normal((count, n_answers))),
    }[kind]
    return Prompts(*(torch.from_numpy(part) for part in (probabilities, features, rewards)))


def two_modes(angle: float, scatter: float = 0.0, group_size: int = 16) -> Float[Tensor, "G 4"]:
    """Unit vectors of a group in two equal halves whose directions are `angle` degrees apart; G must be even.

    The members of a half stand in a ring around its direction, `scatter` away from it before they are scaled to unit
    length; the ring is at right angles to both directions, so it leaves the angle between the halves as it is.
    """
    turn = np.arange(group_size // 2) * 4 * np.pi / group_size
    ring = scatter * np.stack([0 * turn, 0 * turn, np.cos(turn), np.sin(turn)], 1)
    half = np.radians(angle) / 2
    rows = [np.array([np.cos(half), side * np.sin(half), 0, 0]) + ring for side in (1, -1)]
    return torch.from_numpy(_unit(np.concatenate(rows)))


def all_groups(n_answers: int, group_size: int) -> Int[Tensor, "M G"]:
    """Return every group of G rollouts over K answers, up to order: C(G + K - 1, G) rows of sorted answer indices."""
    return torch.tensor(list(combinations_with_replacement(range(n_answers), group_size)))


def group_probabilities(
    groups: Int[Tensor, "M G"], probabilities: Float[Tensor, "*prompts K"]
) -> Float[Tensor, "*prompts M"]:
    """Probability that G independent rollouts make each group, in any order: the multinomial; sums to 1 over groups."""
    counts = _counts(groups, probabilities.shape[-1])
    orders = torch.lgamma(counts.sum(-1) + 1) - torch.lgamma(counts + 1).sum(-1)
    return (orders + torch.xlogy(counts, probabilities.unsqueeze(-2)).sum(-1)).exp()


def group_advantages(groups: Int[Tensor, "M G"], rewards: Float[Tensor, "*prompts K"]) -> Float[Tensor, "*prompts M G"]:
    """GRPO's advantage (`gcpo.methods.base_advantages`) of each rollout of each group, from each answer's reward."""
    drawn = rewards[..., groups]
    return base_advantages(drawn.flatten(0, -2)).reshape(drawn.shape)


def update_moments(
    groups: Int[Tensor, "M G"],
    probabilities: Float[Tensor, "*prompts K"],
    gradients: Float[Tensor, "*prompts K P"],
    advantages: Float[Tensor, "*prompts M G"],
) -> Moments:
    """Moments of the GRPO update (GCPO Eq. 1) of each prompt, exact: all groups weighed by their probability.

    `gradients` are those of the K answers, `advantages` (times any weights) those of the rollouts in `groups`.
    """
    weight = group_probabilities(groups, probabilities)
    member = _counts(groups.unsqueeze(-1), probabilities.shape[-1])
    size = groups.shape[-1]
    update = torch.einsum("...mg,mgk->...mk", advantages, member) @ gradients / size
    length = update.square().sum(-1)
    squares = torch.einsum("...mg,mgk->...mk", advantages.square(), member)
    second = (squares @ gradients.square().sum(-1, keepdim=True)).squeeze(-1) / size
    mean = (weight.unsqueeze(-1) * update).sum(-2)
    return Moments(
        mean,
        (weight * (update - mean.unsqueeze(-2)).square().sum(-1)).sum(-1),
        (weight * length.sqrt()).sum(-1),
        (weight * (second - length)).sum(-1),
    )


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def _counts(groups: Int[Tensor, "*groups G"], n_answers: int) -> Float[Tensor, "*groups K"]:
    return torch.nn.functional.one_hot(groups, n_answers).sum(-2).double()
