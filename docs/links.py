"""Write the line of links in the head of every notebook, from the list in course.yaml: run this file."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat

from gcpo import paths
from gcpo.runs.profiles import read_yaml

PARTS: dict[str, dict[str, dict[str, str]]] = read_yaml(Path(__file__).with_name("course.yaml"))
LINE = re.compile(r"^\[(?:Previous|Next): .*(?:\n· .*)*$", re.M)  # the line, and what was once added below it


def listed() -> dict[str, str]:
    """Return what links call each notebook that is there, by its name and in order."""
    every = {name: about["called"] for part in PARTS.values() for name, about in part.items()}
    return {name: called for name, called in every.items() if (paths.NOTEBOOKS / f"{name}.ipynb").exists()}


def line(name: str) -> str:
    """Return the links of a notebook: the one before, the one after, the first, and the ledger."""
    called = listed()
    names = [*called]
    place = names.index(name)
    found = {"Previous": names[place - 1 : place] if place else [], "Next": names[place + 1 : place + 2]}
    links = [f"[{word}: {called[other]}]({other}.ipynb)" for word, others in found.items() for other in others]
    ends = {"00_start_here": "Start", "90_claims": "All claims"}
    links += [f"[{text}]({end}.ipynb)" for end, text in ends.items() if end != name]
    return " · ".join(links)


def main() -> None:
    """Write every line that is another."""
    for name in listed():
        path = paths.NOTEBOOKS / f"{name}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        head = notebook.cells[0]
        new = LINE.sub(lambda _, name=name: line(name), head.source, count=1)
        if new != head.source:
            head.source = new
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
