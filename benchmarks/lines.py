"""Lines of code of each room beside its budget, and of the longest files: ``python benchmarks/lines.py [--lower]``.

A room is a line of tests/budget.yaml: a folder, or a file of the package's ground floor. ``--lower`` writes the lines
of today into the budget of each room that has fewer, and drops rooms that are gone; a budget is never raised.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from gcpo.runs.profiles import read_yaml

ROOT = Path(__file__).parents[1]
BUDGET = ROOT / "tests" / "budget.yaml"


def code_lines(path: Path) -> set[int]:
    """Return the numbers of a file's lines of code: those that are no docstring, comment or blank."""
    source = path.read_text(encoding="utf-8")
    documented = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(source.splitlines(), start=1)
    return {n for n, text in lines if text.strip() and not text.strip().startswith("#") and n not in documented}


def files(room: str) -> list[Path]:
    """Return the Python files of a room."""
    path = ROOT / room
    return sorted(path.rglob("*.py")) if path.is_dir() else [path] * path.exists()


def rooms() -> dict[str, tuple[int, int]]:
    """Return the lines of each room, and its budget."""
    budget: dict[str, int] = read_yaml(BUDGET)
    return {room: (sum(len(code_lines(path)) for path in files(room)), most) for room, most in budget.items()}


def lower(found: dict[str, tuple[int, int]]) -> None:
    """Write smaller budgets where rooms have become smaller, and none for those that are gone."""
    text = BUDGET.read_text()
    for room, (lines, most) in found.items():
        new = f"{room}: {min(lines, most)}\n" if files(room) else ""
        text = re.sub(rf"(?m)^{re.escape(room)}: \d+\n", new, text)
    BUDGET.write_text(text)


def main() -> int:
    """Print every room; the status is 1 where one is over its budget."""
    found = rooms()
    if "--lower" in sys.argv:
        lower(found)
        found = rooms()
    for room, (lines, most) in found.items():
        print(f"{room:28s} {lines:6,d} of {most:6,d}{' OVER' if lines > most else ''}")
    longest = sorted(((len(code_lines(path)), path) for path in files("gcpo")), reverse=True)[:5]
    print("longest:", *(f"{path.relative_to(ROOT)} {lines}" for lines, path in longest), sep="\n  ")
    return int(any(lines > most for lines, most in found.values()))


if __name__ == "__main__":
    sys.exit(main())
