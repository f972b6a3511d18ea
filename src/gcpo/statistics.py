"""Statistics of the analysis (GCPO App. D) and of training comparisons.

Inputs are NumPy arrays, lists or tensors; results are Python floats. One entry is one query unless said otherwise.
All resampling is seeded, and every interval is the 95 % percentile interval of `n` bootstrap replicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata, trim_mean
from sklearn.linear_model import LinearRegression
from sklearn.metrics import mean_absolute_error
from sklearn.model_selection import KFold, cross_val_predict

Values = ArrayLike | torch.Tensor
Scores = Values | Sequence[ArrayLike] | Sequence[torch.Tensor]
Array = NDArray[np.float64]

PERCENTILES = (2.5, 97.5)
FEWEST_POINTS = 3
CHUNK_ELEMENTS = 2**19  # resampled values held at a time: a few megabytes


class Interval(NamedTuple):
    """An estimate from all the data with its 95 % bootstrap interval; unpacks as (estimate, low, high)."""

    estimate: float
    low: float
    high: float


class StratifiedBootstrap(NamedTuple):
    """Two aggregates over tasks, each with its interval."""

    mean: Interval
    iqm: Interval


def spearman(u: Values, v: Values) -> float:
    """Spearman's rho in [-1, 1]: the Pearson correlation of average ranks.

    GCPO Eq. 21 is the special case without ties; zero-variance groups tie, so ranks are averaged. nan when `u` or `v`
    is constant. Raises ValueError for different lengths, fewer than 3 points, or a value that is not finite.
    """
    u, v = _columns(u=u, v=v)
    return float(_rhos(u, v, np.ones((1, len(u))))[0])


def top_auc(u: Values, v: Values, q: float = 0.1) -> float:
    """AUC of the score `u` for the queries in the top share `q` by `v`, GCPO Eq. 22: P(u+ > u-) + P(u+ = u-)/2.

    The positives are the round(q N) largest `v` (at least 1, at most N - 1). Where `v` ties across that threshold, the
    result is the expectation over random tie-breaking, computed exactly: it depends on no order and no seed.
    Raises ValueError as `spearman`, and for `q` outside (0, 1).
    """
    u, v = _columns(u=u, v=v)
    size = _top_size(q, len(u))
    # Mann-Whitney's rank sum; it is linear in the membership, so a probability of membership gives the expectation.
    excess = _top_membership(v, size) @ rankdata(u) - size * (size + 1) / 2
    return float(excess / (size * (len(u) - size)))


def precision_at_top(u: Values, v: Values, q: float = 0.1) -> float:
    """Share of the top `q` by `u` that is in the top `q` by `v`, GCPO Eq. 23; in [0, 1], `q` in expectation by chance.

    Both sets hold round(q N) queries (at least 1, at most N - 1). Ties at either cut count by their expectation over
    random tie-breaking, independent in `u` and `v`, so the order of the arrays has no part in it.
    Raises ValueError as `spearman`, and for `q` outside (0, 1).
    """
    u, v = _columns(u=u, v=v)
    size = _top_size(q, len(u))
    return float(_top_membership(u, size) @ _top_membership(v, size) / size)


def spearman_interval(u: Values, v: Values, n: int = 10000, seed: int = 0) -> Interval:
    """Spearman's rho with its interval, resampling queries. Replicates without a rho (a constant column) are left out.

    Raises ValueError as `spearman`.
    """
    u, v = _columns(u=u, v=v)
    replicates = np.concatenate([_rhos(u, v, counts) for counts in _resamples(len(u), n, seed)])
    return _interval(spearman(u, v), replicates)


def paired_bootstrap(u_a: Values, u_b: Values, v: Values, n: int = 10000, seed: int = 0) -> Interval:
    """rho(u_a, v) - rho(u_b, v) with its interval, GCPO App. D.6: each replicate resamples the queries once for both.

    Ranks are taken anew in each replicate; replicates without a rho (a constant column) are left out. An interval above
    0 says that `u_a` follows `v` more closely. Raises ValueError as `spearman`.
    """
    u_a, u_b, v = _columns(u_a=u_a, u_b=u_b, v=v)
    replicates = [_rhos(u_a, v, counts) - _rhos(u_b, v, counts) for counts in _resamples(len(v), n, seed)]
    return _interval(spearman(u_a, v) - spearman(u_b, v), np.concatenate(replicates))


def heldout_prediction(u: Values, v: Values, folds: int = 5, seed: int = 0) -> tuple[float, float]:
    """(mean absolute error, Spearman's rho) of predicting `v` by a line in `u` on held-out folds, GCPO App. D.7.

    Predictions of all folds are pooled before both figures; folds are shuffled by `seed`. The error has the unit of
    `v`. Each fold has its own line, so for an uninformative `u` the pooled rho lies somewhat below 0, not at 0.
    Raises ValueError as `spearman`, and for fewer than 2 folds or more folds than queries.
    """
    u, v = _columns(u=u, v=v)
    if not 2 <= folds <= len(u):
        raise ValueError(f"folds is {folds}, expected 2 to {len(u)}: every fold needs a query")
    splits = KFold(folds, shuffle=True, random_state=seed)
    predicted = cross_val_predict(LinearRegression(), u[:, None], v, cv=splits)
    return float(mean_absolute_error(v, predicted)), spearman(predicted, v)


def interquartile_mean(x: Values) -> float:
    """Mean of the values left when floor(N/4) are cut from either end; N < 4 gives the plain mean.

    Raises ValueError when `x` is empty or holds a value that is not finite.
    """
    values = _array("x", x).ravel()
    if not len(values):
        raise ValueError("x is empty: an interquartile mean needs a value")
    return float(trim_mean(values, 0.25))


def stratified_bootstrap(scores: Scores, n: int = 10000, seed: int = 0) -> StratifiedBootstrap:
    """Mean and interquartile mean of a method over tasks, with intervals that resample runs within each task.

    `scores` is an array (runs, tasks), or a list with one 1-D array of runs per task, which may differ in length. Tasks
    count equally in the mean (a mean of task means); the interquartile mean is that of all scores pooled, so tasks
    should share one scale. With very few runs percentile intervals are too narrow.
    Raises ValueError for a task with fewer than 2 runs or a score that is not finite.
    """
    strata = _strata("scores", scores)
    rng = _generator(n, seed)
    means, iqms = [], []
    for size in _chunks(n, sum(map(len, strata))):
        draws = [runs[rng.integers(len(runs), size=(size, len(runs)))] for runs in strata]
        means.append(np.mean([draw.mean(axis=1) for draw in draws], axis=0))
        iqms.append(trim_mean(np.concatenate(draws, axis=1), 0.25, axis=1))
    return StratifiedBootstrap(
        mean=_interval(float(np.mean([runs.mean() for runs in strata])), np.concatenate(means)),
        iqm=_interval(interquartile_mean(np.concatenate(strata)), np.concatenate(iqms)),
    )


def probability_of_improvement(a: Scores, b: Scores, n: int = 10000, seed: int = 0) -> Interval:
    """P(a > b) + P(a = b)/2 for a random run of `a` and of `b` on one task, averaged over tasks; in [0, 1].

    `a` and `b` as in `stratified_bootstrap`, with the same tasks in the same order; the runs of both are resampled
    within each task, independently. 1/2 is no difference.
    Raises ValueError for different numbers of tasks, and as `stratified_bootstrap`.
    """
    runs_a, runs_b = _strata("a", a), _strata("b", b)
    if len(runs_a) != len(runs_b):
        raise ValueError(f"a has {len(runs_a)} tasks and b has {len(runs_b)}: give both the same tasks, in one order")
    rng = _generator(n, seed)
    estimates, replicates = [], []
    for x, y in zip(runs_a, runs_b, strict=True):
        wins = (x[:, None] > y) + (x[:, None] == y) / 2
        draws_x, draws_y = (_multiplicities(rng, n, len(runs)) for runs in (x, y))
        estimates.append(wins.mean())
        replicates.append(((draws_x @ wins) * draws_y).sum(axis=1) / wins.size)
    return _interval(float(np.mean(estimates)), np.mean(replicates, axis=0))


def paired_query_bootstrap(a: Values, b: Values, n: int = 10000, seed: int = 0) -> Interval:
    """Mean score of `a` minus that of `b` on the same queries, with an interval that resamples the queries.

    `a` and `b` are (seeds, queries), or (queries,) for one run; their seeds may differ in number. Seeds are averaged
    first and kept: the interval covers the choice of test queries, not the training seed (see `stratified_bootstrap`).
    The unit is that of the scores. Raises ValueError as `spearman`.
    """
    mean_a, mean_b = _columns(a=_over_seeds("a", a), b=_over_seeds("b", b))
    gain = mean_a - mean_b
    replicates = np.concatenate([counts @ gain / len(gain) for counts in _resamples(len(gain), n, seed)])
    return _interval(float(gain.mean()), replicates)


def _array(name: str, values: Values) -> Array:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().double().numpy()
    array = np.asarray(values, dtype=np.float64)
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        where = ", ".join(map(str, bad[0]))
        raise ValueError(
            f"{name} has {len(bad)} values that are not finite, the first at [{where}] ({array[tuple(bad[0])]}): "
            "leave these out of every column first"
        )
    return array


def _columns(**columns: Values) -> list[Array]:
    arrays = {name: _array(name, values) for name, values in columns.items()}
    for name, array in arrays.items():
        if array.ndim != 1:
            raise ValueError(f"{name} has shape {array.shape}, expected one value per query")
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"different lengths {lengths}: position i must be the same query in each")
    if min(lengths.values()) < FEWEST_POINTS:
        raise ValueError(f"{min(lengths.values())} queries are too few, expected at least {FEWEST_POINTS}")
    return list(arrays.values())


def _strata(name: str, scores: Scores) -> list[Array]:
    if isinstance(scores, list | tuple):
        strata = [_array(f"{name}[{task}]", runs) for task, runs in enumerate(cast(Sequence[Values], scores))]
    else:
        matrix = _array(name, cast(Values, scores))
        strata = [matrix] if matrix.ndim == 1 else list(matrix.T)
    if not strata:
        raise ValueError(f"{name} has no task")
    for task, runs in enumerate(strata):
        if runs.ndim != 1:
            raise ValueError(f"{name}: task {task} has shape {runs.shape}, expected one score per run")
        if len(runs) < 2:
            raise ValueError(f"{name}: task {task} has {len(runs)} run, resampling runs needs at least 2")
    return strata


def _over_seeds(name: str, scores: Values) -> Array:
    array = _array(name, scores)
    return array.mean(axis=0) if array.ndim == 2 else array


def _top_size(q: float, total: int) -> int:
    if not 0 < q < 1:
        raise ValueError(f"q is {q}, expected a share above 0 and below 1")
    return min(max(round(q * total), 1), total - 1)


def _top_membership(values: Array, size: int) -> Array:
    """Probability of each value to be among the `size` largest when ties are broken at random; sums to `size`."""
    threshold = np.partition(values, -size)[-size]
    above, tied = values > threshold, values == threshold
    return above + tied * (size - above.sum()) / tied.sum()


def _centred_ranks(values: Array, counts: Array) -> Array:
    """Average ranks, less their mean, of `values` when entry i occurs counts[r, i] times in replicate r."""
    _, position, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    starts = np.searchsorted(inverse[order], np.arange(len(position)))
    occurrences = np.add.reduceat(counts[:, order], starts, axis=1)
    ranks = occurrences.cumsum(axis=1) - (occurrences - 1) / 2
    return ranks[:, inverse] - (len(values) + 1) / 2


def _rhos(u: Array, v: Array, counts: Array) -> Array:
    """Spearman's rho of each replicate; counts[r] says how often replicate r holds each query and sums to N."""
    rank_u, rank_v = _centred_ranks(u, counts), _centred_ranks(v, counts)
    covariance, variance_u, variance_v = (
        np.einsum("ri,ri,ri->r", counts, x, y) for x, y in ((rank_u, rank_v), (rank_u, rank_u), (rank_v, rank_v))
    )
    with np.errstate(invalid="ignore"):
        return np.clip(covariance / np.sqrt(variance_u * variance_v), -1, 1)


def _generator(n: int, seed: int) -> Generator:
    if n < 1:
        raise ValueError(f"n is {n}, expected at least 1 bootstrap replicate")
    return np.random.default_rng(seed)


def _multiplicities(rng: Generator, replicates: int, size: int) -> Array:
    """How often each of `size` entries is drawn in a resample with replacement: (replicates, size)."""
    drawn = rng.integers(size, size=(replicates, size)) + size * np.arange(replicates)[:, None]
    return np.bincount(drawn.ravel(), minlength=replicates * size).reshape(replicates, size).astype(np.float64)


def _chunks(n: int, size: int) -> Iterator[int]:
    """Numbers of replicates to draw at a time, which sum to `n`."""
    chunk = max(1, CHUNK_ELEMENTS // size)
    for start in range(0, n, chunk):
        yield min(chunk, n - start)


def _resamples(size: int, n: int, seed: int) -> Iterator[Array]:
    rng = _generator(n, seed)
    for replicates in _chunks(n, size):
        yield _multiplicities(rng, replicates, size)


def _interval(estimate: float, replicates: Array) -> Interval:
    defined = replicates[~np.isnan(replicates)]
    low, high = np.percentile(defined, PERCENTILES) if len(defined) else (np.nan, np.nan)
    return Interval(estimate, float(low), float(high))
