"""Executing the report notebooks, and making runs the committed reference."""

from __future__ import annotations

from pathlib import Path

import nbformat

from gcpo import paths
from gcpo.reports import records
from gcpo.runs.runner import execute


def reports() -> list[str]:
    """The report notebooks, 20 and above."""
    return sorted(path.stem for path in paths.NOTEBOOKS.glob("[2-9][0-9]_*.ipynb"))


def report(profile: str, grid: str | None = None) -> list[Path]:
    """Execute every report notebook on this machine's runs of a profile, or on the reference where there are none; each
    notebook has the grid of its table unless ``grid`` names another.

    Tables and figures go to ``outputs/<profile>/reports``, beside the executed copies, which are returned.
    """
    folder = paths.OUTPUTS / profile / "reports"
    chosen = {"grid": grid} if grid else {}
    made = [folder / f"{name}.ipynb" for name in reports()]
    for output in made:
        execute(output.stem, output, {"profile": profile, "reference": False, "write_to": str(folder), **chosen})
    return made


def publish(profile: str) -> int:
    """Make this machine's runs of a profile the reference, with its tables and figures, and execute the committed
    report notebooks again; returns how many runs."""
    count = records.publish(profile)
    for name in reports():
        path = paths.NOTEBOOKS / f"{name}.ipynb"
        folder = paths.REFERENCE / profile
        execute(name, folder / "draft.ipynb", {"profile": profile, "reference": True, "write_to": str(folder)})
        (folder / "draft.ipynb").unlink()
        execute(name, path, {})
        clean(path)
    return count


def clean(path: Path) -> None:
    """Remove what execution leaves in a notebook's metadata, keeping outputs and counts."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for key in ("papermill", "execution", "ExecuteTime"):
            cell.metadata.pop(key, None)
    notebook.metadata.pop("papermill", None)
    nbformat.write(notebook, path)
