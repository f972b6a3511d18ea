"""Running notebooks in batches: papermill over grids of runs, several at a time, and over the reports."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pandas as pd
import papermill
from filelock import FileLock, Timeout
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import DeadKernelError

from gcpo import paths
from gcpo.processes import exit_with_parent
from gcpo.runs import distributed, kernels
from gcpo.runs.plan import KINDS, Plan
from gcpo.runs.profiles import ParameterError
from gcpo.runs.progress import SHOWN, Board, duration
from gcpo.runs.record import Run, claim, describe, job, load

PREFIX = "gcpo-"  # prefix of temporary folders
DIED = "the kernel died without a word, as when memory runs out: change memory_limit or --jobs, or make it by gcpo run"
_warm = False  # whether kernels of this process are forks of a server
_gpus: list[str] = []  # GPUs of this worker process; if empty, its kernels see all GPUs that it sees


class IPCKernelManager(AsyncKernelManager):
    """Kernels that talk over files in a folder of their own: parallel kernels cannot collide, on ports or on names."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        place = tempfile.gettempdir()
        place = place if len(place) < 75 else "/tmp"  # a socket's path has room for about 100 characters
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=place, ignore_cleanup_errors=True)
        self._alive = FileLock(Path(self._folder.name) / "alive")  # free again, however this process ends
        self._alive.acquire()
        self.transport = "ipc"
        self.ip = str(Path(self._folder.name) / "kernel")

    async def _async_launch_kernel(self, kernel_cmd: list[str], **settings: Any) -> None:
        given: Any = self.provisioner
        if not _warm:
            return await super()._async_launch_kernel(kernel_cmd, **settings)
        given.process = kernels.start(kernel_cmd, settings["env"], settings.get("cwd") or Path.cwd())
        given.pid = given.pgid = given.process.pid

    async def _async_interrupt_kernel(self) -> None:
        # A kernel that is being shut down has nothing left to interrupt; it would only print that it was.
        if not self.shutting_down:
            await super()._async_interrupt_kernel()


def execute(notebook: str, output: Path, parameters: dict[str, Any], threads: int | None = None) -> None:
    """Execute a notebook of ``notebooks/`` with papermill; the executed copy is written even when a cell fails.

    Raises:
        ParameterError: a parameter that the notebook does not have; papermill itself only warns.
        papermill.PapermillExecutionError: a cell failed.
    """
    path = paths.NOTEBOOKS / f"{notebook}.ipynb"
    unknown = set(parameters) - set(papermill.inspect_notebook(str(path)))
    if unknown:
        raise ParameterError(f"{path.name} has no parameter {', '.join(sorted(unknown))}.")
    output.parent.mkdir(parents=True, exist_ok=True)
    os.environ[SHOWN] = "1"
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    papermill.execute_notebook(
        str(path),
        str(output),
        parameters,
        cwd=str(paths.NOTEBOOKS),
        progress_bar=False,
        kernel_manager_class="gcpo.runs.runner.IPCKernelManager",
        extra_arguments=["--log-level=40"],  # a kernel whose parent was ended says so, below the parent's last words
    )


def sweep() -> None:
    """Remove what kernels of killed processes left in the folder for temporary files: folders of their sockets and lock
    alone."""
    for place in {tempfile.gettempdir(), "/tmp"}:
        for folder in Path(place).glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError, Timeout):
                names = {path.name for path in folder.iterdir()}
                if "alive" in names and all(re.fullmatch(r"alive|kernel-\d+", name) for name in names):
                    with FileLock(folder / "alive", timeout=0):
                        shutil.rmtree(folder)


def run(plan: Plan, threads: int | None = None, wait: bool = True, last: bool = False) -> Run | None:
    """Make one run in a kernel of its own; its folder gets notebook.ipynb as well. A finished run is returned as is.

    A failure is in the returned run's manifest, not raised. Without ``wait``, None if another process has the run, or
    the training run that it begins with. A kernel that dies without a word is started once more, unless this is the
    ``last`` time; a run of which two have died is not made by a grid again, unless its memory has another limit.
    """
    values, limit = plan.params.model_dump(mode="json"), -1 if wait else 0
    room = [plan.params.memory_limit, os.environ.get(kernels.BESIDE)]
    try:
        with contextlib.ExitStack() as held:
            found = held.enter_context(job(plan, limit))
            if found.finished or (room[1] and found.manifest.get("died") == room):
                return found
            if plan.training and not load(plan.training.folder).finished:  # one that is there many may look at
                held.enter_context(job(plan.training, limit))
            if _gpus:
                os.environ[distributed.VISIBLE] = ",".join(_gpus[: distributed.gpus_needed(plan)])
            execute(KINDS[plan.kind], plan.folder / "notebook.ipynb", values, threads)
    except Timeout:
        return None
    except Exception as error:
        dead = isinstance(error, DeadKernelError)
        with contextlib.suppress(Timeout), claim(plan, timeout=0) as done:
            # It died outside the run's own record, or before that was opened.
            if done.manifest.get("status") not in (("finished",) if dead else ("failed", "finished")):
                reason = DIED if dead else f"{type(error).__name__}: {error}".strip()
                done.manifest |= {**describe(plan), "status": "failed", "exit": reason, "died": room if last else None}
                done.write()
        if dead and not last:
            return run(plan, threads, wait, last=True)
    return load(plan.folder)


def share(jobs: int) -> int | None:
    """Return the threads of each of ``jobs`` runs: its share of the cores; None where OMP_NUM_THREADS decides."""
    return None if "OMP_NUM_THREADS" in os.environ else max(1, (os.cpu_count() or 1) // jobs)


def run_grid(plans: Sequence[Plan], jobs: int | None = None, wait: bool = True) -> list[Run]:
    """Make all runs, ``jobs`` at a time (as many as this machine has room for, :func:`distributed.runs_at_once`), with
    GPUs and cores shared out, unless OMP_NUM_THREADS says how many threads each has; a failed run does not stop the
    others.

    What another process is making is left to it, and looked at again when others have ended. Once nothing else is left,
    this process waits for it, or without ``wait`` leaves it. Returns the runs that did not finish. An interrupt, or the
    end of this process in any way, ends what is running; the next start goes on from there.
    """
    sweep()
    jobs = min(jobs or distributed.runs_at_once(plans), len(plans))
    threads = share(jobs)
    failed: list[Run] = []
    with _workers(distributed.gpu_shares(jobs, plans)) as pool, contextlib.closing(Board(plans, jobs)) as board:

        def make(asked: Sequence[Plan], waits: bool = False) -> list[Plan]:
            """Make runs, and return those that another process has."""
            elsewhere = []
            for plan, done in _as_they_end({pool.submit(run, one, threads, waits): one for one in asked}, board):
                if done is None:
                    elsewhere.append(plan)
                    continue
                if not done.finished:
                    failed.append(done)
                board.end(plan, outcome(done))
            return elsewhere

        asked = list(plans)
        while len(left := make(asked)) < len(asked):  # the training that a run begins with may have been made meanwhile
            asked = left
        if left and wait:
            board.say(f"waiting for {len(left)} runs that another process makes")
            make(left, waits=True)
        for plan in [] if wait else left:
            board.say(f"{plan.id}: another process makes it, and it is left to that one")
    return failed


def _as_they_end(started: dict[Future[Run | None], Plan], board: Board) -> Iterator[tuple[Plan, Run | None]]:
    """Yield each plan with its run as soon as that has ended; the board shows how far the others are."""
    waiting = set(started)
    while waiting:
        ended, waiting = wait(waiting, timeout=1, return_when=FIRST_COMPLETED)
        for future in ended:
            yield started[future], _result(future, started[future])
        board.look([started[future] for future in waiting if future.running()])


def _result(future: Future[Run | None], plan: Plan) -> Run | None:
    try:
        return future.result()
    except BrokenProcessPool:
        raise ChildProcessError(
            "A worker process was killed, perhaps for want of memory (try fewer --jobs); the same command goes on from "
            "here."
        ) from None
    except Exception:
        return Run(plan.folder, {"id": plan.id, "exit": traceback.format_exc(limit=1)})


@contextlib.contextmanager
def _workers(shares: list[list[str]]) -> Iterator[ProcessPoolExecutor]:
    """Processes, one for each share of the GPUs, that end when this one is interrupted, and soon after it has died;
    their kernels end with them."""
    # Not forked: this process has threads (of torch, of claims), and a lock that one of them holds would stay held.
    fresh = multiprocessing.get_context("spawn")
    left = fresh.SimpleQueue()
    for one in shares:
        left.put((one, shares.count(one)))
    pool = ProcessPoolExecutor(len(shares), fresh, initializer=_worker, initargs=(os.getpid(), left))
    try:
        yield pool
    except BaseException:
        for worker in multiprocessing.active_children():
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _worker(parent: int, shares: Any) -> None:
    """Take a share of the GPUs and of memory, and let this process end when its parent has; an interrupt of the
    terminal is the parent's to handle."""
    global _gpus, _warm
    _gpus, beside = shares.get()
    os.environ[kernels.BESIDE] = str(beside)
    _warm = not _gpus and sys.platform == "linux"  # a fork cannot use CUDA if the server has; Apple's libraries crash
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_with_parent(parent)


def outcome(done: Run) -> str:
    """Return how a run ended, in one line: what it reached, or why it failed."""
    manifest = done.manifest
    if not done.finished:
        return f"FAILED ({manifest.get('exit')})"
    return f"finished in {duration(manifest.get('seconds', 0))}: {_reached(done)}"


def _reached(done: Run) -> str:
    """Return what a finished run reached: the task's own metric, sampled if it was, and its gain while training."""
    results, params = done.manifest.get("results", {}), done.manifest["params"]
    metric = done.manifest["resolved"]["task"]["reward_metric"]
    kinds = (f"avg@{params['eval_samples']}_{metric}", f"sampled_{metric}", f"greedy_{metric}")
    said = [f"{name.replace('_', ' ')} {100 * results[name]:.1f} %" for name in kinds if name in results][:1]
    rates = ("success_rate", "pair_spearman")
    said += [f"{name.replace('_', ' ')} {results[name]:.3g}" for name in rates if name in results]
    gained = [name for name in results if name.startswith("gain_")][:2]
    said += [f"{name.removeprefix('gain_')} gains {100 * results[name]:+.1f} % over grpo" for name in gained]
    path = done.folder / "validation.csv"
    if path.exists():
        table = pd.read_csv(path)
        table = table[table["decoding"] == table["decoding"].max()]  # sampled goes before greedy
        means = 100 * table.groupby("step")[metric].mean()
        first, last = means.iloc[0], means.iloc[-1]
        said.append(f"on validation {first:.1f} to {last:.1f} ({last - first:+.1f})")
    return ", ".join(said)
