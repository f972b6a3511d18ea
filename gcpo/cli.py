"""Runs, grids and reports of the papers' companion, from parameter files; gcpo --version says the release."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

# What takes seconds to import (torch, pandas, papermill) is imported where it is used: the first line is there at once.
from gcpo import cli_check, cli_options, io, paths
from gcpo.cli_options import GRID, Given, Profile, Reference, Toy, WithParameters, joined
from gcpo.errors import UserError, nearest
from gcpo.processes import ends_by_sigterm
from gcpo.runs.profiles import TOY, ParameterError, is_file_name, load_profile, over, parse_yaml

if TYPE_CHECKING:
    from gcpo.runs.plan import Plan

app = typer.Typer(help=__doc__, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 when a run or the gate failed, 2 for bad parameters or missing runs,
    130 or 143 when ended by a signal."""
    given = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        with ends_by_sigterm():
            _say_at_once(given)
            status = typer.main.get_command(app)(joined(given), "gcpo", standalone_mode=False)
            sys.stdout.flush()
    except typer.TyperException as error:  # of the command line itself
        print(f"gcpo: {error.format_message()} (gcpo --help, gcpo COMMAND --help)", file=sys.stderr)
        status = 2
    except BrokenPipeError:  # whoever read the output has seen enough
        status = 1
    except (UserError, OSError) as error:
        # The system's own text begins with a number.
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"gcpo: {said}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    except SystemExit as end:
        status = end.code
    if status in (130, 143):
        how = "interrupted" if status == 130 else "ended by SIGTERM"
        print(f"gcpo: {how}; what is finished stays. Go on with: gcpo {shlex.join(given)}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # Python would try again as it ends, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status or 0


def _say_at_once(given: list[str]) -> None:
    """Say what is begun before what takes seconds to import."""
    names = {command.callback.__name__ for command in app.registered_commands if command.callback}
    if given[0] in names and not {"-h", "--help"}.intersection(given) and "torch" not in sys.modules:
        print(f"gcpo {given[0]}: loading (seconds)", file=sys.stderr, flush=True)


def _values(given: list[str] | None) -> dict[str, Any]:
    pairs = [pair.partition("=") for pair in given or []]
    return {key: parse_yaml(value, f"-p {key}") for key, _, value in pairs}


def _plan(kind: str, profile: str, given: list[str] | None) -> Plan:
    from gcpo.runs.params import validate
    from gcpo.runs.plan import Plan

    return Plan(kind, validate(over(load_profile(profile), _values(given)), f"{profile} with -p"))


def _make(plans: list[Plan], jobs: int | None = 1) -> int:
    """Make runs, with the embedded models that they need first, and name those that fail; returns the exit status."""
    _refuse(plans)
    io.check_writable(paths.OUTPUTS)
    from gcpo.runs.record import states
    from gcpo.runs.runner import run_grid
    from gcpo.world import resolve

    needed = {(getattr(plan.params, kind), kind, plan.params.world_seed) for plan in plans for kind in plan.embedded}
    for model in sorted(needed):
        resolve(*model)  # once, before runs in parallel would wait for it
    more = f" and {len(plans) - 1} more" if plans[1:] else ""
    print(f"making {plans[0].id}{more} in {plans[0].folder.parent}", flush=True)
    try:
        failed = run_grid(plans, jobs)
    except (KeyboardInterrupt, SystemExit):
        ended = states(plans).count("finished")
        print(
            f"{ended} of {len(plans)} runs are finished, in {plans[0].folder.parent}; others go on from their last save"
        )
        raise
    for done in failed:
        where = done.folder / "notebook.ipynb"
        print(f"FAILED {done.manifest.get('id')}: {done.manifest.get('exit')} (traceback: {where})", file=sys.stderr)
    return 1 if failed else 0


def _refuse(plans: list[Plan]) -> None:
    """Raise :class:`ParameterError` with what TRL says against runs that are not finished, or their trainings, as
    :func:`gcpo.runs.preflight.refused` finds it.

    A process of its own asks TRL, whose config takes memory of a GPU and sets variables that kernels would inherit.
    """
    from gcpo.runs.plan import with_trainings
    from gcpo.runs.record import states

    asked = [plan for plan in with_trainings(plans) if plan.kind == "train" and plan.params.max_steps]
    if left := [plan for plan, state in zip(asked, states(asked), strict=True) if state != "finished"]:
        given = json.dumps([(plan.kind, plan.params.model_dump(mode="json")) for plan in left])
        asks = [sys.executable, "-m", "gcpo.runs.preflight"]
        done = subprocess.run(asks, input=given, capture_output=True, text=True)
        if not done.returncode and (bad := json.loads(done.stdout.splitlines()[-1])):
            raise ParameterError("\n".join(bad))


@app.command(cls=WithParameters)
def run(
    profile: Profile = "smoke",
    kind: Annotated[Literal["train", "gradients", "evaluate", "one_step"], typer.Option(help="what is run")] = "train",
    given: Given = None,
    toy: Toy = False,
) -> int:
    """Make one run: training, or another kind with --kind."""
    plan = _plan(kind, profile + TOY * toy, given)
    if status := _make([plan]):
        return status
    made = sorted(path.name + "/" * path.is_dir() for path in plan.folder.iterdir() if path.name[0] != ".")
    print(f"in {plan.folder}: {', '.join(made)}")
    return 0


@app.command(cls=WithParameters)
def evaluate(profile: Profile = "smoke", given: Given = None) -> int:
    """Score a policy on the held-out questions of a task."""
    plan = _plan("evaluate", profile, given)
    if status := _make([plan]):
        return status
    import pandas as pd

    from gcpo.reports.tables import scores_table

    print(scores_table(pd.read_csv(plan.folder / "scores.csv")).to_string(), f"in {plan.folder}", sep="\n")
    return 0


@app.command(cls=WithParameters)
def grid(
    name: Annotated[list[str], typer.Argument(help="one or more of params/grids, or paths to such files", **GRID)],
    profile: Profile = "smoke",
    jobs: cli_options.Jobs = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would run, and run nothing")] = False,
    index: cli_options.Index = None,
    only_failed: Annotated[bool, typer.Option("--only-failed", help="only runs that have failed before")] = False,
    task: Annotated[str | None, typer.Option(metavar="TASK", help="only runs on this task")] = None,
    beyond_reference: Annotated[
        bool, typer.Option("--beyond-reference", help="only runs that the committed reference lacks")
    ] = False,
    any_profile: cli_options.AnyProfile = False,
    given: Given = None,
    toy: Toy = False,
) -> int:
    """Make every run of a grid that is not finished."""
    from gcpo.runs.grids import expand, fitting
    from gcpo.runs.record import states

    profile += TOY * toy
    expanded = [plan for one in name for plan in expand(one, profile, _values(given))]
    if not any_profile:
        _refuse_unfit(name, profile, fitting(profile))
    each = list({plan.id: plan for plan in expanded}.values())  # a run that two grids want is one run
    plans = _chosen(each, task, profile if beyond_reference else None)
    if index:
        plans = _numbered(plans, index)
    status = dict(zip((plan.id for plan in plans), states(plans), strict=True))
    if only_failed:
        plans = [plan for plan in plans if status[plan.id] == "failed"]
    wanted = [plan for plan in plans if status[plan.id] != "finished"]
    if dry_run:
        print(*(f"{plan.id}: {status[plan.id]}" for plan in plans), sep="\n")
        print(f"{len(wanted)} of {len(plans)} runs would be made")
        return 0
    if len(wanted) < len(plans) or not plans:
        print(f"{len(plans) - len(wanted)} of {len(plans)} runs are finished already", flush=True)
    made = _make(wanted, jobs) if wanted else 0
    if wanted:
        print(f"in {wanted[0].folder.parent}; tables and figures: gcpo report --profile {profile} --grid {name[0]}")
    return made


def _chosen(plans: list[Plan], task: str | None, beyond: str | None) -> list[Plan]:
    """Return the plans on a task, without those that the reference of the profile ``beyond`` has."""
    found = [plan for plan in plans if plan.params.task == (task or plan.params.task)]
    if plans and not found:
        there = dict.fromkeys(plan.params.task for plan in plans)
        raise ParameterError(f"--task {task}: no run of the grid is on it.{nearest(str(task), there)}")
    if beyond is None:
        return found
    from gcpo.reports.records import runs

    known = {run.manifest["id"] for run in runs(beyond, reference=True) if run.finished}
    return [plan for plan in found if plan.id not in known]


def _refuse_unfit(grids: list[str], profile: str, fit: list[str]) -> None:
    if unfit := [one for one in grids if not is_file_name(one) and one not in fit]:
        raise ParameterError(
            f"grid {unfit[0]} is not made for {profile}, whose grids are {', '.join(fit)}; --any-profile runs it so."
        )


def _numbered(plans: list[Plan], index: int) -> list[Plan]:
    """Return the plan of this number, from 1 on."""
    if index > len(plans):
        raise ParameterError(f"--index {index}: the grid has {len(plans)} runs.")
    return [plans[index - 1]]


@app.command()
def check(
    name: Annotated[list[str] | None, typer.Argument(help="grids [those that fit the profile]", **GRID)] = None,
    profile: Profile = "smoke",
    gate: Annotated[
        str | None, typer.Option(metavar="PROFILE", help="say whether GRPO learns there, from its runs of table1")
    ] = None,
    reference: Annotated[bool, typer.Option("--reference", help="with --gate: of the committed reference")] = False,
    replay: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="make N runs of the reference again, and compare")
    ] = None,
    toy: Toy = False,
) -> int:
    """Check parameter files and grids, and count what is run."""
    profile += TOY * toy
    if gate or reference:
        return cli_check.gate(gate, name, reference)
    if replay:
        return cli_check.replay(profile, replay)
    return cli_check.check(profile, name)


@app.command()
def report(
    profile: Profile = "smoke",
    publish: Annotated[
        bool,
        typer.Option(
            "--publish",
            help="make these runs the reference: records, tables, figures, committed notebooks, the README's results; "
            "with --reference: all of these but the records, again",
        ),
    ] = False,
    partial: Annotated[bool, typer.Option("--partial", help="with --publish: though grids are not finished")] = False,
    reference: Reference = False,
    any_code: Annotated[
        bool, typer.Option("--any-code", help="compare runs of different code of this package")
    ] = False,
    grid: Annotated[str | None, typer.Option(help="a grid for all of them, not each report's own", **GRID)] = None,
    toy: Toy = False,
) -> int:
    """Execute the report notebooks."""
    from gcpo.reports import publish as pages
    from gcpo.reports import records, replay

    profile += TOY * toy
    load_profile(profile)  # a name that is none leaves no folder behind
    if publish:
        runs = pages.pages_again(profile) if reference else pages.publish(profile, partial)
        print(f"published {runs} runs to {paths.REFERENCE / profile}")
        return 0
    made, left_out = pages.report(profile, grid, any_code=any_code, reference=reference)
    faults = [f"left out: {fault}" for fault in records.faults(profile, reference)]
    print(*made, *left_out, *faults, sep="\n")
    if not made:
        print(f"no report was made: nothing has run of the grids of {profile} (gcpo check --profile {profile})")
    elif grid and not reference:
        said = "This machine's runs beside the committed ones (docs/runs.md has what each finding means):"
        print(said, replay.compare(profile, grid).to_string(index=False), sep="\n")
    return 0 if made else 1


@app.command()
def methods() -> None:
    """Print every method with its rule and range."""
    from gcpo.reports.methods import methods_page

    print(methods_page(), end="")


@app.command()
def world(
    reference: Annotated[
        bool, typer.Option("--reference", help="the reference's, in place of what was trained here")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="that draws all of it; runs ask for it by world_seed")] = 0,
) -> None:
    """Put the embedded models where runs find them."""
    from gcpo.world import bootstrap

    print(bootstrap(seed, anew=reference))
    if seed:
        print(f"Runs start from it with -p world_seed {seed}, and read notebooks with GCPO_WORLD_SEED={seed}.")
