"""What a method's training costs beside GRPO's, from the processor time of finished runs."""

from __future__ import annotations

import numpy as np
import pandas as pd

from gcpo.reports import claims, compare

NOTICED = 5.0  # per cent more than GRPO that we call noticeable
TOGETHER = 2 * 3600  # seconds at most between the starts of two runs whose times are compared
DISTURBED = 1.3  # times its processor time that a run of one thread has taken if other work kept it waiting


def overhead(runs: pd.DataFrame, label: str, base: str = "grpo") -> compare.Comparison:
    """Processor time of a label's training beside that of the base's run of the same seed on the same hardware.

    The logarithm of their ratio, evaluation left out; over all such pairs of runs, uncorrected. Machines that go by one
    name differ by a third, so only runs that were started within :data:`TOGETHER` are a pair; and processor time grows
    too when work beside a run takes its caches, so a run that took :data:`DISTURBED` times its own is in no pair.

    Args:
        runs: training runs of one task, as ``records.find`` gives them.
        label: whose training.
        base: beside whose.
    """
    runs = runs[runs["seconds"] < DISTURBED * runs["cpu_seconds"]]
    training = runs["cpu_seconds"] * (1 - runs["seconds_evaluate"] / runs["seconds"])
    said = [f"{hardware} seed {seed}" for hardware, seed in zip(runs["hardware"], runs["seed"], strict=True)]
    alike = pd.Series(said, runs.index, dtype=object)
    figures = pd.DataFrame({"label": runs["label"], "value": np.log(training), "alike": alike})
    started = pd.to_datetime(runs["started"], utc=True).dt.as_unit("s").astype("int64")
    of_base = started[runs["label"] == base].groupby(alike).first()
    figures = figures[(started - alike.map(of_base)).abs() <= TOGETHER]
    return compare.by_seed(figures, [(label, base)], "ln of processor time", "alike")[label, base]


def noticeable(runs: pd.DataFrame, label: str, command: str, base: str = "grpo") -> claims.Verdict:
    """Whether a label's training takes less than :data:`NOTICED` per cent more processor time than the base's."""
    found = overhead(runs, label, base)
    if not found.tested:
        said = f"Fewer than two seeds have undisturbed runs of {label} and {base} on the same hardware, two hours apart"
        return claims.Verdict(claims.UNTESTED, f"{said} at most ({found.compared}). First, side by side: {command}.")
    more, low, high = (100 * (np.exp(end) - 1) for end in found.interval)
    said = f"{more:.1f} [{low:.1f}, {high:.1f}] % more processor time ({found.compared})"
    measuring = runs.groupby("label")["seconds_measure"].mean()
    said += f"; measuring takes {measuring[label] - measuring[base]:.0f} s of a run more."
    return claims.Verdict(claims.word(NOTICED - high, NOTICED - low), said)
