"""The papers' own tables as their sentences are held against them: gains, means and margins, computed again."""

from __future__ import annotations

from functools import cache
from math import nan
from typing import Any

import pandas as pd

from gcpo.reports.tables import reported

UNITS = 1  # of the last printed digit, within which two numbers are the same
BY = {"index": "method", "columns": ["task", "metric"]}
OTHERS, GCPO = ["se", "kle", "empo", "care"], ["gcpo_cd", "gcpo_bot"]
FIVE = ["aime24", "amc", "math500", "minerva", "olympiadbench"]
THREE = ["math500", "minerva", "gsm8k"]
QUESTIONS = pd.Series({"math500": 500, "aime24": 30, "minerva": 272, "gsm8k": 1319})
SIZES = {"DeepSeek-R1-Distill-Qwen-1.5B": "1.5B", "Qwen2.5-Math-7B-Instruct": "7B"}
LINEAR = "SEED-GRPO 7B (Linear, α=0.02"
# Margins of EGPO over the strongest baseline, as its App. A.3 prints them: 19 of 20.
MARGINS = pd.DataFrame(
    {
        "Qwen2.5-Math-1.5B": [2.00, nan, 1.91, 3.31, 5.15],
        "Qwen2.5-Math-7B": [3.10, 2.91, 3.01, 3.31, 3.41],
        "DeepSeek-R1-Distill-Qwen-1.5B": [3.35, 6.66, 4.19, 2.57, 2.13],
        "DeepSeek-R1-Distill-Qwen-7B": [2.00, 6.67, 4.77, 2.58, 2.13],
    },
    ["math500", "aime24", "mmlu_stem", "minerva", "gsm8k"],
).T


def agrees(stated: Any, computed: Any, digits: int) -> Any:
    """Return whether a number with so many decimals is the computed one but for rounding; elementwise for tables."""
    return abs(stated - computed) <= UNITS * 10.0**-digits + 1e-9


def rows(name: str, **where: str) -> pd.DataFrame:
    """Return the rows of a paper's table that have these values."""
    table = reported(name)
    for column, value in where.items():
        table = table[table[column] == value]
    return table


# --- GCPO -------------------------------------------------------------------------------------------------------------


@cache
def gcpo_table1(values: str = "value") -> pd.DataFrame:
    """Return the scores of GCPO's Table 1 in per cent, or their deviations: a row per method."""
    return rows("gcpo_table1", unit="percent").pivot(**BY, values=values)


def gcpo_gains() -> pd.DataFrame:
    """Return the relative gains over GRPO of every other method of GCPO's Table 1, in per cent."""
    scores = gcpo_table1()
    return 100 * (scores.loc[OTHERS + GCPO] / scores.loc["grpo"] - 1)


def gcpo_tens() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the gains that section 4.2 states, and the mean gains over a data set's columns; EMPO apart."""
    computed = gcpo_gains().T.groupby(level="task", sort=False).mean().T.drop("empo")
    return pd.DataFrame({"narrativeqa": 10, "qasper": 20, "hotpotqa": 20}, index=computed.index), computed


def gcpo_table2() -> pd.DataFrame:
    """Return the scores of GCPO's Table 2 by printed label."""
    return reported("gcpo_table2").pivot(index="label", columns="task", values="value")


def copied_rows() -> list[tuple[str, str]]:
    """Return rows of GCPO's Table 2 that are, in all columns, rows of SEED-GRPO's Table 2 for Qwen2.5-Math-1.5B."""
    here, there = gcpo_table2(), rows("seed_grpo_table2", model="Qwen2.5-Math-1.5B")
    there = there.pivot(index="label", columns="task", values="value")[here.columns]
    return [(a, b) for a in here.index for b in there.index if (here.loc[a] == there.loc[b]).all()]


# --- SEED-GRPO --------------------------------------------------------------------------------------------------------


@cache
def seed_averages() -> pd.DataFrame:
    """Return every row of SEED-GRPO's Tables 2 and 4 that prints five scores, with the mean of the five."""
    names = ["2", "4a", "4b", "4c", "4d", "4e"]
    table = pd.concat({n: reported(f"seed_grpo_table{n}") for n in names}, names=["table"])
    table = table[table["metric"] == "accuracy"].reset_index("table").fillna({"model": ""})
    table = table.pivot(index=["table", "label", "model"], columns="task", values="value").dropna()
    return table.assign(**{"mean of five": table[FIVE].mean(axis=1)})


def seed_row(label: str) -> Any:
    """Return a row of SEED-GRPO's Table 2."""
    return seed_averages().loc["2"].droplevel("model").loc[label]


def seed_gains() -> pd.DataFrame:
    """Return the four gains that SEED-GRPO's section 4 states, and what Table 2 gives."""
    dr, best, wide = (seed_row(label) for label in ("Dr.GRPO 7B", f"{LINEAR})", f"{LINEAR}, G=16)"))
    over, more = best - dr, wide - best
    computed = {
        "13.4 % on AIME24": (13.4, 100 * over["aime24"] / dr["aime24"]),
        "+5.2": (5.2, over["average"]),
        "+1.6, G = 16": (1.6, more["average"]),
        "+10, G = 16": (10, more["aime24"]),
    }
    return pd.DataFrame(computed, ["stated", "computed"]).T


def seed_table3() -> pd.DataFrame:
    """Return SEED-GRPO's Table 3, a row per run, with the number of prompts that it took."""
    table = reported("seed_grpo_table3")
    what = table["task"].where(table["task"] != "", table["metric"])
    value = table["value"] * table["unit"].map({"thousands": 1000}).fillna(1)
    runs = table.assign(what=what, value=value).pivot(index=["label", "setting"], columns="what", values="value")
    return runs.reset_index("setting", drop=True).assign(prompts=lambda x: x["steps"] * x["prompt_batch_size"])


def seed_rivals() -> pd.DataFrame:
    """Return the five scores of every other 7B model of SEED-GRPO's Table 2."""
    table = reported("seed_grpo_table2")
    table = table[table["model"].str.endswith("7B") & (table["method"] != "seed_grpo")]
    return table.pivot(index="label", columns="task", values="value")[FIVE]


# --- EGPO -------------------------------------------------------------------------------------------------------------


@cache
def egpo_table1(metric: str = "accuracy") -> pd.DataFrame:
    """Return EGPO's Table 1, scores or the gains in brackets: a row per model and task, a column per method."""
    table = rows("egpo_table1", metric=metric).replace({"method": {"": "base"}})
    return table.pivot(index=["model", "task"], columns="method", values="value")


def egpo_brackets() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the gains over the base model that EGPO's Table 1 prints, and what its scores give."""
    stated, scores = egpo_table1("accuracy_gain"), egpo_table1()
    return stated, scores[stated.columns].sub(scores["base"], axis=0)


def egpo_margins() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the margins over the strongest baseline that EGPO's App. A.3 prints, and those of Table 1."""
    scores = egpo_table1()
    computed = (scores["egpo"] - scores[["grpo", "dapo", "edge_grpo"]].max(axis=1)).unstack("task")
    return MARGINS.reindex_like(computed), computed


def egpo_table2() -> pd.DataFrame:
    """Return EGPO's Table 2 with the mean of its three scores."""
    table = reported("egpo_table2").pivot(index="label", columns="task", values="value")
    return table.assign(**{"mean of three": table[THREE].mean(axis=1)})


def solved() -> Any:
    """Return how many questions each score of EGPO's Table 1 stands for, where their number is known."""
    scores: Any = egpo_table1().unstack("model").T
    return scores[QUESTIONS.index] * QUESTIONS / 100


def one_pass() -> Any:
    """Return whether a score of EGPO's Table 1 is what one pass over the questions can give, to two decimals."""
    count = solved()
    scores, whole = 100 * count / QUESTIONS, 100 * count.round() / QUESTIONS
    return whole.round(2) == scores.round(2)


# --- CW-GRPO ----------------------------------------------------------------------------------------------------------


@cache
def cw_table2(metric: str = "accuracy") -> pd.DataFrame:
    """Return CW-GRPO's own experiments of Table 2: a row per model size and method."""
    table = rows("cw_grpo_table2", metric=metric).replace({"label": {"GRPO + Gaussian Reweight (ours)": "CW-GRPO"}})
    table = table[table["model"].isin(list(SIZES))].replace({"model": SIZES})
    return table.pivot(index=["model", "label"], columns="task", values="value")


def cw_gains() -> pd.DataFrame:
    """Return the gains of averages that CW-GRPO states, over the base model and over GRPO, and those of its scores."""
    mean = cw_table2().drop(columns="average").mean(axis=1).unstack("label")
    stated = cw_table2("accuracy_gain")["average"].unstack("label").add_suffix(" over base")
    computed = mean.sub(mean["Base Model"], axis=0).add_suffix(" over base")[stated.columns]
    stated = stated.assign(**{"CW-GRPO over GRPO": [2.7, 2.4]})
    computed = computed.assign(**{"CW-GRPO over GRPO": mean["CW-GRPO"] - mean["GRPO"]})
    return pd.DataFrame({"stated": stated.stack(), "computed": computed.stack()})


# --- all gains --------------------------------------------------------------------------------------------------------


def all_gains() -> pd.DataFrame:
    """Return every gain that the papers state as a number: where, name, stated, computed, and whether the two agree."""
    deltas = rows("gcpo_table1", unit="relative percent").pivot(**BY, values="value")
    deltas = deltas.rename(columns=lambda name: str(name).removesuffix("_gain"))
    of_deltas = gcpo_gains().loc[deltas.index, deltas.columns]
    egpo = egpo_table2()[["average", "mean of three"]]
    gap = pd.DataFrame({"average over C5": egpo.loc["EGPO"] - egpo.loc["C5 (clamp renorm)"]}).T
    found: dict[str, tuple[Any, Any, int]] = {  # stated, computed, decimals; tens are compared as tens
        "GCPO: 10 % and 20 %": (*gcpo_tens(), -1),
        "GCPO: Δ rows of Table 1": (deltas, of_deltas, 2),
        "SEED-GRPO: section 4": (seed_gains()["stated"], seed_gains()["computed"], 1),
        "EGPO: brackets of Table 1": (*egpo_brackets(), 2),
        "EGPO: margins of App. A.3": (*egpo_margins(), 2),
        "EGPO: Table 2": (gap["average"], gap["mean of three"], 2),
        "CW-GRPO: averages": (cw_gains()["stated"], cw_gains()["computed"], 1),
    }
    parts = []
    for where, (stated, computed, digits) in found.items():
        pair = {"stated": stated, "computed": computed}
        flat = {k: x if x.ndim == 1 else x.stack(x.columns.names) for k, x in pair.items()}
        part = pd.DataFrame(flat).dropna().assign(where=where)
        as_tens = (part["computed"] / 10).round() * 10 == part["stated"]
        part["agrees"] = as_tens if digits < 0 else agrees(part["stated"], part["computed"], digits)
        parts.append(part.assign(name=[name if isinstance(name, str) else ", ".join(name) for name in part.index]))
    return pd.concat(parts, ignore_index=True)[["where", "name", "stated", "computed", "agrees"]]
