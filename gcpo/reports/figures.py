"""Figures of notebooks: one style, figures saved beside the data they draw, and verdict sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle, product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gcpo.reports.tables import write_table

PALETTE = sns.color_palette("colorblind", 7)
# Every series is told apart without its colour too: by marker, line or hatch.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)))
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo")
BOX = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}  # behind a number on a mark


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


def panels(
    across: Iterable[str], down: Iterable[str] = ("",), *, xlabel: str = "", ylabel: str = "", **settings: Any
) -> tuple[Figure, dict[tuple[str, str], Axes]]:
    """Return a figure with a panel per name in ``across`` and in ``down``, and their axes by (down, across), titled.

    Args:
        across: names of the columns of panels.
        down: names of the rows of panels.
        xlabel: of all panels, below them.
        ylabel: of all panels, beside them.
        settings: of ``plt.subplots``.
    """
    columns, rows = list(across) or [""], list(down) or [""]
    figure, axes = plt.subplots(len(rows), len(columns), squeeze=False, **settings)
    grid = dict(zip(product(rows, columns), axes.flat, strict=True))
    for (row, column), axis in grid.items():
        axis.set(title=", ".join(filter(None, (column, row))))
    figure.supxlabel(xlabel, fontsize="medium")
    figure.supylabel(ylabel, fontsize="medium")
    return figure, grid


def legend_above(figure: Figure, ncols: int = 4) -> None:
    """Put the legend of the first panel above all of them, in place of the panels' own."""
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=ncols)
    for axis in figure.axes:
        if legend := axis.get_legend():
            legend.remove()


def looks() -> Iterator[dict[str, Any]]:
    """Yield the look of each series, one after the other."""
    for colour, marker, line in zip(cycle(PALETTE), cycle(MARKERS), cycle(LINES), strict=False):
        yield {"color": colour, "marker": marker, "linestyle": line}


def points_with_intervals(
    data: pd.DataFrame,
    x: str,
    y: str,
    low: str,
    high: str,
    hue: str | None = None,
    ax: Axes | None = None,
    joined: bool = False,
) -> Axes:
    """Draw estimates as points, ``joined`` to a trend or not, and their intervals as lines; `x` to `hue` are columns of
    `data`, as in seaborn.

    A numeric `x` stays where it is; any other is a category, in order of appearance, with the series of `hue` side by
    side. Returns the axes (the current ones by default), labelled with column names: replace them by words and units.
    """
    axes = plt.gca() if ax is None else ax
    for name, rows, place, look in _series(data, x, hue, axes, apart=0.7):
        axes.vlines(place, rows[low], rows[high], color=look["color"], linewidth=1.8, zorder=2)
        axes.plot(place, rows[y], label=name, zorder=3, linewidth=1, **(look if joined else look | {"linestyle": ""}))
    return _labelled(axes, x, y, hue)


def lines_with_bands(
    data: pd.DataFrame, x: str, y: str, low: str, high: str, hue: str | None = None, ax: Axes | None = None
) -> Axes:
    """Draw a trend of estimates as a line and their intervals as a band; arguments as in `points_with_intervals`.

    Categories are evenly spaced, and the series of `hue` share their places.
    """
    axes = plt.gca() if ax is None else ax
    for name, rows, place, look in _series(data, x, hue, axes):
        axes.fill_between(place, rows[low], rows[high], color=look["color"], alpha=0.18, linewidth=0)
        axes.plot(place, rows[y], label=name, **look)
    return _labelled(axes, x, y, hue)


def _series(
    data: pd.DataFrame, x: str, hue: str | None, axes: Axes, apart: float = 0
) -> Iterator[tuple[Any, pd.DataFrame, pd.Series, dict[str, Any]]]:
    """Yield name, rows, places on the x axis and look of each series; ``apart`` is the width that series of a category
    share."""
    series = [(None, data)] if hue is None else list(data.groupby(hue, sort=False))
    numeric, categories = pd.api.types.is_numeric_dtype(data[x]), list(data[x].unique())
    if not numeric:
        axes.set_xticks(range(len(categories)), [str(category) for category in categories])
        axes.grid(False, axis="x")
    for index, ((name, rows), look) in enumerate(zip(series, looks(), strict=False)):
        shift = (index - (len(series) - 1) / 2) * apart / len(series)
        place = rows[x] if numeric else rows[x].map(categories.index) + shift
        yield name, rows, place, {**look, "markeredgecolor": "white"}


def _labelled(axes: Axes, x: str, y: str, hue: str | None) -> Axes:
    axes.set(xlabel=x, ylabel=y)
    if hue is not None:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)  # above the data, where it hides none
    return axes


def training_curves(metrics: pd.DataFrame, reward_range: tuple[float, float]) -> Figure:
    """Reward per step, and below it the mean weight with its range over groups where the method has weights."""
    weighted, (low, high) = "gcpo/weight" in metrics, reward_range
    figure, axes = plt.subplots(1 + weighted, 1, sharex=True, squeeze=False, figsize=(6.4, 2.6 + 1.8 * weighted))
    top, below = axes[0, 0], axes[-1, 0]
    top.plot(metrics["step"], metrics["reward"], color=PALETTE[0])
    top.set(ylabel=f"mean reward, {low:g} to {high:g}", ylim=(low, high))
    if weighted:
        lowest, highest = metrics["gcpo/weight_min"], metrics["gcpo/weight_max"]
        below.fill_between(metrics["step"], lowest, highest, color=PALETTE[1], alpha=0.25, lw=0)
        below.plot(metrics["step"], metrics["gcpo/weight"], color=PALETTE[1])
        below.axhline(1, color="black", linewidth=0.8, linestyle=":")
        below.set(ylabel="weight of a group")
    below.set(xlabel="step")
    return figure


def forest(
    table: pd.DataFrame, names: Mapping[str, str], reach: float | Mapping[str, float], rows: str | None = None
) -> Figure:
    """Differences in points with their intervals, a line per label: a panel per task, and per value of `rows`.

    Args:
        table: task, label, difference, low, high, and gaps (the difference of each seed), as `evidence.differences`
            gives them; lines without a difference are not drawn.
        names: label -> what the axis calls it, in order from the top.
        reach: the axis goes from -reach to reach, or from that of each task; what lies beyond is an arrow at the edge
            with its value.
        rows: a column whose values stand one below the other.
    """
    drawn = table[table["difference"].notna() & table["label"].isin(list(names))]
    drawn = drawn.assign(block="" if rows is None else drawn[rows])
    tasks, blocks = list(drawn["task"].unique()) or [""], list(drawn["block"].unique()) or [""]
    present = set(zip(drawn["block"], drawn["label"], strict=True))
    labels = {block: [name for name in names if (block, name) in present] for block in blocks}
    heights = [0.26 * len(labels[block]) + 0.5 for block in blocks]
    settings: dict[str, Any] = {"figsize": (9.6, 0.6 + sum(heights)), "height_ratios": heights, "sharex": "col"}
    figure, grid = panels(tasks, blocks, xlabel="difference, points", **settings)
    for (block, task), axis in grid.items():
        part = drawn[(drawn["block"] == block) & (drawn["task"] == task)].set_index("label")
        if part.empty:
            axis.set(title="")
            axis.axis("off")
        else:
            _interval_lines(axis, part, labels[block], reach[task] if isinstance(reach, Mapping) else reach)
            _line_per_label(axis, labels[block], names if task == tasks[0] else {}, reference=0)
    return figure


def _line_per_label(axis: Axes, labels: list[str], names: Mapping[str, str], reference: float) -> None:
    """A line per label from the top, written out where there are names, and an upright line at ``reference``."""
    axis.axvline(reference, color="black", linewidth=0.8)
    axis.set_yticks(range(len(labels)), [names.get(label, "") for label in labels], fontsize="small")
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.grid(visible=False, axis="y")


def _interval_lines(axis: Axes, rows: pd.DataFrame, labels: list[str], reach: float) -> None:
    """Draw rows (indexed by label), each at its label's place, on an axis from -reach to reach."""
    axis.set_xlim(-reach, reach)
    for label, row in rows.iterrows():
        place, estimate = labels.index(str(label)), row["difference"]
        axis.plot(row["gaps"], [place] * len(row["gaps"]), "o", color="0.7", markersize=3, zorder=1)
        low, high = min(max(row["low"], -reach), reach), max(min(row["high"], reach), -reach)
        axis.hlines(place, low, high, color=PALETTE[0], linewidth=2, zorder=2)
        if abs(estimate) < reach:
            axis.plot(estimate, place, "s", color=PALETTE[0], markeredgecolor="white", zorder=3)
            continue
        side, marker, ha = (1, ">", "right") if estimate > 0 else (-1, "<", "left")
        axis.plot(side * reach, place, marker, color=PALETTE[3], clip_on=False, zorder=4)
        # In a box, as the interval may reach into the panel, behind the value.
        look: dict[str, Any] = {"textcoords": "offset points", "ha": ha, "va": "center", "fontsize": 7, "bbox": BOX}
        axis.annotate(f"{estimate:+.1f}", (side * reach, place), xytext=(-7 * side, 0), **look)


def modulation(strength: pd.DataFrame, table: pd.DataFrame, names: Mapping[str, str], reach: float) -> Figure:
    """Draw how far each method's weights can move an advantage, how far they did per task, and the method's gain.

    Args:
        strength: a row per task and label: lowest and highest (what the formula allows), smallest and largest (what
            was logged); labels without weights have none.
        table: as in `forest`, and paper: the paper's own difference, nan where it prints none.
        names: label -> what the axis calls it, in order from the top.
        reach: of the differences, as in `forest`.
    """
    labels = [label for label in names if label in set(table["label"])]
    tasks = list(table["task"].unique())
    size = (9.6, 1.3 + 0.42 * len(labels))
    figure, axes = plt.subplots(1, 1 + len(tasks), figsize=size, width_ratios=[1.3] + [1] * len(tasks))
    for place, label in enumerate(labels):
        rows = strength[strength["label"] == label]
        if rows.empty:
            beside = axes[0].get_yaxis_transform()
            axes[0].text(0.03, place, "changes rewards", transform=beside, va="center", fontsize=7, color="0.4")
            continue
        axes[0].hlines(place, rows["lowest"].min(), rows["highest"].max(), color="0.75", linewidth=9)
        for task, part in rows.groupby("task"):
            at = tasks.index(task)
            middle = place + 0.22 * (at - (len(tasks) - 1) / 2)  # the first task above the second
            axes[0].hlines(middle, part["smallest"].min(), part["largest"].max(), color=PALETTE[at + 1], linewidth=3)
    logged = [Line2D([], [], color=PALETTE[at + 1], linewidth=3, label=task) for at, task in enumerate(tasks)]
    theirs: list[Any] = []
    for axis, task in zip(axes[1:], tasks, strict=True):
        drawn = table[(table["task"] == task) & table["difference"].notna()].set_index("label")
        drawn = drawn.loc[drawn.index.isin(labels)]
        _interval_lines(axis, drawn, labels, reach)
        if drawn["paper"].notna().any():
            places = [labels.index(label) + 0.3 for label in drawn.index]  # below ours, whose value may stand there
            look: dict[str, Any] = {"color": PALETTE[3], "markerfacecolor": "white", "label": "the paper's"}
            theirs += axis.plot(drawn["paper"], places, "D", **look)
        axis.set(title=task, xlabel="minus GRPO, points")
    figure.legend(handles=logged + theirs[:1], loc="outside upper right", ncols=3)
    axes[0].set(title="the weight of a group", xlabel="factor on its advantages")
    _line_per_label(axes[0], labels, names, reference=1)
    for axis in axes[1:]:
        _line_per_label(axis, labels, {}, reference=0)
    return figure


def over_settings(
    table: pd.DataFrame,
    setting: str,
    hue: str,
    value: str = "difference",
    xlabel: str = "",
    ylabel: str = "difference, points",
    joined: bool = True,
    **settings: Any,
) -> Figure:
    """Estimates with their intervals over the values of a setting: a panel per task, a series per value of ``hue``.

    Args:
        table: task, low and high, and the columns that ``setting``, ``hue`` and ``value`` name.
        setting: the column of the x axis.
        hue: the column that tells the series apart.
        value: the column of the estimates.
        xlabel: label of the x axis, the column's name unless given.
        ylabel: label of the y axis.
        joined: whether the values are steps of one quantity, so that a line joins them.
        settings: of ``plt.subplots``.
    """
    figure, grid = panels(table["task"].unique(), ylabel=ylabel, **{"figsize": (9.6, 3.4), **settings})
    for (_, task), axis in grid.items():
        points_with_intervals(table[table["task"] == task], setting, value, "low", "high", hue, axis, joined)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set(xlabel=xlabel or setting, ylabel="")
    legend_above(figure)
    return figure


def validation_curves(scores: pd.DataFrame, names: Mapping[str, str]) -> Figure:
    """Held-out scores along training: a panel per task and decoding, a line per label.

    Args:
        scores: task, label, seed, step, decoding and score (per cent).
        names: label -> what the legend calls it; the first has a band, from its lowest to its highest seed.
    """
    labels = {"xlabel": "step", "ylabel": "validation split, %"}
    figure, grid = panels(scores["task"].unique(), ["sampled", "greedy"], **labels, sharex="col", figsize=(9.6, 5.2))
    for (decoding, task), axis in grid.items():
        part = scores[(scores["task"] == task) & (scores["decoding"] == decoding)]
        _means_by_step(axis, part, "score", names, banded=list(names)[:1], markersize=4)
    figure.axes[0].legend(fontsize="x-small")
    return figure


def entropy_curves(table: pd.DataFrame, names: Mapping[str, str]) -> Figure:
    """Policy entropy along training: a panel per task, a line per label and its band from lowest to highest seed.

    Args:
        table: task, label, seed, step and value (nats per token).
        names: label -> what the legend calls it.
    """
    labels = {"xlabel": "step", "ylabel": "policy entropy, nats per token"}
    figure, grid = panels(table["task"].unique(), **labels, figsize=(9.6, 3.4))
    for (_, task), axis in grid.items():
        _means_by_step(axis, table[table["task"] == task], "value", names, banded=names, marker="")
    legend_above(figure, ncols=len(names))
    return figure


def _means_by_step(
    axis: Axes, rows: pd.DataFrame, column: str, names: Mapping[str, str], banded: Iterable[str], **look: Any
) -> None:
    """A line per label: the mean of a column over seeds at each step; of some the band from lowest to highest seed."""
    banded = set(banded)
    for (label, name), own in zip(names.items(), looks(), strict=False):
        steps = rows[rows["label"] == label].groupby("step")[column]
        if label in banded:
            low, high = steps.min(), steps.max()
            axis.fill_between(low.index.to_numpy(), low, high, color=own["color"], alpha=0.2, lw=0)
        axis.plot(steps.mean(), label=name, **{**own, **look})


def sweep_curves(table: pd.DataFrame, chosen: Mapping[str, float]) -> Figure:
    """Validation scores at the end of training over the rate: a panel per task and decoding, a line per batch size.

    Args:
        table: as `sweep.summary` gives it; error bars are standard deviations over seeds.
        chosen: task -> the profile's own rate, a vertical line.
    """
    labels = {"xlabel": "learning rate", "ylabel": "validation split after training, %"}
    tasks, decodings = table["task"].unique(), ["sampled", "greedy"]
    figure, grid = panels(tasks, decodings, **labels, sharex="col", figsize=(9.6, 5.4))
    for (decoding, task), axis in grid.items():
        own = table[table["task"] == task]
        for (prompts, part), look in zip(own.groupby("prompts_per_step"), looks(), strict=False):
            spread, label = part[f"{decoding}_std"].fillna(0), f"{prompts} prompts a step"
            axis.errorbar(part["learning_rate"], part[decoding], spread, label=label, capsize=3, **look)
        axis.axhline(own[f"start_{decoding}"].mean(), color="0.5", linestyle=":", label="before training")
        axis.axvline(chosen[task], color="black", linewidth=0.9, label="the profile's rate")
        axis.set(xscale="log")
        rates = sorted(own["learning_rate"].unique())
        axis.set_xticks(rates, [f"{rate:.0e}".replace("e-0", "e-") for rate in rates])
        axis.minorticks_off()
    legend_above(figure, ncols=5)
    return figure


def verdict_bars(counts: pd.DataFrame, by: str) -> Figure:
    """Draw the number of claims per verdict: one bar per row of :func:`gcpo.reports.ledger.counts`, a part per word."""
    words = [column for column in counts if column not in (by, "claims")]
    figure, axes = plt.subplots(figsize=(6.4, 0.9 + 0.45 * len(counts)))
    start = pd.Series(0, index=counts.index)
    narrow = 0.03 * counts["claims"].max()  # two numbers as near as that would stand on one another
    last = [-narrow] * len(counts)
    for word, colour, hatch in zip(words, PALETTE, HATCHES, strict=False):
        axes.barh(counts[by], counts[word], left=start, color=colour, hatch=hatch, edgecolor="white", label=word)
        for place, (left, count) in enumerate(zip(start, counts[word], strict=True)):
            if count:
                lower = 0.25 * (left + count / 2 - last[place] < narrow)
                axes.text(left + count / 2, place + lower, str(count), ha="center", va="center", fontsize=8, bbox=BOX)
                last[place] = -narrow if lower else left + count / 2
        start = start + counts[word]
    axes.invert_yaxis()
    axes.set(xlabel="claims", ylabel="")
    axes.grid(visible=False, axis="y")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(words), handlelength=1.2, columnspacing=1)
    return figure


def stated_gains(table: pd.DataFrame) -> Figure:
    """Gains computed from printed scores minus stated gains: a line per value of `where`, a dot per gain.

    Args:
        table: where, stated, computed, agrees (whether they are one but for rounding), and name, which is written
            beside the dots that do not agree.
    """
    kinds = list(table["where"].unique())
    figure, axes = plt.subplots(figsize=(9.6, 0.9 + 0.55 * len(kinds)))
    axes.axvline(0, color="black", linewidth=0.8)
    line = table["where"].map(kinds.index)
    place = table.groupby(["where", "agrees"]).cumcount()
    alone = table.groupby(["where", "agrees"])["name"].transform("size") == 1
    spread = {True: 0.1 * (place % 5 - 2), False: (0.6 * (place % 2) - 0.3) * ~alone}  # another number: above, below
    for agrees, colour, marker in ((True, PALETTE[0], MARKERS[0]), (False, PALETTE[3], MARKERS[3])):
        those = table["agrees"] == agrees
        gaps, heights = (table["computed"] - table["stated"])[those], (line + spread[agrees])[those]
        label = "the same but for rounding" if agrees else "another number"
        axes.plot(gaps, heights, marker, color=colour, alpha=0.7, label=label)
        for name, *at in zip(table.loc[those, "name"], gaps, heights, strict=True) if not agrees else ():
            away = 8 if at[0] > 0 else -8  # from the line and the dots on it
            look: dict[str, Any] = {"ha": "left" if away > 0 else "right", "va": "center", "fontsize": 8}
            axes.annotate(name, (at[0], at[1]), xytext=(away, 0), textcoords="offset points", **look)
    labels = [f"{kind} ({(table['where'] == kind).sum()})" for kind in kinds]
    axes.set_yticks(range(len(kinds)), labels, fontsize="small")
    axes.set(xlabel="computed minus stated (points, or per cent where the paper says per cent)", ylabel="")
    axes.margins(x=0.2)
    axes.set_ylim(len(kinds) - 0.4, -0.7)
    axes.grid(visible=False, axis="y")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure
