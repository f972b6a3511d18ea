"""README.md, RESULTS.md, METHODS.md and pages of docs from docs/templates: a person writes the words, numbers come
from tables. ``python -m gcpo.reports.templates`` makes the pages, and so does publishing.

A sentence belongs to a verdict: a template that asks for the numbers of a claim names the word that its sentence was
written for, and no page is made when the ledger has another.
"""

from io import StringIO
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from gcpo import paths
from gcpo.errors import UserError
from gcpo.reports.methods import markdown, methods_table, verl_table
from gcpo.reports.real_answers import REACH
from gcpo.reports.tables import with_interval, written
from gcpo.runs.profiles import read_yaml

EXHIBITS = Path(__file__).parents[1] / "exhibits.csv"
TEMPLATES = paths.ROOT / "docs" / "templates"  # of each page the path from the project's root, and .j2
HOME = "laptop"  # whose reference has the ledger
Row = dict[Any, Any]


@jinja2.pass_context
def claim(context: jinja2.runtime.Context, name: str, word: str, beside: str = "") -> list[Row]:
    """Return the rows of headlines.csv on a claim: every verdict on its checks, by check and task.

    Args:
        context: the template's.
        name: the claim's id.
        word: the verdict that the template's sentence was written for.
        beside: those on tasks that the claim is not about.

    Raises:
        UserError: the ledger has another verdict, or no such claim.
    """
    found = written(HOME, "headlines", reference=True, keep_default_na=False).query("id == @name")
    if (words := [*found["verdict"].unique(), *found["beside"].unique()]) != [word, beside]:
        said = f"a sentence on {name} was written for {[word, beside]}, and the ledger has {words}."
        raise UserError(f"{context.name}: {said}")
    return found.to_dict("records")


def parts(row: Row) -> pd.DataFrame:
    """Return the comparisons that a verdict joins, a row each: comparison, verdict, estimate, low, high and more."""
    return pd.read_csv(StringIO(row["parts"]), dtype=str, keep_default_na=False)


def part(row: Row, word: str, **where: str) -> Row:
    """Return the one comparison of a verdict with these values, whose own verdict is ``word``."""
    table = parts(row)
    (found,) = table[(table[[*where]] == pd.Series(where)).all(axis=1) & (table["verdict"] == word)].to_dict("records")
    return found


def signed(value: float | str, digits: int = 2) -> str:
    """Return a difference with its sign: "+0.00" also where it is less below 0 than is shown."""
    return f"{round(float(value), digits) + 0.0:+.{digits}f}"


def ci(row: Row, digits: int = 2, unit: str = "") -> str:
    """Return a difference with the interval that decided."""
    estimate, low, high = (signed(row[name], digits) for name in ("estimate", "low", "high"))
    return f"{estimate}{unit} (95 % CI {low} to {high})"


def interval(profile: str, name: str, column: str, digits: int = 1, **where: str) -> str:
    """Return an estimate of a table of a profile's reference, with low and high; "not yet" where it is not there."""
    table = written(profile, name, reference=True)
    rows = table[(table[[*where]] == pd.Series(where)).all(axis=1)][[column, "low", "high"]].to_numpy()
    return with_interval(rows[0, 0], rows[0, 1], rows[0, 2], digits) if len(rows) else "not yet"


def counts() -> pd.DataFrame:
    """Return how many claims have which verdict: findings by paper, theorems and definitions of all papers together."""
    table = written(HOME, "ledger_counts", reference=True)
    of = ("findings of " + table["paper"]).where(table["kind"] == "finding", table["kind"] + "s")
    return table.assign(of=of).groupby("of", sort=False).sum(numeric_only=True).reset_index()


def notebooks() -> dict[str, str]:
    """Return the names of all notebooks by their numbers."""
    return {path.stem[:2]: path.stem for path in paths.NOTEBOOKS.glob("*.ipynb")}


def pages() -> dict[str, str]:
    """Return every page, by its path from the project's root.

    Raises:
        UserError: as :func:`claim`.
    """
    functions = (claim, parts, part, interval, counts, markdown, methods_table, verl_table)
    lines: dict[str, Any] = {"keep_trailing_newline": True, "trim_blocks": True, "lstrip_blocks": True}
    loader, undefined = jinja2.FileSystemLoader(TEMPLATES), jinja2.StrictUndefined
    environment = jinja2.Environment(loader=loader, undefined=undefined, **lines)
    environment.filters |= {"signed": signed, "ci": ci}
    environment.globals |= {function.__name__: function for function in functions} | {
        "citation": read_yaml(paths.ROOT / "CITATION.cff"),
        "course": read_yaml(paths.ROOT / "docs" / "course.yaml"),
        "exhibits": pd.read_csv(EXHIBITS, dtype=str, keep_default_na=False).to_dict("records"),
        "notebooks": notebooks(),
        "reach": pd.read_csv(REACH).iloc[0],
    }
    return {n.removesuffix(".j2"): environment.get_template(n).render() for n in environment.list_templates(["j2"])}


def write_pages() -> None:
    """Write every page."""
    for name, text in pages().items():
        (paths.ROOT / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_pages()
