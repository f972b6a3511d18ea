"""The site, built as `make site` builds it, and the pieces of its pages."""

from __future__ import annotations

import html
import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pandas as pd
import pytest
import torch
from docutils import nodes
from PIL import Image, ImageChops, ImageStat
from sphinx.util.inventory import InventoryFile

import gcpo
from gcpo import paths
from gcpo.methods import METHODS
from gcpo.reports import ledger
from gcpo.runs.profiles import read_yaml

# Names that users' code rests on.
PUBLIC = """GCPOConfig GCPOTrainer measures.cosine_dispersion measures.barycentric_transport measures.semantic_entropy
measures.kernel_language_entropy measures.token_entropy measures.predictive_entropy measures.sequence_entropy
measures.self_consistency measures.nearest_neighbour_entropy measures.eigenscore measures.degree_uncertainty
measures.eccentricity measures.eigenvalue_uncertainty measures.semantic_density measures.reward_dispersion
weights.alpha_g weights.weight_range semantics.Embedder
semantics.Entailment semantics.greedy_clusters semantics.bidirectional_clusters semantics.exact_clusters
semantics.math_clusters gradients.gradient_variance one_pass.gradient_grams statistics.spearman statistics.top_auc
statistics.precision_at_top statistics.paired_bootstrap statistics.heldout_prediction statistics.training_difference
statistics.minimal_detectable statistics.holm statistics.equivalent rewards.token_f1 rewards.exact_match rewards.bleu1
rewards.math_correct rollouts.Rollouts methods.weights methods.advantages methods.Method updates.ceiling tasks.get_task
records.find"""
ASSETS = re.compile(r"""<(?:script|img|iframe)[^>]*\ssrc="(https?:)?//|<link[^>]*\shref="(https?:)?//""")
COURSE = "00 01 02 03 20 05 21 07".split()


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
    assert sorted(listed) == sorted(path.stem for path in paths.NOTEBOOKS.glob("*.ipynb"))
    assert [name[:2] for name in listed if name[:2] in COURSE][:4] == COURSE[:4]
    known = InventoryFile.loads((tmp_path / "objects.inv").read_bytes(), uri="").data
    names = {name for kind, found in known.items() if kind.startswith("py:") for name in found}
    assert {f"gcpo.{name}" for name in PUBLIC.split()} <= names
    trainer = text_of(tmp_path / "docs" / "api" / "trainer.html")
    for setting, default in {"method": "'gcpo_bot'", "alpha": "None", "entailment_threshold": "0.35"}.items():
        assert f"{setting} – (default {default})" in trainer
    for name, row in METHODS.items():
        page = text_of(tmp_path / "docs" / "methods" / f"{name}.html")
        assert row.paper in page and row.rule in page
    claims_have_cards(tmp_path)
    for page in (tmp_path / "notebooks").glob("*.html"):
        for picture in re.findall(r"<img\b[^>]*>", page.read_text()):
            said = re.search(r'alt="([^"]+)"', picture)
            assert said and not re.search(r"\.(png|gif|svg)$", said[1]), f"{page.stem}: {picture}"


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


def test_the_diagram_is_what_its_script_draws(tmp_path: Path) -> None:
    committed = paths.ROOT / "docs" / "pictures" / "way_of_a_group.png"
    script = committed.with_suffix(".py")
    runpy.run_path(str(script))["write_picture"](tmp_path / committed.name)
    pair = [Image.open(file).convert("L") for file in (tmp_path / committed.name, committed)]
    again = f"make it again: .venv/bin/python {script}"
    assert pair[0].size == pair[1].size, again
    assert ImageStat.Stat(ImageChops.difference(*pair)).mean[0] < 0.5, again  # of 255


def test_the_explorer_s_answers_have_the_cosines_that_minilm_gives_them(docs: Any) -> None:
    stored, fresh = read_yaml(docs("pieces").HERE / "explorer.json"), docs("vocabulary").answers()
    assert fresh["texts"] == stored["texts"]
    pair = [torch.nn.utils.rnn.pad_sequence(map(torch.tensor, found["rows"])) for found in (stored, fresh)]
    torch.testing.assert_close(pair[0].T @ pair[0], pair[1].T @ pair[1], rtol=0, atol=1e-3)
    for piece in (docs("pieces").explorer(), docs("pieces").cloud()):
        assert {*re.findall(r"https?://[\w.]+", piece)} <= {"http://www.w3.org"}  # the namespace of SVG


def test_a_figure_is_described_by_the_first_sentence_of_its_caption(docs: Any) -> None:
    caption = nodes.paragraph("", "", nodes.emphasis(text="Figure 2. Share of the variance\nby Eq. 4 (n = 30). Lines."))
    for below, said in ((caption, "Share of the variance by Eq. 4 (n = 30)."), (None, "Figure of the section “How?”")):
        cell = nodes.container(nb_element="cell_code")
        nodes.section("", nodes.title(text="How?"), cell, *filter(None, [below]))
        assert docs("notebook_pages").caption(cell) == said


def test_a_card_has_an_issue_to_dispute_it(docs: Any) -> None:
    claim = next(claim for claim in ledger.claims() if claim.id == "gcpo-prop-2-1-mass")
    (_, lines, beside), *_ = ledger.reached([claim], ledger.read_verdicts("laptop", reference=True))
    card = docs("cards").card(claim, lines, beside, "https://example.org/gcpo")
    asked = parse_qs(urlsplit(html.unescape(re.search(r'href="(https://[^"]*)"', card)[1])).query)
    assert asked["claim"] == [f"{claim.id}: {claim.quote}"] and asked["notebook"] == [lines[0].notebook]
    assert "https://" not in docs("cards").card(claim, lines, beside, "")
    template = (paths.ROOT / ".github" / "ISSUE_TEMPLATE" / "verdict.yml").read_text()
    assert all(f"id: {field}\n" in template for field in asked if field not in ("template", "title"))


def test_the_citation_has_the_version_and_the_date_of_the_release() -> None:
    citation = read_yaml(paths.ROOT / "CITATION.cff")
    released = dict(re.findall(r"^## \[([\d.]+)\] - (.+)$", (paths.ROOT / "CHANGELOG.md").read_text(), re.M))
    assert citation["version"] == gcpo.__version__
    assert str(citation["date-released"]) == released[gcpo.__version__]
