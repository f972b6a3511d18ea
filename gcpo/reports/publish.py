"""Making runs the committed reference, with the pages and tables that are made from it."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import nbformat
import pandas as pd
from papermill import inspect_notebook

from gcpo import io, paths
from gcpo.reports import records
from gcpo.reports.headline import waiting
from gcpo.reports.pages import write_readme, write_results
from gcpo.reports.site import absolute, own_grid, reports, reports_on
from gcpo.runs.grids import expand, fitting
from gcpo.runs.params import profile_name
from gcpo.runs.plan import with_trainings
from gcpo.runs.profiles import TOY
from gcpo.runs.record import RecordError
from gcpo.runs.runner import execute


def publish(profile: str, partial: bool = False) -> int:
    """Make this machine's runs of a profile the reference, with all that is made from it; returns how many runs it has.

    It takes the runs of the profile's grids, and names those that no grid asks for. Runs of the old reference that can
    stand beside this machine's (``records.to_publish``) stay in it, so that it grows; others go. Everything is built
    beside what there is and takes its place at the end. With ``partial`` a grid may lack runs, and the reports say
    which; each needs one at least.

    Raises:
        RecordError: a report's grid has runs that are not finished; the reference stays as it is.
    """
    if profile_name(profile).endswith(TOY):
        raise RecordError(
            f"{profile_name(profile)} holds runs of toy size, which show nothing of a method: never published."
        )
    fit, name = fitting(profile), profile_name(profile)
    shown = dict.fromkeys(own_grid(report, name) for report in reports_on(name))
    if foreign := [grid for grid in shown if grid not in fit]:
        raise RecordError(
            f"Grid {foreign[0]} is not made for {profile}, and a reference holds every report's: report --profile "
            f"{profile} --grid NAME shows its runs."
        )
    asked = {run.id for grid in fit for run in with_trainings(expand(grid, profile))}
    found = records.to_publish(profile)
    finished = [run for run in found if run.manifest["id"] in asked]
    made = {run.manifest["id"] for run in finished}
    gone = [run for run in records.runs(profile, reference=True) if run.manifest.get("id") not in made]
    for grid in shown:
        wanted = {plan.id for plan in expand(grid, profile)}
        if len(wanted & made) < (1 if partial else len(wanted)):
            needed = "a run of every report's grid" if partial else "every report's whole grid"
            otherwise = "" if partial else " (or publish what there is: --partial)"
            raise RecordError(
                f"Grid {grid} has {len(wanted & made)} of {len(wanted)} runs finished with {profile}: a reference "
                f"holds {needed}. First: python -m gcpo grid {grid} --profile {profile}{otherwise}"
            )
    if stray := [run.manifest["id"] for run in found if run.manifest["id"] not in asked]:
        print(f"left out, as no grid of {profile} asks for them: {', '.join(stray)}", flush=True)
    if gone:
        why = "damaged, of no grid, or made by other code or from other models"
        print(f"{len(gone)} runs of the old reference go: {why}", flush=True)
    _replace(profile, lambda folder: records.write_reference(folder, finished))
    return len(finished)


def _replace(profile: str, write: Callable[[Path], object]) -> None:
    """Build a reference and its pages in a place of their own, and put them where the old ones are.

    The ledger reads what reports found on other profiles too, and lies with the reference that ``reports.yaml`` names.
    A report on two worlds shows one beside the other, and is made again with either. One whose runs all wait
    (:func:`gcpo.reports.headline.waiting`) is not made.
    """
    name, root, named = profile_name(profile), paths.REFERENCE.with_name(".reference.draft"), reports()
    told = [report for report, shows in named.items() if name in (shows["profile"], shows.get("also"))]
    ledgers = [report for report, shows in named.items() if "grid" not in shows]
    home = named[ledgers[0]]["profile"] if told and ledgers else name
    shutil.rmtree(root, ignore_errors=True)
    write(root / name)
    for there in paths.REFERENCE.glob("*/"):
        if there.name == home != name:
            shutil.copytree(there, root / home)
        elif there.name != name:
            (root / there.name).symlink_to(there)
    finished = set(pd.read_json(root / name / "runs.jsonl", lines=True)["id"])
    made = [report for report in reports_on(name) if _compares(own_grid(report, name), profile, finished)] + ledgers
    before = os.environ.get("GCPO_REFERENCE")
    os.environ["GCPO_REFERENCE"] = str(root)  # the reference of the notebooks' kernels
    try:
        for report in made:  # in their order: the ledger reads what those before it found
            of, folder = (home, root / home) if report in ledgers and home != name else (absolute(profile), root / name)
            shown = {"grid": grid} if (grid := own_grid(report, name)) else {}
            settings = {"profile": of, "reference": True, "write_to": str(folder), **shown}
            execute(report, root / f"{report}.ipynb", settings)
            clean(root / f"{report}.ipynb")
    finally:
        os.environ.pop("GCPO_REFERENCE")
        if before:
            os.environ["GCPO_REFERENCE"] = before
    for each in {name, home}:
        with io.replacing(paths.REFERENCE / each) as draft:
            (root / each).rename(draft)
    for report in [report for report in made if told and (named[report]["profile"] == name or report in ledgers)]:
        (root / f"{report}.ipynb").replace(paths.NOTEBOOKS / f"{report}.ipynb")
    if told:
        write_readme(home)
        write_results(home)
    shutil.rmtree(root)
    for first in {named[report]["profile"] for report in told} - {name}:
        if (paths.REFERENCE / first).is_dir():
            pages_again(first)


def _compares(grid: str, profile: str, finished: set[str]) -> bool:
    """Return False for a grid all of whose runs wait for others."""
    return {plan.params.task for plan in expand(grid, profile)} > {*waiting(grid, profile, finished)}


def pages_again(profile: str) -> int:
    """Execute the reports on the committed reference again, in place; returns how many runs it has.

    Records stay as they are. Tables, figures, verdicts, committed notebooks, RESULTS.md and the README's blocks are
    made anew, as a new claim or a new report asks.

    Raises:
        RecordError: no reference of this profile is committed.
    """
    there = paths.REFERENCE / profile_name(profile)
    if not there.is_dir():
        raise RecordError(f"{there}: no reference of {profile} is committed.")
    made = shutil.ignore_patterns("*.csv", "*.png")
    _replace(profile, lambda folder: shutil.copytree(there, folder, ignore=made))
    return len(records.runs(profile, reference=True))


def execute_again(name: str) -> None:
    """Execute a read notebook in its place, and write its verdicts, if it has any, where the ledger reads them."""
    verdicts = "write_to" in inspect_notebook(str(paths.NOTEBOOKS / f"{name}.ipynb"))
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / f"{name}.ipynb"
        execute(name, made, {"write_to": str(paths.VERDICTS)} if verdicts else {})
        clean(made)
        shutil.move(made, paths.NOTEBOOKS / made.name)


def clean(path: Path) -> None:
    """Make an executed notebook one to commit: without what execution leaves in its metadata, and without the
    parameters that papermill put in, so that it reads as if executed with its own. Outputs stay."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "injected-parameters" not in cell.metadata.get("tags", ())]
    counts = itertools.count(1)
    for cell in notebook.cells:
        if cell.get("execution_count") is not None:
            cell.execution_count = next(counts)
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = cell.execution_count
        for key in ("papermill", "execution", "ExecuteTime", *([] if cell.metadata.get("tags") else ["tags"])):
            cell.metadata.pop(key, None)
    notebook.metadata.pop("papermill", None)
    notebook.metadata["language_info"] = {"name": "python"}  # and not the version that happened to execute it
    nbformat.write(notebook, path)
