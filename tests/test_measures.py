"""Measures against hand-computed groups, independent loops over the paper's formulas, and the identities they obey."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import expm

from gcpo import measures as m

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]

seeds = st.integers(0, 2**31 - 1)
sizes = st.integers(1, 12)


def for_all(**strategies: st.SearchStrategy) -> Callable:
    """A property test without a time limit: the first call also pays for what the libraries load lazily."""
    return lambda test: settings(deadline=None, max_examples=30)(given(**strategies)(test))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def embeddings_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def clusters_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=generator(seed + 1)) * 1000


def nli_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, shape[-1], 3, generator=generator(seed + 2), dtype=torch.float64).softmax(-1)


def angles(*degrees: float) -> torch.Tensor:
    radians = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([radians.cos(), radians.sin()], -1)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True))


def every_measure(seed: int, *shape: int) -> dict[str, tuple]:
    """name -> (function of tensors with a group axis, those tensors, how many group axes each tensor has)."""
    e, z, nli = embeddings_of(seed, *shape, 5), clusters_of(seed, *shape), nli_of(seed, *shape)
    logps = -embeddings_of(seed + 3, *shape).abs()
    entropies = embeddings_of(seed + 4, *shape, 6).abs()
    tokens = torch.rand(entropies.shape, generator=generator(seed)) < 0.7
    rewards = torch.rand(shape, generator=generator(seed + 5), dtype=torch.float64) * 2
    return {
        "cosine_dispersion": (m.cosine_dispersion, (e,), (1,)),
        "barycentric_transport": (m.barycentric_transport, (e, z), (1, 1)),
        "counts": (m.semantic_entropy, (z,), (1,)),
        "rao": (lambda z, p: m.semantic_entropy(z, p, estimator="rao"), (z, logps), (1, 1)),
        "mc": (lambda z, p: m.semantic_entropy(z, p, estimator="mc"), (z, logps), (1, 1)),
        "heat": (m.kernel_language_entropy, (nli,), (2,)),
        "matern": (lambda nli: m.kernel_language_entropy(nli, kernel="matern"), (nli,), (2,)),
        "token_entropy": (m.token_entropy, (entropies, tokens), (1, 1)),
        "predictive_entropy": (m.predictive_entropy, (logps,), (1,)),
        "self_consistency": (m.self_consistency, (z,), (1,)),
        "reward_dispersion": (m.reward_dispersion, (rewards,), (1,)),
        "reward_variance": (m.reward_variance, (rewards,), (1,)),
    }


MEASURES = list(every_measure(0, 2))


@pytest.mark.parametrize("name", MEASURES)
@for_all(seed=seeds, size=sizes)
def test_every_measure_ignores_the_order_of_responses(name: str, seed: int, size: int) -> None:
    measure, tensors, axes = every_measure(seed, size)[name]
    order = torch.randperm(size, generator=generator(seed))
    permuted = [x[order][:, order] if n == 2 else x[order] for x, n in zip(tensors, axes, strict=True)]
    torch.testing.assert_close(measure(*permuted), measure(*tensors), atol=1e-6, rtol=1e-6)  # some are of float32


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_takes_leading_batch_dimensions(name: str) -> None:
    measure, tensors, _ = every_measure(7, 2, 3, 5)[name]
    batched = measure(*tensors)
    assert batched.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(batched[i, j], measure(*(x[i, j] for x in tensors)), check_dtype=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_agrees_in_float32_and_half_precision_input_is_read_as_float32(name: str, device: str) -> None:
    measure, tensors, _ = every_measure(11, 3, 8)[name]
    exact = measure(*tensors)

    def cast(dtype: torch.dtype) -> list[torch.Tensor]:
        return [x.to(device, dtype) if x.is_floating_point() else x.to(device) for x in tensors]

    single, half = measure(*cast(torch.float32)), measure(*cast(torch.bfloat16))
    assert single.dtype == half.dtype == torch.float32
    assert single.device.type == device
    torch.testing.assert_close(single.cpu().double(), exact.double(), atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(half.cpu().double(), exact.double(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "name", ["cosine_dispersion", "barycentric_transport", "rao", "heat", "reward_dispersion", "reward_variance"]
)
def test_float64_stays_float64(name: str) -> None:
    measure, tensors, _ = every_measure(3, 4)[name]
    assert measure(*tensors).dtype == torch.float64


@pytest.mark.parametrize("name", [n for n in MEASURES if n not in ("mc", "token_entropy", "predictive_entropy")])
def test_a_single_response_has_no_disagreement(name: str) -> None:
    measure, tensors, _ = every_measure(5, 4, 1)[name]
    torch.testing.assert_close(measure(*tensors), torch.zeros(4), check_dtype=False, atol=0, rtol=0)


MASKED = {
    "cosine_dispersion": lambda e, z, nli, p, **mask: m.cosine_dispersion(e, **mask),
    "barycentric_transport": lambda e, z, nli, p, **mask: m.barycentric_transport(e, z, **mask),
    "counts": lambda e, z, nli, p, **mask: m.semantic_entropy(z, **mask),
    "rao": lambda e, z, nli, p, **mask: m.semantic_entropy(z, p, estimator="rao", **mask),
    "mc": lambda e, z, nli, p, **mask: m.semantic_entropy(z, p, estimator="mc", **mask),
    "heat": lambda e, z, nli, p, **mask: m.kernel_language_entropy(nli, **mask),
    "matern": lambda e, z, nli, p, **mask: m.kernel_language_entropy(nli, kernel="matern", **mask),
    "self_consistency": lambda e, z, nli, p, **mask: m.self_consistency(z, **mask),
    "predictive_entropy": lambda e, z, nli, p, **mask: m.predictive_entropy(p, **mask),
}


def inputs(seed: int, *shape: int) -> tuple[torch.Tensor, ...]:
    logps = -embeddings_of(seed + 3, *shape).abs()
    return embeddings_of(seed, *shape, 5), clusters_of(seed, *shape), nli_of(seed, *shape), logps


@pytest.mark.parametrize("name", MASKED)
@for_all(seed=seeds, size=st.integers(2, 9))
def test_masked_rows_are_left_out_even_when_they_are_nan(name: str, seed: int, size: int) -> None:
    e, z, nli, logps = inputs(seed, size)
    kept = torch.rand(size, generator=generator(seed)) < 0.6
    kept[seed % size] = True
    alone = MASKED[name](e[kept], z[kept], nli[kept][:, kept], logps[kept])
    e[~kept], logps[~kept], nli[~kept], nli[:, ~kept] = (torch.nan,) * 4
    masked = MASKED[name](e, z, nli, logps, mask=kept)
    torch.testing.assert_close(masked, alone, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("name", MASKED)
def test_a_group_without_kept_rows_is_zero(name: str) -> None:
    values = MASKED[name](*inputs(1, 2, 4), mask=torch.tensor([[False] * 4, [True] * 4]))
    assert values[0] == 0
    assert values[1] > 0


def test_a_mask_of_another_shape_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"mask has shape \(3,\), expected \(4,\)"):
        m.self_consistency(torch.arange(4), mask=torch.ones(3, dtype=torch.bool))


# --------------------------------------------------------------------------------------------------- cosine dispersion


def test_eq7_cosine_dispersion_counts_the_diagonal() -> None:
    # Two orthogonal pairs of equal rows: 8 of the 16 ordered pairs are at distance 1.
    assert m.cosine_dispersion(angles(0, 0, 90, 90)).item() == pytest.approx(8 / 16, abs=1e-15)
    # 0, 60, 90 degrees: cosines 1/2, 0, sqrt(3)/2, each pair twice, over 9.
    expected = 2 * (1 / 2 + 1 + 1 - math.sqrt(3) / 2) / 9
    assert m.cosine_dispersion(angles(0, 60, 90)).item() == pytest.approx(expected, abs=1e-15)


def test_eq7_clips_obtuse_pairs_at_distance_one() -> None:
    assert m.cosine_dispersion(angles(0, 180)).item() == pytest.approx(2 / 4, abs=1e-15)
    assert m.cosine_dispersion(angles(0, 120, 240)).item() == pytest.approx(6 / 9, abs=1e-15)


@for_all(seed=seeds, size=sizes)
def test_eq7_cosine_dispersion_is_the_double_sum(seed: int, size: int) -> None:
    e = embeddings_of(seed, size, 3)
    mu = unit(e.numpy())
    total = sum(min(max(1 - float(mu[i] @ mu[j]), 0), 1) for i in range(size) for j in range(size))
    assert m.cosine_dispersion(e).item() == pytest.approx(total / size**2, abs=1e-12)


@for_all(seed=seeds, size=sizes)
def test_unclipped_cosine_dispersion_is_one_minus_the_squared_mean(seed: int, size: int) -> None:
    e = embeddings_of(seed, size, 4).abs()  # no obtuse pair: nothing is clipped
    resultant = unit(e.numpy()).mean(0)
    assert m.cosine_dispersion(e).item() == pytest.approx(1 - resultant @ resultant, abs=1e-12)


@for_all(seed=seeds, size=sizes)
def test_cosine_dispersion_is_bounded_and_free_of_scale(seed: int, size: int) -> None:
    e = embeddings_of(seed, size, 3)
    value = m.cosine_dispersion(e)
    assert 0 <= value.item() <= (size - 1) / size + 1e-12
    lengths = torch.logspace(-8, 8, size, dtype=torch.float64).unsqueeze(-1)
    torch.testing.assert_close(m.cosine_dispersion(e * lengths), value)


def test_cosine_dispersion_reaches_its_maximum_on_orthogonal_rows() -> None:
    assert m.cosine_dispersion(torch.eye(16)).item() == pytest.approx(15 / 16)


def test_a_zero_embedding_has_no_direction() -> None:
    e = embeddings_of(0, 2, 3, 4)
    e[0, 1] = 0
    for values in (m.cosine_dispersion(e), m.barycentric_transport(e, torch.zeros(2, 3, dtype=torch.long))):
        assert values.isnan().tolist() == [True, False]


# ----------------------------------------------------------------------------------------------- barycentric transport


def literal_transport(e: np.ndarray, z: list[int]) -> float:
    """Eq. 9 and 10 word for word, one cluster at a time."""
    mu, shares, centroids = unit(e), [], []
    for k in sorted(set(z)):
        members = [i for i, label in enumerate(z) if label == k]
        shares.append(len(members) / len(z))
        centroids.append(unit(mu[members].mean(0)))
    star = unit(sum(p * c for p, c in zip(shares, centroids, strict=True)))
    return sum(p * (1 - c @ star) / 2 for p, c in zip(shares, centroids, strict=True))


def test_eq10_two_orthogonal_clusters() -> None:
    # Masses 3/4 and 1/4 on orthogonal axes: the barycentre has length sqrt(10)/4.
    value = m.barycentric_transport(angles(0, 0, 0, 90), torch.tensor([7, 7, 7, -2]))
    assert value.item() == pytest.approx((1 - math.sqrt(10) / 4) / 2, abs=1e-15)


def test_eq9_centroids_are_normalised_before_they_are_mixed() -> None:
    # Cluster {0, 120} has a centroid of length 1/2 at 60 degrees; normalised, it balances the cluster at 60.
    z = torch.tensor([0, 0, 1, 1])
    assert m.barycentric_transport(angles(0, 120, 60, 60), z).item() == pytest.approx(0, abs=1e-15)
    # However short it is, here cos(89.9 degrees) = 0.0017, a centroid has the say of its whole mass: 89.9 and 179.9.
    expected = (1 - math.cos(math.radians(45))) / 2
    assert m.barycentric_transport(angles(0, 179.8, 179.9, 179.9), z).item() == pytest.approx(expected, abs=1e-12)


@for_all(seed=seeds, size=st.integers(2, 12))
def test_eq9_eq10_barycentric_transport_is_the_literal_formula(seed: int, size: int) -> None:
    e, z = embeddings_of(seed, size, 5), clusters_of(seed, size)
    expected = literal_transport(e.numpy(), z.tolist())
    assert m.barycentric_transport(e, z).item() == pytest.approx(expected, abs=1e-10)
    assert 0 <= m.barycentric_transport(e, z).item() <= 0.5


@for_all(seed=seeds, size=st.integers(2, 12))
def test_singletons_tie_barycentric_transport_to_cosine_dispersion(seed: int, size: int) -> None:
    e = embeddings_of(seed, size, 4).abs()  # no obtuse pair: CD is unclipped
    expected = (1 - (1 - m.cosine_dispersion(e)).sqrt()) / 2
    torch.testing.assert_close(m.barycentric_transport(e, torch.arange(size)), expected)


@for_all(seed=seeds, size=sizes)
def test_barycentric_transport_of_one_cluster_is_zero(seed: int, size: int) -> None:
    e, z = embeddings_of(seed, 40, size, 6), torch.full((40, size), -5)
    for dtype, rounding in ((torch.float32, 1e-6), (torch.float64, 1e-15)):
        value = m.barycentric_transport(e.to(dtype), z)
        assert value.min() >= 0
        assert value.max() <= rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_barycentric_transport_is_one_half_when_the_barycentre_vanishes(dtype: torch.dtype) -> None:
    z = torch.arange(4)
    assert m.barycentric_transport(angles(0, 180, 0, 180).to(dtype), z).item() == pytest.approx(0.5, abs=1e-6)
    assert m.barycentric_transport(angles(0, 120, 240).to(dtype), z[:3]).item() == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cluster_of_antipodal_members_costs_one_half_without_nan(dtype: torch.dtype) -> None:
    e = angles(30, 210, 0, 0).to(dtype)
    # Half of the mass has no centroid; the barycentre (1/2) mu_1 gives (1 - 1/2)/2.
    assert m.barycentric_transport(e, torch.tensor([0, 0, 1, 1])).item() == pytest.approx(0.25, abs=1e-6)
    assert m.barycentric_transport(e[:2], torch.zeros(2, dtype=torch.long)).item() == pytest.approx(0.5, abs=1e-6)


def test_barycentric_transport_names_a_wrong_shape() -> None:
    with pytest.raises(ValueError, match=r"clusters has shape \(3,\), expected \(4,\)"):
        m.barycentric_transport(torch.ones(4, 2), torch.arange(3))


# ---------------------------------------------------------------------------------------------------- semantic entropy


def test_counts_of_three_to_one() -> None:
    expected = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    assert m.semantic_entropy(torch.tensor([9, -4, 9, 9])).item() == pytest.approx(expected, rel=1e-6)


@for_all(labels=st.lists(st.integers(-(10**9), 10**9), min_size=1, max_size=16), copies=st.integers(1, 3))
def test_counts_is_the_entropy_of_cluster_shares(labels: list[int], copies: int) -> None:
    labels = labels * copies
    shares = [n / len(labels) for n in Counter(labels).values()]
    expected = -sum(p * math.log(p) for p in shares)
    value = m.semantic_entropy(torch.tensor(labels)).item()
    assert value == pytest.approx(expected, abs=2e-6)
    assert 0 <= value <= math.log(len(labels)) + 1e-6


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_distinct_answers_have_the_entropy_of_the_group_size(size: int) -> None:
    assert m.semantic_entropy(torch.arange(size) * 13 - 50).item() == pytest.approx(math.log(size), rel=1e-6)


@for_all(seed=seeds, size=sizes)
def test_rao_is_the_entropy_of_likelihood_shares(seed: int, size: int) -> None:
    z, logps = clusters_of(seed, size), -embeddings_of(seed, size).abs() * 5
    likelihood = np.exp(logps.numpy())
    shares = [likelihood[z.numpy() == k].sum() / likelihood.sum() for k in np.unique(z)]
    expected = -sum(p * math.log(p) for p in shares)
    assert m.semantic_entropy(z, logps, estimator="rao").item() == pytest.approx(expected, abs=1e-10)


@for_all(seed=seeds, size=sizes)
def test_rao_of_equal_likelihoods_is_counts_and_a_common_factor_cancels(seed: int, size: int) -> None:
    z, logps = clusters_of(seed, size), -embeddings_of(seed, size).abs()
    equal = m.semantic_entropy(z, torch.full((size,), -700.0), estimator="rao")
    torch.testing.assert_close(equal, m.semantic_entropy(z), atol=1e-6, rtol=1e-5)
    shifted = m.semantic_entropy(z, logps - 2000, estimator="rao")
    torch.testing.assert_close(shifted, m.semantic_entropy(z, logps, estimator="rao"))


def test_rao_of_an_impossible_response_is_finite() -> None:
    logps = torch.tensor([-1.0, -1.0, -torch.inf])
    value = m.semantic_entropy(torch.tensor([0, 1, 2]), logps, estimator="rao")
    assert value.item() == pytest.approx(math.log(2))


def test_seed_grpo_eq5_mc_by_hand() -> None:
    # Cluster masses 0.5 + 0.1 and 0.2, so the mean over the two clusters of -log mass.
    logps = torch.tensor([0.5, 0.2, 0.1], dtype=torch.float64).log()
    value = m.semantic_entropy(torch.tensor([4, 8, 4]), logps, estimator="mc")
    assert value.item() == pytest.approx(-(math.log(0.6) + math.log(0.2)) / 2, abs=1e-12)


def test_mc_is_not_zero_for_one_cluster_nor_for_one_response() -> None:
    logps = torch.tensor([-3.0, -3.0])
    assert m.semantic_entropy(torch.tensor([1, 1]), logps, estimator="mc").item() == pytest.approx(3 - math.log(2))
    assert m.semantic_entropy(torch.tensor([1]), logps[:1], estimator="mc").item() == pytest.approx(3)


@pytest.mark.parametrize("name", ["counts", "rao", "mc", "barycentric_transport", "self_consistency"])
@for_all(seed=seeds, size=sizes)
def test_cluster_measures_ignore_the_labels(name: str, seed: int, size: int) -> None:
    e, z, nli, logps = inputs(seed, size)
    relabelled = -7 * z + 12345
    torch.testing.assert_close(MASKED[name](e, relabelled, nli, logps), MASKED[name](e, z, nli, logps))


@for_all(seed=seeds, size=sizes)
def test_identical_answers_have_no_uncertainty(seed: int, size: int) -> None:
    e = embeddings_of(seed, 1, 8).float().repeat(size, 1)
    z = torch.full((size,), seed)
    assert m.cosine_dispersion(e).item() == 0
    assert m.semantic_entropy(z).item() == 0
    assert m.self_consistency(z).item() == 0
    assert m.barycentric_transport(e, z).item() == pytest.approx(0, abs=1e-6)
    rao = m.semantic_entropy(z, embeddings_of(seed, size).float(), estimator="rao")
    assert rao.item() == pytest.approx(0, abs=1e-6)


def test_semantic_entropy_names_a_wrong_estimator_and_absent_likelihoods() -> None:
    z = torch.arange(3)
    with pytest.raises(ValueError, match="'shannon', expected one of counts, rao, mc"):
        m.semantic_entropy(z, estimator="shannon")  # type: ignore[arg-type]
    for estimator in ("rao", "mc"):
        with pytest.raises(ValueError, match="give logps"):
            m.semantic_entropy(z, estimator=estimator)
        with pytest.raises(ValueError, match=r"logps has shape \(2,\), expected \(3,\)"):
            m.semantic_entropy(z, torch.zeros(2), estimator=estimator)


# --------------------------------------------------------------------------------------------- kernel language entropy


def graph(labels: list[int], within: int = 0, across: int = 2) -> torch.Tensor:
    """One-hot verdicts: `within` a cluster and `across` clusters, 0 entail, 1 neutral, 2 contradict."""
    z = torch.tensor(labels)
    verdict = torch.where(z.unsqueeze(0) == z.unsqueeze(1), within, across)
    return torch.nn.functional.one_hot(verdict, 3).double()


def entropy_of(eigenvalues: np.ndarray) -> float:
    positive = eigenvalues[eigenvalues > 1e-15]
    return float(-(positive * np.log(positive)).sum())


@pytest.mark.parametrize("size", [2, 5, 8, 16])
@pytest.mark.parametrize(("verdict", "edge"), [(0, 2.0), (1, 1.0)])
@pytest.mark.parametrize("t", [0.1, 0.3])
def test_heat_kernel_of_a_complete_graph_in_closed_form(size: int, verdict: int, edge: float, t: float) -> None:
    # L = edge (G I - J) has eigenvalues 0 once and edge G, so K is proportional to a matrix with spectrum 1, decay.
    decay = math.exp(-t * edge * size)
    spectrum = np.array([1.0] + [decay] * (size - 1)) / (1 + (size - 1) * decay)
    value = m.kernel_language_entropy(graph([0] * size, within=verdict), t=t)
    assert value.item() == pytest.approx(entropy_of(spectrum), abs=1e-9)


@pytest.mark.parametrize(("size", "scaled"), [(8, 0.74), (16, 0.71)])
def test_matern_kernel_of_a_complete_graph_in_closed_form(size: int, scaled: float) -> None:
    decay = 2 / (2 + 2 * size)
    spectrum = np.array([1.0] + [decay] * (size - 1)) / (1 + (size - 1) * decay)
    value = m.kernel_language_entropy(graph([0] * size), kernel="matern").item()
    assert value == pytest.approx(entropy_of(spectrum), abs=1e-9)
    assert value / math.log(size) == pytest.approx(scaled, abs=0.005)


@pytest.mark.parametrize(("size", "scaled"), [(8, 0.696), (16, 0.365)])
def test_two_contradicting_halves(size: int, scaled: float) -> None:
    value = m.kernel_language_entropy(graph([0, 1] * (size // 2)))
    assert value.item() / math.log(size) == pytest.approx(scaled, abs=0.0005)


@pytest.mark.parametrize("kernel", ["heat", "matern"])
def test_contradiction_everywhere_is_the_maximum(kernel: str) -> None:
    value = m.kernel_language_entropy(graph(list(range(9))), kernel=kernel)
    assert value.item() == pytest.approx(math.log(9), abs=1e-12)


@for_all(seed=seeds, size=st.integers(2, 8))
def test_kernel_language_entropy_is_the_literal_formula(seed: int, size: int) -> None:
    nli = nli_of(seed, size)
    p = nli.numpy()
    weight = np.zeros((size, size))
    for i in range(size):
        for j in range(size):
            if i != j:
                weight[i, j] = p[i, j, 0] + p[j, i, 0] + (p[i, j, 1] + p[j, i, 1]) / 2
    laplacian = np.diag(weight.sum(1)) - weight
    for kernel, k in {"heat": expm(-0.3 * laplacian), "matern": np.linalg.inv(2 * np.eye(size) + laplacian)}.items():
        density = k / np.sqrt(np.outer(np.diag(k), np.diag(k))) / size
        expected = entropy_of(np.linalg.eigvalsh(density))
        value = m.kernel_language_entropy(nli, kernel=kernel).item()
        assert value == pytest.approx(expected, abs=1e-9)
        assert 0 <= value <= math.log(size)


def test_the_diagonal_of_nli_is_not_read() -> None:
    nli = nli_of(1, 5)
    expected = m.kernel_language_entropy(nli)
    nli[range(5), range(5)] = torch.nan
    torch.testing.assert_close(m.kernel_language_entropy(nli), expected)


def test_kernel_language_entropy_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="'rbf', expected one of heat, matern"):
        m.kernel_language_entropy(nli_of(0, 3), kernel="rbf")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shape \(3, 4, 3\), expected \(\.\.\., G, G, 3\)"):
        m.kernel_language_entropy(torch.rand(3, 4, 3))
    with pytest.raises(ValueError, match="t is -1"):
        m.kernel_language_entropy(nli_of(0, 3), t=-1)


# ----------------------------------------------------------------------------- token and predictive entropy, agreement


def test_token_entropy_averages_tokens_then_responses() -> None:
    entropies = torch.tensor([[1.0, 3.0, 99.0], [4.0, torch.nan, torch.nan], [5.0, 5.0, 5.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    for tokens in (mask, mask.bool(), mask.float()):
        assert m.token_entropy(entropies, tokens).item() == pytest.approx((2 + 4 + 5) / 3)


def test_token_entropy_leaves_out_empty_completions() -> None:
    entropies = torch.tensor([[[1.0, 3.0], [torch.nan, 7.0]], [[2.0, 2.0], [2.0, 2.0]]])
    mask = torch.tensor([[[True, True], [False, False]], [[False, False], [False, False]]])
    assert m.token_entropy(entropies, mask).tolist() == [2.0, 0.0]


def test_predictive_entropy_is_the_negative_mean() -> None:
    assert m.predictive_entropy(torch.tensor([[-1.0, -2.0, -6.0]])).tolist() == [3.0]


def test_self_consistency_is_the_share_outside_the_largest_cluster() -> None:
    labels = torch.tensor([[5, 5, -1, 5], [1, 2, 3, 4], [8, 8, 9, 9]])
    assert m.self_consistency(labels).tolist() == [0.25, 0.75, 0.5]


# --------------------------------------------------------------------------------------------------- reward dispersion


def largest_spread(low: float, high: float, size: int) -> float:
    """The largest sum of absolute deviations, searched over the corners of the range, where a convex function peaks."""
    corners = (np.array([low] * k + [high] * (size - k)) for k in range(size + 1))
    return max(float(np.abs(r - r.mean()).sum()) for r in corners)


def test_eq11_reward_dispersion_by_hand() -> None:
    # Mean 1/2, deviations sum to 3; RD_max = (2/4) 2 2 2 = 4.
    assert m.reward_dispersion(torch.tensor([2.0, 0.0, 0.0, 0.0])).item() == pytest.approx(3 / 4)
    # Odd G: mean 2/3, deviations 4/3 + 2/3 + 2/3 = RD_max = (2/3) 1 2 2.
    assert m.reward_dispersion(torch.tensor([2.0, 0.0, 0.0])).item() == pytest.approx(1)
    assert m.reward_dispersion(torch.tensor([-1.0, 0.0, 1.0, 0.0]), (-1.0, 1.0)).item() == pytest.approx(2 / 4)


@for_all(rewards=st.lists(st.floats(-1, 3), min_size=2, max_size=9))
def test_eq11_normaliser_is_the_true_maximum(rewards: list[float]) -> None:
    r = np.array(rewards)
    expected = np.abs(r - r.mean()).sum() / largest_spread(-1, 3, len(r))
    value = m.reward_dispersion(torch.tensor(rewards, dtype=torch.float64), (-1.0, 3.0)).item()
    assert value == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 15, 16])
def test_reward_dispersion_reaches_one_at_the_even_split(size: int) -> None:
    rewards = torch.zeros(size, dtype=torch.float64)
    rewards[: size // 2] = 2
    assert m.reward_dispersion(rewards).item() == pytest.approx(1, abs=1e-12)


@for_all(half=st.integers(1, 12), data=st.data())
def test_binary_rewards_and_even_groups_give_four_p_times_one_minus_p(half: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, 2 * half))
    rewards = 2 * (torch.arange(2 * half) < correct).double()
    p = correct / (2 * half)
    value = m.reward_dispersion(rewards).item()
    assert value == pytest.approx(4 * p * (1 - p), abs=1e-12)
    # Q-Hawkeye's u, population variance over (range/2)^2, is the same number.
    assert value == pytest.approx(float(np.var(rewards.numpy())) / (2 / 2) ** 2, abs=1e-12)
    assert m.reward_variance(rewards).item() == pytest.approx(value, abs=1e-12)


def test_q_hawkeyes_u_by_hand() -> None:
    # Mean 1/2, squared deviations 9/4 + 3/4, over 4; half of the range is 1.
    assert m.reward_variance(torch.tensor([2.0, 0.0, 0.0, 0.0])).item() == pytest.approx(3 / 4)
    # Scores of 1 to 5 as in its paper: mean 3, variance 10/4 over 2^2.
    assert m.reward_variance(torch.tensor([1.0, 2.0, 4.0, 5.0]), (1.0, 5.0)).item() == pytest.approx(10 / 16)
    # Odd G cannot split evenly.
    assert m.reward_variance(torch.tensor([2.0, 2.0, 0.0])).item() == pytest.approx(8 / 9)


@for_all(rewards=st.lists(st.floats(-1, 3), min_size=1, max_size=9))
def test_reward_variance_is_that_of_the_population_over_half_the_range_squared(rewards: list[float]) -> None:
    expected = float(np.var(rewards)) / ((3 - -1) / 2) ** 2
    value = m.reward_variance(torch.tensor(rewards, dtype=torch.float64), (-1.0, 3.0)).item()
    assert value == pytest.approx(expected, abs=1e-12)
    assert 0 <= value <= 1


@for_all(reward=st.floats(-1e3, 1e3, width=32), size=sizes)
def test_equal_rewards_have_exactly_no_dispersion(reward: float, size: int) -> None:
    assert m.reward_dispersion(torch.full((size,), reward)).item() == 0
    assert m.reward_variance(torch.full((size,), reward)).item() == 0


@for_all(seed=seeds, size=sizes)
def test_nan_rewards_are_left_out_and_not_counted(seed: int, size: int) -> None:
    rewards = torch.rand(size, generator=generator(seed), dtype=torch.float64) * 2
    kept = torch.rand(size, generator=generator(seed + 1)) < 0.6
    for measure in (m.reward_dispersion, m.reward_variance):
        expected = measure(rewards[kept]) if kept.any() else torch.zeros((), dtype=torch.float64)
        torch.testing.assert_close(measure(rewards.masked_fill(~kept, torch.nan)), expected)


def test_one_or_no_scorable_reward_has_no_dispersion() -> None:
    nan = torch.nan
    rewards = torch.tensor([[nan, 1.7, nan], [nan, nan, nan], [0.0, 2.0, nan]])
    assert m.reward_dispersion(rewards).tolist() == [0, 0, 1]
    assert m.reward_variance(rewards).tolist() == [0, 0, 1]


def test_rewards_outside_the_range_are_clipped_to_one() -> None:
    assert m.reward_dispersion(torch.tensor([0, 50])).item() == 1
    assert m.reward_variance(torch.tensor([0, 50])).item() == 1


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (2.0, 0.0), (0.0, math.nan)])
def test_an_empty_reward_range_is_an_error(bounds: tuple[float, float]) -> None:
    for measure in (m.reward_dispersion, m.reward_variance):
        with pytest.raises(ValueError, match="reward_range is"):
            measure(torch.rand(4), bounds)
