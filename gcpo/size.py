"""How large the package is: ``gcpo check`` says it, and tests/budget.yaml bounds it."""

from __future__ import annotations

import ast
from importlib.metadata import requires
from pathlib import Path


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


def size() -> str:
    """Return the package's lines, files and dependencies, in one line."""
    sizes = [len(code_lines(path)) for path in Path(__file__).parent.rglob("*.py")]
    needed = [one for one in requires("gcpo") or [] if "extra ==" not in one]
    return f"gcpo: {sum(sizes):,} lines of code in {len(sizes)} files; the core needs {len(needed)} other packages"
