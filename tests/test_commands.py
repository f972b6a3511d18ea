"""Every command that pages, notebooks and the Snakefile show, dry: its options, values and names are the program's."""

import json
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
PAGES += paths.NOTEBOOKS.glob("*.ipynb")
# What is not ours, or leaves something out.
OTHERS = r"python -c|python -m (?:build|pytest|verl|gcpo[.])|\S+ \.\.\.|snakemake -n"
COMMAND = re.compile(rf"(?!{OTHERS})(gcpo|papermill|make|snakemake|python|workflow/\S+) ")
NAMES = {"NAME": "table1", "PROFILE": "laptop", "FILE": "params/laptop.yaml", "PATH": "scratch", "N": "1"}
TARGETS = {*re.findall(r"(?m)^([\w-]+):", (paths.ROOT / "Makefile").read_text())}
NAMES |= {"GRID": "smoke", "my_method": "se", "my_task": "gsm8k"}  # a word in place of a name, and a name


def commands(page: Path) -> set[str]:
    """Lines of blocks and of comments, and what stands between backticks, that begin with one of our commands."""
    text = page.read_text().replace("\\\n", "")
    if page.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(page.read_text())["cells"])
    prose, blocks = ("".join(text.split("```")[start::2]) for start in (0, 1))
    found = [*blocks.splitlines(), *re.findall(r"(?m)^#   (.+)", text), *re.findall(r"`([^`]+)`", prose)]
    bare = (re.sub(r"^([A-Z_]+=\S+ )*(\.venv/bin/)?", "", " ".join(line.split())) for line in found)
    return {re.sub(r"\s+#.*|\s+>.*", "", line) for line in bare if COMMAND.match(line)}


SHOWN = sorted({line for page in PAGES if page.name != "CHANGELOG.md" for line in commands(page)})


@pytest.mark.parametrize("line", SHOWN)
def test_a_command_that_is_shown_can_be_given(line: str, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(paths.ROOT / "examples")  # as the line's PYTHONPATH
    program, *words = (NAMES.get(word, word) for word in shlex.split(line.removeprefix("python -m ")))
    assert all((paths.ROOT / word).exists() for word in [program, *words] if re.match(r"[a-z]+/[\w.]+", word))
    if program == "make":
        assert {word for word in words if "=" not in word} <= TARGETS
    elif program == "python":
        assert all(f'"{word}"' in (paths.ROOT / words[0]).read_text() for word in words if word[:2] == "--")
    elif program == "papermill":
        ours(["run", "--profile", *words[3:]], call)
    elif program == "snakemake":
        profile, grids = (word.partition("=")[2] for word in words[-2:])
        ours(["grid", *grids.split(), "--profile", profile], call)
    else:
        ours(["grid", words[1], "--profile", words[2]] if program != "gcpo" else words, call)


def ours(words: list[str], call: Any) -> None:
    """Read a line of gcpo as gcpo does, and resolve what the line names; a grid is listed."""
    if words[0].startswith("-"):
        assert words[0] in call("--help").out
    elif words[0] == "grid" and words[1:]:
        call(*dict.fromkeys([*words, "--dry-run"]))
    else:
        command, given = typer.main.get_command(cli.app).commands[words[0]], [w for w in words[1:] if w != "--help"]
        asked = command.make_context(words[0], given, resilient_parsing=not given).params
        profile = (asked.get("profile") or "smoke") + TOY * bool(asked.get("toy"))
        params = validate(over(load_profile(profile), cli._values(asked.get("given"))))
        named = [*(asked.get("name") or ()), *filter(None, [asked.get("grid")])]
        assert Plan(asked.get("kind") or "train", params).id and all(expand(grid, profile) for grid in named)
