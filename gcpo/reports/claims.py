"""Verdicts on claims: five words, decided by intervals and never typed, as notebooks show them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, TypeVar

import pandas as pd
from IPython.display import display

from gcpo.reports.compare import Comparison, Pair

HOLDS, FAILS, EXCLUDED, OPEN, UNTESTED = "holds", "does not hold", "effect excluded", "cannot tell", "not tested"
PRECEDENCE = (FAILS, UNTESTED, EXCLUDED, OPEN, HOLDS)  # of a claim's parts, the first that one says is said of all
SHOWN = (HOLDS, OPEN, EXCLUDED, FAILS, UNTESTED)  # their order in a table
WORDS = {True: HOLDS, False: FAILS, None: OPEN}  # by what a check returns
K = TypeVar("K")
MIME = "application/vnd.gcpo.verdict+json"  # of a verdict in a notebook's outputs, for the ledger
NUMBERS = ("difference", "low", "high", "paper_effect", "mde", "seeds")


@dataclass(frozen=True)
class Verdict:
    """What runs decide about a claim, with what decided it.

    Attributes:
        word: "holds", "does not hold", "effect excluded", "cannot tell" or "not tested".
        because: the comparison that decided it, in words; or why there was none.
        difference: of that comparison, as the claim has it: above 0 is the claimed side. Points, or the comparison's
            unit.
        low: its interval, 95 % over the family it was corrected in.
        high: likewise.
        paper_effect: the paper's own difference, where it prints one.
        mde: the smallest difference that these seeds would detect with a probability of 80 %, at that interval's level.
        seeds: that the comparison was made on.
    """

    word: str
    because: str
    difference: float = nan
    low: float = nan
    high: float = nan
    paper_effect: float = nan
    mde: float = nan
    seeds: int = 0


def word(low: float, high: float, paper_effect: float = nan) -> str:
    """The word for an interval of a difference whose claimed side is above 0.

    "effect excluded" where it holds 0 and lies below the paper's effect; never without an effect on the claimed side.
    """
    if low > 0:
        return HOLDS
    if high < 0:
        return FAILS
    return EXCLUDED if paper_effect > 0 and high < paper_effect else OPEN


def overall(words: Collection[str]) -> str:
    """The word for a claim of several parts; "not tested" of one without any."""
    return next((word for word in PRECEDENCE if word in words), UNTESTED)


def deciding(words: Mapping[K, str], lows: Mapping[K, float]) -> tuple[str, K]:
    """The word that decides a claim of several parts, and of those that say it the part furthest from its side."""
    final = overall(words.values())
    return final, min((part for part, said in words.items() if said == final), key=lambda part: lows[part])


def decide(
    comparisons: Sequence[Comparison],
    paper_effects: Sequence[float] = (),
    closed: str | None = None,
    command: str = "",
) -> Verdict:
    """The verdict on a claim: the first label of every comparison is above the second.

    Args:
        comparisons: all must be on the claimed side; corrected together (:func:`gcpo.reports.compare.family`).
        paper_effects: the paper's difference for each, nan where it prints none; none at all if it prints none.
        closed: why the gate lets no verdict pass, or None.
        command: what makes the runs that are missing.

    One that does not hold decides it; then a missing one; then they all hold, or the effect of one is excluded. The
    numbers are those of the comparison that decided.
    """
    if not comparisons:
        raise ValueError("a verdict needs a comparison: name the pairs of labels that the claim is about")
    effects = [*paper_effects] or [nan] * len(comparisons)
    if len(effects) != len(comparisons):
        raise ValueError(f"{len(effects)} effects for {len(comparisons)} comparisons: give one each, nan for none")
    only = effects[0] if len(effects) == 1 else nan
    if closed:
        return Verdict(UNTESTED, closed, paper_effect=only)
    words = {
        comparison: word(*comparison.corrected[1:], effect) if comparison.tested else UNTESTED
        for comparison, effect in zip(comparisons, effects, strict=True)
    }
    final, found = deciding(words, {comparison: comparison.corrected.low for comparison in comparisons})
    if final == UNTESTED:
        missing = "; ".join(f"{c.label} and {c.against}: {c.compared}" for c in comparisons if not c.tested)
        because = f"Runs are missing ({missing})." + (f" First: {command}." if command else "")
        return Verdict(UNTESTED, because, paper_effect=only)
    effect = effects[comparisons.index(found)]
    against = [f"{c.label} minus {c.against}: {x:+.2f}" for c, x in zip(comparisons, effects, strict=True) if x <= 0]
    denied = f" The paper's own table contradicts it ({'; '.join(against)})." if against else ""
    return Verdict(
        final, _because(found, effect) + denied, *found.corrected, paper_effect=effect, mde=found.mde, seeds=found.seeds
    )


def _because(found: Comparison, effect: float) -> str:
    estimate, low, high = found.corrected
    share = f", corrected for {found.family} comparisons" if found.family > 1 else ""
    text = (
        f"{found.what or f'{found.label} minus {found.against}, points'}: {signed(estimate, low, high)} "
        f"(95 %{share}; {found.compared})"
    )
    if effect == effect:
        text += f"; the paper's effect: {effect:+.2f}"
    if found.mde == found.mde:
        text += f"; detectable: {found.mde:.2f}"
    return f"{text}."


def signed(estimate: float, low: float, high: float) -> str:
    """'+0.06 [+0.01, +0.12]'; with a third digit where an end would otherwise read as 0 and is not."""
    digits = 3 if any(0 < abs(end) < 0.005 for end in (low, high)) else 2
    return f"{estimate:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


class Verdicts:
    """The verdicts of a notebook: each is shown as it is reached, all of them in a table at the end.

    `records` is whose runs decide them, as ``gcpo.records.source`` says it; None where no runs do.
    """

    def __init__(self, records: str | None = None) -> None:
        self.rows: list[dict[str, str | float]] = []
        self.records = records

    def __call__(self, source: str, claim: str, holds: bool | Verdict | None, because: str = "") -> None:
        """Show and keep a verdict.

        Args:
            source: the place in the paper.
            claim: what is claimed.
            holds: what :func:`decide` made of runs; or what another check returned, None when the data cannot decide.
            because: what decided it, in numbers; after the verdict's own words where it has some.
        """
        if isinstance(holds, Verdict):
            said, because = holds.word, f"{holds.because} {because}".strip()
            numbers = {name: getattr(holds, name) for name in NUMBERS}
        else:
            said, numbers = WORDS[None if holds is None else bool(holds)], {}
        text = f"**Verdict on “{claim}” ({source}): {said}.** {because}"
        row = {"source": source, "claim": claim, "verdict": said}
        shown = {"text/markdown": text, "text/plain": text.replace("**", ""), MIME: {**row, "because": because}}
        display(shown, raw=True)
        self.rows.append({**row, **numbers})

    def table(self) -> pd.DataFrame:
        """One row per verdict, in order: source, claim, verdict; of training also difference, low, high, paper_effect,
        mde and seeds; and, of runs, whose records they are."""
        table = pd.DataFrame(self.rows).set_index("source")
        numbers = [name for name in NUMBERS if name in table]
        table[numbers] = table[numbers].astype(float).round(3)
        if "seeds" in table:  # 0 where none was compared
            table["seeds"] = table["seeds"].where(table["seeds"] > 0).astype("Int64")
        return table if self.records is None else table.assign(records=self.records)


def by_setting(lines: Sequence[tuple[Any, ...]], names: Sequence[str]) -> pd.DataFrame:
    """Verdicts on one claim under several settings, a column each, and whether the word depends on the setting.

    Args:
        lines: what tells the rows apart, then the setting, then the verdict.
        names: of all but the verdict, the setting's last.

    Returns:
        the rows, their verdicts ("holds +1.2 [+0.3, +2.1]"), and depends: "yes" where two settings decide differently;
        "no" where all decide, and alike; "cannot tell" where one does not decide; "not tested" where one was not.
    """
    table = pd.DataFrame(lines, columns=[*names, "verdict"])
    table["word"] = [verdict.word for verdict in table["verdict"]]
    table["shown"] = [
        v.word if v.word == UNTESTED else f"{v.word} {v.difference:+.1f} [{v.low:+.1f}, {v.high:+.1f}]"
        for v in table["verdict"]
    ]
    wide = table.groupby([*names], sort=False)[["word", "shown"]].first().unstack(names[-1], sort=False)
    depends = [_depends(set(words)) for words in wide["word"].to_numpy()]
    return pd.DataFrame(wide["shown"]).assign(depends=depends).rename_axis(columns=None).reset_index()


def _depends(words: set[str]) -> str:
    if UNTESTED in words:
        return UNTESTED
    if len(words - {OPEN}) > 1:
        return "yes"
    return OPEN if OPEN in words else "no"


def effects_of(means: Mapping[str, float], pairs: Sequence[Pair]) -> list[float]:
    """The paper's effect for each pair, from the means that it prints; nan where it prints one of them only."""
    return [means.get(label, nan) - means.get(against, nan) for label, against in pairs]
