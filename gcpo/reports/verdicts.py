"""Verdicts: comparisons with intervals as a table, corrected by Holm, and the one rule that decides a claim by it.

Measurements of every kind become :class:`Evidence`, a family of them the table of :func:`family`, and :func:`decide`
makes the verdict on a claim of its rows. A verdict is a mapping: one of five words, the numbers of the row that
decided, and all rows as ``parts``. Training runs are compared here; :mod:`gcpo.reports.alignment` and
:mod:`gcpo.reports.entropies` make evidence of their own.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from IPython.display import display

from gcpo import io, statistics
from gcpo.errors import one_of
from gcpo.methods import BASES, METHODS
from gcpo.reports.tables import display_name
from gcpo.statistics import Draws, Interval

HOLDS, FAILS, RULED_OUT, INCONCLUSIVE, UNTESTED = "holds", "fails", "ruled out", "inconclusive", "not tested"
PRECEDENCE = (FAILS, RULED_OUT, UNTESTED, INCONCLUSIVE, HOLDS)  # a claim gets the first that any of its parts has
SHOWN = (HOLDS, INCONCLUSIVE, RULED_OUT, FAILS, UNTESTED)  # their order in a table

FAMILY = "estimate low high low_family high_family level p mde why n unit".split()
APART = "worlds differ, p"  # column of a family: how likely so large a difference between the worlds is by chance
NUMBERS = "label against estimate low high effect excluded mde n level unit".split()
RECORD = ["id", "verdict", *NUMBERS, *"power realised parts because place task heading notebook records".split()]
TABLE = {"estimate": "difference", "low": "low", "high": "high", "effect": "paper_effect", "mde": "mde"}
LEAST_RANGE = 0.01  # of a weight within a step, highest less lowest over its mean: with less it cannot act
Pair = tuple[str, str]
ByPair = Mapping[Pair, str]
Verdict = dict[str, Any]


class Evidence(NamedTuple):
    """An estimate as its interval at any confidence in (0, 1), its two-sided p value of 0, and what it would detect.

    ``detectable`` returns, at a confidence, the smallest true value whose interval misses 0 with a probability of 80 %;
    ``draws`` are what worlds are pooled by.
    """

    interval: Callable[[float], Interval]
    p: float
    detectable: Callable[[float], float] = lambda level: nan
    draws: Draws = Draws(nan, np.empty(0))


Found = Evidence | str  # evidence, or why there is none
Test = Callable[[pd.DataFrame, pd.DataFrame], Found]


def pooled(found: Sequence[Draws], seed: int = 0) -> Draws:
    """Return the mean over worlds, or data sets, whose seeds and questions are drawn apart from one another."""
    rng, size = np.random.default_rng(seed), min(len(one.draws) for one in found)
    draws = [rng.permutation(one.draws)[:size] for one in found]
    return Draws(float(np.mean([one.estimate for one in found])), np.mean(draws, axis=0))


def family(
    found: Mapping[Pair, Found | Mapping[str, Found]], n: Mapping[Pair, int] | None = None, unit: str = ""
) -> pd.DataFrame:
    """Return estimates that are claimed to be above 0, corrected together by Holm: a row each, by label and against.

    Args:
        found: each as evidence, or why there is none; the latter counts for nothing in the family. Or that of each
            world, whose mean counts, with equal weights.
        n: how many seeds each was made on; 0 where it is not about seeds.
        unit: of all of them.

    Returns:
        estimate, low and high (its own 95 % interval), low_family and high_family (at ``level``, Holm's for this
        member), p (of no difference, adjusted by Holm), mde (the smallest true value whose interval at ``level`` misses
        0 with a probability of 80 %), why (there is no estimate), n and unit; of several worlds each one's estimate
        with its own interval, as text, and :data:`APART`.
    """
    each = {pair: {**one} for pair, one in found.items() if isinstance(one, Mapping)}
    found = {pair: one if not isinstance(one, Mapping) else _of_worlds(one) for pair, one in found.items()}
    known = {pair: one for pair, one in found.items() if isinstance(one, Evidence)}
    p_values = [one.p for one in known.values()]
    corrected = zip(statistics.holm_levels(p_values), statistics.holm(p_values), strict=True)
    numbers = dict.fromkeys(found, [nan] * 8)
    for (pair, one), (level, p) in zip(known.items(), corrected, strict=True):
        numbers[pair] = [*one.interval(0.95), *one.interval(level)[1:], level, p, one.detectable(level)]
    index = pd.MultiIndex.from_tuples([*found], names=["label", "against"])
    table = pd.DataFrame([*numbers.values()], index, columns=FAMILY[:8], dtype=float)
    why = [one if isinstance(one, str) else "" for one in found.values()]
    table = table.assign(why=why, n=[(n or {}).get(pair, 0) for pair in found], unit=unit)
    beside = {pair: _beside(worlds) for pair, worlds in each.items() if len(worlds) > 1 and pair in known}
    return table.join(pd.DataFrame.from_dict(beside, orient="index").reindex(index)) if beside else table


def _of_worlds(each: Mapping[str, Found]) -> Found:
    """Return the evidence of a mean over worlds; of one world its own."""
    if whys := [f"{world}: {one}".removeprefix(": ") for world, one in each.items() if isinstance(one, str)]:
        return whys[0]
    worlds = [one for one in each.values() if isinstance(one, Evidence)]
    if len(worlds) == 1:
        return worlds[0]
    draws = pooled([one.draws for one in worlds])

    def detectable(level: float) -> float:  # each with the degrees of freedom of its own seeds: to the safe side
        return float(np.linalg.norm([one.detectable(level) for one in worlds])) / len(worlds)

    return Evidence(draws.interval, draws.p, detectable, draws)


def _beside(each: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stands beside a mean over worlds."""
    first, second = (one.draws for one in each.values())
    minus = pooled([first, Draws(-second.estimate, -second.draws)])
    shown = {name: "{:.3g} [{:.3g}, {:.3g}]".format(*one.interval(0.95)) for name, one in each.items()}
    return {**shown, APART: f"{minus.p:.2g}"}


def clear(table: pd.DataFrame) -> pd.Series:
    """Return whether the corrected interval of each row of :func:`family` misses 0, on either side."""
    return (table["low_family"] > 0) | (table["high_family"] < 0)


# --- comparisons of training runs -----------------------------------------------------------------------------------


def in_training(own: pd.DataFrame, other: pd.DataFrame) -> Evidence:
    """Return the difference of two kinds of runs (seeds x questions) in points, paired by both.

    Raises:
        ValueError: they were tested on different questions.
    """
    if not own.columns.equals(other.columns):
        raise ValueError("runs were tested on different questions: their eval_split or eval_limit differ")
    a, b = 100 * own.to_numpy(), 100 * other.to_numpy()
    draws = statistics.training_draws(a, b)
    return Evidence(draws.interval, draws.p, lambda level: statistics.minimal_detectable(a, b, level=level), draws)


def compare(
    scores: pd.DataFrame, metric: str, pairs: Sequence[Pair], absent: ByPair | None = None, test: Test = in_training
) -> pd.DataFrame:
    """Return each first label minus the second, on the seeds that both have in a world.

    Args:
        scores: lines of the evaluations with columns label, seed, query and the metric, of one task and decoding. With
            a column world, pairs are made within each, and the mean over worlds counts.
        metric: the column to compare, in [0, 1].
        pairs: of labels, corrected together (:func:`family`); one that has no two seeds has no estimate.
        absent: why the case of a pair does not occur: it is not compared.
        test: makes evidence of two tables, seeds x questions, or says why there is none.

    Raises:
        ValueError: runs that were tested on different questions.
    """
    scores, absent = scores if "world" in scores else scores.assign(world=""), absent or {}
    lines = scores[scores["label"].isin({label for pair in pairs for label in pair})].groupby(["world", "label"])
    each = {place: part.pivot(index="seed", columns="query", values=metric) for place, part in lines}
    found: dict[Pair, str | dict[str, Found]] = {}
    shared: dict[Pair, int] = {}
    for pair in dict.fromkeys(pairs):
        shared[pair], of_worlds = 0, dict[str, Found]()
        for world in scores["world"].unique() if len(scores) else [""]:
            own, other = (each.get((world, label), pd.DataFrame()) for label in pair)
            seeds = sorted({*own.index} & {*other.index})
            few = "" if len(seeds) >= 2 else f"{len(own)} and {len(other)} seeds: 2 of both are needed"
            of_worlds[str(world)] = few or test(own.loc[seeds], other.loc[seeds])
            shared[pair] += len(seeds)
        found[pair] = absent.get(pair) or of_worlds
    return family(found, shared, "points")


def differences(
    scores: pd.DataFrame, metric: str, against: str | Mapping[str, str] = "grpo", margin: float = nan
) -> pd.DataFrame:
    """Return one metric of every kind of run and its difference from a base, in per cent and points, a row per label.

    Args:
        scores: lines of the evaluations with columns label, seed, query and the metric, of one task and decoding.
        metric: the column to compare, in [0, 1].
        against: the base of all labels, or of each.
        margin: the largest difference that does not matter, in points.

    Returns:
        label, seeds (how many it has), mean and std (over these; n - 1), gaps (their scores less the
        base's, of the seeds that both have), against, compared (on how many seeds), difference with low and high (95 %,
        paired by seed and question), p (Holm, within this table), mde (the difference detectable with 80 % power after
        Holm), and equivalent (whether the interval lies within the margin). What too few seeds cannot tell is missing.
    """
    runs = scores.groupby(["label", "seed"], sort=False)[metric].mean().mul(100)
    own = runs.groupby("label", sort=False).agg(seeds="size", mean="mean", std="std")
    bases = {label: against if isinstance(against, str) else against.get(label, label) for label in own.index}
    found = compare(scores, metric, [pair for pair in bases.items() if pair[0] != pair[1]])
    found = found.rename(columns={"estimate": "difference", "n": "compared"}).reindex([*bases.items()])
    found["compared"] = found["compared"].fillna(0).astype(int)
    each = zip(bases.items(), found["compared"], strict=True)
    gaps = [(runs[a] - runs[b]).dropna().round(2).tolist() if n else [] for (a, b), n in each]
    own = own.assign(gaps=gaps, against=["" if label == base else base for label, base in bases.items()])
    found = found[["compared", "difference", "low", "high", "p", "mde"]].reset_index(drop=True)
    table = own.reset_index().join(found)
    within = (-margin < table["low"]) & (table["high"] < margin)
    return table.assign(equivalent=within.astype(object).where(table["low"].notna() & (margin > 0)))


def paper_effects(means: Mapping[str, float], pairs: Sequence[Pair]) -> list[float]:
    """Return the paper's effect for each pair, from the means that it prints; nan where it prints one of them only."""
    return [means.get(label, nan) - means.get(against, nan) for label, against in pairs]


def weight_ranges(metrics: pd.DataFrame) -> dict[str, float]:
    """Return by label the median over steps of its weights' range, over their mean; only of methods that have weights.

    ``metrics`` are lines of ``metrics.csv`` with columns label and method.
    """
    weights = metrics[metrics["method"].isin([name for name, row in METHODS.items() if row.factors])]
    names = "weight_max weight_min weight loss_weight_max loss_weight_min".split()
    logged = weights.reindex(columns=[f"gcpo/{name}" for name in names])
    high, low, mean, high_loss, low_loss = (logged[column] for column in logged)
    of_step = (high_loss - low_loss).fillna((high - low) / mean)  # weights in the loss have a mean of 1
    return {str(label): float(found) for label, found in of_step.groupby(weights["label"]).median().items()}


def cannot_differ(
    pairs: Iterable[Pair], metrics: pd.DataFrame, scores: pd.DataFrame, metric: str, by: ByPair | None = None
) -> ByPair:
    """Return those pairs of methods that the records cannot tell apart, each with why: a claim on them is not tested.

    Args:
        pairs: of labels.
        metrics: as :func:`weight_ranges` takes them, of one task.
        scores: lines of the evaluations with columns label, seed, decoding, query and the metric, of one task.
        metric: the column that says how an answer was scored.
        by: of a pair, the label that trains with nothing but the weight that it differs by; without, both labels' own.
    """
    known = weight_ranges(metrics)
    methods = metrics.groupby("label")["method"].first()
    plain = {label for label, method in methods.items() if method in BASES}
    trainings = ["world", "seed"] if "world" in scores else ["seed"]
    wide = scores.pivot_table(index=[*trainings, "decoding", "query"], columns="label", values=metric)
    found = {}
    for pair in pairs:
        acting = [by[pair]] if by and pair in by else {*pair} - plain
        most = max((known.get(label, 1) for label in acting), default=1)
        if most < LEAST_RANGE:
            found[pair] = f"weights range over {100 * most:.2f} % within a step: below 1 % they cannot act"
        elif {*pair} <= {*wide}:
            alike = (wide[pair[0]] - wide[pair[1]]).dropna().eq(0).groupby(trainings).all()
            if len(alike) and alike.mean() >= 0.5:
                found[pair] = f"{alike.sum()} of {len(alike)} seeds answer every question alike"
    return found


# --- deciding -------------------------------------------------------------------------------------------------------


def overall(words: Collection[str]) -> str:
    """Return the word for a claim of several parts; "not tested" of one without any."""
    return next((word for word in PRECEDENCE if word in words), UNTESTED)


def decide(
    compared: pd.DataFrame | None,
    effects: Sequence[float] = (),
    margin: float = nan,
    closed: str | None = None,
    blind: str = "",
) -> Verdict:
    """Return the verdict on a claim: every row is above 0, the first label above the second.

    A claim that joins parts is false wherever one of them is. So it is said to hold by mistake no more often than one
    false part is, and each is held to its own 95 % interval (intersection-union). To fail, or to be ruled out (the
    interval excludes an effect that would matter), because of any one of many takes the interval corrected for its
    family. A sentence says which is above, and not by how much: where the paper prints a size, this size decides
    nothing, and ``excluded`` says whether the corrected interval lies below it.

    Args:
        compared: rows of :func:`family`, all of which must be on the claimed side; none are needed where it is closed.
        effects: the paper's effect for each, nan where it prints none; none at all if it prints none.
        margin: the smallest effect that would matter, declared beforehand; of rows for which the paper prints none on
            the claimed side.
        closed: why there is no verdict, such as a closed gate, or None.
        blind: why a null says nothing, such as that no positive control was seen, which makes "ruled out" "not tested".

    Returns:
        verdict (the first of :data:`PRECEDENCE` that a part has), the :data:`NUMBERS` of the part that has it and is
        the furthest from the claimed side (low and high are the interval that decided), because (why it is not tested),
        and parts: a row each.

    Raises:
        ValueError: no comparison, or effects for another number of them.
    """
    nothing = {"verdict": UNTESTED, "effect": effects[0] if len(effects) == 1 else nan}
    if closed:
        return {**nothing, "because": closed}
    if compared is None or compared.empty:
        raise ValueError("a verdict needs a comparison: name the pairs of labels that the claim is about")
    joined = len(compared) > 1
    parts = compared.reset_index()
    parts["effect"] = np.array([*effects], float) if len(effects) else nan
    printed = parts["effect"] > 0
    below = (parts["high_family"] < parts["effect"]).map({True: "yes", False: "no"})
    parts["excluded"] = below.where(printed & parts["estimate"].notna() & (not blind), "")
    tests = {UNTESTED: parts["estimate"].isna(), HOLDS: parts["low" if joined else "low_family"] > 0}
    tests |= {FAILS: parts["high_family"] < 0, RULED_OUT: ~printed & (parts["high_family"] < margin)}
    parts["verdict"] = np.select([*tests.values()], [*tests], INCONCLUSIVE)
    own = (parts["verdict"] == HOLDS) & joined
    parts["low"], parts["high"] = (parts[end].where(own, parts[f"{end}_family"]) for end in ("low", "high"))
    parts["level"] = parts["level"].mask(own, 0.95)
    word = overall([*parts["verdict"]])
    weakest = parts[parts["verdict"] == word].sort_values("low", kind="stable").iloc[0]
    parts = parts[["verdict", *NUMBERS, *parts.columns.difference([*FAMILY, *NUMBERS, "verdict"], sort=False)]]
    if word == UNTESTED or (word == RULED_OUT and blind):
        return {**nothing, "because": weakest["why"] if word == UNTESTED else blind, "parts": parts}
    return {**weakest[[*parts]], "parts": parts}


# --- a notebook's verdicts ------------------------------------------------------------------------------------------


def parts_table(parts: pd.DataFrame) -> pd.DataFrame:
    """Return the parts of a verdict as a page shows them: a row each, without columns that say nothing."""
    names = parts[["label", "against"]].fillna("").map(display_name).to_numpy()
    shown = parts.rename(columns={"effect": "paper", "mde": "detectable"}).assign(seeds=parts["n"].replace(0, nan))
    shown["comparison"] = [" minus ".join(filter(None, pair)) for pair in names]
    numbers = ["estimate", "low", "high", "paper", "detectable"]
    shown[numbers] = shown[numbers].map("{:+.3g}".format, na_action="ignore")
    where = [name for name in ("policy", "comparison") if name in shown]
    beside = [name for name in parts if str(name).startswith("world")]
    shown = shown[[*where, "verdict", *numbers, "excluded", *beside, "seeds"]].replace("", nan)
    return shown.dropna(axis=1, how="all").fillna("").set_index(where)


class Verdicts:
    """The verdicts of a notebook, shown as they are reached or kept for a table, and written as records at the end.

    Args:
        notebook: the notebook's name, "21_table1".
        records: whose runs decide them, as ``gcpo.records.source`` says it; None where no runs do.
    """

    def __init__(self, notebook: str, records: str | None = None) -> None:
        self.notebook, self.records = notebook, records
        self.rows: list[Verdict] = []

    def __call__(self, *arguments: Any, **named: Any) -> None:
        """Show and keep a verdict; arguments as in :meth:`add`."""
        self.add(*arguments, **named)
        self._display(self.rows[-1])

    def add(
        self, check: str, place: str, heading: str, decided: bool | Verdict | None, because: str = "", task: str = ""
    ) -> None:
        """Keep a verdict without showing it.

        Args:
            check: the id that ``claims.yaml`` knows it by: its claim's, where it alone decides one.
            place: the place in the paper.
            heading: the claim in a few words, which follows its verdict ("Holds: entropy is blind to distance");
                nothing is joined by it.
            decided: what :func:`decide` made of runs; or what another check returned, None when the data cannot decide.
            because: the numbers that decided it, in a sentence.
            task: what it was decided on; empty for what is about no task.
        """
        word = INCONCLUSIVE if decided is None else HOLDS if decided else FAILS
        verdict = decided if isinstance(decided, dict) else {"verdict": word}
        because = f"{verdict.get('because', '')} {because}".strip()
        place = f"{place}, {task}" if task else place
        self.rows.append({**verdict, "id": check, "place": place, "task": task, "heading": heading, "because": because})

    def show(self, check: str, task: str = "") -> None:
        """Show the kept verdicts of a check: on one task, or on all.

        Raises:
            ValueError: no verdict with this id was kept.
        """
        one_of("a verdict's id", check, {row["id"]: None for row in self.rows})
        for row in self.rows:
            if row["id"] == check and task in ("", row["task"]):
                self._display(row)

    @staticmethod
    def _display(row: Verdict) -> None:
        said = f"**{row['verdict'].capitalize()}: {row['heading']}** ({row['place']}). {row['because']}"
        if "power" in row:
            noise: str = "" if pd.isna(row["realised"]) else f", by the noise of these runs {row['realised']:.0f}"
            said += f" Planned to hold {row['power']:.0f} times of 100{noise}."
        display({"text/markdown": said, "text/plain": said.replace("**", "")}, raw=True)
        if row.get("parts") is not None:
            display(parts_table(row["parts"]))

    def write(self, folder: Path | str | None) -> pd.DataFrame:
        """Write the verdicts as records into a folder, a CSV that the ledger reads; None writes nothing.

        Returns:
            a row per verdict, in order: source, claim, verdict; of runs also difference, low, high, paper_effect, mde
            and seeds, and whose records they are.
        """
        found = pd.DataFrame(self.rows).reindex(columns=RECORD)
        found = found.assign(notebook=self.notebook, records=self.records)
        found["n"] = found["n"].where(found["n"] > 0).astype("Int64")  # 0 where it is not about seeds
        if folder is not None:
            parts = [row.get("parts", pd.DataFrame()) for row in self.rows]
            texts = [parts_table(part).to_csv() if len(part) > 1 else "" for part in parts]
            kept = found.assign(effect=found["effect"].where(found["level"].notna()), parts=texts)
            name = self.notebook[:2] if self.records is None else f"verdicts_{self.notebook[:2]}"
            io.write(Path(folder) / f"{name}.csv", kept.to_csv(index=False, float_format="%.6g"))
        found = found.rename(columns={"place": "source", "heading": "claim", "n": "seeds"} | TABLE).set_index("source")
        found = found.astype(dict.fromkeys(TABLE.values(), float)).round(dict.fromkeys(TABLE.values(), 3))
        return found[["claim", "verdict", *([*TABLE.values(), "seeds", "records"] if self.records else [])]]
