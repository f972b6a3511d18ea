"""Everything that the command ``check`` does."""

from __future__ import annotations

from collections import Counter

# As in gcpo.cli, what takes seconds to import is imported where it is used.
from gcpo import paths
from gcpo.errors import UserError
from gcpo.runs.profiles import ParameterError, load_profile, profiles
from gcpo.size import size


def check(profile: str, name: list[str] | None) -> int:
    """Check parameter files and grids, and count what is run."""
    from gcpo.reports import records
    from gcpo.runs import preflight
    from gcpo.runs.grids import expand, fitting
    from gcpo.runs.params import validate
    from gcpo.runs.plan import with_trainings
    from gcpo.runs.record import states

    for one in profiles():
        validate(load_profile(one), f"params/{one}.yaml")
    print(size(), f"profiles: {', '.join(profiles())}: good", sep="\n")
    asked = []
    for one in name or fitting(profile):
        plans = expand(one, profile)
        asked += with_trainings(plans)
        counts = Counter(state.split(" (")[0] for state in states(plans))
        said = ", ".join(f"{count} {state}" for state, count in counts.items())
        print(f"grid {one} with {profile}: {len(plans)} runs ({said})")
    bad = [*preflight.refused(asked), *preflight.unreadable(asked)]
    print(*bad, *(f"left out: {fault}" for fault in records.faults(profile)), sep="\n")
    return 1 if bad else 0


def replay(profile: str, n: int) -> int:
    """Make runs of the reference again, and enter this code where they have the same tables."""
    from gcpo.reports import replay as again

    runs = again.chosen(profile, n)
    if not runs:
        kept = sorted(path.parent.name for path in paths.REFERENCE.glob("*/runs.jsonl"))
        raise UserError(f"profile {profile} has no reference to make again: --profile takes {', '.join(kept)}.")
    found = again.replay(profile, runs)
    print(*(f"{name}: {why or 'the same tables'}" for name, why in found.items()), sep="\n")
    if not found or any(found.values()):
        raise UserError(f"{sum(map(bool, found.values()))} of {len(found)} runs differ from the reference.")
    print(f"This code gives the same numbers: entered in {again.certify(profile, runs)}")
    return 0


def gate(profile: str | None, grids: list[str] | None, reference: bool) -> int:
    """Say whether GRPO learns where runs of a profile were made."""
    if profile is None:
        raise ParameterError("--reference is for --gate: it says whose runs are read.")
    from gcpo.reports.report import GATE_GRID, Report

    if not (report := Report(profile, grids[0] if grids else GATE_GRID, reference)).closed:
        raise UserError(f"Grid {report.grid} trains nothing, and a gate is judged on training: name another grid.")
    if missing := [why for task, why in report.closed.items() if task not in set(report.gate["task"])]:
        raise UserError("; ".join(missing))
    said = (f"{task}: {why or 'the gate is open'}" for task, why in report.closed.items())
    print(report.gate.round(1).to_string(index=False), *said, sep="\n")
    return 1 if any(report.closed.values()) else 0
