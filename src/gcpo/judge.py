"""A process of its own for what cannot be trusted to end.

What a policy writes can keep a grader busy for ever (``9^{9^{9^9}}``), signals reach main threads only, and nothing
within a process interrupts a long product; so the operating system ends that process once an answer has taken
:data:`SECONDS` of processor time, in threads and in workers as well. It is processor time so that a busy machine
changes no grade.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

SECONDS = 1.2
"""How much processor time one answer may take."""

MEMORY = 8 * 2**30  # bytes of address space: a power tower asks for all there is before its time is over


class Judge:
    """A process that answers questions: started when first asked, and again after it was ended.

    ``module`` is the one whose function ``serve`` runs there. Sets have the same order in every such process.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None
        self.owner = 0
        atexit.register(self.close)

    def ask(self, *question: Any) -> Any:
        """What it answers; None where it took too long."""
        with self.lock:
            if self.process is None or self.process.poll() is not None or self.owner != os.getpid():
                self._start()
            process = self.process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = ""
            if not line:
                process.wait()
                self.process = None
                return None
            return json.loads(line)

    def _start(self) -> None:
        command = [sys.executable, "-c", f"from {self.module} import serve; serve()"]
        path = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, text=True, env=environment, **pipes)  # type: ignore[call-overload]
        self.owner = os.getpid()

    def close(self) -> None:
        """End the process, when this one ends."""
        if self.process is not None and self.owner == os.getpid():
            self.process.kill()
            self.process.communicate()


def serve(answers: Mapping[str, Callable[..., Any]], prepare: Callable[..., None] | None = None) -> None:
    """Answer questions, a JSON list per line of standard input, until there are no more; None where that fails.

    The first entry of a question says which of ``answers`` takes the others. ``prepare`` gets all of them first, and as
    much time as it takes: for work that no model's answer has a part in. What either prints is lost.
    """
    while hasattr(os, "fork") and (child := os.fork()):  # a child answers; where it was ended the next one goes on
        if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            return
        print("null", flush=True)
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        kind, *question = json.loads(line)
        found = "null"
        with contextlib.suppress(Exception):  # of whatever a grader makes of what a model wrote
            if prepare:
                prepare(kind, *question)
            _limit_time(SECONDS)
            found = json.dumps(answers[kind](*question))
        _limit_time(0)
        print(found, file=replies, flush=True)


def limit_memory() -> None:
    """Let this process have no more than :data:`MEMORY`, and leave no core dump."""
    with contextlib.suppress(ImportError):  # a system without it has no limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(seconds: float) -> None:
    """End this process when it has taken so much processor time from now on; 0: not any more."""
    if hasattr(signal, "setitimer"):  # a system without it has no limit
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process, whatever it is doing
        signal.setitimer(signal.ITIMER_PROF, seconds)
