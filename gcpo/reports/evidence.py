"""Evidence and verdicts: estimates with intervals at any level, families corrected by Holm, one rule that decides.

Measurements of every kind become :class:`Evidence`; a family of them becomes a list of :class:`Comparison`, corrected
together (:func:`together`); and :func:`decide` makes the verdict on a claim of these. Training runs are compared here,
paired by seed and question, on the seeds that both have; :mod:`gcpo.reports.alignment` and
:mod:`gcpo.reports.entropies` make evidence of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, log, nan
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from scipy.stats import ttest_1samp

from gcpo import statistics
from gcpo.reports import claims
from gcpo.reports.claims import FAILS, HOLDS, INCONCLUSIVE, PRECEDENCE, RULED_OUT, UNTESTED, Verdict
from gcpo.reports.names import people
from gcpo.statistics import Interval

Pair = tuple[str, str]
K = TypeVar("K")
NOTHING = Interval(nan, nan, nan)
VERBS = {  # of one and of several
    HOLDS: ("holds", "hold"),
    FAILS: ("fails", "fail"),
    RULED_OUT: ("is ruled out", "are ruled out"),
    INCONCLUSIVE: ("is inconclusive", "are inconclusive"),
    UNTESTED: ("is not tested", "are not tested"),
}


@dataclass(frozen=True)
class Comparison:
    """An estimate that is claimed to be above 0, corrected within its family; or why there is no such thing.

    Attributes:
        label: what is compared.
        against: what it is compared with.
        seeds: how many both have; the comparison is made on these alone.
        compared: the same in words: "10 seeds each", "10 and 3 seeds: compared on 3", "... cannot be compared".
        absent: why the case that the claim is about does not occur (:mod:`gcpo.reports.occurrence`), or nothing.
        interval: the estimate with its 95 % interval; nan where it cannot be compared.
        corrected: the estimate with the interval that holds within the family, after Holm.
        p: of no difference, adjusted by Holm within the family; in [0, 1].
        mde: the smallest true difference whose ``corrected`` interval misses 0 with a probability of 80 %: at the level
            of that interval, which is Holm's for this member of the family (5 % over the number of those not rejected
            before it). Alone in its family it is that of ``interval``.
        family: how many comparisons are corrected for together.
        what: what is compared, where it is no difference of scores.
        level: of the ``corrected`` interval.
        unit: of the estimate.
        over: what is resampled, where it is not seeds and questions: " over queries".
        digits: of its numbers; two, or three where an end would otherwise read as 0 and is not.
    """

    label: str
    against: str
    seeds: int
    compared: str
    interval: Interval = NOTHING
    corrected: Interval = NOTHING
    p: float = nan
    mde: float = nan
    family: int = 1
    what: str = ""
    level: float = nan
    unit: str = "points"
    over: str = ""
    digits: int | None = None
    absent: str = ""

    @property
    def tested(self) -> bool:
        """Return True if there is an estimate."""
        return not isnan(self.interval.estimate)

    @property
    def clear(self) -> bool:
        """Return True if the corrected interval misses 0, on either side."""
        return self.corrected.low > 0 or self.corrected.high < 0

    @property
    def name(self) -> str:
        """The quantity in words."""
        if self.what:
            return self.what
        return f"{people(self.label)} minus {people(self.against)}" if self.against else people(self.label)


@dataclass(frozen=True, eq=False)
class Evidence:
    """An estimate as its interval at any confidence in (0, 1), its two-sided p value of 0, and what it would detect.

    Attributes:
        interval: confidence -> the estimate with its interval.
        p: in [0, 1], below 1 - confidence where the interval misses 0.
        detectable: confidence -> the smallest true value whose interval misses 0 with a probability of 80 %, if known.
    """

    interval: Callable[[float], Interval]
    p: float
    detectable: Callable[[float], float] = lambda level: nan


def together(found: Mapping[K, tuple[Comparison, Evidence]]) -> dict[K, Comparison]:
    """Return comparisons with their intervals, p and mde, corrected for all of them by Holm."""
    p_values = [evidence.p for _, evidence in found.values()]
    levels, adjusted = statistics.holm_levels(p_values), statistics.holm(p_values)
    return {
        key: replace(
            comparison,
            interval=evidence.interval(0.95),
            corrected=evidence.interval(level),
            p=p,
            mde=evidence.detectable(level),
            family=len(found),
            level=level,
        )
        for (key, (comparison, evidence)), level, p in zip(found.items(), levels, adjusted, strict=True)
    }


# --- deciding -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A comparison as part of a claim, with the sizes of effect that its interval can rule out.

    Attributes:
        comparison: claimed to be above 0.
        effect: the paper's own; nan where it prints none.
        margin: declared beforehand: the smallest effect that would matter; nan where none was.
        joined: whether the claim has other parts too.
    """

    comparison: Comparison
    effect: float = nan
    margin: float = nan
    joined: bool = False

    @property
    def size(self) -> float:
        """The paper's effect where it is on the claimed side, else the margin."""
        return self.effect if self.effect > 0 else self.margin

    @property
    def word(self) -> str:
        """The part's own verdict.

        A claim that joins parts is false wherever one of them is. So it is said to hold by mistake no more often than
        one false part is, and each is held to its own 95 % interval (intersection-union). To fail or to be ruled out
        because of any one of many takes the corrected interval.
        """
        one = self.comparison
        if not one.tested:
            return UNTESTED
        if (one.interval if self.joined else one.corrected).low > 0:
            return HOLDS
        if one.corrected.high < 0:
            return FAILS
        return RULED_OUT if one.corrected.high < self.size else INCONCLUSIVE

    @property
    def shown(self) -> Interval:
        """The interval that decides the word."""
        return self.comparison.interval if self.joined and self.word == HOLDS else self.comparison.corrected

    @property
    def numbers(self) -> str:
        """Return the quantity with its estimate and the interval that decides, or why there is none."""
        one = self.comparison
        if not one.tested:
            return f"{one.name}: {one.absent or one.compared}".removesuffix(": ")
        estimate, low, high = signed(*self.shown, digits=one.digits)
        corrected = one.family > 1 and self.shown != one.interval
        family = f"corrected for {one.family} comparisons" if corrected else ""
        how = [f"95 % CI {low} to {high}{one.over}", family, one.compared]
        return f"{one.name}: {estimate}{' points' * (one.unit == 'points')} ({', '.join(filter(None, how))})"

    @property
    def meaning(self) -> str:
        """Return a sentence on the effect in question; nothing where there is none."""
        digits, most = self.comparison.digits or 2, self.comparison.mde
        size = f"{self.margin:.{digits}f}, the margin declared beforehand"
        if self.effect > 0:
            size = f"the paper's {self.effect:+.{digits}f}"
        said = [f"This rules out {size}."] if self.word == RULED_OUT else []
        if self.word == INCONCLUSIVE and not isnan(self.size):
            said.append(f"Too few runs to tell 0 from {size}.")
        if self.word == INCONCLUSIVE and not isnan(most):
            said.append(f"A difference of {most:.{digits}f} would have been detected.")
        if self.word in (HOLDS, FAILS) and self.effect > 0:
            said.append(f"The paper has {self.effect:+.{digits}f}.")
        return " ".join(said)

    @property
    def brief(self) -> str:
        """Return the numbers beside the effect in question, as one sentence."""
        one = self.comparison
        if not one.tested:
            return f"{self.numbers}."
        numbers = in_words(*self.shown, unit=one.unit, digits=one.digits)
        return f"{one.name}: {numbers}{in_question(self.word, self.effect, self.margin, one.digits or 2)}."

    @property
    def line(self) -> str:
        """Return the word, the numbers and their meaning, as one line of a list."""
        return f"{self.word}: {self.numbers}. {self.meaning}".strip()


def decide(
    comparisons: Collection[Comparison],
    paper_effects: Sequence[float] = (),
    closed: str | None = None,
    command: str = "",
    margin: float = nan,
    blind: str = "",
) -> Verdict:
    """Return the verdict on a claim: every comparison is above 0, the first label above the second.

    Args:
        comparisons: all must be on the claimed side; corrected together (:func:`paired_comparisons`).
        paper_effects: the paper's effect for each, nan where it prints none; none at all if it prints none.
        closed: why there is no verdict, such as a closed gate, or None.
        command: what makes the runs that are missing.
        margin: the smallest effect that would matter, in the unit of the comparisons, where the paper prints none.
        blind: why a null says nothing here (:attr:`gcpo.reports.headline.Controls.blind`), which makes "ruled out" "not
            tested"; or nothing.

    The claim has the first of "fails", "ruled out", "not tested", "inconclusive" and "holds" that a part has
    (:attr:`Part.word`). The numbers are those of one of these parts, the furthest from the claimed side.
    """
    effects = [*paper_effects] or [nan] * len(comparisons)
    only = effects[0] if len(effects) == 1 else nan
    if closed:
        return Verdict(UNTESTED, closed, effect=only)
    if not comparisons:
        raise ValueError("a verdict needs a comparison: name the pairs of labels that the claim is about")
    if len(effects) != len(comparisons):
        raise ValueError(f"{len(effects)} effects for {len(comparisons)} comparisons: give one each, nan for none")
    parts = [Part(one, x, margin, len(comparisons) > 1) for one, x in zip(comparisons, effects, strict=True)]
    final = claims.overall([part.word for part in parts])
    weakest = min((part for part in parts if part.word == final), key=lambda part: part.shown.low)
    opposed = [(part.comparison, part.effect) for part in parts if part.effect <= 0 and part.comparison.against]
    against = [f"{people(one.label)} minus {people(one.against)}: {effect:+.2f}" for one, effect in opposed]
    denied = f"The paper's own table contradicts it ({'; '.join(against)})." if against else ""
    missing = command and any(not part.comparison.tested and not part.comparison.absent for part in parts)
    blinded = f"{blind} The intervals alone would rule the claim out." if final == RULED_OUT and blind else ""
    first = f"First: {command}." if missing else ""
    said = [blinded, _counted(parts, final), f"{weakest.numbers}.", weakest.meaning, denied, first]
    about: dict[str, Any] = {"note": denied, "parts": tuple(part.line for part in parts)}
    about["because"] = " ".join(filter(None, said))
    about["brief"] = " ".join(filter(None, [blinded and blind, _counted(parts, final), weakest.brief]))
    if final == UNTESTED or blinded:
        return Verdict(UNTESTED, effect=only, **about)
    found = weakest.comparison
    about |= {"subject": found.label, "against": found.against, "unit": found.unit, "mde": found.mde, "n": found.seeds}
    about |= dict(zip(("estimate", "low", "high"), weakest.shown, strict=True)) | {"effect": weakest.effect}
    return Verdict(final, **about, level=0.95 if weakest.shown == found.interval else found.level)


def _counted(parts: Sequence[Part], final: str) -> str:
    """Return how many parts have which word, to stand before the one that decides; nothing of a single part."""
    if len(parts) == 1:
        return ""
    found = {word: sum(part.word == word for part in parts) for word in PRECEDENCE}
    said = [f"{n} {VERBS[word][n > 1]}" for word, n in sorted(found.items(), key=lambda one: -one[1]) if n]
    first, _, verb = said[0].partition(" ")
    whole = "Both" if len(parts) == 2 else f"All {first}"
    start = f"{first} of {len(parts)}" if len(said) > 1 else whole
    which = "For example," if final == UNTESTED else "The least favourable is"
    return f"{', '.join([f'{start} comparisons {verb}', *said[1:]])}. {which}"


def signed(estimate: float, low: float, high: float, digits: int | None = None) -> list[str]:
    """Return '+0.06', '+0.01' and '+0.12'; with a third digit where an end would otherwise read as 0 and is not."""
    digits = digits or (3 if any(0 < abs(end) < 0.005 for end in (low, high)) else 2)
    shown = (round(value, digits) + 0.0 for value in (estimate, low, high))  # -0.0 + 0.0 is 0.0: never "-0.00"
    return [f"{value:+.{digits}f}" for value in shown]


def in_words(estimate: float, low: float, high: float, unit: str = "", digits: int | None = None) -> str:
    """Return '+0.06 points (95 % CI +0.01 to +0.12)'; without a unit where it is another."""
    middle, lower, upper = signed(estimate, low, high, digits)
    return f"{middle}{' points' * (unit == 'points')} (95 % CI {lower} to {upper})"


def in_question(word: str, effect: float, margin: float, digits: int = 2) -> str:
    """Return the effect in question, to follow a verdict's numbers: ', where the paper has +1.60', or the margin."""
    if effect > 0:
        return f", where the paper has {effect:+.{digits}f}"
    asked = word in (RULED_OUT, INCONCLUSIVE) and not isnan(margin)
    return f", where {margin:g} would matter" if asked else ""


def effects_of(means: Mapping[str, float], pairs: Sequence[Pair]) -> list[float]:
    """Return the paper's effect for each pair, from the means that it prints; nan where it prints one of them only."""
    return [means.get(label, nan) - means.get(against, nan) for label, against in pairs]


# --- comparisons of training runs -----------------------------------------------------------------------------------


def paired_comparisons(
    scores: pd.DataFrame, metric: str, pairs: Iterable[Pair], seed: int = 0, absent: Mapping[Pair, str] | None = None
) -> dict[Pair, Comparison]:
    """Return comparisons that are corrected together: each first label of ``pairs`` less the second.

    Args:
        scores: lines of the evaluations with columns label, seed, query and the metric, of one task and decoding.
        metric: the column to compare, in [0, 1].
        pairs: of labels; one that has no runs gives a comparison that is not ``tested``, and counts for nothing.
        seed: of the resampling.
        absent: why the case of a pair does not occur: it is not compared, and counts for nothing.

    Raises:
        ValueError: runs that were tested on different questions.
    """
    pairs = list(dict.fromkeys(pairs))
    wanted = scores[scores["label"].isin([label for pair in pairs for label in pair])]
    matrices = {
        str(label): 100 * part.pivot(index="seed", columns="query", values=metric)
        for label, part in wanted.groupby("label", sort=False)
    }

    def evidence(own: pd.DataFrame, other: pd.DataFrame, comparison: Comparison) -> Evidence:
        if not own.columns.equals(other.columns):
            few = len(own.columns.symmetric_difference(other.columns))
            raise ValueError(
                f"{comparison.label} and {comparison.against} were tested on different questions ({few} that only one "
                "has): compare runs with the same eval_split and eval_limit"
            )
        a, b = own.to_numpy(), other.to_numpy()
        draws = statistics.training_draws(a, b, seed=seed)
        return Evidence(draws.interval, draws.p, lambda level: statistics.minimal_detectable(a, b, level=level))

    return _compared(matrices, pairs, evidence, absent=absent)


def spreads(
    scores: pd.DataFrame, metric: str, pairs: Iterable[Pair], absent: Mapping[Pair, str] | None = None
) -> dict[Pair, Comparison]:
    """Return whether the first label's runs vary less than the second's: ln of the ratio of standard deviations, second
    over first, over the seeds that both have (at least 3), corrected as in :func:`paired_comparisons`; ``mde`` stays
    nan."""
    runs = scores.groupby(["label", "seed"])[metric].mean().mul(100)

    def evidence(own: pd.Series, other: pd.Series, _: Comparison) -> Evidence | str:
        a, b = own.to_numpy(), other.to_numpy()
        if not (a.std() and b.std()):
            return " (one does not vary)"
        same = np.ptp(a - b) < 1e-9  # such as two methods that are one where rewards are right or wrong
        p = 1.0 if same else statistics.spread_p(b, a)
        return Evidence(lambda level: Interval(*map(log, statistics.spread_ratio(b, a, level))), p)

    what = "ln of the standard deviation of {against} over that of {label}"
    each = {str(label): runs[label] for label in runs.index.unique("label")}
    return _compared(each, pairs, evidence, what, "ln of a ratio", fewest=3, absent=absent)


def by_seed(figures: pd.DataFrame, pairs: Iterable[Pair], what: str) -> dict[Pair, Comparison]:
    """Return comparisons of a figure of each run, such as its entropy, corrected as in :func:`paired_comparisons`.

    Args:
        figures: label, seed and value, a line per run.
        pairs: of labels.
        what: the figure, with its unit.

    The interval is Student's, over the seeds that both have (at least 2); where all of them differ by the same there is
    nothing to tell it by.
    """
    wide = figures.pivot(index="seed", columns="label", values="value")

    def evidence(own: pd.Series, other: pd.Series, _: Comparison) -> Evidence | str:
        gaps = (own - other).to_numpy()
        if not np.ptp(gaps):
            return ""
        test, mean = ttest_1samp(gaps, 0), float(gaps.mean())
        return Evidence(lambda level: Interval(mean, *map(float, test.confidence_interval(level))), float(test.pvalue))

    each = {str(label): wide[label].dropna() for label in wide}
    return _compared(each, pairs, evidence, f"{what}, {{label}} minus {{against}}", what)


def _compared(
    each: Mapping[str, Any],
    pairs: Iterable[Pair],
    evidence: Callable[..., Evidence | str],
    what: str = "",
    unit: str = "points",
    fewest: int = 2,
    absent: Mapping[Pair, str] | None = None,
) -> dict[Pair, Comparison]:
    """Compare what labels have at the seeds of both: by ``evidence``, or by no test where that says why."""
    found: dict[Pair, tuple[Comparison, Evidence]] = {}
    every: dict[Pair, Comparison] = {}
    for label, against in dict.fromkeys(pairs):
        own, other = (each.get(name, pd.Series(dtype=float)) for name in (label, against))
        common = sorted({*own.index} & {*other.index})
        enough, same = len(common) >= fewest, {*own.index} == {*other.index}
        said = f"{len(own)} seeds each" if same else f"{len(own)} and {len(other)} seeds"
        if not (same and enough):
            said += f": compared on {len(common)}" if enough else ": cannot be compared"
        named = what.format(label=people(label), against=people(against))
        why = (absent or {}).get((label, against), "")
        comparison = Comparison(label, against, len(common), said, what=named, unit=unit, absent=why)
        few = " (3 are needed)" if fewest > 2 else ""
        made = evidence(own.loc[common], other.loc[common], comparison) if enough and not why else few
        if isinstance(made, Evidence):
            found[label, against] = comparison, made
            every[label, against] = comparison
        else:
            every[label, against] = replace(comparison, compared=f"{said}{made}")  # also where it is absent
    return every | together(found)


def differences(
    scores: pd.DataFrame,
    metric: str,
    against: str | Mapping[str, str] = "grpo",
    margin: float | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Return one metric of every kind of run and its difference from a base, in per cent and points, a row per label.

    Args:
        scores: lines of the evaluations with columns label, seed, query and the metric, of one task and decoding.
        metric: the column to compare, in [0, 1].
        against: the base of all labels, or of each.
        margin: the largest difference that does not matter, in points (:func:`gcpo.reports.margins.margins`).
        seed: of the resampling.

    Returns:
        label, seeds (how many it has), mean and std (over these; n - 1), each (their scores), gaps (those less the
        base's, of the seeds that both have), against, compared (how many seeds each has, and on how many they are
        compared), difference with low and high (95 %, paired by seed and question), p (Holm, within this table), mde
        (the difference detectable with 80 % power after Holm), and equivalent (whether the interval lies within the
        margin). What too few seeds cannot tell is missing.
    """
    runs = scores.groupby(["label", "seed"], sort=False)[metric].mean().mul(100)
    labels = list(dict.fromkeys(scores["label"]))
    bases = {label: against if isinstance(against, str) else against.get(label, label) for label in labels}
    found = paired_comparisons(scores, metric, [pair for pair in bases.items() if pair[0] != pair[1]], seed)
    rows = []
    for label, base in bases.items():
        own, one = runs[label], found.get((label, base), Comparison(label, "", 0, ""))
        gaps = (own - runs[base]).dropna() if one.seeds else own[:0]
        same = statistics.equivalent(*one.interval[1:], margin) if one.tested and margin is not None else None
        row = {"label": label, "seeds": len(own), "mean": own.mean(), "std": own.std(ddof=1)}
        row |= {"each": own.round(2).tolist(), "gaps": gaps.round(2).tolist()}
        row |= {"against": one.against, "compared": one.compared}
        row |= dict(zip(("difference", "low", "high"), one.interval, strict=True))
        rows.append({**row, "p": one.p, "mde": one.mde, "equivalent": same})
    return pd.DataFrame(rows)
