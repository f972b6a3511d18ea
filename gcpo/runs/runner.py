"""Grids of runs: papermill executes each run's notebook in a kernel of its own, several at a time."""

import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import papermill
from filelock import FileLock, Timeout
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import DeadKernelError
from tqdm import tqdm

from gcpo import paths
from gcpo.runs import distributed
from gcpo.runs.plan import KINDS, Plan
from gcpo.runs.record import LOCKS, Run, claim, describe, load

THREADS = "OMP_NUM_THREADS"
DIED = "the kernel died without a word, as when memory runs out: change memory_limit or --jobs"
# Of a thread that makes runs, `environment`: what its kernels have besides this process's.
_thread = threading.local()
_kernels: WeakSet[Any] = WeakSet()
_ending = threading.Event()


class KernelManager(AsyncKernelManager):
    """Kernels that talk over files in a folder of their own: parallel kernels cannot collide on ports."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # A socket's path has room for about 100 characters: a user's own folder of temporary files may take more.
        self._folder = tempfile.TemporaryDirectory(prefix="gcpo-", dir="/tmp", ignore_cleanup_errors=True)
        self.transport, self.ip = "ipc", str(Path(self._folder.name) / "kernel")

    async def _async_launch_kernel(self, kernel_cmd: list[str], **settings: Any) -> None:
        # What can be imported here can be there, such as a user's own method.
        imported = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        environment = {**settings.pop("env"), **imported, **getattr(_thread, "environment", {})}
        await super()._async_launch_kernel(kernel_cmd, **settings, env=environment, cwd=str(paths.NOTEBOOKS))
        process = cast(Any, self.provisioner).process
        _kernels.add(process)
        if _ending.is_set():
            process.kill()


class Terminal:
    """Progress of a kernel, shown as it is in a terminal, and as lines in a log."""

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
        papermill.PapermillExecutionError: a cell failed.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    papermill.execute_notebook(
        str(paths.NOTEBOOKS / f"{notebook}.ipynb"),
        str(output),
        parameters,
        progress_bar=False,
        stderr_file=Terminal() if shown else None,
        coalesce_streams=True,  # a bar is one line, as it was last
        kernel_manager_class="gcpo.runs.runner.KernelManager",
        extra_arguments=["--log-level=50"],  # a kernel that is told to end says so, below its parent's last words
    )


def run(plan: Plan, wait: bool = True, shown: bool = True) -> Run | None:
    """Make one run in a kernel of its own; its folder gets notebook.ipynb as well. A finished run is returned as is.

    A failure is in the returned run's manifest, not raised. Without ``wait``, None if another process makes the run.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(plan.folder / LOCKS[1]).acquire(timeout=-1 if wait else 0, cancel_check=_ending.is_set)
    except Timeout:
        return None
    with lock:
        if not (load(plan.folder).finished or _ending.is_set()):
            try:
                execute(KINDS[plan.kind], plan.folder / "notebook.ipynb", plan.params.model_dump(mode="json"), shown)
            except DeadKernelError:
                _fail(plan, DIED)
            except Exception as error:
                _fail(plan, f"{type(error).__name__}: {error}".strip())
    return load(plan.folder)


def _fail(plan: Plan, why: str) -> None:
    """Write why a run failed, if it died outside its own record or before that was opened, and the grid goes on."""
    if _ending.is_set():
        return
    with claim(plan) as done:
        if done.manifest.get("status") not in ("failed", "finished"):
            done.manifest |= {**describe(plan), "status": "failed", "exit": why}
            done.write()


def run_grid(plans: Sequence[Plan], jobs: int | None = None) -> list[Run]:
    """Make all runs and those that they start from, ``jobs`` at a time (as many as this machine has room for,
    :func:`distributed.runs_at_once`), with GPUs and cores shared out; returns those that did not finish.

    What another process makes is awaited once nothing else is left. An interrupt, or the end of this process in any
    way, ends what is running; the next start goes on from there.
    """
    first = [one for plan in plans for one in plan.before if not load(one.folder).finished]
    left = list({plan.id: plan for plan in [*first, *plans]}.values())
    failed, total = [], len(left)
    _ending.clear()
    with _threads(left, jobs) as pool, tqdm(total=total, unit="run", disable=True if total == 1 else None) as bar:
        try:
            for wait in (False, True):
                started = {pool.submit(run, plan, wait, total == 1): plan for plan in left}
                for future in as_completed(started):
                    if (done := future.result()) is not None:
                        left.remove(started[future])
                        failed += [] if done.finished else [done]
                        bar.update()
                        tqdm.write(f"[{total - len(left)}/{total}] {started[future].id}: {outcome(done)}")
        except BaseException:
            _ending.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for kernel in list(_kernels):
                kernel.kill()
            raise
    return failed


def _threads(plans: Sequence[Plan], jobs: int | None) -> ThreadPoolExecutor:
    """Return threads that make runs, each with its share of GPUs and cores."""
    jobs = min(jobs or distributed.runs_at_once(plans), len(plans))
    shares = iter(distributed.gpu_shares(jobs, plans))
    threads = os.environ.get(THREADS) or str(max(1, (os.cpu_count() or 1) // jobs))

    def begin() -> None:
        gpus = next(shares)
        visible = {distributed.VISIBLE: ",".join(gpus)} if gpus else {}
        _thread.environment = {THREADS: threads, distributed.AT_ONCE: str(jobs), **visible}

    return ThreadPoolExecutor(jobs, initializer=begin)


def outcome(done: Run) -> str:
    """Return how a run ended, in one line: its first results, or why it failed."""
    if not done.finished:
        return f"FAILED ({done.fault or done.manifest.get('exit')})"
    results = [f"{name} {value:.3g}" for name, value in done.manifest.get("results", {}).items()]
    return ", ".join([f"finished in {done.manifest['seconds']:.0f} s", *results[:4]])
