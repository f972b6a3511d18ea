"""Where a run's time goes: seconds by phase, so that what one run cost can be compared with another's."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch

# Methods of the trainer, and the phase whose time they take; what is left of training is "optimise".
TRAINER = {
    "_generate": "generate",
    "_calculate_rewards": "score",
    "_generate_and_score_completions": "measure",
    "_compute_loss": "loss",
}


class Clock:
    """Seconds spent in each phase; a phase within another counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside: list[float] = []  # of each phase that is open: seconds of phases within it

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time until the end of the block for a phase."""
        start = _now()
        self._inside.append(0.0)
        try:
            yield
        finally:
            took = _now() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + took - self._inside.pop()
            if self._inside:
                self._inside[-1] += took

    def watch(self, trainer: Any) -> None:
        """Count every call of the methods in :data:`TRAINER` of this trainer."""
        for method, name in TRAINER.items():
            setattr(trainer, method, self._timed(getattr(trainer, method), name))

    def _timed(self, method: Any, name: str) -> Any:
        @functools.wraps(method)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            with self.phase(name):
                return method(*arguments, **keywords)

        return timed


def _now() -> float:
    if torch.cuda.is_available():  # whose work goes on after a call has returned
        torch.cuda.synchronize()
    return time.perf_counter()
