"""Write the interactive pages as files that open from a checkout, without a site, a server or a network: run this file.

They are docs/pages/explorer.html, cloud.html and ledger.html. ``--picture`` photographs the explorer with Chromium, for
places where no script runs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import cards
import pieces

from gcpo.reports import ledger

DOCS = Path(__file__).resolve().parent
PAGES = DOCS / "pages"
FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>:root {{ --pst-color-border: #bbb; --pst-color-text-muted: #555; --pst-color-link: #06c;
--pst-color-primary: #06c; }} body {{ font-family: system-ui, sans-serif; line-height: 1.45; max-width: 80rem;
margin: 0 auto; padding: 1rem; }} {style}</style></head><body><h1>{title}</h1>{body}</body></html>
"""


def explorer() -> str:
    """Return the explorer as a page."""
    return FRAME.format(title="gcpo: one group of answers, by hand", style="", body=pieces.explorer())


def cloud() -> str:
    """Return the answer cloud as a page."""
    return FRAME.format(title="gcpo: one question along a training", style="", body=pieces.cloud())


def claims() -> str:
    """Return the ledger as a page, whose links go to the committed notebooks."""
    verdicts = ledger.read_verdicts("laptop", reference=True)
    found = "".join(cards.card(*each, "") for each in ledger.reached(ledger.claims(), verdicts))
    found = re.sub(r'href="\.\./notebooks/(\w+)\.html(#[\w-]+)?"', r'href="../../notebooks/\1.ipynb"', found)
    style, script = ((DOCS / "static" / name).read_text(encoding="utf-8") for name in ("site.css", "ledger.js"))
    body = f'{cards.form()}<div id="ledger">{found}</div><script>{script}</script>'
    return FRAME.format(title="gcpo: every claim with its verdict", style=style, body=body)


MADE = {"explorer": explorer, "cloud": cloud, "ledger": claims}


def main(picture: bool = False) -> None:
    """Write the pages, and the picture if asked for."""
    PAGES.mkdir(exist_ok=True)
    for name, page in MADE.items():
        (PAGES / f"{name}.html").write_text(page(), encoding="utf-8")
    if picture:
        look = "chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1000,960".split()
        shot = DOCS / "pictures" / "explorer.png"
        subprocess.run([*look, f"--screenshot={shot}", (PAGES / "explorer.html").as_uri()], check=True)


if __name__ == "__main__":
    main("--picture" in sys.argv)
