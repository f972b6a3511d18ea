"""Statistics of the analysis (GCPO App. D) and of training comparisons.

Inputs are NumPy arrays, lists or tensors; results are Python floats. One entry is one query unless said otherwise.
All drawing is seeded, and every interval is the 95 % percentile interval of `n` draws: bootstrap replicates, or what
`training_difference` says.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

from gcpo.errors import one_of

Values = ArrayLike | torch.Tensor
Array = NDArray[np.float64]

FEWEST_POINTS = 3
CHUNK_ELEMENTS = 2**19  # resampled values held at a time: a few megabytes
STRIP = 2**17  # counts of resamples ranked at a time: a megabyte, which stays in a processor's cache
# Standard errors between 0 and the smallest difference that a two-sided test at 5 % finds with a probability of 80 %.
DETECTABLE = float(stats.norm.ppf(0.975) + stats.norm.ppf(0.8))


class Interval(NamedTuple):
    """An estimate from all the data with its 95 % interval; unpacks as (estimate, low, high)."""

    estimate: float
    low: float
    high: float


class Draws(NamedTuple):
    """An estimate with draws of it, such as its resamples; nan without draws of a statistic that is not defined.

    One drawing answers for the interval at any level and for p, so that these agree unless p is within 2 / n of 1 -
    `level`: ends of the interval are interpolated between two draws, and p counts draws.
    """

    estimate: float
    draws: Array

    def interval(self, level: float = 0.95) -> Interval:
        """Return the estimate with the interval that holds the share `level` (in (0, 1)) of the draws."""
        low, high = np.percentile(self.draws if len(self.draws) else np.nan, (50 * (1 - level), 50 * (1 + level)))
        return Interval(self.estimate, float(low), float(high))

    @property
    def p(self) -> float:
        """Two-sided p value of 0: at least 1 / n, at most 1."""
        tail = min((self.draws <= 0).mean(), (self.draws >= 0).mean())
        return float(min(1, max(2 * tail, 1 / len(self.draws))))


def spearman(u: Values, v: Values) -> float:
    """Spearman's rho in [-1, 1]: the Pearson correlation of average ranks.

    GCPO Eq. 21 is the special case without ties; zero-variance groups tie, so ranks are averaged. nan when `u` or `v`
    is constant. Raises ValueError for different lengths, fewer than 3 points, or a value that is not finite.
    """
    return _seen("spearman", u, v)


def top_auc(u: Values, v: Values, q: float = 0.1) -> float:
    """AUC of the score `u` for the queries in the top share `q` by `v`, GCPO Eq. 22: P(u+ > u-) + P(u+ = u-)/2.

    The positives are the round(q N) largest `v` (at least 1, at most N - 1). Where `v` ties across that threshold, the
    result is the expectation over random tie-breaking, computed exactly: it depends on no order and no seed.
    Raises ValueError as `spearman`, and for `q` outside (0, 1).
    """
    return _seen("auc", u, v, q)


def precision_at_top(u: Values, v: Values, q: float = 0.1) -> float:
    """Share of the top `q` by `u` that is in the top `q` by `v`, GCPO Eq. 23; in [0, 1], `q` in expectation by chance.

    Both sets hold round(q N) queries (at least 1, at most N - 1). Ties at either cut count by their expectation over
    random tie-breaking, independent in `u` and `v`, so the order of the arrays has no part in it.
    Raises ValueError as `spearman`, and for `q` outside (0, 1).
    """
    return _seen("precision", u, v, q)


def spearman_interval(u: Values, v: Values, n: int = 10000, seed: int = 0) -> Interval:
    """Spearman's rho with its interval, resampling queries. Replicates without a rho (a constant column) are left out.

    Raises ValueError as `spearman`.
    """
    u, v = _columns(u=u, v=v)
    return _bootstrap(lambda counts: rhos(u, v, counts), len(u), n, seed)


def paired_bootstrap(
    u_a: Values, u_b: Values, v: Values, n: int = 10000, seed: int = 0, statistic: str = "spearman"
) -> Interval:
    """rho(u_a, v) - rho(u_b, v) with its interval, GCPO App. D.6: each replicate resamples the queries once for both.

    `statistic` is a key of `RANKINGS`: "auc" gives the difference of App. D.5, at the top 10 %. Ranks are taken anew in
    each replicate; replicates without a value (a constant column) are left out. An interval above 0 says that `u_a`
    follows `v` more closely. Raises ValueError as `spearman`, and for another statistic.
    """
    one_of("statistic", statistic, RANKINGS)
    u_a, u_b, v = _columns(u_a=u_a, u_b=u_b, v=v)
    counts = seen_and_resampled(len(v), n, seed)
    return draws_of(replicates(statistic, u_a, v, counts) - replicates(statistic, u_b, v, counts)).interval()


def heldout_prediction(u: Values, v: Values, folds: int = 5, seed: int = 0) -> tuple[float, float]:
    """(mean absolute error, Spearman's rho) of predicting `v` by a line in `u` on held-out folds, GCPO App. D.7.

    Each is computed within each fold and averaged over folds, as each fold has a line of its own; folds are shuffled by
    `seed`. The error has the unit of `v`. A fold without a rho (a constant `u` or `v`) is left out of its mean.
    Raises ValueError as `spearman`, and for fewer than 2 folds or folds of fewer than 3 queries.
    """
    u, v = _columns(u=u, v=v)
    most = len(u) // FEWEST_POINTS
    if not 2 <= folds <= most:
        raise ValueError(f"folds is {folds}, expected 2 to {most}: each needs {FEWEST_POINTS} of {len(u)} queries")
    error, rho = heldout(u, v, np.ones((1, len(u))), folds, seed)
    return float(error[0]), float(rho[0])


def mean_interval(x: Values, n: int = 10000, seed: int = 0) -> Interval:
    """Mean of a method's runs, or of questions, with the interval that resamples them.

    With very few values percentile intervals are too narrow. Raises ValueError for fewer than 2 values or one that is
    not finite.
    """
    values = _array("x", x)
    if values.ndim != 1 or len(values) < 2:
        raise ValueError(f"x has shape {values.shape}, expected at least 2 values in a row")
    return _bootstrap(lambda counts: counts @ values / len(values), len(values), n, seed)


def best_of(x: Values, k: int) -> Array:
    """The expected best of `k` of a question's samples: pass@k where they are right (1) or wrong (0).

    Args:
        x: scores of n samples, (..., n).
        k: of them, 1 to n.

    Returns:
        sum_i C(i-1, k-1) / C(n, k) x_(i) with the scores in ascending order, the mean over all choices of `k` samples
        without replacement, which is an unbiased estimate; shape (...). Of c right ones among n that is
        1 - C(n-c, k) / C(n, k), the estimator of pass@k of Chen et al. (2021). Raises ValueError for another `k`, or a
        score that is not finite.
    """
    ordered = np.sort(_array("x", x), axis=-1)
    n = ordered.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, expected 1 to {n}, the number of samples")
    ranks = np.arange(n, 1, -1)
    # The largest has the share C(n-1, k-1) / C(n, k) = k / n; each next share is (i-k) / (i-1) times the one before.
    shares = k / n * np.cumprod([1, *(np.maximum(ranks - k, 0) / (ranks - 1))])
    return np.asarray(ordered[..., ::-1] @ shares)


def paired_query_bootstrap(a: Values, b: Values, n: int = 10000, seed: int = 0) -> Interval:
    """Mean score of `a` minus that of `b` on the same queries, with an interval that resamples the queries.

    `a` and `b` are (seeds, queries), or (queries,) for one run; their seeds may differ in number. Seeds are averaged
    first and kept: the interval covers the choice of test queries, not the training seed (see `training_difference`).
    The unit is that of the scores. Raises ValueError as `spearman`.
    """
    first, second = (x.mean(axis=0) if x.ndim == 2 else x for x in (_array("a", a), _array("b", b)))
    mean_a, mean_b = _columns(a=first, b=second)
    return mean_interval(mean_a - mean_b, n, seed)


def interval_of_means(of: Callable[..., Array], *columns: Values, n: int = 10000, seed: int = 0) -> Interval:
    """`of` the means of the columns, with its interval; each replicate resamples the queries, once for all columns.

    `of` takes a mean of each column and works by element, on numbers and on arrays alike: ``lambda a, b: a / b`` is a
    ratio of two means over the same queries, and of ``x`` and ``x**2`` a deviation can be made. Replicates of which it
    is nan are left out. Raises ValueError as `spearman`.
    """
    table = np.stack(_columns(**{f"column {i}": column for i, column in enumerate(columns)}))
    size = table.shape[1]
    return _bootstrap(lambda counts: of(*(table @ counts.T / size)), size, n, seed)


def training_difference(a: Values, b: Values, n: int = 10000, seed: int = 0) -> Interval:
    """Mean score of `a` minus that of `b`, trained and tested alike, with an interval for other seeds and questions.

    `a` and `b` are (seeds, questions), the same seeds and the same questions in the same order: differences are paired
    by both, which takes out what a seed or a question does to every method. The interval is that of `n` draws, each the
    sum of two independent parts: seeds by Student's t with their number less 1, as resampling three of them would cover
    the truth in three quarters of the cases only; and questions by resampling, less the share of their spread that is
    noise of single answers, which the seeds' spread holds already. The unit is that of the scores, the level 95 %.
    Raises ValueError for scores that are no such pair, and for fewer than 2 seeds or `FEWEST_POINTS` questions.
    """
    return training_draws(a, b, n, seed).interval()


def training_draws(a: Values, b: Values, n: int = 10000, seed: int = 0) -> Draws:
    """The draws of :func:`training_difference`, for its interval at any level and its p value at the price of one."""
    paired, rng = _paired(a, b), np.random.default_rng(seed).spawn(1)[0]  # apart from the stream that draws questions
    over_seeds, _, share = _standard_errors(paired)
    columns = paired.mean(axis=0)
    gain = float(columns.mean())
    of_questions = [counts @ (columns - gain) / len(columns) for counts in resamples(len(columns), n, seed)]
    # Stratified t quantiles in random order: the tails that Holm-corrected intervals read do not depend on the seed.
    of_seeds = over_seeds * rng.permutation(stats.t.ppf((np.arange(n) + 0.5) / n, len(paired) - 1))
    return Draws(gain, gain + of_seeds + np.sqrt(share) * np.concatenate(of_questions))


def minimal_detectable(a: Values, b: Values, power: float = 0.8, level: float = 0.95) -> float:
    """The smallest true difference that this many seeds and questions would tell from 0 with probability `power`.

    Told is one whose interval of confidence `level` misses 0, by the power of Student's two-sided t test with the
    standard error of `training_difference` and the number of seeds less 1. The unit is that of the scores. Raises
    ValueError as `training_difference`, for a level outside (0, 1), and for a power outside (1 - level, 1).
    """
    if not 0 < 1 - level < power < 1:
        raise ValueError(f"power is {power} and level {level}, expected 0 < 1 - level < power < 1")
    paired = _paired(a, b)
    seeds = len(paired)
    freedom, bar = seeds - 1, stats.t.ppf(1 - (1 - level) / 2, seeds - 1)

    def beyond(size: float) -> float:
        shift = size * np.sqrt(seeds)  # so large a shift that the other side is never found has no number there
        return float(stats.nct.sf(bar, freedom, shift) + np.nan_to_num(stats.nct.cdf(-bar, freedom, shift)) - power)

    size = optimize.brentq(beyond, 0, 10 * bar)
    over_seeds, over_questions, _ = _standard_errors(paired)
    return float(size * np.sqrt(seeds) * np.hypot(over_seeds, over_questions))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values of a family, by Holm's method: below 0.05 for a true null in at most 5 % of families.

    As statsmodels' ``multipletests``, which collects garbage at each call: half the time of a report of many families.
    """
    order = np.argsort(p_values, kind="stable")
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(np.asarray(p_values)[order] * np.arange(len(order), 0, -1))
    return np.minimum(adjusted, 1).tolist()


def holm_levels(p_values: Sequence[float], alpha: float = 0.05) -> list[float]:
    """The confidence, in (0, 1), at which each member's interval misses 0 where :func:`holm` rejects its null.

    A p value at the boundary itself may fall on either side, as :class:`Draws` says.
    The k-th smallest of m p values is judged at alpha / (m - k + 1) as long as all before it were rejected; those from
    the first that was not share its level.
    """
    rejected = np.sum(np.asarray(holm(p_values)) < alpha)
    ranks = np.argsort(np.argsort(p_values, kind="stable"))
    return (1 - alpha / (len(ranks) - np.minimum(ranks, rejected))).tolist()


def equivalent(low: float, high: float, margin: float) -> bool:
    """Return True if the interval of a difference lies within ±`margin`: the two are equal for all that matters.

    With a 95 % interval this is a pair of one-sided tests at 2.5 %.
    """
    return -margin < low and high < margin


def _paired(a: Values, b: Values) -> Array:
    first, second = _array("a", a), _array("b", b)
    if first.shape != second.shape or first.ndim != 2 or len(first) < 2 or first.shape[1] < FEWEST_POINTS:
        expected = f"(seeds, questions), the same of both, of at least 2 seeds and {FEWEST_POINTS} questions"
        raise ValueError(f"a is {first.shape} and b is {second.shape}: expected {expected}")
    return first - second


def _standard_errors(paired: Array) -> tuple[float, float, float]:
    """Return standard errors of the mean over seeds and over questions, and the questions' share beyond answer noise.

    Two-way analysis of variance with one value a cell: the mean squares of rows and columns both hold the cells' own
    noise, and this noise is counted once, with the rows.
    """
    seeds, questions = paired.shape
    rows, columns = paired.mean(axis=1), paired.mean(axis=0)
    cells = paired - rows[:, None] - columns + paired.mean()
    noise = (cells**2).sum() / ((seeds - 1) * (questions - 1)) / (seeds * questions)
    of_columns = columns.var(ddof=1) / questions
    beyond = max(0.0, of_columns - noise)
    return float(np.sqrt(rows.var(ddof=1) / seeds)), float(np.sqrt(beyond)), beyond / of_columns if of_columns else 0.0


def _array(name: str, values: Values) -> Array:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().double().numpy()
    array = np.asarray(values, dtype=np.float64)
    if len(bad := np.argwhere(~np.isfinite(array))):
        raise ValueError(f"{name} has {len(bad)} that are not finite, the first at {bad[0].tolist()}: leave them out")
    return array


def _columns(**columns: Values) -> list[Array]:
    arrays = [_array(name, values) for name, values in columns.items()]
    if any(array.ndim != 1 or len(array) != len(arrays[0]) or len(array) < FEWEST_POINTS for array in arrays):
        shapes = {name: array.shape for name, array in zip(columns, arrays, strict=True)}
        raise ValueError(
            f"shapes are {shapes}, expected one value for each of the same queries, at least {FEWEST_POINTS}"
        )
    return arrays


# --- statistics of every resample: counts[r, i] says how often resample r holds query i, and its sum is r's size ------


@np.errstate(invalid="ignore", divide="ignore")
def rhos(u: Array, v: Array, counts: Array) -> Array:
    """Spearman's rho of each resample; nan where a column is constant in it."""
    middle = (counts.sum(axis=1, keepdims=True) + 1) / 2
    rank_u, rank_v = _ranks(u, counts) - middle, _ranks(v, counts) - middle
    pairs = (rank_u, rank_v), (rank_u, rank_u), (rank_v, rank_v)
    covariance, variance_u, variance_v = (np.einsum("ri,ri,ri->r", counts, x, y) for x, y in pairs)
    return np.clip(covariance / np.sqrt(variance_u * variance_v), -1, 1)


def aucs(u: Array, v: Array, counts: Array, q: float = 0.1) -> Array:
    """:func:`top_auc` of each resample."""
    # Mann-Whitney's rank sum; it is linear in the membership, so a probability of membership gives the expectation.
    size = _top_sizes(counts, q)
    excess = (_top(v, counts, size) * _ranks(u, counts)).sum(axis=1, keepdims=True) - size * (size + 1) / 2
    return (excess / (size * (counts.sum(axis=1, keepdims=True) - size)))[:, 0]


def precisions(u: Array, v: Array, counts: Array, q: float = 0.1) -> Array:
    """:func:`precision_at_top` of each resample."""
    size = _top_sizes(counts, q)
    both = _top(u, counts, size) * _top(v, counts, size) / np.maximum(counts, 1)
    return (both / size).sum(axis=1)


@np.errstate(invalid="ignore", divide="ignore")
def heldout(u: Array, v: Array, counts: Array, folds: int = 5, seed: int = 0) -> tuple[Array, Array]:
    """:func:`heldout_prediction` of each resample, its folds of queries the same in all; nan without 3 queries a fold.

    The copies of a query stay in one fold. A prediction ranks as `u` does, or the other way round.
    """
    if len(u) < folds * FEWEST_POINTS:
        return np.full(len(counts), np.nan), np.full(len(counts), np.nan)
    errors, ranked = [], []
    shuffled = np.random.RandomState(seed).permutation(len(u))  # the folds are those of scikit-learn's KFold
    for test in map(np.sort, np.array_split(shuffled, folds)):
        train = np.setdiff1d(np.arange(len(u)), test)
        total = counts[:, train].sum(1)
        mean_u, mean_v = (counts[:, train] @ x[train] / total for x in (u, v))
        covariance = counts[:, train] @ (u * v)[train] / total - mean_u * mean_v
        spread = counts[:, train] @ (u**2)[train] / total - mean_u**2
        slope = np.where(spread > 1e-12 * mean_u**2, covariance / spread, 0.0)[:, None]
        predicted = mean_v[:, None] + slope * (u[test] - mean_u[:, None])
        errors.append((counts[:, test] * np.abs(v[test] - predicted)).sum(1) / counts[:, test].sum(1))
        sign = np.where(slope[:, 0] == 0, np.nan, np.sign(slope[:, 0]))
        ranked.append(sign * rhos(u[test], v[test], counts[:, test]))
    known = ~np.isnan(ranked)
    return np.mean(errors, axis=0), np.where(known, ranked, 0).sum(0) / known.sum(0)


RANKINGS: dict[str, Callable[..., Array]] = {"spearman": rhos, "auc": aucs, "precision": precisions}
STATISTICS = RANKINGS | {"mae": lambda *of: heldout(*of)[0], "heldout_spearman": lambda *of: heldout(*of)[1]}


def replicates(statistic: str, u: Array, v: Array, counts: Array) -> Array:
    """Return one of :data:`STATISTICS` of each resample; nan where it is not defined."""
    strips = np.array_split(counts, 1 + counts.size // STRIP)
    return np.concatenate([STATISTICS[statistic](u, v, strip) for strip in strips])


def draws_of(values: Array) -> Draws:
    """Return the draws of a statistic from its values: what was seen comes first, then every resample."""
    return Draws(float(values[0]), values[1:][~np.isnan(values[1:])])


def draws_over_seeds(values: Array, seed: int = 0) -> Draws:
    """Return the draws of a mean over trainings, from (1 + n, trainings) values, what was seen first.

    Rows are resamples of the queries, which all trainings share. To each draw comes what other trainings would do:
    Student's t with their number less 1, times the standard error over them. The noise of single queries, which that
    error has too, is counted twice, to the safe side. Of one training the queries alone are drawn. Draws that are nan
    are left out.
    """
    count, means = values.shape[1], values.mean(axis=1)
    if count > 1:
        spread = values[0].std(ddof=1) / np.sqrt(count)
        means[1:] += spread * np.random.default_rng(seed).standard_t(count - 1, size=len(means) - 1)
    return draws_of(means)


def _seen(statistic: str, u: Values, v: Values, *share: float) -> float:
    """Return the statistic of the observed queries: of the resample that holds each query once."""
    u, v = _columns(u=u, v=v)
    return float(RANKINGS[statistic](u, v, np.ones((1, len(u))), *share)[0])


def _top_sizes(counts: Array, q: float) -> Array:
    if not 0 < q < 1:
        raise ValueError(f"q is {q}, expected a share above 0 and below 1")
    total = counts.sum(axis=1, keepdims=True)
    return np.clip(np.round(q * total), 1, total - 1)


def _held(values: Array, counts: Array) -> tuple[Array, NDArray[np.intp]]:
    """Return the count of each distinct value (rising) in each resample, and the index of each query's value."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    if len(first) == len(values):  # no ties
        return counts[:, first], inverse
    order = np.argsort(inverse, kind="stable")
    starts = np.searchsorted(inverse[order], np.arange(len(first)))
    return np.add.reduceat(counts[:, order], starts, axis=1), inverse


def _ranks(values: Array, counts: Array) -> Array:
    """Average ranks, from 1."""
    held, inverse = _held(values, counts)
    return (held.cumsum(axis=1) - (held - 1) / 2)[:, inverse]


def _top(values: Array, counts: Array, size: Array) -> Array:
    """Return the expected number of each query's copies among the `size` largest, over ties; sums to `size`."""
    held, inverse = _held(values, counts)
    above = counts.sum(axis=1, keepdims=True) - held.cumsum(axis=1)
    share = np.clip(size - above, 0, held) / np.maximum(held, 1)
    return counts * share[:, inverse]


def resamples(size: int, n: int, seed: int, multinomial: bool = False) -> Iterator[Array]:
    """Yield how often each of `size` entries is drawn in each of `n` resamples with replacement, some rows at a time.

    By entry, or `multinomial` by count: two streams of the same distribution, as published numbers rest on each.
    """
    rng, most = np.random.default_rng(seed), max(1, CHUNK_ELEMENTS // size)
    for start in range(0, n, most):
        rows = min(most, n - start)
        if multinomial:
            yield rng.multinomial(size, np.full(size, 1 / size), rows).astype(float)
        else:
            drawn = rng.integers(size, size=(rows, size)) + size * np.arange(rows)[:, None]
            yield np.bincount(drawn.ravel(), minlength=rows * size).reshape(rows, size).astype(float)


@lru_cache(maxsize=4)
def seen_and_resampled(size: int, n: int, seed: int) -> Array:
    """Return counts that several statistics share: a row of ones, which is what was seen, and `n` resamples of it."""
    counts = np.vstack([np.ones(size), *resamples(size, n, seed, multinomial=True)])
    counts.flags.writeable = False  # whoever asks for the same draws gets this very table
    return counts


def _bootstrap(of: Callable[[Array], Array], size: int, n: int, seed: int) -> Interval:
    """Return a statistic of counts of queries (resamples x size), as observed and with its interval."""
    counts = np.ones((1, size)), *resamples(size, n, seed)
    return draws_of(np.concatenate([of(some) for some in counts])).interval()
