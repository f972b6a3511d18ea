"""The explorer: one group of answers to change by hand, with its measures, weights and advantages, as a piece of HTML.

It needs no server and no network: the page, its formulas and its answers' embeddings stand in the HTML. The embeddings
are written by ``docs/vocabulary.py``.
"""

from __future__ import annotations

import html
from pathlib import Path

HERE = Path(__file__).parent
GROW = "new ResizeObserver(() => frameElement.style.height = document.body.offsetHeight + 32 + 'px')"


def fragment() -> str:
    """Return the explorer to stand once in a page of HTML."""
    page, style, script, answers = (
        (HERE / name).read_text(encoding="utf-8")
        for name in ("explorer.html", "explorer.css", "explorer.js", "answers.json")
    )
    begin = f"gcpoExplorer.start(document.querySelector('.explorer'), {answers.strip()})"
    return f"<style>{style}</style>{page}<script>{script}{begin}</script>"


def frame() -> str:
    """Return the explorer for the output of a notebook's cell, in a frame that keeps its style apart."""
    head = '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    document = f"{head}<body>{fragment()}<script>{GROW}.observe(document.body)</script>"
    look = "width: 100%; height: 60rem; border: 0; background: white"
    return f'<iframe title="Explorer of one group" style="{look}" srcdoc="{html.escape(document)}"></iframe>'
