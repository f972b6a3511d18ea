"""Reports: which runs they show, what they say where nothing has run, and a reference that is never half replaced."""

import subprocess
import sys
from ast import literal_eval
from pathlib import Path
from typing import Any

import pandas as pd
import papermill
import pytest
from papermill import inspect_notebook

from gcpo import paths
from gcpo.cli import main
from gcpo.reports import publish, records, report
from gcpo.runs import record
from gcpo.runs.grids import expand, fitting, grids
from gcpo.runs.plan import Plan


@pytest.fixture(autouse=True)
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Outputs and reference of the test's own; what would be executed, with its parameters."""
    for name in ("OUTPUTS", "REFERENCE"):
        monkeypatch.setattr(paths, name, tmp_path / name.lower())
    monkeypatch.setattr(record, "environment", lambda: {"code": "c0de", "commit": "c0ffee", "dirty": False})
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(publish, "execute", lambda name, output, parameters: calls.append((name, parameters)))
    return calls


def finish(plan: Plan) -> None:
    with record.record(plan) as run:
        run.table("eval.csv", pd.DataFrame({"query": ["a"], "decoding": ["greedy"], "f1": [0.5]}))


def shown_grids(profile: str) -> list[str]:
    return list(dict.fromkeys(filter(None, (publish.own_grid(name, profile) for name in publish.reports()))))


def test_every_report_notebook_is_listed_and_its_parameters_say_the_same() -> None:
    found = {}
    for path in sorted(paths.NOTEBOOKS.glob("[249][0-9]_*.ipynb")):
        has = inspect_notebook(str(path))
        named = {"grid": "grid", "profile": "profile", "also": "second_world"}  # in reports.yaml, and in the notebook
        found[path.stem] = {key: literal_eval(has[name]["default"]) for key, name in named.items() if name in has}
    listed = {name: {k: v for k, v in shows.items() if k != "elsewhere"} for name, shows in publish.reports().items()}
    assert listed == found and list(listed) == list(found)
    for profile in ("laptop", "world_a", "paper"):
        assert set(shown_grids(profile)) <= set(grids())


def test_a_report_shows_another_grid_of_profiles_that_the_protocol_does_not_name() -> None:
    asked = [("21_table1", "world_a"), ("21_table1", "laptop"), ("20_figure1", "world_b"), ("29_speed", "laptop")]
    assert [publish.own_grid(*each) for each in asked] == ["headline", "table1", "checkpoints", ""]


def test_a_report_of_no_runs_is_left_out_in_words(executed: list[tuple[str, dict[str, Any]]], capsys: Any) -> None:
    finish(expand("figure1", "smoke")[0])
    assert main(["report", "--profile", "smoke"]) == 0
    assert [name for name, _ in executed] == ["20_figure1", "29_speed", "42_gradient_checks", "90_claims"]
    assert executed[0][1]["reference"] is False and executed[0][1]["any_code"] is False
    printed = capsys.readouterr().out
    nothing = "21_table1: nothing has run of grid table1 with smoke: python -m gcpo grid table1"
    assert nothing in printed


def test_a_profile_of_benchmarks_has_grids_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    found = {own: publish.grid_for(fitting("paper"), own) for own in shown_grids("paper")}
    assert all(found[own] == f"paper_{own}" for own in ("table1", "figure1", "ablations"))
    assert {own: publish.grid_for(fitting("laptop"), own) for own in found} == {own: own for own in found}
    assert main(["report", "--profile", "paper"]) == 1  # nothing is made
    printed = capsys.readouterr().out
    assert "21_table1: 40_papers_tables shows grid paper_table1" in printed
    assert "23_sweep: no grid sweep is made for paper, whose grids are paper_ablations, paper_figure1" in printed


def test_a_paper_s_grid_is_shown_by_the_papers_tables(executed: list[tuple[str, dict[str, Any]]]) -> None:
    finish(expand("paper_seed_table4", "paper_seed")[0])
    assert main(["report", "--profile", "paper_seed", "--grid", "paper_seed_table4"]) == 0
    assert [(name, given.get("only")) for name, given in executed][:-1] == [(publish.PAPERS, "paper_seed_table4")]


def test_a_failing_report_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    finish(expand("figure1", "smoke")[0])
    folder = paths.OUTPUTS / "smoke" / "reports"

    def execute(name: str, output: Path, parameters: dict[str, Any]) -> None:
        if name == "90_claims":
            raise papermill.PapermillExecutionError(1, 1, "", "RecordError", "no\nledger", [])
        output.write_text("")

    monkeypatch.setattr(publish, "execute", execute)
    assert main(["report", "--profile", "smoke"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line == f"gcpo: 90_claims: RecordError: no ledger (traceback: {folder}/90_claims.ipynb)"


def test_what_make_reproduce_runs_is_part_of_the_protocols_grids() -> None:
    asked = {plan.id for plan in expand("reproduce", "world_a")}
    assert asked < {plan.id for grid in report.GRIDS for plan in expand(grid, "world_a")}
    for grid, controls in (("headline", report.CONTROLS), ("steps", ()), ("checkpoints", ())):
        labels = {plan.label for plan in expand(grid, "world_a") if plan.id in asked}
        assert labels and {*controls} <= labels, grid


def test_what_make_reproduce_all_runs_is_part_of_the_reports_own_grids() -> None:
    whole = [plan for name in {*shown_grids("laptop")} & {*fitting("laptop")} for plan in expand(name, "laptop")]
    asked = expand("reproduce_all", "laptop")
    assert {plan.id for plan in asked} < {plan.id for plan in whole}
    assert {plan.params.method for plan in asked} == {plan.params.method for plan in whole if plan.kind == "train"}


def test_the_reference_is_shown_when_asked_for(executed: list[tuple[str, dict[str, Any]]]) -> None:
    finish(expand("figure1", "smoke")[0])
    records.write_reference(paths.REFERENCE / "smoke", records.runs("smoke"))
    assert main(["report", "--profile", "smoke", "--reference", "--any-code"]) == 0
    (name, call), *_, (last, of_ledger) = executed
    assert (name, call["reference"], call["any_code"]) == ("20_figure1", True, True)
    assert (last, of_ledger["reference"]) == ("90_claims", True) and "any_code" not in of_ledger


def test_a_profile_may_be_an_own_file(executed: list[tuple[str, dict[str, Any]]], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("profile: mine\nseed: 3\n")
    finish(expand("figure1", str(path))[0])
    assert main(["report", "--profile", str(path)]) == 0
    assert executed[0][1]["profile"] == str(path)
    assert executed[0][1]["write_to"] == str(paths.OUTPUTS / "mine" / "reports")


# Of the papers' own tables nobody has made the runs.
COMMITTED = {name: paths.REFERENCE / of["profile"] for name, of in publish.reports().items() if name != publish.PAPERS}


# Two reports that resample the most take eight minutes: with the replays (make replay), not on every push.
BY_REPORT = [pytest.param(name, marks=[pytest.mark.replay] * (name[:2] in ("20", "42"))) for name in COMMITTED]


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_REPORT)
def test_a_committed_report_is_what_the_committed_records_give(name: str, tmp_path: Path) -> None:
    """Executed here alone, by nbval, which compares its outputs; the tables that it writes are the committed ones."""
    copy, tables = tmp_path / f"{name}.ipynb", tmp_path / "tables"
    written = {"write_to": str(tables)}
    papermill.execute_notebook(paths.NOTEBOOKS / copy.name, copy, written, prepare_only=True)
    nbval = ["--nbval-lax", "--nbval-current-env", "--nbval-sanitize-with", "tests/sanitize.cfg", "-p", "conftest"]
    command = [sys.executable, "-m", "pytest", "-q", "-c", "pyproject.toml", *nbval, str(copy)]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    made = {path.name: path.read_bytes() for path in tables.glob("*.csv")}
    assert made
    kept = {path.name: path.read_bytes() for path in COMMITTED[name].glob("*.csv")}
    assert [table for table in made if made[table] != kept[table]] == [], "edited, or of other code"
    assert f"verdicts_{name[:2]}.csv" in made or name.startswith(("23", "28", "29", "90"))
