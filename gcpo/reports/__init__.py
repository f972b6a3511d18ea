"""Reports: finished runs as tables, figures and verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gcpo.reports.opened import Report


def open(
    profile: str, grid: str, reference: bool = False, any_code: bool = False, write_to: str | None = None
) -> Report:
    """Return the runs of a grid as a report notebook shows them: source, folder, command, coverage, runs, metric,
    margin and gate (:class:`gcpo.reports.opened.Report`)."""
    from gcpo.reports.opened import Report  # commands that show no report do without its libraries

    return Report(profile, grid, reference, any_code, write_to)
