"""Kernels that have imported everything when they start: each is a fork of a server that has, and does nothing else.

A worker of the runner has one such server, of :mod:`multiprocessing`, which lives as long as the worker does.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
from accelerate.utils import patch_environment
from ipykernel.kernelapp import IPKernelApp

from gcpo.processes import exit_with_parent

THREADS = "OMP_NUM_THREADS"
BESIDE = "GCPO_RUNS_AT_ONCE"  # how many share this machine's memory, or a GPU's
IMPORTED = "gcpo.runs.warm"  # by the server


class WarmKernel(ForkServerProcess):
    """A forked kernel with what jupyter_client asks of a ``subprocess.Popen``."""

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


def start(command: Sequence[str], environment: Mapping[str, str], folder: str | Path) -> WarmKernel:
    """Return a kernel started by a command of Jupyter (``python -m ipykernel_launcher ...``), but warm."""
    serve()
    kernel = WarmKernel(target=_work, args=(list(command[3:]), dict(environment), str(folder)))
    kernel.start()
    return kernel


def serve() -> None:
    """Start the server of this process, unless it runs; libraries that start threads when imported start none there."""
    with patch_environment(**{THREADS: "1"}):
        multiprocessing.set_forkserver_preload([IMPORTED])
        forkserver.ensure_running()


def _work(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Be a kernel until it is shut down, or until the worker or its server has ended."""
    os.setsid()  # signals to the kernel reach what it starts
    exit_with_parent(os.getppid())
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if threads := environment.get(THREADS):
        torch.set_num_threads(int(threads.split(",")[0]))
    IPKernelApp.launch_instance(arguments, parent_handle=os.getppid())
    atexit._run_exitfuncs()  # as at the end of any program, which multiprocessing leaves out
