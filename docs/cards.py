"""The ledger as cards: a claim of a paper with its verdict, one sentence of why, and the cells that decided it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from io import StringIO
from typing import Any, get_args
from urllib.parse import urlencode

import notebook_pages
import pandas as pd
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from gcpo import paths
from gcpo.reports import ledger, templates
from gcpo.reports.tables import display_name, with_interval
from gcpo.reports.verdicts import SHOWN

MENUS = {
    "paper": tuple(ledger.PAPERS.values()),
    "kind": get_args(ledger.Kind),
    "scope": get_args(ledger.Scope),
    "verdict": SHOWN,
}
LONG = 300  # characters
ORDERS = ("paper", "verdict", "kind", "scope", "claim")  # "paper" is the order of claims.yaml


class Ledger(SphinxDirective):
    """Every claim as a card, below a form that searches, filters and sorts them (ledger.js)."""

    def run(self) -> list[nodes.Node]:
        for path in (
            ledger.CLAIMS,
            *paths.VERDICTS.glob("*.csv"),
            *paths.REFERENCE.glob("*/verdicts_*.csv"),
        ):
            self.env.note_dependency(str(path))
        verdicts = ledger.read_verdicts("laptop", reference=True)
        repository = self.config.repository
        cards = (card(*found, repository) for found in ledger.reached(ledger.claims(), verdicts))
        return [nodes.raw("", f'{form()}<div id="ledger">{"".join(cards)}</div>', format="html")]


def form() -> str:
    """Return the field for searching, the menus of filters and of orders, and the place of the counts."""
    menus = "".join(
        f'<label>{name} <select name="{name}"><option value="">all</option>{options(values)}</select></label>'
        for name, values in MENUS.items()
    )
    return f"""<form id="ledger-form">
        <label class="words">words <input type="search" name="words" placeholder="entropy &quot;log G&quot;"></label>
        {menus}<label>sorted by <select name="order">{options(ORDERS)}</select></label>
        <button type="reset">show all</button><output aria-live="polite"></output></form>"""


def options(values: Iterable[str]) -> str:
    """Return the options of a menu."""
    return "".join(f'<option value="{value}">{value}</option>' for value in values)


def card(claim: ledger.Claim, lines: Sequence[Any], beside: Sequence[Any], repository: str) -> str:
    """Return a claim as a card: verdict, quote and place, one sentence of why, everything that was checked, links."""
    verdict = ledger.overall([line.verdict for line in lines])
    paper = ledger.PAPERS[claim.paper]
    data = " ".join(
        f'data-{key}="{value}"' for key, value in zip(MENUS, (paper, claim.kind, claim.scope, verdict), strict=True)
    )
    decided = next((line for line in lines if line.verdict == verdict), None)
    why = in_brief(decided.because) or numbers(decided) if decided else "No check decides it."
    why = escape(re.sub("^[a-z]", lambda first: first[0].upper(), why))
    note = f'<p class="note">{linked(escape(claim.note))}</p>' if claim.note else ""
    checks = "".join(map(check, lines)) + "".join(check(line, "On another kind of task: ") for line in beside)
    count = len(lines) + len(beside)
    folded = f"<details><summary>{count} check{'s' * (count > 1)} in full</summary><ul>{checks}</ul></details>"
    if count == 0 or (count == 1 and decided and in_brief(decided.because) == decided.because):
        folded = ""
    said = "".join(f" <span>{kind}</span>" for kind in dict.fromkeys((claim.kind, claim.scope)))
    if rules := ledger.fixed(lines, claim.changed):
        said += f" <span>fixed before the data: {escape(claim.changed or rules)}</span>"
    links = ['<button type="button" class="link">copy link</button>']
    if repository:
        links.append(f'<a href="{escape(dispute(claim, decided, repository))}">dispute this</a>')
    return (
        f'<article class="claim" id="{claim.id}" {data}><header>{chip(verdict)}'
        f'<a class="id" href="#{claim.id}">{claim.id}</a></header><blockquote>{escape(claim.quote)}</blockquote>'
        f'<p class="tags">{paper}, {escape(claim.place)}{said}</p>'
        f"<p>{why} {cell(decided) if decided else ''}</p>{folded}{note}"
        f"<footer>{' '.join(links)}</footer></article>"
    )


def chip(verdict: str) -> str:
    """Return a verdict as a coloured word."""
    return f'<strong class="verdict {verdict.replace(" ", "-")}">{verdict}</strong>'


def check(line: Any, before: str = "") -> str:
    """Return one check of a claim: its verdict, what it asked and where, the numbers, its comparisons, and the cell."""
    listed = pd.read_csv(StringIO(line.parts)).to_html(index=False, na_rep="") if line.parts else ""
    why = escape(" ".join(filter(None, [line.because, numbers(line)])))
    asked = f"{escape(line.heading)} ({escape(line.place)})"
    return f"<li>{before}{chip(line.verdict)} {asked}. {why} {cell(line)}{listed}</li>"


def numbers(line: Any) -> str:
    """Return the comparison that decided a verdict with its interval; nothing of one that no runs decided."""
    if not line.estimate:
        return ""
    named = " minus ".join(display_name(label) for label in (line.label, line.against) if label)
    return f"{named}: {with_interval(float(line.estimate), float(line.low), float(line.high), digits=2)}"


def in_brief(because: str) -> str:
    """Return the first sentence of a reason; of a long list in it the first item."""
    sentence = notebook_pages.first_sentence(because)
    items = re.split(r"; (?![^(]*\))", sentence)  # outside of brackets
    return f"{items[0]}; …" if len(sentence) > LONG and len(items) > 1 else sentence


def cell(line: Any) -> str:
    """Return a link to the very cell that shows a verdict; of one that no notebook has reached nothing."""
    place = notebook_pages.places(line.notebook).get(line.id) if line.notebook else None
    if not place:
        return ""
    where = f"../notebooks/{line.notebook}.html#{notebook_pages.anchor(line.id)}"
    section = re.sub(r"^\d+\. |[`$*]", "", place.heading)
    return f'<a href="{where}">notebook {line.notebook[:2]}: {escape(section)}</a>'


def linked(note: str) -> str:
    """Return a note whose notebooks, named by number, are links."""
    stems = templates.notebooks()

    def link(found: re.Match[str]) -> str:
        stem = stems.get(found[1])
        return f'<a href="../notebooks/{stem}.html">{found[0]}</a>' if stem else found[0]

    return re.sub(r"notebook (\d\d)\b", link, note)


def dispute(claim: ledger.Claim, decided: Any, repository: str) -> str:
    """Return the address of a new issue by the template "A verdict I doubt", with the claim filled in."""
    filled = {"template": "verdict.yml", "title": f"Verdict: {claim.id}", "claim": f"{claim.id}: {claim.quote}"}
    if decided:
        filled |= {
            "notebook": decided.notebook,
            "quoted": f"{decided.verdict}: {decided.because or numbers(decided)}"[:500],
        }
    return f"{repository}/issues/new?{urlencode(filled)}"
