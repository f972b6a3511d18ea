"""The ledger: the papers' claims (``claims.yaml``) joined by id with the verdicts that notebooks reached on them."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from gcpo import paths
from gcpo.reports import records
from gcpo.reports.report import REAL, WORLDS, read_as
from gcpo.reports.verdicts import NUMBERS, RECORD, SHOWN, UNTESTED, overall
from gcpo.runs.params import profile_name
from gcpo.tasks import get_task

CLAIMS = Path(__file__).parents[1] / "claims.yaml"
PAPERS = {"gcpo": "GCPO", "seed_grpo": "SEED-GRPO", "egpo": "EGPO", "cw_grpo": "CW-GRPO"}
Kind = Literal["finding", "theorem", "definition"]
Scope = Literal["theorem", "toy", "printed", "embedded world", "real model"]
REWARDED = {"question answering": "f1", "mathematics": "accuracy"}  # by which metric each kind of task is judged
DECIDED = [*NUMBERS, *"power realised parts because task heading notebook".split()]  # columns of a verdict that decided
LEDGER = [*"id paper kind scope place quote verdict fixed changed beside note question check word".split(), *DECIDED]


class Claim(BaseModel):
    """One claim of a paper.

    Attributes:
        id: its name here.
        paper: a key of :data:`PAPERS`.
        place: in the paper.
        quote: the paper's words, 25 at most.
        kind: a finding, a theorem, or a definition, which is true by construction or hedged by "may".
        scope: the subject of the claim, which says what can decide it.
        about: the kind of task that the sentence, or the table it names, is about; none where it is about no kind or
            about both. Verdicts on other tasks stand beside it and decide nothing.
        checks: ids of the verdicts that decide it together; its own id unless others are named.
        changed: how its check was changed after its runs had been compared: the commit, and both verdicts.
        note: a caveat on the check.
        question: of a claim that the README shows: a newcomer's question.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    paper: Literal["gcpo", "seed_grpo", "egpo", "cw_grpo"]
    place: str
    quote: str
    kind: Kind
    scope: Scope
    about: Literal["question answering", "mathematics"] | None = None
    checks: tuple[str, ...] = Field(default_factory=lambda known: (known["id"],))
    changed: str = ""
    note: str = ""
    question: str = ""


def claims(path: Path = CLAIMS) -> list[Claim]:
    """Return the claims as declared.

    Raises:
        ParameterError: an entry that is no :class:`Claim`; with file, its place (from 0), key and value.
    """
    return read_as(path, list[Claim])


def read_verdicts(profile: str, reference: bool = False) -> pd.DataFrame:
    """Return verdicts as notebooks wrote them, in order, as text: the columns of
    :data:`gcpo.reports.verdicts.RECORD`, and profile, which is empty where no runs decided.

    Those of read notebooks come first, then those of the reports on a profile's runs, this machine's or its
    reference's, and beside a reference those of both worlds and of the real model.
    """
    name = profile_name(profile)
    folders = {name: paths.OUTPUTS / name / "reports"}
    if reference:
        folders = {each: paths.REFERENCE / each for each in dict.fromkeys([name, *WORLDS, REAL])}
    files = [("", path) for path in sorted(paths.VERDICTS.glob("*.csv"))]
    files += [(each, path) for each, folder in folders.items() for path in sorted(folder.glob("verdicts_*.csv"))]
    nothing = pd.DataFrame(columns=[*RECORD, "profile"])
    parts = [pd.read_csv(path, dtype=str, keep_default_na=False).assign(profile=each) for each, path in files]
    return pd.concat([nothing, *parts], ignore_index=True)[[*nothing]].fillna("")


def source(verdicts: pd.DataFrame, profile: str, reference: bool = False) -> str:
    """Return whose runs decided the verdicts of :func:`read_verdicts`, in words that tables and figures carry."""
    beside = {*verdicts["profile"]} - {profile_name(profile)}
    # The worlds' runs decide together.
    others = [*WORLDS.values()] * bool(beside & {*WORLDS}) + ["the real model"] * (REAL in beside)
    return " and of ".join([records.source(profile, reference), *others])


def reached(declared: Iterable[Claim], verdicts: pd.DataFrame) -> Iterator[tuple[Claim, list[Any], list[Any]]]:
    """Yield every claim with the verdicts on its checks: those that decide it, and those on tasks that it is not about.

    Claims and verdicts are joined by id. A check that no notebook has reached is "not tested".
    """
    known = {check: [*found.itertuples()] for check, found in verdicts.groupby("id", sort=False)}
    for claim in declared:
        every = [line for check in claim.checks for line in known.get(check, [_unreached(check)])]
        metric = REWARDED.get(claim.about or "")  # of the tasks that it is about
        lines = [line for line in every if not (metric and line.task) or get_task(line.task).reward_metric == metric]
        yield claim, lines, [line for line in every if line not in lines]


def _unreached(check: str) -> Any:
    nothing = dict.fromkeys([*RECORD, "profile"], "")
    return SimpleNamespace(**nothing | {"id": check, "verdict": UNTESTED, "because": "not executed on these runs"})


def fixed(lines: Sequence[Any], changed: str = "") -> str:
    """Return whether the rules that decide a claim are older than its runs: "yes" of the real model's, "no", or ""
    where no runs decided; "but for pooling" of the worlds', each of which had its own verdict until all were there."""
    profiles = {line.profile for line in lines} - {""}
    older = "yes" if profiles == {REAL} else "but for pooling" if profiles <= {*WORLDS} else "no"
    return ("no" if changed else older) if profiles else ""


def ledger(declared: Iterable[Claim], verdicts: pd.DataFrame, every: bool = False) -> pd.DataFrame:
    """Return every claim with its verdict, a row each, or with ``every`` a row for each verdict on its checks.

    Columns are :data:`LEDGER`: verdict is one word for all its checks, fixed whether before the data (:func:`fixed`),
    beside the words on tasks that the claim is not about, which decide nothing; check, word and :data:`DECIDED` are of
    the first verdict that decided it, or of this one, and empty where a claim has no check.
    """
    rows = []
    for claim, lines, beside in reached(declared, verdicts):
        word = overall([line.verdict for line in lines])
        row = claim.model_dump() | {"paper": PAPERS[claim.paper], "verdict": word}
        row["fixed"] = fixed(lines, claim.changed)
        row["beside"] = "; ".join(dict.fromkeys(f"{line.task}: {line.verdict}" for line in beside))
        shown = [line for line in lines if line.verdict == word] or [_unreached("")]
        for line in [*lines, *beside] if every else shown[:1]:
            found = {"check": line.id, "word": line.verdict}
            rows.append(row | found | {name: getattr(line, name) for name in DECIDED})
    return pd.DataFrame(rows, columns=LEDGER)


def counts(table: pd.DataFrame, by: str = "paper") -> pd.DataFrame:
    """Return how many claims have which verdict: of each kind, findings first, a row per paper (or scope).

    Columns: kind, paper (or scope), a column for each verdict that there is, and claims.
    """
    order = [word for word in SHOWN if word in set(table["verdict"])]
    wide = pd.crosstab([table["kind"], table[by]], table["verdict"])[order]
    rows = [(kind, value) for kind in get_args(Kind) for value in table[by].unique() if (kind, value) in wide.index]
    return wide.loc[rows].assign(claims=wide.sum(axis=1)).rename_axis(columns=None).reset_index()
