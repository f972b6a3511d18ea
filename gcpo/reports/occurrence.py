"""Cases that do not occur: weights that cannot act, methods that train one policy, entropies that are constant.

A claim about such a case is not tested, whatever its interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pandas as pd

from gcpo.methods import METHODS
from gcpo.reports.evidence import Pair

LEAST_RANGE = 0.01  # of a weight within a step, highest less lowest over its mean: with less it cannot act
LOGGED = ("weight_max", "weight_min", "weight", "loss_weight_max", "loss_weight_min")
CERTAIN, ALMOST_ALL = 0.01, 0.95  # an entropy below so many nats in such a share of the answers is constant


def ranges(metrics: pd.DataFrame) -> dict[str, float]:
    """Return by label the median over steps of its weights' range, over their mean; only of methods that have weights.

    Args:
        metrics: lines of ``metrics.csv`` with columns label and method.
    """
    weights = metrics[metrics["method"].isin([name for name, row in METHODS.items() if row.factors])]
    logged = weights.reindex(columns=[f"gcpo/{name}" for name in LOGGED])
    high, low, mean, high_loss, low_loss = (logged[column] for column in logged)
    of_step = (high_loss - low_loss).fillna((high - low) / mean)  # weights in the loss have a mean of 1
    return {str(label): float(found) for label, found in of_step.groupby(weights["label"]).median().items()}


def cannot_differ(
    pairs: Iterable[Pair],
    metrics: pd.DataFrame,
    scores: pd.DataFrame,
    metric: str,
    by: Mapping[Pair, str] | None = None,
) -> dict[Pair, str]:
    """Return those pairs of methods that the records cannot tell apart, each with why.

    Args:
        pairs: of labels.
        metrics: as :func:`ranges` takes them, of one task.
        scores: lines of the evaluations with columns label, seed, decoding, query and the metric, of one task.
        metric: the column that says how an answer was scored.
        by: of a pair, the label that trains with nothing but the weight that it differs by; without, both labels' own.
    """
    known = ranges(metrics)
    base = [name for name, row in METHODS.items() if row.acts == "base"]
    plain = set(metrics.loc[metrics["method"].isin(base), "label"])
    wide = scores.pivot_table(index=["seed", "decoding", "query"], columns="label", values=metric)
    found = {}
    for pair in pairs:
        acting = [by[pair]] if by and pair in by else [label for label in pair if label not in plain]
        most = max((known.get(label, 1) for label in acting), default=1)
        if most < LEAST_RANGE:
            found[pair] = f"its weight ranges over {100 * most:.2f} % within a step, and below 1 % cannot act"
        elif {*pair} <= {*wide}:
            differ = (wide[pair[0]] - wide[pair[1]]).dropna().ne(0).groupby("seed").any()
            if len(differ) and (~differ).mean() >= 0.5:
                found[pair] = f"{(~differ).sum()} of {len(differ)} seeds answer every question alike"
    return found


def constant(entropy: pd.Series, what: str) -> str | None:
    """Return a sentence that an entropy is constant, where it is: below 0.01 nats in at least 95 % of the answers."""
    share = float((entropy < CERTAIN).mean())
    said = (
        f"The entropy of {what} is below {CERTAIN} nats in {100 * share:.1f} % of the answers: there is none to go by."
    )
    return said if share >= ALMOST_ALL else None
