"""A process of its own that compares mathematics, which cannot be trusted to end.

What a policy writes can keep a grader busy for ever (``9^{9^{9^9}}``), signals reach main threads only, and nothing
within a process interrupts a long product; so the operating system ends that process once an answer has taken
:data:`SECONDS` of processor time, in threads and in workers as well. It is processor time so that a busy machine
changes no grade.
"""

import atexit
import contextlib
import itertools
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

SECONDS = 1.2
"""Processor time that one answer may take."""

MEMORY = 8 * 2**30  # bytes of address space: a power tower asks for all there is before its time is over
READY = "ready\n"
SERVE = "from gcpo.mathematics import serve; serve()"  # code that the process runs


class GraderProcess:
    """A process that answers questions: started when first asked, and again after it was ended.

    Sets have the same order in every such process. Questions and answers are numbered, because a process that is
    ended between two questions also reports this.
    """

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.lock = threading.Lock()
        self.process: Any = None  # a subprocess.Popen while one is there
        self.owner = 0
        atexit.register(self.close)

    def ask(self, *question: Any) -> Any:
        """Return the answer, None after a time-out; raises ``RuntimeError`` if the process cannot start."""
        with self.lock:
            try:
                if self.process is None or self.process.poll() is not None or self.owner != os.getpid():
                    self._start()
                process, number = self.process, next(self.numbers)
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(json.dumps([number, *question]) + "\n")
                    process.stdin.flush()
                while line := process.stdout.readline():
                    answered, answer = json.loads(line)
                    if answered == number:
                        return answer
            except BaseException:  # such as a signal's, which leaves half a question or an answer that nobody reads
                self.close()
                raise
            self.close()
            return None

    def _start(self) -> None:
        command = [sys.executable, "-c", SERVE]
        path = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        pipe = subprocess.PIPE
        with tempfile.TemporaryFile("w+", errors="replace") as errors:  # a pipe may fill before anybody reads it
            self.owner = os.getpid()
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, env=environment, text=True)
            while (line := self.process.stdout.readline()) != READY:  # drop what imports print
                if not line:
                    errors.seek(0)
                    reason = (errors.read().splitlines() or ["it does not say why"])[-1]
                    way = 'If a package is missing: pip install "gcpo[trl]"'
                    raise RuntimeError(f"The process that compares mathematics cannot start: {reason}. {way}")

    def close(self) -> None:
        """End the process: when this one ends, or what it would say next is not known."""
        process, self.process = self.process, None
        if process is not None and self.owner == os.getpid():
            process.kill()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # half a question that nobody reads any more
                    pipe.close()
            process.wait()


def serve(answers: dict[str, Callable[..., Any]]) -> None:
    """Answer questions, a JSON list per line of standard input, until there are no more; None where that fails.

    The first entry of a question says which of ``answers`` takes the others. What that prints is lost.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    print(READY, end="", flush=True)
    asked = mmap.mmap(-1, 8)  # the number of the question that was read last: it outlives the child that read it
    while hasattr(os, "fork") and (child := os.fork()):  # a child answers; where it was ended the next one goes on
        if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            return
        print(f"[{int.from_bytes(asked[:])}, null]", flush=True)
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        number, kind, *question = json.loads(line)
        asked[:] = number.to_bytes(8)
        found = "null"
        with contextlib.suppress(Exception):  # a grader may fail in any way on a completion
            _limit_time(SECONDS)
            found = json.dumps(answers[kind](*question))
        _limit_time(0)
        print(f"[{number}, {found}]", file=replies, flush=True)


def limit_memory() -> None:
    """Let this process have no more than :data:`MEMORY`, and leave no core dump."""
    with contextlib.suppress(ImportError):  # a system without it has no limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(seconds: float) -> None:
    """End this process after so many more seconds of processor time; 0 lifts the limit."""
    if hasattr(signal, "setitimer"):  # a system without it has no limit
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default action ends the process, whatever it is doing
        signal.setitimer(signal.ITIMER_PROF, seconds)
