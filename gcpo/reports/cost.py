"""What a method's training costs beside GRPO's, from the processor time of finished runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from gcpo.reports import claims, compare

NOTICED = 5.0  # per cent more than GRPO that we call noticeable
TOGETHER = 2 * 3600  # seconds at most between the starts of two runs whose times are compared
DISTURBED = 1.3  # times its processor time that a run of one thread has taken if other work kept it waiting


def taken(runs: pd.DataFrame) -> pd.Series:
    """Seconds that each run took of its machine: of the processor where there is no GPU, as other work beside a run
    keeps it waiting for up to three times as long; by the clock where there is one."""
    alone = runs["hardware"].map(lambda machine: not (machine or {}).get("gpus")).astype(bool)
    return runs["cpu_seconds"].where(alone, runs["seconds"])


def overhead(runs: pd.DataFrame, label: str, base: str = "grpo") -> compare.Comparison:
    """Processor time of a label's training beside that of the base's run of the same seed on the same hardware.

    The logarithm of their ratio, evaluation left out; over all such pairs of runs (:func:`side_by_side`), uncorrected.

    Args:
        runs: training runs of one task, as ``records.find`` gives them.
        label: whose training.
        base: beside whose.
    """
    runs = side_by_side(runs, base)
    training = runs["cpu_seconds"] * (1 - runs["seconds_evaluate"] / runs["seconds"])
    figures = runs[["label", "alike"]].assign(value=np.log(training))
    return compare.by_seed(figures, [(label, base)], "ln of processor time", "alike")[label, base]


def side_by_side(runs: pd.DataFrame, base: str = "grpo") -> pd.DataFrame:
    """The runs whose time can be compared with a run of the base: ``alike`` says of each which.

    Machines that go by one name differ by a third, so only runs that were started within :data:`TOGETHER` are a pair;
    and processor time grows too when work beside a run takes its caches, so a run that took :data:`DISTURBED` times its
    own is in no pair.
    """
    runs = runs[runs["seconds"] < DISTURBED * runs["cpu_seconds"]]
    said = [f"{hardware} seed {seed}" for hardware, seed in zip(runs["hardware"], runs["seed"], strict=True)]
    runs = runs.assign(alike=pd.Series(said, runs.index, dtype=object))
    started = pd.to_datetime(runs["started"], utc=True).dt.as_unit("s").astype("int64")
    of_base = started[runs["label"] == base].groupby(runs["alike"]).first()
    return runs[(started - runs["alike"].map(of_base)).abs() <= TOGETHER]


def summary(runs: pd.DataFrame, names: Mapping[str, str], base: str = "grpo") -> pd.DataFrame:
    """What a run of each label takes, and its training beside the base's, a row per task and label of ``names``.

    Args:
        runs: training runs, as for :func:`overhead`, of any tasks.
        names: label -> how the table calls it, in order.
        base: beside whose.

    Returns:
        task, method, runs, least seconds (:func:`taken`; other work beside a run only adds to it), times the base's
        [95 %] and pairs (:func:`overhead`: of pairs made side by side), peak memory, GB.
    """
    rows = []
    for task, of_task in runs.groupby("task", sort=False):
        for label in (label for label in names if label in set(of_task["label"])):
            own, found = of_task[of_task["label"] == label], overhead(of_task, label, base)
            ratio = "{:.2f} [{:.2f}, {:.2f}]".format(*np.exp(found.interval)) if found.tested else ""
            took = {"runs": len(own), "least seconds": taken(own).min(), f"times {names[base]}'s [95 %]": ratio}
            pairs = {"pairs": found.seeds if label != base else ""}
            peak = {"peak memory, GB": own["peak_memory_gb"].max()}
            rows.append({"task": task, "method": names[label], **took, **pairs, **peak})
    return pd.DataFrame(rows)


def by_phase(runs: pd.DataFrame, label: str, base: str = "grpo") -> pd.DataFrame:
    """Seconds of each phase of the base's training, and how many more a label's has, of the pairs of :func:`overhead`.

    Args:
        runs: as there.
        label: whose seconds.
        base: beside whose.

    Returns:
        phase, seconds (the base's mean), more with low and high (95 %, Student's over pairs), a row for each phase; no
        rows without two pairs.
    """
    runs = side_by_side(runs, base)
    runs = runs[runs["label"].isin([label, base])]
    runs = runs[runs.groupby("alike")["label"].transform("nunique") == 2]
    of_base, rows = runs[runs["label"] == base], []
    for column in runs.filter(like="seconds_").columns.drop("seconds_evaluate", errors="ignore"):
        figures = runs[["label", "alike"]].assign(value=runs[column])
        more = compare.by_seed(figures, [(label, base)], "seconds", "alike")[label, base]
        if more.tested:
            rows.append((column.removeprefix("seconds_"), of_base[column].mean(), *more.interval))
    return pd.DataFrame(rows, columns=["phase", "seconds", "more", "low", "high"])


def noticeable(runs: pd.DataFrame, label: str, command: str, base: str = "grpo") -> claims.Verdict:
    """Whether a label's training takes less than :data:`NOTICED` per cent more processor time than the base's."""
    found = overhead(runs, label, base)
    if not found.tested:
        said = f"Fewer than two seeds have undisturbed runs of {label} and {base} on the same hardware, two hours apart"
        return claims.Verdict(claims.UNTESTED, f"{said} at most ({found.compared}). First, side by side: {command}.")
    both = set(runs.loc[runs["label"] == label, "seed"]) & set(runs.loc[runs["label"] == base, "seed"])
    pairs = f"{found.seeds} of {len(both)} seeds have a pair of undisturbed runs"
    more, low, high = (100 * (np.exp(end) - 1) for end in found.interval)
    said = f"{more:.1f} [{low:.1f}, {high:.1f}] % more processor time ({pairs})"
    phases = by_phase(runs, label, base).set_index("phase")["more"]
    if "measure" in phases:
        said += f"; measuring alone takes {phases['measure']:.0f} s more per run"
    return claims.Verdict(claims.word(NOTICED - high, NOTICED - low), f"{said}.")
