"""The explorer in a browser: its formulas against the package's, and its page by keyboard, on a desk and on a phone."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from selenium.webdriver import ActionChains, Keys
from test_site import browser  # noqa: F401

from gcpo import measures, paths
from gcpo.methods import advantages, weights
from gcpo.reports import explorer
from gcpo.rollouts import Rollouts

SHOWN = ["se", "cd_only", "bot_only", "rd_only", "gcpo_cd", "gcpo_bot", "qhawkeye", "grpo"]
HEAD = '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width"><body>'


def vocabulary() -> tuple[list[str], torch.Tensor]:
    stored = json.loads((explorer.HERE / "answers.json").read_text())
    rows = torch.zeros(len(stored["texts"]), len(stored["texts"]), dtype=torch.float64)
    for place, row in enumerate(stored["rows"]):
        rows[place, : place + 1] = torch.tensor(row, dtype=torch.float64)
    return stored["texts"], rows


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Any:  # noqa: F811
    (tmp_path / "explorer.html").write_text(HEAD + explorer.fragment())
    browser.get((tmp_path / "explorer.html").as_uri())
    return browser


def groups(count: int) -> list[dict[str, Any]]:
    """Random groups of 1 to 64 answers, equal and opposite ones among them; strengths from none to too much."""
    chance, (_, rows) = torch.Generator().manual_seed(5), vocabulary()

    def draw(top: int, *size: int) -> torch.Tensor:
        return torch.randint(top, size or (1,), generator=chance)

    made = []
    for number in range(count):
        size = [1, 2, 3, 64, 1 + int(draw(64))][number % 5]
        vectors = rows[draw(len(rows), size)] if number % 2 else torch.randn(size, 3, generator=chance).double()
        if number % 7 == 0:
            vectors[1::2] = -vectors[: len(vectors[1::2])]
        share = torch.rand(1, generator=chance) if number % 4 else torch.tensor([1.0])
        made.append(
            {
                "vectors": vectors.tolist(),
                "clusters": (1 + draw(1 + int(draw(size)), size)).tolist(),
                "rewards": (2.0 * (torch.rand(size, generator=chance) < share)).tolist(),
                "alpha": [0.0, 0.6, 2.5][number % 3],
            }
        )
    return made


@pytest.mark.slow
def test_formulas_are_those_of_the_package(page: Any) -> None:
    asked = groups(150)
    call = "arguments[0].map((g) => gcpoExplorer.measure(g.vectors, g.clusters, g.rewards, g.alpha))"
    for group, found in zip(asked, page.execute_script(f"return {call}", asked), strict=True):
        embeddings = torch.tensor([group["vectors"]], dtype=torch.float64)
        clusters = torch.tensor([group["clusters"]])
        rewards = torch.tensor([group["rewards"]], dtype=torch.float64)
        rollouts = Rollouts(rewards, embeddings=embeddings, clusters=clusters, reward_range=(0.0, 2.0))
        expected = {
            "se": measures.semantic_entropy(clusters),
            "cd": measures.cosine_dispersion(embeddings),
            "bot": measures.barycentric_transport(embeddings, clusters),
            "rd": measures.reward_dispersion(rewards),
        }
        for name, value in expected.items():
            assert found[name] == pytest.approx(value.item(), abs=1e-6), (name, group)
        for name in SHOWN:
            alpha = {} if name in ("qhawkeye", "grpo") else {"alpha": group["alpha"]}
            weight = weights(name, rollouts, **alpha)[0, 0].item()
            assert found["weights"][name] == pytest.approx(weight, abs=1e-6), (name, group)
            own = advantages(name, rollouts, **alpha)[0].tolist()
            assert found["advantages"][name] == pytest.approx(own, abs=1e-6), (name, group)
        assert found["clusters"] == len(set(group["clusters"]))


def test_its_answers_have_the_cosines_that_minilm_gives_them() -> None:
    again = runpy.run_path(str(paths.ROOT / "docs" / "vocabulary.py"))
    texts, rows = vocabulary()
    fresh = again["answers"]()
    assert fresh["texts"] == texts and len(set(texts)) == len(texts)
    embedded = torch.nn.functional.normalize(again["Embedder"]("all-MiniLM-L6-v2")(texts).double(), dim=1)
    torch.testing.assert_close(rows @ rows.T, embedded @ embedded.T, rtol=0, atol=1e-3)
    assert (explorer.HERE / "answers.json").stat().st_size < 300_000


def shown(page: Any) -> dict[str, str]:
    """Return the page's numbers by name."""
    read = "tr => [tr.cells[0].textContent, tr.cells[tr.cells.length - 1].textContent]"
    rows = "document.querySelectorAll('.explorer-measures tr, .explorer-weights tr')"
    return dict(page.execute_script(f"return [...{rows}].map({read})"))


def choose(page: Any, example: str) -> str:
    """Take an example from the menu, and return the sentence that the page says of it."""
    menu = page.find_element("name", "example")
    page.execute_script(
        "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change', {bubbles: true}))",
        menu,
        example,
    )
    return page.find_element("css selector", ".explorer-said").text


@pytest.mark.slow
def test_everything_can_be_done_by_keyboard_and_asks_no_host(page: Any) -> None:
    def press(*keys: str) -> None:
        ActionChains(page).send_keys(*keys).perform()

    def focused() -> str:
        asked = "const a = document.activeElement; return a.name || a.ariaLabel || a.textContent"
        return page.execute_script(asked)

    before = shown(page)
    reached = []
    for _ in range(9):
        press(Keys.TAB)
        reached.append(focused())
    assert reached[:5] == ["example", "alpha", "equal", "add", "Answers"]
    assert reached[5:] == ["method", "answer", "right", "cluster"]
    press(Keys.ARROW_UP, Keys.ARROW_UP, Keys.ARROW_UP)  # from cluster 1 to one of its own
    after = shown(page)
    assert (before["clusters"], after["clusters"]) == ("3", "4")
    assert float(after["semantic entropy SE, nats"]) > float(before["semantic entropy SE, nats"])
    ActionChains(page).key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT).perform()
    press(Keys.SPACE)  # the first answer is no longer right: 3 of 8 are
    assert float(shown(page)["reward dispersion RD"]) == pytest.approx(15 / 16, abs=5e-4)
    for _ in range(2):
        press(Keys.TAB)
    press(Keys.ENTER)  # the first answer is gone, and the next one's button has the focus
    assert len(page.find_elements("css selector", ".explorer-answers tbody tr")) == 7
    assert focused() == "remove this answer"
    page.find_element("name", "equal").send_keys(Keys.ENTER)
    assert shown(page)["clusters"] == "5"  # texts
    page.find_element("name", "alpha").send_keys(Keys.CONTROL + "a", Keys.NULL, "0")
    assert {shown(page)[name] for name in ("GCPO-CD", "GCPO-BoT", "semantic entropy")} == {"1.0000"}
    assert page.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)") == []
    assert [line for line in page.get_log("browser") if line["level"] in ("SEVERE", "WARNING")] == []


@pytest.mark.slow
def test_groups_without_a_difference_get_one_sentence_and_what_the_formulas_say(page: Any) -> None:
    def advantages() -> set[str]:
        cells = "document.querySelectorAll('.explorer-answers .value')"
        return set(page.execute_script(f"return [...{cells}].map(cell => cell.textContent)"))

    assert choose(page, "no answer at all") == "A group needs at least one answer: add one."
    assert not page.find_element("class name", "explorer-figures").is_displayed()
    page.find_element("name", "add").click()
    assert choose(page, "one answer").startswith("One answer has nothing to differ from")
    assert set(list(shown(page).values())[5:]) == {"1.0000"} and advantages() == {"+0.00"}
    assert choose(page, "all right (equal rewards)").startswith("All rewards are equal")
    assert shown(page)["reward dispersion RD"] == "0.000" and advantages() == {"+0.00"}
    eight = choose(page, "a right answer, a near miss, and a stray"), shown(page)
    sixty_four = choose(page, "64 answers"), shown(page)
    same = ["clusters", "semantic entropy SE, nats", "barycentric transport BoT", "reward dispersion RD"]
    assert {name: eight[1][name] for name in same} == {name: sixty_four[1][name] for name in same}
    assert page.find_element("name", "add").get_attribute("disabled")
    assert len(page.find_elements("css selector", ".explorer-distances title")) == 64 * 64
    width, screen = page.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert width <= screen
    page.find_element("name", "alpha").send_keys(Keys.CONTROL + "a", Keys.NULL, "-1")
    assert page.find_element("class name", "explorer-said").text == "α has to be a number of at least 0."


@pytest.mark.slow
def test_an_answer_of_ones_own_counts_as_unlike_all_others(page: Any) -> None:
    choose(page, "one meaning, two rewards")
    first = page.find_element("css selector", ".explorer-answers input")
    first.send_keys(Keys.CONTROL + "a", Keys.NULL, "beneath a bridge")
    assert "beneath a bridge" in page.find_element("class name", "explorer-said").text
    titles = page.execute_script(
        "return [...document.querySelectorAll('.explorer-distances title')].map(t => t.textContent)"
    )
    own = [title for title in titles if title.startswith("beneath a bridge / ")]
    assert len(own) == 8 and sorted(title[-4:] for title in own) == ["0.00"] + ["1.00"] * 7


@pytest.mark.slow
def test_a_notebook_shows_it_in_a_frame_as_high_as_it_is(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "frame.html").write_text(HEAD + explorer.frame())
    browser.get((tmp_path / "frame.html").as_uri())
    script = """const done = arguments[0], frame = document.querySelector('iframe');
    const tell = () => done([frame.offsetHeight, frame.contentDocument.body.offsetHeight]);
    const look = () => setTimeout(frame.contentDocument.querySelector('.explorer-bars') ? tell : look, 300);
    look();"""
    height, inside = browser.execute_async_script(script)
    assert 0 <= height - inside < 60
