"""Progress of runs, for people: a bar and a live curve in a notebook, bars in a terminal, a line a minute elsewhere."""

from __future__ import annotations

import base64
import contextlib
import heapq
import io
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from gcpo.runs.plan import Plan, quarters

FILE = "progress"  # in the folder of a run that is being made
SHOWN = "GCPO_PROGRESS_SHOWN"  # in the environment of kernels whose runner shows their progress
EVERY = 60.0  # seconds between two lines where there is no terminal
REDRAWN = 5.0  # seconds between two drawings of a curve at least
BAR = "{percentage:3.0f}%|{bar:10}| {desc}"
# Work is counted in sampled completions. What else one costs was measured for the laptop profile.
TRAINED, GRADIENT = 2, 10


class State(NamedTuple):
    """How far a run is: the share of its work that is done, in words, and the numbers of a training step."""

    share: float = 0.0
    said: str = "starting"
    step: int = 0
    values: dict[str, float] | None = None


def read(folder: Path) -> State | None:
    """Return the state that a run has written into its folder, or None."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return State(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    return None


def parts(plan: Plan) -> dict[str, float]:
    """Return the work of a run: of one training step, one look at the validation split, and what follows training."""
    params = plan.params
    answers = 1 + params.eval_samples
    if plan.kind != "train":
        asked = params.eval_limit + params.step_batches * params.prompts_per_step * (plan.kind == "one_step")
        return {"end": asked * (answers if plan.kind == "evaluate" else GRADIENT * params.group_size)}
    step = (1 + TRAINED) * params.group_size * params.prompts_per_step
    return {"step": step, "look": params.validation_limit * answers, "end": params.eval_limit * answers}


def work(plan: Plan) -> float:
    """Return the work of a run, with the training that comes first."""
    each, steps = parts(plan), plan.params.max_steps
    trains = plan.kind == "train" and steps > 0
    own = each["end"] + (steps * each["step"] + len(quarters(steps)) * each["look"] if trains else 0)
    return own + (work(plan.training) if plan.training else 0)


def share(plan: Plan, step: int, looks: float, end: float = 0.0) -> float:
    """Return the share of a training run that is done after steps, looks at the validation split, and a share of the
    evaluation at the end."""
    each = parts(plan)
    return (step * each["step"] + looks * each["look"] + end * each["end"]) / work(plan)


def state(plan: Plan) -> State:
    """Return how far a run is that another process makes, with the training that comes first."""
    own = read(plan.folder)
    if plan.training is None:
        return own or State()
    first = work(plan.training) / work(plan)
    if own:
        return own._replace(share=first + (1 - first) * own.share)
    training = read(plan.training.folder) or State()
    return training._replace(share=first * training.share, said=f"training first: {training.said}")


def duration(seconds: float) -> str:
    """Return a time in words: "40 s", "3 min", "2 h 5 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


class Display:
    """Progress of the run that this process makes: in a notebook one output, which becomes the curve of reward and
    weight; elsewhere, and in the terminal of papermill, a line a minute."""

    def __init__(self, name: str) -> None:
        self.name, self.state, self.start, self.first = name, State(), time.monotonic(), 0.0
        self.points: list[tuple[int, dict[str, float]]] = []
        self.drawn, self.handle = -REDRAWN, None
        self.ended = threading.Event()
        if _in_kernel():
            from IPython.display import display

            self.handle = display({"text/plain": self.line()}, raw=True, display_id=True)
        if SHOWN not in os.environ and "JPY_SESSION_NAME" not in os.environ:
            threading.Thread(target=self._lines, daemon=True).start()

    def line(self) -> str:
        """Return the state in one line, with the time that is left."""
        done, spent = self.state.share - self.first, time.monotonic() - self.start
        left = f", {duration(spent * (1 - self.state.share) / done)} left" if done > 0 and self.state.share < 1 else ""
        return f"{self.name}: {self.state.said}{left}"

    def show(self, state: State) -> None:
        """Show a state."""
        if state == self.state:
            return
        if not self.state.share:  # an interrupted run goes on: what was there is no work of this process
            self.first, self.start = state.share, time.monotonic()
        self.state = state
        if state.values:
            self.points.append((state.step, state.values))
        if self.handle and time.monotonic() - self.drawn > REDRAWN:
            self._draw()

    def close(self, said: str) -> None:
        """Leave the last state as it is, with how the run ended."""
        self.ended.set()
        done = 1.0 if said == "finished" else self.state.share
        self.state = State(done, f"{said} after {duration(time.monotonic() - self.start)}")
        if self.handle:
            self._draw()

    def _draw(self) -> None:
        text = tqdm.format_meter(self.state.share, 1.0, 0.0, bar_format=BAR, prefix=self.line())
        shown = {"text/plain": text}
        if self.points:
            shown["image/png"] = base64.b64encode(_curve(self.points, text)).decode()
        self.handle.update(shown, raw=True)  # type: ignore[union-attr]
        self.drawn = time.monotonic()

    def _lines(self) -> None:
        # A kernel's stderr is a stream to its notebook; its descriptor is the stderr of who has started it.
        with contextlib.suppress(OSError), os.fdopen(os.dup(sys.stderr.fileno()), "w") as stream:
            erase = "\r\033[K" if stream.isatty() else ""  # papermill's own bar stands there
            while not self.ended.wait(EVERY):
                print(f"{erase}{self.line()}", file=stream, flush=True)


def _in_kernel() -> bool:
    ipython = sys.modules.get("IPython")
    return hasattr(ipython.get_ipython() if ipython else None, "kernel")


def _curve(points: Sequence[tuple[int, dict[str, float]]], title: str) -> bytes:
    """Return a picture of the mean reward and, if there is one, the mean weight by step."""
    from matplotlib.figure import Figure

    names = list(points[-1][1])
    figure, picture = Figure(figsize=(7.5, 2.4), layout="constrained"), io.BytesIO()
    figure.suptitle(title, size="small", family="monospace")
    for axis, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        axis.plot([step for step, _ in points], [values.get(name) for _, values in points], color="0.2")
        axis.set(xlabel="step", ylabel=f"mean {name}")
    figure.savefig(picture, format="png", dpi=90)
    return picture.getvalue()


class Board:
    """Progress of runs that other processes make: a bar for each of those at work and one for all, or a line a minute
    for each."""

    def __init__(self, plans: Sequence[Plan], jobs: int) -> None:
        self.waiting = {plan.id: work(plan) for plan in plans}
        self.found: dict[str, State] = {}  # how far the runs were at the last look
        self.before: dict[str, float] = {}  # share of a run that was done when this process found it
        self.of, self.jobs, self.done, self.busy = len(plans), jobs, 0.0, 0.0
        self.looked = self.written = time.monotonic()
        rows = 1 + (jobs if len(plans) > 1 else 0)
        settings: dict[str, Any] = {"total": 1.0, "bar_format": BAR, "dynamic_ncols": True, "leave": False}
        terminal = sys.stderr.isatty()
        self.bars = [tqdm(position=row, **settings) for row in range(rows if terminal else 0)]

    def look(self, running: Sequence[Plan]) -> None:
        """Show how far runs are that are being made."""
        now = time.monotonic()
        self.busy += (now - self.looked) * len(running)
        self.looked = now
        # The state of a run goes with its folder, a moment before the run has ended: it is as far as it was.
        found = {
            plan.id: max(state(plan), self.found.get(plan.id, State()), key=lambda one: one.share) for plan in running
        }
        self.found = found
        for name, one in found.items():
            if one.share:
                self.before.setdefault(name, one.share)
        lines = [(one.share, f"{name}: {one.said}") for name, one in found.items()]
        if self.of > 1 or not lines:
            ended = self.of - len(self.waiting)
            lines.append((ended / self.of, f"{ended} of {self.of} runs{self._left(found)}"))
        else:
            lines = [(lines[0][0], lines[0][1] + self._left(found))]
        if self.bars:
            for bar, (part, said) in zip(self.bars, [lines[-1], *lines[:-1]], strict=False):
                bar.n = part
                bar.set_description_str(said)
        elif now - self.written > EVERY:
            self.written = now
            print(*(said for _, said in lines), sep="\n", flush=True)

    def _left(self, found: dict[str, State]) -> str:
        """Return the time that is left: each run that waits goes to the first of the jobs that is free."""
        own = {name: (one.share - self.before.get(name, one.share)) * self.waiting[name] for name, one in found.items()}
        if not (done := self.done + sum(own.values())):
            return ""
        ends = [(1 - one.share) * self.waiting[name] for name, one in found.items()]
        ends = sorted(ends + [0.0] * (self.jobs - len(ends)))
        for size in (size for name, size in self.waiting.items() if name not in found):
            heapq.heapreplace(ends, ends[0] + size)
        return f", {duration(max(ends) * self.busy / done)} left"

    def end(self, plan: Plan, said: str) -> None:
        """Say that a run has ended."""
        self.done += (1 - self.before.get(plan.id, 0.0)) * self.waiting.pop(plan.id)
        count = f"[{self.of - len(self.waiting)}/{self.of}] " if self.of > 1 else ""
        self.say(f"{count}{plan.id}: {said}")

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        """Remove the bars."""
        for bar in reversed(self.bars):
            bar.close()
