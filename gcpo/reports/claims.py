"""Verdicts on claims: five words, decided by intervals and never typed, as notebooks show them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import nan
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.display import display

from gcpo import io
from gcpo.errors import nearest

HOLDS, FAILS, RULED_OUT, INCONCLUSIVE, UNTESTED = "holds", "fails", "ruled out", "inconclusive", "not tested"
# A claim gets the first of these that any of its parts has.
PRECEDENCE = (FAILS, RULED_OUT, UNTESTED, INCONCLUSIVE, HOLDS)
DEPENDS = "It depends on the checkpoint"  # begins the words of a verdict that policies differ in
DIFFERS = "differs"  # of a claim that two worlds answer by two of these words
SHOWN = (HOLDS, INCONCLUSIVE, RULED_OUT, FAILS, UNTESTED, DIFFERS)  # their order in a table
WORDS = {True: HOLDS, False: FAILS, None: INCONCLUSIVE}  # by what a check returns
NUMBERS = ["difference", "low", "high", "paper_effect", "mde", "seeds"]
RECORD = ["id", "label", "because", *NUMBERS, *"subject against estimate level unit n effect parts note brief".split()]
RECORD += ["power", "place", "task", "heading", "notebook", "records"]  # the columns of a file of verdicts


@dataclass(frozen=True)
class Verdict:
    """Verdict of runs on a claim, with its evidence.

    Attributes:
        label: "holds", "fails", "ruled out", "inconclusive" or "not tested".
        because: the comparisons that decided it, in words; or why there was none.
        estimate: of the weakest of these, as the claim has it: above 0 is the claimed side.
        low: its interval, 95 % alone or over the family it was corrected in.
        high: likewise.
        effect: the paper's own, in the same unit, where it prints one.
        mde: the smallest difference that these seeds would detect with a probability of 80 %, after correction.
        n: how many seeds the comparison was made on.
        subject: what is claimed to be above.
        against: what it is compared with.
        level: of the interval from low to high; nan where no comparison decided.
        unit: of the estimate.
        parts: the comparisons of a joint claim, each with its label and numbers.
        note: a caveat.
        brief: the same as ``because`` for a page of few claims, with one interval; "" where that is brief itself.
        power: how often such runs would say "holds" of an effect that matters, a sentence of ``because``; or "".
    """

    label: str
    because: str
    estimate: float = nan
    low: float = nan
    high: float = nan
    effect: float = nan
    mde: float = nan
    n: int = 0
    subject: str = ""
    against: str = ""
    level: float = nan
    unit: str = ""
    parts: tuple[str, ...] = ()
    note: str = ""
    brief: str = ""
    power: str = ""


def overall(words: Collection[str]) -> str:
    """The word for a claim of several parts; "not tested" of one without any."""
    return next((word for word in PRECEDENCE if word in words), UNTESTED)


class Verdicts:
    """The verdicts of a notebook, shown as they are reached or kept for a table, and written as records at the end.

    Args:
        notebook: the notebook's name, "21_table1".
        records: whose runs decide them, as ``gcpo.records.source`` says it; None where no runs do.
    """

    def __init__(self, notebook: str, records: str | None = None) -> None:
        self.notebook, self.records = notebook, records
        self.rows: list[tuple[dict[str, str], Verdict]] = []

    def __call__(
        self, check: str, place: str, heading: str, decided: bool | Verdict | None, because: str = "", task: str = ""
    ) -> None:
        """Show and keep a verdict; arguments as in :meth:`add`."""
        self.add(check, place, heading, decided, because, task)
        self._display(*self.rows[-1])

    def add(
        self, check: str, place: str, heading: str, decided: bool | Verdict | None, because: str = "", task: str = ""
    ) -> None:
        """Keep a verdict without showing it.

        Args:
            check: the id that ``claims.yaml`` knows it by: its claim's, where it alone decides one.
            place: the place in the paper.
            heading: the claim in a few words, which follows its verdict ("Holds: entropy is blind to distance");
                nothing is joined by it.
            decided: a verdict that :func:`decide` made of runs; or what another check returned, None when the data
                cannot decide.
            because: the numbers that decided it; after the verdict's own words where it has some.
            task: what it was decided on, which the place is followed by; empty for what is about no task.
        """
        if not isinstance(decided, Verdict):
            decided = Verdict(WORDS[None if decided is None else bool(decided)], "")
        verdict = replace(decided, because=f"{decided.because} {because}".strip())
        place = f"{place}, {task}" if task else place
        self.rows.append(({"id": check, "place": place, "task": task, "heading": heading}, verdict))

    def show(self, check: str, task: str = "") -> None:
        """Show the kept verdicts of a check, each as a sentence: on one task, or on all.

        Raises:
            ValueError: no verdict with this id was kept.
        """
        known = [named["id"] for named, _ in self.rows]
        if check not in known:
            raise ValueError(f"{self.notebook} has no verdict {check!r}.{nearest(check, known)}")
        for named, verdict in self.rows:
            if named["id"] == check and task in ("", named["task"]):
                self._display(named, verdict)

    @staticmethod
    def _display(named: dict[str, str], verdict: Verdict) -> None:
        text = f"**{verdict.label.capitalize()}: {named['heading']}** ({named['place']}). {verdict.because}"
        if len(verdict.parts) > 1:
            text += "\n\n" + "\n".join(f"- {part}" for part in verdict.parts)
        display({"text/markdown": text, "text/plain": text.replace("**", "")}, raw=True)

    def by_task(self) -> pd.DataFrame:
        """Return the word of every verdict: a row per claim and place, a column per task."""
        rows: dict[tuple[str, str], dict[str, str]] = {}
        for named, verdict in self.rows:
            key = named["heading"], named["place"].removesuffix(f", {named['task']}")
            rows.setdefault(key, {})[named["task"] or "verdict"] = verdict.label
        return pd.DataFrame(rows).T.fillna("").rename_axis(["claim", "place"])

    def table(self) -> pd.DataFrame:
        """One row per verdict, in order: source, claim, verdict; of runs also difference, low, high, paper_effect, mde
        and seeds, and whose records they are."""
        found = self._found().rename(columns={"place": "source", "heading": "claim", "label": "verdict"})
        if self.records is None:
            return found.set_index("source")[["claim", "verdict"]]
        found[NUMBERS] = found[NUMBERS].astype(float).round(3)
        found["seeds"] = found["seeds"].where(found["seeds"] > 0).astype("Int64")  # 0 where none was compared
        return found.set_index("source")[["claim", "verdict", *NUMBERS, "records"]]

    def _found(self) -> pd.DataFrame:
        """The verdicts as records, a column for each of :data:`RECORD`."""
        rows = [{**asdict(verdict), **named} for named, verdict in self.rows]
        known = [*(field.name for field in fields(Verdict)), "id", "place", "task", "heading"]
        found = pd.DataFrame(rows, columns=known)
        found = found.assign(difference=found["estimate"], paper_effect=found["effect"], seeds=found["n"])
        compared = found["level"].notna()
        found[["estimate", "effect"]] = found[["estimate", "effect"]].where(compared)
        found["n"] = found["n"].where(compared & (found["n"] > 0)).astype("Int64")
        found["parts"] = found["parts"].map("\n".join)
        return found.assign(notebook=self.notebook, records=self.records)[RECORD]

    def write(self, folder: Path | str | None) -> pd.DataFrame:
        """Write the verdicts as records into a folder, a CSV that the ledger reads, and return :meth:`table`; None
        writes nothing."""
        if folder is not None:
            name = self.notebook[:2] if self.records is None else f"verdicts_{self.notebook[:2]}"
            io.write(Path(folder) / f"{name}.csv", self._found().to_csv(index=False, float_format="%.6g"))
        return self.table()


def by_setting(lines: Sequence[tuple[Any, ...]], names: Sequence[str]) -> pd.DataFrame:
    """Verdicts on one claim under several settings, a column each, and whether the word depends on the setting.

    Args:
        lines: what tells the rows apart, then the setting, then the verdict.
        names: of all but the verdict, the setting's last.

    Returns:
        the rows, their verdicts ("holds: +1.2 (+0.3 to +2.1)"), and depends: "yes" where two settings decide
        differently; "no" where all decide, and alike; "inconclusive" where one does not decide; "not tested" where one
        was not.
    """
    table = pd.DataFrame(lines, columns=[*names, "verdict"])
    table["word"] = [verdict.label for verdict in table["verdict"]]
    table["shown"] = [
        v.label if v.label == UNTESTED else f"{v.label}: {v.estimate:+.1f} ({v.low:+.1f} to {v.high:+.1f})"
        for v in table["verdict"]
    ]
    wide = table.groupby([*names], sort=False)[["word", "shown"]].first().unstack(names[-1], sort=False)
    depends = [_depends(set(words)) for words in wide["word"].to_numpy()]
    return pd.DataFrame(wide["shown"]).assign(depends=depends).rename_axis(columns=None).reset_index()


def _depends(words: set[str]) -> str:
    if UNTESTED in words:
        return UNTESTED
    if len(words - {INCONCLUSIVE}) > 1:
        return "yes"
    return INCONCLUSIVE if INCONCLUSIVE in words else "no"
