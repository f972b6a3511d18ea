"""The batch runner: python -m gcpo run | grid | check | report | methods | world."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from gcpo import paths
from gcpo.runs.grids import expand, grids
from gcpo.runs.manifest import RecordError
from gcpo.runs.params import ParameterError, load_profile, parse_yaml, profiles, validate
from gcpo.runs.plan import Plan


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gcpo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--profile", default="smoke", help="a file of params/, or a path to one (default: smoke)")
        return sub

    def parameters(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("-p", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="set a parameter")

    one = command("run", "one run: training, or gradient statistics with --kind gradients")
    one.add_argument("--kind", choices=("train", "gradients"), default="train")
    parameters(one)
    many = command("grid", "every run of params/grids/NAME.yaml that is not finished")
    many.add_argument("name", nargs="+", help="one or more grids")
    many.add_argument("--jobs", type=_positive, default=max(1, min(os.cpu_count() or 1, 4)), help="runs at a time")
    parameters(many)
    checked = command("check", "check parameter files and grids, and show what is run and what is not")
    checked.add_argument("name", nargs="*", help="grids (default: all)")
    reported = command("report", "execute the report notebooks")
    reported.add_argument(
        "--publish",
        action="store_true",
        help="make these runs the reference: records, tables, figures, committed notebooks and the README's results",
    )
    reported.add_argument("--reference", action="store_true", help="show the committed reference instead")
    reported.add_argument("--any-code", action="store_true", help="compare runs of different code of this package")
    reported.add_argument("--grid", help="a grid for all of them, instead of each report's own")
    command("methods", "print every method with its rule and range")
    command("world", "make the embedded policy and entailment model")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of runs: give 1 or more")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 when a run failed, 2 for bad parameters, 130 or 143 when ended by a
    signal."""
    options = _parser().parse_args(arguments)
    try:
        with _ends_by_sigterm():
            return _COMMANDS[options.command](options)
    except KeyboardInterrupt:
        print("gcpo: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except (ParameterError, RecordError, FileNotFoundError) as error:
        print(f"gcpo: {error}", file=sys.stderr)
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


def _run(options: argparse.Namespace) -> int:
    from gcpo.runs.runner import run

    params = validate({**load_profile(options.profile), **_given(options.p)}, f"{options.profile} with -p")
    plan = Plan(options.kind, params)
    _make_world([plan])
    done = run(plan)
    print(f"{done.folder}: {done.manifest['status']} {done.manifest.get('exit') or done.manifest.get('results', '')}")
    return 0 if done.finished else 1


def _grid(options: argparse.Namespace) -> int:
    from gcpo.runs.runner import run_grid

    expanded = [plan for name in options.name for plan in expand(name, options.profile, _given(options.p))]
    plans = list({plan.id: plan for plan in expanded}.values())  # a run that two grids want is one run
    _make_world(plans)
    failed = run_grid(plans, options.jobs)
    for done in failed:
        print(f"FAILED {done.manifest.get('id')}: {done.manifest.get('exit')}", file=sys.stderr)
    return 1 if failed else 0


def _make_world(plans: list[Plan]) -> None:
    """Make the embedded models once, before runs in parallel would wait for them."""
    from gcpo.world import bootstrap

    if any(plan.embedded for plan in plans):
        bootstrap()


def _check(options: argparse.Namespace) -> int:
    from gcpo.runs.manifest import load

    for name in profiles():
        validate(load_profile(name), f"params/{name}.yaml")
    print(f"profiles: {', '.join(profiles())}: good")
    for name in options.name or grids():
        plans = expand(name, options.profile)
        status = [load(plan.folder).manifest.get("status", "not run") for plan in plans]
        counts = ", ".join(f"{status.count(kind)} {kind}" for kind in dict.fromkeys(status))
        print(f"grid {name} with {options.profile}: {len(plans)} runs ({counts})")
    return 0


def _report(options: argparse.Namespace) -> int:
    from gcpo.reports.site import publish, report

    if options.publish:
        print(f"published {publish(options.profile)} runs to {paths.REFERENCE / options.profile}")
    else:
        flags = {"any_code": options.any_code, "reference": options.reference}
        made, left_out = report(options.profile, options.grid, **flags)
        print(*made, *left_out, sep="\n")
    return 0


def _methods(options: argparse.Namespace) -> int:
    from gcpo.reports.tables import methods_page

    print(methods_page(), end="")
    return 0


def _world(options: argparse.Namespace) -> int:
    from gcpo.world import bootstrap

    print(bootstrap())
    return 0


_COMMANDS = {"run": _run, "grid": _grid, "check": _check, "report": _report, "methods": _methods, "world": _world}

if __name__ == "__main__":
    sys.exit(main())
