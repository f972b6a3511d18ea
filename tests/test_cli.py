"""The command line: its help, its own errors, and completion."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gcpo import __main__ as console
from gcpo import __version__, cli, paths
from gcpo.runs.params import Params
from gcpo.runs.plan import KINDS


def test_run_lists_every_parameter_with_its_description(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["run", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for name, field in Params.model_fields.items():
        assert f"{name} {field.description}" in said
    assert f"<{'|'.join(KINDS)}>" in said


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in ("run", "evaluate", "grid", "check", "report", "methods", "world"))
    assert "..." not in said.replace("[ARGS]...", "")  # no summary is cut


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"gcpo {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gird"], "No such command 'gird'. Did you mean 'grid'?"),
        (["grid"], "Missing argument 'GRID'"),
        (["grid", "smoke", "--jobs", "0"], "Invalid value for '--jobs': Input should be greater than or equal to 1"),
        (["check", "--replay", "x"], "Invalid value for '--replay': "),
        (["run", "--porfile", "laptop"], "No such option: --porfile"),
        (["run", "--kind", "trian"], "Invalid value for '--kind': "),
        (["run", "-p", "seed"], "Invalid value: Option '-p' requires KEY and VALUE."),
    ],
)
def test_a_command_line_that_is_wrong_is_told_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"gcpo: {said}")
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_a_value_may_hold_an_equals_sign_and_begin_with_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("a=b", "-x"):
        assert cli.main(["run", "-p", "dtype", value]) == 2
        assert f"(got '{value}')" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "names"),
    [("grid table", {"table1"}), ("run --profile lap", {"laptop"}), ("run -p group_", {"group_size"})],
)
def test_names_are_completed_in_a_shell(words: str, names: set[str]) -> None:
    line = {"COMP_WORDS": f"gcpo {words}", "COMP_CWORD": str(len(words.split())), "_GCPO_COMPLETE": "complete_bash"}
    command = [sys.executable, "-m", "gcpo"]
    done = subprocess.run(command, env={**os.environ, **line}, capture_output=True, text=True)
    assert set(done.stdout.split()) == names, done.stderr


def test_the_console_script_is_this_command_line() -> None:
    project = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"gcpo": f"{console.main.__module__}:{console.main.__name__}"}
    assert Path(sys.executable).with_name("gcpo").exists()
