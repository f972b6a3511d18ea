"""Statistics against SciPy and scikit-learn, against enumeration of tie-breaks, and against plain bootstrap loops."""

import math
from collections.abc import Callable
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
import torch
from helpers import for_all, seeds
from hypothesis import assume
from hypothesis import strategies as st
from scipy.stats import spearmanr
from sklearn.model_selection import KFold

from gcpo import statistics as s


def columns(seed: int, size: int, *, levels: int | None = None, count: int = 2) -> np.ndarray:
    """Correlated columns; `levels` rounds them to so many values, which makes ties."""
    rng = np.random.default_rng(seed)
    data = rng.normal(size=size) + rng.normal(size=(count, size))
    return data if levels is None else np.round(data * levels / 4)


# --- Spearman -------------------------------------------------------------------------------------------------------


@for_all(seed=seeds, size=st.integers(3, 40), levels=st.sampled_from([None, 2, 5]))
def test_spearman_agrees_with_scipy(seed: int, size: int, levels: int | None) -> None:
    u, v = columns(seed, size, levels=levels)
    assume(len(set(u)) > 1 and len(set(v)) > 1)
    assert s.spearman(u, v) == pytest.approx(spearmanr(u, v).statistic, abs=1e-12)


def test_spearman_of_a_constant_is_nan() -> None:
    assert math.isnan(s.spearman([0.1, 0.1, 0.1], [1, 2, 3]))
    assert math.isnan(s.spearman([1, 2, 3], [7, 7, 7]))


# --- AUC and precision at top ---------------------------------------------------------------------------------------


def broken_ties(values: np.ndarray) -> list[np.ndarray]:
    """Every strict order of `values` that random tie-breaking can produce, each equally often."""
    orders = []
    for tie_break in permutations(range(len(values))):
        rank = np.empty(len(values), dtype=int)
        rank[np.lexsort((tie_break, values))] = np.arange(len(values))
        orders.append(rank)
    return orders


def pairwise_auc(u: np.ndarray, positive: np.ndarray) -> float:
    pairs = [(a > b) + (a == b) / 2 for a in u[positive] for b in u[~positive]]
    return sum(pairs) / len(pairs)


@for_all(seed=seeds, size=st.integers(3, 6), q=st.sampled_from([0.2, 0.5, 0.7]))
def test_ties_at_the_cut_count_by_their_expectation(seed: int, size: int, q: float) -> None:
    rng = np.random.default_rng(seed)
    u, v = rng.integers(3, size=(2, size)).astype(float)
    top = min(max(round(q * size), 1), size - 1)
    members_u, members_v = ([rank >= size - top for rank in broken_ties(x)] for x in (u, v))
    auc = np.mean([pairwise_auc(u, positive) for positive in members_v])
    assert s.top_auc(u, v, q) == pytest.approx(auc, abs=1e-12)
    precision = np.mean(members_u, axis=0) @ np.mean(members_v, axis=0) / top
    assert s.precision_at_top(u, v, q) == pytest.approx(precision, abs=1e-12)


def test_eq23_precision_by_hand() -> None:
    v = [9, 8, 7, 1, 2, 3, 4, 5, 6, 0]
    assert s.precision_at_top([9, 8, 0, 7, 1, 2, 3, 4, 5, 6], v, q=0.3) == pytest.approx(2 / 3)
    # Query 0 leads; the other three tie for the two remaining places, and two of them are among the top three.
    assert s.precision_at_top([9, 5, 5, 5, 0, 0, 0, 0, 0, 0], v, q=0.3) == pytest.approx((1 + 2 * 2 / 3) / 3)


def test_the_top_share_is_rounded_not_cut_by_floating_point() -> None:
    # 0.1 * 980 is 98.00000000000001: the 99th query is not in the top.
    v = np.arange(980)
    u = np.where((v >= 980 - 98), 1.0, 0.0)
    assert s.precision_at_top(u, v) == 1
    assert s.top_auc(u, v) == 1


def test_the_top_and_the_rest_hold_at_least_one_query() -> None:
    v = [1, 2, 3, 4]
    for q, u in ((0.01, [0, 0, 0, 1]), (0.99, [0, 1, 1, 1])):
        assert s.top_auc(u, v, q) == 1
        assert s.precision_at_top(u, v, q) == 1


@pytest.mark.parametrize("q", [0.0, 1.0, math.nan])
def test_a_share_outside_zero_to_one_is_an_error(q: float) -> None:
    for statistic in (s.top_auc, s.precision_at_top):
        with pytest.raises(ValueError, match="q is"):
            statistic([1, 2, 3], [1, 2, 3], q)


# --- bootstrap ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statistic", ["spearman", "auc"])
@pytest.mark.parametrize("levels", [None, 3])
def test_paired_bootstrap_is_the_plain_loop(
    levels: int | None, statistic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"spearman": lambda u, v: spearmanr(u, v).statistic, "auc": s.top_auc}[statistic]
    u_a, u_b, v = columns(4, 25, levels=levels, count=3)
    rng = np.random.default_rng(9)
    replicates = []
    for _ in range(300):
        drawn = np.repeat(np.arange(25), rng.multinomial(25, np.full(25, 1 / 25)))
        replicates.append(one(u_a[drawn], v[drawn]) - one(u_b[drawn], v[drawn]))
    low, high = np.percentile(replicates, [2.5, 97.5])
    expected = (one(u_a, v) - one(u_b, v), low, high)
    for elements in (25, 25 * 7, 2**20):  # the sizes of a chunk and of a strip have no part in the result
        monkeypatch.setattr(s, "CHUNK_ELEMENTS", elements)
        monkeypatch.setattr(s, "STRIP", elements)
        found = s.paired_bootstrap(u_a, u_b, v, n=300, seed=9, statistic=statistic)
        assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("multinomial", [False, True])
def test_resamples_draw_every_entry_alike_and_do_not_depend_on_chunks(
    multinomial: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = np.concatenate([*s.resamples(7, 5000, 1, multinomial)])
    assert counts.shape == (5000, 7) and (counts.sum(axis=1) == 7).all()
    assert counts.mean(axis=0) == pytest.approx(np.ones(7), abs=0.06)  # 4 standard errors of sqrt(6 / 7 / 5000)
    assert counts.var(axis=0) == pytest.approx(np.full(7, 6 / 7), abs=0.12)
    monkeypatch.setattr(s, "CHUNK_ELEMENTS", 50)
    assert (np.concatenate([*s.resamples(7, 5000, 1, multinomial)]) == counts).all()


def test_replicates_without_a_rho_are_left_out() -> None:
    # One query differs: a third of the resamples of three queries hold only equal values of u.
    rho, low, high = s.spearman_interval([0, 0, 1], [1, 2, 3], n=500)
    assert rho == pytest.approx(math.sqrt(3) / 2)
    assert 0 < low <= high <= 1
    assert all(math.isnan(x) for x in s.spearman_interval([1, 1, 1], [1, 2, 3], n=20))


# --- held-out prediction --------------------------------------------------------------------------------------------


def test_heldout_prediction_is_the_mean_of_the_folds() -> None:
    u, v = columns(5, 43)
    errors, rhos = [], []
    for train, test in KFold(5, shuffle=True, random_state=3).split(u):
        slope, intercept = np.polyfit(u[train], v[train], 1)
        predicted = intercept + slope * u[test]
        errors.append(np.abs(v[test] - predicted).mean())
        rhos.append(spearmanr(predicted, v[test]).statistic)
    assert s.heldout_prediction(u, v, seed=3) == pytest.approx((np.mean(errors), np.mean(rhos)), abs=1e-10)


def test_heldout_prediction_without_a_rho_in_any_fold_has_none() -> None:
    assert math.isnan(s.heldout_prediction(np.ones(50), np.arange(50))[1])


# --- comparisons of training runs -----------------------------------------------------------------------------------


def test_mean_interval_is_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(7).normal(size=5)
    replicates = values[np.random.default_rng(3).integers(5, size=(300, 5))].mean(axis=1)
    expected = (values.mean(), *np.percentile(replicates, [2.5, 97.5]))
    for elements in (1, 5 * 7, 2**22):  # the size of a chunk has no part in it
        monkeypatch.setattr(s, "CHUNK_ELEMENTS", elements)
        assert s.mean_interval(values, n=300, seed=3) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("values", [[1.0], [[1.0, 2.0], [3.0, 4.0]], [1.0, math.nan]])
def test_mean_interval_names_what_it_cannot_take(values: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"x has (shape \(.*at least 2 values in a row|1 that are not finite.*\[1\])"):
        s.mean_interval(values)


def test_paired_query_bootstrap_averages_seeds_and_resamples_queries() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.random((3, 80)), rng.random((5, 80))
    expected = s.mean_interval(a.mean(0) - b.mean(0), n=500, seed=11)
    assert s.paired_query_bootstrap(a, b, n=500, seed=11) == pytest.approx(expected, abs=1e-12)


# --- inputs and errors ----------------------------------------------------------------------------------------------


def test_interval_of_means_is_the_plain_loop() -> None:
    a, b = columns(1, 30) + 5
    drawn = next(s.resamples(30, 500, 2))
    loop = []
    for counts in drawn.astype(int):
        held = np.repeat(np.arange(30), counts)
        loop.append(a[held].mean() / b[held].mean())
    found = s.interval_of_means(lambda x, y: x / y, a, b, n=500, seed=2)
    assert found == pytest.approx((a.mean() / b.mean(), *np.percentile(loop, [2.5, 97.5])))


OF_QUERIES = (s.spearman, s.top_auc, s.precision_at_top, s.heldout_prediction)


def test_lists_and_tensors_are_accepted() -> None:
    u, v = columns(6, 15)
    tensors = torch.tensor(u, requires_grad=True), torch.tensor(v)
    for statistic in OF_QUERIES:
        assert statistic(*tensors) == statistic(u, v) == statistic(u.tolist(), v.tolist())
    assert s.spearman(torch.tensor([1, 2, 4]).bfloat16(), [1, 2, 4]) == pytest.approx(1)


INTERVALS = (s.spearman_interval, s.paired_query_bootstrap, lambda u, v: s.paired_bootstrap(u, u, v))


@pytest.mark.parametrize("statistic", [*OF_QUERIES, *INTERVALS])
def test_errors_say_what_is_wrong_and_where(statistic: Callable[..., Any]) -> None:
    for u, v, said in (
        ([1, 2, 3], [1, 2, 3, 4], r"\(3,\).*\(4,\)"),
        ([1, 2], [1, 2], r"\(2,\).*at least 3"),
        ([1, 2, 3, 4], [1, 2, math.nan, 4], r"1 that are not finite.*\[2\]"),
        (np.zeros((2, 2, 2)), [1, 2], "one value for each"),
    ):
        with pytest.raises(ValueError, match=said):
            statistic(u, v)


# --- best_of --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_the_best_of_k_is_the_mean_over_all_choices_of_k_samples(n: int) -> None:
    scores = np.random.default_rng(n).integers(0, 4, size=(6, n)) / 3
    for k in range(1, n + 1):
        expected = [np.mean([max(chosen) for chosen in combinations(row, k)]) for row in scores.tolist()]
        np.testing.assert_allclose(s.best_of(scores, k), expected, atol=1e-12)


def test_of_right_and_wrong_it_is_pass_at_k() -> None:
    n = 1200  # where binomial coefficients are no floats any more
    for c, k in ((0, 3), (1, 600), (7, 8), (900, 301), (1200, 1)):
        right = [1.0] * c + [0.0] * (n - c)
        expected = 1 - math.comb(n - c, k) / math.comb(n, k) if k <= n - c else 1.0
        assert s.best_of(right, k) == pytest.approx(expected, abs=1e-12)


def test_more_folds_or_samples_than_there_can_be_and_another_statistic_are_refused() -> None:
    with pytest.raises(ValueError, match="statistic is 'tau', expected one of spearman, auc"):
        s.paired_bootstrap([1, 2, 3], [1, 2, 3], [1, 2, 3], statistic="tau")
    for folds, k in ((1, 0), (4, 4)):
        with pytest.raises(ValueError, match=f"folds is {folds}, expected 2 to 3: each needs 3 of 11 queries"):
            s.heldout_prediction(range(11), range(11), folds=folds)
        with pytest.raises(ValueError, match=f"k is {k}, expected 1 to 3"):
            s.best_of([0.0, 1.0, 1.0], k)
