"""The table of methods, and tables in Markdown: beside the core, pandas is all that is needed."""

import math

import pandas as pd

from gcpo import verl
from gcpo.methods import METHODS
from gcpo.weights import weight_range


def markdown(table: pd.DataFrame) -> str:
    """A table in Markdown whose cells are shown as they are: a bar or the end of a line would end a cell, and what a
    record says is no HTML. Links and code stay what they are, and so does ">", which opens nothing.

    Cells are not padded: a longer one would change every line of its table.
    """
    shown = str.maketrans({"&": "&amp;", "<": "&lt;", "|": r"\|", "\n": " ", "\r": " "})
    rows = [map(str, table.columns), ["---"] * table.shape[1], *table.astype(str).to_numpy()]
    return "".join(f"| {' | '.join(cell.translate(shown) for cell in row)} |\n" for row in rows)


def weight_range_in_words(name: str, group_size: int) -> str:
    """Return the range of a method's weight at its own alpha, such as "0.946 to 1.22"; one number where it is one."""
    low, high = (f"{end:.3g}" if end < math.inf else "∞" for end in weight_range(name, None, group_size))
    return low if low == high else f"{low} to {high}"


def methods_table(group_size: int = 16) -> pd.DataFrame:
    """Every method as its row of ``METHODS`` describes it, with the range of its weight at this G and its own alpha."""
    rows = []
    for name, row in METHODS.items():
        reach = weight_range_in_words(name, group_size)
        rows.append((f"`{name}`", row.paper, row.rule, row.acts, row.granularity, row.direction, reach))
    columns = ["method", "paper", "rule", "acts on", "per", "direction", f"weight at G = {group_size}"]
    return pd.DataFrame(rows, columns=columns)


def verl_table() -> pd.DataFrame:
    """Return the methods that run in verl in any trainer mode, in one, or not; columns as named here."""
    mode = f"`trainer.v1.trainer_mode={verl.MODE}`: reads texts, tokens' probabilities, lengths or the step's number"
    found: dict[tuple[str, str], list[str]] = {}
    for name, row in METHODS.items():
        how = ("yes", mode if verl.asks(row) else "any trainer mode: reads rewards alone")
        found.setdefault(("no", why) if (why := verl.refusal(row)) else how, []).append(f"`{name}`")
    rows = [(*key, ", ".join(names)) for key, names in sorted(found.items(), reverse=True)]
    return pd.DataFrame(rows, columns=["runs", "how, or why not", "methods"])
