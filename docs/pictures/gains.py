"""Draw gains.png beside this file, and write gains.csv: what each method gained over GRPO in both worlds, from the
committed reference. Run this file after the reference has changed."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from gcpo import records
from gcpo.reports.figures import PALETTE, line_per_name, set_style
from gcpo.reports.report import BASE, Report
from gcpo.reports.tables import gcpo_means
from gcpo.reports.verdicts import compare

NAMES = {
    "gcpo_cd": "GCPO-CD",
    "gcpo_bot": "GCPO-BoT",
    "rd_only": "RD alone",
    "se": "SE (entropy)",
    "kle": "KLE (entropy)",
    "drop_half": "control: half of the\nquestions dropped",
}
PANELS = {"tinyqa": ("short answers", (-4.2, 8.2)), "tinymath": ("mathematics", (-13.5, 5.5))}
ALIKE = {"tinyqa": "narrativeqa"}  # the paper prints no plain GRPO on mathematics
FILE = Path(__file__).with_suffix(".csv")


def gains() -> pd.DataFrame:
    """Return task, label, difference from GRPO, low and high (points, mean over both worlds) and the paper's."""
    report = Report("world_a", "headline", reference=True, second="world_b")
    scores = records.gather(report.runs(), "eval", ["world", "task", "label", "seed"])
    parts = []
    for task, metric in report.metric.items():
        own = scores[(scores["task"] == task) & (scores["decoding"] == "sampled")]
        made = compare(own, metric, [(label, BASE) for label in NAMES]).reset_index()
        paper = gcpo_means(ALIKE[task]) if task in ALIKE else {}
        theirs = made["label"].map(paper) - paper.get(BASE, float("nan"))
        parts.append(made[["label", "estimate", "low", "high"]].assign(task=task, paper=theirs))
    return pd.concat(parts, ignore_index=True)


def picture(table: pd.DataFrame) -> Figure:
    """Draw a panel per task: ours as squares with intervals, the paper's as open diamonds."""
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.1), sharey=True, layout="constrained")
    places = {label: place for place, label in enumerate(NAMES)}
    for number, (axis, (task, (title, limits))) in enumerate(zip(axes, PANELS.items(), strict=True)):
        own = table[table["task"] == task]
        place = own["label"].map(places)
        errors = [own["estimate"] - own["low"], own["high"] - own["estimate"]]
        look = {"fmt": "s", "color": PALETTE[0], "markersize": 5, "elinewidth": 2}
        axis.errorbar(own["estimate"], place, xerr=errors, **look, label="ours, with 95 % interval")
        look = {"color": PALETTE[3], "markerfacecolor": "white", "markersize": 6, "linestyle": "none"}
        axis.plot(own["paper"], place, marker="D", **look, label="the paper's, on NarrativeQA")
        line_per_name(axis, NAMES, 0)
        axis.tick_params(labelleft=not number)
        axis.set(title=title, xlabel="score minus GRPO's, points", xlim=limits)
    handles = dict(sorted(zip(*axes[0].get_legend_handles_labels()[::-1], strict=True)))
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=2)
    return figure


def main() -> None:
    """Write both files."""
    set_style()
    table = gains()
    table.to_csv(FILE, index=False, float_format="%.6g")
    figure = picture(table)
    figure.savefig(FILE.with_suffix(".png"), bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
