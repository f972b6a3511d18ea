"""The ledger: the papers' claims (``claims.yaml``), each beside the verdicts that notebooks reached on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pandas as pd

from gcpo import paths
from gcpo.errors import nearest
from gcpo.reports.claims import MIME, SHOWN, UNTESTED, overall
from gcpo.runs.params import ParameterError, profile_name, read_yaml

CLAIMS = Path(__file__).parents[1] / "claims.yaml"
PAPERS = {"gcpo": "GCPO", "seed_grpo": "SEED-GRPO", "egpo": "EGPO", "cw_grpo": "CW-GRPO"}
SCOPES = ("theorem", "toy", "paper", "embedded world", "real model")
LONGEST = 25  # words of a quote
NO_CHECK = "No check decides it."


@dataclass(frozen=True)
class Claim:
    """One claim of a paper.

    Attributes:
        id: its name here.
        paper: a key of :data:`PAPERS`.
        place: in the paper.
        quote: the paper's words, 25 at most.
        scope: what it is about, and so what can decide it: one of :data:`SCOPES`.
        checks: names of the verdicts that decide it together, "03: CD can reach 1": the notebook, and its claim.
        note: what a reader should know of the check.
        question: of a claim that the README shows: what a newcomer would ask.
    """

    id: str
    paper: str
    place: str
    quote: str
    scope: str
    checks: tuple[str, ...]
    note: str = ""
    question: str = ""


def claims(path: Path = CLAIMS) -> list[Claim]:
    """The claims as declared.

    Raises:
        ParameterError: in one line with file and claim: no list of mappings, a key that is missing or unknown, an id
            given twice, an unknown paper or scope, or a quote of more than 25 words.
    """
    entries = read_yaml(path)
    if not isinstance(entries, list):
        raise ParameterError(f"{path}: expected a list of claims, got {type(entries).__name__}.")
    made = [_claim(entry, f"{path}: claim {number}") for number, entry in enumerate(entries, start=1)]
    seen: set[str] = set()
    for claim in made:
        if claim.id in seen:
            raise ParameterError(f"{path}: {claim.id}: two claims have this id.")
        seen.add(claim.id)
    return made


def _claim(entry: Any, where: str) -> Claim:
    if not isinstance(entry, dict):
        raise ParameterError(f"{where}: expected a mapping, got {entry!r:.60}.")
    where += f" ({entry.get('id', 'no id')})"
    known = {field.name: field.default is MISSING for field in fields(Claim)}
    for key in entry:
        if key not in known:
            raise ParameterError(f"{where}: {key}: no such key.{nearest(str(key), known)}")
    if missing := [key for key, needed in known.items() if needed and key not in entry]:
        raise ParameterError(f"{where}: {', '.join(missing)} missing.")
    for key, valid in (("paper", PAPERS), ("scope", SCOPES)):
        if entry[key] not in valid:
            raise ParameterError(f"{where}: {key}: no such one as {entry[key]!r}.{nearest(str(entry[key]), valid)}")
    checks = entry["checks"]
    if not isinstance(checks, list) or not all(isinstance(check, str) for check in checks):
        raise ParameterError(f"{where}: checks: expected a list of names of verdicts, got {checks!r:.60}.")
    if (length := len(str(entry["quote"]).split())) > LONGEST:
        raise ParameterError(f"{where}: the quote has {length} words, {LONGEST} at most.")
    words: dict[str, Any] = {key: " ".join(str(value).split()) for key, value in entry.items()}
    return Claim(**{**words, "checks": tuple(checks)})


def reached(notebooks: Iterable[Path]) -> pd.DataFrame:
    """The verdicts in the outputs of executed notebooks, in order: check ("03: CD can reach 1"), notebook, and what
    :class:`gcpo.reports.claims.Verdicts` keeps of each."""
    rows = []
    for path in notebooks:
        for cell in nbformat.read(path, as_version=4).cells:
            for output in cell.get("outputs", ()):
                if row := output.get("data", {}).get(MIME):
                    rows.append({"check": f"{path.stem[:2]}: {row['claim']}", "notebook": path.stem, **row})
    return pd.DataFrame(rows, columns=None if rows else ["check", "notebook", "source", "claim", "verdict", "because"])


def executed(profile: str, reference: bool = False) -> list[Path]:
    """Where the verdicts of a profile are: read notebooks as committed, and report notebooks as last executed on these
    runs; on the reference's, as committed (or, while a reference is published, as just executed for it)."""
    shown = sorted(paths.NOTEBOOKS.glob("[0-8][0-9]_*.ipynb"))
    reports = paths.OUTPUTS / profile_name(profile) / "reports"
    places = [paths.REFERENCE, paths.NOTEBOOKS] if reference else [reports]
    found = []
    for path in shown:
        own = [paths.NOTEBOOKS] if path.stem < "2" else places
        found += [place / path.name for place in own if (place / path.name).is_file()][:1]
    return found


def ledger(declared: Iterable[Claim], verdicts: pd.DataFrame) -> pd.DataFrame:
    """Every claim with its verdict, a row each: id, paper, scope, place, quote, verdict (one word for all its checks,
    by :func:`gcpo.reports.claims.overall`), because (each check's verdict, with where and what decided it), note,
    question, found (place and numbers of the checks that decided, and the words of the others) and notebook (of the
    first).

    A check that no notebook has reached is "not tested", and so is a claim without any.
    """
    by_check = {str(check): part for check, part in verdicts.groupby("check", sort=False)}
    rows = []
    for claim in declared:
        said = [line for check in claim.checks for line in _lines(check, by_check.get(check))]
        word = overall([line.word for line in said])
        decided, others = ([line for line in said if (line.word == word) == same] for same in (True, False))
        rows.append(
            {
                "id": claim.id,
                "paper": PAPERS[claim.paper],
                "scope": claim.scope,
                "place": claim.place,
                "quote": claim.quote,
                "verdict": word,
                "because": " / ".join(map(str, said)) or NO_CHECK,
                "note": claim.note,
                "question": claim.question,
                "found": " ".join(
                    [f"{line.source}: {line.because}" for line in decided]
                    + [f"But {line.source}, {line.check[4:]}: {line.word}." for line in others]
                ),
                "notebook": decided[0].notebook if decided else "",
            }
        )
    return pd.DataFrame(rows)


class _Line(NamedTuple):
    check: str
    word: str
    source: str = "its notebook"
    because: str = "not executed on these runs"
    notebook: str = ""

    def __str__(self) -> str:
        if not self.notebook:
            return f"{self.check}: {self.because}"
        return f"{self.check} ({self.source}): {self.word}. {self.because}"


def _lines(check: str, found: pd.DataFrame | None) -> list[_Line]:
    if found is None:
        return [_Line(check, UNTESTED)]
    columns = ["verdict", "source", "because", "notebook"]
    return [_Line(check, *map(str, row)) for row in found[columns].itertuples(index=False)]


def unknown(declared: Iterable[Claim], verdicts: pd.DataFrame) -> list[str]:
    """Checks that no verdict has the name of; a line each, with the claim and the nearest name."""
    known = set(verdicts["check"])
    return [
        f"{claim.id}: no notebook gives the verdict {check!r}.{nearest(check, known).split(' Valid')[0]}"
        for claim in declared
        for check in claim.checks
        if check not in known
    ]


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of :func:`ledger` as a page shows them: scope by scope, with what is asked, quoted, found and noted."""
    ordered = table.sort_values("scope", key=lambda scope: scope.map(SCOPES.index), kind="stable")
    return ordered[["scope", "place", "quote", "verdict", "because", "note"]]


def counts(table: pd.DataFrame, by: str = "paper") -> pd.DataFrame:
    """How many claims have which verdict, a row per paper (or scope), with their sum."""
    order = [word for word in SHOWN if word in set(table["verdict"])]
    wide = pd.crosstab(table[by], table["verdict"])[order].reindex(table[by].unique())
    return wide.assign(claims=wide.sum(axis=1)).rename_axis(columns=None).reset_index()
