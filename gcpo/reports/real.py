"""A real language model on several data sets: its gate, its Figure 1 and its one step, by PROTOCOL.md, part "real"."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import brentq

from gcpo.measures import REWARD_RANGE
from gcpo.reports.alignment import Alignment
from gcpo.reports.verdicts import pooled
from gcpo.runs.one_step import DOTS
from gcpo.statistics import Draws

# The pilot's figures, each between its bounds in every data set, or the gate is closed there.
GATE = {"f1": (0.1, 0.7), "varied": (0.5, 1.0), "clusters": (3.0, np.inf), "reliability": (0.3, 1.0)}
LEADS = [(first, second) for first in ("cd", "bot") for second in ("token_entropy", "se")]
STRENGTH = 0.4  # range of weights within a batch, highest less lowest over the mean, at which methods are level


def gate(queries: pd.DataFrame, answers: pd.DataFrame) -> pd.DataFrame:
    """Return the figures of a policy's pilot on one data set, and whether each lets it be tested.

    Args:
        queries: lines of ``queries.csv`` of two draws of answers or more, told apart by ``seed``.
        answers: lines of ``answers.csv`` of the same runs.

    Returns:
        figure (f1, the mean of the answers; varied, the share of groups whose rewards differ; clusters, of the
        median group; reliability, the rank correlation of V between draws), value, low, high and passes.
    """
    found = {
        "f1": answers["reward"].mean() / REWARD_RANGE[1],
        "varied": 1 - queries["zero_variance"].astype(float).mean(),
        "clusters": queries["clusters"].median(),
        "reliability": Alignment(queries, n=1).reliability("cd")["target"].estimate,
    }
    table = pd.DataFrame([(name, found[name], *ends) for name, ends in GATE.items()])
    table.columns = ["figure", "value", "low", "high"]
    return table.assign(passes=table["value"].between(table["low"], table["high"]))


def leads(sets: Sequence[Alignment], apart: bool) -> dict[tuple[str, str], Draws]:
    """Return rho(u, V) - rho(w, V) of :data:`LEADS`, the mean over data sets, with V of the same answers or, ``apart``,
    of another draw's."""
    return {pair: pooled([one.less_apart(*pair) if apart else one.less(*pair) for one in sets]) for pair in LEADS}


# --- one step with weights that no run had ------------------------------------------------------------------------


def at_strength(weights: pd.DataFrame, target: float = STRENGTH) -> pd.DataFrame:
    """Return weights raised to the power at which the median batch's range, over its mean, is ``target``.

    Args:
        weights: (batches, questions), above 0.
        target: above 0.

    Raises:
        ValueError: no power up to 1,000 is enough: the weights do not differ.
    """

    def beyond(power: float) -> float:
        raised = (weights.div(weights.max(axis=1), axis=0)) ** power
        return float(((raised.max(axis=1) - raised.min(axis=1)) / raised.mean(axis=1)).median()) - target

    return weights ** float(brentq(beyond, 0, 1000))


def shuffled(weights: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Return weights, (batches, questions), handed to other questions of their batch."""
    permuted = np.random.default_rng(seed).permuted(weights.to_numpy(), axis=1)
    return pd.DataFrame(permuted, weights.index, weights.columns)


def weights_of(questions: pd.DataFrame, method: str) -> pd.DataFrame:
    """Return a method's weights in a run, (batches, questions), from its ``questions.csv`` of one optimizer."""
    place = questions.groupby("batch").cumcount()
    return questions.assign(place=place).pivot(index="batch", columns="place", values=method)


def reweighed(questions: pd.DataFrame, grams: pd.DataFrame, arms: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return lines as of ``updates.csv`` that a run would have with other weights of its questions.

    Args:
        questions: lines of a run's ``questions.csv``, of one optimizer.
        grams: those of its ``grams.csv``.
        arms: weights, (batches, questions), by what they are to be called.
    """
    inner, lines = grams.set_index("batch").filter(like="gram_"), list[dict[str, Any]]()
    for batch, part in questions.groupby("batch"):
        gram, dots = inner.loc[batch].to_numpy().reshape(len(part), -1), part[DOTS].to_numpy()
        for name, weights in arms.items():
            own = weights.loc[batch].to_numpy()
            line = {"batch": batch, "method": name, "weights": "own", "square": own @ gram @ own}
            line["spread"] = (own.max() - own.min()) / own.mean()
            lines.append(line | dict(zip(DOTS, own @ dots, strict=True)))
    return pd.DataFrame(lines)
