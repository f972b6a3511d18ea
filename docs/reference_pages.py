"""Two pages for the site that are made from code: the parameters of a run, and the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import typer

from gcpo import cli
from gcpo.runs.params import WHOLE, Params
from gcpo.runs.profiles import load_profile, profiles

FOLDER = Path(__file__).resolve().parent / "reference"  # which git ignores
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def write() -> None:
    """Write the pages that have changed."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in (("parameters", parameters()), ("commands", commands())):
        path = FOLDER / f"{name}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def values(about: dict[str, Any]) -> str:
    """Return the values that a JSON schema allows, in words: "integer or null"."""
    if parts := about.get("anyOf"):
        return " or ".join(map(values, parts))
    names = about.get("enum", [about["const"]] if "const" in about else [])
    return " or ".join(f"`{name}`" for name in names) or about.get("type", "any")


def limits(name: str) -> str:
    """Return the limits of a parameter, which its schema has not always: ", at least 0"."""
    found = [
        (word, getattr(one, key, None)) for one in Params.model_fields[name].metadata for key, word in LIMITS.items()
    ]
    return "".join(f", {word} {limit:,}" for word, limit in found if limit is not None)


def parameters() -> str:
    """Return the page of the parameters of a run: their values, defaults and meaning, by pydantic's schema."""
    others = {name: load_profile(name) for name in profiles() if name != "smoke"}
    rows = []
    for name, about in Params.model_json_schema()["properties"].items():
        default = json.dumps(about["default"])
        apart = [profile for profile, given in others.items() if given.get(name, about["default"]) != about["default"]]
        cells = [f"`{name}`", values(about) + limits(name), f"`{default}`", about["description"], ", ".join(apart)]
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    table, whole = "\n".join(rows), ", ".join(f"`{name}`" for name in WHOLE)
    return f"""# Parameters of a run

Each stands in a file of `params`, in the first cell of a run notebook, or behind `-p` on the command line. A value may
be a mapping from tasks to values, also from "short" and "solution" (tasks by the length of their answers) and
"default"; only {whole} take none. The default is
the one of profile `smoke`. The last column names the profiles with another value.

| parameter | values | default | meaning | differs in |
|---|---|---|---|---|
{table}
"""


def commands() -> str:
    """Return the page of the command line: each command's own help."""
    group = typer.main.get_command(cli.app)
    parts = []
    for name, command in group.commands.items():
        context = command.make_context(name, [], resilient_parsing=True)
        context.info_name = f"gcpo {name}"
        help_ = re.split(r"\n\s*Parameters for -p", command.get_help(context))[0].rstrip()
        parts.append(f"## {name}\n\n```text\n{help_}\n```")
    return (
        "# The command line\n\n`gcpo` is `python -m gcpo`. `-p` takes [the parameters of a run](parameters.md); "
        "[runs, grids and records](../runs.md) shows the commands at work.\n\n" + "\n\n".join(parts) + "\n"
    )
