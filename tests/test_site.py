"""The site, built as `make site` builds it and opened in a browser, at the widths of a desk and of a phone."""

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
from docutils import nodes
from filelock import FileLock
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


def test_the_diagram_is_what_its_script_draws(tmp_path: Path) -> None:
    committed = paths.ROOT / "docs" / "pictures" / "way_of_a_group.png"
    script = committed.with_suffix(".py")
    runpy.run_path(str(script))["write_picture"](tmp_path / committed.name)
    pair = [Image.open(file).convert("L") for file in (tmp_path / committed.name, committed)]
    again = f"make it again: .venv/bin/python {script}"
    assert pair[0].size == pair[1].size, again
    assert ImageStat.Stat(ImageChops.difference(*pair)).mean[0] < 0.5, again  # of 255


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The site, built once for all workers."""
    shared = tmp_path_factory.getbasetemp() if worker_id == "master" else tmp_path_factory.getbasetemp().parent
    folder = shared / "site"
    with FileLock(shared / "site.lock"):
        if not folder.exists():
            command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(folder)]
            done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_asks_no_other_host_for_anything(site: Path) -> None:
    assets = re.compile(r"""<(?:script|img|iframe)[^>]*\ssrc="(https?:)?//|<link[^>]*\shref="(https?:)?//""")
    for page in site.rglob("*.html"):
        assert not assets.search(page.read_text()), page
    for sheet in (site / "_static").rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", sheet.read_text()), sheet


@pytest.mark.slow
def test_every_notebook_stands_in_the_contents_and_the_course_in_its_order(site: Path) -> None:
    contents = re.search(r'<nav class="bd-links.*?</nav>', (site / "index.html").read_text(), re.S)[0]
    listed = re.findall(r'<a class="reference internal" href="notebooks/(\w+)\.html">', contents)
    assert sorted(listed) == sorted(path.stem for path in paths.NOTEBOOKS.glob("*.ipynb"))
    course = [name for name in listed if name[:2] in "00 01 02 03 20 05 21 07".split()]
    assert listed[: len(course)] == course
    assert [name[:2] for name in course if name[:2] != "01"] == "00 02 03 20 05 21 07".split()


@pytest.mark.slow
def test_every_claim_is_a_card_with_its_verdict_and_links_to_the_cells_that_decided_it(site: Path) -> None:
    table = pd.read_csv(paths.REFERENCE / "laptop" / "ledger.csv")
    page = (site / "docs" / "ledger.html").read_text()
    assert len(page.encode()) + (site / "_static" / "ledger.js").stat().st_size < 1e6
    cards = re.findall(r'<article class="claim" id="(.*?)".*? data-verdict="(.*?)">(.*?)</article>', page, re.S)
    assert [card[:2] for card in cards] == list(table[["id", "verdict"]].itertuples(index=False, name=None))
    linked = {}
    for claim, _, card in cards:
        linked[claim] = re.findall(r'<a href="\.\./(notebooks/\w+\.html)#([\w-]+)"', card)
        for target, anchor in linked[claim]:
            assert f'id="{anchor}"' in (site / target).read_text(), claim
    verdicts = ledger.read_verdicts("laptop", reference=True)
    for claim, lines, _ in ledger.reached(ledger.claims(), verdicts):
        assert {f"verdict-{line.id}" for line in lines if line.notebook} <= {anchor for _, anchor in linked[claim.id]}


@pytest.mark.slow
def test_figures_of_notebook_pages_have_alternative_texts(site: Path) -> None:
    pages = [*(site / "notebooks").glob("*.html"), *(site / "outputs").rglob("*.html")]
    pictures = {page.stem: re.findall(r"<img\b[^>]*>", page.read_text()) for page in pages}
    assert sum(map(len, pictures.values())) > 40
    for name, found in pictures.items():
        for picture in found:
            text = re.search(r'alt="([^"]+)"', picture)
            assert text and not re.search(r"\.(png|gif|svg)$", text[1]), f"{name}: {picture}"


@pytest.mark.slow
def test_public_names_are_in_the_reference_and_settings_have_their_defaults(site: Path) -> None:
    found = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    known = {name for kind, names in found.items() if kind.startswith("py:") for name in names}
    assert {f"gcpo.{name}" for name in PUBLIC.split()} <= known
    page = html.unescape(re.sub(r"<[^>]+>", "", (site / "docs" / "api" / "trainer.html").read_text()))
    for setting, default in {"method": "'gcpo_bot'", "alpha": "None", "entailment_threshold": "0.35"}.items():
        assert f"{setting} – (default {default})" in page


@pytest.mark.slow
def test_the_site_is_small_enough_to_carry_and_has_a_page_for_every_method(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.is_file() and ".doctrees" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 30e6
    for name, row in METHODS.items():
        page = html.unescape(re.sub(r"<[^>]+>", "", (site / "docs" / "methods" / f"{name}.html").read_text()))
        assert row.paper in page and row.rule in page
        assert all(f"class {type(part).__name__}" in page for part in row.components)


# --- parts of pages -------------------------------------------------------------------------------------------------


@pytest.fixture
def docs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of docs by name."""
    monkeypatch.syspath_prepend(paths.ROOT / "docs")
    return importlib.import_module


def section(*below: nodes.Node) -> tuple[nodes.Element, nodes.Element]:
    """A section of a notebook with one code cell, and the cell."""
    cell = nodes.container(nb_element="cell_code")
    return nodes.section("", nodes.title(text="How far?"), cell, *below), cell


def test_a_figure_is_described_by_the_first_sentence_of_its_caption(docs: Any) -> None:
    pages = docs("notebook_pages")
    text = "Figure 2. Share of the variance\nby Eq. 4 of GCPO (n = 30). Lines: medians."
    _, cell = section(nodes.paragraph("", "", nodes.emphasis(text=text)))
    assert pages.caption(cell) == "Share of the variance by Eq. 4 of GCPO (n = 30)."
    shown, figure = nodes.container(nb_element="cell_code"), nodes.container("", nodes.image())
    caption = nodes.paragraph("", "", nodes.emphasis(text="Medians. Of 30."))
    _, cell = section(shown, caption)  # below a cell of code alone
    assert pages.caption(cell) == "Medians."
    for below in ((), (nodes.paragraph(text="So what? Nothing."),), (figure, caption.deepcopy())):
        _, cell = section(*below)
        assert pages.caption(cell) == "Figure of the section “How far?”"


def test_a_card_has_one_sentence_and_an_issue_to_dispute_it(docs: Any) -> None:
    cards = docs("cards")
    claim = next(claim for claim in ledger.claims() if claim.id == "gcpo-prop-2-1-mass")
    verdicts = ledger.read_verdicts("laptop", reference=True)
    (_, lines, beside), *_ = ledger.reached([claim], verdicts)
    card = cards.card(claim, lines, beside, "https://example.org/gcpo")
    address = urlsplit(html.unescape(re.search(r'href="(https://[^"]*)"', card)[1]))
    asked = parse_qs(address.query)
    assert address.path == "/gcpo/issues/new" and asked["template"] == ["verdict.yml"]
    assert asked["claim"] == [f"{claim.id}: {claim.quote}"] and asked["notebook"] == [lines[0].notebook]
    assert "https://" not in cards.card(claim, lines, beside, "")
    template = (paths.ROOT / ".github" / "ISSUE_TEMPLATE" / "verdict.yml").read_text()
    assert all(f"id: {field}\n" in template for field in asked if field not in ("template", "title"))


def test_a_reason_in_brief_is_its_first_sentence_or_the_first_item_of_a_long_list(docs: Any) -> None:
    in_brief = docs("cards").in_brief
    assert in_brief("By Eq. 5 it falls 0.5 times. From 0.1 on it rises.") == "By Eq. 5 it falls 0.5 times."
    listed = "Fails for 2 of 3 (95 %; 10 seeds each): " + "; ".join(["a minus b: -0.12 [-0.19, -0.05] points"] * 8)
    assert in_brief(listed) == "Fails for 2 of 3 (95 %; 10 seeds each): a minus b: -0.12 [-0.19, -0.05] points; …"
    assert in_brief("One; two.") == "One; two."


def test_the_citation_has_the_version_and_the_date_of_the_release() -> None:
    citation = read_yaml(paths.ROOT / "CITATION.cff")
    released = dict(re.findall(r"^## \[([\d.]+)\] - (.+)$", (paths.ROOT / "CHANGELOG.md").read_text(), re.M))
    assert citation["version"] == gcpo.__version__
    assert str(citation["date-released"]) == released[gcpo.__version__]
