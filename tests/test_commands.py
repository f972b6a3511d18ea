"""Every command that the pages and the Snakefile show, dry: its options, values and names are those of the program."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from gcpo import cli, paths
from gcpo.runs.grids import expand
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.profiles import TOY, load_profile, over

PAGES = [*paths.ROOT.glob("*.md"), *paths.ROOT.glob("docs/*.md"), paths.ROOT / "workflow" / "Snakefile"]
# What is not ours, or leaves something out.
OTHERS = r"python -c|python -m (?:build|verl)|\S+ \.\.\.|snakemake -n"
COMMAND = re.compile(rf"(?!{OTHERS})(gcpo|papermill|make|snakemake|python|workflow/\S+) ")
NAMES = {"NAME": "table1", "PROFILE": "laptop", "FILE": "params/laptop.yaml", "PATH": "scratch", "N": "1"}
NAMES |= {"GRID": "smoke", "my_method": "se", "my_task": "gsm8k"}  # a word in place of a name, and a name


def commands(page: Path) -> set[str]:
    """Lines of blocks and of comments, and what stands between backticks, that begin with one of our commands."""
    text = page.read_text().replace("\\\n", "")
    prose, blocks = ("".join(text.split("```")[start::2]) for start in (0, 1))
    found = [*blocks.splitlines(), *re.findall(r"(?m)^#   (.+)", text)]
    found += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    bare = (re.sub(r"^([A-Z_]+=\S+ )*(\.venv/bin/)?", "", line.strip()) for line in found)
    return {re.sub(r"\s+#.*|\s+>.*", "", line) for line in bare if COMMAND.match(line)}


SHOWN = sorted({line for page in PAGES if page.name != "CHANGELOG.md" for line in commands(page)})


@pytest.mark.parametrize("line", SHOWN)
def test_a_command_that_is_shown_can_be_given(line: str, call: Any) -> None:
    program, *words = (NAMES.get(word, word) for word in shlex.split(line))
    assert all((paths.ROOT / word).exists() for word in [program, *words] if re.match(r"[a-z]+/[\w.]+", word))
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    if program == "gcpo" or words[:2] == ["-m", "gcpo"]:
        ours(words[2 * (program == "python") :], call)
    elif program == "papermill":
        ours(["run", "--profile", words[3], *words[4:]], call)
    elif program == "snakemake":
        ours(["grid", *settings["grid"].split(), "--profile", settings["profile"]], call)
    elif program.startswith("workflow/"):
        ours(["grid", words[1], "--profile", words[2]], call)
    elif program == "make":
        targets = re.findall(r"(?m)^([\w-]+):", (paths.ROOT / "Makefile").read_text())
        assert {word for word in words if "=" not in word} <= {*targets}
    elif program == "python" and words[0] != "-m":
        source = (paths.ROOT / words[0]).read_text()
        assert all(f'"{word}"' in source for word in words if word.startswith("--"))


def ours(words: list[str], call: Any) -> None:
    """Read a line of gcpo as gcpo does, and resolve what the line names; a grid is listed."""
    group = typer.main.get_command(cli.app)
    if words[0].startswith("-"):
        assert words[0] in call("--help").out
    elif words[0] == "grid" and words[1:]:
        call(*words, *["--dry-run"] * ("--dry-run" not in words))
    elif words[1:] and "--help" not in words:
        given = group.commands[words[0]].make_context(words[0], words[1:]).params
        profile = given.get("profile", "smoke") + TOY * given.get("toy", False)
        params = validate(over(load_profile(profile), cli._values(given.get("given"))))
        assert Plan(given.get("kind", "train"), params).id
        assert all(expand(grid, profile) for grid in [*(given.get("name") or ()), given.get("grid")] if grid)
    else:
        assert words[0] in group.commands
