"""Notebook pages of the site: where each verdict is shown, and alternative texts of figures from their captions."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

import nbformat
from docutils import nodes
from sphinx.application import Sphinx

from gcpo import paths
from gcpo.reports import ledger

# Between two sentences; a reference such as "Eq. 8" ends none.
SENTENCES = re.compile(r"(?<=[.!?])(?<!Eq\.)(?<!App\.)(?<!Prop\.)(?<!vs\.)\s+(?=[^a-z\s])")
NUMBER = re.compile(r"^Figure \d+\w?[.:] ")


class Place(NamedTuple):
    """A cell of a notebook that shows a verdict: its index, and the heading above it."""

    cell: int
    heading: str


@cache
def places(notebook: str) -> dict[str, Place]:
    """Return where a notebook shows its verdicts, by id: where its code names the id, else where the words stand."""
    path = paths.NOTEBOOKS / f"{notebook}.ipynb"
    if not path.exists():
        return {}
    verdicts = ledger.read_verdicts("laptop", reference=True)
    own = verdicts[verdicts["notebook"] == notebook].drop_duplicates("id")
    named: dict[str, Place] = {}
    shown: dict[str, Place] = {}
    heading = ""
    for index, cell in enumerate(nbformat.read(path, as_version=4).cells):
        if cell.cell_type == "markdown":
            heading = [heading, *re.findall(r"^#+ (.+)$", cell.source, re.M)][-1]
            continue
        if not (said := "".join(map(printed, cell.get("outputs", [])))):
            continue
        for check, words in zip(own["id"], own["heading"], strict=True):
            if f'"{check}"' in cell.source:
                named.setdefault(check, Place(index, heading))
            if words in said:
                shown.setdefault(check, Place(index, heading))
    return shown | named


def printed(output: Any) -> str:
    """Return the text of an output."""
    return output.get("text", "") or str(output.get("data", {}).get("text/plain", ""))


def anchor(check: str) -> str:
    """Return the id, in a page, of the cell that shows a verdict."""
    return f"verdict-{check}"


def first_sentence(text: str) -> str:
    """Return the first sentence of a text."""
    return SENTENCES.split(text.strip(), maxsplit=1)[0]


def caption(cell: nodes.Element) -> str:
    """Return the first sentence of the caption in italics below a figure's cell, or below cells that show no other
    figure; without one, the section's title."""
    below = cell.next_node(descend=False, siblings=True)
    while isinstance(below, nodes.container) and below.next_node(nodes.image) is None:
        below = below.next_node(descend=False, siblings=True)
    if isinstance(below, nodes.paragraph) and below.children and isinstance(below[0], nodes.emphasis):
        return first_sentence(NUMBER.sub("", " ".join(below[0].astext().replace("\\", "").split())))
    section = cell.parent
    while section.parent and not isinstance(section, nodes.section):
        section = section.parent
    return f"Figure of the section “{section.next_node(nodes.title).astext()}”"


def colab(repository: str, name: str) -> str:
    """Return where a notebook opens in Colab, "" of one that does not install gcpo there, or without an address."""
    installs = "%pip install" in (paths.NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8")
    _, hub, place = repository.partition("github.com/")
    page = f"https://colab.research.google.com/github/{place}/blob/main/notebooks/{name}.ipynb"
    return page if installs and hub else ""


def improve(app: Sphinx, doctree: nodes.document) -> None:
    """Give a cell with a verdict an anchor, a figure of a code cell an alternative text, and a page a link to Colab."""
    folder, _, name = app.env.docname.rpartition("/")
    shown = places(name) if folder == "notebooks" else {}
    if folder == "notebooks" and (address := colab(app.config.repository, name)):
        link = nodes.reference("", "Open in Colab", refuri=address)
        doctree.next_node(nodes.section).insert(1, nodes.paragraph("", "", link))
    for cell in doctree.findall(nodes.container):
        if cell.get("nb_element") == "cell_code":
            cell["ids"] += [anchor(check) for check, place in shown.items() if place.cell == cell["cell_index"]]
            for image in cell.findall(nodes.image):
                image["alt"] = caption(cell)
