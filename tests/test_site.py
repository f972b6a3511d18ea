"""The site, built as `make site` builds it and opened in a browser, at the widths of a desk and of a phone."""

from __future__ import annotations

import html
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from filelock import FileLock
from PIL import Image, ImageChops, ImageStat
from selenium.webdriver import Keys
from selenium.webdriver.support.ui import WebDriverWait

from gcpo import paths
from gcpo.methods import METHODS

PAGES = [
    "index",
    "docs/explorer",
    "docs/ledger",
    "docs/runs",
    "RESULTS",
    "notebooks/30_bounds",
    "notebooks/21_table1",
]
PAGES += ["notebooks/90_claims"]
SEVERE = ("SEVERE", "WARNING")


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
def test_every_notebook_and_claim_is_there(site: Path) -> None:
    for path in paths.NOTEBOOKS.glob("*.ipynb"):
        assert (site / "notebooks" / f"{path.stem}.html").exists()
    claims = pd.read_csv(paths.REFERENCE / "laptop" / "ledger.csv")["id"]
    page = (site / "docs" / "ledger.html").read_text()
    assert re.findall(r'<tr id="(.*?)"', page) == claims.tolist()


@pytest.mark.slow
def test_the_site_is_small_enough_to_carry_and_has_a_page_for_every_method(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.is_file() and ".doctrees" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 30e6
    for name, row in METHODS.items():
        page = html.unescape(re.sub(r"<[^>]+>", "", (site / "docs" / "methods" / f"{name}.html").read_text()))
        assert row.paper in page and row.rule in page
        assert all(f"class {type(part).__name__}" in page for part in row.parts)


@pytest.fixture(params=[(1280, 1000), (390, 800)], ids=["desk", "phone"])
def browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not (chromium and shutil.which("chromedriver")):
        pytest.skip("needs Chromium or Chrome, and its driver (Debian: chromium, chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    width, height = request.param
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_experimental_option("mobileEmulation", {"deviceMetrics": {"width": width, "height": height}})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.mark.slow
def test_pages_load_without_errors_and_fit_the_screen(site: Path, browser: Any) -> None:
    for page in PAGES:
        browser.get((site / f"{page}.html").as_uri())
        done = "const done = arguments[0]; window.MathJax?.startup ? MathJax.startup.promise.then(done) : done()"
        browser.execute_async_script(done)
        assert [line for line in browser.get_log("browser") if line["level"] in SEVERE] == [], page
        load = "Promise.all([...document.images].map(i => (i.loading = 'eager', i.decode().catch(() => 0))))"
        browser.execute_async_script(f"const done = arguments[0]; {load}.then(() => done())")
        missing = "return [...document.images].filter(i => !i.naturalWidth).map(i => i.src)"
        assert browser.execute_script(missing) == [], page
        width, shown = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert width <= shown, f"{page} is {width} wide on a screen of {shown}"


@pytest.mark.slow
def test_set_up_cells_are_folded_and_code_can_be_copied(site: Path, browser: Any) -> None:
    browser.get((site / "notebooks" / "00_start_here.html").as_uri())
    folds = browser.find_elements("css selector", "details.set-up")
    assert [fold.text for fold in folds] == ["Parameters", "Set-up: imports and settings"]
    inside = folds[0].find_element("css selector", ".cell_input")
    assert not inside.is_displayed()
    folds[0].find_element("tag name", "summary").send_keys(Keys.ENTER)
    assert inside.is_displayed()
    button = inside.find_element("css selector", "button.copy")
    button.send_keys(Keys.ENTER)
    WebDriverWait(browser, 5).until(lambda _: button.text in ("copied", "selected"))
    if button.text == "selected":  # a page from a disk may not write to the clipboard
        assert "group_size = 8" in browser.execute_script("return getSelection().toString()")
    assert browser.execute_script("return document.querySelector('iframe').title") == "Explorer of one group"


@pytest.mark.slow
def test_the_ledger_is_filtered_by_paper_scope_and_verdict_and_by_its_address(site: Path, browser: Any) -> None:
    table = pd.read_csv(paths.REFERENCE / "laptop" / "ledger.csv")
    page = (site / "docs" / "ledger.html").as_uri()
    rows = "return [...document.querySelectorAll('#ledger tbody tr')].filter(r => r.offsetHeight).map(r => r.id)"
    browser.get(page)
    assert browser.execute_script(rows) == table["id"].tolist()
    choose = (
        "const menu = document.querySelector(`select[name=${arguments[0]}]`); menu.value = arguments[1];"
        "menu.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    left = table
    for name, value in (("paper", "GCPO"), ("verdict", "holds"), ("scope", "theorem")):
        browser.execute_script(choose, name, value)
        left = left[left[name] == value]
        assert browser.execute_script(rows) == left["id"].tolist()
    assert 0 < len(left) < len(table)
    count = browser.execute_script("return document.querySelector('.dt-info').textContent.trim()")
    assert count == f"{len(left)} of {len(table)} claims"
    browser.get(browser.current_url)  # as linked
    WebDriverWait(browser, 10).until(lambda _: browser.execute_script(rows))  # loaded may not yet be laid out
    assert browser.execute_script(rows) == left["id"].tolist()
    browser.find_element("css selector", ".dt-search input").send_keys('"exactly so"')
    found = left[left["because"].str.contains("exactly so", case=False)]
    assert 0 < len(found) < len(left)
    assert browser.execute_script(rows) == found["id"].tolist()
