"""The command line, with runs that only wait: real plans, claims and records, and a line in ``STUB_LOG`` when one
begins and ends. A run that two processes make at a time is a line "twice"."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from gcpo import cli
from gcpo.runs import runner
from gcpo.runs.params import validate
from gcpo.runs.plan import KINDS, Plan
from gcpo.runs.record import claim, record

SECONDS = float(os.environ.get("STUB_SECONDS", "5"))


def log(said: str, plan: Plan) -> None:
    with Path(os.environ["STUB_LOG"]).open("a") as file:
        file.write(f"{time.time():.1f} {said} {plan.id} {os.environ.get('SLURM_JOB_ID', '-')}\n")


def execute(notebook: str, output: Path, parameters: dict[str, Any], threads: int | None = None) -> None:
    """Wait, in the place of a notebook's kernel."""
    plan = Plan(next(kind for kind, name in KINDS.items() if name == notebook), validate(parameters))
    for one in (plan.training, plan):
        if one:
            with claim(one) as found:
                if not found.finished:
                    wait(one)


def wait(plan: Plan) -> None:
    busy = plan.folder / "busy"
    if busy.exists() and psutil.pid_exists(int(busy.read_text())):
        log("twice", plan)
    busy.write_text(str(os.getpid()))
    log("start", plan)
    with record(plan) as run:
        time.sleep(SECONDS)
        run.manifest["results"] = {"greedy_f1": 0.5}
    busy.unlink()
    log("end", plan)


@contextlib.contextmanager
def threads(shares: list[list[str]]) -> Iterator[ThreadPoolExecutor]:
    """Workers that need no import of their own."""
    pool = ThreadPoolExecutor(len(shares))
    yield pool
    pool.shutdown()


if __name__ == "__main__":
    runner.execute, runner._workers = execute, threads
    status = cli.main()
    sys.stdout.flush()
    os._exit(status)  # with what still waits, as kernels end
