"""The site: the README, the committed notebooks as they are, and the ledger with filters. Nothing is executed.

Built from the project's root (``make site``), so that links between files are links between pages.
"""

from __future__ import annotations

import html
import importlib
import re
import shutil
import sys
from pathlib import Path

import pandas as pd
from docutils import nodes
from itables import options
from itables.javascript import generate_init_offline_itables_html
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from gcpo.methods import METHODS
from gcpo.reports import explorer
from gcpo.reports.pages import CHECKS

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "outputs" / "reference" / "laptop"
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
method_pages = importlib.import_module("method_pages")

project, author, html_title = "gcpo", "the gcpo authors", "gcpo"
project_copyright = "Apache-2.0"
root_doc = "README"
include_patterns = ["*.md", "notebooks/*.ipynb", "docs/*.md", "docs/methods/*.md", "outputs/reference/examples/*.ipynb"]
exclude_patterns = ["build"]

extensions = ["myst_nb", "sphinx-mathjax-offline"]
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4

html_theme = "sphinx_book_theme"
html_theme_options = {"show_toc_level": 2, "use_download_button": False, "home_page_in_toc": True}
html_theme_options |= {"navbar_persistent": []}  # there is a field for searching beside the contents
html_context = {"default_mode": "light"}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["ledger.js", "site.js"]
html_show_sphinx = False
html_copy_source = False
MATHJAX = "tex-chtml.js"  # the bundle that pages load

PARTS = {
    "Read": "notebooks/0*",
    "Run": "notebooks/1*",
    "Runs with their outputs": "outputs/reference/examples/*",
    "Report": "notebooks/2*",
    "Appendices": "notebooks/3*",
}


def add_navigation(_app: Sphinx, page: str, source: list[str]) -> None:
    """The pages in their order, below the README."""
    if page != root_doc:
        return
    for caption, pattern in PARTS.items():
        pages = "\n".join(
            path.relative_to(ROOT).with_suffix("").as_posix() for path in sorted(ROOT.glob(f"{pattern}.ipynb"))
        )
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"
    methods = "\n".join(f"docs/methods/{name}" for name in METHODS)
    source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: Methods\n\nMETHODS\n{methods}\n```\n"
    rest = "docs/explorer docs/ledger docs/runs notebooks/90_claims RESULTS DEVIATIONS PROTOCOL"
    rest = f"{rest} CONTRIBUTING CHANGELOG".replace(" ", "\n")
    source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: Look up\n\n{rest}\n```\n"


class Ledger(SphinxDirective):
    """The reference's ledger as one table, with a menu for each of paper, kind, scope and verdict.

    ledger.js makes it a DataTable of itables, whose script stands in the page: a page from a disk imports no module.
    """

    def run(self) -> list[nodes.Node]:
        path = REFERENCE / "ledger.csv"
        self.env.note_dependency(str(path))
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
        menus = "".join(self.menu(name, table[name]) for name in ("paper", "kind", "scope", "verdict"))
        rows = "".join(self.row(row) for _, row in table.iterrows())
        library = generate_init_offline_itables_html(options.dt_bundle)
        text = (
            f'{library}<form id="ledger-filters">{menus}</form><table id="ledger">'
            f"<thead><tr><th>claim</th><th>verdict</th><th>because</th></tr></thead><tbody>{rows}</tbody></table>"
        )
        return [nodes.raw("", text, format="html")]

    @staticmethod
    def menu(name: str, values: pd.Series) -> str:
        options = "".join(f"<option>{html.escape(value)}</option>" for value in values.unique())
        return f'<label>{name} <select name="{name}"><option value="">all</option>{options}</select></label> '

    @staticmethod
    def row(row: pd.Series) -> str:
        said = {key: html.escape(value) for key, value in row.items()}
        data = " ".join(f'data-{key}="{said[key]}"' for key in ("paper", "kind", "scope", "verdict"))
        note = f"<p><em>{said['note']}</em></p>" if said["note"] else ""
        claim = f"<q>{said['quote']}</q><p>{said['paper']}, {said['place']}; {said['kind']}; {said['scope']}</p>"
        because = re.sub(CHECKS, "<br>", said["because"])
        cells = f"<td>{claim}</td><td>{said['verdict']}</td><td>{because}{note}</td>"
        return f'<tr id="{said["id"]}" {data}>{cells}</tr>'


class Explorer(SphinxDirective):
    """The explorer of one group of answers, whole: its script and its data stand in the page."""

    def run(self) -> list[nodes.Node]:
        for path in explorer.HERE.iterdir():
            self.env.note_dependency(str(path))
        return [nodes.raw("", explorer.fragment(), format="html")]


def finish(app: Sphinx, error: Exception | None) -> None:
    """Put the front page under the name that a browser asks for, and leave out MathJax's other bundles, 18 MB."""
    if error is not None:
        return
    out = Path(app.outdir)
    shutil.copy(out / f"{root_doc}.html", out / "index.html")
    for bundle in (out / "_static" / "mathjax").glob("*.js"):
        if bundle.name != MATHJAX:
            bundle.unlink()


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    method_pages.write()  # before Sphinx looks for pages
    app.connect("source-read", add_navigation)
    app.connect("build-finished", finish)
    app.add_directive("ledger", Ledger)
    app.add_directive("explorer", Explorer)
