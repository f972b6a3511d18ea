"""What every method keeps: ranges, invariances, edge cases; the table of methods, products and options.

Their formulas are in test_factors.py.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gcpo.measures import reward_dispersion
from gcpo.methods import BASES, METHODS, advantages, base_advantages, get_method, modulate, permutation, weights
from gcpo.methods.group import GroupFactor
from gcpo.methods.parts import Factor
from gcpo.methods.token import token_covariance
from gcpo.rollouts import MissingFeatureError, Rollouts
from gcpo.semantics import NO_ANSWER, Embedder, Entailment, from_texts
from gcpo.weights import FORMS, weight_range

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]
NAN, INF = math.nan, math.inf
TOKENS = 5
TOKEN_FEATURES = ("logps", "entropies", "ref_logps", "ratios", "answer_mask")

MODULATED = [name for name, row in METHODS.items() if row.factors]
WITH_ALPHA = [n for n in MODULATED if any(isinstance(factor, GroupFactor) for factor in METHODS[n].factors)]
READ_TOKENS = [name for name, row in METHODS.items() if "mask" in row.reads]
# Clip-Cov and KL-Cov compare tokens with those of the whole batch, and the control borrows weights.
ONE_GROUP = [name for name in METHODS if name not in ("gcpo_shuffled", "clip_cov", "kl_cov")]
EGPOS = ["egpo", "egpo_c1", "egpo_c2", "egpo_c3", "egpo_c4", "egpo_c5", "egpo_c6"]
ENTROPY = ["egspo", "edge_grpo", *EGPOS]
# Which of its candidates Clip-Cov drops hangs on their places by the very draw; which ones there are does not.
ALL_CANDIDATES: dict[str, dict[str, Any]] = {"clip_cov": {"share": 1.0}}

every_method = pytest.mark.parametrize("method", METHODS)
seeds = st.integers(0, 2**31 - 1)
sizes = st.integers(1, 8)


def for_all(**strategies: st.SearchStrategy) -> Callable:
    """A property test without a time limit: the first call also pays for what the libraries load lazily."""
    return lambda test: settings(deadline=None, max_examples=10)(given(**strategies)(test))


def features_of(
    seed: int, groups: int, size: int, dtype: torch.dtype = torch.float64, shortest: int = 1
) -> dict[str, Tensor]:
    """Whatever a method reads; completions of ``shortest`` to 5 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(groups, size, *shape, generator=generator, dtype=dtype)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, (groups, size, *shape), generator=generator)

    return {
        "rewards": whole(0, 5).to(dtype) / 2,
        "embeddings": normal(4),
        "clusters": whole(-2, 3) * 100,
        "nli": normal(size, 3).softmax(-1),
        "logps": -2 * normal(TOKENS).abs(),
        "entropies": normal(TOKENS).abs(),
        "ref_logps": -normal(TOKENS).abs(),
        "ratios": (0.3 * normal(TOKENS)).exp(),
        "mask": torch.arange(TOKENS) < whole(shortest, TOKENS + 1, 1),
        "answer_mask": whole(0, 3, TOKENS) > 0,
        "answered": whole(0, 5) > 0,
    }


def rollouts_of(seed: int, groups: int, size: int, dtype: torch.dtype = torch.float64) -> Rollouts:
    return Rollouts(**features_of(seed, groups, size, dtype))


def outcome(method: str, rollouts: Rollouts, **options: Any) -> dict[str, Tensor]:
    """All that a method makes of rollouts: weights, advantages, and what tokens pay in the loss."""
    found = {
        "weights": weights(method, rollouts, **options),
        "advantages": advantages(method, rollouts, **options),
    }
    penalty, base = METHODS[method].penalty, base_advantages(rollouts.rewards)
    if penalty is not None and not tied(rollouts, base):
        found["paid"] = penalty.coefficients(rollouts, base)
    return found


def tied(rollouts: Rollouts, base: Tensor) -> bool:
    """Whether several tokens have the largest covariance, so that KL-Cov's choice hangs on their places."""
    values, kept = token_covariance(rollouts, base)
    return bool(kept.any()) and int(values[kept].eq(values[kept].max()).sum()) > 1


def responses(features: dict[str, Tensor], chosen: Tensor) -> dict[str, Tensor]:
    """The features of some responses of each group, in the order given."""
    picked = {name: value[:, chosen] for name, value in features.items()}
    return picked | {"nli": picked["nli"][:, :, chosen]}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


# --- base advantages ------------------------------------------------------------------------------------------------


def grpo_by_hand(rewards: Sequence[float]) -> list[float]:
    """Eq. 1 with TRL's epsilon, over the rewards that exist."""
    known = [r for r in rewards if not math.isnan(r)]
    if len(set(known)) < 2:
        return [0.0] * len(rewards)
    mean, deviation = statistics.fmean(known), statistics.stdev(known)  # stdev divides by n - 1
    return [0.0 if math.isnan(r) else (r - mean) / (deviation + 1e-4) for r in rewards]


def test_eq1_with_the_n_minus_1_deviation_and_epsilon_1e_4() -> None:
    # mean 1, squared deviations 1, 1, 0, 0, so std = sqrt(2/3)
    a = 1 / (math.sqrt(2 / 3) + 1e-4)
    found = base_advantages(torch.tensor([[2, 0, 1, 1]], dtype=torch.float64))
    assert found.tolist() == [pytest.approx([a, -a, 0, 0], abs=1e-12)]


some_rewards = st.lists(st.sampled_from([NAN, 0.0, 0.1, 0.7, 1.0, 2.0]), min_size=1, max_size=8)


@for_all(rewards=some_rewards)
def test_eq1_leaves_unscorable_rewards_out(rewards: list[float]) -> None:
    found = base_advantages(torch.tensor([rewards, [0.3] * len(rewards)], dtype=torch.float64))
    assert found[0].tolist() == pytest.approx(grpo_by_hand(rewards), abs=1e-11)
    assert found[1].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_epsilon_counts_where_rewards_hardly_differ(dtype: torch.dtype) -> None:
    found = base_advantages(torch.tensor([[0, 1e-4]], dtype=dtype))
    half = 0.5e-4 / (math.sqrt(2) * 0.5e-4 + 1e-4)
    assert found[0].tolist() == pytest.approx([-half, half], rel=1e-5)
    assert found.dtype == dtype


@for_all(rewards=some_rewards)
def test_dr_grpo_does_not_divide(rewards: list[float]) -> None:
    known = [r for r in rewards if not math.isnan(r)]
    expected = [0.0 if math.isnan(r) else r - statistics.fmean(known) for r in rewards]
    rollouts = Rollouts(torch.tensor([rewards], dtype=torch.float64))
    assert advantages("dr_grpo", rollouts)[0].tolist() == pytest.approx(expected, abs=1e-12)
    assert torch.equal(advantages("grpo", rollouts, scale_rewards="none"), advantages("dr_grpo", rollouts))
    assert torch.equal(advantages("dr_grpo", rollouts, scale_rewards="group"), advantages("grpo", rollouts))


@for_all(first=some_rewards, data=st.data())
def test_scale_rewards_batch_divides_by_the_deviation_of_the_batch(first: list[float], data: st.DataObject) -> None:
    second = data.draw(st.lists(st.sampled_from([NAN, 0.0, 0.5, 5.0]), min_size=len(first), max_size=len(first)))
    known = [r for r in first + second if not math.isnan(r)]
    deviation = statistics.stdev(known) if len(known) > 1 else 0.0
    expected = []
    for row in (first, second):
        there = [r for r in row if not math.isnan(r)]
        expected += [0.0 if math.isnan(r) else (r - statistics.fmean(there)) / (deviation + 1e-4) for r in row]
    found = advantages("grpo", Rollouts(torch.tensor([first, second], dtype=torch.float64)), scale_rewards="batch")
    assert found.flatten().tolist() == pytest.approx(expected, abs=1e-9)


def test_scale_rewards_batch_leaves_equal_rewards_at_exactly_0() -> None:
    found = base_advantages(torch.tensor([[0.1, 0.1, 0.1], [0.0, 1.0, 2.0]]), "batch")
    assert found[0].eq(0).all()
    assert found[1, 2] > 0


@pytest.mark.parametrize("scale", ["groups", False, "std"])
def test_an_unknown_scale_rewards_is_an_error_with_the_valid_ones(scale: Any) -> None:
    with pytest.raises(ValueError, match=r"scale_rewards.*group.*batch.*none"):
        advantages("grpo", rollouts_of(0, 2, 4), scale_rewards=scale)


# --- what every method keeps ----------------------------------------------------------------------------------------


@every_method
@for_all(seed=seeds, size=sizes, alpha=st.sampled_from([None, 0.0, 0.3, 1.0, 3.0]))
def test_weights_lie_within_their_range(method: str, seed: int, size: int, alpha: float | None) -> None:
    low, high = weight_range(method, alpha, size)
    row = METHODS[method]
    per_token = row.granularity == "token" and row.factors
    for dtype in (torch.float32, torch.float64):
        found = weights(method, rollouts_of(seed, 3, size, dtype), alpha=alpha, seed=seed)
        assert found.shape == ((3, size, TOKENS) if per_token else (3, size))
        assert found.dtype == dtype
        assert found.isfinite().all()
        assert low - 1e-6 <= found.min() <= found.max() <= high + 1e-6
        if row.granularity == "group" or not row.factors:
            assert found.eq(found[:, :1]).all()


@pytest.mark.parametrize("method", [m for m in METHODS if all(isinstance(f, GroupFactor) for f in METHODS[m].factors)])
@for_all(seed=seeds, size=sizes)
def test_without_alpha_group_weights_leave_the_methods_own_base_bit_for_bit(method: str, seed: int, size: int) -> None:
    base = {"dr_grpo": "dr_grpo", "seed_grpo": "dr_grpo"}.get(method, "grpo")
    for dtype in (torch.float32, torch.float64):
        rollouts = rollouts_of(seed, 2, size, dtype)
        assert weights(method, rollouts, alpha=0.0).eq(1).all()
        if METHODS[method].reward is None:
            assert torch.equal(advantages(method, rollouts, alpha=0.0), advantages(base, rollouts))


@pytest.mark.parametrize("other", ["egpo", "cw_grpo", "empo", "r2vpo", "dapo"])
def test_without_alpha_a_product_is_its_other_factor_bit_for_bit(other: str) -> None:
    rollouts = rollouts_of(3, 4, 5)
    product = advantages(f"gcpo_bot*{other}", rollouts, alpha=0.0)
    assert torch.equal(product, advantages(other, rollouts))


@pytest.mark.parametrize("method", [name for name in METHODS if name not in WITH_ALPHA])
def test_a_method_without_alpha_does_not_read_it(method: str) -> None:
    rollouts = rollouts_of(0, 2, 4)
    assert_equal(outcome(method, rollouts, alpha=5.0), outcome(method, rollouts))


@every_method
@for_all(seed=seeds, size=st.integers(2, 8))
def test_the_order_of_the_responses_does_not_matter(method: str, seed: int, size: int) -> None:
    features, options = features_of(seed, 3, size, shortest=0), ALL_CANDIDATES.get(method, {})
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    before = outcome(method, Rollouts(**features), **options)
    after = outcome(method, Rollouts(**responses(features, order)), **options)
    torch.testing.assert_close(after, {name: value[:, order] for name, value in before.items()}, atol=1e-6, rtol=1e-6)


@every_method
@for_all(seed=seeds, size=st.integers(2, 8))
def test_the_names_of_the_clusters_do_not_matter(method: str, seed: int, size: int) -> None:
    features = features_of(seed, 3, size)
    renamed = features | {"clusters": 7 - 3 * features["clusters"]}
    torch.testing.assert_close(outcome(method, Rollouts(**renamed)), outcome(method, Rollouts(**features)))


@pytest.mark.parametrize("method", ONE_GROUP)
@for_all(seed=seeds)
def test_a_group_does_not_depend_on_its_batch(method: str, seed: int) -> None:
    features = features_of(seed, 4, 5)
    alone = outcome(method, Rollouts(**{name: value[2:3] for name, value in features.items()}))
    together = {name: value[2:3] for name, value in outcome(method, Rollouts(**features)).items()}
    torch.testing.assert_close(alone, together, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@every_method
def test_devices_and_precisions_agree(method: str, device: str) -> None:
    features = features_of(1, 3, 6)

    def cast(x: Tensor) -> Tensor:
        return x.to(device, torch.float32) if x.is_floating_point() else x.to(device)

    exact = outcome(method, Rollouts(**features))
    single = outcome(method, Rollouts(**{name: cast(value) for name, value in features.items()}))
    assert {value.device.type for value in single.values()} == {device}
    assert {value.dtype for value in single.values()} == {torch.float32}
    back = {name: value.cpu().double() for name, value in single.items()}
    torch.testing.assert_close(back, {name: value.double() for name, value in exact.items()}, atol=2e-5, rtol=2e-5)


@every_method
@for_all(seed=seeds)
def test_equalize_mean_gives_a_mean_of_1_over_what_is_trained_on(method: str, seed: int) -> None:
    features = features_of(seed, 3, 4)
    features["rewards"][0, 0] = NAN
    rollouts = Rollouts(**features)
    own, found = (weights(method, rollouts, alpha=0.9, seed=seed, equalize_mean=e) for e in (False, True))
    counted = rollouts.scorable if own.ndim == 2 else rollouts.scorable.unsqueeze(-1) & rollouts.mask
    assert found[counted].mean().item() == pytest.approx(1)
    torch.testing.assert_close(found * own[counted].mean(), own)  # methods keep where they push
    base = advantages(method, rollouts, alpha=0.9, seed=seed)
    equal = advantages(method, rollouts, alpha=0.9, seed=seed, equalize_mean=True)
    torch.testing.assert_close(equal * own[counted].mean(), base)


@for_all(seed=seeds, size=st.integers(2, 8))
def test_cw_grpo_has_mean_1_over_the_tokens_of_each_group(seed: int, size: int) -> None:
    features = features_of(seed, 3, size, shortest=0)
    features["mask"][:, 0] = True
    found = weights("cw_grpo", Rollouts(**features))
    means = [found[g][features["mask"][g]].mean().item() for g in range(3)]
    assert means == pytest.approx([1, 1, 1])


@for_all(seed=seeds, size=st.integers(1, 8))
def test_egpo_eq9_c5_has_mean_1_over_each_group(seed: int, size: int) -> None:
    features = features_of(seed, 3, size)
    features["entropies"][:, 0] = features["logps"][:, 0] = 0.0  # a certain response
    found = weights("egpo_c5", Rollouts(**features))
    assert found.mean(1).tolist() == pytest.approx([1, 1, 1])


@for_all(seed=seeds, size=sizes)
def test_edge_grpo_is_not_scale_preserving_its_mean_is_at_least_1(seed: int, size: int) -> None:
    """mean_i(H-bar / H_i) is the arithmetic over the harmonic mean."""
    assert weights("edge_grpo", rollouts_of(seed, 3, size)).mean(1).min() >= 1 - 1e-12


@pytest.mark.parametrize("method", ENTROPY)
@pytest.mark.parametrize("entropy", [0.02, 1.0, 3.0])
def test_equal_entropies_give_weight_1(method: str, entropy: float) -> None:
    features = features_of(0, 3, 5)
    features |= {"logps": torch.full_like(features["logps"], -entropy)}
    features |= {"entropies": torch.full_like(features["logps"], entropy)}
    found = weights(method, Rollouts(**features))
    torch.testing.assert_close(found, torch.ones_like(found), atol=1.01e-5 / entropy, rtol=0)  # epsilon's shift


@for_all(seed=seeds, size=st.integers(2, 8))
def test_egpo_eq8_right_responses_are_never_damped_and_wrong_ones_never_boosted(seed: int, size: int) -> None:
    rollouts = rollouts_of(seed, 3, size)
    right = rollouts.rewards > 1
    for method in ("egpo", "egpo_c2", "egpo_c4", "egpo_c6"):
        assert weights(method, rollouts)[~right].le(1).all()
    for method in ("egpo", "egpo_c3", "egpo_c4", "egpo_c6"):
        assert weights(method, rollouts)[right].ge(1).all()


@for_all(half=st.integers(1, 8), data=st.data())
def test_q_hawkeye_is_rd_with_the_other_sign_for_binary_rewards_and_even_g(half: int, data: st.DataObject) -> None:
    rewards = data.draw(st.lists(st.sampled_from([0.0, 2.0]), min_size=2 * half, max_size=2 * half))
    rollouts = Rollouts(torch.tensor([rewards], dtype=torch.float64))
    columns = modulate(METHODS["qhawkeye"], rollouts).columns
    assert columns["reward_variance"].item() == pytest.approx(reward_dispersion(rollouts.rewards).item(), abs=1e-12)
    p = statistics.fmean(rewards) / 2
    assert columns["w_variance"].item() == pytest.approx(1 - 0.2 * 4 * p * (1 - p), abs=1e-12)


# --- edge cases -----------------------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_single_response_has_weight_1_and_advantage_0(method: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        rollouts = rollouts_of(seed, 3, 1, dtype)
        assert weights(method, rollouts).eq(1).all()
        assert advantages(method, rollouts).eq(0).all()


# What makes a rule for rewards give all of a group the same.
ALIKE = {
    "empo": {"clusters": 0, "answered": True},
    "care": {"ref_logps": -0.7, "answer_mask": True},
    "care_agreement": {"embeddings": 0.3},
}


def alike(method: str, features: dict[str, Tensor]) -> dict[str, Tensor]:
    same = {name: torch.full_like(features[name], value) for name, value in ALIKE.get(method, {}).items()}
    return features | same


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_an_advantage_of_exactly_0(method: str, dtype: torch.dtype) -> None:
    for value, size in itertools.product((0.1, 0.7, 1 / 3, 1e-8, 1e6, -0.3), (2, 3, 7, 16)):
        features = alike(method, features_of(size, 2, size, dtype))
        rewards = torch.full((2, size), value, dtype=dtype)
        features |= {"rewards": rewards, "correctness": torch.ones_like(rewards)}  # a wrong group is EGPO's own
        found = advantages(method, Rollouts(**features))
        assert found.eq(0).all(), (value, size, found)


@every_method
def test_rewards_that_are_equal_where_they_exist_give_exactly_0(method: str) -> None:
    features = alike(method, features_of(3, 2, 4))
    features["rewards"] = torch.tensor([[1.7, NAN, 1.7, 1.7], [1.1, NAN, NAN, NAN]], dtype=torch.float64)
    assert advantages(method, Rollouts(**features)).eq(0).all()


@every_method
def test_only_reinforcement_changes_equal_rewards_that_are_wrong(method: str) -> None:
    features = alike(method, features_of(3, 2, 4))
    features["rewards"] = torch.full((2, 4), 0.3, dtype=torch.float64)
    rollouts = Rollouts(**features)
    expected = -weights(method, rollouts) if method in EGPOS else torch.zeros(2, 4, dtype=torch.float64)
    found = advantages(method, rollouts)
    torch.testing.assert_close(found, expected.view(2, 4, 1).expand(found.shape) if found.ndim == 3 else expected)


def test_rules_for_rewards_tell_responses_of_equal_rewards_apart() -> None:
    """EMPO reads no reward at all, and both CAREs add to it: that they do is their point."""
    features = features_of(3, 2, 4)
    features["rewards"] = torch.full((2, 4), 2.0, dtype=torch.float64)
    for method in ALIKE:
        assert advantages(method, Rollouts(**features)).ne(0).any(), method


@every_method
@for_all(seed=seeds, size=st.integers(2, 6), fill=st.sampled_from([NAN, INF, -INF, 1e30]))
def test_what_an_unscorable_response_says_does_not_matter(method: str, seed: int, size: int, fill: float) -> None:
    features = features_of(seed, 2, size, shortest=0)
    features["correctness"] = features["rewards"] / 2
    gone = torch.zeros(2, size, dtype=torch.bool)
    gone[0, seed % size] = gone[1, seed % 2] = True
    features["rewards"][gone] = NAN
    expected = outcome(method, Rollouts(**features))
    assert expected["advantages"][gone].eq(0).all()
    for name, value in features.items():
        if name != "rewards":
            value[gone] = fill if value.is_floating_point() else value[~gone][0] if name == "clusters" else ~value[gone]
    features["nli"].transpose(1, 2)[gone] = fill
    assert_equal(outcome(method, Rollouts(**features)), expected)
    features["correctness"][gone] = 1.0
    assert_equal(outcome(method, Rollouts(**features)), expected)


@every_method
@for_all(seed=seeds, size=st.integers(3, 8))
def test_an_unscorable_response_enters_no_statistic(method: str, seed: int, size: int) -> None:
    features, row = features_of(seed, 2, size, shortest=0), METHODS[method]
    kept = torch.arange(size) != seed % size
    smaller = Rollouts(**responses(features, kept))
    features["rewards"][:, ~kept] = NAN
    broken = Rollouts(**features)
    # alpha is divided by log G, and G stays the size of the group.
    alpha = 0.6 if method == "qhawkeye" else 0.6 * math.log(size) / math.log(size - 1)
    options = ALL_CANDIDATES.get(method, {})
    found = outcome(method, broken, alpha=alpha, **options)
    expected = outcome(method, smaller, alpha=0.6, **options)
    for name, value in found.items():
        torch.testing.assert_close(value[:, kept], expected[name], atol=1e-6, rtol=1e-6)
    assert found["advantages"][:, ~kept].eq(0).all()
    if row.granularity != "group":
        assert found["weights"][:, ~kept].eq(1).all()


@every_method
def test_a_group_without_rewards_has_weight_1_and_advantage_0(method: str) -> None:
    features = features_of(5, 3, 4) | {"rewards": torch.full((3, 4), NAN, dtype=torch.float64)}
    for name, value in outcome(method, Rollouts(**features)).items():
        assert value.eq(1 if name == "weights" else 0).all(), name


@pytest.mark.parametrize("method", EGPOS)
def test_an_unscorable_response_is_never_wrong(method: str) -> None:
    features = features_of(5, 3, 4)
    features["rewards"] = torch.tensor([[2, 2, NAN, 2], [NAN] * 4, [0, NAN, 0, 1]], dtype=torch.float64)
    found = advantages(method, Rollouts(**features))
    assert found[0].eq(0).all()  # not a mixed group
    assert found[1].eq(0).all()  # not an entirely wrong one
    assert found[2, 1] == 0
    assert found[2, [0, 2, 3]].lt(0).all()


class Texts:
    """Rollouts from texts, by models that count: an embedding is (1, length), and nothing entails anything else."""

    def __init__(self) -> None:
        self.embedded: list[str] = []
        self.asked = 0

    def _embed(self, texts: list[str]) -> Tensor:
        self.embedded += texts
        return torch.tensor([[1.0, len(text)] for text in texts])

    def _classify(self, pairs: list[tuple[str, str]]) -> Tensor:
        self.asked += len(pairs)
        return torch.tensor([[0.0, 0.0, 1.0]] * len(pairs)).view(-1, 3)

    def rollouts(self, rewards: list[list[float]], groups: list[list[str]], **features: Any) -> Rollouts:
        return from_texts(
            torch.tensor(rewards, dtype=torch.float64),
            groups,
            extract=lambda text: text.split("Answer: ")[1] if "Answer: " in text else None,
            full_completion=False,
            embedder=Embedder(self._embed),
            entailment=Entailment(self._classify),
            threshold=0.35,
            reward_range=(0.0, 2.0),
            **features,
        )


def tokens_of(features: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: features[name] for name in (*TOKEN_FEATURES, "mask")}


@every_method
def test_identical_strings_are_one_cluster_without_a_model_call(method: str) -> None:
    texts = Texts()
    rewards = [[2.0, 0.0, 0.0, 0.0]] * 2
    tokens = tokens_of(features_of(2, 2, 4))
    rollouts = texts.rollouts(rewards, [["so: Answer: six"] * 4] * 2, **tokens)
    found = outcome(method, rollouts)
    assert texts.asked == 0
    assert texts.embedded == (["six"] if "embeddings" in METHODS[method].reads else [])
    rd = 1 + 0.6 / math.log(4) * 0.75  # three quarters of the widest spread
    kle = 1 - 0.6 / math.log(4) * kernel_entropy_of_identical(4)
    same = {"rd_only": rd, "gcpo_cd": rd, "gcpo_bot": rd, "gcpo_shuffled": rd, "kle": kle, "qhawkeye": 1 - 0.2 * 0.75}
    if METHODS[method].granularity == "group":
        assert found["weights"].flatten().tolist() == pytest.approx([same.get(method, 1)] * 8, abs=1e-6)
    if method == "empo":
        assert found["advantages"].eq(0).all()


def kernel_entropy_of_identical(size: int) -> float:
    """All edges weigh 2: the heat kernel at t = 0.3 has the eigenvalues 1 and, size - 1 times, exp(-0.3 * 2 size)."""
    small = math.exp(-0.6 * size)
    shares = [1 / (1 + (size - 1) * small)] + [small / (1 + (size - 1) * small)] * (size - 1)
    return -sum(p * math.log(p) for p in shares)


@pytest.mark.parametrize("method", ["se", "seed_grpo", "kle", "cd_only", "bot_only", "gcpo_bot", "empo"])
def test_a_missing_answer_is_a_cluster_of_its_own(method: str) -> None:
    """Answers six, six, and twice the same words without one: shares of 1/2, 1/4, 1/4."""
    texts = Texts()
    tokens = tokens_of(features_of(2, 1, 4)) | {"logps": torch.full((1, 4, TOKENS), -0.3, dtype=torch.float64)}
    group = ["Answer: six", "Answer: six", "no idea", "no idea"]
    rollouts = texts.rollouts([[2.0, 2.0, 0.0, 0.0]], [group], **tokens)
    entropy = 0.5 * math.log(2) + 0.5 * math.log(4)
    if method == "empo":
        reward = METHODS["empo"].reward
        assert reward is not None
        assert reward(rollouts).tolist() == [[0.5, 0.5, 0, 0]]
        return
    a = 0.6 / math.log(4)
    # "six" and the marker are at an angle whose cosine is that of (1, 3) and (1, 9).
    marker = len(NO_ANSWER)
    cosine = (1 + 3 * marker) / math.sqrt((1 + 9) * (1 + marker**2))
    bot = (1 - math.sqrt((1 + cosine) / 2)) / 2  # half of the mass on either direction
    boost = 1 + a * 1
    expected = {
        "se": 1 - a * entropy,
        "seed_grpo": 1 / (1 + 0.0417 / math.log(4) * entropy),
        "kle": 1 - a * entropy_of_pair_and_singles(),
        "cd_only": 1 - a * ((1 - cosine) / 2) ** 2,  # of 16 pairs, 8 are apart
        "bot_only": 1 - a * bot**2,
        "gcpo_bot": (1 - a * bot**2) * boost,
    }
    assert weights(method, rollouts)[0].tolist() == pytest.approx([expected[method]] * 4, abs=1e-6)


def entropy_of_pair_and_singles() -> float:
    """Two nodes with an edge of 2, kernel eigenvalues 1 and exp(-1.2) on a diagonal of their mean; two single nodes."""
    c = math.exp(-0.3 * 4)
    shares = [1 / (4 * (1 + c) / 2), c / (4 * (1 + c) / 2), 1 / 4, 1 / 4]
    return -sum(p * math.log(p) for p in shares)


@pytest.mark.parametrize("method", READ_TOKENS)
@pytest.mark.parametrize("fill", [NAN, INF, -INF])
@for_all(seed=seeds)
def test_what_stands_where_no_token_is_does_not_matter(method: str, fill: float, seed: int) -> None:
    features = features_of(seed, 2, 4, shortest=0)
    expected = outcome(method, Rollouts(**features))
    outside = ~features["mask"]
    for name in TOKEN_FEATURES:
        features[name][outside] = True if name == "answer_mask" else fill
    for kind in (torch.bool, torch.int64, torch.float64):
        changed = features | {"mask": features["mask"].to(kind), "answer_mask": features["answer_mask"].to(kind)}
        assert_equal(outcome(method, Rollouts(**changed)), expected)


@pytest.mark.parametrize("method", READ_TOKENS)
def test_an_empty_or_masked_completion_has_weight_1(method: str) -> None:
    """A truncated one that TRL masks looks the same."""
    features = features_of(0, 2, 4)
    features["mask"][0, 1] = features["mask"][1] = False
    found = outcome(method, Rollouts(**features))
    assert found["weights"].isfinite().all()
    assert found["advantages"].isfinite().all()
    if METHODS[method].granularity != "group":
        assert found["weights"][0, 1].eq(1).all()
    assert found["weights"][1].eq(1).all()
    assert "paid" not in found or found["paid"][~features["mask"]].eq(0).all()


@pytest.mark.parametrize("method", ["seed_grpo", "r2vpo", *ENTROPY])
@for_all(seed=seeds, size=st.integers(3, 8))
def test_an_empty_completion_enters_no_mean_over_tokens(method: str, seed: int, size: int) -> None:
    features, row = features_of(seed, 2, size), METHODS[method]
    kept = torch.arange(size) != seed % size
    features["mask"][:, ~kept] = False
    features["rewards"][:, ~kept] = 0.0  # a wrong one: a group is entirely wrong with it or without
    found = modulate(row, Rollouts(**features))
    expected = modulate(row, Rollouts(**responses(features, kept)))
    if row.granularity == "group":  # whose strength is alpha / log G
        measure = row.factors[0].measure
        torch.testing.assert_close(found.columns[measure], expected.columns[measure])
    else:
        torch.testing.assert_close(found.weight[:, kept], expected.weight)


@pytest.mark.parametrize("method", READ_TOKENS)
@pytest.mark.parametrize("length", [0, 3])
def test_a_batch_without_any_token_is_not_modulated(method: str, length: int) -> None:
    features = features_of(1, 2, 4)
    features |= {name: features[name][..., :length] for name in TOKEN_FEATURES}
    features["mask"] = torch.zeros(2, 4, length, dtype=torch.bool)
    rollouts = Rollouts(**features, max_completion_length=8)
    found = outcome(method, rollouts)
    assert found["weights"].eq(1).all()
    assert "paid" not in found or found["paid"].eq(0).all()
    if method not in EGPOS and length:
        base = advantages("dr_grpo" if method == "seed_grpo" else "grpo", rollouts)
        base = base.unsqueeze(-1) if found["advantages"].ndim == 3 else base
        torch.testing.assert_close(found["advantages"], base.expand(found["advantages"].shape))


@pytest.mark.parametrize("method", ENTROPY)
def test_a_group_of_certain_responses_has_weight_1(method: str) -> None:
    features = features_of(0, 2, 4)
    features["logps"][0] = features["entropies"][0] = 0.0
    assert weights(method, Rollouts(**features))[0].eq(1).all()


@pytest.mark.parametrize("method", ENTROPY)
def test_a_certain_response_has_ratio_1(method: str) -> None:
    """H = 0 belongs to the mean, and its own ratio, which would be infinite, is 1; EGPO's C5 and C6 divide that 1."""
    features = features_of(0, 1, 4)
    features["logps"] = -torch.tensor([0, 2, 2, 4]).double().view(1, 4, 1).expand(1, 4, TOKENS)
    features["entropies"] = -features["logps"]
    features["rewards"] = torch.tensor([[0.0, 2.0, 0.0, 0.0]], dtype=torch.float64)
    rollouts = Rollouts(**features)  # mean H is 2: ratios 1, 1, 1, 1/2
    expected = {
        "egspo": [1, 1, 1, 1],  # H / mean H is 1, 1, 1, 2
        "edge_grpo": [1, 1, 1, 0.5],
        "egpo_c5": [1 / 0.95, 1 / 0.95, 1 / 0.95, 0.8 / 0.95],
        "egpo_c6": [1, 1 / 0.875, 1, 0.8],
    }.get(method, [1, 1, 1, 0.8])
    assert weights(method, rollouts)[0].tolist() == pytest.approx(expected, abs=2e-5)


def test_impossible_tokens_of_one_response_leave_the_others_alone() -> None:
    """A log-likelihood of log 0: no share of the semantic entropy, and no place in a mean of entropies."""
    features = features_of(0, 1, 4)
    kept = torch.arange(4) != 2
    without = Rollouts(**responses(features, kept))
    features["mask"][0, 2] = True
    features["logps"][0, 2, 0] = -INF
    features["entropies"][0, 2, 0] = INF
    rollouts = Rollouts(**features)
    found, expected = (modulate(METHODS["seed_grpo"], r).columns["se"] for r in (rollouts, without))
    torch.testing.assert_close(found, expected)
    for method in ("egspo", "edge_grpo", "egpo_c1"):
        found, expected = weights(method, rollouts), weights(method, without)
        torch.testing.assert_close(found[:, kept], expected)
        assert found[0, 2] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_negative_eigenvalues_and_log_0_of_the_kernel_are_clipped(dtype: torch.dtype) -> None:
    """Graphs of many equal answers have eigenvalues of 0, which rounding puts on either side."""
    for size in (2, 8, 16):
        identical = torch.tensor([1.0, 0.0, 0.0], dtype=dtype).expand(20, size, size, 3)
        rollouts = Rollouts(torch.rand(20, size, dtype=dtype), nli=identical)
        columns = modulate(METHODS["kle"], rollouts).columns
        assert columns["kle"].ge(0).all()
        assert columns["kle"].tolist() == pytest.approx([kernel_entropy_of_identical(size)] * 20, abs=1e-5)


BREAKING: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "seed_grpo": ("logps", lambda x: x[1, 2].fill_(NAN)),
    "kle": ("nli", lambda x: x[1, 2, 0].fill_(NAN)),
    "cd_only": ("embeddings", lambda x: x[1, 2].zero_()),  # no direction
    "bot_only": ("embeddings", lambda x: x[1, 2].zero_()),
    "gcpo_cd": ("embeddings", lambda x: x[1, 2].fill_(NAN)),
    "gcpo_bot": ("embeddings", lambda x: x[1, 2].zero_()),
    "rd_only": ("rewards", lambda x: x[1, 2].fill_(INF)),
    "qhawkeye": ("rewards", lambda x: x[1, 2].fill_(INF)),
    "edge_grpo": ("entropies", lambda x: x[1, 2].fill_(1e-320)),  # mean H / H overflows
    "r2vpo": ("ratios", lambda x: x[1, 2].fill_(NAN)),
    "cw_grpo": ("logps", lambda x: x[1, 2].fill_(NAN)),
}


@pytest.mark.parametrize("method", BREAKING)
def test_a_weight_that_is_not_finite_is_an_error_that_names_method_and_group(method: str) -> None:
    feature, spoil = BREAKING[method]
    features = features_of(7, 3, 4)
    spoil(features[feature])
    for function in (weights, advantages):
        with pytest.raises(ValueError, match=rf"{method}: the weight of group 1 is not finite.*{feature}"):
            function(method, Rollouts(**features))


def test_a_shuffled_weight_that_is_not_finite_names_the_group_whose_features_are_broken() -> None:
    features = features_of(7, 3, 4)
    features["embeddings"][1, 2] = 0.0
    for seed in range(4):
        with pytest.raises(ValueError, match="gcpo_shuffled: the weight of group 1 is not finite"):
            weights("gcpo_shuffled", Rollouts(**features), seed=seed)


@pytest.mark.parametrize("method", [m for m in ENTROPY if m != "edge_grpo"])
def test_a_response_whose_entropy_is_not_a_number_has_weight_1(method: str) -> None:
    features = features_of(7, 3, 4)
    kept = torch.arange(4) != 2
    expected = weights(method, Rollouts(**responses(features, kept)))
    features["logps"][:, 2] = features["entropies"][:, 2] = NAN
    found = weights(method, Rollouts(**features))
    assert found[:, 2].eq(1).all()
    torch.testing.assert_close(found[:, kept], expected)


# --- the table of methods -------------------------------------------------------------------------------------------

# Where each acts and the finest thing that it tells apart.
TABLE = {
    "grpo dr_grpo dapo": ("base", "response"),
    "se seed_grpo kle cd_only bot_only rd_only gcpo_cd gcpo_bot gcpo_shuffled qhawkeye": ("advantage", "group"),
    "empo care care_agreement": ("reward", "response"),
    "egspo edge_grpo egpo egpo_c1 egpo_c2 egpo_c3 egpo_c4 egpo_c5 egpo_c6": ("advantage", "response"),
    "r2vpo": ("loss", "response"),
    "cw_grpo": ("advantage", "token"),
    "clip_cov kl_cov": ("loss", "token"),
}


def test_where_each_method_acts_and_on_what() -> None:
    expected = {name: place for names, place in TABLE.items() for name in names.split()}
    assert {name: (row.acts, row.granularity) for name, row in METHODS.items()} == expected


def test_bases_are_those_of_the_papers() -> None:
    assert {name: row.base for name, row in METHODS.items() if row.base != "grpo"} == {
        "dr_grpo": "dr_grpo",
        "seed_grpo": "dr_grpo",
        "dapo": "dapo",
    }
    assert BASES == {
        "grpo": {"loss_type": "grpo", "scale_rewards": "group"},
        "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
        "dapo": {"loss_type": "dapo", "scale_rewards": "group", "epsilon_high": 0.28},
    }
    # An average of 0.995 of the reference and 0.005 of the policy, every 10 steps.
    assert METHODS["care"].trl == pytest.approx(
        {"sync_ref_model": True, "ref_model_sync_steps": 10, "ref_model_mixup_alpha": 1 - 0.995}
    )


def those(flag: Callable[[Any], bool]) -> list[str]:
    return [name for name, row in METHODS.items() if flag(row)]


def test_what_methods_need_to_be_told() -> None:
    assert those(lambda row: row.judges) == ["care", "care_agreement", *EGPOS]
    assert those(lambda row: row.in_loss) == ["r2vpo", "clip_cov", "kl_cov"]
    assert those(lambda row: row.permuted) == ["gcpo_shuffled"]
    assert those(lambda row: row.drops_equal) == ["dapo"]
    entailment = ["se", "kle", "bot_only", "gcpo_bot", "gcpo_shuffled"]
    assert those(lambda row: row.entails(mathematics=True)) == entailment
    assert those(lambda row: row.entails(mathematics=False)) == [*entailment, "empo"]


@pytest.mark.parametrize(
    ("method", "direction"),
    [
        ("grpo", ""),
        ("se", "damps groups whose answers differ"),
        ("seed_grpo", "damps groups whose answers differ"),
        ("rd_only", "boosts groups whose rewards differ"),
        ("qhawkeye", "damps groups whose rewards differ"),
        ("gcpo_bot", "damps groups whose answers differ; boosts groups whose rewards differ"),
        ("edge_grpo", "boosts confident responses"),
        ("egpo", "boosts confident responses"),
        ("egspo", "damps confident responses"),
        ("gcpo_shuffled", "moves weights to other groups"),
    ],
)
def test_directions(method: str, direction: str) -> None:
    assert METHODS[method].direction == direction


@every_method
def test_a_method_reads_what_its_row_says_and_nothing_else(method: str) -> None:
    read: list[str] = []

    def lazily(name: str, value: Tensor) -> Callable[[], Tensor]:
        return lambda: (read.append(name), value)[1]

    features = features_of(2, 2, 4)
    rewards = features.pop("rewards")
    outcome(method, Rollouts(rewards, **{name: lazily(name, value) for name, value in features.items()}))
    assert sorted(read) == sorted(METHODS[method].reads)  # each of them once


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.reads])
def test_a_feature_that_a_method_misses_is_named(method: str) -> None:
    for missing in METHODS[method].reads:
        features: dict[str, Any] = features_of(2, 2, 4) | {missing: None}
        with pytest.raises(MissingFeatureError, match=f"have no '{missing}'"):
            outcome(method, Rollouts(**features))


def assert_columns(factors: Iterable[Factor], rollouts: Rollouts, columns: dict[str, Tensor]) -> None:
    groups, size = rollouts.rewards.shape
    shapes = {"group": (groups,), "response": (groups, size), "token": (groups, size, TOKENS)}
    expected = {name: shapes[f.granularity] for f in factors for name in (f.measure, f.weight)}
    assert {name: tuple(value.shape) for name, value in columns.items()} == expected
    assert len(expected) == 2 * len(list(factors))


@pytest.mark.parametrize("method", MODULATED)
def test_factors_are_logged_under_their_names(method: str) -> None:
    rollouts = rollouts_of(4, 3, 5)
    found = modulate(METHODS[method], rollouts)
    assert_columns(METHODS[method].factors, rollouts, found.columns)
    for factor in METHODS[method].factors:
        if isinstance(factor, GroupFactor):
            alpha = {"seed_grpo": 0.0417, "qhawkeye": 0.2}.get(method, 0.6)
            strength = alpha if method == "qhawkeye" else alpha / math.log(5)
            expected = FORMS[factor.form](found.columns[factor.measure], strength)
            torch.testing.assert_close(found.columns[factor.weight], expected)
        elif len(METHODS[method].factors) == 1:
            torch.testing.assert_close(found.weight, found.columns[factor.weight])


@pytest.mark.parametrize(("name", "nearest"), [("gcpo_bt", "gcpo_bot"), ("GRPO", None), ("rd", "rd_only")])
def test_an_unknown_method_is_an_error_with_the_nearest_name(name: str, nearest: str | None) -> None:
    with pytest.raises(ValueError, match=f"Unknown method '{name}'.*Valid names: .*gcpo_cd") as raised:
        get_method(name)
    assert (f"Did you mean {nearest!r}?" in str(raised.value)) == (nearest is not None)


# --- the shuffled control -------------------------------------------------------------------------------------------


@for_all(seed=seeds, groups=st.integers(2, 12))
def test_shuffled_weights_are_gcpo_bots_each_at_another_group(seed: int, groups: int) -> None:
    rollouts = rollouts_of(seed, groups, 6)
    own, shuffled = (weights(method, rollouts, seed=seed)[:, 0] for method in ("gcpo_bot", "gcpo_shuffled"))
    torch.testing.assert_close(shuffled.sort().values, own.sort().values, atol=0, rtol=0)
    order = permutation(groups, seed)
    assert torch.equal(shuffled, own[order])
    assert sorted(order.tolist()) == list(range(groups))
    assert not order.eq(torch.arange(groups)).any()


def test_the_permutation_is_decided_by_its_seed() -> None:
    assert all(torch.equal(permutation(8, seed), permutation(8, seed)) for seed in range(5))
    drawn = {tuple(permutation(8, seed).tolist()) for seed in range(50)}
    assert len(drawn) > 40
    assert {order[0] for order in drawn} == set(range(1, 8))  # any other group may lend its weight


def test_the_permutation_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    permutation(6, 0)
    assert torch.equal(torch.rand(2), expected)


def test_one_group_cannot_be_shuffled() -> None:
    with pytest.raises(ValueError, match=r"at least 2 groups, got 1: put more prompts into the generation batch"):
        weights("gcpo_shuffled", rollouts_of(0, 1, 4))


# --- products -------------------------------------------------------------------------------------------------------


def test_a_product_is_the_product_of_weights_on_the_base_of_egpo() -> None:
    features = features_of(4, 3, 5)
    features["rewards"][1] = torch.tensor([0.0, 1.0, 0.5, 0.0, 0.0])  # entirely wrong
    rollouts = Rollouts(**features)
    geometry, confidence = weights("bot_only", rollouts), weights("egpo", rollouts)
    assert geometry.std() > 1e-3
    assert confidence.std() > 1e-2
    product = weights("bot_only*egpo", rollouts)
    torch.testing.assert_close(product, geometry * confidence)
    base = torch.tensor([grpo_by_hand(row) for row in rollouts.rewards.tolist()], dtype=torch.float64)
    base[1] = -1.0
    torch.testing.assert_close(advantages("bot_only*egpo", rollouts), base * geometry * confidence)


def test_a_product_takes_rewards_base_and_penalty_of_the_parts_that_have_them() -> None:
    rollouts = rollouts_of(4, 3, 5)
    found = advantages("rd_only*empo*seed_grpo", rollouts)
    stage = METHODS["empo"].reward
    assert stage is not None
    base = base_advantages(stage(rollouts), "none")
    # Weights read the task's rewards, whatever EMPO makes of them.
    torch.testing.assert_close(found, base * weights("rd_only", rollouts) * weights("seed_grpo", rollouts))
    row = get_method("care*kl_cov*se")
    assert (row.reward, row.penalty) == (METHODS["care"].reward, METHODS["kl_cov"].penalty)
    assert row.trl == METHODS["care"].trl
    assert get_method("dapo*se").drops_equal
    assert get_method("grpo*se").base == "grpo"
    assert get_method("seed_grpo*dr_grpo").base == "dr_grpo"


@pytest.mark.parametrize(
    ("name", "acts", "granularity"),
    [
        ("se*rd_only", "advantage", "group"),
        ("se*egpo", "advantage", "response"),
        ("empo*se", "advantage", "group"),
        ("empo*grpo", "reward", "response"),
        ("se*cw_grpo*egpo", "advantage", "token"),
        ("egpo*r2vpo", "loss", "response"),
        ("se*kl_cov", "loss", "token"),
        ("dapo*rd_only", "advantage", "group"),
    ],
)
def test_a_product_acts_where_its_last_part_acts_and_is_as_fine_as_its_finest(
    name: str, acts: str, granularity: str
) -> None:
    row = get_method(name)
    assert (row.acts, row.granularity) == (acts, granularity)
    assert row.reads == frozenset().union(*(METHODS[part].reads for part in name.split("*")))


def test_a_list_of_names_is_the_product_written_out() -> None:
    assert get_method(["bot_only", "egpo"]) == get_method("bot_only*egpo") == get_method(" bot_only * egpo ")
    assert get_method(("egpo",)) is METHODS["egpo"]
    rollouts = rollouts_of(4, 3, 5)
    assert torch.equal(weights(["bot_only", "egpo"], rollouts), weights("bot_only*egpo", rollouts))
    assert weight_range(["bot_only", "egpo"], 0.6, 4) == weight_range("bot_only*egpo", 0.6, 4)


@pytest.mark.parametrize(
    ("product", "renamed"),
    [
        ("cd_only*bot_only", ["u_geo_bot_only", "w_geo_bot_only"]),
        ("bot_only*gcpo_cd", ["u_geo_gcpo_cd", "w_geo_gcpo_cd"]),
        ("se*seed_grpo", ["se_seed_grpo", "w_se_seed_grpo"]),
        ("egspo*edge_grpo*egpo", ["entropy_edge_grpo", "w_entropy_edge_grpo", "entropy_egpo", "w_entropy_egpo"]),
    ],
)
def test_columns_of_one_name_are_kept_apart_in_a_product(product: str, renamed: list[str]) -> None:
    rollouts = rollouts_of(4, 3, 5)
    columns = modulate(get_method(product), rollouts).columns
    assert_columns(get_method(product).factors, rollouts, columns)
    assert set(renamed) <= set(columns)
    for name in product.split("*"):
        for column, values in modulate(METHODS[name], rollouts).columns.items():
            own = f"{column}_{name}"
            torch.testing.assert_close(columns[own if own in renamed else column], values)


def test_measures_of_one_name_are_kept_apart_too() -> None:
    """CW-GRPO's covariance is over the group and Clip-Cov's over the batch; their weights differ in name."""
    rollouts, row = rollouts_of(4, 3, 5), get_method("cw_grpo*clip_cov")
    assert_columns(row.factors, rollouts, modulate(row, rollouts).columns)


@for_all(seed=seeds)
def test_group_response_and_token_weights_are_multiplied_with_one_another(seed: int) -> None:
    rollouts = rollouts_of(seed, 3, 4)
    parts = {name: weights(name, rollouts) for name in ("se", "egpo", "cw_grpo", "r2vpo")}
    coarse = parts["se"] * parts["egpo"] * parts["r2vpo"]
    for order in ("se*egpo*cw_grpo*r2vpo", "cw_grpo*r2vpo*egpo*se"):
        # EGPO's A = -1 leaves no covariance in an entirely wrong group.
        wrong = rollouts.rewards.le(1).all(1)
        token = torch.where(wrong[:, None, None], 1.0, parts["cw_grpo"])
        torch.testing.assert_close(weights(order, rollouts), coarse.unsqueeze(-1) * token)
    assert weights("se*cw_grpo", rollouts_of(seed, 2, 1)).shape == (2, 1, TOKENS)


def test_stages_choose_factors_and_only_the_first_one_reinforces() -> None:
    features = features_of(4, 2, 4)
    features["rewards"][0] = 0.0
    rollouts, row = Rollouts(**features), get_method("se*egpo*r2vpo")
    early = modulate(row, rollouts, stages=("advantage",))
    assert set(early.columns) == {"se", "w_se", "entropy", "w_entropy"}
    torch.testing.assert_close(early.weight, weights("se*egpo", rollouts))
    assert early.base[0].eq(-1).all()
    given_base = torch.full((2, 4), 0.7, dtype=torch.float64)
    late = modulate(row, rollouts, given_base, stages=("loss",))
    assert set(late.columns) == {"ratio_variance", "w_ratio"}
    torch.testing.assert_close(late.weight, weights("r2vpo", rollouts))
    assert torch.equal(late.base, given_base)


@pytest.mark.parametrize(
    "names", ["gcpo_bot*egpo", "se*r2vpo", "seed_grpo*egspo*rd_only", "cw_grpo*clip_cov", "se*cw_grpo", "empo*kle"]
)
def test_the_range_of_a_product_is_the_product_of_ranges(names: str) -> None:
    low = high = 1.0
    for name in names.split("*"):
        lowest, highest = weight_range(name, 0.9, 5)
        low, high = low * lowest, high * highest
    assert weight_range(names, 0.9, 5) == pytest.approx((low, high))
    found = weights(names, rollouts_of(2, 6, 5), alpha=0.9)
    assert low - 1e-6 <= found.min() <= found.max() <= high + 1e-6


@pytest.mark.parametrize(
    ("product", "message"),
    [
        ("empo*se*care", r"empo and care both change rewards.*keep one of them"),
        ("dapo*empo", r"dapo and empo both change rewards"),
        ("grpo*seed_grpo", r"grpo and seed_grpo have different base advantages.*keep one of them"),
        ("dr_grpo*se*dapo", r"dr_grpo and dapo have different base advantages"),
        ("egpo*egpo_c4", r"egpo and egpo_c4 both set the advantage of an entirely wrong group.*keep one of them"),
        ("egpo_c1*se*egpo_c2", r"egpo_c1 and egpo_c2 both set the advantage"),
        ("gcpo_bot*bot_only", r"bot_only has the weight 'w_geo', which another part has already"),
        ("rd_only*gcpo_cd", r"gcpo_cd has the weight 'w_rd'"),
        ("gcpo_bot*gcpo_cd", r"gcpo_cd has the weight 'w_rd'"),
        ("egpo*gcpo_shuffled", r"gcpo_shuffled is a control on its own"),
        ("se*se", r"'se\*se' is not a product of different methods"),
        ("se*rd_only*se", r"is not a product of different methods"),
        ("se*egpoo", r"Unknown method 'egpoo'\. Did you mean 'egpo'\? Valid names: grpo"),
        ("se*", r"Unknown method ''.*Valid names: grpo"),
        ("", r"Unknown method ''.*Valid names: grpo"),
    ],
)
def test_a_product_that_makes_no_sense_is_an_error_that_says_why(product: str, message: str) -> None:
    for name in (product, product.split("*")):
        for use in (get_method, lambda n: weight_range(n, 0.6, 4), lambda n: weights(n, rollouts_of(0, 2, 4))):
            with pytest.raises(ValueError, match=message):
                use(name)


def test_an_empty_list_is_no_product() -> None:
    with pytest.raises(ValueError, match="not a product"):
        get_method([])


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "option", "message"),
    [
        ("se", "clustres", r"se has no option 'clustres'\. Did you mean 'clusters'\? Valid names: form, estimator, cl"),
        ("rd_only", "clusters", r"rd_only has no option 'clusters'\..*Valid names: form\."),
        ("cd_only", "estimator", r"Valid names: form\."),
        ("bot_only", "estimator", r"Valid names: form, clusters\."),
        (
            "egpo",
            "form",
            r"egpo has no option 'form'\..*Valid names: correct, wrong, renorm, all_wrong, scope, epsilon",
        ),
        ("r2vpo", "lambda", r"Did you mean 'lambda_'\? Valid names: lambda_\."),
        ("clip_cov", "shares", r"Did you mean 'share'\? Valid names: share, band, clip\."),
        ("kl_cov", "coeff", r"Valid names: share, coefficient\."),
        ("care", "caps", r"Valid names: coefficient, margin, cap\."),
        ("dapo", "length", r"Valid names: share\."),
        ("grpo", "form", r"grpo has no option 'form'\. It has none\."),
        ("cw_grpo", "sigma", r"cw_grpo has no option 'sigma'\. It has none\."),
        ("se*egpo", "share", r"se\*egpo has no option 'share'.*form, estimator, clusters, correct"),
    ],
)
def test_an_unknown_option_is_an_error_that_names_the_valid_ones(method: str, option: str, message: str) -> None:
    for use in (get_method, lambda m, **o: weights(m, rollouts_of(0, 2, 4), **o)):
        with pytest.raises(ValueError, match=message):
            use(method, **{option: 1})


@pytest.mark.parametrize("method", ["egpo", "egpo_c4"])
def test_dapo_would_drop_what_negative_sample_reinforcement_takes_up(method: str) -> None:
    with pytest.raises(ValueError, match=f"dapo drops the groups without reward variance that {method} reinforces"):
        get_method(f"dapo*{method}")
    assert get_method("dapo*edge_grpo").drops_equal


@pytest.mark.parametrize(
    ("method", "option", "value", "message"),
    [
        ("se", "form", "sigmoid", r"form is 'sigmoid', expected one of linear, square, reciprocal, exponential, focal"),
        ("se", "form", None, r"form is None, expected one of linear"),
        ("se", "estimator", "median", r"estimator is 'median', expected one of counts, rao, mc\."),
        ("se", "clusters", "words", r"clusters is 'words', expected one of nli, exact, math, task\."),
        ("empo", "clusters", "words", r"clusters is 'words', expected one of nli, exact, math, task\."),
        ("egpo", "scope", "prompt", r"scope is 'prompt', expected one of joint, thinking, answer\."),
        ("egpo", "renorm", "both", r"renorm is 'both', expected one of none, before, after\."),
        ("egpo", "all_wrong", "drop", r"all_wrong is 'drop', expected one of none, weighted, locked\."),
        ("egpo", "correct", (2.0, 1.0), r"correct is \(2\.0, 1\.0\), expected \(low, high\) with 0 <= low <= high"),
        ("egpo", "wrong", [-1.0, 1.0], r"wrong is \(-1\.0, 1\.0\), expected \(low, high\)"),
        ("bot_only*egpo", "scope", "prompt", r"scope is 'prompt', expected one of joint"),
        ("dapo", "share", 0.0, r"share is 0\.0"),  # no room for a penalty, and 0/0 at its end
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_valid_ones(
    method: str, option: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        get_method(method, **{option: value})


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if len(row.parts) < 2])
def test_the_options_of_a_row_are_its_constants(method: str) -> None:
    row = METHODS[method]
    own = {o: getattr(part, o) for part in row.parts for o in part.OPTIONS if getattr(part, o) is not None}
    assert get_method(method, **own) == row


def test_options_of_a_product_go_to_the_parts_that_have_them() -> None:
    row = get_method("se*egpo*clip_cov*care", form="reciprocal", scope="answer", share=0.5, margin=0.1, wrong=[0.5, 1])
    se, egpo, clip = row.factors
    assert isinstance(se, GroupFactor)
    assert (se.form, egpo.scope, egpo.wrong, clip.share) == ("reciprocal", "answer", (0.5, 1), 0.5)  # type: ignore
    assert row.reward is not None
    assert row.reward.margin == 0.1  # type: ignore[attr-defined]
    both = get_method("kl_cov*clip_cov", share=0.25)
    assert (both.factors[0].share, both.penalty.share) == (0.25, 0.25)  # type: ignore
    every = get_method("gcpo_bot", form="exponential")
    assert [factor.form for factor in every.factors] == ["exponential"] * 2  # type: ignore[attr-defined]
    assert METHODS["se"].factors[0].form == "linear"  # type: ignore[attr-defined]


def test_a_product_with_options_weighs_as_its_parts_do_with_them() -> None:
    rollouts = rollouts_of(6, 3, 5)
    found = weights("se*egpo", rollouts, estimator="rao", scope="thinking", alpha=1.1)
    expected = weights("se", rollouts, estimator="rao", alpha=1.1) * weights("egpo", rollouts, scope="thinking")
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, weights("se*egpo", rollouts, alpha=1.1))


def test_options_change_what_is_read() -> None:
    assert get_method("se", estimator="rao").reads == {"clusters", "logps", "mask"}
    assert get_method("seed_grpo", estimator="counts").reads == {"clusters"}
    assert get_method("egpo", scope="answer").reads == {"logps", "mask", "answer_mask"}
    assert not get_method("edge_grpo", wrong=(0, INF)).judges
    assert get_method("edge_grpo", wrong=(0, 1.0)).judges
    assert get_method("seed_grpo", clusters="nli").entails(mathematics=True)
    assert not get_method("se", clusters="exact").entails(mathematics=False)
    assert get_method("rd_only", form="linear").direction == "damps groups whose rewards differ"


OPEN = (0.0, INF)
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "se": [{"form": form, "estimator": e} for form in FORMS for e in ("counts", "rao", "mc")],
    "gcpo_bot": [{"form": form} for form in FORMS],
    "qhawkeye": [{"form": form} for form in FORMS],
    "egspo": [{"renorm": r, "correct": c} for r in ("none", "before", "after") for c in ((0.5, 1.0), (0.2, 3.0))],
    "egpo": [{"renorm": r, "correct": c} for r in ("none", "before", "after") for c in ((1.0, 2.0), (0.5, 3.0))],
    "edge_grpo": [{"correct": (0.5, 2.0), "wrong": (0.5, 2.0), "renorm": r} for r in ("none", "before", "after")],
}
UNBOUNDED: dict[str, list[dict[str, Any]]] = {
    "edge_grpo": [{}, {"renorm": "before"}, {"renorm": "after"}, {"correct": (0.5, INF)}],
    "egspo": [{"renorm": r, "correct": OPEN, "wrong": (0.1, INF)} for r in ("none", "before", "after")],
    "egpo": [{"renorm": r, "correct": (1.0, INF)} for r in ("none", "before", "after")],
}


def assert_bounds(method: str, seed: int, size: int, choices: list[dict[str, Any]]) -> None:
    features = features_of(seed, 3, size)
    features["logps"] = features["logps"] ** 3
    features["entropies"] = features["entropies"] ** 3
    for options in choices:
        low = high = 1.0
        for factor in get_method(method, **options).factors:
            lowest, highest = factor.bounds(0.9, size)
            low, high = low * lowest, high * highest
        found = weights(method, Rollouts(**features), alpha=0.9, **options)
        assert low - 1e-6 <= found.min() <= found.max() <= high + 1e-6, options


@pytest.mark.parametrize("method", OPTIONS)
@for_all(seed=seeds, size=st.integers(2, 8))
def test_every_choice_of_options_keeps_its_own_bounds(method: str, seed: int, size: int) -> None:
    assert_bounds(method, seed, size, OPTIONS[method])


@pytest.mark.parametrize("method", UNBOUNDED)
@for_all(seed=seeds, size=st.integers(2, 8))
def test_weights_without_an_upper_bound_keep_their_lower_one(method: str, seed: int, size: int) -> None:
    assert_bounds(method, seed, size, UNBOUNDED[method])


# --- what rounding and lengths must not decide ----------------------------------------------------------------------


def test_grpo_care_an_accuracy_at_the_mean_is_accurate_whatever_the_rounding() -> None:
    """Accuracies 1, 1, 1, 2, 5 ninths, whose mean is 2/9: the last two earn half of their accuracy more."""
    ninths = torch.tensor([[1, 1, 1, 2, 5]], dtype=torch.float64)
    one = torch.ones(1, 5, 1)
    rollouts = Rollouts(2 * ninths / 9, ref_logps=-one, mask=one, answer_mask=one)
    stage = METHODS["care"].reward
    assert stage is not None
    assert stage(rollouts)[0].tolist() == pytest.approx([2 / 9, 2 / 9, 2 / 9, 6 / 9, 15 / 9])


def test_care_agreement_is_of_directions_and_at_the_mean_counts() -> None:
    """Three equal answers agree equally, at the mean, and earn more; in a group with a dissenter only they do, however
    long the dissenter's embedding is."""
    angles = torch.tensor([[0.7, 0.7, 0.7, 0.7], [0.7, 0.7, 0.7, 0.7 + math.pi / 3]], dtype=torch.float64)
    length = torch.tensor([[0.1, 0.7, 1.3, 3.1], [0.1, 0.7, 1.3, 50.0]], dtype=torch.float64).unsqueeze(-1)
    embeddings = length * torch.stack([angles.cos(), angles.sin()], -1)
    stage = METHODS["care_agreement"].reward
    assert stage is not None
    found = stage(Rollouts(torch.full((2, 4), 2.0, dtype=torch.float64), embeddings=embeddings))
    assert found.tolist() == [[3, 3, 3, 3], [3, 3, 3, 2]]


@pytest.mark.parametrize("seed", range(6))
def test_care_agreement_of_equal_answers_is_equal_whatever_the_rounding(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(1, 1, 5, generator=generator) * torch.linspace(0.3, 4, 9).view(1, 9, 1)
    stage = METHODS["care_agreement"].reward
    assert stage is not None
    assert stage(Rollouts(torch.full((1, 9), 2.0), embeddings=embeddings)).eq(3).all()


def test_kl_cov_never_makes_padding_pay() -> None:
    """The right answer is the unlikely one, so that every covariance is below that of padding, 0."""
    one, mask = torch.ones(1, 2, 2), torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    rollouts = Rollouts(torch.tensor([[2.0, 0.0]]), logps=torch.tensor([[[-3.0, 0], [-1, 0]]]), ratios=one, mask=mask)
    penalty = METHODS["kl_cov"].penalty
    assert penalty is not None
    paid = penalty.coefficients(rollouts, base_advantages(rollouts.rewards))
    assert paid.sum() == 1 and paid[..., 1].eq(0).all()
