"""The site: the README, the committed notebooks as they are, and the ledger with filters. Nothing is executed.

Built from the project's root (``make site``), so that links between files are links between pages.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from gcpo.methods import METHODS
from gcpo.runs.profiles import read_yaml

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
api_reference, cards, links, method_pages, notebook_pages, pieces, reference_pages = map(
    importlib.import_module,
    ("api_reference", "cards", "links", "method_pages", "notebook_pages", "pieces", "reference_pages"),
)

# Where the project and its site are public, for links to issues and sources; empty: nowhere yet, and no such links.
repository = os.environ.get("GCPO_REPOSITORY") or read_yaml(ROOT / "CITATION.cff").get("repository-code", "")

project, author, html_title = "gcpo", "the gcpo authors", "gcpo"
project_copyright = "Apache-2.0"
root_doc = "README"
include_patterns = ["*.md", "notebooks/*.ipynb", "docs/**.md", "outputs/reference/examples/*.ipynb"]
exclude_patterns = ["build"]

extensions = ["myst_nb", "sphinx-mathjax-offline", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
python_maximum_signature_line_length = 80
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
autodoc_type_aliases = {name: name for name in ("Values", "Array")}
napoleon_use_ivar = True  # attributes as one list
default_role = "literal"  # docstrings write code between single backticks, too
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4

html_theme = "sphinx_book_theme"
html_theme_options = {"show_toc_level": 2, "use_download_button": False, "home_page_in_toc": True}
html_theme_options |= {"navbar_persistent": []}  # there is a field for searching beside the contents
if repository:
    html_theme_options |= {"repository_url": repository, "repository_provider": "github", "use_repository_button": True}
    html_theme_options |= {"use_issues_button": True, "use_source_button": True, "repository_branch": "main"}
    html_theme_options |= {"launch_buttons": {"binderhub_url": "https://mybinder.org"}}  # of notebooks
html_context = {"default_mode": "light"}
html_favicon = "static/icon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["ledger.js", "site.js"]
html_show_sphinx = False
html_copy_source = False
MATHJAX = "tex-chtml.js"  # the bundle that pages load
EXAMPLES = sorted((ROOT / "outputs" / "reference" / "examples").glob("*.ipynb"))

API = (
    "trainer methods parts measures rollouts semantics answers rewards tasks world statistics gradients updates records"
)
LOOK_UP = "docs/explorer docs/cloud docs/ledger docs/glossary docs/notebooks docs/exhibits METHODS docs/use"
LOOK_UP += " docs/own_weight docs/models docs/reference/parameters docs/reference/commands"
LOOK_UP += " docs/runs docs/past_one_machine docs/verl RESULTS DEVIATIONS PROTOCOL CONTRIBUTING CHANGELOG"


def pages() -> dict[str, list[str]]:
    """Return the pages below the README in their order, by the captions above them."""
    there = links.listed()
    parts = {part: [f"notebooks/{name}" for name in names if name in there] for part, names in links.PARTS.items()}
    parts["Runs with their outputs"] = [f"outputs/reference/examples/{path.stem}" for path in EXAMPLES]
    parts["API reference"] = [f"docs/api/{name}" for name in API.split()]
    return parts | {"Look up": LOOK_UP.split()}


def add_navigation(_app: Sphinx, page: str, source: list[str]) -> None:
    """Put the contents of the site below the README, and the methods' own pages below their table."""
    below = {root_doc: pages(), "METHODS": {"Each method": [f"docs/methods/{name}" for name in METHODS]}}
    for caption, listed in below.get(page, {}).items():
        lines = "\n".join(listed)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"


class Piece(SphinxDirective):
    """A piece of HTML, whole: its script and its data stand in the page."""

    def run(self) -> list[nodes.Node]:
        for path in pieces.HERE.iterdir():
            self.env.note_dependency(str(path))
        return [nodes.raw("", getattr(pieces, self.name)(), format="html")]


def polish(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: nodes.document | None) -> None:
    """Mark estimates with intervals in tables, for site.css, and link every picture to its file, where it is larger."""

    def marked(cell: re.Match[str]) -> str:
        return re.sub(r"(?:[-+\d.]+ )?\[[^\s<>]+, [^\s<>]+\]", r'<span class="interval">\g<0></span>', cell[0])

    body = re.sub(r"<td.*?</td>", marked, context.get("body", ""), flags=re.S)
    picture = r'(?<!\.html">)<img [^>]*src="([^"]+)"[^>]*>'  # of a link to a page there is one already
    context["body"] = re.sub(picture, r'<a class="picture" href="\1">\g<0></a>', body)


def finish(app: Sphinx, error: Exception | None) -> None:
    """Put the front page under the name that a browser asks for, and leave out MathJax's other bundles, 18 MB, and the
    maps that debuggers read of the theme's scripts."""
    if error is not None:
        return
    out = Path(app.outdir)
    shutil.copy(out / f"{root_doc}.html", out / "index.html")
    for bundle in (out / "_static" / "mathjax").glob("*.js"):
        if bundle.name != MATHJAX:
            bundle.unlink()
    for path in (out / "_static").rglob("*.map"):
        path.unlink()


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    method_pages.write()  # before Sphinx looks for pages
    reference_pages.write()
    api_reference.connect(app)
    app.connect("source-read", add_navigation)
    app.connect("html-page-context", polish)
    app.connect("build-finished", finish)
    app.connect("doctree-read", notebook_pages.improve)
    app.add_config_value("repository", "", "env")
    app.add_directive("ledger", cards.Ledger)
    app.add_directive("explorer", Piece)
    app.add_directive("cloud", Piece)
