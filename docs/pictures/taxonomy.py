"""Draw taxonomy.png beside this file: what each method weighs, what it reads, and whether it goes up or down.

The picture is made from the rows of ``gcpo.methods.METHODS``. Controls and variants are left out.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from gcpo.methods import METHODS
from gcpo.methods.table import Method
from gcpo.reports.figures import PALETTE, set_style
from gcpo.reports.tables import CALLED

ROWS = {  # what is weighed -> what a method acts on, and per what
    "a question": ("advantage", "group"),
    "an answer": ("advantage", "response"),
    "a token": ("advantage", "token"),
    "the reward": ("reward", "response"),
    "the loss": ("loss", ""),
}
MEANING = {"clusters", "embeddings", "nli"}
COLUMNS = ("rewards", "meaning", "likelihood")
UP, DOWN, OTHER = PALETTE[0], PALETTE[3], "0.25"


def column(method: Method) -> str:
    """Return what a method reads beside rewards; one that reads meaning and likelihood stands under meaning."""
    if MEANING & method.reads:
        return "meaning"
    return "likelihood" if method.reads else "rewards"


def marked(name: str, method: Method) -> tuple[str, object]:
    """Return a method's name with an arrow up or down, or both, and its colour."""
    up, down = "boosts" in method.direction, "damps" in method.direction or "drops" in method.direction
    arrow = {(True, True): "↓↑", (True, False): "↑", (False, True): "↓"}.get((up, down), "")
    return f"{CALLED[name]} {arrow}", OTHER if up == down else UP if up else DOWN


def taxonomy() -> Figure:
    """Draw the table."""
    figure, axes = plt.subplots(figsize=(9.6, 4.6))
    axes.set(xlim=(-0.45, 3), ylim=(5, -0.35))
    axes.axis("off")
    axes.text(-0.45, -0.12, "weighed", va="center", color="0.4", fontsize=10)
    for place, title in enumerate(COLUMNS):
        axes.text(place + 0.03, -0.12, f"by {title}", va="center", fontsize=11, weight="bold")
    cells: dict[tuple[int, str], list[tuple[str, object]]] = {}
    for name, method in METHODS.items():
        if method.acts == "base" or "our control" in method.paper or name.startswith("egpo_"):
            continue
        row = next(
            k for k, (acts, per) in enumerate(ROWS.values()) if acts == method.acts and per in method.granularity
        )
        cells.setdefault((row, column(method)), []).append(marked(name, method))
    for row, title in enumerate(ROWS):
        axes.axhline(row, color="0.8", linewidth=0.8)
        axes.text(-0.45, row + 0.5, title, va="center", fontsize=11, weight="bold")
        for place, of in enumerate(COLUMNS):
            found = cells.get((row, of), [])
            for number, (text, colour) in enumerate(found):
                x, y = place + 0.03 + 0.5 * (number % 2), row + 0.5 + 0.22 * (number // 2 - (len(found) - 1) // 2 / 2)
                axes.text(x, y, text, va="center", color=colour, fontsize=10)
    return figure


if __name__ == "__main__":
    set_style()
    taxonomy().savefig(Path(__file__).with_suffix(".png"), bbox_inches="tight", metadata={"Software": None})
