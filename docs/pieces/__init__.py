"""Pieces of HTML that stand whole in a page of the site, with their scripts and data: no server, no network.

``docs/vocabulary.py`` writes the explorer's answers, ``docs/answer_cloud.py`` those of the cloud.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8").strip()


def explorer() -> str:
    """Return the explorer: one group of answers to change by hand, with its measures, weights and advantages."""
    begin = f"gcpoExplorer.start(document.querySelector('.explorer'), {_read('explorer.json')})"
    script = f"<script>{_read('explorer.js')}{begin}</script>"
    return f"<style>{_read('explorer.css')}</style>{_read('explorer.html')}{script}"


def cloud() -> str:
    """Return the answer cloud: sixteen answers to one question at five checkpoints of a training, with a slider."""
    return _read("cloud.html").replace("ANSWERS", _read("cloud.json").replace("<", "\\u003c"))
