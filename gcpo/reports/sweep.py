"""The sweep: which learning rate, batch size and number of steps plain GRPO learns best with, on the validation split.

One rule chooses (:func:`choice`), for the laptop profile and, as PROTOCOL.md has it, for both worlds together.
"""

from collections.abc import Sequence
from math import nan, sqrt
from typing import Any

import pandas as pd

from gcpo.reports import records
from gcpo.statistics import DETECTABLE
from gcpo.tasks import get_task

AXES = ["task", "prompts_per_step", "learning_rate"]
STEPS = ["task", "world_seed", "prompts_per_step", "max_steps", "learning_rate"]  # of a sweep of the steps as well


def summary(runs: pd.DataFrame, axes: Sequence[str] = AXES) -> pd.DataFrame:
    """Return what GRPO's runs of a sweep score on the validation split, a row per setting.

    Args:
        runs: of the sweep, as :func:`gcpo.records.find` gives them; what is not trained, or not GRPO, is left out.
        axes: what tells the settings apart, the learning rate last.

    Returns:
        the axes, metric, seeds, sampled and greedy (means over seeds at the last step, per cent) with sampled_std and
        greedy_std (n - 1), start_sampled and start_greedy (at step 0), fell (whether greedy ends below its start),
        hours (of a run), mde_hour (points): the difference of two methods that is detected with 80 % power if each gets
        an hour of runs, DETECTABLE sqrt(2) sampled_std sqrt(hours); NaN where all seeds have one score, which is chance
        and no spread of 0; and, with :data:`STEPS`, late: how much of the sampled score came since the validation
        before the last, in points. Hours are the least that a run took at any rate (:func:`taken`): the steps are the
        same at each, and other work on the machine only adds to them.
    """
    runs = runs[(runs["kind"] == "train") & (runs["method"] == "grpo") & (runs["max_steps"] > 0)]
    least: dict[Any, float] = (taken(runs) / 3600).groupby([runs[axis] for axis in axes[:-1]]).min().to_dict()
    rows = []
    for names, part in records.gather(runs, "validation", [*axes, "seed"]).groupby([*axes]):
        metric, hours = get_task(str(names[0])).reward_metric, least[names[:-1]]
        row: dict[str, Any] = dict(zip(axes, names, strict=True)) | {"metric": metric, "seeds": part["seed"].nunique()}
        means = 100 * part.groupby(["decoding", "step", "seed"])[metric].mean()
        *_, before, last = sorted(part["step"].unique())
        for how in ("sampled", "greedy"):
            end = means[how, last]
            row |= {how: end.mean(), f"{how}_std": end.std(), f"start_{how}": means[how, 0].mean()}
        detectable = DETECTABLE * sqrt(2) * (row["sampled_std"] or nan) * sqrt(hours)
        row |= {"fell": row["greedy"] < row["start_greedy"], "hours": hours, "mde_hour": detectable}
        if "max_steps" in axes:
            row["late"] = (means["sampled", last] - means["sampled", before]).mean()
        rows.append(row)
    return pd.DataFrame(rows)


def taken(runs: pd.DataFrame) -> pd.Series:
    """Seconds that each run took of its machine: of the processor where there is no GPU, as other work beside a run
    keeps it waiting for up to three times as long; by the clock where there is one."""
    alone = runs["hardware"].map(lambda machine: not (machine or {}).get("gpus")).astype(bool)
    return runs["cpu_seconds"].where(alone, runs["seconds"])


def choice(table: pd.DataFrame, over: Sequence[str] = ()) -> pd.DataFrame:
    """Return the rule's choice from a :func:`summary`: a row per task, or one for all of ``over`` together.

    Of each number of prompts and steps the rate with the best sampled score, among those at which greedy does not fall;
    of each number of prompts the fewest steps that gained less than a point of late, or else the most; of these what
    detects the smallest difference per hour. No row where greedy falls at every rate.

    Args:
        table: where the steps were not swept, without max_steps and late.
        over: task, or task and world_seed: scores and the detectable difference are means over these, greedy may fall
            at none of them, late is that of the task which gained most, and what was not swept at each does not count.

    Returns:
        task ("all" of several), the setting, seeds, sampled, sampled_std, hours, mde_hour, and inside: whether a lower
        and a higher rate were swept. What has fewer seeds than most settings is not chosen: one lucky seed would be.
    """
    setting = ["prompts_per_step", *(["max_steps"] if "max_steps" in table else []), "learning_rate"]
    table = table.assign(late=table.get("late", 0.0))
    if over:
        table = _pooled(table, setting, over)
    rates = table.groupby("task")["learning_rate"].transform
    table["inside"] = (rates("min") < table["learning_rate"]) & (table["learning_rate"] < rates("max"))
    most = table.groupby("task")["seeds"].transform(lambda seeds: seeds.mode().max())
    standing = table[~table["fell"].astype(bool) & (table["seeds"] >= most)]
    best = standing.loc[standing.groupby(["task", *setting[:-1]])["sampled"].idxmax()]
    last = ~best.duplicated(["task", "prompts_per_step"], keep="last")
    enough = best[(best["late"] < 1) | last].groupby(["task", "prompts_per_step"]).head(1)
    picked = enough.sort_values("mde_hour", kind="stable").groupby("task").head(1).sort_values("task")
    columns = ["task", *setting, "seeds", "sampled", "sampled_std", "hours", "mde_hour", "inside"]
    return picked[columns].reset_index(drop=True)


def _pooled(table: pd.DataFrame, setting: Sequence[str], over: Sequence[str]) -> pd.DataFrame:
    """Return the means over some columns of every setting that was swept at each of their values."""
    places, columns = table.groupby([*setting]), ["sampled", "sampled_std", "hours"]
    means = places.agg({"fell": "any", "seeds": "min"} | dict.fromkeys(columns, "mean"))
    means["mde_hour"] = places["mde_hour"].agg(lambda each: each.mean(skipna=False))
    means["late"] = table.groupby([*setting, "task"])["late"].mean().groupby(level=[*setting]).max()
    return means[places.size() == table.groupby([*over]).ngroups].assign(task="all").reset_index()
