"""Runs, grids and reports of the papers' companion, from parameter files; gcpo --version says the release."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

# What takes seconds to import (torch, pandas, papermill) is imported where it is used: the first line is there at once.
from gcpo import paths
from gcpo.errors import UserError, nearest
from gcpo.processes import ends_by_sigterm
from gcpo.runs.profiles import TOY, ParameterError, is_file_name, load_profile, names_in, over, parse_yaml, profiles

if TYPE_CHECKING:
    from gcpo.runs.plan import Plan

app = typer.Typer(help=__doc__, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 when a run failed, 2 for bad parameters or missing runs, 130 or 143
    when ended by a signal."""
    given = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    sys.path.append("")  # the folder one is in, where module:name of one's own is looked for, as python -m does
    try:
        with ends_by_sigterm():
            if given[0][:1] != "-" and not {"-h", "--help"}.intersection(given) and "torch" not in sys.modules:
                print(f"gcpo {given[0]}: loading (seconds)", file=sys.stderr, flush=True)
            status = typer.main.get_command(app)(given, "gcpo", standalone_mode=False)
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
    except (KeyboardInterrupt, SystemExit) as end:
        status = getattr(end, "code", 130)
    if how := {130: "interrupted", 143: "ended by SIGTERM"}.get(status):
        print(f"gcpo: {how}; what is finished stays. Go on with: gcpo {shlex.join(given)}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # Python would try again as it ends, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status or 0


def schema() -> dict[str, Any]:
    """Return what is known of each parameter: its meaning, default and, of a method or task, names."""
    return dict(json.loads((paths.PARAMS / "schema.json").read_text(encoding="utf-8"))["properties"])


def offer(incomplete: str) -> list[str]:
    """Return what a shell offers behind -p: parameters or, behind one that has names, these."""
    words = (os.environ.get("COMP_WORDS") or os.environ["_TYPER_COMPLETE_ARGS"]).removesuffix(incomplete).split()
    names = schema().get(words[-1], {}).get("examples") or schema()
    return [name for name in names if name.startswith(incomplete)]


class WithParameters(TyperCommand):
    """A command with ``-p KEY VALUE``, as papermill has it, whose help ends with the parameters and their defaults."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        next(option for option in self.params if option.name == "given").nargs = 2  # typer has no list of pairs

    def get_help(self, ctx: Any) -> str:
        width = min(shutil.get_terminal_size().columns, 120)
        rows = ["\b", "Parameters for -p, with the values of the smoke profile:"]
        for name, about in schema().items():
            text = f"  {name:<22}{about['description']} [default: {json.dumps(about['default'])}]"
            rows += textwrap.wrap(text, width, subsequent_indent=" " * 24, break_on_hyphens=False)
        self.epilog = "\n".join(rows)
        return super().get_help(ctx)


GRID: dict[str, Any] = {"metavar": "GRID", "autocompletion": lambda: names_in(paths.PARAMS / "grids")}
Profile = Annotated[str, typer.Option(metavar="NAME", help="of params/, or a path to a file", autocompletion=profiles)]
Toy = Annotated[bool, typer.Option("--toy", help="the profile with params/toy.yaml laid over it")]
Set = Annotated[list[Any] | None, typer.Option("-p", metavar="KEY VALUE", help="repeatable", autocompletion=offer)]
Kind = Annotated[Literal["train", "gradients", "evaluate", "one_step", "warm_start"], typer.Option(help="what is run")]
Grids = Annotated[list[str], typer.Argument(help="of params/grids, or paths to such files", **GRID)]
Jobs = Annotated[int | None, typer.Option(min=1, help="runs at a time [as many as GPUs, or cores up to 4, allow]")]
Task = Annotated[str | None, typer.Option(metavar="TASK", help="only runs on this task")]
Index = Annotated[int | None, typer.Option(min=1, metavar="N", help="only the run of this number, as --dry-run counts")]
Runs = Annotated[list[str], typer.Argument(metavar="RUN RUN", help="ids, as gcpo runs lists them")]
Kept = Annotated[bool, typer.Option("--reference", help="the committed reference, not this machine's runs")]
AnyGrids = Annotated[list[str] | None, typer.Argument(help="grids [those that fit the profile]", **GRID)]
Grid = Annotated[str | None, typer.Option(help="a grid for all of them, not each report's own", **GRID)]
AnyCode = Annotated[bool, typer.Option("--any-code", help="compare runs of different code of gcpo")]
Partial = Annotated[bool, typer.Option("--partial", help="though grids are not finished")]
Pages = Annotated[bool, typer.Option("--reference", help="all but the records, again")]
Anew = Annotated[bool, typer.Option("--reference", help="in place of what was trained here")]
Seed = Annotated[int, typer.Option(min=0, help="that draws all of it; runs ask for it by world_seed")]


def _values(given: list[Any] | None) -> dict[str, Any]:
    return {key: parse_yaml(value, f"-p {key}") for key, value in given or []}


def _make(plans: list[Plan], jobs: int | None = 1) -> int:
    """Make runs, with the embedded models that they need first, and name those that fail; returns the exit status."""
    from gcpo.runs.runner import outcome, run_grid
    from gcpo.world import resolve

    for model in sorted({(getattr(p.params, kind), kind, p.params.world_seed) for p in plans for kind in p.embedded}):
        resolve(*model)  # once, before runs in parallel would wait for it
    print(f"making {plans[0].id}{' and others' * (len(plans) > 1)} in {plans[0].folder.parent}", flush=True)
    failed = run_grid(plans, jobs)
    for done in failed:
        print(f"{done.folder.name}: {outcome(done)} (traceback: {done.folder / 'notebook.ipynb'})", file=sys.stderr)
    return 1 if failed else 0


@app.command(cls=WithParameters)
def run(profile: Profile = "smoke", kind: Kind = "train", given: Set = None, toy: Toy = False) -> int:
    """Make one run: training, or another kind with --kind."""
    from gcpo.runs.params import validate
    from gcpo.runs.plan import Plan

    profile += TOY * toy
    plan = Plan(kind, validate(over(load_profile(profile), _values(given)), f"{profile} with -p"))
    if status := _make([plan]):
        return status
    if kind == "evaluate":
        from gcpo.reports.tables import scores_table
        from gcpo.runs.record import read_table

        print(scores_table(read_table(plan.folder / "scores.csv")).to_string())
    made = sorted(path.name + "/" * path.is_dir() for path in plan.folder.iterdir() if path.name[0] != ".")
    print(f"in {plan.folder}: {', '.join(made)}")
    return 0


@app.command(cls=WithParameters)
def evaluate(profile: Profile = "smoke", given: Set = None) -> int:
    """Score a policy on the held-out questions of a task."""
    return run(profile, "evaluate", given)


@app.command(cls=WithParameters)
def grid(
    name: Grids,
    profile: Profile = "smoke",
    jobs: Jobs = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would run, and run nothing")] = False,
    task: Task = None,
    index: Index = None,
    given: Set = None,
    toy: Toy = False,
) -> int:
    """Make every run of a grid that is not finished."""
    from gcpo.runs.grids import expand, fitting
    from gcpo.runs.record import states

    profile += TOY * toy
    expanded = [plan for one in name for plan in expand(one, profile, _values(given))]
    fit = fitting(profile)
    if unfit := [one for one in name if not is_file_name(one) and one not in fit]:
        raise ParameterError(f"grid {unfit[0]} is not made for {profile}, whose grids are {', '.join(fit)}.")
    plans = [plan for plan in {plan.id: plan for plan in expanded}.values() if task in (None, plan.params.task)]
    if task and not plans:
        tasks = dict.fromkeys(plan.params.task for plan in expanded)
        raise ParameterError(f"--task {task}: no run of the grid is on it.{nearest(task, tasks)}")
    if index and index > len(plans):
        raise ParameterError(f"--index {index}: the grid has {len(plans)} runs.")
    plans = plans[index - 1 : index] if index else plans
    status = dict(zip((plan.id for plan in plans), states(plans), strict=True))
    wanted = [plan for plan in plans if status[plan.id] != "finished"]
    if dry_run:
        print(*(f"{plan.id}: {status[plan.id]}" for plan in plans), sep="\n")
        print(f"{len(wanted)} of {len(plans)} runs would be made")
        return 0
    if len(wanted) < len(plans):
        print(f"{len(plans) - len(wanted)} of {len(plans)} runs are finished already", flush=True)
    made = _make(wanted, jobs) if wanted else 0
    print(f"tables and figures: gcpo report --profile {profile} --grid {name[0]}")
    return made


@app.command()
def check(name: AnyGrids = None, profile: Profile = "smoke", toy: Toy = False) -> int:
    """Check parameter files and grids, and count what is run."""
    from gcpo.reports import records
    from gcpo.runs.grids import expand, fitting
    from gcpo.runs.params import validate
    from gcpo.runs.plan import with_others
    from gcpo.runs.policies import quiet
    from gcpo.runs.record import states
    from gcpo.runs.train import refused

    profile += TOY * toy
    for one in profiles():
        validate(load_profile(one), f"params/{one}.yaml")
    print(f"profiles: {', '.join(profiles())}: good")
    asked: list[Plan] = []
    for one in name or fitting(profile):
        plans = expand(one, profile)
        asked += with_others(plans)
        counts = Counter(state.split(" (")[0] for state in states(plans))
        said = ", ".join(f"{count} {state}" for state, count in counts.items())
        print(f"grid {one} with {profile}: {len(plans)} runs ({said})")
    quiet()
    by_trl = {refused(plan): plan.id for plan in reversed(asked)}  # the first run of each complaint
    bad = [f"TRL refuses {id_}: {why}" for why, id_ in by_trl.items() if why]
    print(*bad, *(f"left out: {fault}" for fault in records.faults(profile)), sep="\n")
    return 1 if bad else 0


@app.command("runs")
def runs_(profile: Profile = "smoke", reference: Kept = False) -> None:
    """List runs, the newest first: what departs from the profile, how each ended, its age."""
    from gcpo.reports.tables import runs_table

    print(runs_table(profile, reference).to_string(index=False))


@app.command()
def compare(run: Runs, profile: Profile = "smoke", reference: Kept = False) -> None:
    """Print where finished runs differ: parameters, TRL's settings, results, code and times."""
    from gcpo.reports.tables import runs_beside

    print(runs_beside(profile, run, reference).to_string())


@app.command()
def report(
    profile: Profile = "smoke", reference: Kept = False, any_code: AnyCode = False, grid: Grid = None, toy: Toy = False
) -> int:
    """Execute the report notebooks."""
    from gcpo.reports import publish, records, replay

    profile += TOY * toy
    made, left_out = publish.report(profile, grid, any_code=any_code, reference=reference)
    print(*made, *left_out, *(f"left out: {fault}" for fault in records.faults(profile, reference)), sep="\n")
    if not made:
        print(f"no report was made: nothing has run of the grids of {profile} (gcpo check --profile {profile})")
    elif grid and not reference and len(found := replay.compare(profile, grid)):
        print("This machine's runs beside the committed ones (docs/runs.md):", found.to_string(index=False), sep="\n")
    return 0 if made else 1


@app.command()
def publish(profile: Profile = "smoke", partial: Partial = False, reference: Pages = False) -> None:
    """Make these runs the reference, with all pages made from it."""
    from gcpo.reports import publish as pages

    runs = pages.pages_again(profile) if reference else pages.publish(profile, partial)
    print(f"published {runs} runs to {paths.REFERENCE / profile}")


@app.command()
def replay(n: Annotated[int, typer.Argument(min=1, metavar="N")], profile: Profile = "laptop") -> None:
    """Make N runs of the reference again, to the same tables.

    If all of them are, this code is entered in the reference's codes.yaml.
    """
    from gcpo.reports import records, replay

    if not (runs := replay.chosen(profile, n)):
        kept = sorted(path.parent.name for path in paths.REFERENCE.glob(f"*/{records.RUNS}"))
        raise UserError(f"profile {profile} has no reference to make again: --profile takes {', '.join(kept)}.")
    found = replay.replay(profile, runs)
    print(*(f"{name}: {why or 'the same tables'}" for name, why in found.items()), sep="\n")
    if any(found.values()):
        raise UserError(f"{sum(map(bool, found.values()))} of {len(found)} runs differ from the reference.")
    print(f"This code gives the same numbers: entered in {replay.certify(profile, runs)}")


@app.command()
def methods() -> None:
    """Print every method with its rule and range."""
    from gcpo.reports.methods import markdown, methods_table

    print(markdown(methods_table()), end="")


@app.command()
def world(reference: Anew = False, seed: Seed = 0) -> None:
    """Put the embedded models where runs find them."""
    from gcpo.world import bootstrap

    print(f"Embedded world: {bootstrap(seed, anew=reference).policy.parent}")
    if seed:
        print(f"Runs start from it with -p world_seed {seed}, and read notebooks with GCPO_WORLD_SEED={seed}.")
