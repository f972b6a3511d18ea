"""Comparisons of training runs: paired by seed and question, corrected within a family, on the seeds that both have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import log, nan
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import ttest_1samp

from gcpo import statistics
from gcpo.statistics import Interval

Pair = tuple[str, str]
NOTHING = Interval(nan, nan, nan)


@dataclass(frozen=True)
class Comparison:
    """One label's scores less another's, in points (per cent of the metric's range), or why there is no such thing.

    Attributes:
        label: what is compared.
        against: what it is compared with.
        seeds: how many both have; the comparison is made on these alone.
        compared: the same in words: "10 seeds each", "10 and 3 seeds: compared on 3", "... cannot be compared".
        interval: the difference with its 95 % interval; nan where it cannot be compared.
        corrected: the difference with the interval that holds within the family, after Holm.
        p: of no difference, adjusted by Holm within the family; in [0, 1].
        mde: the smallest true difference whose ``corrected`` interval misses 0 with a probability of 80 %: at the level
            of that interval, which is Holm's for this member of the family (5 % over the number of those not rejected
            before it). Alone in its family it is that of ``interval``.
        family: how many comparisons are corrected for together.
        what: what is compared, where it is no difference of scores.
    """

    label: str
    against: str
    seeds: int
    compared: str
    interval: Interval = NOTHING
    corrected: Interval = NOTHING
    p: float = nan
    mde: float = nan
    family: int = 1
    what: str = ""

    @property
    def tested(self) -> bool:
        """Whether both have at least two seeds in common."""
        return self.interval.estimate == self.interval.estimate


def family(scores: pd.DataFrame, metric: str, pairs: Iterable[Pair], seed: int = 0) -> dict[Pair, Comparison]:
    """Comparisons that are corrected together: each first label of ``pairs`` less the second.

    Args:
        scores: lines of the evaluations with columns label, seed, query and the metric, of one task and decoding.
        metric: the column to compare, in [0, 1].
        pairs: of labels; one that has no runs gives a comparison that is not ``tested``, and counts for nothing.
        seed: of the resampling.

    Raises:
        ValueError: runs that were tested on different questions.
    """
    pairs = list(dict.fromkeys(pairs))
    wanted = scores[scores["label"].isin([label for pair in pairs for label in pair])]
    matrices = {
        str(label): 100 * part.pivot(index="seed", columns="query", values=metric)
        for label, part in wanted.groupby("label", sort=False)
    }
    made = {pair: _compare(*pair, matrices, seed) for pair in pairs}
    corrected = _corrected({pair: (comparison, draws) for pair, (comparison, draws) in made.items() if draws})
    return {pair: corrected.get(pair, comparison) for pair, (comparison, _) in made.items()}


def spreads(scores: pd.DataFrame, metric: str, pairs: Iterable[Pair]) -> dict[Pair, Comparison]:
    """Whether the first label's runs vary less than the second's: ln of the ratio of standard deviations, second over
    first, over the seeds that both have (at least 3), corrected as in :func:`family`; ``mde`` stays nan."""
    runs = scores.groupby(["label", "seed"])[metric].mean().mul(100)
    found, nothing = {}, {}
    for label, against in dict.fromkeys(pairs):
        both = [runs.get(name, pd.Series(dtype=float)) for name in (label, against)]
        common, said = _common(set(both[0].index), set(both[1].index), fewest=3)
        comparison = Comparison(
            label, against, len(common), said, what=f"ln of {against}'s standard deviation over {label}'s"
        )
        if len(common) < 3:
            nothing[label, against] = replace(comparison, compared=f"{said} (3 are needed)")
            continue
        own, other = (part.loc[common].to_numpy() for part in both)
        if own.std() and other.std():
            found[label, against] = comparison, _Spread(own, other)
        else:
            nothing[label, against] = replace(comparison, compared=f"{said} (one does not vary)")
    return _corrected(found) | nothing


class _Spread:
    """Behaves as draws do: an interval at any level."""

    def __init__(self, own: Any, other: Any) -> None:
        self.own, self.other = own, other
        same = np.ptp(own - other) < 1e-9  # such as two methods that are one where rewards are right or wrong
        self.p = 1.0 if same else statistics.spread_p(other, own)

    def interval(self, level: float = 0.95) -> Interval:
        return Interval(*map(log, statistics.spread_ratio(self.other, self.own, level)))


def by_seed(figures: pd.DataFrame, pairs: Iterable[Pair], what: str, paired_by: str = "seed") -> dict[Pair, Comparison]:
    """A figure of each run, such as its entropy: the first label's less the second's, corrected as in :func:`family`.

    Args:
        figures: label, value, and what runs are paired by; a line per run.
        pairs: of labels.
        what: the figure, with its unit.
        paired_by: the column that tells which runs belong together.

    The interval is Student's, over the seeds that both have (at least 2); where all of them differ by the same there is
    nothing to tell it by.
    """
    wide = figures.pivot(index=paired_by, columns="label", values="value")
    found, nothing = {}, {}
    for label, against in dict.fromkeys(pairs):
        own, other = (wide.get(name, pd.Series(dtype=float)).dropna() for name in (label, against))
        common, said = _common(set(own.index), set(other.index))
        comparison = Comparison(label, against, len(common), said, what=f"{what}, {label} minus {against}")
        gaps = (own - other).loc[common].to_numpy()
        if len(common) > 1 and np.ptp(gaps) > 0:
            found[label, against] = comparison, _Paired(gaps)
        else:
            nothing[label, against] = comparison
    return _corrected(found) | nothing


class _Paired:
    """Behaves as draws do: an interval at any level."""

    def __init__(self, gaps: Any) -> None:
        self.test = ttest_1samp(gaps, 0)
        self.estimate = float(gaps.mean())
        self.p = float(self.test.pvalue)

    def interval(self, level: float = 0.95) -> Interval:
        return Interval(self.estimate, *map(float, self.test.confidence_interval(level)))


def _common(own: set[Any], other: set[Any], fewest: int = 2) -> tuple[list[Any], str]:
    """The seeds of both, and what there is in words."""
    common = sorted(own & other)
    alike = own == other and len(common) >= fewest
    counts = f"{len(own)} seeds each" if own == other else f"{len(own)} and {len(other)} seeds"
    outcome = "cannot be compared" if len(common) < fewest else f"compared on {len(common)}"
    return common, counts if alike else f"{counts}: {outcome}"


class _Scores:
    """Behaves as draws do, and says what is detectable at any level."""

    def __init__(self, own: Any, other: Any, seed: int) -> None:
        self.own, self.other = own, other
        self.draws = statistics.training_draws(own, other, seed=seed)
        self.p, self.interval = self.draws.p, self.draws.interval

    def detectable(self, level: float) -> float:
        return statistics.minimal_detectable(self.own, self.other, level=level)


def _compare(
    label: str, against: str, matrices: Mapping[str, pd.DataFrame], seed: int
) -> tuple[Comparison, _Scores | None]:
    """A comparison without its intervals, and what they are read from; None if there is nothing to draw."""
    own, other = (matrices.get(name, pd.DataFrame()) for name in (label, against))
    common, said = _common(set(own.index), set(other.index))
    comparison = Comparison(label, against, len(common), said)
    if len(common) < 2:
        return comparison, None
    if not own.columns.equals(other.columns):
        few = len(own.columns.symmetric_difference(other.columns))
        raise ValueError(
            f"{label} and {against} were tested on different questions ({few} that only one has): compare runs with "
            "the same eval_split and eval_limit"
        )
    a, b = own.loc[common].to_numpy(), other.loc[common].to_numpy()
    return comparison, _Scores(a, b, seed)


def _corrected(made: Mapping[Pair, tuple[Comparison, _Scores | _Spread | _Paired]]) -> dict[Pair, Comparison]:
    """Every comparison with its intervals, p and mde, corrected for all of them."""
    p_values = [draws.p for _, draws in made.values()]
    levels, adjusted = statistics.holm_levels(p_values), statistics.holm(p_values)
    return {
        pair: replace(
            comparison,
            interval=draws.interval(),
            corrected=draws.interval(level),
            p=p,
            mde=draws.detectable(level) if isinstance(draws, _Scores) else nan,
            family=len(made),
        )
        for (pair, (comparison, draws)), level, p in zip(made.items(), levels, adjusted, strict=True)
    }


def differences(
    scores: pd.DataFrame,
    metric: str,
    against: str | Mapping[str, str] = "grpo",
    margin: float | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """One metric of every kind of run and its difference from a base, in per cent and points, a row per label.

    Args:
        scores: lines of the evaluations with columns label, seed, query and the metric, of one task and decoding.
        metric: the column to compare, in [0, 1].
        against: the base of all labels, or of each.
        margin: the largest difference that does not matter, in points (:func:`gcpo.reports.margins.margins`).
        seed: of the resampling.

    Returns:
        label, seeds (how many it has), mean and std (over these; n - 1), each (their scores), gaps (those less the
        base's, of the seeds that both have), against, compared (how many seeds each has, and on how many they are
        compared), difference with low and high (95 %, paired by seed and question), p (Holm, within this table), mde
        (the difference detectable with 80 % power after Holm), and equivalent (whether the interval lies within the
        margin). What too few seeds cannot tell is missing.
    """
    runs = scores.groupby(["label", "seed"], sort=False)[metric].mean().mul(100)
    labels = list(dict.fromkeys(scores["label"]))
    bases = {label: against if isinstance(against, str) else against.get(label, label) for label in labels}
    found = family(scores, metric, [pair for pair in bases.items() if pair[0] != pair[1]], seed)
    rows = []
    for label, base in bases.items():
        row: dict[str, Any] = {"label": label, "seeds": len(runs[label]), "mean": runs[label].mean()}
        row |= {"std": runs[label].std(ddof=1), "each": runs[label].round(2).tolist()}
        row |= {"gaps": [], "against": "", "compared": ""}
        row |= dict.fromkeys(("difference", "low", "high", "p", "mde"), nan) | {"equivalent": None}
        if comparison := found.get((label, base)):
            row |= {"against": base, "compared": comparison.compared, "p": comparison.p, "mde": comparison.mde}
            row["gaps"] = (runs[label] - runs[base]).dropna().round(2).tolist() if comparison.seeds else []
            row |= dict(zip(("difference", "low", "high"), comparison.interval, strict=True))
            if comparison.tested and margin is not None:
                row["equivalent"] = statistics.equivalent(*comparison.interval[1:], margin)
        rows.append(row)
    return pd.DataFrame(rows)


def overall(runs: pd.DataFrame, start: str = "no training", base: str = "grpo", seed: int = 0) -> pd.DataFrame:
    """Labels over several tasks, on scores normalised per task: 0 is the starting policy's mean and 1 that of the base.

    A label is set beside the base's runs of its own seeds, as seeds differ in how far they come.

    Args:
        runs: task, label, seed and score, a line per run.
        start: the label of the starting policy.
        base: the label that is 1.
        seed: of the resampling.

    Returns:
        label, IQM (of all its normalised scores) with IQM_low and IQM_high, and improvement (the probability that a run
        beats one of the base's, in [0, 1]) with improvement_low and improvement_high: 95 %, resampling runs within
        tasks. Only labels with at least two seeds of the base's on every task, on these; empty without runs of start
        and base.

    Raises:
        ValueError: a task on which the base is not above the start: there is nothing to normalise by.
    """
    wide = runs.pivot(index=["task", "seed"], columns="label", values="score")
    means = wide.groupby("task").mean()
    if not {start, base} <= set(means) or means[[start, base]].isna().any(axis=None):
        return pd.DataFrame()
    gain = means[base] - means[start]
    if (gain <= 0).any():
        raise ValueError(f"{base} is not above {start} on {gain.idxmin()}: scores cannot be normalised by its gain")
    rows = []
    for label in dict.fromkeys(runs["label"]):
        shared = wide[wide[label].notna() & wide[base].notna()]
        easier = shared[base].groupby("task").mean() - means[base]  # the seeds that the label has
        scaled = shared.sub(means[start] + easier, axis=0, level="task").div(gain, axis=0, level="task")
        own, other = ([part.to_numpy() for _, part in scaled[name].groupby("task")] for name in (label, base))
        if len(own) == len(gain) and min(map(len, own)) > 1:
            iqm = statistics.stratified_bootstrap(own, seed=seed).iqm
            row = {"label": label, **dict(zip(("IQM", "IQM_low", "IQM_high"), iqm, strict=True))}
            if label != base:
                chance = statistics.probability_of_improvement(own, other, seed=seed)
                names = ("improvement", "improvement_low", "improvement_high")
                row |= dict(zip(names, chance, strict=True))
            rows.append(row)
    return pd.DataFrame(rows)
