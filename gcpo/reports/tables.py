"""Tables of results: ours from run records, the papers' from CSV files in the package, and the README's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd

from gcpo import paths, statistics
from gcpo.errors import nearest
from gcpo.methods import METHODS
from gcpo.reports import records
from gcpo.reports.sweep import taken
from gcpo.runs import estimates
from gcpo.runs.grids import expand
from gcpo.runs.params import TOY, Params, load_profile, validate
from gcpo.runs.plan import Plan
from gcpo.tasks import get_task
from gcpo.weights import weight_range

INTERVAL = 95  # per cent, of every interval the project reports
CHECKS = r" / (?=\d\d: )"  # between two checks of a claim in the ledger
HOW = r"(?<=\] )\(95 %[^)]*\)"  # after an interval: its level, family and seeds


def reported(name: str) -> pd.DataFrame:
    """One table of a paper as data, e.g. ``reported("gcpo_table1")``: a row per printed number.

    Columns: what identifies the number, as far as its table needs it (method: this package's name, empty for others;
    label: the row as printed; model, task, metric, measure, setting as key=value), then value, spread (nan where none
    is printed), unit, spread_kind (what the paper says it is) and copied_from (where the paper has the number from).

    Raises:
        ValueError: there is no such table.
    """
    folder = resources.files("gcpo") / "reported"
    known = sorted(file.name.removesuffix(".csv") for file in folder.iterdir())
    if name not in known:
        raise ValueError(f"Unknown table {name!r}.{nearest(name, known)}")
    table = pd.read_csv(str(folder / f"{name}.csv"), dtype=str, keep_default_na=False)
    return table.assign(value=table["value"].astype(float), spread=pd.to_numeric(table["spread"]).astype(float))


def paper_means(name: str, **where: str) -> dict[str, float]:
    """What a paper's table prints for each method of ours, where columns of :func:`reported` have these values.

    Raises:
        ValueError: no such table or column, no such row, or a method that has several.
    """
    table = reported(name)
    for column in ("method", *where):
        if column not in table:
            raise ValueError(f"{name} has no column {column!r}.{nearest(column, map(str, table))}")
    rows = table[(table["method"] != "") & (table[list(where)] == pd.Series(where, dtype=str)).all(axis=1)]
    if rows.empty or rows["method"].duplicated().any():
        raise ValueError(f"{name} has {len(rows)} numbers where {where}; one per method is needed.")
    return dict(zip(rows["method"], rows["value"], strict=True))


def gcpo_means(benchmark: str) -> dict[str, float]:
    """What GCPO's Table 1 (F1) or Table 2 (accuracy) prints for a benchmark, by method; empty where neither has it."""
    for name, metric in (("gcpo_table1", "f1"), ("gcpo_table2", "accuracy")):
        if benchmark in set(reported(name)["task"]):
            return paper_means(name, task=benchmark, metric=metric)
    return {}


def metrics(grid: str, profile: str) -> dict[str, str]:
    """The metric that each task of a grid's training runs is trained and judged on, in the grid's order of tasks."""
    trained = [plan.params.task for plan in expand(grid, profile) if plan.kind == "train"]
    return {task: get_task(task).reward_metric for task in trained}


def with_interval(mean: float, low: float, high: float, digits: int = 1) -> str:
    """'61.2 [60.1, 62.3]'."""
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def comparison_table(table: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """What ``evidence.differences`` found, as a page shows it: a row per label of ``names`` that is there, in order.

    Columns: method, score (mean ± standard deviation over seeds, per cent), minus its base [95 %] (points), p (Holm),
    detectable (points, 80 % power), equivalent ("yes" within the margin), and seeds.
    """
    rows = table.set_index("label")
    rows = rows.loc[[label for label in names if label in rows.index]]

    def written(column: str, digits: int) -> pd.Series:
        return rows[column].map(lambda value: "" if pd.isna(value) else f"{value:.{digits}f}")

    spread = written("std", 1).map(lambda text: f" ± {text}" if text else "")
    gaps = rows[["difference", "low", "high"]].itertuples(index=False)
    shown = {
        "method": [names[label] for label in rows.index],
        "score": written("mean", 1) + spread,
        f"minus its base [{INTERVAL} %]": ["" if pd.isna(gap[0]) else with_interval(*gap) for gap in gaps],
        "p (Holm)": written("p", 3),
        "detectable": written("mde", 1),
        "equivalent": rows["equivalent"].map({True: "yes", False: "no"}).fillna(""),
        "seeds": rows["compared"].where(rows["compared"] != "", rows["seeds"].map("{} seeds".format)),
    }
    return pd.DataFrame(shown).reset_index(drop=True)


def departures(params: Params) -> pd.DataFrame:
    """What a run's parameters have that its profile's file has not, a row each: the profile's value, and this run's.

    Where there is no file of that name, the package's defaults take its place.
    """
    own: dict[str, Any] = {"task": params.task, "profile": params.profile}
    if (paths.PARAMS / f"{params.profile.removesuffix(TOY)}.yaml").exists():
        own = {**load_profile(params.profile), **own}
    usual = validate(own)
    pairs = zip(usual.model_dump().items(), params.model_dump().values(), strict=True)
    rows = {name: (str(before), str(value)) for (name, before), value in pairs if before != value}
    return pd.DataFrame.from_dict(rows, "index", columns=["the profile has", "this run has"])


def evaluation_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Means over questions in per cent with a 95 % bootstrap interval over questions, a row per decoding."""
    metrics = [column for column in scores.columns if column not in ("query", "decoding")]
    rows = {}
    for decoding, part in scores.groupby("decoding"):
        rows[decoding] = {
            metric: with_interval(*statistics.stratified_bootstrap([100 * part[metric].to_numpy()]).mean)
            for metric in metrics
        }
    return pd.DataFrame(rows).T.rename_axis(f"% [{INTERVAL} % interval]")


def scores_table(scores: pd.DataFrame) -> pd.DataFrame:
    """What an evaluation's ``scores.csv`` says, in per cent with 95 % intervals over questions: a row per metric, a
    column per statistic."""
    shown = scores.assign(said=[with_interval(*(100 * row[["value", "low", "high"]])) for _, row in scores.iterrows()])
    wide = shown.pivot(index="metric", columns="statistic", values="said")
    return wide.reindex(index=scores["metric"].unique(), columns=scores["statistic"].unique()).rename_axis(
        index=f"% [{INTERVAL} % interval]", columns=None
    )


def last_completions(folder: Path, prompts: int = 2, each: int = 3) -> pd.DataFrame:
    """Completions of the last step: ``each`` of the first ``prompts`` prompts, with rewards, scores and weights."""
    table = pd.read_parquet(max((folder / "completions").glob("*.parquet")))
    table["prompt"] = [f"... {_words(messages)[-48:]}" for messages in table["prompt"]]
    table["completion"] = [_words(messages) for messages in table["completion"]]
    first = table.groupby("prompt", sort=False).head(each).head(prompts * each)
    return first.drop(columns="step").round(3).reset_index(drop=True)


def _words(messages: Any) -> str:
    return messages if isinstance(messages, str) else messages[-1]["content"]


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


def markdown(table: pd.DataFrame) -> str:
    """A table in Markdown, its cells as they are (a bar, which would end a cell, is escaped).

    Cells are not padded: a longer one would change every line of its table.
    """
    cells = table.astype(str).replace(r"\|", r"\\|", regex=True)
    rows = [[*map(str, cells.columns)], ["---"] * cells.shape[1], *cells.to_numpy().tolist()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def ledger_markdown(ledger: pd.DataFrame) -> str:
    """The ledger in Markdown, a table per paper: the claim and where it stands, the verdict, and what decided it."""
    parts = []
    for paper, rows in ledger.groupby("paper", sort=False):
        notes = ("<br>*" + rows["note"] + "*").where(rows["note"] != "", "")
        shown = {
            "claim": "“" + rows["quote"] + "”<br>" + rows["place"] + "; " + rows["scope"] + "; `" + rows["id"] + "`",
            "verdict": "*" + rows["verdict"] + "*",
            "because": rows["because"].replace(CHECKS, "<br>", regex=True) + notes,
        }
        parts.append(f"### {paper}\n\n{markdown(pd.DataFrame(shown))}")
    return "\n".join(parts)


def methods_table(group_size: int = 16) -> pd.DataFrame:
    """Every method as its row of ``METHODS`` describes it, with the range of its weight at this G and its own alpha."""
    rows = []
    for name, row in METHODS.items():
        low, high = (f"{end:.3g}" if end < math.inf else "∞" for end in weight_range(name, None, group_size))
        rows.append(
            {
                "method": f"`{name}`",
                "paper": row.paper,
                "rule": row.rule,
                "acts on": row.acts,
                "per": row.granularity,
                "direction": row.direction,
                f"weight at G = {group_size}": low if low == high else f"{low} to {high}",
            }
        )
    return pd.DataFrame(rows)


def methods_page(group_size: int = 16) -> str:
    """METHODS.md."""
    return f"""# Methods

Written by `python -m gcpo methods`. Ranges are at the method's own alpha; methods that change rewards, or add a term to
the loss, leave the weight at 1. What each paper leaves open, and what was chosen, is in [DEVIATIONS.md](DEVIATIONS.md).

{markdown(methods_table(group_size))}"""


def exhibits() -> pd.DataFrame:
    """Every table and figure of the four papers, and sections that stand for one: paper, exhibit, shows,
    notebooks (links, as RESULTS.md has them) and lacks, what is not made and why."""
    table = pd.read_csv(str(resources.files("gcpo") / "exhibits.csv"), dtype=str, keep_default_na=False)
    stems = {path.stem[:2]: path.stem for path in paths.NOTEBOOKS.glob("*.ipynb")}
    linked = [[f"[{n}](notebooks/{stems[n]}.ipynb)" for n in numbers.split()] for numbers in table["notebooks"]]
    return table.assign(notebooks=[", ".join(links) for links in linked])


def results(profile: str, captions: Mapping[str, str], first: str = "") -> str:
    """Reference tables of a profile in Markdown, each below its caption, after ``first``; once above all their source.

    Raises:
        KeyError: a table that does not name its records.
    """
    sources, parts = set(), [first] if first else []
    for name, caption in captions.items():
        path = paths.REFERENCE / profile / f"{name}.csv"
        if path.exists():
            table = pd.read_csv(path, dtype=str, keep_default_na=False)
            sources |= set(table.pop("records"))
            parts.append(f"{caption}\n\n{ledger_markdown(table) if name == 'ledger' else markdown(table)}")
    return "\n".join([f"All of it is made from: {', '.join(sorted(sources))}.\n", *parts])


def findings(profile: str) -> str:
    """The questions of ``headlines.csv`` in Markdown, numbered: each with the paper's words and the verdict on them,
    then what was found, of whose intervals RESULTS.md has family and seeds."""
    path = paths.REFERENCE / profile / "headlines.csv"
    table = pd.read_csv(path, dtype=str, keep_default_na=False) if path.exists() else pd.DataFrame()
    lines: list[Any] = table.to_dict("records")
    return "".join(
        f"{number}. **{row['question']}**<br>{row['paper']}, {row['place']}: “{row['quote']}”: "
        f"*{row['verdict']}*{_link(row['notebook'])}<br>{re.sub(HOW, '(95 %)', row['found'])}\n"
        for number, row in enumerate(lines, start=1)
    )


def _link(notebook: str) -> str:
    return f" ([notebook {notebook[:2]}](notebooks/{notebook}.ipynb))" if notebook else ""


def readme_results(profile: str) -> str:
    """The README's results from marker to marker."""
    return f"{START}\n\n{results(profile, README, findings(profile) + GLOSSARY)}\n{END}"


def write_readme(profile: str) -> None:
    """Rewrite the parts of the README between markers, from the reference of a profile."""
    readme, block, needs = paths.ROOT / "README.md", readme_results(profile), readme_needs(profile)
    text = re.sub(f"{START}.*?{END}", lambda _: block, readme.read_text(), flags=re.S)
    readme.write_text(re.sub(f"{NEEDS}.*?{END_NEEDS}", lambda _: needs, text, flags=re.S))


def needs_table(profile: str) -> pd.DataFrame:
    """What one training run takes: of a profile's reference as measured (medians of GCPO-BoT's and GRPO's runs of the
    policy that most of a task's have; time as :func:`gcpo.reports.sweep.taken` counts), of the profiles for one GPU as
    estimated.

    Columns: profile, task, hardware, time of a run, memory, and how they are known.
    """
    found = records.find(profile, reference=True)
    own = found[found["method"].isin(["grpo", "gcpo_bot"]) & (found["kind"] == "train") & (found["max_steps"] > 0)]
    rows = []
    for task, part in own.groupby("task", sort=False):
        part = part[part["policy"] == part["policy"].mode()[0]]
        hardware = part["hardware"].map(_hardware).mode()[0]
        memory = part["peak_gpu_memory_gb"].fillna(part["peak_memory_gb"])  # of the GPU where there was one
        took = f"{taken(part).median() / 60:.0f} min", f"{memory.median():.1f} GB"
        rows.append([profile, task, hardware, *took, f"measured ({len(part)} runs)"])
    for name, gpu in (("single_gpu", 24.0), ("paper", 80.0)):
        for task in ("narrativeqa", "qasper", "hotpotqa", "math", "olympiadbench"):
            plan = Plan("train", validate({**load_profile(name), "task": task}))
            one = estimates.estimate(plan, gpu)
            hardware = f"{estimates.GPUS[gpu][0]}, {gpu:.0f} GB"
            rows.append([name, task, hardware, f"{one.hours:.1f} h", f"{one.peak / estimates.GB:.0f} GB", "estimated"])
    return pd.DataFrame(rows, columns=["profile", "task", "hardware", "time of a run", "memory", "known by"])


def _hardware(machine: dict[str, Any]) -> str:
    return ", ".join(sorted(set(machine["gpus"]))) or f"{machine['cores']} cores"


def readme_needs(profile: str) -> str:
    """The README's table of hardware, time and memory, from marker to marker."""
    return f"{NEEDS}\n\n{markdown(needs_table(profile))}\n{END_NEEDS}"


def write_results(profile: str) -> None:
    """Write RESULTS.md, from the reference tables of a profile."""
    page = f"{PREAMBLE}\n{results(profile, RESULTS)}\n{EXHIBITS}\n\n{markdown(exhibits())}"
    (paths.ROOT / "RESULTS.md").write_text(page)


NEEDS, END_NEEDS = "<!-- needs: written by python -m gcpo report --publish -->", "<!-- end of needs -->"
START, END = "<!-- results: written by python -m gcpo report --publish -->", "<!-- end of results -->"
WORDS = """A verdict is on the paper's words as quoted, and one of five: *holds* and *does not hold* (a proof, a
counter-example or an interval decides), *effect excluded* (the interval holds zero, and no effect as large as the
paper's), *cannot tell* (the interval holds zero, and the paper's effect where it prints one), *not tested* (its runs
are not there, its case does not occur here, or no check decides it: its note says why). Of a claim with several checks,
the first of *does not hold*, *not tested*, *effect excluded*, *cannot tell*, *holds* that one of them says."""
# The tables that the README shows, and what it says above them.
README = {
    "gate": "Does training work here at all? The gate: what plain GRPO gains over the start, in points (95 %):",
    "ledger_counts": f"{WORDS}\n\nOf all claims ([RESULTS.md](RESULTS.md) has each with what decided it):",
}
GLOSSARY = """
V is the variance of a question's policy gradient over its rollouts, ρ a rank correlation over questions, and points are
hundredths of a score. "Detectable" is the difference that the seeds at hand would find in four of five repetitions.
tinyqa (short answers) and tinymath (problems in several steps) are generated tasks. Intervals of findings 3 to 5 are
corrected for all comparisons of their family, and so wider than those of single rows in tables and figures.
"""
PREAMBLE = f"""# Results

Written by `python -m gcpo report --publish`; no number and no verdict here is typed. {WORDS} What is about the embedded
world says something about the methods there, and nothing about the papers' models.
"""
EXHIBITS = """## Every table and figure
Where each of the four papers' is made, and what it lacks: runs that were not made yet, or models and data that this
profile does not have."""
# The tables of RESULTS.md.
RESULTS = {
    "gate": "## The gate\nWhat plain GRPO gains over the starting policy on the test split, in points (95 %).",
    "ledger_counts": "## The papers' claims\nHow many have which verdict.",
    "ledger": "Each with what decided it: the notebook, its check, and the numbers.",
    "questions": "## Our own questions\nWhat the papers do not claim: varied conditions, controls, counter-examples.",
    "table1": "## Table 1 on both tasks\nSampled answers in per cent, beside the paper's NarrativeQA and MATH500.",
    "zoo": "## All methods\nSampled answers in per cent, and the difference from GRPO under the same protocol.",
    "sweep_choice": "## The sweep\nWhat its rule picks, for both tasks together and for each.",
}
