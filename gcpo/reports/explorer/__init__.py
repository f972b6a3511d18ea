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
    """Return the explorer for the output of a notebook's cell."""
    return framed(fragment(), "Explorer of one group", "60rem")


def framed(piece: str, title: str, height: str) -> str:
    """Return a piece of HTML in a frame that keeps its style apart and grows with it."""
    head = '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    document = f"{head}<body>{piece}<script>{GROW}.observe(document.body)</script>"
    look = f"width: 100%; height: {height}; border: 0; background: white"
    return f'<iframe title="{title}" style="{look}" srcdoc="{html.escape(document)}"></iframe>'
