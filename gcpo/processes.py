"""Processes that do not outlive the one that started them, and that end when they are asked to."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator


def exit_with_parent(parent: int) -> None:
    """End this process soon after its parent (a process id), however the parent ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def ends_by_sigterm() -> Iterator[None]:
    """A SIGTERM ends this process as an interrupt would, with everything that it has started; for the main thread."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
