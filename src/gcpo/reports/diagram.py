"""The way of one rollout group, drawn: from answers to weights to advantages."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from gcpo.reports.figures import PALETTE

GREY, GEOMETRY, REWARD = "0.35", PALETTE[0], PALETTE[3]


def way_of_a_group() -> Figure:
    """What GCPO (with BoT) does to a group of answers, left to right, with the paper's equations; the group is made."""
    figure, axes = plt.subplots(figsize=(9.6, 3.9))
    axes.set(xlim=(0, 100), ylim=(3, 43))
    axes.axis("off")
    _box(axes, 6, 22, 10.5, 8, "a question $q$", GREY)
    answers = [("“in the garden”", 2), ("“the garden”", 2), ("“in the cellar”", 0), ("“a letter”", 0)]
    for line, (answer, reward) in enumerate(answers):
        height = 34 - 8 * line
        _arrow(axes, (11.3, 22), (15.5, height))
        _box(axes, 23, height, 15, 6, answer, GREY)
        axes.text(33, height, f"{reward}", color=REWARD, ha="center", va="center", fontsize=10)
    axes.text(23, 39.5, "$G$ answers", ha="center", fontsize=9)
    axes.text(33, 39.5, "rewards", color=REWARD, ha="center", fontsize=9)
    for height in (36, 22, 8):
        _arrow(axes, (35.5, height), (40, height))
    _box(axes, 49, 36, 17, 9, "as vectors $\\mu_i$, in\nclusters of one meaning", GEOMETRY)
    _arrow(axes, (58, 36), (60, 36))
    _box(
        axes,
        69,
        36,
        17,
        9,
        "how far apart?\n$\\omega_\\mathrm{geo} = 1 - \\alpha_G\\,\\mathrm{BoT}^2 \\leq 1$",
        GEOMETRY,
    )
    _box(
        axes,
        59,
        22,
        37,
        9,
        "how different in reward? (Eq. 11)\n$\\omega_\\mathrm{RD} = 1 + \\alpha_G\\,\\mathrm{RD} \\geq 1$",
        REWARD,
    )
    _box(axes, 59, 8, 37, 9, "GRPO's advantages (Eq. 1)\n$A_i = (r_i - \\bar r)\\,/\\,(s + \\varepsilon)$", GREY)
    for start, end in ((36, 26), (22, 22), (8, 18)):
        _arrow(axes, (78.2, start), (82, end))
    _box(
        axes,
        91,
        22,
        17.5,
        10,
        "$A_i \\cdot \\omega_\\mathrm{geo} \\cdot \\omega_\\mathrm{RD}$\none factor\nfor the whole group",
        "black",
    )
    return figure


def _box(axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: object) -> None:
    look: dict[str, Any] = {"boxstyle": "round,pad=0.02,rounding_size=1", "edgecolor": colour, "linewidth": 1.4}
    axes.add_patch(FancyBboxPatch((x - width / 2, y - height / 2), width, height, facecolor="white", **look))
    axes.text(x, y, text, ha="center", va="center", fontsize=9)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "0.5", "linewidth": 1})
