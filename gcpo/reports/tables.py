"""Tables of results: ours from run records, the papers' from CSV files in the package."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from gcpo import paths
from gcpo.errors import UserError, nearest, one_of
from gcpo.methods import METHODS
from gcpo.reports import records
from gcpo.runs.params import Params, profile_name, validate
from gcpo.runs.profiles import TOY, load_profile, read_yaml
from gcpo.runs.runner import outcome

INTERVAL = 95  # per cent, of every interval the project reports
REPORTED = Path(__file__).parents[1] / "reported"  # the papers' tables
PRINTED = Path(__file__).parents[1] / "printed"  # how their sentences hold against them, by benchmarks/printed.py
NAMES: dict[str, dict[str, str]] = read_yaml(Path(__file__).parents[1] / "names.yaml")
CALLED = {name: NAMES["methods"].get(name, name.upper().replace("_", "-")) for name in METHODS}


def display_name(label: str) -> str:
    """Return the label of a kind of run as people read it: "GCPO-BoT (alpha=0.3)" for "gcpo_bot alpha=0.3".

    Methods are named where a label begins with one, and wherever else their names stand ("late gain of cw_grpo").
    """
    method, _, settings = label.partition(" ")
    if method in CALLED:
        return f"{CALLED[method]} ({settings})" if settings else CALLED[method]
    return re.sub(r"\w+", lambda found: CALLED.get(found[0], found[0]), label)


def reported(name: str, **where: str) -> pd.DataFrame:
    """One table of a paper as data, or its rows with some values: ``reported("gcpo_table1", metric="f1")``.

    A row is a printed number.

    Columns: what identifies the number, as far as its table needs it (method: this package's name, empty for others;
    label: the row as printed; model, task, metric, measure, setting as key=value), then value, spread (nan where none
    is printed), unit, spread_kind (what the paper says it is) and copied_from (where the paper has the number from).

    Raises:
        ValueError: there is no such table.
        KeyError: it has no such column.
    """
    one_of("table", name, sorted(path.stem for path in REPORTED.glob("*.csv")))
    table = pd.read_csv(REPORTED / f"{name}.csv", dtype=str, keep_default_na=False)
    table = table[(table[list(where)] == pd.Series(where, dtype=str)).all(axis=1)]
    return table.assign(value=table["value"].astype(float), spread=pd.to_numeric(table["spread"]).astype(float))


def paper_means(name: str, **where: str) -> dict[str, float]:
    """Return a paper's printed number by method of ours, from rows of :func:`reported` with these values.

    Raises:
        KeyError: no such column.
        ValueError: no such table or row, or a method that has several.
    """
    rows = reported(name, **where).query("method != ''")
    if rows.empty or rows["method"].duplicated().any():
        raise ValueError(f"{name} has {len(rows)} numbers where {where}; one per method is needed.")
    return dict(zip(rows["method"], rows["value"], strict=True))


def gcpo_means(benchmark: str) -> dict[str, float]:
    """Return GCPO's numbers on a benchmark by method, from Table 1 (F1) or 2 (accuracy); empty if neither has it."""
    where = {"gcpo_table1": "f1", "gcpo_table2": "accuracy"}
    names = [name for name in where if benchmark in set(reported(name)["task"])]
    return paper_means(names[0], task=benchmark, metric=where[names[0]]) if names else {}


def with_interval(mean: float, low: float, high: float, digits: int = 1) -> str:
    """'61.2 [60.1, 62.3]'."""
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def comparison_table(table: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """Return the table of ``verdicts.differences`` for a page: a row per label of ``names`` that is there, in order.

    Columns: method, score (mean ± standard deviation over seeds, per cent), minus its base [95 %] (points), p (Holm),
    detectable (points, 80 % power), equivalent ("yes" within the margin), and seeds.
    """
    rows = table.set_index("label")
    rows = rows.loc[[label for label in names if label in rows.index]]

    def written(column: str, form: str) -> pd.Series:
        return rows[column].map(form.format, na_action="ignore").astype(object).fillna("")

    gaps = rows[["difference", "low", "high"]].itertuples(index=False)
    seeds = zip(rows["seeds"], rows["compared"], strict=True)
    shown = {
        "method": rows.index.map(names),
        "score": written("mean", "{:.1f}") + written("std", " ± {:.1f}"),
        f"minus its base [{INTERVAL} %]": ["" if pd.isna(gap[0]) else with_interval(*gap) for gap in gaps],
        "p (Holm)": written("p", "{:.3f}"),
        "detectable": written("mde", "{:.1f}"),
        "equivalent": rows["equivalent"].map({True: "yes", False: "no"}).fillna(""),
        "seeds": [f"{a} seeds" + (" each" if a == n else f", compared on {n}" if n else "") for a, n in seeds],
    }
    return pd.DataFrame(shown).reset_index(drop=True)


def departures(params: Params) -> pd.DataFrame:
    """Return the parameters of a run that differ from its profile's file, a row each: the profile's value, the run's.

    Without a file of that name, the package's defaults take its place.
    """
    own: dict[str, Any] = {"task": params.task, "profile": params.profile}
    if (paths.PARAMS / f"{params.profile.removesuffix(TOY)}.yaml").exists():
        own = {**load_profile(params.profile), **own}
    table = pd.DataFrame({"the profile has": validate(own).model_dump(), "this run has": params.model_dump()}).map(str)
    return table[table["the profile has"] != table["this run has"]]


def runs_table(profile: str, reference: bool = False) -> pd.DataFrame:
    """Return a profile's runs, the newest first: id, what departs from the profile's file (but for method and seed,
    which the id has), how each ended, with its first results, and how long ago it began."""
    now, rows = pd.Timestamp.now("UTC"), list[Any]()
    for run in records.runs(profile, reference):
        began = pd.Timestamp(run.manifest.get("started") or now)
        state = outcome(run) if run.fault or run.manifest["status"] != "running" else "running, or killed"
        known = {} if run.fault else {k: v for k, v in run.manifest["params"].items() if k in Params.model_fields}
        other: Any = departures(Params(**known))["this run has"].drop(["method", "seed"], errors="ignore")
        departs = ", ".join(f"{name} {value:.60}" for name, value in other.items())
        name, age = run.manifest.get("id", run.folder.name), str((now - began).floor("min"))[:-3]
        rows.append((began, name, departs, state, age))
    return pd.DataFrame(sorted(rows, reverse=True), columns=["began", "run", "departs", "state", "age"]).iloc[:, 1:]


def runs_beside(profile: str, ids: Collection[str], reference: bool = False) -> pd.DataFrame:
    """Return where finished runs of a profile differ, a column each: parameters, TRL's settings, results, code, times;
    all of these of one run.

    Raises:
        UserError: there is no such finished run.
    """
    found = records.find(profile, reference=reference).set_index("id")
    if unknown := [id_ for id_ in ids if id_ not in found.index]:
        raise UserError(f"no finished run {unknown[0]} of profile {profile}.{nearest(unknown[0], found.index)}")
    table = found.loc[[*ids]].drop(columns=["folder", "label"]).T.astype(str)
    return table[table.nunique(axis=1) > 1] if len(ids) > 1 else table


def scores_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Return an evaluation's ``scores.csv`` in per cent with 95 % intervals over questions.

    A row per metric, a column per statistic.
    """
    said = [with_interval(*row) for row in 100 * scores[["value", "low", "high"]].to_numpy()]
    wide = scores.assign(said=said).set_index(["metric", "statistic"])["said"].unstack(sort=False)
    return wide.rename_axis(index=f"% [{INTERVAL} % interval]", columns=None)


def write_table(table: pd.DataFrame, folder: Path | None, name: str, source: str | None) -> None:
    """Write a table as CSV (6 significant digits); Markdown and LaTeX are pandas' own, made from it when wanted.

    Args:
        table: what is written, without its index.
        folder: where to; made if it is not there. None writes nothing.
        name: the file's, without its ending.
        source: whose runs it was made from, as ``gcpo.records.source`` says it: the last column, ``records``. None for
            what was made from no runs.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        said = table if source is None else table.assign(records=source)
        said.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")


def written(profile: str, name: str, reference: bool = False, **settings: Any) -> pd.DataFrame:
    """Return a table that reports wrote of a profile's runs, or of its reference, without its source; empty where there
    is none. ``settings`` are those of ``pd.read_csv``."""
    folder = paths.REFERENCE / profile_name(profile) if reference else paths.OUTPUTS / profile_name(profile) / "reports"
    path = folder / f"{name}.csv"
    return pd.read_csv(path, **settings).drop(columns="records") if path.exists() else pd.DataFrame()
