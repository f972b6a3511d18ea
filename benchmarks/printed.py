"""The papers' own tables as their sentences are held against them: gains, means and margins, computed again.

A check is a function that returns :data:`Found`. Its name is the id of the verdict, and its docstring the place in the
paper ("ours" where it claims nothing) and the claim. No run is needed: this is arithmetic. ``python
benchmarks/printed.py`` writes what :func:`checks` and :func:`all_gains` return into gcpo/printed, for notebook 07.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from gcpo.reports.tables import PRINTED, reported

SIMILAR = 1.2  # a size is similar or smaller if it is at most so many times the other
LEAST_CHANCE = 1e-6
BY: dict[str, Any] = {"index": "method", "columns": ["task", "metric"]}
OTHERS, GCPO = ["se", "kle", "empo", "care"], ["gcpo_cd", "gcpo_bot"]
FIVE = ["aime24", "amc", "math500", "minerva", "olympiadbench"]
THREE = ["math500", "minerva", "gsm8k"]
QUESTIONS = pd.Series({"math500": 500, "aime24": 30, "minerva": 272, "gsm8k": 1319})
SIZES = {"DeepSeek-R1-Distill-Qwen-1.5B": "1.5B", "Qwen2.5-Math-7B-Instruct": "7B"}
LINEAR = "SEED-GRPO 7B (Linear, α=0.02"
BEST, WIDE, DR = f"{LINEAR})", f"{LINEAR}, G=16)", "Dr.GRPO 7B"

# Whether the paper's tables bear out its sentence (a truth value, numpy's too; None where these contradict one
# another), and the numbers that say so, by what they are.
Found = tuple[Any, dict[Any, Any]]


def agrees(stated: Any, computed: Any, digits: int) -> Any:
    """Return whether a number is the computed one to one unit of the last of its decimals; elementwise for tables."""
    return abs(stated - computed) <= 10.0**-digits + 1e-9


def wide(name: str, index: str | list[str], columns: str | list[str], values: str = "value", **where: str) -> Any:
    """Return rows of a paper's table (:func:`gcpo.reports.tables.reported`) as a table of two axes."""
    return reported(name, **where).pivot(index=index, columns=columns, values=values)


def lead(scores: Any, own: Iterable[str], others: Iterable[str]) -> pd.Series:
    """Return, by column, by how much the best of some rows is above the best of others."""
    return scores.loc[[*own]].max() - scores.loc[[*others]].max()


# --- GCPO -------------------------------------------------------------------------------------------------------------


def gcpo_table1(values: str = "value") -> pd.DataFrame:
    """Return the scores of GCPO's Table 1 in per cent, or their deviations ("spread"): a row per method."""
    return wide("gcpo_table1", **BY, values=values, unit="percent")


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
    return wide("gcpo_table2", "label", "task")


def copied_rows() -> list[tuple[str, str]]:
    """Return rows of GCPO's Table 2 that are, in all columns, rows of SEED-GRPO's Table 2 for Qwen2.5-Math-1.5B."""
    here = gcpo_table2()
    there = wide("seed_grpo_table2", "label", "task", model="Qwen2.5-Math-1.5B")[here.columns]
    return [(a, b) for a in here.index for b in there.index if (here.loc[a] == there.loc[b]).all()]


def gcpo_4_2_uncertainty_printed() -> Found:
    """GCPO section 4.2: all uncertainty-based methods are above GRPO."""
    below = gcpo_gains().lt(0).sum(axis=1)
    return not below.any(), {"columns below GRPO, EMPO": below["empo"], "others": below.drop("empo").sum()}


def gcpo_4_2_tens_printed() -> Found:
    """GCPO section 4.2: they gain 10 % on NarrativeQA and 20 % elsewhere."""
    stated, computed = gcpo_tens()
    found = {f"{method} on Qasper, %": gain for method, gain in computed["qasper"].items()}
    return (computed.round(-1) == stated).all(axis=None), found


def gcpo_4_2_baselines_printed() -> Found:
    """GCPO section 4.2: GCPO is above all baselines."""
    leads = [lead(table, GCPO, table.index.drop(GCPO)) for table in (gcpo_table1(), wide("gcpo_table6", **BY))]
    lost, lost_late = ((one <= 0).sum() for one in leads)
    return lost == 0, {"columns of Table 1 lost": lost, "by": -leads[0].min(), "columns of Table 6 lost": lost_late}


def gcpo_4_2_narrativeqa_printed() -> Found:
    """GCPO section 4.2: gains are largest on NarrativeQA."""
    f1 = gcpo_table1().xs("f1", axis=1, level="metric")
    points = lead(f1, GCPO, ["grpo"])
    readings = points, points / f1.loc["grpo"], lead(f1, GCPO, OTHERS)
    largest = any(gain.idxmax() == "narrativeqa" for gain in readings)
    return largest, {f"F1 on {task}, points": gain for task, gain in points.items()}


def gcpo_4_2_deviations_printed() -> Found:
    """GCPO section 4.2: standard deviations are reduced."""
    std = gcpo_table1("spread")
    larger = std.loc[OTHERS + GCPO].gt(std.loc["grpo"])
    return not larger.any(axis=None), {"larger": larger.sum().sum(), "of": std.loc[OTHERS + GCPO].count().sum()}


def gcpo_4_3_traditional_printed() -> Found:
    """GCPO section 4.3: GCPO is above traditional methods in mathematics."""
    over = lead(gcpo_table2(), ["GRPO + CD", "GRPO + BoT"], ["GRPO + SE", "GRPO + KLE", "EMPO", "GRPO-Care"])
    return over.min() > 0, {"leads by, at least": over.min(), "at most": over.max()}


def gcpo_table_4_olympiad() -> Found:
    """GCPO section 4.3: correlations are weaker on OlympiadBench."""
    rho = wide("gcpo_table4", "measure", "task", metric="spearman")
    drop, olympiad = rho["math"] - rho["olympiadbench"], rho["olympiadbench"]
    found = {"weaker by, at least": drop.min(), "at most": drop.max(), "SE there": olympiad["se"]}
    return drop.min() > 0, found | {"BoT there": olympiad["bot"]}


def gcpo_4_1_protocol() -> Found:
    """GCPO section 4.1: all methods share a backbone and a protocol."""
    table = reported("gcpo_table2")
    methods = set(table.loc[table["method"] != "", "label"])
    copied = methods & {label for label, _ in copied_rows()}
    return not copied, {"methods with another model's row": len(copied), "of": len(methods)}


# --- SEED-GRPO --------------------------------------------------------------------------------------------------------


def seed_averages() -> pd.DataFrame:
    """Return every row of SEED-GRPO's Tables 2 and 4 that prints five scores, with the mean of the five."""
    names = ["2", "4a", "4b", "4c", "4d", "4e"]
    table = pd.concat({n: reported(f"seed_grpo_table{n}", metric="accuracy") for n in names}, names=["table"])
    table = table.reset_index("table").fillna({"model": ""})
    table = table.pivot(index=["table", "label", "model"], columns="task", values="value").dropna()
    return table.assign(**{"mean of five": table[FIVE].mean(axis=1)})


def seed_row(label: str) -> Any:
    """Return a row of SEED-GRPO's Table 2."""
    return seed_averages().loc["2"].droplevel("model").loc[label]


def seed_gains() -> pd.DataFrame:
    """Return the four gains that SEED-GRPO's section 4 states, and what Table 2 gives."""
    over, more = seed_row(BEST) - seed_row(DR), seed_row(WIDE) - seed_row(BEST)
    computed = [100 * over["aime24"] / seed_row(DR)["aime24"], over["average"], more["average"], more["aime24"]]
    names = ["13.4 % on AIME24", "+5.2", "+1.6, G = 16", "+10, G = 16"]
    return pd.DataFrame({"stated": [13.4, 5.2, 1.6, 10], "computed": computed}, names)


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


def seed_table_2_averages() -> Found:
    """ours: SEED-GRPO Tables 2, 4: an average is the mean of its five scores."""
    table = seed_averages()
    off = table[~agrees(table["average"], table["mean of five"], 1)]
    return off.empty, {"off": len(off), "of": len(table), "different ones": off["mean of five"].nunique()}


def seed_4_3_aime_printed() -> Found:
    """SEED-GRPO section 4.3: AIME24 improves by 13.4 %, from 43.3 to 46.7."""
    gain, (best, wide_, dr) = seed_gains().iloc[0], (seed_row(label)["aime24"] for label in (BEST, WIDE, DR))
    found = {"gain, %": gain["computed"], "points": best - dr, "points with G = 16": wide_ - dr}
    return bool(agrees(gain["stated"], gain["computed"], 1)), found


def seed_4_2_gains_printed() -> Found:
    """SEED-GRPO section 4.2: three gains in words are those of Table 2."""
    gains, mean_of_three = seed_gains().iloc[1:], seed_row(f"{BEST}+")["average"]
    found = gains["computed"].to_dict() | {"mean over three runs": mean_of_three - seed_row(DR)["average"]}
    return agrees(gains["stated"], gains["computed"], 1).all(), found


def seed_4_2_steps_printed() -> Found:
    """SEED-GRPO section 4.2: results are superior with similar data and steps."""
    runs, both, sizes = seed_table3(), ["aime24", "math500"], ["train_data", "prompts"]
    own, rivals = runs.loc["SEED-GRPO 7B"], runs.drop("SEED-GRPO 7B")
    named = own[own["rollouts"] == 16].iloc[0]
    more = named[sizes] / rivals[sizes]
    superior = ((named[both] > rivals[both]) | rivals[both].isna()).all(axis=None)
    found = {"times the data, at most": more["train_data"].max(), "times the prompts": more["prompts"].max()}
    return bool(superior and (more <= SIMILAR).all(axis=None)), found


def seed_4_2_all_7b_printed() -> Found:
    """SEED-GRPO section 4.2: 83.4 on MATH is above all other 7B models of Table 3."""
    own = seed_table3().query("rollouts == 16").loc["SEED-GRPO 7B", "math500"]
    top = seed_table3()["math500"].drop("SEED-GRPO 7B").dropna()
    return own > top.max(), {"SEED-GRPO": own, top.idxmax(): top.max()}


def seed_4_3_r1_printed() -> Found:
    """SEED-GRPO section 4.3: text and table agree on R1-Distill, 71.2 on AMC and 46.7 on AIME24."""
    row = seed_row(f"{LINEAR}, R1-Distill)")[["amc", "aime24"]]
    return agrees(pd.Series({"amc": 71.2, "aime24": 46.7}), row, 1).all(), row.to_dict()


def seed_6_consistently_printed() -> Found:
    """SEED-GRPO section 6: SEED-GRPO is above the baselines that it names."""
    own = seed_row(WIDE)
    least = min((own - seed_row(name))[FIVE].min() for name in (DR, "OpenReasoner-Zero 7B"))
    dapo = own["aime24"] - seed_table3().loc["DAPO 32B", "aime24"]
    above = seed_rivals().ge(own[FIVE]).any(axis=1).sum()
    found = {"over two 7B models, at least": least, "over DAPO 32B": dapo, "other 7B models ahead somewhere": above}
    return bool(least > 0 and dapo > 0), found


# --- EGPO -------------------------------------------------------------------------------------------------------------


def egpo_table1(metric: str = "accuracy") -> pd.DataFrame:
    """Return EGPO's Table 1, scores or the gains in brackets: a row per model and task, a column per method."""
    return wide("egpo_table1", ["model", "task"], "method", metric=metric).rename(columns={"": "base"})


def egpo_brackets() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the gains over the base model that EGPO's Table 1 prints, and what its scores give."""
    stated, scores = egpo_table1("accuracy_gain"), egpo_table1()
    return stated, scores[stated.columns].sub(scores["base"], axis=0)


def egpo_margins() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the margins over the strongest baseline that EGPO's App. A.3 prints (19 of 20), and those of Table 1."""
    scores = egpo_table1()
    computed = (scores["egpo"] - scores[["grpo", "dapo", "edge_grpo"]].max(axis=1)).unstack("task")
    return wide("egpo_appendix_a3", "model", "task").reindex_like(computed), computed


def egpo_table2() -> pd.DataFrame:
    """Return EGPO's Table 2 with the mean of its three scores."""
    table = wide("egpo_table2", "label", "task")
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


def c5_against_egpo() -> pd.DataFrame:
    """Return EGPO's and C5's rows of EGPO's Table 2 as columns "egpo" and "c5"."""
    return pd.DataFrame({"egpo": egpo_table2().loc["EGPO"], "c5": egpo_table2().loc["C5 (clamp renorm)"]})


def egpo_4_2_printed() -> Found:
    """EGPO section 4.2: EGPO leads on nearly all benchmarks and overall."""
    margins = egpo_margins()[1]
    means = egpo_table1().groupby(level="model").mean().drop(columns="base")
    above = margins.gt(0).sum().sum()
    found = {"positive margins": above, "of": margins.size, "the smallest": margins[margins > 0].min(axis=None)}
    return bool(above >= 18 and (means.idxmax(axis=1) == "egpo").all()), found


def egpo_a3_margins_printed() -> Found:
    """EGPO App. A.3: its nineteen margins are those of Table 1."""
    (stated, computed), brackets = egpo_margins(), agrees(*egpo_brackets(), 2)
    right = agrees(stated, computed, 2).sum().sum()
    return right == stated.count().sum(), {"right": right, "brackets right": brackets.sum().sum(), "of": brackets.size}


def egpo_4_3_average_printed() -> Found:
    """EGPO section 4.3: C5 does not improve the average."""
    rows_of = c5_against_egpo().loc[["average", "mean of three"]]
    stated, computed = rows_of["egpo"] > rows_of["c5"]
    found = {f"{who}, {what}": x for what, own in rows_of.iterrows() for who, x in own.items()}
    return bool(stated) if stated == computed else None, found


def egpo_4_3_ceiling_printed() -> Found:
    """EGPO section 4.3: C5 raises the ceiling on some benchmarks."""
    ahead = c5_against_egpo().loc[THREE].diff(axis=1)["c5"]
    return ahead.max() > 0, {f"C5 ahead on {task}": points for task, points in ahead.items()}


def egpo_4_1_trials_printed() -> Found:
    """EGPO section 4.1: every score is a mean of eight trials."""
    whole = one_pass()
    own = whole.xs("egpo", level="method").sum().sum()
    found = {"EGPO's that one pass can give": own, "of all": whole.sum().sum(), "chance": (1 / 8) ** int(own)}
    return found["chance"] > LEAST_CHANCE, found


# --- CW-GRPO ----------------------------------------------------------------------------------------------------------


def cw_table2(metric: str = "accuracy") -> pd.DataFrame:
    """Return CW-GRPO's own experiments of Table 2: a row per model size and method."""
    table = wide("cw_grpo_table2", ["model", "label"], "task", metric=metric).loc[[*SIZES]]
    return table.rename({**SIZES, "GRPO + Gaussian Reweight (ours)": "CW-GRPO"}).sort_index()


def cw_gains() -> pd.DataFrame:
    """Return the gains of averages that CW-GRPO states, over the base model and over GRPO, and those of its scores."""
    mean = cw_table2().drop(columns="average").mean(axis=1).unstack("label")
    stated = cw_table2("accuracy_gain")["average"].unstack("label").add_suffix(" over base")
    computed = mean.sub(mean["Base Model"], axis=0).add_suffix(" over base")[stated.columns]
    stated = stated.assign(**{"CW-GRPO over GRPO": [2.7, 2.4]})
    computed = computed.assign(**{"CW-GRPO over GRPO": mean["CW-GRPO"] - mean["GRPO"]})
    return pd.DataFrame({"stated": stated.stack(), "computed": computed.stack()})


def cw_3_2_grpo_printed() -> Found:
    """CW-GRPO section 3.2: CW-GRPO is above GRPO on all benchmarks."""
    scores: Any = cw_table2().drop(columns="average")
    over = (scores.xs("CW-GRPO", level="label") - scores.xs("GRPO", level="label")).stack()
    found = {"columns above": (over > 0).sum(), "of": len(over)}
    return (over > 0).all(), found | {f"{task}, {size}": x for (size, task), x in over[over <= 0].items()}


def cw_3_2_averages_printed() -> Found:
    """CW-GRPO section 3.2: the average gains over GRPO are +2.7 and +2.4."""
    gains = cw_gains().xs("CW-GRPO over GRPO", level="label")
    return agrees(gains["stated"], gains["computed"], 1).all(), gains["computed"].to_dict()


def cw_base_gains_printed() -> Found:
    """ours: CW-GRPO Table 2: the gains over the base model are right."""
    gains = cw_gains().drop("CW-GRPO over GRPO", level="label")
    slips = gains[~agrees(gains["stated"], gains["computed"], 1)]
    found = {"right": len(gains) - len(slips), "of": len(gains)}
    return slips.empty, found | {", ".join(key): x for key, x in slips["computed"].items()}


def cw_table_3_printed() -> Found:
    """CW-GRPO section 3.2: GRPO degrades and CW-GRPO keeps its level."""
    steps = wide("cw_grpo_table3", "setting", "method", task="math500")
    loss, moved = steps["grpo"].iloc[0] - steps["grpo"].iloc[-1], steps["cw_grpo"].max() - steps["cw_grpo"].min()
    found = {"GRPO loses": loss, "CW-GRPO moves": moved}
    return bool(steps["grpo"].is_monotonic_decreasing and moved < loss / 2), found


# --- all of them ------------------------------------------------------------------------------------------------------

CHECKS = {  # by the id of the verdict
    name.replace("_", "-"): one
    for name, one in dict(globals()).items()
    if getattr(one, "__annotations__", {}).get("return") == "Found"
}


def checks() -> pd.DataFrame:
    """Return every check, a row per id: place, claim, decided (as in :data:`Found`) and computed (the numbers)."""
    lines = {}
    for name, check in CHECKS.items():
        place, _, claim = str(check.__doc__).rstrip(".").rpartition(": ")
        decided, numbers = check()
        said = "; ".join(f"{what}: {number:.4g}" for what, number in numbers.items())
        lines[name] = place, claim, None if decided is None else bool(decided), said
    return pd.DataFrame(lines, ["place", "claim", "decided", "computed"], dtype=object).T


def all_gains() -> pd.DataFrame:
    """Return every gain that the papers state as a number: where, name, stated, computed, and whether the two agree."""
    deltas = wide("gcpo_table1", **BY, unit="relative percent")
    deltas = deltas.rename(columns=lambda name: str(name).removesuffix("_gain"))
    c5 = c5_against_egpo().loc[["average", "mean of three"]]
    gap = pd.Series((c5["egpo"] - c5["c5"]).to_numpy(), ["stated", "computed"]).to_frame("average over C5").T
    found: dict[str, tuple[Any, Any, int]] = {  # stated, computed, decimals; tens are compared as tens
        "GCPO: 10 % and 20 %": (*gcpo_tens(), -1),
        "GCPO: Δ rows of Table 1": (deltas, gcpo_gains().loc[deltas.index, deltas.columns], 2),
        "SEED-GRPO: section 4": (seed_gains()["stated"], seed_gains()["computed"], 1),
        "EGPO: brackets of Table 1": (*egpo_brackets(), 2),
        "EGPO: margins of App. A.3": (*egpo_margins(), 2),
        "EGPO: Table 2": (gap["stated"], gap["computed"], 2),
        "CW-GRPO: averages": (cw_gains()["stated"], cw_gains()["computed"], 1),
    }
    parts = []
    for where, (stated, computed, digits) in found.items():
        flat = [x if x.ndim == 1 else x.stack(x.columns.names) for x in (stated, computed)]
        part = pd.DataFrame(dict(zip(["stated", "computed"], flat, strict=True))).dropna().assign(where=where)
        as_tens = part["computed"].round(-1) == part["stated"]
        part["agrees"] = as_tens if digits < 0 else agrees(part["stated"], part["computed"], digits)
        parts.append(part.assign(name=[name if isinstance(name, str) else ", ".join(name) for name in part.index]))
    return pd.concat(parts, ignore_index=True)[["where", "name", "stated", "computed", "agrees"]]


def write(folder: Path) -> None:
    """Write both tables into a folder."""
    checks().rename_axis("id").to_csv(folder / "checks.csv")
    all_gains().to_csv(folder / "gains.csv", index=False)


if __name__ == "__main__":
    write(PRINTED)
