"""How notebooks show results: one figure style, figures saved beside the data they draw, and verdict sentences."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PALETTE = sns.color_palette("colorblind", 7)
# Every series is told apart without its colour too: by marker, line or hatch.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)))
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo")


def set_style() -> None:
    """Set the style of figures (colour-blind palette, lines that survive greyscale, small files) and of tables."""
    settings = {
        "axes.prop_cycle": cycler(color=PALETTE) + cycler(linestyle=LINES),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.constrained_layout.use": True,
        "figure.dpi": 110,
        "figure.figsize": (6.4, 3.6),
        "hatch.linewidth": 0.6,
        "legend.fontsize": "small",
        "legend.frameon": False,
        "savefig.dpi": 110,
        "svg.hashsalt": "gcpo",  # otherwise the ids inside an SVG differ at every run
    }
    sns.set_theme(style="whitegrid", palette=PALETTE, rc=settings)
    pd.set_option("display.max_colwidth", None, "display.width", 120)


def save(figure: Figure, data: pd.DataFrame, folder: Path, name: str) -> None:
    """Write `name`.png and, in `name`.csv, the data it draws (6 significant digits); makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", metadata={"Software": None})
    data.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")


def points_with_intervals(
    data: pd.DataFrame, x: str, y: str, low: str, high: str, hue: str | None = None, ax: Axes | None = None
) -> Axes:
    """Draw estimates as points and their intervals as lines; `x` to `hue` are columns of `data`, as in seaborn.

    A numeric `x` stays where it is; any other is a category, in order of appearance, with the series of `hue` side by
    side. Returns the axes (the current ones by default), labelled with column names: replace them by words and units.
    """
    axes = plt.gca() if ax is None else ax
    looks = cycle(zip(PALETTE, MARKERS, strict=True))
    for (name, rows, place, _), (colour, marker) in zip(_series(data, x, hue, axes), looks, strict=False):
        axes.vlines(place, rows[low], rows[high], color=colour, linewidth=1.8, zorder=2)
        axes.plot(place, rows[y], marker, color=colour, markeredgecolor="white", label=name, zorder=3)
    return _finish(axes, x, y, hue)


def bars_with_intervals(
    data: pd.DataFrame, x: str, y: str, low: str, high: str, hue: str | None = None, ax: Axes | None = None
) -> Axes:
    """Draw estimates as hatched bars from 0 and their intervals as lines; arguments as in `points_with_intervals`."""
    axes = plt.gca() if ax is None else ax
    looks = cycle(zip(PALETTE, HATCHES, strict=True))
    for (name, rows, place, width), (colour, hatch) in zip(_series(data, x, hue, axes), looks, strict=False):
        axes.bar(place, rows[y], width, color=colour, hatch=hatch, edgecolor="white", label=name, zorder=2)
        axes.vlines(place, rows[low], rows[high], color="black", linewidth=1.4, zorder=3)
    return _finish(axes, x, y, hue)


def _series(data: pd.DataFrame, x: str, hue: str | None, axes: Axes) -> Iterator[tuple[Any, pd.DataFrame, Any, float]]:
    """Per series of `hue`: its name, its rows, their places on the x axis, and the width of a bar."""
    groups = [(None, data)] if hue is None else list(data.groupby(hue, sort=False))
    numeric = pd.api.types.is_numeric_dtype(data[x])
    categories = [] if numeric else list(data[x].unique())
    if not numeric:
        axes.set_xticks(range(len(categories)), [str(category) for category in categories])
        axes.grid(False, axis="x")
    width = 0.7 / len(groups)
    for index, (name, rows) in enumerate(groups):
        shift = (index - (len(groups) - 1) / 2) * width
        yield name, rows, rows[x] if numeric else rows[x].map(categories.index) + shift, width


def _finish(axes: Axes, x: str, y: str, hue: str | None) -> Axes:
    axes.set(xlabel=x, ylabel=y)
    if hue is not None:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)  # above the data, where it hides none
    return axes


def training_curves(metrics: pd.DataFrame, reward_range: tuple[float, float]) -> Figure:
    """Reward per step, and below it the mean weight with its range over groups where the method has weights."""
    weighted = "gcpo/weight" in metrics
    figure, axes = plt.subplots(1 + weighted, 1, sharex=True, squeeze=False, figsize=(6.4, 2.6 + 1.8 * weighted))
    top = axes[0, 0]
    top.plot(metrics["step"], metrics["reward"], color=PALETTE[0])
    low, high = reward_range
    top.set(ylabel=f"mean reward, {low:g} to {high:g}", ylim=(low, high))
    if weighted:
        below = axes[1, 0]
        below.fill_between(
            metrics["step"], metrics["gcpo/weight_min"], metrics["gcpo/weight_max"], color=PALETTE[1], alpha=0.25, lw=0
        )
        below.plot(metrics["step"], metrics["gcpo/weight"], color=PALETTE[1])
        below.axhline(1, color="black", linewidth=0.8, linestyle=":")
        below.set(ylabel="weight of a group")
    axes[-1, 0].set(xlabel="step")
    return figure


def measures_against_variance(queries: pd.DataFrame) -> Figure:
    """V(q) against each of the paper's four measures, a dot per query; V on a symmetric logarithmic axis."""
    names = {"token_entropy": "token entropy (nats)", "se": "SE (nats)", "cd": "CD", "bot": "BoT"}
    figure, axes = plt.subplots(1, 4, sharey=True, figsize=(9.2, 2.7))
    positive = queries.loc[queries["V"] > 0, "V"]
    for axis, (column, label) in zip(axes, names.items(), strict=True):
        axis.plot(queries[column], queries["V"], "o", markersize=3, alpha=0.5, markeredgewidth=0)
        axis.set(xlabel=label)
        axis.set_yscale("symlog", linthresh=positive.quantile(0.05) if len(positive) else 1.0)
    axes[0].set(ylabel="V(q), squared gradient units")
    return figure
