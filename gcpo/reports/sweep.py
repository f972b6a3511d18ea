"""The sweep: which learning rate and batch size plain GRPO learns best with, on the validation split (spec of the rule:
the best sampled score among rates at which greedy does not fall; among batch sizes, the most told per hour)."""

from __future__ import annotations

from math import nan, sqrt
from typing import Any

import pandas as pd

from gcpo.reports import records
from gcpo.runs.record import RecordError
from gcpo.statistics import DETECTABLE
from gcpo.tasks import get_task

AXES = ["task", "prompts_per_step", "learning_rate"]


def summary(runs: pd.DataFrame, base: str = "grpo") -> pd.DataFrame:
    """Return the score of each setting of a sweep on the validation split, a row per task, batch size and rate.

    Args:
        runs: of the sweep, as :func:`gcpo.records.find` gives them; what is not trained, or not ``base``, is left out.
        base: the method that is swept.

    Returns:
        task, prompts_per_step, learning_rate, metric, seeds, sampled and greedy (means over seeds at the last step, per
        cent) with sampled_std and greedy_std (n - 1), start_sampled and start_greedy (at step 0), fell (whether greedy
        ends below its start), hours (of a run), and mde_hour (points): the difference of two methods that is detected
        with 80 % power if each gets an hour of runs, DETECTABLE sqrt(2) sampled_std sqrt(hours); NaN where all seeds
        have one score, which is chance and no spread of 0. Hours are the least that a run of the task and batch size
        took, at any rate, as :func:`taken` counts: the steps are the same at each, and other
        work on the machine only adds to them.

    Raises:
        RecordError: a task with one rate, or runs without validation scores.
    """
    runs = runs[(runs["kind"] == "train") & (runs["method"] == base) & (runs["max_steps"] > 0)]
    for task in runs["task"].unique():
        rates = sorted(runs.loc[runs["task"] == task, "learning_rate"].unique())
        if len(rates) < 2:
            raise RecordError(
                f"The sweep has one learning rate on {task} ({rates[0]:g}): nothing can be chosen among one. Give "
                "several in the grid's learning_rate, and run it: python -m gcpo grid sweep --profile NAME"
            )
    scores = records.gather(runs, "validation", [*AXES, "seed", "max_steps"], optional=True)
    if scores.empty:
        raise RecordError("No run of the sweep has validation scores: run it with validation_limit above 0")
    least: dict[Any, float] = (taken(runs) / 3600).groupby([runs[axis] for axis in AXES[:2]]).min().to_dict()
    rows = []
    for (task, prompts, rate), part in scores.groupby(AXES, sort=False):
        metric = get_task(str(task)).reward_metric
        row = {"task": task, "prompts_per_step": prompts, "learning_rate": rate, "metric": metric}
        means = 100 * part.groupby(["decoding", "step", "seed"])[metric].mean()
        rows.append(row | _learned(means, int(part["max_steps"].iloc[0]), least[task, prompts]))
    return pd.DataFrame(rows).sort_values(AXES, ignore_index=True)


def _learned(means: pd.Series, last: int, hours: float) -> dict[str, Any]:
    """Return the columns of :func:`summary` that say what one setting reached, from scores by decoding, step and seed
    (per cent), its last step and the hours of a run."""
    row: dict[str, Any] = {"seeds": len(means["sampled", last])}
    for decoding in ("sampled", "greedy"):
        row |= {decoding: means[decoding, last].mean(), f"{decoding}_std": means[decoding, last].std()}
        row[f"start_{decoding}"] = means[decoding, 0].mean()
    detectable = DETECTABLE * sqrt(2) * (row["sampled_std"] or nan) * sqrt(hours)
    return row | {"fell": row["greedy"] < row["start_greedy"], "hours": hours, "mde_hour": detectable}


def taken(runs: pd.DataFrame) -> pd.Series:
    """Seconds that each run took of its machine: of the processor where there is no GPU, as other work beside a run
    keeps it waiting for up to three times as long; by the clock where there is one."""
    alone = runs["hardware"].map(lambda machine: not (machine or {}).get("gpus")).astype(bool)
    return runs["cpu_seconds"].where(alone, runs["seconds"])


def choice(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rule's choice from a :func:`summary`, a row per task: its batch size and rate, and how it was reached.

    Per batch size the rate with the best sampled score among those at which greedy does not fall; among batch sizes
    the one that detects the smallest known difference per hour. A setting with fewer seeds than most have is not
    picked: one lucky seed would be. ``inside`` says whether a lower and a higher rate were swept. A task on which
    greedy falls at every rate has no row.
    """
    most = table.groupby("task")["seeds"].transform(lambda seeds: seeds.mode().max())
    standing = table[~table["fell"].astype(bool) & (table["seeds"] >= most)]
    best = standing.loc[standing.groupby(["task", "prompts_per_step"])["sampled"].idxmax()]
    picked = best.sort_values("mde_hour", kind="stable").groupby("task").head(1).sort_values("task")
    ends = table.groupby("task")["learning_rate"].agg(["min", "max"]).loc[picked["task"]].to_numpy()
    rate = picked["learning_rate"].to_numpy()
    return (
        picked[[*AXES, "seeds", "sampled", "sampled_std", "hours", "mde_hour"]]
        .assign(inside=(ends[:, 0] < rate) & (rate < ends[:, 1]))
        .reset_index(drop=True)
    )


def common(table: pd.DataFrame) -> pd.DataFrame:
    """Return the choice by :func:`choice`'s rule for all tasks of a :func:`summary` together: one row, task "all".

    Scores and the detectable difference are means over tasks; greedy may fall on none of them. Settings that were not
    swept on every task do not count. No row where greedy falls at each.
    """
    settings = table.groupby(AXES[1:], as_index=False)
    pooled = settings.agg(
        tasks=("task", "nunique"),
        fell=("fell", "any"),
        seeds=("seeds", "min"),
        **{name: (name, "mean") for name in ("sampled", "sampled_std", "hours")},
        mde_hour=("mde_hour", lambda per_task: per_task.mean(skipna=False)),
    )
    return choice(pooled[pooled["tasks"] == table["task"].nunique()].assign(task="all"))


SETTING = ["prompts_per_step", "max_steps", "learning_rate"]


def settings(runs: pd.DataFrame) -> pd.DataFrame:
    """Return what plain GRPO learns at each setting of the grid ``operating_point``, a row per task, world and setting.

    Args:
        runs: of both worlds, as :func:`gcpo.records.find` gives them.

    Returns:
        task, world_seed, prompts_per_step, max_steps, learning_rate, the columns of :func:`summary` from seeds on, and
        last_quarter: how much of the sampled score came in the last quarter of the steps, in points.
    """
    keys = ["task", "world_seed", *SETTING]
    scores = records.gather(runs, "validation", [*keys, "seed"])
    hours: dict[Any, float] = (taken(runs) / 3600).groupby([runs[key] for key in keys]).mean().to_dict()
    rows = []
    for names, part in scores.groupby(keys):
        means = 100 * part.groupby(["decoding", "step", "seed"])[get_task(str(names[0])).reward_metric].mean()
        before, last = sorted(part["step"].unique())[-2:]
        late = (means["sampled", last] - means["sampled", before]).mean()
        row = dict(zip(keys, names, strict=True)) | _learned(means, last, hours[names])
        rows.append(row | {"last_quarter": late})
    return pd.DataFrame(rows)


def operating_point(table: pd.DataFrame) -> pd.DataFrame:
    """Apply PROTOCOL.md's rule to :func:`settings`: return what it keeps at each of its three stages, the choice last.

    Returns:
        stage (1 to 3), the setting, sampled, last_quarter (the larger one of the tasks) and mde_hour, means over tasks
        and worlds. The first stage has the best rate of each number of prompts and steps, the second the number of
        steps of each number of prompts, the third one row.
    """
    places = table.groupby(["task", "world_seed"]).ngroups
    pooled = table.groupby(SETTING, as_index=False).agg(
        places=("task", "size"), fell=("fell", "any"), sampled=("sampled", "mean"), mde_hour=("mde_hour", "mean")
    )
    late = table.groupby([*SETTING, "task"])["last_quarter"].mean().groupby(level=SETTING).max()
    pooled = pooled.join(late, on=SETTING)
    pooled = pooled.loc[~pooled["fell"].astype(bool) & (pooled["places"] == places)]
    rates = pooled.loc[pooled.groupby(SETTING[:2])["sampled"].idxmax()]
    each = [own for _, own in rates.groupby(SETTING[0])]  # by number of steps, the smallest first
    steps = pd.concat([pd.concat([own[own["last_quarter"] < 1], own.tail(1)]).head(1) for own in each])
    stages = (rates, steps, steps.sort_values("mde_hour", kind="stable").head(1))
    kept = [rows.assign(stage=number) for number, rows in enumerate(stages, start=1)]
    return pd.concat(kept, ignore_index=True)[["stage", *SETTING, "sampled", "last_quarter", "mde_hour"]]
