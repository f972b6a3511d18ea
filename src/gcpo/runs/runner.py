"""Running notebooks in batches: papermill over grids of runs, several at a time, and over the reports."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import papermill
import yaml
from jupyter_client.manager import AsyncKernelManager
from tqdm import tqdm

from gcpo import paths
from gcpo.runs.manifest import Run, describe, load
from gcpo.runs.params import ParameterError
from gcpo.runs.plan import KINDS, Plan


class IPCKernelManager(AsyncKernelManager):
    """Kernels that talk over files in a folder of their own: parallel kernels cannot collide, on ports or on names."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._folder = tempfile.TemporaryDirectory(prefix="gcpo-", ignore_cleanup_errors=True)
        self.transport = "ipc"
        self.ip = str(Path(self._folder.name) / "kernel")

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
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    papermill.execute_notebook(
        str(path),
        str(output),
        parameters,
        cwd=str(paths.NOTEBOOKS),
        progress_bar=False,
        kernel_manager_class="gcpo.runs.runner.IPCKernelManager",
    )


def run(plan: Plan, threads: int | None = None) -> Run:
    """One run in a kernel of its own; its folder gets params.yaml and notebook.ipynb. A finished run is returned as is.

    A failure is in the returned run's manifest, not raised.
    """
    folder = plan.folder
    if not load(folder).finished:
        folder.mkdir(parents=True, exist_ok=True)
        values = plan.params.model_dump(mode="json")
        (folder / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        try:
            execute(KINDS[plan.kind], folder / "notebook.ipynb", values, threads)
        except Exception as error:
            done = load(folder)
            if done.manifest.get("status") not in ("failed", "finished"):  # it died outside the run's own record
                reason = f"{type(error).__name__}: {error}".strip()
                done.manifest |= {**describe(plan), "status": "failed", "exit": reason}
                done.write()
    return load(folder)


def run_grid(plans: Sequence[Plan], jobs: int) -> list[Run]:
    """All runs, ``jobs`` at a time with the cores shared out; a failed run does not stop the others.

    Returns the runs that did not finish. An interrupt, or the end of this process in any way, ends what is running;
    the next start goes on from there.
    """
    threads = max(1, (os.cpu_count() or 1) // jobs)
    start, failed, total = time.monotonic(), [], len(plans)
    with (
        _workers(jobs) as pool,
        tqdm(total=total, unit="run", disable=not sys.stderr.isatty()) as bar,
    ):
        folders = {pool.submit(run, plan, threads): plan.folder for plan in plans}
        waiting = set(folders)
        before = sum(load(folder).finished for folder in folders.values())  # cost no time, and tell none
        while waiting:
            ended, waiting = wait(waiting, timeout=2, return_when=FIRST_COMPLETED)
            count = total - len(waiting)
            for future in ended:
                folder = folders[future]
                try:
                    done = future.result()
                except Exception:
                    done = Run(folder, {"id": folder.name, "exit": traceback.format_exc(limit=1)})
                if not done.finished:
                    failed.append(done)
                bar.update()
                left = (time.monotonic() - start) / max(1, count - before) * len(waiting) / 60
                bar.write(
                    f"[{count}/{total}] {folder.name}: {_outcome(done)}; about {left:.0f} min left", file=sys.stdout
                )
                sys.stdout.flush()
            bar.set_postfix_str("; ".join(_progress(folders[future]) for future in waiting if future.running()))
    return failed


@contextlib.contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end when this one is interrupted, and soon after it has died; their kernels end with them."""
    pool = ProcessPoolExecutor(max_workers=jobs, initializer=_end_with, initargs=(os.getpid(),))
    try:
        yield pool
    except BaseException:
        for worker in multiprocessing.active_children():
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with(parent: int) -> None:
    """Let this process end when its parent has; an interrupt of the terminal is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _progress(folder: Path) -> str:
    """Which run, and how far it is."""
    with contextlib.suppress(OSError):
        return f"{folder.name} {(folder / 'progress').read_text()}"
    return f"{folder.name} starting"


def _outcome(done: Run) -> str:
    if not done.finished:
        return f"FAILED ({done.manifest.get('exit')})"
    results = done.manifest.get("results", {})
    shown = ", ".join(f"{key} {value:.3g}" for key, value in list(results.items())[:3])
    return f"finished in {done.manifest.get('seconds', 0):.0f} s ({shown})"
