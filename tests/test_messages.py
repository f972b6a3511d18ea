"""Messages of the command line, word for word."""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gcpo.cli import main

GOLDEN = json.loads((Path(__file__).parent / "golden" / "messages.json").read_text(encoding="utf-8"))
TMP = re.compile(rf"{re.escape(tempfile.gettempdir())}[/\\]gcpo-messages-\w+")

# --- how a message is made ------------------------------------------------------------------------------------------


def with_file(content: str, *words: str) -> dict[str, Any]:
    """The command of these words and of a file with this content."""
    with tempfile.TemporaryDirectory(prefix="gcpo-messages-") as folder:
        file = Path(folder, "mine.yaml")
        file.write_text(content)
        return command(*words, str(file))


def command(*arguments: str) -> dict[str, Any]:
    """Exit status and stderr of the command line; a list of names, which may grow, is left out."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        status = main(list(arguments))
    said = TMP.sub("TMP", stderr.getvalue())
    return {"exit": status, "stderr": "".join(said.partition("Valid names:")[:2])}


def given(*pairs: str) -> dict[str, Any]:
    """A run with these parameters: key, value, key, value and so on."""
    options = [word for at in range(0, len(pairs), 2) for word in ("-p", pairs[at], pairs[at + 1])]
    return command("run", *options)


def profile(content: str) -> dict[str, Any]:
    return with_file(content, "run", "--profile")


def grid(content: str) -> dict[str, Any]:
    return with_file(content, "grid")


# --- the cases ------------------------------------------------------------------------------------------------------

# Parameters that a run refuses.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "seed as text": ("seed", "x"),
    "learning rate as a truth value": ("learning_rate", "true"),
    "two at once": ("seed", "x", "dtype", "float16"),
    "unknown method": ("method", "gcpo_bott"),
    "unknown option": ("method_options", "{forn: linear}"),
    "unknown task": ("task", "tinyqaa"),
    "group size 1": ("group_size", "1"),
    "temperature 0": ("temperature", "0"),
    "shuffled with one group": ("method", "gcpo_shuffled", "prompts_per_step", "1"),
    "grpo with a field of ours": ("grpo", "{beta: 1}"),
    "no value for the task": ("max_completion_length", "{tinymath: 3}"),
}

CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"run: {name}": partial(given, *pairs) for name, pairs in PARAMETERS.items()},
    "run: unknown parameter": lambda: given("sede", "1"),
    "run: grpo with an unknown field": lambda: given("grpo", "{lerning_rate: 1}"),
    "run: unknown profile": lambda: command("run", "--profile", "smok"),
    "run: a file with a list": lambda: profile("- seed: 1\n"),
    "run: a file with an unknown key": lambda: profile("sead: 1\n"),
    "grid: unknown": lambda: command("grid", "zooo"),
    "grid: bad parameter": lambda: command("grid", "smoke", "-p", "group_size", "many"),
    "grid: kind": lambda: grid("- kind: trian\n"),
    "grid: no list": lambda: grid("- kind: train\n  seed: 1\n"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_message_is_the_golden_one(name: str) -> None:
    assert CASES[name]() == GOLDEN[name]


def test_every_case_is_golden_and_every_golden_message_has_a_case() -> None:
    assert set(CASES) == set(GOLDEN)
