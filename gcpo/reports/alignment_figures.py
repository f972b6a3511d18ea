"""Figures of the alignment of uncertainty with gradients (GCPO, Figure 1, App. C and D)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from gcpo.reports.alignment import FOUR, MEASURES
from gcpo.reports.figures import MARKERS, PALETTE, legend_above, over_settings, panels, points_with_intervals

UNITS = {"token_entropy": "token entropy (nats)", "se": "SE (nats)", "cd": "CD", "bot": "BoT"}


def variance_against_measures(queries: Mapping[str, pd.DataFrame]) -> Figure:
    """V(q) against each of the paper's four measures, a row per task and a dot per query and rollout seed.

    V is in squared gradient units, on an axis that all panels share: logarithmic above the 5 % quantile of what is
    above 0 (a dashed line), and linear below, so that 0 has a place.
    """
    figure, axes = plt.subplots(len(queries), len(FOUR), figsize=(9.2, 2.6 * len(queries)), sharey=True, squeeze=False)
    every = pd.concat([table["V"] for table in queries.values()])
    threshold = every[every > 0].quantile(0.05) if (every > 0).any() else 1.0
    for row, (task, table) in zip(axes, queries.items(), strict=True):
        for axis, name in zip(row, FOUR, strict=True):
            axis.plot(table[name], table["V"], "o", markersize=3, alpha=0.35, markeredgewidth=0)
            axis.set_yscale("symlog", linthresh=threshold)
            axis.axhline(threshold, color="0.4", linewidth=0.8, linestyle="--")
            axis.set(xlabel=UNITS[name])
        row[0].set(ylabel=f"{task}: V(q),\nsquared gradient units")
        place: dict[str, Any] = {"transform": row[0].get_yaxis_transform(), "ha": "right", "va": "top"}
        row[0].text(0.98, threshold, "linear below", **place, fontsize=7, color="0.25")
    return figure


def four_panels(table: pd.DataFrame, gains: pd.DataFrame, reported: pd.DataFrame) -> Figure:
    """Figure 1 a-d with intervals.

    Args:
        table: :meth:`gcpo.reports.alignment.Alignment.table` with a column task.
        gains: the differences of panel (c), with a column task.
        reported: the paper's own correlations (task, measure as a column's name, value), drawn in panel (a).
    """
    figure, ((a, b), (c, d)) = plt.subplots(2, 2, figsize=(9.2, 6.2))
    paper = reported.assign(
        measure=reported["measure"].map(MEASURES), task="paper, " + reported["task"], estimate=reported["value"]
    )
    each = (
        (a, pd.concat([table[table["statistic"] == "spearman"], paper]), 0, "(a) rank correlation", "Spearman with V"),
        (b, table[table["statistic"] == "auc"], 0.5, "(b) finding the top 10 % by V", "AUC (0.5 is chance)"),
        (c, gains, 0, "(c) BoT minus the measure", "difference of Spearman"),
        (d, table[table["statistic"] == "heldout_spearman"], 0, "(d) held-out linear prediction", "Spearman, 5 folds"),
    )
    for axis, data, chance, title, label in each:
        points_with_intervals(data, "measure", "estimate", "low", "high", hue="task", ax=axis)
        axis.axhline(chance, color="black", linewidth=0.8, linestyle=":")
        axis.set(title=title, xlabel="", ylabel=label)
    legend_above(figure)
    return figure


def pairs_of_rollouts(pairs: Mapping[str, pd.DataFrame], most: int = 3000, near: float | None = None) -> Figure:
    """Distance of gradients against distance of embeddings, a panel per task and a dot per pair within a group.

    At most ``most`` pairs are drawn, evenly over the table; the line is the median of all pairs in ten bins of equal
    counts, at the median of each bin. ``near`` is marked: up to where answers count as near ones.
    """
    labels = {"xlabel": "1 − cosine of the embeddings (0 to 2)", "ylabel": r"$\|g_i - g_j\|$ (gradient units)"}
    figure, grid = panels([*pairs], **labels, figsize=(4.6 * len(pairs), 3.4))
    for (_, task), axis in grid.items():
        table = pairs[task]
        shown = table.iloc[:: max(1, -(-len(table) // most))]
        for same, label in ((False, "two clusters"), (True, "one cluster")):
            part = shown[shown["same_cluster"].astype(bool) == same]
            look = {"color": PALETTE[same], "markersize": 3, "alpha": 0.35, "markeredgewidth": 0, "label": label}
            axis.plot(part["embedding_distance"], part["gradient_distance"], MARKERS[same], **look)
        bins = table.groupby(pd.qcut(table["embedding_distance"], 10, duplicates="drop"), observed=True)
        middle = bins[["embedding_distance", "gradient_distance"]].median()
        axis.plot(*middle.to_numpy().T, color="black", linewidth=1.6, label="median")
        if near is not None:
            axis.axvline(near, color="0.4", linewidth=0.8, linestyle="--", label="near: left of it")
    legend_above(figure)
    return figure


def alignment_by(table: pd.DataFrame, by: str, xlabel: str) -> Figure:
    """Spearman with V of each measure at the values of a column, a panel per task; values are categories, and those of
    training are joined."""
    keys = ["task", by, "measure"]
    every = pd.MultiIndex.from_product([table[key].unique() for key in keys], names=keys)
    shown = table.set_index(keys).reindex(every).reset_index()  # a value that was not run keeps its place
    size = (4.6 * shown["task"].nunique(), 3.4)
    labels = {"xlabel": xlabel, "ylabel": "Spearman with V"}
    return over_settings(
        shown.astype({by: str}), by, "measure", "estimate", joined=by == "at_step", **labels, figsize=size, sharey=True
    )
