"""Measures against their papers' formulas, groups computed by hand, and the identities they obey."""

import math
from collections.abc import Callable

import numpy as np
import papers
import pytest
import torch
from helpers import DEVICES, for_all, seeds
from hypothesis import strategies as st
from torch import Tensor

from gcpo import measures as m

sizes = st.integers(1, 12)

Inputs = dict[str, Tensor]
RANGE = (-1.0, 3.0)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(seed: int, *shape: int) -> Inputs:
    """Whatever a measure takes, for groups of this shape."""
    draws = generator(seed)

    def normal(*more: int) -> Tensor:
        return torch.randn(*shape, *more, generator=draws, dtype=torch.float64)

    return {
        "e": normal(5),
        "z": torch.randint(-3, 4, shape, generator=draws) * 1000,
        "nli": normal(shape[-1], 3).softmax(-1),
        "logps": -normal().abs(),
        "entropies": normal(6).abs(),
        "tokens": normal(6) < 0.5,
        "rewards": 4 * torch.rand(shape, generator=draws, dtype=torch.float64) - 1,
    }


def embeddings(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def angles(*degrees: float) -> Tensor:
    radians = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([radians.cos(), radians.sin()], -1)


def lengths(x: Inputs) -> Tensor:
    return x["tokens"].sum(-1)


SIGNED = ("mc", "nearest_neighbour", "eigenscore")  # neither 0 for one response nor always above 0

# Each measure as a function of inputs; those that take a mask pass it on.
MEASURES: dict[str, Callable[..., Tensor]] = {
    "cosine_dispersion": lambda x, **mask: m.cosine_dispersion(x["e"], **mask),
    "barycentric_transport": lambda x, **mask: m.barycentric_transport(x["e"], x["z"], **mask),
    "counts": lambda x, **mask: m.semantic_entropy(x["z"], **mask),
    "rao": lambda x, **mask: m.semantic_entropy(x["z"], x["logps"], estimator="rao", **mask),
    "mean": lambda x, **mask: m.semantic_entropy(x["z"], estimator="mean", **mask),
    "mc": lambda x, **mask: m.semantic_entropy(x["z"], x["logps"], estimator="mc", **mask),
    "heat": lambda x, **mask: m.kernel_language_entropy(x["nli"], **mask),
    "matern": lambda x, **mask: m.kernel_language_entropy(x["nli"], kernel="matern", **mask),
    "self_consistency": lambda x, **mask: m.self_consistency(x["z"], **mask),
    "predictive_entropy": lambda x, **mask: m.predictive_entropy(x["z"], **mask),
    "sequence_entropy": lambda x, **mask: m.sequence_entropy(x["logps"], **mask),
    "sequence_mean": lambda x, **mask: m.sequence_entropy(x["logps"], normalise=True, lengths=lengths(x), **mask),
    "nearest_neighbour": lambda x, **mask: m.nearest_neighbour_entropy(x["e"], **mask),
    "eigenscore": lambda x, **mask: m.eigenscore(x["e"], **mask),
    "degree": lambda x, **mask: m.degree_uncertainty(x["nli"], **mask),
    "degree, contradict": lambda x, **mask: m.degree_uncertainty(x["nli"], affinity="contradict", **mask),
    "eccentricity": lambda x, **mask: m.eccentricity(x["nli"], **mask),
    "eigenvalues": lambda x, **mask: m.eigenvalue_uncertainty(x["nli"], **mask),
    "density": lambda x, **mask: m.semantic_density(x["nli"], x["logps"], groups=x["z"], **mask),
    "token_entropy": lambda x: m.token_entropy(x["entropies"], x["tokens"]),
    "reward_dispersion": lambda x: m.reward_dispersion(x["rewards"], RANGE),
    "reward_variance": lambda x: m.reward_variance(x["rewards"], RANGE),
}
MASKED = list(MEASURES)[:19]

# Each formula, of lists, and the highest value it can have among G responses.
PAPERS: dict[str, tuple[Callable[[dict], float], Callable[[int], float]]] = {
    "cosine_dispersion": (lambda x: papers.cd(x["e"]), lambda g: (g - 1) / g),
    "barycentric_transport": (lambda x: papers.bot(x["e"], x["z"]), lambda g: 1 / 2),
    "counts": (lambda x: papers.se_counts(x["z"]), math.log),
    "rao": (lambda x: papers.se_rao(x["z"], x["logps"]), math.log),
    "mean": (lambda x: papers.se_mean(x["z"]), math.log),
    "mc": (lambda x: papers.se_mc(x["z"], x["logps"]), lambda g: math.inf),
    "heat": (lambda x: papers.kle(x["nli"]), math.log),
    "matern": (lambda x: papers.kle(x["nli"], "matern"), math.log),
    "self_consistency": (lambda x: 1 - max(map(x["z"].count, x["z"])) / len(x["z"]), lambda g: (g - 1) / g),
    "predictive_entropy": (lambda x: papers.se_counts(x["z"]), math.log),
    "sequence_entropy": (lambda x: -sum(x["logps"]) / len(x["logps"]), lambda g: math.inf),
    "sequence_mean": (lambda x: papers.sequence_mean(x["logps"], map(sum, x["tokens"])), lambda g: math.inf),
    "nearest_neighbour": (lambda x: papers.nearest_neighbour(x["e"]), lambda g: -math.log(math.e + (g - 1) / math.e)),
    "eigenscore": (lambda x: papers.eigenscore(x["e"]), lambda g: math.inf),
    "degree": (lambda x: papers.degree(x["nli"]), lambda g: (g - 1) / g),
    "degree, contradict": (lambda x: papers.degree(x["nli"], "contradict"), lambda g: (g - 1) / g),
    "eccentricity": (lambda x: papers.eccentricity(x["nli"]), math.sqrt),
    "eigenvalues": (lambda x: papers.eigenvalues(x["nli"]), float),
    "density": (lambda x: papers.density(x["nli"], x["logps"], x["z"]), lambda g: 1.0),
    "reward_dispersion": (lambda x: papers.rd(x["rewards"], *RANGE), lambda g: 1.0),
    "reward_variance": (lambda x: papers.qhawkeye(x["rewards"], *RANGE), lambda g: 1.0),
}


@pytest.mark.parametrize("name", PAPERS)
@for_all(seed=seeds, size=sizes)
def test_every_measure_is_its_papers_formula(name: str, seed: int, size: int) -> None:
    x, (formula, highest) = inputs(seed, size), PAPERS[name]
    found = MEASURES[name](x)
    rounding = 1e-9 if found.dtype == torch.float64 else 2e-6
    assert found.item() == pytest.approx(formula({key: value.tolist() for key, value in x.items()}), abs=rounding)
    assert found <= highest(size) + rounding
    assert found >= 0 or name in SIGNED


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_takes_leading_batch_dimensions(name: str) -> None:
    x = inputs(7, 2, 3, 5)
    batched = MEASURES[name](x)
    assert batched.shape == (2, 3)
    for i, j in np.ndindex(2, 3):
        alone = MEASURES[name]({key: value[i, j] for key, value in x.items()})
        torch.testing.assert_close(batched[i, j], alone, check_dtype=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MEASURES)
def test_float64_stays_and_any_other_input_is_read_as_float32(name: str, device: str) -> None:
    x = inputs(11, 3, 8)
    exact = MEASURES[name](x)
    floats = name not in ("counts", "mean", "self_consistency", "token_entropy", "predictive_entropy")
    assert exact.dtype == torch.float64 or not floats

    def cast(dtype: torch.dtype) -> Inputs:
        return {k: v.to(device, dtype) if v.is_floating_point() else v.to(device) for k, v in x.items()}

    single, half = (MEASURES[name](cast(dtype)) for dtype in (torch.float32, torch.bfloat16))
    assert single.dtype == half.dtype == torch.float32
    assert single.device.type == device
    torch.testing.assert_close(single.cpu().double(), exact.double(), atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(half.cpu().double(), exact.double(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", MASKED)
@for_all(seed=seeds, size=st.integers(2, 9))
def test_masked_rows_are_left_out_even_when_they_are_nan(name: str, seed: int, size: int) -> None:
    x = inputs(seed, size)
    kept = torch.rand(size, generator=generator(seed)) < 0.6
    kept[seed % size] = True
    alone = MEASURES[name]({key: value[kept] for key, value in x.items()} | {"nli": x["nli"][kept][:, kept]})
    x["e"][~kept], x["logps"][~kept], x["nli"][~kept], x["nli"][:, ~kept] = (torch.nan,) * 4
    torch.testing.assert_close(MEASURES[name](x, mask=kept), alone, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("name", MASKED)
def test_a_group_without_kept_rows_is_zero(name: str) -> None:
    none, all_rows = MEASURES[name](inputs(1, 2, 4), mask=torch.tensor([[False] * 4, [True] * 4]))
    assert none == 0
    assert all_rows > 0 or name in SIGNED


@for_all(seed=seeds, size=sizes)
def test_identical_answers_have_no_uncertainty(seed: int, size: int) -> None:
    e, z = embeddings(seed, 1, 8).float().repeat(size, 1), torch.full((size,), seed)
    for exactly in (m.cosine_dispersion(e), m.semantic_entropy(z), m.self_consistency(z)):
        assert exactly == 0
    rao = m.semantic_entropy(z, embeddings(seed, size).float(), estimator="rao")
    assert rao.item() == pytest.approx(0, abs=1e-6)


# --- cosine dispersion ----------------------------------------------------------------------------------------------


def test_eq7_cosine_dispersion_counts_the_diagonal_and_clips_obtuse_pairs() -> None:
    # Two orthogonal pairs of equal rows: 8 of the 16 ordered pairs are at distance 1. Obtuse ones are too.
    assert m.cosine_dispersion(angles(0, 0, 90, 90)).item() == pytest.approx(8 / 16, abs=1e-15)
    assert m.cosine_dispersion(angles(0, 120, 240)).item() == pytest.approx(6 / 9, abs=1e-15)


def test_a_zero_embedding_has_no_direction() -> None:
    e = embeddings(0, 2, 3, 4)
    e[0, 1] = 0
    for values in (m.cosine_dispersion(e), m.barycentric_transport(e, torch.zeros(2, 3, dtype=torch.long))):
        assert values.isnan().tolist() == [True, False]


# --- barycentric transport ------------------------------------------------------------------------------------------


def test_eq9_centroids_are_normalised_before_they_are_mixed() -> None:
    # Cluster {0, 120} has a centroid of length 1/2 at 60 degrees; normalised, it balances the cluster at 60.
    z = torch.tensor([0, 0, 1, 1])
    assert m.barycentric_transport(angles(0, 120, 60, 60), z).item() == pytest.approx(0, abs=1e-15)
    # However short it is, here cos(89.9 degrees) = 0.0017, a centroid has the say of its whole mass: 89.9 and 179.9.
    expected = (1 - math.cos(math.radians(45))) / 2
    assert m.barycentric_transport(angles(0, 179.8, 179.9, 179.9), z).item() == pytest.approx(expected, abs=1e-12)


@for_all(seed=seeds, size=sizes)
def test_barycentric_transport_of_one_cluster_is_zero(seed: int, size: int) -> None:
    e, z = embeddings(seed, 40, size, 6), torch.full((40, size), -5)
    for dtype, rounding in ((torch.float32, 1e-6), (torch.float64, 1e-15)):
        value = m.barycentric_transport(e.to(dtype), z)
        assert 0 <= value.min() <= value.max() <= rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("degrees", "clusters", "expected"),
    [
        ((0, 180, 0, 180), (0, 1, 2, 3), 1 / 2),  # the barycentre vanishes
        ((0, 120, 240), (0, 1, 2), 1 / 2),
        ((30, 210), (0, 0), 1 / 2),  # a cluster whose members cancel has no centroid
        ((30, 210, 0, 0), (0, 0, 1, 1), 1 / 4),  # the other half alone: the barycentre (1/2) mu_1 gives (1 - 1/2)/2
    ],
)
def test_eq9_where_it_is_0_over_0_has_its_limit(
    degrees: tuple[float, ...], clusters: tuple[int, ...], expected: float, dtype: torch.dtype
) -> None:
    value = m.barycentric_transport(angles(*degrees).to(dtype), torch.tensor(clusters))
    assert value.item() == pytest.approx(expected, abs=1e-6)


# --- semantic entropy -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_distinct_answers_have_the_entropy_of_the_group_size(size: int) -> None:
    assert m.semantic_entropy(torch.arange(size) * 13 - 50).item() == pytest.approx(math.log(size), rel=1e-6)


@for_all(seed=seeds, size=sizes)
def test_rao_of_equal_likelihoods_is_counts_and_a_common_factor_cancels(seed: int, size: int) -> None:
    x = inputs(seed, size)
    equal = m.semantic_entropy(x["z"], torch.full((size,), -700.0), estimator="rao")
    torch.testing.assert_close(equal, MEASURES["counts"](x), atol=1e-6, rtol=1e-5)
    shifted = x | {"logps": x["logps"] - 2000}
    torch.testing.assert_close(MEASURES["rao"](shifted), MEASURES["rao"](x))


@pytest.mark.parametrize("logp", [-88.0, -90.0, -100.0, -103.0, -110.0])
def test_rao_of_a_share_that_float32_barely_holds_is_within_its_range(logp: float) -> None:
    value = m.semantic_entropy(torch.tensor([0, 1]), torch.tensor([0.0, logp]), estimator="rao")
    assert 0 <= value < 1e-30


# --- kernel language entropy ----------------------------------------------------------------------------------------


def graph(labels: list[int], within: int = 0) -> Tensor:
    """One-hot verdicts: 0 entail, 1 neutral or 2 contradict inside a cluster, and contradiction across clusters."""
    z = torch.tensor(labels)
    return torch.nn.functional.one_hot(torch.where(z.unsqueeze(0) == z.unsqueeze(1), within, 2), 3).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eigenvalues_that_rounding_makes_negative_are_clipped(dtype: torch.dtype) -> None:
    """Graphs of many equal answers have eigenvalues of 0, which rounding puts on either side."""
    for size in (2, 8, 16):
        values = m.kernel_language_entropy(graph([0] * size).to(dtype).expand(20, size, size, 3))
        assert values.ge(0).all()
        assert values.tolist() == pytest.approx([papers.kle(graph([0] * size).tolist())] * 20, abs=1e-5)


def test_a_group_with_a_broken_edge_is_nan_and_leaves_the_others_alone() -> None:
    for measure in (m.kernel_language_entropy, m.eigenvalue_uncertainty, m.eccentricity):
        nli = inputs(1, 3, 5)["nli"]
        expected = measure(nli)
        nli[:, range(5), range(5)] = torch.nan  # which nothing reads
        for broken in (torch.nan, torch.inf):
            nli[1, 0, 2, 0] = broken
            found = measure(nli)
            assert found.isnan().tolist() == [False, True, False]
            torch.testing.assert_close(found[[0, 2]], expected[[0, 2]])


# --- rivals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clusters", [1, 2, 4])
def test_graphs_of_clear_clusters_in_closed_form(clusters: int) -> None:
    """Clusters of two, alike within and not between: the Laplacian has the eigenvalue 0 for each and 1 besides."""
    nli = graph([place // 2 for place in range(2 * clusters)])
    assert m.eigenvalue_uncertainty(nli).item() == pytest.approx(clusters)
    assert m.degree_uncertainty(nli).item() == pytest.approx(1 - 1 / clusters)
    assert m.eccentricity(nli).item() == pytest.approx(math.sqrt(clusters - 1), abs=1e-6)
    assert m.semantic_density(nli).item() == pytest.approx(1 - 1 / clusters)
    assert m.degree_uncertainty(graph([0, 0, 0], 1), affinity="contradict").item() == 0  # neutral is no contradiction


def test_density_counts_an_answer_once_and_by_its_likelihood() -> None:
    nli, answers = graph([0, 0, 0, 1]), torch.tensor([5, 5, 5, 9])
    assert m.semantic_density(nli).item() == pytest.approx(1 - (3 * 3 / 4 + 1 / 4) / 4)
    assert m.semantic_density(nli, groups=answers).item() == pytest.approx(1 / 2)


# --- token and predictive entropy, agreement ------------------------------------------------------------------------


def test_token_entropy_averages_tokens_then_responses_and_leaves_out_empty_ones() -> None:
    entropies = torch.tensor([[1.0, 3.0, 99.0], [4.0, torch.nan, torch.nan], [torch.nan, 7.0, 7.0], [5.0, 5.0, 5.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]])
    for tokens in (mask, mask.bool(), mask.float()):
        assert m.token_entropy(entropies, tokens).item() == pytest.approx((2 + 4 + 5) / 3)
    assert m.token_entropy(entropies, 0 * mask) == 0


def test_sequence_entropy_by_hand_in_sums_and_in_means() -> None:
    """Three responses of 1, 4 and 0 tokens; the last has no mean, and counts as a certain one in the sum."""
    logps, tokens = torch.tensor([-1.0, -2.0, 0.0]), torch.tensor([1, 4, 0])
    assert m.sequence_entropy(logps).item() == 1
    assert m.sequence_entropy(logps, normalise=True, lengths=tokens).item() == pytest.approx((1 + 0.5) / 2)
    assert m.sequence_entropy(logps, normalise=True, lengths=0 * tokens).item() == 0


# --- dispersion and variance of rewards -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(2, 17))
def test_eq11_normaliser_is_the_true_maximum(size: int) -> None:
    """The sum of deviations is convex, so that it peaks at a corner of the range; one corner, and none above, is 1."""
    corners = torch.tensor([[3.0] * k + [-1.0] * (size - k) for k in range(size + 1)], dtype=torch.float64)
    value = m.reward_dispersion(corners, RANGE)
    assert value.argmax() in (size // 2, (size + 1) // 2)
    assert value.max().item() == pytest.approx(1, abs=1e-12)
    sums = (corners - corners.mean(1, keepdim=True)).abs().sum(1)  # nothing was cut off at 1
    torch.testing.assert_close(value, sums / sums.max())


@for_all(half=st.integers(1, 12), data=st.data())
def test_binary_rewards_and_even_groups_give_four_p_times_one_minus_p(half: int, data: st.DataObject) -> None:
    """RD is then Q-Hawkeye's u too."""
    correct = data.draw(st.integers(0, 2 * half))
    rewards = 2 * (torch.arange(2 * half) < correct).double()
    p = correct / (2 * half)
    for measure in (m.reward_dispersion, m.reward_variance):
        assert measure(rewards).item() == pytest.approx(4 * p * (1 - p), abs=1e-12)


of_rewards = pytest.mark.parametrize("measure", [m.reward_dispersion, m.reward_variance])


@of_rewards
@for_all(reward=st.floats(-1e3, 1e3, width=32), size=sizes)
def test_equal_rewards_differ_by_exactly_0(measure: Callable[..., Tensor], reward: float, size: int) -> None:
    assert measure(torch.full((size,), reward)).item() == 0


@of_rewards
@for_all(seed=seeds, size=sizes)
def test_nan_rewards_are_left_out_and_not_counted(measure: Callable[..., Tensor], seed: int, size: int) -> None:
    rewards, kept = inputs(seed, size)["rewards"], torch.rand(size, generator=generator(seed)) < 0.6
    expected = measure(rewards[kept], RANGE) if kept.any() else torch.zeros((), dtype=torch.float64)
    torch.testing.assert_close(measure(rewards.masked_fill(~kept, torch.nan), RANGE), expected)


@of_rewards
def test_one_or_no_scorable_reward_does_not_differ_and_too_much_is_cut_at_1(measure: Callable[..., Tensor]) -> None:
    nan = torch.nan
    rewards = torch.tensor([[nan, 1.7, nan], [nan, nan, nan], [0.0, 2.0, nan], [0, 50, nan]])
    assert measure(rewards).tolist() == [0, 0, 1, 1]
