"""The ledger: the papers' claims (``claims.yaml``), each beside the verdicts that notebooks reached on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, get_args

import pandas as pd
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from gcpo import paths
from gcpo.errors import nearest
from gcpo.reports import records
from gcpo.reports.claims import DIFFERS, SHOWN, UNTESTED, overall
from gcpo.reports.evidence import in_question, in_words
from gcpo.reports.headline import WORLDS
from gcpo.reports.margins import margins
from gcpo.reports.names import people
from gcpo.runs.params import profile_name
from gcpo.runs.profiles import ParameterError, read_yaml
from gcpo.tasks import get_task

CLAIMS = Path(__file__).parents[1] / "claims.yaml"
PAPERS = {"gcpo": "GCPO", "seed_grpo": "SEED-GRPO", "egpo": "EGPO", "cw_grpo": "CW-GRPO"}
Kind = Literal["finding", "theorem", "definition"]
Scope = Literal["theorem", "toy", "printed", "embedded world", "real model"]
REWARDED = {"question answering": "f1", "mathematics": "accuracy"}  # by which metric each kind of task is judged
LONGEST = 25  # words of a quote
NO_CHECK, BESIDE = "No check decides it.", "Beside it, "
# Fields of a verdict's record that are read here.
COLUMNS = "id label because brief power parts place task heading notebook level profile".split()
COLUMNS += "subject against unit estimate low high effect".split()


def _short(quote: str) -> str:
    if (length := len(quote.split())) > LONGEST:
        raise ValueError(f"the quote has {length} words, {LONGEST} at most")
    return quote


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
        note: a caveat on the check.
        question: of a claim that the README shows: a newcomer's question.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    paper: Literal["gcpo", "seed_grpo", "egpo", "cw_grpo"]
    place: str
    quote: Annotated[str, AfterValidator(_short)]
    kind: Kind
    scope: Scope
    about: Literal["question answering", "mathematics"] | None = None
    checks: tuple[str, ...] = Field(default_factory=lambda known: (known["id"],))
    note: str = ""
    question: str = ""


def claims(path: Path = CLAIMS) -> list[Claim]:
    """The claims as declared.

    Raises:
        ParameterError: in one line with file, claim, key and value: the first entry that is no :class:`Claim`, or an id
            given twice.
    """
    entries = read_yaml(path)
    if not isinstance(entries, list):
        raise ParameterError(f"{path}: expected a list of claims, got {type(entries).__name__}.")
    declared = [_claim(entry, f"{path}: claim {number}") for number, entry in enumerate(entries, start=1)]
    for name, count in Counter(claim.id for claim in declared).items():
        if count > 1:
            raise ParameterError(f"{path}: {name}: two claims have this id.")
    return declared


def _claim(entry: Any, where: str) -> Claim:
    try:
        return Claim.model_validate(entry)
    except ValidationError as error:
        fault = error.errors()[0]
        name = f" ({entry.get('id', 'no id')})" if isinstance(entry, dict) else ""
        key = "".join(f" {part}:" for part in fault["loc"][:1])
        message = f"{fault['msg'].removeprefix('Value error, ')} (got {fault['input']!r:.60})."
        if fault["type"] == "extra_forbidden":
            message = f"no such key.{nearest(str(fault['loc'][0]), Claim.model_fields)}"
        raise ParameterError(f"{where}{name}:{key} {message}") from None


def read_verdicts(profile: str, reference: bool = False) -> pd.DataFrame:
    """Verdicts as notebooks wrote them, in order: of read notebooks, then of the reports on a profile's runs, this
    machine's or its reference's, and beside a reference those of both worlds. Columns: the fields of
    :class:`gcpo.reports.claims.Verdict`, as text, with id, place, heading, notebook, records and profile, which is
    empty where no runs decided."""
    name = profile_name(profile)
    folders = {name: paths.OUTPUTS / name / "reports"}
    if reference:
        folders = {each: paths.REFERENCE / each for each in dict.fromkeys([name, *WORLDS])}
    files = [("", path) for path in sorted(paths.VERDICTS.glob("*.csv"))]
    files += [(each, path) for each, folder in folders.items() for path in sorted(folder.glob("verdicts_*.csv"))]
    parts = [pd.read_csv(path, dtype=str, keep_default_na=False).assign(profile=each) for each, path in files]
    every = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    return every.reindex(columns=[*dict.fromkeys([*COLUMNS, *every])]).fillna("")  # older files have fewer columns


def source(verdicts: pd.DataFrame, profile: str, reference: bool = False) -> str:
    """Whose runs decided verdicts that :func:`read_verdicts` returned, in words that tables and figures carry."""
    shown = {*verdicts["profile"]} - {profile_name(profile)}
    worlds = [world for name, world in WORLDS.items() if name in shown]
    return " and of ".join([records.source(profile, reference), *worlds])


def decided(lines: Sequence[Any]) -> tuple[str, dict[str, str]]:
    """Return the word for a claim, and its word in each world whose runs were asked.

    A verdict of no world counts in both. The two worlds are two answers: where they are not the same, the word is
    "differs". A world in which nothing was tested is no answer.
    """
    asked = [name for name in WORLDS if any(line.profile == name for line in lines)]
    words = {
        WORLDS[name]: overall([line.label for line in lines if line.profile == name or line.profile not in WORLDS])
        for name in asked
    }
    found = set(words.values()) - {UNTESTED} or {overall([line.label for line in lines])}
    return (DIFFERS if len(found) > 1 else found.pop()), words


def fixed(lines: Sequence[Any]) -> str:
    """Return whether the rules that decide a claim are older than its runs: "yes", "no", or "" where none decided."""
    profiles = {line.profile for line in lines} - {""}
    return ("yes" if profiles <= {*WORLDS} else "no") if profiles else ""


def reached(declared: Iterable[Claim], verdicts: pd.DataFrame) -> Iterator[tuple[Claim, list[Any], list[Any]]]:
    """Yield every claim with the verdicts on its checks: those that decide it, and those on tasks that it is not about.

    Claims and verdicts are joined by id. A check that no notebook has reached is "not tested".
    """
    known = {check: [*found.itertuples()] for check, found in verdicts[COLUMNS].groupby("id", sort=False)}
    for claim in declared:
        every = [line for check in claim.checks for line in known.get(check, [_unreached(check)])]
        lines = [line for line in every if _in_scope(claim, line.task)]
        yield claim, lines, [line for line in every if line not in lines]


def ledger(declared: Iterable[Claim], verdicts: pd.DataFrame) -> pd.DataFrame:
    """Every claim with its verdict, a row each: id, paper, kind, scope, place, quote, verdict (one word for all its
    checks, by :func:`decided`), worlds (the word of each), fixed (before the data: :func:`fixed`), because (each
    check's verdict, with place and numbers), note, question, found (the numbers of the checks that decided, and the
    words of the others), brief (the same with one interval a check), parts (the comparisons of those that decided, a
    line each) and notebook (of the first).

    A claim without any check is "not tested". Verdicts on tasks that the claim is not about are listed last, and decide
    nothing (:func:`reached`).
    """
    rows = []
    for claim, lines, beside in reached(declared, verdicts):
        word, words = decided(lines)
        heard = {world: own for world, own in words.items() if own != UNTESTED or word == UNTESTED}
        deciding = [line for line in lines if line.label == heard.get(WORLDS.get(line.profile, ""), word)]
        others = [line for line in lines if line not in deciding]
        rest = [f"However, {line.heading} ({_place(line)}): {line.label}." for line in others]
        rest += _not_about(beside)
        found = " ".join([_in_world(line, line.because) for line in deciding] + rest)
        powers = dict.fromkeys(line.power for line in deciding if line.power)  # of both worlds the same
        briefly = _in_both_worlds(deciding) or [_in_world(line, line.brief or line.because) for line in deciding]
        brief = " ".join([*briefly, *powers, *rest])
        said = [*map(_in_words, lines), *(f"{BESIDE}{_in_words(line)}" for line in beside)]
        row = {"id": claim.id, "paper": PAPERS[claim.paper], "kind": claim.kind, "scope": claim.scope}
        row |= {"place": claim.place, "quote": claim.quote, "verdict": word}
        row |= {"worlds": "; ".join(map(": ".join, words.items())), "fixed": fixed(lines)}
        row |= {"because": " / ".join(said) or NO_CHECK}
        row |= {"note": claim.note, "question": claim.question, "found": found, "brief": brief}
        row["parts"] = "\n".join(line.parts for line in deciding if line.parts)
        rows.append({**row, "notebook": deciding[0].notebook if deciding else ""})
    return pd.DataFrame(rows)


def _in_world(line: Any, said: str) -> str:
    return f"In {WORLDS[line.profile]}: {said}" if line.profile in WORLDS else said


def _in_both_worlds(lines: Sequence[Any]) -> list[str]:
    """Return the training comparison that decided in each of two worlds, in one sentence; none if they differ."""
    pairs = {(line.label, line.subject, line.against, line.unit) for line in lines}
    if len(lines) != len(WORLDS) or {line.profile for line in lines} != WORLDS.keys() or len(pairs) > 1:
        return []
    label, subject, against, unit = pairs.pop()
    if not against or unit != "points" or not all(line.level for line in lines):
        return []
    one, number = lines[0], lines[0].parts.count("\n") + 1
    untested = {line.parts.count(f"{UNTESTED}: ") for line in lines}
    numbers = [in_words(float(line.estimate), float(line.low), float(line.high), unit) for line in lines]
    said = [f"{each} in {WORLDS[line.profile]}" for each, line in zip(numbers, lines, strict=True)]
    margin = margins()[one.task][get_task(one.task).reward_metric]
    without = f" ({untested.pop()} {UNTESTED})" if len(untested) == 1 and untested != {0} else ""
    which = f"The least favourable of {number} comparisons{without} is " if number > 1 else ""
    size = in_question(label, float(one.effect or nan), margin)
    return [f"{which}{people(subject)} minus {people(against)}: {' and '.join(said)}{size}."]


def _not_about(lines: Sequence[Any]) -> list[str]:
    """Return a sentence per task that a claim is not about: its verdict there, or that of each check and world."""
    said = []
    for task in dict.fromkeys(line.task for line in lines):
        checks: dict[str, list[Any]] = {}
        for line in lines:
            if line.task == task:
                checks.setdefault(line.heading, []).append(line)
        of = [line for own in checks.values() for line in own]
        words = _by_world(of)
        if len(checks) > 1 and len({line.label for line in of}) > 1:
            words = "; ".join(f"{_by_world(own)} ({check})" for check, own in checks.items())
        said.append(f"On {task}, which the paper's sentence is not about: {words}.")
    return said


def _by_world(lines: Sequence[Any]) -> str:
    words = dict.fromkeys(line.label for line in lines)
    if len(words) > 1:
        words = dict.fromkeys(f"{line.label} in {WORLDS.get(line.profile, line.place)}" for line in lines)
    return ", ".join(words)


def _place(line: Any) -> str:
    """Return the place in the paper, with the world whose runs decided."""
    return f"{line.place}, {WORLDS[line.profile]}" if line.profile in WORLDS else line.place


def _in_scope(claim: Claim, task: str) -> bool:
    """Whether a verdict on a task, or on none, is one on the claim."""
    return not (claim.about and task) or get_task(task).reward_metric == REWARDED[claim.about]


def _unreached(check: str) -> Any:
    missing = {"label": UNTESTED, "heading": check, "because": "not executed on these runs", "place": "its notebook"}
    return SimpleNamespace(**dict.fromkeys(COLUMNS, "") | missing)


def _in_words(line: Any) -> str:
    if not line.notebook:
        return f"{line.heading}: {line.because}"
    return f"{line.notebook[:2]}: {line.heading} ({_place(line)}): {line.label}. {line.because}"


def unmatched_checks(declared: Iterable[Claim], verdicts: pd.DataFrame) -> list[str]:
    """Checks that are the id of no verdict; a line each, with the claim and the nearest id."""
    known = set(verdicts["id"])
    return [
        f"{claim.id}: no notebook gives the verdict {check!r}.{nearest(check, known).split(' Valid')[0]}"
        for claim in declared
        for check in claim.checks
        if check not in known
    ]


def counts(table: pd.DataFrame, by: str = "paper") -> pd.DataFrame:
    """Return how many claims have which verdict: of each kind, findings first, a row per paper (or scope).

    Columns: kind, paper (or scope), a column for each verdict that there is, and claims.
    """
    order = [word for word in SHOWN if word in set(table["verdict"])]
    kinds = [kind for kind in get_args(Kind) if kind in set(table["kind"])]
    wide = pd.crosstab([table["kind"], table[by]], table["verdict"])[order]
    rows = [(kind, value) for kind in kinds for value in table[by].unique() if (kind, value) in wide.index]
    wide = wide.reindex(pd.MultiIndex.from_tuples(rows, names=["kind", by]))
    return wide.assign(claims=wide.sum(axis=1)).rename_axis(columns=None).reset_index()


def expected_errors(verdicts: pd.DataFrame, level: float = 0.95) -> tuple[int, float]:
    """Return how many verdicts rest on an interval, and how many of them its error rate would lead one to expect wrong.

    Verdicts are those on claims and on our own questions, of read notebooks none: these are no samples of runs. Each is
    wrong at most as often as its interval misses the truth, which is an upper bound on average, as "inconclusive" is
    never wrong.
    """
    intervals = int(pd.to_numeric(verdicts["level"]).notna().sum())
    return intervals, intervals * (1 - level)
