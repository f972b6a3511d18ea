"""Executing the report notebooks: on the runs of a profile, or to make runs the committed reference with its pages."""

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from accelerate.utils import patch_environment
from papermill import PapermillExecutionError, inspect_notebook

from gcpo import io, paths
from gcpo.reports import records, templates
from gcpo.runs.grids import expand, fitting
from gcpo.runs.params import profile_name
from gcpo.runs.plan import with_others
from gcpo.runs.profiles import TOY, is_file_name, read_yaml
from gcpo.runs.record import RecordError, Run
from gcpo.runs.runner import execute

REPORTS = Path(__file__).parents[1] / "reports.yaml"
PAPERS = "40_papers_tables"  # shows all grids of a paper's profile
EXHIBITS: dict[str, dict[str, Any]] = read_yaml(REPORTS.with_name("papers_tables.yaml"))  # at their papers' own scale
OF_PAPERS = {grid for exhibit in EXHIBITS.values() for grid in exhibit["grids"]}
DECIDES = ("policy", "learning_rate", "alpha", "method_options")  # a sweep compares their values


def reports() -> dict[str, dict[str, str]]:
    """Return the report notebooks in their order, with the grid and the profile that each shows (``reports.yaml``); of
    one on two worlds the other's profile (``also``), and the grid that it shows of all others (``elsewhere``)."""
    return dict(read_yaml(REPORTS))


def reports_on(profile: str) -> list[str]:
    """Return the reports with a grid that make up a profile's reference: those that show it, or all if none does."""
    shown = {name: shows for name, shows in reports().items() if "grid" in shows}
    return [name for name, shows in shown.items() if profile in (shows["profile"], shows.get("also"))] or [*shown]


def own_grid(report: str, profile: str) -> str:
    """Return the grid that a report shows of a profile unless told otherwise; "" of one that shows no runs."""
    shows = reports()[report]
    here = profile in (shows.get("profile"), shows.get("also"))
    return shows.get("grid", "") if here else shows.get("elsewhere", shows.get("grid", ""))


def grid_for(made: list[str], own: str) -> str:
    """Return the grid of a report's own table that suits a profile (:func:`gcpo.runs.grids.fitting`): table1
    of laptop, paper_table1 of benchmarks; the own one where there is none."""
    return next((grid for grid in (own, f"paper_{own}", f"real_{own}") if grid in made), own)


def report(
    profile: str, grid: str | None = None, *, any_code: bool = False, reference: bool = False
) -> tuple[list[Path], list[str]]:
    """Execute every report notebook on the runs of a profile, with the grid of its table (:func:`grid_for`).

    Args:
        profile: a profile's name, or a parameter file.
        grid: one grid for all of them.
        any_code: compare runs of different code of this package.
        reference: show the committed reference in place of this machine's runs.

    Returns:
        the executed copies, in ``outputs/<profile>/reports`` beside their tables and figures; and, of each report that
        is not made, what its grid lacks (:func:`_lacks`).

    Raises:
        RecordError: a report failed; says where its copy is.
    """
    name, fit = profile_name(profile), fitting(profile)
    papers = OF_PAPERS & {*([grid] if grid else fit)} and any(run.finished for run in records.runs(profile, reference))
    folder, profile, grid = paths.OUTPUTS / name / "reports", absolute(profile), grid and absolute(grid)
    expand(grid or fit[0], profile)  # a grid that is none leaves no folder behind
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    lacking: list[str] = []
    try:
        for each in reports():
            settings: dict[str, Any] = {"profile": profile, "reference": reference, "write_to": str(folder)}
            if own := own_grid(each, name):  # the ledger has none, nor has speed: they read no runs
                wanted = grid or grid_for(fit, own)
                if why := _lacks(own, wanted, fit, profile, reference):
                    lacking.append(f"{each}: {why}")
                    for stale in (f"{each}.ipynb", f"verdicts_{each[:2]}.csv"):  # of other runs: no ledger reads them
                        (folder / stale).unlink(missing_ok=True)
                    continue
                settings |= {"grid": wanted, "any_code": any_code}
            elif each == PAPERS:
                settings |= {"only": grid, "any_code": any_code}
            if own or (papers if each == PAPERS else made):
                execute(each, folder / f"{each}.ipynb", settings)
                made.append(folder / f"{each}.ipynb")
    except PapermillExecutionError as error:
        said = f"{each}: {error.ename}: {error.evalue} (traceback: {folder / each}.ipynb)"
        raise RecordError(" ".join(said.split())) from None
    return made, lacking


def _lacks(own: str, grid: str, fit: list[str], profile: str, reference: bool) -> str:
    """Return what a grid lacks of what a report compares, "" if nothing. ``fit`` are the profile's own grids."""
    if grid in OF_PAPERS:
        return f"{PAPERS} shows grid {grid}"
    if grid == own and own not in fit:
        return f"no grid {own} is made for {profile}, whose grids are {', '.join(fit)}"
    asked, given = expand(own, profile), expand(grid, profile)
    if not {plan.kind for plan in asked} & {*records.find(profile, grid, reference, any_code=True)["kind"]}:
        return f"nothing has run of grid {grid} with {profile}: python -m gcpo grid {grid} --profile {profile}"
    tasks, there = ({plan.params.task for plan in plans} for plans in (asked, given))
    needed, varied = ({key for plan in each if plan.kind == "train" for key in plan.varied} for each in (asked, given))
    every = len(tasks) == 1 or own.startswith("real_")  # a mean over data sets
    lacks = [*sorted(tasks - there if every else ()), *(key for key in DECIDES if key in needed - varied)]
    return f"grid {grid} compares nothing by {lacks[0]}: python -m gcpo grid {own} --profile {profile}" if lacks else ""


def absolute(name: str) -> str:
    """Return a parameter file's path as seen from here: notebooks work in a folder of their own."""
    return str(Path(name).resolve()) if is_file_name(name) else name


def publish(profile: str, partial: bool = False) -> int:
    """Make this machine's runs of a profile the reference, with all that is made from it; returns how many runs it has.

    It takes the runs of the profile's grids, and names those that no grid asks for. Runs of the old reference that can
    stand beside this machine's (``records.to_publish``) stay in it, so that it grows; others go. Everything is built
    beside what there is and takes its place at the end. With ``partial`` a grid may lack runs, and the reports say
    which; each needs one at least.

    Raises:
        RecordError: a report's grid has runs that are not finished; the reference stays as it is.
    """
    name, found = profile_name(profile), records.to_publish(profile)
    if name.endswith(TOY):
        raise RecordError(f"{name} holds runs of toy size, which show nothing of a method: never published.")
    asked = {run.id for grid in fitting(profile) for run in with_others(expand(grid, profile))}
    finished = [run for run in found if run.manifest["id"] in asked]
    made = {run.manifest["id"] for run in finished}
    for grid in dict.fromkeys(own_grid(each, name) for each in reports_on(name)):
        wanted = {plan.id for plan in expand(grid, profile)}
        if len(wanted & made) < (1 if partial else len(wanted)):
            said = f"Grid {grid} has {len(wanted & made)} of {len(wanted)} runs finished with {profile}."
            way = f"python -m gcpo grid {grid} --profile {profile} (--partial publishes if each grid has one run)"
            raise RecordError(f"{said} First: {way}")
    old = records.runs(profile, reference=True)
    for why, left in (("no grid asks for", found), ("damaged, of no grid, or of other code or models", old)):
        if names := [str(run.manifest["id"]) for run in left if run.manifest["id"] not in made]:
            print(f"left out ({why}): {', '.join(names)}", flush=True)
    _replace(profile, finished)
    return len(finished)


def pages_again(profile: str) -> int:
    """Execute the reports on the committed reference again, in place; returns how many runs it has.

    Records stay as they are. Tables, figures, verdicts, committed notebooks and the pages made from templates are made
    anew, as a new claim or a new report asks.

    Raises:
        RecordError: no reference of this profile is committed.
    """
    if not (kept := records.runs(profile, reference=True)):
        raise RecordError(f"{paths.REFERENCE / profile_name(profile)}: no reference of {profile} is committed.")
    _replace(profile)
    return len(kept)


def _replace(profile: str, finished: list[Run] | None = None) -> None:
    """Build the references anew beside the old ones: a profile's, of ``finished`` runs if given, and what shows it.

    A report on two worlds shows one beside the other, and is made again with either. The ledger reads what reports
    found on all profiles, and lies with the one that ``reports.yaml`` names.
    """
    name, shown, start = profile_name(profile), reports(), time.time() - 1  # clocks of file systems are coarse
    firsts = {shows["profile"] for shows in shown.values() if name in (shows["profile"], shows.get("also"))}
    made = {name: absolute(profile)} | {first: first for first in firsts if (paths.REFERENCE / first).is_dir()}
    ledgers = [each for each, shows in shown.items() if shows == {"profile": templates.HOME}]
    home = templates.HOME if firsts else name
    with tempfile.TemporaryDirectory() as folder:
        with io.replacing(paths.REFERENCE) as root:
            if paths.REFERENCE.exists():
                shutil.copytree(paths.REFERENCE, root)
            if finished is not None:
                shutil.rmtree(root / name, ignore_errors=True)
                records.write_reference(root / name, finished)
            with patch_environment(GCPO_REFERENCE=root):  # of the notebooks' kernels
                for of, given in made.items():
                    for each in [each for each in reports_on(of) if of != shown[each].get("also")]:
                        settings = {"profile": given, "grid": own_grid(each, of), "reference": True}
                        execute(each, Path(folder, f"{each}.ipynb"), {**settings, "write_to": str(root / of)})
                    for file in (root / of).iterdir():
                        if file.suffix in (".csv", ".png") and file.stat().st_mtime < start:  # no report writes it now
                            file.unlink()
                for each in ledgers:
                    settings = {"profile": made.get(home, home), "reference": True, "write_to": str(root / home)}
                    execute(each, Path(folder, f"{each}.ipynb"), settings)
        for each in [each for each, shows in shown.items() if firsts and (each in ledgers or shows["profile"] in made)]:
            _commit(Path(folder, f"{each}.ipynb"))
    if firsts:
        templates.write_pages()


def execute_again(name: str) -> None:
    """Execute a read notebook in its place, and write its verdicts, if it has any, where the ledger reads them."""
    verdicts = "write_to" in inspect_notebook(str(paths.NOTEBOOKS / f"{name}.ipynb"))
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, f"{name}.ipynb")
        execute(name, made, {"write_to": str(paths.VERDICTS)} if verdicts else {})
        _commit(made)


def _commit(made: Path) -> None:
    clean(made)
    shutil.move(made, paths.NOTEBOOKS / made.name)


def clean(path: Path) -> None:
    """Make an executed notebook one to commit: without what execution leaves in its metadata, and without the
    parameters that papermill put in, so that it reads as if executed with its own. Outputs stay."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "injected-parameters" not in cell.metadata.get("tags", ())]
    for count, cell in enumerate((c for c in notebook.cells if c.get("execution_count") is not None), start=1):
        for one in (cell, *cell.outputs):
            if "execution_count" in one:
                one.execution_count = count
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({"tags": tags} if (tags := cell.metadata.get("tags")) else {})
    notebook.metadata.pop("papermill", None)
    notebook.metadata["language_info"] = {"name": "python"}  # and not the version that happened to execute it
    nbformat.write(notebook, path)
