"""Executing the report notebooks, and making runs the committed reference."""

from __future__ import annotations

from pathlib import Path

import nbformat

from gcpo import paths
from gcpo.reports import records
from gcpo.reports.tables import write_readme
from gcpo.runs.params import profile_name
from gcpo.runs.runner import execute


def reports() -> list[str]:
    """The report notebooks, 20 and above."""
    return sorted(path.stem for path in paths.NOTEBOOKS.glob("[2-9][0-9]_*.ipynb"))


def report(profile: str, grid: str | None = None, any_code: bool = False) -> list[Path]:
    """Execute every report notebook on this machine's runs of a profile, or on the reference where there are none; each
    notebook has the grid of its table unless ``grid`` names another. ``any_code`` compares runs of different code.

    Tables and figures go to ``outputs/<profile>/reports``, beside the executed copies, which are returned.
    """
    folder = paths.OUTPUTS / profile_name(profile) / "reports"
    if profile.endswith((".yaml", ".yml")):
        profile = str(Path(profile).resolve())  # notebooks work in a folder of their own
    chosen = {"any_code": any_code, **({"grid": grid} if grid else {})}
    made = [folder / f"{name}.ipynb" for name in reports()]
    for output in made:
        execute(output.stem, output, {"profile": profile, "reference": False, "write_to": str(folder), **chosen})
    return made


def publish(profile: str) -> int:
    """Make this machine's runs of a profile the reference, and rebuild what is made from it; returns how many runs."""
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
