"""Executing the report notebooks, and making runs the committed reference."""

from __future__ import annotations

import ast
import base64
import itertools
import os
import shutil
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import nbformat
import papermill
from PIL import Image

from gcpo import io, paths
from gcpo.reports import records
from gcpo.reports.diagram import way_of_a_group
from gcpo.reports.figures import set_style
from gcpo.reports.tables import markdown, write_readme, write_results
from gcpo.runs.grids import expand, fitting
from gcpo.runs.params import is_file_name, profile_name
from gcpo.runs.record import RecordError
from gcpo.runs.rehearsal import PREFIX
from gcpo.runs.runner import execute

THUMBNAIL = (260, 130)  # pixels, at most


def reports() -> list[str]:
    """The report notebooks, 20 and above."""
    return sorted(path.stem for path in paths.NOTEBOOKS.glob("[2-9][0-9]_*.ipynb"))


def default_of(report: str, parameter: str) -> str | None:
    """What a report notebook shows unless told otherwise: its grid, its profile; None if it has no such parameter."""
    inspected = papermill.inspect_notebook(str(paths.NOTEBOOKS / f"{report}.ipynb"))
    return str(ast.literal_eval(inspected[parameter]["default"])) if parameter in inspected else None


def grids_of(names: list[str]) -> list[str]:
    """The grids that reports show unless told otherwise, each once."""
    return [grid for grid in dict.fromkeys(default_of(name, "grid") for name in names) if grid]


def grid_for(made: list[str], own: str) -> str:
    """Of the grids that are made for a profile (:func:`gcpo.runs.grids.fitting`) that of a report's own table: table1
    of laptop, paper_table1 of benchmarks; the own one where there is none."""
    return own if own in made else next((grid for grid in made if grid.endswith(f"_{own}")), own)


def report(
    profile: str, grid: str | None = None, *, any_code: bool = False, reference: bool = False
) -> tuple[list[Path], list[str]]:
    """Execute every report notebook on the runs of a profile; each has the grid of its table (:func:`grid_for`) unless
    ``grid`` names another.

    Args:
        profile: a profile's name, or a parameter file.
        grid: one grid for all of them.
        any_code: compare runs of different code of this package.
        reference: show the committed reference in place of this machine's runs.

    Returns:
        the executed copies, in ``outputs/<profile>/reports`` beside their tables and figures and ``index.md``, which
        lists them and the runs that are missing; and, for each report of whose grid nothing has run, a line that says
        so.
    """
    folder, start = paths.OUTPUTS / profile_name(profile) / "reports", time.time()
    folder.mkdir(parents=True, exist_ok=True)
    profile, grid = _absolute(profile), grid and _absolute(grid)
    fit = fitting(profile)
    made: list[Path] = []
    left_out: list[str] = []
    try:
        for name in reports():
            settings: dict[str, Any] = {"profile": profile, "reference": reference}
            if own := default_of(name, "grid"):  # the ledger has none: it reads what the others found
                wanted = grid or grid_for(fit, own)
                if why := _unfit(own, wanted, fit, profile, reference):
                    left_out.append(f"{name}: {why}")
                    (folder / f"{name}.ipynb").unlink(missing_ok=True)  # of other runs, for the ledger to mistake
                    continue
                settings |= {"grid": wanted, "any_code": any_code}
            elif not made:
                continue
            execute(name, folder / f"{name}.ipynb", {**settings, "write_to": str(folder)})
            made.append(folder / f"{name}.ipynb")
    finally:
        written = sorted(path.name for path in folder.glob("*.*") if path.stat().st_mtime >= start)
        lines = [f"# Reports of profile {profile_name(profile)}", "", f"From {records.source(profile, reference)}.", ""]
        lines += [f"- [{name}]({name})" for name in written if not name.startswith("index")]
        lines += [f"- not made: {why}" for why in left_out]
        own_grids = dict.fromkeys(grid_for(fit, own) for own in grids_of(reports()))
        shown = [grid] if grid else [one for one in own_grids if one in fit]
        lines += ["", *_missing(shown, profile, reference)]
        (folder / "index.md").write_text("\n".join(lines), encoding="utf-8")
    return made, left_out


def _missing(grids: list[str], profile: str, reference: bool) -> list[str]:
    """For each grid how many of its runs are finished, and which are not, in Markdown."""
    lines = ["## Runs", ""]
    for grid in grids:
        table = records.coverage(grid, profile, reference)
        lines += [f"Grid `{grid}`: {table['finished'].sum()} of {table['wanted'].sum()} finished.", ""]
        missing = table[table["finished"] < table["wanted"]]
        if len(missing):
            lines += ["Missing:", "", markdown(missing[["task", "run", "wanted", "finished", "failed", "left_out"]])]
    return lines


def _unfit(own: str, grid: str, fit: list[str], profile: str, reference: bool) -> str | None:
    """Why a report cannot be made of a grid, and what to do; None if it can. ``fit`` are the profile's own grids."""
    if grid == own and own not in fit:  # of another kind of profile
        return f"no grid {own} is made for {profile}, whose grids are {', '.join(fit)}: --grid shows one of them"
    made = set(records.find(profile, grid, reference, any_code=True)["kind"])
    if not made:
        return f"nothing has run of grid {grid} with {profile}: python -m gcpo grid {grid} --profile {profile}"
    first = f"python -m gcpo grid {own} --profile {profile}"
    plans = expand(own, profile), expand(grid, profile)
    kinds = {plan.kind for plan in plans[0]}
    if not kinds & made:
        return f"nothing of kind {', '.join(sorted(kinds))} has run of grid {grid} with {profile}"
    tasks, there = ({plan.params.task for plan in listed} for listed in plans)
    if len(tasks) == 1 and not tasks <= there:  # a report about one task
        return f"grid {grid} has no run on {', '.join(tasks)}: {first}"
    needed, given = ({key for plan in listed if plan.kind == "train" for key in plan.varied} for listed in plans)
    for key in ("policy", "learning_rate", "alpha", "method_options"):  # a sweep: nothing to choose among one
        if key in needed - given:
            return f"grid {grid} has one {key.replace('_', ' ')}, and several are compared: {first}"
    return None


def publish(profile: str, partial: bool = False) -> int:
    """Make this machine's runs of a profile the reference, with all that is made from it; returns how many runs it has.

    Runs of the old reference that can stand beside this machine's (``records.to_publish``) stay in it, so that it
    grows; others go. Everything is built beside what there is and takes its place at the end. With ``partial`` a grid
    may lack runs, and the reports say which; each needs one at least.

    Raises:
        RecordError: a report's grid has runs that are not finished; the reference stays as it is.
    """
    if profile_name(profile).startswith(PREFIX):
        raise RecordError(f"{profile_name(profile)} holds rehearsals, which show nothing of a method: never published.")
    fit, shown = fitting(profile), grids_of(reports())
    if foreign := [grid for grid in shown if grid not in fit]:
        raise RecordError(
            f"Grid {foreign[0]} is not made for {profile}, and a reference holds every report's: report --profile "
            f"{profile} --grid NAME shows its runs."
        )
    finished = records.to_publish(profile)
    made = {run.manifest["id"] for run in finished}
    gone = [run for run in records.runs(profile, reference=True) if run.manifest.get("id") not in made]
    for grid in shown:
        wanted = {plan.id for plan in expand(grid, profile)}
        if len(wanted & made) < (1 if partial else len(wanted)):
            needed, otherwise = "every report's whole grid", " (or publish what there is: --partial)"
            if partial:
                needed, otherwise = "a run of every report's grid", ""
            raise RecordError(
                f"Grid {grid} has {len(wanted & made)} of {len(wanted)} runs finished with {profile}: a reference "
                f"holds {needed}. First: python -m gcpo grid {grid} --profile {profile}{otherwise}"
            )
    if gone:
        print(
            f"{len(gone)} runs of the old reference go: damaged, or made by other code or from other models", flush=True
        )
    _replace(profile, lambda folder: records.write_reference(folder, finished))
    return len(finished)


def _replace(profile: str, write: Callable[[Path], None]) -> None:
    """Build a reference and its pages in a place of their own, and put them where the old ones are."""
    name, root = profile_name(profile), paths.REFERENCE.with_name(".reference.draft")
    shutil.rmtree(root, ignore_errors=True)
    write(root / name)
    committed = [report for report in reports() if default_of(report, "profile") == name]
    before = os.environ.get("GCPO_REFERENCE")
    os.environ["GCPO_REFERENCE"] = str(root)  # what the notebooks' kernels take for the reference
    try:
        for report in reports():  # in their order: the ledger reads what those before it found
            parameters = {"profile": _absolute(profile), "reference": True, "write_to": str(root / name)}
            execute(report, root / f"{report}.ipynb", parameters)
            clean(root / f"{report}.ipynb")
    finally:
        os.environ.pop("GCPO_REFERENCE")
        if before:
            os.environ["GCPO_REFERENCE"] = before
    with io.replacing(paths.REFERENCE / name) as draft:
        (root / name).rename(draft)
    for report in committed:
        (root / f"{report}.ipynb").replace(paths.NOTEBOOKS / f"{report}.ipynb")
    if committed:
        write_readme(name)
        write_results(name)
        pictures()
    shutil.rmtree(root)


def _absolute(name: str) -> str:
    """A parameter file's path as seen from here: notebooks work in a folder of their own."""
    return str(Path(name).resolve()) if is_file_name(name) else name


def pictures(folder: Path | None = None) -> list[Path]:
    """Write what pages show beside the notebooks' own figures; returns the files.

    The diagram of a rollout group's way, and for the README's map the first figure of each committed notebook, small.
    """
    folder = folder or paths.ROOT / "docs" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    made = [folder / "way_of_a_group.png"]
    set_style()
    figure = way_of_a_group()
    figure.savefig(made[0], bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    for path in sorted(paths.NOTEBOOKS.glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", ())]
        shown = next((data["image/png"] for data in outputs if "image/png" in data), None)
        if shown is not None:
            image = Image.open(BytesIO(base64.b64decode(shown))).convert("RGB")
            image.thumbnail(THUMBNAIL, Image.Resampling.LANCZOS)
            made.append(folder / f"{path.stem}.png")
            image.quantize(32).save(made[-1], optimize=True)
    return made


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
