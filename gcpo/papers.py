"""Papers that methods are from, and gcpo itself, as BibTeX in ``gcpo/papers.bib``."""

import functools
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple


class Paper(NamedTuple):
    """Title, arXiv id (None where there is none) and BibTeX entry of a paper."""

    title: str
    arxiv: str | None
    bibtex: str


@functools.cache
def papers() -> dict[str, Paper]:
    """Return all papers by their shorthands."""
    entries = Path(__file__).with_name("papers.bib").read_text(encoding="utf-8").strip().split("\n\n")
    fields = {entry: dict(re.findall(r"(\w+) *= \{(.*)\}", entry)) for entry in entries}
    return {has["shorthand"]: Paper(has["title"], has.get("eprint"), entry) for entry, has in fields.items()}


def cited(places: str) -> tuple[Paper, ...]:
    """Return the papers of places in them, such as "KLE; GCPO, Table 1", as far as they are known."""
    names = [re.split(r" \(|,", place)[0] for place in places.split("; ")]
    return tuple(papers()[name] for name in dict.fromkeys(names) if name in papers())


def credit(found: Sequence[Paper]) -> dict[str, str]:
    """Return what a model card of TRL says of papers: the citations of all and of this release of gcpo, title and id of
    the first if on arXiv."""
    first = {"title": found[0].title, "id": found[0].arxiv} if found and found[0].arxiv else {}
    entries = "\n\n".join(paper.bibtex for paper in (*found, papers()["gcpo"])).replace("VERSION", version("gcpo"))
    return {"citation": re.sub(r"\n *shorthand .*", "", entries), **first}  # which BibTeX does not know
