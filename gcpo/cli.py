"""The batch runner: python -m gcpo run | evaluate | grid | check | report | methods | world."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pandas as pd

from gcpo import io, paths
from gcpo.reports import records
from gcpo.runs.contents import Seen
from gcpo.runs.grids import expand, fitting
from gcpo.runs.params import Params, validate
from gcpo.runs.plan import KINDS, Plan
from gcpo.runs.profiles import TOY, ParameterError, load_profile, over, parse_yaml, profiles
from gcpo.runs.record import RecordError, Run, load


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gcpo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, profile: str = "smoke") -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        said = f"a file of params/, or a path to one (default: {profile})"
        sub.add_argument("--profile", default=profile, help=said)
        return sub

    def parameters(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("-p", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="set a parameter")

    jobs = "runs at a time (default: as many as there are GPUs for, or cores and at most 4)"
    one = command("run", "one run: training, or another kind of it with --kind")
    one.add_argument("--kind", choices=tuple(KINDS), default="train")
    parameters(one)
    parameters(command("evaluate", "ask a policy the held-out questions of a task, greedily and by sampling"))
    many = command("grid", "every run of params/grids/NAME.yaml that is not finished")
    many.add_argument("name", nargs="+", help="one or more grids")
    many.add_argument("--jobs", type=_positive, help=jobs)
    many.add_argument("--dry-run", action="store_true", help="say what would run, and run nothing")
    many.add_argument("--only-failed", action="store_true", help="only runs that have failed before")
    parameters(many)
    checked = command("check", "check parameter files and grids, and show what is run and what is not", "laptop")
    checked.add_argument("name", nargs="*", help="grids (default: those that fit the profile)")
    checked.add_argument("--gpu-memory", type=float, metavar="GB", help="of the GPU (default: the profile's)")
    checked.add_argument("--gate", metavar="PROFILE", help="say whether GRPO learns there, from its runs of table1")
    checked.add_argument("--reference", action="store_true", help="with --gate: read the committed reference")
    checked.add_argument(
        "--replay", type=_positive, metavar="N", help="make N runs of the reference again, and compare"
    )
    reported = command("report", "execute the report notebooks")
    reported.add_argument(
        "--publish",
        action="store_true",
        help="make these runs the reference: records, tables, figures, committed notebooks and the README's results",
    )
    reported.add_argument("--partial", action="store_true", help="with --publish: though grids are not finished")
    reported.add_argument("--reference", action="store_true", help="show the committed reference instead")
    reported.add_argument("--any-code", action="store_true", help="compare runs of different code of this package")
    reported.add_argument("--grid", help="a grid for all of them, instead of each report's own")
    for sub in (one, many, checked, reported):
        sub.add_argument("--toy", action="store_true", help="the profile with params/toy.yaml laid over it")
    command("methods", "print every method with its rule and range")
    world = command("world", "make the embedded policy and entailment model", "laptop")
    world.add_argument("--reference", action="store_true", help="take those that the committed reference started from")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of runs: give 1 or more")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 when a run or the gate failed, 2 for bad parameters or missing runs,
    130 or 143 when ended by a signal."""
    options = _parser().parse_args(arguments)
    options.profile += TOY if "toy" in options and options.toy else ""
    try:
        with _ends_by_sigterm():
            return _COMMANDS[options.command](options)
    except KeyboardInterrupt:
        print("gcpo: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except (ParameterError, RecordError, OSError) as error:
        # The system's own text begins with a number.
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"gcpo: {said}", file=sys.stderr)
        return 2


@contextlib.contextmanager
def _ends_by_sigterm() -> Iterator[None]:
    """A SIGTERM ends this process as an interrupt would, with everything that it has started."""

    def end(*_: Any) -> None:
        raise SystemExit(143)

    if threading.current_thread() is not threading.main_thread():  # only there are signals received
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _given(pairs: list[list[str]]) -> dict[str, Any]:
    return {key: parse_yaml(value, f"-p {key}") for key, value in pairs}


def _params(options: argparse.Namespace) -> Params:
    return validate(over(load_profile(options.profile), _given(options.p)), f"{options.profile} with -p")


def _run(options: argparse.Namespace) -> int:
    from gcpo.runs.runner import run

    plan = Plan(options.kind, _params(options))
    io.check_writable(paths.OUTPUTS)
    _make_world([plan])
    done = run(plan)
    assert done is not None  # it waits for another process that makes this run
    print(f"{done.folder}: {done.manifest['status']} {done.manifest.get('exit') or done.manifest.get('results', '')}")
    return 0 if done.finished else 1


def _evaluate(options: argparse.Namespace) -> int:
    from gcpo.reports.tables import scores_table
    from gcpo.runs.runner import run_grid

    plan = Plan("evaluate", _params(options))
    io.check_writable(paths.OUTPUTS)
    _make_world([plan])
    if failed := run_grid([plan], jobs=1):  # with its progress
        return _say_failed(failed)
    print(scores_table(pd.read_csv(plan.folder / "scores.csv")).to_string(), f"in {plan.folder}", sep="\n")
    return 0


def _grid(options: argparse.Namespace) -> int:
    expanded = [plan for name in options.name for plan in expand(name, options.profile, _given(options.p))]
    plans = list({plan.id: plan for plan in expanded}.values())  # a run that two grids want is one run
    status = dict(zip((plan.id for plan in plans), _status(plans), strict=True))
    if options.only_failed:
        plans = [plan for plan in plans if status[plan.id] == "failed"]
    wanted = [plan for plan in plans if status[plan.id] != "finished"]
    if options.dry_run:
        print(*(f"{plan.id}: {status[plan.id]}" for plan in plans), sep="\n")
        print(f"{len(wanted)} of {len(plans)} runs would be made")
        return 0
    if len(wanted) < len(plans):
        print(f"{len(plans) - len(wanted)} of {len(plans)} runs are finished already", flush=True)
    if not wanted:
        return 0
    from gcpo.runs.runner import run_grid  # seconds to import

    io.check_writable(paths.OUTPUTS)
    _make_world(wanted)
    return _say_failed(run_grid(wanted, options.jobs))


def _say_failed(failed: list[Run]) -> int:
    """Name each run that did not finish, and why; returns the exit status."""
    for done in failed:
        print(f"FAILED {done.manifest.get('id')}: {done.manifest.get('exit')}", file=sys.stderr)
    return 1 if failed else 0


def _status(plans: list[Plan]) -> list[str]:
    """Return the state of each run: "not run", "running" (or killed), "finished", "failed", or "left out (why)"."""
    seen: Seen = {}
    found = [load(plan.folder, seen) for plan in plans]
    return [f"left out ({run.fault})" if run.fault else run.manifest.get("status", "not run") for run in found]


def _make_world(plans: list[Plan]) -> None:
    """Make the embedded models once, before runs in parallel would wait for them."""
    from gcpo.world import resolve

    for kind, name in sorted({(kind, getattr(plan.params, kind)) for plan in plans for kind in plan.embedded}):
        resolve(name, kind)


def _check(options: argparse.Namespace) -> int:
    if options.gate:
        return _gate(options)
    if options.replay:
        return _replay(options)
    for name in profiles():
        validate(load_profile(name), f"params/{name}.yaml")
    print(f"profiles: {', '.join(profiles())}: good")
    if options.gpu_memory is not None and options.gpu_memory <= 0:
        raise ParameterError(f"--gpu-memory {options.gpu_memory:g}: a GPU has more than 0 GB.")
    too_large, asked = [], []
    for name in options.name or fitting(options.profile):
        plans = expand(name, options.profile)
        asked += [*plans, *(plan.training for plan in plans if plan.training)]
        status = [said.split(" (")[0] for said in _status(plans)]
        counts = ", ".join(f"{status.count(kind)} {kind}" for kind in dict.fromkeys(status))
        print(f"grid {name} with {options.profile}: {len(plans)} runs ({counts})")
        too_large += _estimated(name, plans, options.gpu_memory)
    from gcpo.runs import preflight  # seconds to import

    refused = preflight.refused(asked)
    print(*refused, *too_large, sep="\n")
    for fault in records.faults(options.profile):
        print(f"left out: {fault}")
    return 1 if refused or too_large else 0


def _estimated(grid: str, plans: list[Plan], gpu: float | None) -> list[str]:
    """Say what a grid's runs take of a GPU, by task; returns what does not fit. Embedded policies need none."""
    from gcpo.runs import estimates  # seconds to import

    large = [plan for plan in plans if "policy" not in plan.embedded]
    if not large:
        return []
    gpu = gpu or estimates.OF_PROFILE.get(large[0].params.profile, 80.0)
    print(f"  estimated, not measured, for a GPU of {gpu:g} GB as fast as an {estimates.nearest(gpu)[0]}:")
    every = [estimates.estimate(plan, gpu) for plan in large]
    for task in dict.fromkeys(plan.params.task for plan in large):
        found = [one for plan, one in zip(large, every, strict=True) if plan.params.task == task]
        print(f"  {task}, {len(found)} runs: {estimates.total(found)}")
    print(f"  all of {grid}: {estimates.total(every)}")
    reasons: dict[str, list[str]] = {}
    for plan in large:
        if why := estimates.misfit(plan, gpu):
            reasons.setdefault(why, []).append(plan.id)
    return [f"DOES NOT FIT: {ids[0]} and {len(ids) - 1} more of {grid}: {why}" for why, ids in reasons.items()]


def _replay(options: argparse.Namespace) -> int:
    from gcpo.reports import replay  # seconds to import

    runs = replay.chosen(options.profile, options.replay)
    found = replay.replay(options.profile, runs)
    print(*(f"{name}: {why or 'the same tables'}" for name, why in found.items()), sep="\n")
    if not found or any(found.values()):
        raise RecordError(f"{sum(map(bool, found.values()))} of {len(found)} runs differ from the reference.")
    print(f"This code gives the same numbers: entered in {replay.certify(options.profile, runs)}")
    return 0


def _gate(options: argparse.Namespace) -> int:
    from gcpo.reports.gate import GRID, gate

    grid = options.name[0] if options.name else GRID
    found = gate(options.gate, grid, options.reference)
    if len(found.table):
        print(found.table.round(1).to_string(index=False))
    if found.missing:
        raise RecordError("; ".join(f"{task}: {said}" for task, said in found.missing.items()))
    print(found.said(found.tasks))
    return 0 if found.passed else 1


def _report(options: argparse.Namespace) -> int:
    from gcpo.reports.publish import publish
    from gcpo.reports.site import report

    if options.publish:
        print(f"published {publish(options.profile, options.partial)} runs to {paths.REFERENCE / options.profile}")
    else:
        flags = {"any_code": options.any_code, "reference": options.reference}
        made, left_out = report(options.profile, options.grid, **flags)
        faults = [f"left out: {fault}" for fault in records.faults(options.profile, options.reference)]
        print(*made, *left_out, *faults, sep="\n")
    return 0


def _methods(options: argparse.Namespace) -> int:
    from gcpo.reports.pages import methods_page

    print(methods_page(), end="")
    return 0


def _world(options: argparse.Namespace) -> int:
    from gcpo.world import bootstrap, restore_reference

    print(restore_reference(paths.REFERENCE / options.profile) if options.reference else bootstrap())
    return 0


_COMMANDS = {
    "run": _run,
    "evaluate": _evaluate,
    "grid": _grid,
    "check": _check,
    "report": _report,
    "methods": _methods,
    "world": _world,
}
