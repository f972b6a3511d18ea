"""Checks of sentences in the four papers against the papers' own tables: arithmetic, without a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd

from gcpo.reports import printed
from gcpo.reports.printed import BY, FIVE, GCPO, LINEAR, OTHERS, THREE
from gcpo.reports.tables import reported

SIMILAR = 1.2  # a size is similar or smaller if it is at most so many times the other
LEAST_CHANCE = 1e-6
Found = tuple[bool | None, str]


class Check(NamedTuple):
    """A sentence of a paper, and how its numbers are computed again.

    Attributes:
        place: the paper and the place in it; "ours" where the paper claims nothing.
        stated: the paper's words or numbers that are checked.
        decide: returns whether the paper's tables bear them out (None where these contradict one another), and the
            numbers in a sentence or two. Its docstring is the claim.
    """

    place: str
    stated: str
    decide: Callable[[], Found]

    @property
    def heading(self) -> str:
        """The claim in a few words, without the capital of a sentence."""
        claim = str(self.decide.__doc__).rstrip(".")
        return claim[0].lower() + claim[1:] if claim[1].islower() else claim


# --- GCPO -------------------------------------------------------------------------------------------------------------


def _all_above_grpo() -> Found:
    """All uncertainty-based methods are above GRPO."""
    below, f1 = printed.gcpo_gains().lt(0).sum(axis=1), printed.gcpo_table1()["narrativeqa", "f1"]
    said = f"EMPO is below GRPO in {below['empo']} of its 6 columns, for example with {f1['empo']} against {f1['grpo']}"
    return bool(below.sum() == 0), f"{said}. The others are above it in all 8."


def _tens() -> Found:
    """They gain 10 % on NarrativeQA and 20 % elsewhere."""
    stated, computed = printed.gcpo_tens()
    qasper = computed["qasper"].round(1)
    return bool(((computed / 10).round() * 10 == stated).all(axis=None)), (
        f"On Qasper SE and CARE gain {qasper['se']} and {qasper['care']} % on average. "
        f"GCPO's two variants gain {qasper['gcpo_cd']} and {qasper['gcpo_bot']} %."
    )


def _above_all_baselines() -> Found:
    """GCPO is above all baselines."""
    best = printed.gcpo_table1().loc[GCPO].max()
    main = printed.gcpo_table1().drop(GCPO).max()
    late = reported("gcpo_table6").pivot(**BY, values="value").drop(GCPO).max()
    lost, later = int((best <= main).sum()), int((best[late.index] <= late).sum())
    return lost == 0, (
        f"In {lost} of {len(main)} columns of Table 1, BLEU on Qasper, KLE has {main['qasper', 'bleu']} and GCPO "
        f"{best['qasper', 'bleu']}. In Table 6 EG-SPO leads in {later} of {len(late)} columns."
    )


def _largest_on_narrativeqa() -> Found:
    """Gains are largest on NarrativeQA."""
    f1 = printed.gcpo_table1().xs("f1", axis=1, level="metric")
    ours, grpo = f1.loc[GCPO].max(), f1.loc["grpo"]
    readings = {"%": 100 * (ours / grpo - 1), "points": ours - grpo, "over others": ours - f1.loc[OTHERS].max()}
    gains = readings["points"]
    return any(gain.idxmax() == "narrativeqa" for gain in readings.values()), (
        f"In F1 GCPO gains {gains['narrativeqa']:.1f} points over GRPO on NarrativeQA and {gains['hotpotqa']:.1f} on "
        "HotpotQA. HotpotQA is first in per cent, and over the best rival, too."
    )


def _deviations_reduced() -> Found:
    """Standard deviations are reduced."""
    std = printed.gcpo_table1("spread")
    larger = std.loc[OTHERS + GCPO].gt(std.loc["grpo"])
    return not larger.any(axis=None), (
        f"{larger.sum().sum()} of {std.loc[OTHERS + GCPO].count().sum()} are larger than GRPO's, all in BLEU: SE on "
        "NarrativeQA, SE and BoT on Qasper. On average every method's is smaller."
    )


def _above_traditional() -> Found:
    """GCPO is above traditional methods in mathematics."""
    maths: Any = printed.gcpo_table2()
    rivals = ["GRPO + SE", "GRPO + KLE", "EMPO", "GRPO-Care"]
    lead = maths.loc[["GRPO + CD", "GRPO + BoT"]].max() - maths.loc[rivals].max()
    return bool(lead.min() > 0), (
        f"GCPO leads by {lead.min():.1f} to {lead.max():.1f} points. BoT alone ties with SE on AIME24, at "
        f"{maths.loc['GRPO + SE', 'aime24']}. Seed-GRPO is ahead of both, which the sentence says too."
    )


def _weaker_on_olympiadbench() -> Found:
    """Correlations are weaker on OlympiadBench."""
    rho = printed.rows("gcpo_table4", metric="spearman").pivot(index="measure", columns="task", values="value")
    drop, olympiad = rho["math"] - rho["olympiadbench"], rho["olympiadbench"]
    return bool(drop.min() > 0), (
        f"Each of the four is weaker, by {drop.min():.2f} to {drop.max():.2f}. On OlympiadBench SE leads, with "
        f"{olympiad['se']} against {olympiad['bot']} for BoT."
    )


def _one_protocol() -> Found:
    """All methods share a backbone and a protocol."""
    table = reported("gcpo_table2")
    methods = set(table.loc[table["method"] != "", "label"])
    borrowed = [label for label, _ in printed.copied_rows() if label in methods]
    return not borrowed, (
        f"{len(borrowed)} of {len(methods)} methods of Table 2, {', '.join(borrowed).strip('*')}, has in all three "
        "columns what SEED-GRPO prints for another model, Qwen2.5-Math-1.5B."
    )


# --- SEED-GRPO --------------------------------------------------------------------------------------------------------


def _averages_are_means() -> Found:
    """An average is the mean of its five scores."""
    table = printed.seed_averages()
    off = table[~printed.agrees(table["average"], table["mean of five"], 1)]
    pairs = off.drop_duplicates("mean of five")[["average", "mean of five"]].to_numpy()
    return off.empty, (
        f"In {len(table) - len(off)} of {len(table)} rows it is. {len(pairs)} averages are off, one of them "
        f"three times: {'; '.join(f'{printed:.2f} for {mean:.2f}' for printed, mean in pairs)}."
    )


def _aime_gain() -> Found:
    """AIME24 improves by 13.4 %, from 43.3 to 46.7."""
    gain = printed.seed_gains().iloc[0]
    dr, wide = (printed.seed_row(label)["aime24"] for label in ("Dr.GRPO 7B", f"{LINEAR}, G=16)"))
    return bool(printed.agrees(gain["stated"], gain["computed"], 1)), (
        f"From {dr} to 46.7 is {gain['computed']:.1f} %, or {46.7 - dr:.1f} points. From {dr} to the {wide} of G = 16 "
        f"is {wide - dr:.1f} points."
    )


def _other_gains() -> Found:
    """Three gains in words are those of Table 2."""
    gains = printed.seed_gains().iloc[1:]
    three = printed.seed_row(f"{LINEAR})+")["average"] - printed.seed_row("Dr.GRPO 7B")["average"]
    return bool(printed.agrees(gains["stated"], gains["computed"], 1).all()), (
        f"The gains are {', '.join(f'{x:+.1f}' for x in gains['computed'])} points, of best runs. The mean over three "
        f"runs is {three:.1f} above Dr. GRPO as printed."
    )


def _similar_data_and_steps() -> Found:
    """Results are superior with similar data and steps."""
    runs, both = printed.seed_table3(), ["aime24", "math500"]
    own, rivals = runs.loc["SEED-GRPO 7B"], runs.drop("SEED-GRPO 7B")
    named, dr = own[own["rollouts"] == 16].iloc[0], rivals.loc["Dr.GRPO 7B"]
    more = named[["train_data", "prompts"]] / rivals[["train_data", "prompts"]]
    superior = ((named[both] > rivals[both]) | rivals[both].isna()).all(axis=None)
    fair = own[(own["steps"] <= dr["steps"]) & (own["rollouts"] == dr["rollouts"])].iloc[0]
    return bool(superior and (more <= SIMILAR).all(axis=None)), (
        f"Every score is higher, with at most {more['train_data'].max():.2f} times the data and "
        f"{more['prompts'].max():.2f} times the prompts. But at Dr. GRPO's eight rollouts AIME24 is {fair['aime24']} "
        f"against {dr['aime24']}."
    )


def _above_all_7b() -> Found:
    """83.4 on MATH is above all other 7B models."""
    own = printed.seed_table3().query("rollouts == 16").loc["SEED-GRPO 7B", "math500"]
    top = printed.seed_rivals()["math500"]
    return bool(own > top.max()), f"{top.idxmax()} has {top.max()} in Table 2."


def _distilled() -> Found:
    """Text and table agree on R1-Distill."""
    row = printed.seed_row(f"{LINEAR}, R1-Distill)")
    same = printed.agrees(pd.Series({"amc": 71.2, "aime24": 46.7}), row[["amc", "aime24"]], 1)
    return bool(same.all()), f"Table 2 has {row['amc']} on AMC, {row['aime24']} on AIME24, and all the rest."


def _named_baselines() -> Found:
    """SEED-GRPO is above the baselines that it names."""
    wide, small = printed.seed_row(f"{LINEAR}, G=16)"), "1.5B (Linear, α=0.02)"
    least = min((wide - printed.seed_row(name))[FIVE].min() for name in ("Dr.GRPO 7B", "OpenReasoner-Zero 7B"))
    dapo = wide["aime24"] - printed.seed_table3().loc["DAPO 32B", "aime24"]
    above = printed.seed_rivals().ge(wide[FIVE]).any(axis=1)
    amc = (printed.seed_row("Dr.GRPO 1.5B") - printed.seed_row(f"SEED-GRPO {small}"))["amc"]
    return bool(least > 0 and dapo > 0), (
        f"By {least:.1f} points or more over the two 7B models named, and {dapo:.1f} over DAPO 32B. But "
        f"{above.sum()} other 7B models lead somewhere, and at 1.5B Dr. GRPO leads on AMC by {amc:.1f}."
    )


# --- EGPO -------------------------------------------------------------------------------------------------------------


def _nearly_all_benchmarks() -> Found:
    """EGPO leads on nearly all benchmarks and overall."""
    margins: Any = printed.egpo_margins()[1]
    means = printed.egpo_table1().groupby(level="model").mean().drop(columns="base")
    above = int(margins.gt(0).sum().sum())
    return bool(above >= 18 and (means.idxmax(axis=1) == "egpo").all()), (
        f"{above} of {margins.size} margins are positive, the smallest by {margins[margins > 0].min(axis=None):.2f} "
        "points, and the mean is the highest for all four models."
    )


def _nineteen_margins() -> Found:
    """Its nineteen margins are those of Table 1."""
    stated, computed = printed.egpo_margins()
    right, brackets = int(printed.agrees(stated, computed, 2).sum().sum()), printed.agrees(*printed.egpo_brackets(), 2)
    said = f"All {right} are, and so are {brackets.sum().sum()} of {brackets.size} gains in the brackets of Table 1."
    return bool(right == stated.count().sum()), said


def _average_of_c5() -> Found:
    """C5 does not improve the average."""
    table = printed.egpo_table2()
    own, c5 = table.loc["EGPO"], table.loc["C5 (clamp renorm)"]
    stated, computed = (bool(own[column] > c5[column]) for column in ("average", "mean of three"))
    return stated if stated == computed else None, (
        f"By the printed averages EGPO leads, {own['average']:.2f} to {c5['average']:.2f}. By the means of the printed "
        f"scores C5 leads, {c5['mean of three']:.2f} to {own['mean of three']:.2f}."
    )


def _ceiling_of_c5() -> Found:
    """C5 raises the ceiling on some benchmarks."""
    table = printed.egpo_table2()
    own, c5 = table.loc["EGPO"], table.loc["C5 (clamp renorm)"]
    return bool((c5[THREE] > own[THREE]).any()), (
        f"On MATH-500 C5 has {c5['math500']:.2f} and EGPO {own['math500']:.2f}. On GSM8K, the paper's example, C5 has "
        f"{c5['gsm8k']:.2f}, and EGPO {own['gsm8k']:.2f}."
    )


def _eight_trials() -> Found:
    """Every score is a mean of eight trials."""
    whole = printed.one_pass()
    own = whole.xs("egpo", level="method")
    chance = (1 / 8) ** int(own.sum().sum())
    return chance > LEAST_CHANCE, (
        f"All {own.sum().sum()} of EGPO's scores are what one pass can give. Eight passes that differ would do that "
        f"with a chance of {chance:.0e}. So are {whole.sum().sum()} of all {whole.size}."
    )


# --- CW-GRPO ----------------------------------------------------------------------------------------------------------


def _above_grpo_everywhere() -> Found:
    """CW-GRPO is above GRPO on all benchmarks."""
    table: Any = printed.cw_table2().drop(columns="average").unstack("model")
    over = table.loc["CW-GRPO"] - table.loc["GRPO"]
    return bool((over > 0).all()), (
        f"In {(over > 0).sum()} of {len(over)} columns. AIME24 at 1.5B is {-over['aime24', '1.5B']:.1f} points below "
        f"(one problem of 30), Minerva at 7B {-over['minerva', '7B']:.1f} (three of 272)."
    )


def _averages_over_grpo() -> Found:
    """The average gains over GRPO are +2.7 and +2.4."""
    gains = printed.cw_gains().xs("CW-GRPO over GRPO", level="label")
    computed = " and ".join(f"{x:+.2f}" for x in gains["computed"])
    same = printed.agrees(gains["stated"], gains["computed"], 1).all()
    return bool(same), f"They are {computed}, the second more than stated."


def _gains_over_base() -> Found:
    """The gains over the base model are right."""
    gains = printed.cw_gains().drop("CW-GRPO over GRPO", level="label")
    same = printed.agrees(gains["stated"], gains["computed"], 1)
    (size, name), slip = gains[~same].index[0], gains[~same].iloc[0]
    said = f"{same.sum()} of {len(gains)} are. At {size}, {name}, {slip['stated']:+.1f} is {slip['computed']:+.2f}."
    return bool(same.all()), said


def _keeps_its_level() -> Found:
    """GRPO degrades and CW-GRPO keeps its level."""
    steps = printed.rows("cw_grpo_table3", task="math500").pivot(index="setting", columns="method", values="value")
    loss, moved = steps["grpo"].iloc[0] - steps["grpo"].iloc[-1], steps["cw_grpo"].max() - steps["cw_grpo"].min()
    said = f"On MATH-500 GRPO loses {loss:.1f} points in 100 steps, and CW-GRPO moves by {moved:.1f}."
    return bool(steps["grpo"].is_monotonic_decreasing and moved < loss / 2), said


# By the id of the verdict.
CHECKS = {
    "gcpo-4-2-uncertainty-printed": Check("GCPO section 4.2", "“All … outperform”", _all_above_grpo),
    "gcpo-4-2-tens-printed": Check("GCPO section 4.2", "10 %, 20 %, 20 %", _tens),
    "gcpo-4-2-baselines-printed": Check("GCPO section 4.2", "“consistently”", _above_all_baselines),
    "gcpo-4-2-narrativeqa-printed": Check("GCPO section 4.2", "“most pronounced”", _largest_on_narrativeqa),
    "gcpo-4-2-deviations-printed": Check("GCPO section 4.2", "“consistently”", _deviations_reduced),
    "gcpo-4-3-traditional-printed": Check("GCPO section 4.3", "“outperforms”", _above_traditional),
    "gcpo-table-4-olympiad": Check("GCPO section 4.3", "“notably weaker”", _weaker_on_olympiadbench),
    "gcpo-4-1-protocol": Check("GCPO section 4.1", "“same backbone”", _one_protocol),
    "seed-table-2-averages": Check("ours: SEED-GRPO Tables 2, 4", "33 averages", _averages_are_means),
    "seed-4-3-aime-printed": Check("SEED-GRPO section 4.3", "13.4 %", _aime_gain),
    "seed-4-2-gains-printed": Check("SEED-GRPO section 4.2", "+5.2, +1.6, +10", _other_gains),
    "seed-4-2-steps-printed": Check("SEED-GRPO section 4.2", "“similar or even reduced”", _similar_data_and_steps),
    "seed-4-2-all-7b-printed": Check("SEED-GRPO section 4.2", "83.4", _above_all_7b),
    "seed-4-3-r1-printed": Check("SEED-GRPO section 4.3", "71.2, 46.7", _distilled),
    "seed-6-consistently-printed": Check("SEED-GRPO section 6", "“consistently”", _named_baselines),
    "egpo-4-2-printed": Check("EGPO section 4.2", "“nearly all”", _nearly_all_benchmarks),
    "egpo-a3-margins-printed": Check("EGPO App. A.3", "19 margins", _nineteen_margins),
    "egpo-4-3-average-printed": Check("EGPO section 4.3", "65.97 against 65.54", _average_of_c5),
    "egpo-4-3-ceiling-printed": Check("EGPO section 4.3", "“some benchmarks”", _ceiling_of_c5),
    "egpo-4-1-trials-printed": Check("EGPO section 4.1", "8 trials", _eight_trials),
    "cw-3-2-grpo-printed": Check("CW-GRPO section 3.2", "“all”", _above_grpo_everywhere),
    "cw-3-2-averages-printed": Check("CW-GRPO section 3.2", "+2.7, +2.4", _averages_over_grpo),
    "cw-base-gains-printed": Check("ours: CW-GRPO Table 2", "6 gains", _gains_over_base),
    "cw-table-3-printed": Check("CW-GRPO section 3.2", "85.0 to 79.8", _keeps_its_level),
}
