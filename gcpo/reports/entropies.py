"""Separation of incorrect from correct answers by a policy's entropies (EGPO Table 3, Figures 3, 5, 6 and 8).

What is computed of a run depends on its seed and on its questions. Both are resampled, as in
:func:`gcpo.statistics.training_difference`, but of statistics that are no means over questions, such as areas under a
curve: each draw is the sum of two parts, seeds by Student's t with their number less 1, and questions resampled, the
same ones for all seeds. The noise of single answers is in both parts, which makes intervals a little too wide.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from gcpo.reports.verdicts import Evidence, family
from gcpo.statistics import Array, Draws, draws_over_seeds, seen_and_resampled

PARTS = {"nll": "whole answer", "nll_thinking": "thinking", "nll_answer": "answer"}
RATES = tuple(round(0.1 * i, 1) for i in range(1, 10))  # false positive rates that ROC curves are compared at
# A statistic of a policy: a column per seed; the first row is what was seen, the others resamples of the questions.
Quantity = pd.DataFrame


def draws(quantity: Quantity, seed: int = 0) -> Draws:
    """Return draws of a statistic's mean over seeds; of a single seed the questions alone are drawn anew.

    A difference of two quantities is paired by seed and by resample; seeds that one of them lacks do not count.
    """
    return draws_over_seeds(quantity.dropna(axis=1, how="all").to_numpy(), seed)


def statistics_of(answers: pd.DataFrame, weights: Array) -> pd.DataFrame:
    """Return the statistics of one run, a row for each row of ``weights`` (resamples x answers, counts of answers).

    Of each part: how well it finds wrong answers by being large, as the area under its ROC curve ("auc nll") and as
    true positive rates at :data:`RATES` ("tpr nll 0.1"), and the gap of the means of wrong and right answers ("gap
    nll", nats per token).
    """
    found: dict[str, Array] = {}
    wrong = ~answers["right"].to_numpy()
    for part in PARTS:
        values = answers[part].to_numpy()
        order = np.argsort(-values, kind="stable")
        ends = np.append(np.flatnonzero(np.diff(values[order])), len(order) - 1)  # last of the answers with one value
        true, false = (_shares((weights * kind)[:, order], ends) for kind in (wrong, ~wrong))
        found[f"auc {part}"] = (np.diff(false) * (true[:, 1:] + true[:, :-1])).sum(axis=1) / 2
        at_rates = np.array([np.interp(RATES, *curve) for curve in zip(false, true, strict=True)])
        found |= {f"tpr {part} {rate}": at_rates[:, place] for place, rate in enumerate(RATES)}
        means = [weights[:, kind] @ values[kind] / weights[:, kind].sum(axis=1) for kind in (wrong, ~wrong)]
        found[f"gap {part}"] = means[0] - means[1]
    return pd.DataFrame(found)


def _shares(weights: Array, ends: Array) -> Array:
    """Return the share of answers that each threshold of a ROC curve calls incorrect, rising from 0 to 1."""
    called = weights.cumsum(axis=1)[:, ends]
    return np.insert(called / called[:, -1:], 0, 0, axis=1)


def quantities(answers: pd.DataFrame, questions: Iterable[str], n: int = 1000, seed: int = 0) -> dict[str, Quantity]:
    """The statistics of one policy.

    Args:
        answers: sampled answers with columns seed, query, right and :data:`PARTS`.
        questions: all that were asked, of every policy that is compared: a resample has the same of them for each, also
            where a policy has left one without an answer.
        n: resamples of the questions.
        seed: of the resampling; the same for policies that are compared.
    """
    asked = pd.Index(sorted(set(questions)))
    counts = seen_and_resampled(len(asked), n, seed)
    runs = answers.groupby("seed")
    each = {run: statistics_of(own, counts[:, asked.get_indexer(pd.Index(own["query"]))]) for run, own in runs}
    whole = pd.concat(each, axis=1).swaplevel(axis=1)
    return {str(name): pd.DataFrame(whole[name]) for name in whole.columns.unique(0)}


def comparisons(found: Mapping[str, Quantity]) -> pd.DataFrame:
    """Return what is claimed to be above 0, by what it is in words, corrected together
    (:func:`gcpo.reports.verdicts.family`)."""
    drawn = {name: draws(quantity) for name, quantity in found.items()}
    seeds = {(name, ""): int(quantity.notna().any().sum()) for name, quantity in found.items()}
    return family({(name, ""): Evidence(own.interval, own.p) for name, own in drawn.items()}, seeds)
