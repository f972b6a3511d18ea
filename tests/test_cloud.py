"""The answer cloud: its stored answers against MiniLM, its picture, and its page by keyboard and on a phone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium.webdriver import Keys
from test_explorer import HEAD
from test_site import browser  # noqa: F401

from gcpo.reports import cloud
from gcpo.rewards import token_f1
from gcpo.semantics import Embedder

CLOUD = cloud.read()
POINTS = CLOUD["checkpoints"]


def right(point: dict[str, Any]) -> int:
    return sum(n for n, text in zip(point["counts"], CLOUD["texts"], strict=True) if text["right"])


def test_every_checkpoint_has_all_answers_and_right_ones_are_those_that_equal_a_reference() -> None:
    assert [point["step"] for point in POINTS] == [0, 16, 32, 48, 64]
    assert {sum(point["counts"]) for point in POINTS} == {CLOUD["samples"]} == {16}
    for text in CLOUD["texts"]:
        assert text["right"] == (max(token_f1(text["text"], one) for one in CLOUD["references"]) == 1), text


def test_cd_is_the_mean_distance_of_minilms_embeddings_of_the_answers() -> None:
    found = Embedder("all-MiniLM-L6-v2")([text["text"] for text in CLOUD["texts"]]).double().numpy()
    unit = found / np.linalg.norm(found, axis=1, keepdims=True)
    for point in POINTS:
        share = np.array(point["counts"]) / CLOUD["samples"]
        assert point["measures"]["CD"] == pytest.approx(share @ (1 - unit @ unit.T) @ share, abs=2e-3)


def test_the_picture_has_a_panel_per_checkpoint_and_a_dot_per_text_that_was_given() -> None:
    axes = cloud.figure().axes
    assert [axis.get_title() for axis in axes] == [f"step {point['step']}" for point in POINTS]
    assert [len(axis.collections) for axis in axes] == [sum(n > 0 for n in point["counts"]) for point in POINTS]


def test_the_piece_asks_no_other_host() -> None:
    assert set(re.findall(r"https?://[\w.]+", cloud.fragment())) == {"http://www.w3.org"}  # the namespace of SVG


def test_the_slider_moves_by_keyboard_and_the_page_says_what_is_seen(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "cloud.html").write_text(HEAD + cloud.fragment())
    browser.get((tmp_path / "cloud.html").as_uri())
    for place, point in enumerate(POINTS):
        said = browser.find_element("css selector", ".cloud .said").text
        assert said.startswith(f"After {point['step']} steps {right(point)} of 16 answers are right.")
        shapes = browser.execute_script(
            "return [...document.querySelectorAll('.cloud circle, .cloud rect')].map("
            "shape => +(shape.getAttribute('r') || shape.getAttribute('width') / 2))"
        )
        np.testing.assert_allclose(np.square(np.array(shapes) / 7), point["counts"], atol=1e-6)
        if place < len(POINTS) - 1:
            browser.find_element("css selector", ".cloud input").send_keys(Keys.ARROW_RIGHT)
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
