"""Gains of one step over several policies, with intervals over policies, batches and held-out questions."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from gcpo import statistics
from gcpo.reports.figures import PALETTE, legend_above, line_per_name, panels
from gcpo.reports.report import GCPO
from gcpo.reports.tables import display_name
from gcpo.runs.one_step import BASE, COUNTED_ON, DOTS, FOLDS
from gcpo.statistics import Array, Draws
from gcpo.updates import total_gain

KINDS = {"own": ["own"], "ceiling": ["ceiling"], "halves": ["even", "odd"]}  # what is shown -> kinds of weights


def relative_gains(lines: pd.DataFrame, n: int = 2000, seed: int = 0) -> dict[tuple[str, str], Draws]:
    """Return the gain over GRPO's, less 1, of each method and kind of weights ("own", "ceiling", "halves"), with draws.

    Resampled are the runs, within each its batches, and the held-out questions, which all runs share, by folds; of one
    run the latter two alone. "halves" are weights that one half of the folds chose, counted on the other half. In a
    draw the same batches and folds count for every method, and for GRPO.

    Args:
        lines: of ``updates.csv``, of one optimizer, with their run's id as "run".
        n: how many draws.
        seed: of the resampling.
    """
    runs = [own for _, own in lines.groupby("run", sort=False)]
    counts, folds = (statistics.seen_and_resampled(size, n, seed + of) for of, size in enumerate((len(runs), FOLDS)))
    draws = [_totals(own, folds, n, seed + 2 + place) for place, own in enumerate(runs)]
    totals = {key: np.sum([counts[:, i] * own[key] for i, own in enumerate(draws)], axis=0) for key in draws[0]}
    found = {}
    for name, (shown, kinds) in product(dict.fromkeys(name for name, _ in totals), KINDS.items()):
        if (name, kinds[0]) in totals:
            own, base = (np.sum([totals[which, kind] for kind in kinds], axis=0) for which in (name, BASE))
            found[name, shown] = statistics.draws_of(own / base - 1)
    return found


def lead(gains: Mapping[tuple[str, str], Draws], method: str, other: str) -> Draws:
    """Return by how many per cent of GRPO's gain a method's own weights gain more than another's, from the gains of
    :func:`relative_gains`, which share their draws."""
    own, beside = gains[method, "own"], gains[other, "own"]
    return Draws(100 * (own.estimate - beside.estimate), 100 * (own.draws - beside.draws))


def leads(gains: Mapping[tuple[str, str], Draws], other: str) -> dict[str, Draws]:
    """Return :func:`lead` of each of GCPO's two methods over another, by what it is called."""
    named = (f"{display_name(own)} minus {display_name(other)}, % of GRPO's gain" for own in GCPO)
    return {name: lead(gains, own, other) for name, own in zip(named, GCPO, strict=True)}


def _totals(lines: pd.DataFrame, folds: Array, n: int, seed: int) -> dict[tuple[str, str], Array]:
    """Return the gain of a run's methods and kinds of weights as seen and in n resamples of its batches and of folds,
    and GRPO's on each kind's folds."""
    batches = statistics.seen_and_resampled(lines["batch"].nunique(), n, seed)
    parts = lines.groupby(["method", "weights"], sort=False)
    of = {(str(name), str(kind)): own.sort_values("batch") for (name, kind), own in parts}

    def total(own: pd.DataFrame, kind: str) -> Array:
        some = COUNTED_ON[kind]
        return total_gain(own[DOTS].to_numpy()[:, some], own["square"].to_numpy(), batches, folds[:, some])

    of |= {(BASE, kind): of[BASE, "own"] for kind in COUNTED_ON}
    return {(name, kind): total(own, kind) for (name, kind), own in of.items()}


def table(updates: pd.DataFrame, by: list[str], n: int = 2000, seed: int = 0) -> pd.DataFrame:
    """Return gains in per cent with 95 % intervals, a line per group of runs, method and kind of weights.

    Args:
        updates: the lines of ``updates.csv`` of several runs, with their id as "run" and the columns of ``by``.
        by: what tells groups of runs apart, such as task and optimizer.
        n: how many draws.
        seed: of the resampling.

    Returns:
        the columns of ``by``, method, weights, gain with low and high, p of no difference (two-sided, not corrected),
        runs, and spread: the median over batches of the range of weights within a step, over their mean, in per cent.
    """
    lines = []
    for names, some in updates.groupby(by, sort=False):
        spreads = some[some["weights"] == "own"].groupby("method")["spread"].median()
        for (method, kind), draws in relative_gains(some, n, seed).items():
            gain, low, high = (100 * value for value in draws.interval())
            line = {"method": method, "weights": kind, "gain": gain, "low": low, "high": high, "p": draws.p}
            spread = 100 * spreads.get(method, np.nan) if kind == "own" else np.nan
            lines.append(dict(zip(by, names, strict=True)) | line | {"runs": some["run"].nunique(), "spread": spread})
    return pd.DataFrame(lines)


def gains_and_ceilings(table: pd.DataFrame, names: Mapping[str, str], across: str, down: str = "") -> Figure:
    """Return a figure of :func:`table`: what each method's weights gain, within what any weights of its range could.

    Args:
        table: with a panel per value of ``across`` and of ``down``.
        names: methods to show, in their order, and the names they go by.
        across: the column of the table for the columns of panels.
        down: likewise for rows of panels; one row without.
    """
    shown = table[table["method"].isin(list(names))]
    size = (9.0, 0.9 + 0.36 * len(names) * (shown[down].nunique() if down else 1))
    xlabel = "gain of one step over GRPO's, in per cent"
    figure, grid = panels(shown, across, down, xlabel=xlabel, sharey=True, figsize=size)
    for axis, rows in grid:
        gains = rows.pivot(index="method", columns="weights", values="gain").reindex([*names])
        for kind, colour, which in (("ceiling", "0.9", "same"), ("halves", "0.75", "other")):
            label = f"best weights, {which} questions"
            axis.barh(gains.index, gains[kind].clip(lower=0), height=0.62, color=colour, zorder=1, label=label)
        own = rows[rows["weights"] == "own"]
        axis.hlines(own["method"], own["low"], own["high"], color=PALETTE[0], linewidth=2, zorder=3)
        look: dict[str, Any] = {"color": PALETTE[0], "markeredgecolor": "white", "label": "the method's weights"}
        axis.plot(own["gain"], own["method"], "o", zorder=4, **look)
        line_per_name(axis, names, 0)
    legend_above(figure)
    return figure
