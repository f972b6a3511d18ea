"""Processes that do not outlive the one that started them."""

from __future__ import annotations

import os
import threading
import time


def exit_with_parent(parent: int) -> None:
    """End this process soon after its parent (a process id), however the parent ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
