"""Execute the run notebooks with the laptop profile on one seed, and keep them with their outputs for readers.

`make examples` runs this file (ten to twenty minutes on two cores); names of notebooks choose among them. The copies
lie in outputs/reference/examples, are shown by the site, and are linked from the head of each run notebook.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat

from gcpo import paths
from gcpo.reports.publish import clean
from gcpo.runs.profiles import load_profile
from gcpo.runs.runner import execute

FOLDER = paths.ROOT / "outputs" / "reference" / "examples"
SHOWN = {"profile": "laptop", "task": "tinyqa", "method": "gcpo_bot", "seed": 0, "share_prompts": True}
NOTE = "*An executed example: the laptop profile on one seed, "


def example(name: str) -> None:
    """Execute one run notebook, and write its copy with the parameters it ran with in its own parameters cell."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / f"{name}.ipynb"
        given = load_profile("laptop") | SHOWN | ({"warm_steps": 20} if name.startswith("14") else {})
        known = {line.split(" = ")[0] for line in parameters(read(paths.NOTEBOOKS / made.name)).splitlines()}
        given = {key: value for key, value in given.items() if key in known}
        execute(name, made, given)
        clean(made)
        notebook = read(made)
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            cell.source = "\n".join(filled(line, given) for line in cell.source.splitlines())
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    head = notebook.cells[0]
    head.source = "\n".join(line for line in head.source.splitlines() if not line.startswith("[Executed example]"))
    notebook.cells = [relinked(cell) for cell in notebook.cells]
    title, rest = head.source.split("\n", 1)
    own = f"{NOTE}made by `make examples`; the notebook itself is [{name}](../../../notebooks/{name}.ipynb).*"
    head.source = f"{title}\n\n{own}\n{rest}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, FOLDER / f"{name}.ipynb")


def read(path: Path) -> Any:
    """Return a notebook."""
    return nbformat.read(path, as_version=4)


def parameters(notebook: Any) -> str:
    """Return the source of the cell of parameters."""
    return next(cell.source for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))


def filled(line: str, given: dict[str, Any]) -> str:
    """Return an assignment with the value that the run had."""
    key = line.split(" = ")[0]
    return f"{key} = {given[key]!r}" if key in given else line


def relinked(cell: Any) -> Any:
    """Return a cell of text whose links start from the examples' folder."""
    if cell.cell_type == "markdown":
        cell.source = re.sub(
            r"\]\((?!http|#)(\.\./)?", lambda up: "](../../../" + ("" if up[1] else "notebooks/"), cell.source
        )
    return cell


if __name__ == "__main__":
    for chosen in sys.argv[1:] or sorted(path.stem for path in paths.NOTEBOOKS.glob("1[0-9]_*.ipynb")):
        print(chosen, flush=True)
        example(chosen)
