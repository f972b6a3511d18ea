"""Comparisons of methods over seeds and questions."""

from __future__ import annotations

from typing import Any

import pandas as pd

from gcpo import statistics


def verdict(low: float, high: float) -> bool | None:
    """What an interval of a difference decides about "it is above zero": True, False, or None where it holds zero."""
    return True if low > 0 else False if high < 0 else None


def differences(scores: pd.DataFrame, metric: str, against: str = "grpo", seed: int = 0) -> pd.DataFrame:
    """One metric of every kind of run, in per cent, a row per label.

    Args:
        scores: lines of the evaluations with columns label, seed, query and the metric, of one decoding.
        metric: the column to compare.
        against: the label that differences are taken from.
        seed: of the resampling.

    Returns:
        label, seeds (how many), mean, std (n - 1 over seeds), low and high (95 %, resampling seeds: with three seeds
        too narrow, so all seeds are given in ``each``), difference from ``against`` with difference_low and
        difference_high (95 %, paired, resampling questions), and improvement, the probability that a run beats a run
        of ``against``. What one seed alone cannot tell (std, low, high, improvement) is missing.
    """
    matrices = {
        label: 100 * part.pivot(index="seed", columns="query", values=metric).to_numpy()
        for label, part in scores.groupby("label", sort=False)
    }
    rows = []
    for label, matrix in matrices.items():
        runs = matrix.mean(axis=1)
        row: dict[str, Any] = {
            "label": label,
            "seeds": len(runs),
            "mean": runs.mean(),
            "each": runs.round(2).tolist(),
        }
        if len(runs) > 1:
            _, low, high = statistics.stratified_bootstrap([runs], seed=seed).mean
            row |= {"std": runs.std(ddof=1), "low": low, "high": high}
        if label != against and against in matrices:
            names = ("difference", "difference_low", "difference_high")
            row |= dict(
                zip(names, statistics.paired_query_bootstrap(matrix, matrices[against], seed=seed), strict=True)
            )
            other = matrices[against].mean(axis=1)
            if min(len(runs), len(other)) > 1:
                row["improvement"] = statistics.probability_of_improvement([runs], [other], seed=seed)[0]
        rows.append(row)
    return pd.DataFrame(rows)


def beats(scores: pd.DataFrame, metric: str, label: str, other: str) -> bool | None:
    """Whether runs of one label beat those of another, where luck of the questions and luck of the seed must agree.

    True if the seed-averaged difference is above zero for any choice of questions (its 95 % interval is) and every seed
    of it is above every seed of the other (with three of each, luck does that once in twenty); False if both
    are the other way round; None where either leaves it open. ``scores`` as in :func:`differences`.
    """
    table = differences(scores[scores["label"].isin([label, other])], metric, against=other).set_index("label")
    row: Any = table.loc[label]
    rival: Any = table.loc[other, "each"]
    questions = verdict(row["difference_low"], row["difference_high"])
    seeds = True if min(row["each"]) > max(rival) else False if max(row["each"]) < min(rival) else None
    return questions if questions == seeds else None
