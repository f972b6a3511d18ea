"""Executing the report notebooks, and making runs the committed reference."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import papermill

from gcpo import paths
from gcpo.reports import records
from gcpo.reports.tables import write_readme
from gcpo.runs.manifest import RecordError
from gcpo.runs.params import profile_name
from gcpo.runs.runner import execute


def reports() -> list[str]:
    """The report notebooks, 20 and above."""
    return sorted(path.stem for path in paths.NOTEBOOKS.glob("[2-9][0-9]_*.ipynb"))


def grid_of(report: str) -> str:
    """The grid that a report notebook shows unless told otherwise."""
    grid = papermill.inspect_notebook(str(paths.NOTEBOOKS / f"{report}.ipynb"))["grid"]["default"]
    return str(ast.literal_eval(grid))


def report(
    profile: str, grid: str | None = None, *, any_code: bool = False, reference: bool = False
) -> tuple[list[Path], list[str]]:
    """Execute every report notebook on the runs of a profile; each has the grid of its table unless ``grid`` names
    another.

    Args:
        profile: a profile's name, or a parameter file.
        grid: one grid for all of them.
        any_code: compare runs of different code of this package.
        reference: show the committed reference in place of this machine's runs.

    Returns:
        the executed copies, in ``outputs/<profile>/reports`` beside their tables and figures; and, for each report of
        whose grid nothing has run, a line that says so.
    """
    folder = paths.OUTPUTS / profile_name(profile) / "reports"
    if profile.endswith((".yaml", ".yml")):
        profile = str(Path(profile).resolve())  # notebooks work in a folder of their own
    made, left_out = [], []
    for name in reports():
        wanted = grid or grid_of(name)
        if not records.coverage(wanted, profile, reference)["finished"].sum():
            left_out.append(f"{name}: nothing has run of grid {wanted} with {profile}: python -m gcpo grid {wanted}")
            continue
        settings = {"profile": profile, "grid": wanted, "reference": reference, "any_code": any_code}
        execute(name, folder / f"{name}.ipynb", {**settings, "write_to": str(folder)})
        made.append(folder / f"{name}.ipynb")
    return made, left_out


def publish(profile: str) -> int:
    """Make this machine's runs of a profile the reference, and rebuild what is made from it; returns how many runs.

    Raises:
        RecordError: a report's grid has runs that are not finished here; the reference stays as it is.
    """
    for grid in dict.fromkeys(grid_of(name) for name in reports()):
        counts = records.coverage(grid, profile)[["finished", "wanted"]].sum()
        if counts["finished"] < counts["wanted"]:
            raise RecordError(
                f"Grid {grid} has {counts['finished']} of {counts['wanted']} runs finished with {profile}: a reference "
                f"holds every report's whole grid. First: python -m gcpo grid {grid} --profile {profile}"
            )
    count = records.publish(profile)
    rebuild(profile)
    return count


def rebuild(profile: str) -> None:
    """Make the reference's tables, figures and committed report notebooks, and the README's results, again."""
    folder = paths.REFERENCE / profile_name(profile)
    for name in reports():
        execute(name, folder / "draft.ipynb", {"profile": profile, "reference": True, "write_to": str(folder)})
        (folder / "draft.ipynb").unlink()
        execute(name, paths.NOTEBOOKS / f"{name}.ipynb", {})
        clean(paths.NOTEBOOKS / f"{name}.ipynb")
    write_readme(profile)


def clean(path: Path) -> None:
    """Remove what execution leaves in a notebook's metadata, keeping outputs and counts."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for key in ("papermill", "execution", "ExecuteTime", *([] if cell.metadata.get("tags") else ["tags"])):
            cell.metadata.pop(key, None)
    notebook.metadata.pop("papermill", None)
    notebook.metadata["language_info"] = {"name": "python"}  # and not the version that happened to execute it
    nbformat.write(notebook, path)
