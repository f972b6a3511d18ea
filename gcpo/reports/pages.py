"""Pages made from the reference: RESULTS.md, METHODS.md, and the README's blocks between markers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import pandas as pd

from gcpo import paths
from gcpo.reports import records
from gcpo.reports.sweep import taken
from gcpo.reports.tables import markdown, methods_table
from gcpo.runs import estimates
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.profiles import load_profile

CHECKS = r" / (?=(?:Beside it, )?\d\d: )"  # between two checks of a claim in the ledger

NEEDS, END_NEEDS = "<!-- needs: written by python -m gcpo report --publish -->", "<!-- end of needs -->"
START, END = "<!-- results: written by python -m gcpo report --publish -->", "<!-- end of results -->"
WORDS = """A verdict is on the paper's words as quoted: *holds* (an interval, a proof or an exact computation is on the
claimed side), *fails* (on the other side, or a counter-example), *ruled out* (the interval includes zero, and no effect
as large as the paper's, or where it prints none as large as the margin declared beforehand), *inconclusive* (it
includes both: too few runs), *not tested* (its runs are not there, its case does not occur here, or no check decides
it: its note says why). A claim that joins comparisons holds if each one's own 95 % interval does; it fails or is ruled
out by one that says so after Holm's correction for all. A claim about question answering is decided on tinyqa, one
about mathematics on tinymath. Of several verdicts it has the first of *fails*, *ruled out*, *not tested*,
*inconclusive*, *holds*. Findings could have come out otherwise; theorems and definitions are counted apart."""
# The tables that the README shows, and what it says above them.
README = {
    "gate": "Does training work here at all? The gate: what plain GRPO gains over the start, in points (95 %):",
    "ledger_counts": f"{WORDS}\n\nOf all claims ([RESULTS.md](RESULTS.md) has each with what decided it):",
}
GLOSSARY = """
V is the variance of a question's policy gradient over its rollouts, ρ a rank correlation over questions, and points are
hundredths of a score. "Detectable" is the difference that the seeds at hand would find in four of five repetitions.
tinyqa (short answers) and tinymath (problems in several steps) are generated tasks. Corrected intervals are wider than
those of single rows in tables and figures.
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


def ledger_markdown(ledger: pd.DataFrame) -> str:
    """The ledger in Markdown, a table per paper: the claim and where it stands, the verdict, and what decided it."""
    parts = []
    for paper, rows in ledger.groupby("paper", sort=False):
        notes = ("<br>*" + rows["note"] + "*").where(rows["note"] != "", "")
        where = rows["place"] + "; " + rows["kind"] + "; " + rows["scope"] + "; `" + rows["id"] + "`"
        shown = {
            "claim": "“" + rows["quote"] + "”<br>" + where,
            "verdict": "*" + rows["verdict"] + "*",
            "because": rows["because"].replace(CHECKS, "<br>", regex=True) + notes,
        }
        parts.append(f"### {paper}\n\n{markdown(pd.DataFrame(shown))}")
    return "\n".join(parts)


def methods_page(group_size: int = 16) -> str:
    """Return METHODS.md."""
    return f"""# Methods

Written by `python -m gcpo methods`. Ranges are at the method's own alpha; methods that change rewards, or add a term to
the loss, leave the weight at 1. What each paper leaves open, and what was chosen, is in [DEVIATIONS.md](DEVIATIONS.md).

{markdown(methods_table(group_size))}"""


def exhibits() -> pd.DataFrame:
    """Every table and figure of the four papers, and sections that stand for one.

    Columns: paper, exhibit, shows, notebooks (links, as RESULTS.md has them), lacks (missing parts, and why), grid (its
    runs at the paper's own scale; its name begins with that of its profile) and why (none can be made).
    """
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
    """Return the questions of ``headlines.csv`` as a numbered list: the paper's words, the verdict, and the finding."""
    path = paths.REFERENCE / profile / "headlines.csv"
    table = pd.read_csv(path, dtype=str, keep_default_na=False) if path.exists() else pd.DataFrame()
    lines = []
    for number, row in enumerate(table.to_dict("records"), start=1):
        notebook = row["notebook"]
        link = f" ([notebook {notebook[:2]}](notebooks/{notebook}.ipynb))" if notebook else ""
        words = f"{row['paper']}, {row['place']}, {row['kind']}: “{row['quote']}”: *{row['verdict']}*{link}"
        lines.append(f"{number}. **{row['question']}**<br>{words}<br>{row['found']}\n")
    return "".join(lines)


def readme_results(profile: str) -> str:
    """The README's results from marker to marker."""
    return f"{START}\n\n{results(profile, README, findings(profile) + GLOSSARY)}\n{END}"


def write_readme(profile: str) -> None:
    """Rewrite the parts of the README between markers, from the reference of a profile."""
    readme, block, needs = paths.ROOT / "README.md", readme_results(profile), readme_needs(profile)
    text = re.sub(f"{START}.*?{END}", lambda _: block, readme.read_text(), flags=re.S)
    readme.write_text(re.sub(f"{NEEDS}.*?{END_NEEDS}", lambda _: needs, text, flags=re.S))


def needs_table(profile: str) -> pd.DataFrame:
    """Return hardware, time and memory of one training run, measured for a reference and estimated for one GPU.

    Measured are medians over GCPO-BoT's and GRPO's runs of the policy that most runs of a task have; time counts as in
    :func:`gcpo.reports.sweep.taken`.

    Columns: profile, task, hardware, time of a run, memory, known by (measured or estimated).
    """
    found = records.find(profile, reference=True)
    own = found[found["method"].isin(["grpo", "gcpo_bot"]) & (found["kind"] == "train") & (found["max_steps"] > 0)]
    rows = []
    for task, part in own.groupby("task", sort=False):
        part = part[part["policy"] == part["policy"].mode()[0]]
        hardware = part["hardware"].map(_hardware).mode()[0]
        memory = part["peak_gpu_memory_gb"].fillna(part["peak_memory_gb"])  # the GPU's, if there was one
        took = f"{taken(part).median() / 60:.0f} min", f"{memory.median():.1f} GB"
        rows.append([profile, task, hardware, *took, f"measured ({len(part)} runs)"])
    for name, gpu in (("single_gpu", 24.0), ("paper", 80.0)):
        for task in ("narrativeqa", "qasper", "hotpotqa", "math", "olympiadbench"):
            plan = Plan("train", validate({**load_profile(name), "task": task}))
            one = estimates.Estimate(plan, gpu)
            hardware = f"{estimates.nearest(gpu)}, {gpu:.0f} GB"
            rows.append([name, task, hardware, f"{one.hours:.1f} h", f"{one.peak / estimates.GB:.0f} GB", "estimated"])
    return pd.DataFrame(rows, columns=["profile", "task", "hardware", "time of a run", "memory", "known by"])


def _hardware(machine: dict[str, Any]) -> str:
    return ", ".join(sorted(set(machine["gpus"]))) or f"{machine['cores']} cores"


def readme_needs(profile: str) -> str:
    """The README's table of hardware, time and memory, from marker to marker."""
    return f"{NEEDS}\n\n{markdown(needs_table(profile))}\n{END_NEEDS}"


def results_page(profile: str) -> str:
    """Return RESULTS.md, from the reference tables of a profile."""
    return f"{PREAMBLE}\n{results(profile, RESULTS)}\n{EXHIBITS}\n\n{markdown(exhibits())}"


def write_results(profile: str) -> None:
    """Write RESULTS.md."""
    (paths.ROOT / "RESULTS.md").write_text(results_page(profile))
