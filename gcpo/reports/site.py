"""Executing the report notebooks on the runs of a profile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from papermill import PapermillExecutionError

from gcpo import paths
from gcpo.reports import records
from gcpo.reports.methods import markdown
from gcpo.runs.grids import expand, fitting
from gcpo.runs.params import profile_name
from gcpo.runs.profiles import is_file_name, read_yaml
from gcpo.runs.record import RecordError
from gcpo.runs.runner import execute

REPORTS = Path(__file__).parents[1] / "reports.yaml"


def reports() -> dict[str, dict[str, str]]:
    """The report notebooks in their order, with the grid and the profile that each shows (``reports.yaml``); where it
    reports on two worlds the other's profile (``also``), and the grid that it shows of all others (``elsewhere``)."""
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


def shown_grids(profile: str) -> list[str]:
    """The grids that reports show of a profile unless told otherwise, each once, in their order."""
    return list(dict.fromkeys(filter(None, (own_grid(name, profile) for name in reports()))))


def grid_for(made: list[str], own: str) -> str:
    """Return the grid of a report's own table that suits a profile (:func:`gcpo.runs.grids.fitting`): table1
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

    Raises:
        RecordError: a report failed; says where its copy is.
    """
    folder, start = paths.OUTPUTS / profile_name(profile) / "reports", time.time()
    profile, grid = absolute(profile), grid and absolute(grid)
    fit = fitting(profile)
    expand(grid or fit[0], profile)  # a grid that is none leaves no folder behind
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    left_out: list[str] = []
    try:
        for name in reports():
            settings: dict[str, Any] = {"profile": profile, "reference": reference}
            if own := own_grid(name, profile_name(profile)):  # the ledger has none, nor has speed: they read no runs
                wanted = grid or grid_for(fit, own)
                if why := _unfit(own, wanted, fit, profile, reference):
                    left_out.append(f"{name}: {why}")
                    for stale in (f"{name}.ipynb", f"verdicts_{name[:2]}.csv"):  # of other runs: no ledger reads them
                        (folder / stale).unlink(missing_ok=True)
                    continue
                settings |= {"grid": wanted, "any_code": any_code}
            elif not made:
                continue
            try:
                execute(name, folder / f"{name}.ipynb", {**settings, "write_to": str(folder)})
            except PapermillExecutionError as error:
                said = f"{name}: {error.ename}: {error.evalue} (traceback: {folder / name}.ipynb)"
                raise RecordError(" ".join(said.split())) from None
            made.append(folder / f"{name}.ipynb")
    finally:
        written = sorted(path.name for path in folder.glob("*.*") if path.stat().st_mtime >= start)
        lines = [f"# Reports of profile {profile_name(profile)}", "", f"From {records.source(profile, reference)}.", ""]
        lines += [f"- [{name}]({name})" for name in written if not name.startswith("index")]
        lines += [f"- not made: {why}" for why in left_out]
        own_grids = dict.fromkeys(grid_for(fit, own) for own in shown_grids(profile_name(profile)))
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
    if grid == own and own not in fit:  # the grid suits another kind of profile
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


def absolute(name: str) -> str:
    """A parameter file's path as seen from here: notebooks work in a folder of their own."""
    return str(Path(name).resolve()) if is_file_name(name) else name
