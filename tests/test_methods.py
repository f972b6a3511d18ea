"""Every method against its formula in plain Python, and what all of them must keep: ranges, invariances, edge cases."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gcpo.methods import (
    METHODS,
    advantages,
    base_advantages,
    get_method,
    group_factors,
    group_weights,
    permutation,
    weights,
)
from gcpo.rollouts import MissingFeatureError, Rollouts
from gcpo.weights import alpha_g, weight_range

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]
MODULATED = [name for name, row in METHODS.items() if row.factors]
ONE_GROUP = [name for name, row in METHODS.items() if not row.permuted]  # methods that weigh each group by itself
NAN = math.nan

seeds = st.integers(0, 2**31 - 1)
sizes = st.integers(1, 8)


def for_all(**strategies: st.SearchStrategy) -> Callable:
    """A property test without a time limit: the first call also pays for what the libraries load lazily."""
    return lambda test: settings(deadline=None, max_examples=20)(given(**strategies)(test))


def features_of(seed: int, groups: int, size: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(groups, size, *shape, generator=generator, dtype=dtype)

    return {
        "rewards": torch.randint(0, 5, (groups, size), generator=generator).to(dtype) / 2,
        "embeddings": normal(4),
        "clusters": torch.randint(-2, 3, (groups, size), generator=generator) * 100,
        "nli": normal(size, 3).softmax(-1),
    }


def rollouts_of(seed: int, groups: int, size: int, dtype: torch.dtype = torch.float64) -> Rollouts:
    return Rollouts(**features_of(seed, groups, size, dtype))


# --- by hand --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Five answers as directions in a plane. Two of them entail one another in part, with edges of weight ``edge``, if
    they have the same label; else they contradict one another."""

    angles: Sequence[float]
    labels: Sequence[int]
    rewards: Sequence[float]
    there: tuple[float, float, float]  # NLI of an answer and a later one of its cluster
    back: tuple[float, float, float]

    @property
    def edge(self) -> float:
        return sum(entail + neutral / 2 for entail, neutral, _ in (self.there, self.back))


GROUPS = [
    Group((0, 0, 60, 90, 180), (3, 3, 3, 8, 8), (2, 0.5, 2, 0, 1), (0.9, 0.06, 0.04), (0.5, 0.3, 0.2)),
    Group((0, 30, 45, 130, 240), (7, 1, 1, 1, 7), (0, 0, 0, 2, 0.25), (0.7, 0.2, 0.1), (0.35, 0.5, 0.15)),
    Group((10, 10, 10, 10, 10), (4, 4, 4, 4, 4), (0.5, 0.5, 0.5, 0.5, 1.5), (1, 0, 0), (1, 0, 0)),
]


def as_rollouts(groups: Sequence[Group], reward_range: tuple[float, float] = (0.0, 2.0)) -> Rollouts:
    radians = torch.tensor([g.angles for g in groups], dtype=torch.float64).deg2rad()
    nli = [
        [
            [(0, 0, 1) if a != b else g.there if i < j else g.back for j, b in enumerate(g.labels)]
            for i, a in enumerate(g.labels)
        ]
        for g in groups
    ]
    return Rollouts(
        torch.tensor([g.rewards for g in groups], dtype=torch.float64),
        embeddings=2 * torch.stack([radians.cos(), radians.sin()], -1),  # measures are of directions
        clusters=torch.tensor([g.labels for g in groups]),
        nli=torch.tensor(nli, dtype=torch.float64),
        reward_range=reward_range,
    )


def direction(vectors: Sequence[tuple[float, float]]) -> tuple[float, float]:
    x, y = sum(v[0] for v in vectors), sum(v[1] for v in vectors)
    length = math.hypot(x, y)
    return x / length, y / length


def cd(g: Group) -> float:
    """Eq. 7: all ordered pairs, i = j too."""
    distances = [1 - math.cos(math.radians(a - b)) for a in g.angles for b in g.angles]
    return sum(min(max(d, 0), 1) for d in distances) / len(g.angles) ** 2


def bot(g: Group) -> float:
    """Eq. 9 and 10, step by step."""
    unit = [(math.cos(math.radians(a)), math.sin(math.radians(a))) for a in g.angles]
    names = sorted(set(g.labels))
    mass = {k: g.labels.count(k) / len(g.labels) for k in names}
    centroid = {k: direction([u for u, label in zip(unit, g.labels, strict=True) if label == k]) for k in names}
    barycentre = direction([(mass[k] * centroid[k][0], mass[k] * centroid[k][1]) for k in names])
    return sum(mass[k] * (1 - centroid[k][0] * barycentre[0] - centroid[k][1] * barycentre[1]) / 2 for k in names)


def rd(g: Group) -> float:
    """Eq. 11; the largest spread of five rewards has two of them at one end of [0, 2] and three at the other."""
    mean = sum(g.rewards) / 5
    worst = [0, 0, 2, 2, 2]
    return sum(abs(r - mean) for r in g.rewards) / sum(abs(r - sum(worst) / 5) for r in worst)


def se(g: Group) -> float:
    shares = [g.labels.count(k) / len(g.labels) for k in set(g.labels)]
    return -sum(p * math.log(p) for p in shares)


def vne(g: Group) -> float:
    """The graph falls apart into clusters of n answers, each with all edges of one weight w. Its Laplacian has the
    eigenvalues 0 and, n - 1 times, n w there, and so the kernel 1 and c = exp(-0.3 n w), with the diagonal
    (1 + (n - 1) c)/n."""
    eigenvalues = []
    for label in set(g.labels):
        n = g.labels.count(label)
        c = math.exp(-0.3 * n * g.edge)
        scale = len(g.labels) * (1 + (n - 1) * c) / n
        eigenvalues += [1 / scale] + [c / scale] * (n - 1)
    assert sum(eigenvalues) == pytest.approx(1)
    return -sum(x * math.log(x) for x in eigenvalues)


def clip(x: float) -> float:
    return min(max(x, 0.0), 1.0)


# method -> weight of a group at strength alpha_G, as its source writes it
BY_HAND: dict[str, Callable[[Group, float], float]] = {
    "grpo": lambda g, a: 1.0,
    "se": lambda g, a: clip(1 - a * se(g)),
    "kle": lambda g, a: clip(1 - a * vne(g)),
    "cd_only": lambda g, a: clip(1 - a * cd(g) ** 2),
    "bot_only": lambda g, a: clip(1 - a * bot(g) ** 2),
    "rd_only": lambda g, a: 1 + a * rd(g),
    "gcpo_cd": lambda g, a: clip(1 - a * cd(g) ** 2) * (1 + a * rd(g)),
    "gcpo_bot": lambda g, a: clip(1 - a * bot(g) ** 2) * (1 + a * rd(g)),
}


def test_every_method_that_weighs_a_group_by_itself_is_computed_by_hand() -> None:
    assert set(BY_HAND) == set(ONE_GROUP)


@pytest.mark.parametrize("alpha", [0.6, 2.5])  # 2.5 reaches the clip at 0 of se and kle
@pytest.mark.parametrize("method", BY_HAND)
def test_weights_are_those_of_the_formula(method: str, alpha: float) -> None:
    expected = [[BY_HAND[method](g, alpha / math.log(5))] * 5 for g in GROUPS]
    found = weights(method, as_rollouts(GROUPS), alpha=alpha)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=2e-7, rtol=0)


def test_weights_of_two_orthogonal_pairs() -> None:
    """Two answers twice, at right angles, one right and one wrong: every score is a round number. CD = 8/16,
    BoT = (1 - sqrt(1/2))/2, RD = 1, SE = log 2 = (log 4)/2."""
    pairs = Group((0, 0, 90, 90), (0, 0, 1, 1), (2, 2, 0, 0), (1, 0, 0), (1, 0, 0))
    a = 0.6 / math.log(4)
    w_cd, w_bot, w_rd = 1 - a / 4, 1 - a * (1 - math.sqrt(0.5)) ** 2 / 4, 1 + a
    expected = {"se": 0.7, "cd_only": w_cd, "bot_only": w_bot, "rd_only": w_rd, "gcpo_cd": w_cd * w_rd}
    expected["gcpo_bot"] = w_bot * w_rd
    for method, weight in expected.items():
        assert weights(method, as_rollouts([pairs]))[0].tolist() == pytest.approx([weight] * 4, abs=1e-7), method


def test_alpha_of_the_paper_is_the_default() -> None:
    rollouts = as_rollouts(GROUPS)
    assert torch.equal(weights("gcpo_bot", rollouts), weights("gcpo_bot", rollouts, alpha=0.6))


def test_shuffled_weights_are_those_of_other_groups() -> None:
    first, second = (BY_HAND["gcpo_bot"](g, 0.6 / math.log(5)) for g in GROUPS[:2])
    assert abs(first - second) > 0.02
    found = weights("gcpo_shuffled", as_rollouts(GROUPS[:2]))
    assert found[:, 0].tolist() == pytest.approx([second, first], abs=1e-12)


def test_the_reward_range_normalises_reward_dispersion() -> None:
    wide, narrow = as_rollouts(GROUPS, (-1.0, 3.0)), as_rollouts(GROUPS)
    gain_wide, gain_narrow = (weights("rd_only", rollouts) - 1 for rollouts in (wide, narrow))
    torch.testing.assert_close(gain_wide, gain_narrow / 2)


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


@for_all(rewards=st.lists(st.sampled_from([NAN, 0.0, 0.1, 0.7, 1.0, 2.0]), min_size=1, max_size=8))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 1e-8, 1e6, -0.3])
@pytest.mark.parametrize("method", METHODS)
def test_equal_rewards_give_an_advantage_of_exactly_0(method: str, value: float, dtype: torch.dtype) -> None:
    for size in (2, 3, 7, 16):
        features = features_of(size, 2, size, dtype) | {"rewards": torch.full((2, size), value, dtype=dtype)}
        found = advantages(method, Rollouts(**features))
        assert found.eq(0).all(), (size, found)


@pytest.mark.parametrize("method", METHODS)
def test_rewards_that_are_equal_where_they_exist_give_exactly_0(method: str) -> None:
    features = features_of(3, 2, 4)
    features["rewards"] = torch.tensor([[0.7, NAN, 0.7, 0.7], [0.1, NAN, NAN, NAN]], dtype=torch.float64)
    assert advantages(method, Rollouts(**features)).eq(0).all()


@for_all(seed=seeds, size=st.integers(2, 8))
def test_advantages_are_the_base_times_the_weight(seed: int, size: int) -> None:
    rollouts = rollouts_of(seed, 3, size)
    for method in METHODS:
        found = advantages(method, rollouts, alpha=1.1, seed=seed)
        base = torch.tensor([grpo_by_hand(row) for row in rollouts.rewards.tolist()], dtype=torch.float64)
        factor = weights(method, rollouts, alpha=1.1, seed=seed)
        torch.testing.assert_close(found, base * factor, atol=1e-10, rtol=0)


# --- what every method keeps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@for_all(seed=seeds, size=sizes, alpha=st.sampled_from([0.0, 0.3, 0.6, 1.0, 3.0]))
def test_weights_lie_within_their_range(method: str, seed: int, size: int, alpha: float) -> None:
    low, high = weight_range(method, alpha, size)
    for dtype in (torch.float32, torch.float64):
        found = weights(method, rollouts_of(seed, 3, size, dtype), alpha=alpha, seed=seed)
        assert found.shape == (3, size)
        assert found.dtype == dtype
        assert found.isfinite().all()
        assert low - 1e-6 <= found.min() <= found.max() <= high + 1e-6
        assert found.eq(found[:, :1]).all()  # one weight per group


@pytest.mark.parametrize("method", METHODS)
@for_all(seed=seeds, size=sizes)
def test_without_alpha_every_method_is_its_base_bit_for_bit(method: str, seed: int, size: int) -> None:
    for dtype in (torch.float32, torch.float64):
        rollouts = rollouts_of(seed, 2, size, dtype)
        assert weights(method, rollouts, alpha=0.0).eq(1).all()
        assert torch.equal(advantages(method, rollouts, alpha=0.0), advantages("grpo", rollouts))


@pytest.mark.parametrize("method", METHODS)
def test_a_single_response_has_weight_1_and_advantage_0(method: str) -> None:
    rollouts = rollouts_of(0, 3, 1)
    assert weights(method, rollouts).eq(1).all()
    assert advantages(method, rollouts).eq(0).all()


@pytest.mark.parametrize("method", METHODS)
@for_all(seed=seeds, size=st.integers(2, 8))
def test_the_order_of_the_responses_does_not_matter(method: str, seed: int, size: int) -> None:
    features = features_of(seed, 3, size)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    moved = {name: value[:, order] for name, value in features.items()}
    moved["nli"] = moved["nli"][:, :, order]
    before, after = advantages(method, Rollouts(**features)), advantages(method, Rollouts(**moved))
    torch.testing.assert_close(after, before[:, order], atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", METHODS)
@for_all(seed=seeds, size=st.integers(2, 8))
def test_the_names_of_the_clusters_do_not_matter(method: str, seed: int, size: int) -> None:
    features = features_of(seed, 3, size)
    renamed = features | {"clusters": 7 - 3 * features["clusters"]}
    torch.testing.assert_close(weights(method, Rollouts(**renamed)), weights(method, Rollouts(**features)))


@pytest.mark.parametrize("method", ONE_GROUP)
@for_all(seed=seeds)
def test_a_group_does_not_depend_on_its_batch(method: str, seed: int) -> None:
    features = features_of(seed, 4, 5)
    alone = {name: value[2:3] for name, value in features.items()}
    together = weights(method, Rollouts(**features))[2:3]
    torch.testing.assert_close(weights(method, Rollouts(**alone)), together, atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", ONE_GROUP)
@for_all(seed=seeds, size=st.integers(3, 8))
def test_an_unscorable_response_enters_no_statistic(method: str, seed: int, size: int) -> None:
    features = features_of(seed, 1, size)
    kept = torch.ones(size, dtype=torch.bool)
    kept[seed % size] = False
    smaller = {name: value[:, kept] for name, value in features.items()}
    smaller["nli"] = smaller["nli"][:, :, kept]
    # What an unscorable response says must not matter either.
    features["rewards"][:, ~kept] = NAN
    features["embeddings"][:, ~kept] = 1e3
    features["clusters"][:, ~kept] = features["clusters"][0, kept][0]
    broken, without = Rollouts(**features), Rollouts(**smaller)

    found, expected = group_factors(method, broken), group_factors(method, without)
    for factor in METHODS[method].factors:
        torch.testing.assert_close(found[factor.measure], expected[factor.measure], atol=1e-6, rtol=0)
    assert advantages(method, broken)[0, ~kept].eq(0).all()
    base = torch.tensor([grpo_by_hand(row) for row in without.rewards.tolist()], dtype=torch.float64)
    torch.testing.assert_close(base_advantages(broken.rewards)[:, kept], base, atol=1e-10, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_group_without_rewards_has_weight_1_and_advantage_0(method: str) -> None:
    features = features_of(5, 3, 4) | {"rewards": torch.full((3, 4), NAN, dtype=torch.float64)}
    assert weights(method, Rollouts(**features)).eq(1).all()
    assert advantages(method, Rollouts(**features)).eq(0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS)
def test_devices_and_precisions_agree(method: str, device: str) -> None:
    features = features_of(1, 3, 6)
    exact = advantages(method, Rollouts(**features))

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, torch.float32) if x.is_floating_point() else x.to(device)

    single = advantages(method, Rollouts(**{name: cast(value) for name, value in features.items()}))
    assert single.device.type == device
    torch.testing.assert_close(single.cpu().double(), exact, atol=2e-5, rtol=0)


# --- the table of methods -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_method_reads_what_its_row_says_and_nothing_else(method: str) -> None:
    read: list[str] = []

    def lazily(name: str, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: (read.append(name), value)[1]

    features = features_of(2, 2, 4)
    rewards = features.pop("rewards")
    rollouts = Rollouts(rewards, **{name: lazily(name, value) for name, value in features.items()})
    weights(method, rollouts)
    advantages(method, rollouts)
    assert sorted(read) == sorted(METHODS[method].reads)  # each of them once


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.reads])
def test_a_feature_that_a_method_misses_is_named(method: str) -> None:
    for missing in METHODS[method].reads:
        features: dict[str, Any] = features_of(2, 2, 4) | {missing: None}
        with pytest.raises(MissingFeatureError, match=f"have no '{missing}'"):
            weights(method, Rollouts(**features))


@pytest.mark.parametrize("method", MODULATED)
def test_factors_are_logged_under_their_names(method: str) -> None:
    rollouts = rollouts_of(4, 3, 5)
    columns = group_factors(method, rollouts)
    expected = {name for factor in METHODS[method].factors for name in (factor.measure, factor.weight)}
    assert set(columns) == expected
    assert {value.shape for value in columns.values()} == {(3,)}
    for factor in METHODS[method].factors:
        strength = alpha_g(0.6, 5)
        torch.testing.assert_close(factor.shape(columns[factor.measure], strength), columns[factor.weight])


def test_the_weight_of_gcpo_is_the_product_of_its_logged_factors() -> None:
    columns = group_factors("gcpo_bot", rollouts_of(4, 3, 5))
    assert set(columns) == {"u_geo", "w_geo", "rd", "w_rd"}
    torch.testing.assert_close(group_weights("gcpo_bot", columns), columns["w_geo"] * columns["w_rd"])


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


def test_a_weight_that_is_not_finite_is_an_error_that_names_the_group() -> None:
    embeddings = torch.randn(3, 4, 5)
    embeddings[1, 2] = 0.0  # no direction
    with pytest.raises(ValueError, match=r"gcpo_cd: the weight of group 1 is not finite.*embeddings"):
        weights("gcpo_cd", Rollouts(torch.rand(3, 4), embeddings=embeddings))
