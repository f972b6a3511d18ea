"""The patterns that CONTRIBUTING.md, "Words", asks not to write are written nowhere that people read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest

from gcpo import paths
from gcpo.reports.site import reports

# What it is called -> how it looks. Each has been written here, and read twice by those who met it.
BANNED = {
    "a clause as subject": r"(?:^|[.:!?] )What (?!if\b)(?:[a-z' ]+ )?"
    r"(?:is|are|holds|counts|changes|differs|remains|follows)\b[^?]{0,160}\.(?:\s|$)",
    "begins with Of": r"(?:^|[.!?] )Of (?:the|all|these|those|each|its|a)\b",
    "as for because": r", as (?:it|they|this|that|these|those)\b",
    "less for minus": r"\b(?:GRPO|CD|BoT|RD|SE|KLE|one|it) less (?:GRPO|CD|BoT|RD|SE|KLE|that|those)\b",
    "an interval that holds zero": r"\bholds? (?:zero|0)\b",
    "told from": r"\btold from\b",
    "but for": r"\bbut for\b",
    "that of": r"\bthat of (?:the|its|an?)\b.*\bthat of\b",
    "cannot tell": r"\beffect excluded\b",
}
PROSE = ["README.md", "RESULTS.md", "CONTRIBUTING.md"]
PROSE += ["docs/explorer.md", "docs/ledger.md", "docs/runs.md", "docs/past_one_machine.md"]
READ = sorted(path for path in paths.NOTEBOOKS.glob("*.ipynb") if path.stem not in reports())


def plain(text: str) -> str:
    """The text without code, quotes of papers, tables of examples, links and formulas; a paragraph is one line."""
    text = re.sub(r"```.*?```|~~~.*?~~~|<!--.*?-->|\$\$.*?\$\$", "", text, flags=re.S)
    text = re.sub(r"^(?:>|\|).*$", "", text, flags=re.M)
    text = re.sub(r"`[^`]*`|\$[^$]*\$|“[^”]*”|\"[^\"]*\"|\]\([^)]*\)|[*_\[\]]", "", text)
    return "\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=[-#\d])", text))


def found(text: str) -> list[str]:
    """Return what is banned and where, a line each."""
    lines = plain(text).splitlines()
    return [f"{name}: ...{line[max(0, hit.start() - 30) : hit.end() + 30]}..." for line in lines
            for name, look in BANNED.items() for hit in re.finditer(look, line)]  # fmt: skip


@pytest.mark.parametrize("name", PROSE)
def test_a_page_has_none_of_the_banned_patterns(name: str) -> None:
    assert found((paths.ROOT / name).read_text()) == []


@pytest.mark.parametrize("path", READ, ids=lambda path: path.stem)
def test_a_notebook_has_none_of_the_banned_patterns(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert [hit for cell in cells if cell.cell_type == "markdown" for hit in found(cell.source)] == []


def docstrings(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    known = ast.Module, ast.ClassDef, ast.FunctionDef
    return [text for node in ast.walk(tree) if isinstance(node, known) and (text := ast.get_docstring(node))]


def test_no_docstring_opens_with_what_of_or_where() -> None:
    files = sorted((paths.ROOT / "gcpo").rglob("*.py"))
    texts = [(path.name, text.splitlines()[0]) for path in files for text in docstrings(path)]
    assert len(texts) > 500
    assert [(name, line) for name, line in texts if re.match(r"(?:What|Of|Where|The same)\b", line)] == []


@pytest.mark.parametrize(
    "text",
    [
        "What differs is the weight of a group.",
        "Of the groups, half are equal.",
        "It is lower, as it has no other reward.",
        "The gain is that of GRPO less that of SE.",
        "The interval holds zero.",
        "No control is told from GRPO.",
    ],
)
def test_each_pattern_is_found_where_it_stands_and_not_in_code_or_quotes(text: str) -> None:
    assert found(text)
    assert not found(f"> {text}") and not found(f"```\n{text}\n```") and not found(f"“{text}”")


@pytest.mark.parametrize(
    "text", ["What differs here?", "What if all rewards are equal?", "As in GRPO, we divide.", "We use it as a bound."]
)
def test_plain_sentences_pass(text: str) -> None:
    assert not found(text)
