"""The command line: its help, its own errors, and completion."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gcpo import __version__, cli, paths
from gcpo.runs.params import Params, validate
from gcpo.runs.train import train


def test_a_command_that_takes_parameters_lists_them(call: Any) -> None:
    assert {*Params.model_fields} <= {*call("grid", "--help").out.split()}


def test_the_command_line_speaks_before_what_takes_seconds_to_import() -> None:
    slow = {"torch", "pandas", "transformers", "papermill", "matplotlib"}
    code = f"import sys; from gcpo import cli; cli.main(['world', '--seed', 'x']); print({slow} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n" and done.stderr.splitlines()[0] == "gcpo world: loading (seconds)"


@pytest.mark.parametrize(
    ("end", "status", "how"), [(KeyboardInterrupt, 130, "interrupted"), (SystemExit(143), 143, "ended by SIGTERM")]
)
def test_an_end_by_a_signal_says_how_to_go_on(
    end: Any, status: int, how: str, monkeypatch: pytest.MonkeyPatch, call: Any, outputs: Path
) -> None:
    def ends(*_: Any) -> None:
        raise end

    monkeypatch.setattr("gcpo.runs.runner.run_grid", ends)
    monkeypatch.setattr("gcpo.world.resolve", lambda *_: None)
    said = f"gcpo: {how}; what is finished stays. Go on with: gcpo grid smoke -p temperature 0.5"
    assert call("grid", "smoke", "-p", "temperature", "0.5", status=status).err.splitlines()[-1] == said


def test_a_grid_of_another_kind_of_profile_is_refused(call: Any) -> None:
    for grid, profile, fit in (("table1", "paper", "paper_table1"), ("paper_table1", "smoke", "smoke")):
        said = call("grid", grid, "--profile", profile, "--dry-run", status=2).err.splitlines()[-1]
        assert said.startswith(f"gcpo: grid {grid} is not made for {profile}") and fit in said


def test_a_report_of_a_misspelt_grid_leaves_nothing_behind(call: Any, outputs: Path) -> None:
    assert "Unknown grid 'smokee'." in call("report", "--grid", "smokee", status=2).err
    assert not outputs.exists()


WITHOUT_EXTRAS = """
import runpy, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
runpy.run_module("gcpo", run_name="__main__")
"""


def test_without_the_extra_it_is_named() -> None:
    project = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]
    needs = [need for needs in project["optional-dependencies"].values() for need in needs]
    missing = {re.split(r"[^\w-]", need)[0].replace("-", "_") for need in needs} - {"gcpo"}
    code = WITHOUT_EXTRAS.replace("MISSING", repr(missing))
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True)
    assert done.stdout == f"gcpo {__version__}\n" and not done.stderr
    done = subprocess.run([sys.executable, "-c", code, "check"], capture_output=True, text=True)
    assert done.returncode == 2 and 'pip install ".[repro]"' in done.stderr and done.stderr.count("\n") == 1


def test_what_trl_refuses_is_said_by_check_and_before_a_run_loads_its_policy(
    outputs: Path, tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "g.yaml").write_text("- {kind: train, method: [grpo, care]}")
    said = call("check", str(path), status=1).out.splitlines()[-1]
    assert said.startswith("TRL refuses tinyqa-care-0-") and "set beta above 0" in said
    monkeypatch.delattr("gcpo.runs.train.starting_policy")
    with pytest.raises(ValueError, match="set beta above 0"):
        train(validate({"method": "care", "processes": 2}))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gird"], "No such command 'gird'. Did you mean 'grid'?"),
        (["grid", "smoke", "--jobs", "0"], "Invalid value for '--jobs': Input should be greater than or equal to 1"),
        (["run", "--porfile", "laptop"], "No such option: --porfile"),
        (["run", "-p", "seed"], "Option '-p' requires 2 arguments."),
        (["replay", "1", "--profile", "smoke"], "profile smoke has no reference to make again: --profile takes "),
    ],
)
def test_a_command_line_that_is_wrong_is_told_in_one_line(arguments: list[str], said: str, call: Any) -> None:
    shown = call(*arguments, status=2)
    assert shown.err.startswith(f"gcpo: {said}") and shown.err.count("\n") == 1 and not shown.out


def test_names_are_completed_in_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"COMP_WORDS": "gcpo run -p method gcpo_c", "COMP_CWORD": "4", "_GCPO_COMPLETE": "complete_bash"}
    done = subprocess.run([sys.executable, "-m", "gcpo"], env={**os.environ, **line}, capture_output=True, text=True)
    assert done.stdout.split() == ["gcpo_cd"], done.stderr
    monkeypatch.setenv("COMP_WORDS", "gcpo run -p task qasper -p max_s")
    assert cli.offer("max_s") == ["max_steps"]
