"""The site, built as `make site` builds it, and the pieces of its pages."""

import html
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from helpers import script

from gcpo import paths
from gcpo.methods import METHODS
from gcpo.reports import ledger
from gcpo.runs.profiles import read_yaml

ASSETS = re.compile(r"""<(?:script|img|iframe)[^>]*\ssrc="(https?:)?//|<link[^>]*\shref="(https?:)?//""")


def text_of(page: Path) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text()))


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_stands_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(tmp_path)]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not [page for page in tmp_path.rglob("*.html") if ASSETS.search(page.read_text())], "asks another host"
    files = [path for path in tmp_path.rglob("*") if path.is_file() and ".doctrees" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 30e6
    contents = re.search(r'<nav class="bd-links.*?</nav>', (tmp_path / "index.html").read_text(), re.S)[0]
    listed = re.findall(r'<a class="reference internal" href="notebooks/(\w+)\.html">', contents)
    assert listed == [*script("docs/links.py").listed()]
    assert "entailment_threshold – (default 0.35)" in text_of(tmp_path / "docs" / "api" / "trainer.html")
    for name, row in METHODS.items():
        page = text_of(tmp_path / "docs" / "methods" / f"{name}.html")
        assert row.paper in page and row.rule in page
    claims_have_cards(tmp_path)
    for page in (tmp_path / "notebooks").glob("*.html"):
        for picture in re.findall(r"(?:<a [^>]*>)?<img\b[^>]*>", page.read_text()):
            said = re.search(r'alt="([^"]+)"', picture)
            assert said and picture.startswith("<a ") and not re.search(r"\.(png|gif|svg)$", said[1]), (page, picture)


def claims_have_cards(site: Path) -> None:
    """Every claim is a card with its verdict, and links to the cells that decided it."""
    table = pd.read_csv(paths.REFERENCE / "laptop" / "ledger.csv")
    page = (site / "docs" / "ledger.html").read_text()
    cards = re.findall(r'<article class="claim" id="(.*?)".*? data-verdict="(.*?)">(.*?)</article>', page, re.S)
    assert [card[:2] for card in cards] == list(table[["id", "verdict"]].itertuples(index=False, name=None))
    linked = {claim: re.findall(r'<a href="\.\./(notebooks/\w+\.html)#([\w-]+)"', card) for claim, _, card in cards}
    for claim, lines, _ in ledger.reached(ledger.claims(), ledger.read_verdicts("laptop", reference=True)):
        assert all(f'id="{anchor}"' in (site / target).read_text() for target, anchor in linked[claim.id]), claim.id
        assert {f"verdict-{line.id}" for line in lines if line.notebook} <= {anchor for _, anchor in linked[claim.id]}


# --- parts of pages -------------------------------------------------------------------------------------------------


@pytest.fixture
def docs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of docs by name."""
    monkeypatch.syspath_prepend(paths.ROOT / "docs")
    return importlib.import_module


def test_the_explorer_has_the_cosines_that_minilm_gives_and_pages_open_from_a_checkout(docs: Any) -> None:
    stored, fresh = read_yaml(docs("pieces").HERE / "explorer.json"), docs("vocabulary").answers()
    assert fresh["texts"] == stored["texts"]
    pair = [torch.nn.utils.rnn.pad_sequence(map(torch.tensor, found["rows"])) for found in (stored, fresh)]
    torch.testing.assert_close(pair[0].T @ pair[0], pair[1].T @ pair[1], rtol=0, atol=1e-3)
    for name, page in docs("standalone").MADE.items():
        assert (text := (docs("standalone").PAGES / f"{name}.html").read_text()) == page(), "python docs/standalone.py"
        assert {*re.findall(r"https?://[\w.]+", text)} <= {"http://www.w3.org"}  # the namespace of SVG


def test_a_notebook_that_installs_gcpo_opens_in_colab(docs: Any) -> None:
    hub, page = "https://github.com/a/b", "https://colab.research.google.com/github/a/b/blob/main/notebooks/{}.ipynb"
    asked = (hub, "01_one_update"), (hub, "02_measures"), ("", "01_one_update")
    assert [docs("notebook_pages").colab(*one) for one in asked] == [page.format("01_one_update"), "", ""]
