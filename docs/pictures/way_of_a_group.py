"""Draw way_of_a_group.png beside this file: the way of one rollout group, from answers to weights to advantages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from gcpo.reports.figures import PALETTE, set_style

GREY, GEOMETRY, REWARD = "0.35", PALETTE[0], PALETTE[3]
ANSWERS = (("“in the garden”", 2), ("“the garden”", 2), ("“in the cellar”", 0), ("“a letter”", 0))  # and their rewards
GEO = r"$\omega_\mathrm{geo} = 1 - \alpha_G\,\mathrm{BoT}^2 \leq 1$"
RD = r"$\omega_\mathrm{RD} = 1 + \alpha_G\,\mathrm{RD} \geq 1$"
BOTH = r"$A_i \cdot \omega_\mathrm{geo} \cdot \omega_\mathrm{RD}$"
GRPO = r"$A_i = (r_i - \bar r)\,/\,(s + \varepsilon)$"
BOXES = (  # centre, size, colour, text
    (6, 22, 10.5, 8, GREY, "a question $q$"),
    (49, 36, 17, 9, GEOMETRY, "as vectors $\\mu_i$, in\nclusters of one meaning"),
    (69, 36, 17, 9, GEOMETRY, f"how far apart?\n{GEO}"),
    (59, 22, 37, 9, REWARD, f"how different in reward? (Eq. 11)\n{RD}"),
    (59, 8, 37, 9, GREY, f"GRPO's advantages (Eq. 1)\n{GRPO}"),
    (91, 22, 17.5, 10, "black", f"{BOTH}\none factor\nfor the whole group"),
)


def way_of_a_group() -> Figure:
    """Draw the steps of GCPO (with BoT) on a made-up group of answers, with the paper's equations."""
    figure, axes = plt.subplots(figsize=(9.6, 3.9))
    axes.set(xlim=(0, 100), ylim=(3, 43))
    axes.axis("off")
    for x, y, width, height, colour, text in BOXES:
        _box(axes, x, y, width, height, text, colour)
    for line, (answer, reward) in enumerate(ANSWERS):
        height = 34 - 8 * line
        _arrow(axes, (11.3, 22), (15.5, height))
        _box(axes, 23, height, 15, 6, answer, GREY)
        axes.text(33, height, f"{reward}", color=REWARD, ha="center", va="center", fontsize=10)
    axes.text(23, 39.5, "$G$ answers", ha="center", fontsize=9)
    axes.text(33, 39.5, "rewards", color=REWARD, ha="center", fontsize=9)
    for height in (36, 22, 8):
        _arrow(axes, (35.5, height), (40, height))
    _arrow(axes, (58, 36), (60, 36))
    for start, end in ((36, 26), (22, 22), (8, 18)):
        _arrow(axes, (78.2, start), (82, end))
    return figure


def _box(axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: object) -> None:
    look: dict[str, Any] = {"boxstyle": "round,pad=0.02,rounding_size=1", "edgecolor": colour, "linewidth": 1.4}
    axes.add_patch(FancyBboxPatch((x - width / 2, y - height / 2), width, height, facecolor="white", **look))
    axes.text(x, y, text, ha="center", va="center", fontsize=9)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "0.5", "linewidth": 1})


def write_picture(path: Path) -> None:
    """Write the diagram to a PNG file."""
    set_style()
    figure = way_of_a_group()
    figure.savefig(path, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    write_picture(Path(__file__).with_suffix(".png"))
