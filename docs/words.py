"""The patterns that CONTRIBUTING.md, "Words", asks not to write, looked for wherever people read: run this file.

A hook of pre-commit does so. Each pattern has been written here, and read twice by those who met it.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BANNED = {  # what it is called -> how it looks
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
# Sections of PROTOCOL.md that stand word for word as before the runs which they decide.
RULES = "Two worlds|The operating point|The gate and the controls|Runs|What is decided|Statistics|Amendments"


def plain(text: str) -> str:
    """Return the text without code, quotes, tables of examples, links, formulas and PROTOCOL.md's rules; a paragraph is
    one line."""
    text = re.sub(rf"^## (?:{RULES})\n(?:(?!## ).*\n?)*", "", text, flags=re.M)
    text = re.sub(r"```.*?```|~~~.*?~~~|<!--.*?-->|\$\$.*?\$\$", "", text, flags=re.S)
    text = re.sub(r"^(?:>|\|).*$", "", text, flags=re.M)
    text = re.sub(r"`[^`]*`|\$[^$]*\$|“[^”]*”|\"[^\"]*\"|\]\([^)]*\)|[*_\[\]]", "", text)
    return "\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=[-#\d])", text))


def hits(text: str) -> list[str]:
    """Return what is banned and where, a line each."""
    lines = plain(text).splitlines()
    return [f"{name}: ...{line[max(0, hit.start() - 30) : hit.end() + 30]}..." for line in lines
            for name, look in BANNED.items() for hit in re.finditer(look, line)]  # fmt: skip


def read(path: Path) -> str:
    """Return what people read of a file: a page, or the text cells of a notebook."""
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def openings(path: Path) -> list[str]:
    """Return docstrings of a file that do not open with a verb or a noun."""
    known = ast.Module, ast.ClassDef, ast.FunctionDef
    texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, known)]
    return [text.splitlines()[0] for text in texts if re.match(r"(?:What|Of|Where|The same)\b", text)]


def main() -> int:
    """Print what is banned; the status is 1 where there is any."""
    read_by_people = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    found = {path: hits(read(path)) for path in sorted(read_by_people)}
    found |= {path: openings(path) for path in sorted((ROOT / "gcpo").rglob("*.py"))}
    lines = [f"{path.relative_to(ROOT)}: {line}" for path, listed in found.items() for line in listed]
    print(*lines, sep="\n", end="\n" if lines else "")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
