"""Grids of runs: papermill executes each run's notebook in a kernel of its own, several at a time."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import papermill
import torch
from accelerate.utils import patch_environment
from filelock import FileLock, Timeout
from ipykernel.kernelapp import IPKernelApp
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import DeadKernelError
from tqdm import tqdm

from gcpo import paths
from gcpo.processes import exit_with_parent
from gcpo.runs import distributed
from gcpo.runs.plan import KINDS, Plan
from gcpo.runs.profiles import ParameterError
from gcpo.runs.record import Run, claim, describe, load

THREADS = "OMP_NUM_THREADS"
DIED = "the kernel died without a word, as when memory runs out: change memory_limit or --jobs"
_warm = False  # whether kernels of this process are forks of a server that has imported everything


class WarmKernel(ForkServerProcess):
    """A kernel that has imported everything when it starts, with what jupyter_client asks of a ``subprocess.Popen``."""

    stdin = stdout = stderr = None

    def poll(self) -> int | None:
        """Return the exit status, None while the kernel runs."""
        return self.exitcode

    def wait(self) -> int | None:
        """Wait for the kernel's end, and return its exit status."""
        self.join()
        return self.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal to the kernel."""
        os.kill(self.pid or 0, number)


def _be_a_kernel(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Be a kernel until it is shut down, or until the worker that asked for it has ended."""
    os.setsid()  # signals to the kernel reach what it starts
    exit_with_parent(os.getppid())
    tqdm.set_lock(threading.RLock())  # its own is one between processes, which a kill would leave behind
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(int(environment[THREADS].split(",")[0]))
    IPKernelApp.launch_instance(arguments, parent_handle=os.getppid())
    atexit._run_exitfuncs()  # as at the end of any program, which multiprocessing leaves out


class KernelManager(AsyncKernelManager):
    """Kernels that talk over files in a folder of their own: parallel kernels cannot collide on ports."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        place = tempfile.gettempdir()
        place = place if len(place) < 75 else "/tmp"  # a socket's path has room for about 100 characters
        self._folder = tempfile.TemporaryDirectory(prefix="gcpo-", dir=place, ignore_cleanup_errors=True)
        self.transport, self.ip = "ipc", str(Path(self._folder.name) / "kernel")

    async def _async_launch_kernel(self, kernel_cmd: list[str], **settings: Any) -> None:
        if not _warm:
            return await super()._async_launch_kernel(kernel_cmd, **settings)
        kernel = WarmKernel(target=_be_a_kernel, args=(kernel_cmd[3:], dict(settings["env"]), str(Path.cwd())))
        kernel.start()
        provisioner: Any = self.provisioner
        provisioner.process, provisioner.pid, provisioner.pgid = kernel, kernel.pid, kernel.pid

    async def _async_interrupt_kernel(self) -> None:
        # A kernel that is being shut down has nothing left to interrupt; it would only print that it was.
        if not self.shutting_down:
            await super()._async_interrupt_kernel()


class Terminal:
    """What a kernel says of its progress, shown as it is in a terminal, and as lines in a log."""

    def write(self, text: str) -> None:
        """Write a part of the kernel's standard error."""
        if not sys.stderr.isatty():
            text = "".join(f"{line.strip()}\n" for line in text.split("\r") if line.strip())
        sys.stderr.write(text)

    def flush(self) -> None:
        """Show what was written."""
        sys.stderr.flush()


def execute(notebook: str, output: Path, parameters: dict[str, Any], shown: bool = False) -> None:
    """Execute a notebook of ``notebooks/`` with papermill; the executed copy is written even when a cell fails.

    Raises:
        ParameterError: a parameter that the notebook does not have; papermill itself only warns.
        papermill.PapermillExecutionError: a cell failed.
    """
    path = paths.NOTEBOOKS / f"{notebook}.ipynb"
    if unknown := set(parameters) - set(papermill.inspect_notebook(str(path))):
        raise ParameterError(f"{path.name} has no parameter {', '.join(sorted(unknown))}.")
    output.parent.mkdir(parents=True, exist_ok=True)
    papermill.execute_notebook(
        str(path),
        str(output),
        parameters,
        cwd=str(paths.NOTEBOOKS),
        progress_bar=False,
        stderr_file=Terminal() if shown else None,
        coalesce_streams=True,  # a bar is one line, as it was last
        kernel_manager_class="gcpo.runs.runner.KernelManager",
        extra_arguments=["--log-level=40"],  # a kernel whose parent was ended says so, below the parent's last words
    )


def run(plan: Plan, wait: bool = True, shown: bool = True) -> Run | None:
    """Make one run in a kernel of its own; its folder gets notebook.ipynb as well. A finished run is returned as is.

    A failure is in the returned run's manifest, not raised. A kernel that dies without a word is started once more.
    Without ``wait``, None if another process makes the run.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(Timeout), FileLock(plan.folder / ".job", timeout=-1 if wait else 0):
        for _ in range(2):
            if (done := load(plan.folder)).finished:
                return done
            try:
                execute(KINDS[plan.kind], plan.folder / "notebook.ipynb", plan.params.model_dump(mode="json"), shown)
            except DeadKernelError:
                _fail(plan, DIED)
                continue
            except Exception as error:
                _fail(plan, f"{type(error).__name__}: {error}".strip())
            break
        return load(plan.folder)
    return None


def _fail(plan: Plan, why: str) -> None:
    """Write why a run failed, if it died outside its own record or before that was opened."""
    with claim(plan) as done:
        if done.manifest.get("status") not in ("failed", "finished"):
            done.manifest |= {**describe(plan), "status": "failed", "exit": why}
            done.write()


def run_grid(plans: Sequence[Plan], jobs: int | None = None) -> list[Run]:
    """Make all runs and the trainings that they look at, ``jobs`` at a time (as many as this machine has room for,
    :func:`distributed.runs_at_once`), with GPUs and cores shared out; returns those that did not finish.

    What another process makes is awaited once nothing else is left. An interrupt, or the end of this process in any
    way, ends what is running; the next start goes on from there.
    """
    trainings = [plan.training for plan in plans if plan.training and not load(plan.training.folder).finished]
    left = list({plan.id: plan for plan in [*trainings, *plans]}.values())
    failed, total = [], len(left)
    with _workers(left, jobs) as pool, tqdm(total=total, unit="run", disable=True if total == 1 else None) as bar:
        for wait in (False, True):
            started = {pool.submit(run, plan, wait, total == 1): plan for plan in left}
            for future in as_completed(started):
                if (done := future.result()) is not None:
                    left.remove(started[future])
                    failed += [] if done.finished else [done]
                    bar.update()
                    tqdm.write(f"[{total - len(left)}/{total}] {started[future].id}: {outcome(done)}")
    return failed


@contextlib.contextmanager
def _workers(plans: Sequence[Plan], jobs: int | None) -> Iterator[ProcessPoolExecutor]:
    """Processes that make runs, each with its share of GPUs and cores; they end when this process does, in any way."""
    jobs = min(jobs or distributed.runs_at_once(plans), len(plans))
    shares = distributed.gpu_shares(jobs, plans)
    warm = not shares[0] and sys.platform == "linux"  # a fork cannot use CUDA, and Apple's libraries crash in one
    context: Any = multiprocessing.get_context("forkserver" if warm else "spawn")
    if warm:
        with patch_environment(**{THREADS: "1"}):  # libraries that start threads when imported start none there
            context.set_forkserver_preload(["gcpo.runs.warm"])
            forkserver.ensure_running()
    queue = context.SimpleQueue()
    for share in shares:
        queue.put(share)
    threads = os.environ.get(THREADS) or str(max(1, (os.cpu_count() or 1) // jobs))
    environment = {**os.environ, THREADS: threads, distributed.AT_ONCE: str(jobs)}
    pool = ProcessPoolExecutor(jobs, context, initializer=_work, initargs=(queue, environment, warm))
    try:
        yield pool
    except BrokenProcessPool:
        why = "A worker process was killed, perhaps for want of memory (try fewer --jobs)"
        raise ChildProcessError(f"{why}; the same command goes on from here.") from None
    except BaseException:
        for worker in multiprocessing.active_children():
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _work(shares: Any, environment: dict[str, str], warm: bool) -> None:
    """Make this process a worker that ends with its parent; an interrupt of the terminal is the parent's to handle."""
    global _warm
    _warm = warm
    os.environ.update(environment)
    if gpus := shares.get():
        os.environ[distributed.VISIBLE] = ",".join(gpus)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_with_parent(os.getppid())


def outcome(done: Run) -> str:
    """Return how a run ended, in one line: its first results, or why it failed."""
    if not done.finished:
        return f"FAILED ({done.manifest.get('exit')})"
    results = [f"{name} {value:.3g}" for name, value in done.manifest.get("results", {}).items()]
    return ", ".join([f"finished in {done.manifest['seconds']:.0f} s", *results[:4]])
