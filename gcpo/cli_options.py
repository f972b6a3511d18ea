"""Options of the command line that several commands have: their help, and their completion in a shell."""

from __future__ import annotations

import json
import shutil
import textwrap
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from gcpo import paths
from gcpo.runs.profiles import names_in, profiles


def starting(names: list[str], incomplete: str) -> list[str]:
    """Return the names that begin with what is typed."""
    return [name for name in names if name.startswith(incomplete)]


def parameters() -> dict[str, Any]:
    """The parameters of a run, as the JSON schema has them."""
    path = paths.PARAMS / "schema.json"
    if path.exists():
        return dict(json.loads(path.read_text(encoding="utf-8"))["properties"])
    from gcpo.runs.params import schema

    return dict(schema()["properties"])


class WithParameters(TyperCommand):
    """A command whose help ends with the parameters of a run and their defaults."""

    def get_help(self, ctx: Any) -> str:
        width = min(shutil.get_terminal_size().columns, 120)
        rows = ["\b", "Parameters for -p, with the values of the smoke profile:"]
        for name, about in parameters().items():
            default = "null" if about["default"] is None else about["default"]
            text = f"  {name:<22}{about['description']} [{default}]"
            rows += textwrap.wrap(text, width, subsequent_indent=" " * 24, break_on_hyphens=False)
        self.epilog = "\n".join(rows)
        return super().get_help(ctx)


Profile = Annotated[
    str,
    typer.Option(
        help="a file of params/, or a path to one",
        metavar="NAME",
        autocompletion=lambda incomplete: starting(profiles(), incomplete),
    ),
]
Toy = Annotated[bool, typer.Option("--toy", help="the profile with params/toy.yaml laid over it")]
Given = Annotated[
    list[str] | None,
    typer.Option(
        "-p",
        help="set a parameter; may be given many times",
        metavar="KEY VALUE",
        autocompletion=lambda incomplete: starting([*parameters()], incomplete),
    ),
]
GRIDS = paths.PARAMS / "grids"
GRID = {"metavar": "GRID", "autocompletion": lambda incomplete: starting(names_in(GRIDS), incomplete)}
Jobs = Annotated[
    int | None, typer.Option(min=1, help="runs at a time [as many as there are GPUs for, or cores and at most 4]")
]
AnyProfile = Annotated[bool, typer.Option("--any-profile", help="though the grid is made for another kind of profile")]
Index = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="only the run of this number, in the order of --dry-run")
]
Reference = Annotated[bool, typer.Option("--reference", help="the committed reference, not this machine's runs")]


def joined(arguments: list[str]) -> list[str]:
    """``-p KEY VALUE``, as papermill has it, as ``-p KEY=VALUE``: typer has no option of two values, many times."""
    joined, left = [], iter(arguments)
    for word in left:
        joined.append(word)
        if word == "-p":
            key, value = next(left, None), next(left, None)
            if key is None or value is None:
                raise typer.BadParameter("Option '-p' requires KEY and VALUE.")
            joined.append(f"{key}={value}")
    return joined
