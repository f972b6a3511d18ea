"""Figures of notebooks: one style, and each saved beside the data that it draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import cycle, product
from math import nan
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gcpo.reports.tables import write_table

PALETTE = sns.color_palette("colorblind", 7)
# Every series is told apart without its colour too: by marker, line or hatch.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)))
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo")
Kind = Literal["points", "joined", "band"]  # how estimates and their intervals are drawn
BOX = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}  # behind a number on a mark
# Panels of the paper's four measures, and what their axes say.
UNITS = {"token_entropy": "entropy (nats)", "se": "SE (nats)", "cd": "CD", "bot": "BoT"}


# --- style and files --------------------------------------------------------------------------------------------------


def set_style() -> None:
    """Set the style of figures (colour-blind palette, lines that survive greyscale, small files) and of tables."""
    sns.set_theme(style="whitegrid", palette=PALETTE)
    plt.style.use(Path(__file__).with_suffix(".mplstyle"))
    plt.rc("axes", prop_cycle=cycler(color=PALETTE) + cycler(linestyle=LINES))
    pd.set_option("display.max_colwidth", None, "display.width", 120, "display.max_rows", 100)


def save(figure: Figure, data: pd.DataFrame, folder: Path | None, name: str, source: str | None = None) -> None:
    """Write `name`.png and, in `name`.csv, the data it draws; arguments as in `write_table`.

    Where there is a source the figure says it below its lower edge, also where it is shown and nothing is written.
    """
    if source is not None:
        # Outside the canvas, where nothing else is drawn; a tight bounding box, as notebooks have it, takes it in.
        figure.text(1, -0.01, f"records: {source}", ha="right", va="top", color="0.4", fontsize=8)
    write_table(data, folder, name, source)
    if folder is not None:
        figure.savefig(folder / f"{name}.png", bbox_inches="tight", metadata={"Software": None})


# --- panels and series ------------------------------------------------------------------------------------------------


def panels(
    table: pd.DataFrame, across: str, down: str = "", names: Mapping[Any, str] | None = None, **settings: Any
) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]]]:
    """Return a figure with a panel per value of a column, in order of appearance, and each panel's axes and rows.

    Args:
        table: what is drawn.
        across: the column whose values have a column of panels each.
        down: likewise for rows of panels; "" for one row.
        names: what titles call a value; itself where there is no name.
        settings: of ``plt.subplots``; xlabel and ylabel are those of all panels.
    """
    columns, rows = list(table[across].unique()) or [""], list(table[down].unique()) if down else [""]
    xlabel, ylabel, called = settings.pop("xlabel", ""), settings.pop("ylabel", ""), names or {}
    figure, axes = plt.subplots(len(rows) or 1, len(columns), squeeze=False, **settings)
    shown = []
    for (row, column), axis in zip(product(rows or [""], columns), axes.flat, strict=True):
        own = table[(table[across] == column) & ((table[down] == row) if down else True)]
        axis.set(title=", ".join(filter(None, (str(called.get(value, value)) for value in (column, row)))))
        shown.append((axis, own))
    figure.supxlabel(xlabel, fontsize="medium")
    figure.supylabel(ylabel, fontsize="medium")
    return figure, shown


def legend_above(figure: Figure, ncols: int = 4) -> None:
    """Put one legend above all panels, with each name once, in place of the panels' own."""
    shown: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
        if legend := axis.get_legend():
            legend.remove()
    figure.legend(shown.values(), shown.keys(), loc="outside upper center", ncols=ncols)


def looks() -> Iterator[dict[str, Any]]:
    """Yield the look of each series, one after the other."""
    for colour, marker, line in zip(cycle(PALETTE), cycle(MARKERS), cycle(LINES), strict=False):
        yield {"color": colour, "marker": marker, "linestyle": line}


def estimates(data: pd.DataFrame, x: str, y: str, hue: str, axes: Axes, kind: Kind = "points") -> Axes:
    """Draw estimates with their intervals: as points, points joined to a trend, or a line with a band.

    `x`, `y` and `hue` are columns of `data`, as in seaborn, and the intervals' ends its columns low and high. A numeric
    `x` stays where it is; any other is a category, in order of appearance, with the series of `hue` side by side, but
    for bands; "" draws one series. Returns the axes, labelled with column names: replace them by words and units.
    """
    series = list(data.groupby(hue, sort=False)) if hue else [("", data)]
    numeric, categories = pd.api.types.is_numeric_dtype(data[x]), list(data[x].unique())
    if not numeric:
        axes.set_xticks(range(len(categories)), [str(category) for category in categories])
        axes.grid(False, axis="x")
    apart = 0 if kind == "band" else 0.7
    for index, ((name, rows), look) in enumerate(zip(series, looks(), strict=False)):
        shift = (index - (len(series) - 1) / 2) * apart / len(series)
        place = rows[x] if numeric else rows[x].map(categories.index) + shift
        if kind == "band":
            axes.fill_between(place, rows["low"], rows["high"], color=look["color"], alpha=0.18, linewidth=0)
        else:
            axes.vlines(place, rows["low"], rows["high"], color=look["color"], linewidth=1.8, zorder=2)
            look |= {"zorder": 3, "linewidth": 1} | ({"linestyle": ""} if kind == "points" else {})
        axes.plot(place, rows[y], label=name or None, markeredgecolor="white", **look)
    axes.set(xlabel=x, ylabel=y)
    if hue and series:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)  # above the data, where it hides none
    return axes


def trends(table: pd.DataFrame, x: str, y: str, hue: str, kind: Kind = "joined", **settings: Any) -> Figure:
    """Draw estimates and their intervals as panels, a panel per task unless told otherwise.

    Args:
        table: a row per estimate, with low and high.
        x: the column of the x axis, such as a setting.
        y: the column of the estimates.
        hue: the column that tells the series apart.
        kind: as in :func:`estimates`; all but bands are about differences, and have a line at 0.
        settings: of :func:`panels`.
    """
    figure, grid = panels(table, **{"across": "task", "figsize": (9.6, 3.4), "xlabel": x, **settings})
    for axis, rows in grid:
        estimates(rows, x, y, hue, axis, kind).set(xlabel="", ylabel="")
        if kind != "band":
            axis.axhline(0, color="black", linewidth=0.8)
    legend_above(figure)
    return figure


# --- training ---------------------------------------------------------------------------------------------------------


def training_curves(metrics: pd.DataFrame, reward_range: tuple[float, float]) -> Figure:
    """Reward per step, and below it the mean weight with its range over groups where the method has weights."""
    weighted, (low, high) = "gcpo/weight" in metrics, reward_range
    figure, axes = plt.subplots(1 + weighted, 1, sharex=True, squeeze=False, figsize=(6.4, 2.6 + 1.8 * weighted))
    top, below = axes[0, 0], axes[-1, 0]
    top.plot(metrics["step"], metrics["reward"], color=PALETTE[0])
    top.set(ylabel=f"mean reward, {low:g} to {high:g}", ylim=(low, high))
    if weighted:
        weights = metrics.rename(columns={"gcpo/weight_min": "low", "gcpo/weight_max": "high"})
        estimates(weights, "step", "gcpo/weight", "", below, "band")
        below.axhline(1, color="black", linewidth=0.8, linestyle=":")
        below.set(ylabel="weight of a group")
    below.set(xlabel="step")
    return figure


def along_training(
    table: pd.DataFrame, value: str, names: Mapping[str, str], banded: int | None = None, **settings: Any
) -> Figure:
    """Draw a column along training: a line per label, its mean over seeds, with a band from lowest to highest seed.

    Args:
        table: task, label, seed, step and the column; and the column of ``down`` where that is among the settings.
        value: the column.
        names: label -> what the legend calls it, in order.
        banded: how many labels have a band, from the first; None for all.
        settings: as in :func:`trends`.
    """
    keys = ["task", *filter(None, [settings.get("down")]), "label", "step"]
    lines: Any = table[table["label"].isin(list(names))].groupby(keys, sort=False)[value]
    lines = lines.agg(**{value: "mean", "low": "min", "high": "max"}).reset_index()
    lines.loc[~lines["label"].isin(list(names)[:banded]), ["low", "high"]] = nan
    lines = lines.sort_values("label", key=lambda labels: labels.map([*names].index), kind="stable")
    return trends(lines.replace({"label": names}), "step", value, "label", kind="band", **settings)


# --- a line per name --------------------------------------------------------------------------------------------------


def line_per_name(axis: Axes, names: Mapping[str, str], reference: float, written: bool = True) -> None:
    """Give an axis a line per name from the top, ``written`` out or not, and an upright line at ``reference``."""
    axis.axvline(reference, color="black", linewidth=0.8)
    axis.set_yticks(range(len(names)), [name if written else "" for name in names.values()], fontsize="small")
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(visible=False, axis="y")


def forest(
    table: pd.DataFrame, names: Mapping[str, str], reach: float | Mapping[str, float], rows: str | None = None
) -> Figure:
    """Differences in points with their intervals, a line per label: a panel per task, and per value of `rows`.

    Args:
        table: task, label, difference, low, high, and gaps (the difference of each seed); lines without a difference
            are not drawn.
        names: label -> what the axis calls it, in order from the top.
        reach: the axis goes from -reach to reach, or from that of each task; what lies beyond is an arrow at the edge
            with its value.
        rows: a column whose values stand one below the other.
    """
    drawn = table[table["difference"].notna() & table["label"].isin(list(names))]
    drawn = drawn.assign(block="" if rows is None else drawn[rows])
    labels = {block: {*part["label"]} for block, part in drawn.groupby("block", sort=False)}
    heights = [0.26 * len(some) + 0.5 for some in labels.values()] or [0.5]
    settings: dict[str, Any] = {"figsize": (9.6, 0.6 + sum(heights)), "height_ratios": heights, "sharex": "col"}
    figure, grid = panels(drawn, "task", "block", xlabel="difference, points", **settings)
    for axis, part in grid:
        if part.empty:
            axis.set(title="")
            axis.axis("off")
            continue
        task, block = part[["task", "block"]].iloc[0]
        listed = {label: name for label, name in names.items() if label in labels[block]}
        draw_differences(axis, part, [*listed], reach[task] if isinstance(reach, Mapping) else reach)
        line_per_name(axis, listed, 0, written=task == drawn["task"].iloc[0])
    return figure


def draw_differences(axis: Axes, rows: pd.DataFrame, labels: list[str], reach: float) -> None:
    """Draw differences, each at its label's place, on an axis from -reach to reach."""
    axis.set_xlim(-reach, reach)
    for row in rows.to_dict("records"):
        place, estimate = labels.index(row["label"]), row["difference"]
        axis.plot(row["gaps"], [place] * len(row["gaps"]), "o", color="0.7", markersize=3, zorder=1)
        axis.hlines(place, row["low"], row["high"], color=PALETTE[0], linewidth=2, zorder=2)
        if abs(estimate) < reach:
            axis.plot(estimate, place, "s", color=PALETTE[0], markeredgecolor="white", zorder=3)
            continue
        side, marker, ha = (1, ">", "right") if estimate > 0 else (-1, "<", "left")
        axis.plot(side * reach, place, marker, color=PALETTE[3], clip_on=False, zorder=4)
        # In a box, as the interval may reach into the panel, behind the value.
        look: dict[str, Any] = {"textcoords": "offset points", "ha": ha, "va": "center", "fontsize": 7, "bbox": BOX}
        axis.annotate(f"{estimate:+.1f}", (side * reach, place), xytext=(-7 * side, 0), **look)


# --- gradients --------------------------------------------------------------------------------------------------------


def variance_against_measures(queries: pd.DataFrame) -> Figure:
    """V(q) against each of the paper's four measures, a row per task and a dot per query and rollout seed.

    V is in squared gradient units, on an axis that all panels share: logarithmic above the 5 % quantile of what is
    above 0 (a dashed line), and linear below, so that 0 has a place.
    """
    positive = queries.loc[queries["V"] > 0, "V"]
    threshold = float(positive.quantile(0.05)) if len(positive) else 1.0
    table = queries.melt(["task", "V"], [*UNITS], "measure", "u")
    size, ylabel = (9.2, 2.6 * table["task"].nunique()), "V(q), squared gradient units"
    figure, grid = panels(table, "measure", "task", UNITS, ylabel=ylabel, sharey=True, figsize=size)
    for axis, rows in grid:
        axis.plot(rows["u"], rows["V"], "o", markersize=3, alpha=0.35, markeredgewidth=0)
        axis.set_yscale("symlog", linthresh=threshold)
        axis.axhline(threshold, color="0.4", linewidth=0.8, linestyle="--")
    return figure


def pairs_of_rollouts(pairs: pd.DataFrame, most: int = 3000, near: float | None = None) -> Figure:
    """Distance of gradients against distance of embeddings, a panel per task and a dot per pair within a group.

    At most ``most`` pairs are drawn of a task, evenly over the table; the line is the median of all pairs in ten bins
    of equal counts, at the median of each bin. ``near`` is marked: up to where answers count as near ones.
    """
    columns = ["embedding_distance", "gradient_distance"]
    xlabel, ylabel = "1 − cosine of the embeddings (0 to 2)", r"$\|g_i - g_j\|$ (gradient units)"
    figure, grid = panels(pairs, "task", xlabel=xlabel, ylabel=ylabel, figsize=(4.6 * pairs["task"].nunique(), 3.4))
    for axis, rows in grid:
        shown = rows.iloc[:: max(1, -(-len(rows) // most))]
        for same, label in ((False, "two clusters"), (True, "one cluster")):
            look = {"color": PALETTE[same], "markersize": 3, "alpha": 0.35, "markeredgewidth": 0, "label": label}
            points = shown.loc[shown["same_cluster"].astype(bool) == same, columns].to_numpy().T
            axis.plot(*points, MARKERS[same], **look)
        bins = rows.groupby(pd.qcut(rows[columns[0]], 10, duplicates="drop"), observed=True)[columns]
        axis.plot(*bins.median().to_numpy().T, color="black", linewidth=1.6, label="median")
        if near is not None:
            axis.axvline(near, color="0.4", linewidth=0.8, linestyle="--", label="near: left of it")
    legend_above(figure)
    return figure
