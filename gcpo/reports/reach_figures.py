"""Figures of what GCPO's weights can do on real answers (:mod:`gcpo.reports.real_answers`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from gcpo.reports.figures import LINES, MARKERS, PALETTE, legend_above, panels
from gcpo.weights import alpha_g

BAR: dict[str, Any] = {"linestyle": "-", "solid_capstyle": "butt"}
ALLOWED: dict[str, Any] = {"color": "0.85", "linewidth": 11, **BAR}
FAINTEST = 1e-3  # per cent; ranges below it stand there


def reached(table: pd.DataFrame, names: Mapping[str, str]) -> Figure:
    """Draw how far each factor can move an advantage: what its formula allows, what real answers reach, and the median.

    Args:
        table: a row per benchmark and factor: allowed, reached and median (per cent of an advantage; median is nan for
            a factor without one).
        names: benchmark -> what the axis calls it, in order from the top.
    """
    factors = list(table["factor"].unique())
    figure, axes = plt.subplots(figsize=(7.6, 0.9 + 0.75 * len(names)))
    for row in table.to_dict("records"):
        number = factors.index(row["factor"])
        place = list(names).index(row["benchmark"]) + 0.27 * (number - (len(factors) - 1) / 2)
        axes.plot([0, row["allowed"]], [place, place], **ALLOWED)
        axes.plot([0, row["reached"]], [place, place], color=PALETTE[number], linewidth=5, **BAR)
        axes.plot(row["median"], place, MARKERS[number], color="white", markeredgecolor="black", markersize=6)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), list(names.values()))
    axes.set(ylim=(len(names) - 0.5, -0.5), xlabel="change of a group's advantages, %")
    axes.grid(visible=False, axis="y")
    for number, factor in enumerate(factors):
        axes.plot(
            [], [], MARKERS[number] + "-", color=PALETTE[number], linewidth=5, markerfacecolor="white", label=factor
        )
    axes.plot([], [], label="allowed by the formula", **ALLOWED)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(factors) + 1)
    return figure


def on_the_curves(table: pd.DataFrame, names: Mapping[str, str], size: int, alpha: float) -> Figure:
    """Draw the weights of CD and BoT over CD, where every answer is its own cluster, and real groups on the curves.

    Args:
        table: benchmark, cd and bot (medians of groups), and filled: whether the marker is.
        names: benchmark -> what the legend calls it.
        size: G.
        alpha: the strength before it is divided by log G.
    """
    strength, cd = alpha_g(alpha, size), np.linspace(0, 1 - 1 / size, 200)
    figure, axes = plt.subplots(figsize=(7.2, 3.8))
    for number, (label, score) in enumerate((("weight of CD", cd), ("weight of BoT", (1 - np.sqrt(1 - cd)) / 2))):
        axes.plot(cd, 1 - strength * score**2, color=PALETTE[number], linestyle=LINES[number], label=label)
    for row in table.to_dict("records"):
        marker = MARKERS[list(names).index(row["benchmark"])]
        look: dict[str, Any] = {
            "color": "0.25",
            "markerfacecolor": "0.25" if row["filled"] else "white",
            "markersize": 7,
        }
        named = names[row["benchmark"]] if row["filled"] else None
        axes.plot(row["cd"], 1 - strength * row["cd"] ** 2, marker, label=named, **look)
        axes.plot(row["cd"], 1 - strength * row["bot"] ** 2, marker, **look)
    axes.set(xlabel="CD(q) of a group: 0 if all answers agree", ylabel="weight of the group", ylim=(0.8, 1.005))
    axes.legend(loc="lower left", ncols=2)
    return figure


def by_correct_answers(table: pd.DataFrame, names: Mapping[str, str], kinds: Mapping[str, str]) -> Figure:
    """Draw each factor's effect over the number of correct answers in a group: a column per benchmark.

    Args:
        table: benchmark, wrong, right, factor, and change with its low and high (per cent of an advantage).
        names: benchmark -> title of its column.
        kinds: kind of wrong answers -> title of its row.
    """
    settings: dict[str, Any] = {"sharex": True, "sharey": True, "figsize": (9.6, 4.6)}
    labels = {"xlabel": "correct answers in the group", "ylabel": "change of advantages, %"}
    figure, grid = panels(names, kinds, **labels, **settings)
    for (kind, benchmark), axis in grid.items():
        axis.set_title(names[benchmark] if kind == next(iter(kinds)) else "", fontsize="medium")
        part = table[(table["benchmark"] == benchmark) & (table["wrong"] == kind)]
        for number, (factor, line) in enumerate(part.groupby("factor", sort=False)):
            axis.fill_between(line["right"], line["low"], line["high"], color=PALETTE[number], alpha=0.25, linewidth=0)
            axis.plot(line["right"], line["change"], linestyle=LINES[number], color=PALETTE[number], label=factor)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_xticks([0, 8, 16])
    for kind in kinds:
        grid[kind, next(iter(names))].set_ylabel(kinds[kind], fontsize="small")
    legend_above(figure)
    return figure


def in_a_step(table: pd.DataFrame, names: Mapping[str, str], kinds: Mapping[str, str]) -> Figure:
    """Draw the range of weights within a step: a panel per kind of wrong answers, a line per benchmark and method.

    Args:
        table: benchmark, wrong, method, and q05, q50 and q95 of the range (per cent).
        names: benchmark -> what the axis calls it, in order from the top.
        kinds: kind of wrong answers -> title of its panel.
    """
    said = "highest minus lowest weight of a step, % of their mean"
    figure, grid = panels(kinds, xlabel=said, sharex=True, sharey=True, figsize=(9.6, 5.6))
    ends = ["q05", "q50", "q95"]
    table = table.assign(**table[ends].clip(lower=FAINTEST))
    methods = list(table["method"].unique())
    for (_, kind), axis in grid.items():
        for row in table[table["wrong"] == kind].to_dict("records"):
            number = methods.index(row["method"])
            place = list(names).index(row["benchmark"]) + 0.13 * (number - (len(methods) - 1) / 2)
            axis.plot([row["q05"], row["q95"]], [place, place], color=PALETTE[number], linestyle="-", linewidth=1.6)
            look: dict[str, Any] = {"color": PALETTE[number], "markeredgecolor": "white", "markersize": 7}
            named = row["method"] if row["benchmark"] == next(iter(names)) else None
            axis.plot(row["q50"], place, MARKERS[number], label=named, **look)
        axis.axvline(1, color="black", linewidth=1, linestyle="--")
        axis.set(xscale="log", title=kinds[kind], ylim=(len(names) - 0.5, -0.5))
        axis.set_xticks([FAINTEST, 0.01, 0.1, 1, 10, 100], ["≤ 0.001", "0.01", "0.1", "1", "10", "100"])
        axis.set_yticks(range(len(names)), list(names.values()))
        axis.grid(visible=False, axis="y")
    legend_above(figure, ncols=len(methods))
    return figure
