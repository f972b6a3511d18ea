"""Pages made from the reference: RESULTS.md, METHODS.md, and the README's blocks between markers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

import pandas as pd

from gcpo import paths
from gcpo.reports import records
from gcpo.reports.methods import markdown
from gcpo.reports.real_answers import ALPHA, real_answers
from gcpo.reports.report import WORLDS
from gcpo.reports.sweep import taken
from gcpo.reports.tables import display_name, with_interval, written
from gcpo.reports.verdicts import DIFFERS, FAILS, HOLDS, INCONCLUSIVE, RULED_OUT, UNTESTED
from gcpo.runs.profiles import load_profile, read_yaml
from gcpo.weights import alpha_g, weight_range

NEEDS, END_NEEDS = "<!-- needs: written by python -m gcpo publish -->", "<!-- end of needs -->"
PUBLIC, END_PUBLIC = "<!-- public: written from CITATION.cff -->", "<!-- end of public -->"
CITE, END_CITE = "<!-- cite: written from CITATION.cff -->", "<!-- end of cite -->"
START, END = "<!-- results: written by python -m gcpo publish -->", "<!-- end of results -->"
DEPENDS = "It depends on the checkpoint"  # begins the words of a verdict that policies differ in
ANSWERS = {HOLDS: "Yes", FAILS: "No", RULED_OUT: "Not here", INCONCLUSIVE: "We cannot tell"}
ANSWERS |= {UNTESTED: "Not decided yet", DIFFERS: "Two worlds differ"}
EVIDENCE = {  # by a claim's scope
    "theorem": "exact",
    "toy": "simulated groups",
    "printed": "the paper's own numbers",
    "embedded world": "small policies, trained here",
    "real model": "the paper's models",
}
WORDS = (
    "*Holds*: the confidence interval, a proof or an exact computation is on the claimed side. *Fails*: it is on the "
    "other side. *Ruled out*: the interval excludes an effect as large as the paper's (or as a margin declared "
    "beforehand). *Inconclusive*: the interval includes both zero and that effect, or checkpoints disagree. *Not "
    "tested*: we lack the models or the runs, no positive control was seen, or the case does not occur here. "
    "*Differs*: world A has one of these verdicts and world B another. "
    "[Notebook 90](notebooks/90_claims.ipynb) has the rules."
)
READING = (
    "*How to read the numbers*: V is the variance of a question's gradient, and ρ(CD, V) the rank correlation of CD "
    "with V over questions. A claim with several comparisons is as good as its least favourable one. To fail or "
    "to be ruled out because of one of several takes an interval that is widened for all of them (Holm's method). "
    "A *positive control* is a change of the training that must show: if none was seen, no null result counts."
)
KINDS = (
    "A *theorem* needs no training: a formula, or a sentence about one. It *fails* where an exact computation or a "
    "simulation contradicts the words as printed; [the ledger](outputs/reference/laptop/ledger.csv) says which other "
    "reading holds. A *definition* is true by construction, or hedged by a “may”."
)
PREAMBLE = f"""# Results

`python -m gcpo publish` writes this page; no number and no verdict here is typed. All claims, with what
decided each, are in [ledger.csv](outputs/reference/laptop/ledger.csv) and, to search and filter, on the site's page
"The ledger".

{WORDS}

{READING}

Results of small policies show how the methods behave on our generated tasks. They say nothing about the papers' models.
"""


def table_of(profile: str, name: str) -> pd.DataFrame:
    """Return a table of a profile's reference as text, without its source; empty where there is none."""
    return written(profile, name, reference=True, dtype=str, keep_default_na=False)


def findings(profile: str) -> str:
    """Return the questions of ``headlines.csv`` as a numbered list: the answer, what was found, and the evidence."""
    lines = []
    for number, row in enumerate(table_of(profile, "headlines").to_dict("records"), start=1):
        where = f"{row['paper']} {row['place']}; {EVIDENCE[row['scope']]}; *{row['verdict']}*"
        said = row["brief"].replace(f"{DEPENDS}: ", "")
        asked = f"{number}. **{row['question']} {_answer(row)}.** {said}"
        lines.append(f"{asked} ({where}; {_notebook(row['notebook'])})\n")
    return "".join(lines)


def _answer(row: Mapping[Any, Any]) -> str:
    return DEPENDS if f"{DEPENDS}: " in row["brief"] else ANSWERS[row["verdict"]]


def notebooks() -> dict[str, str]:
    """Return the names of all notebooks by their numbers."""
    return {path.stem[:2]: path.stem for path in paths.NOTEBOOKS.glob("*.ipynb")}


def _notebook(name: str) -> str:
    return f"[notebook {name[:2]}](notebooks/{name}.ipynb)" if name else "no notebook"


def quoted(profile: str) -> str:
    """Return the same questions with the papers' words, and every comparison that the verdict joins."""
    parts = []
    for row in table_of(profile, "headlines").to_dict("records"):
        head = f"### {row['question']}\n{_answer(row)} (*{row['verdict']}*)."
        head += f" {row['paper']}, {row['place']}: “{row['quote']}”"
        listed = "".join(f"- {part}\n" for part in row["parts"].splitlines())
        parts.append(f"{head}\n\n{row['found']} ({EVIDENCE[row['scope']]}; {_notebook(row['notebook'])})\n\n{listed}")
    return "\n".join(parts)


def trained() -> str:
    """Return a table of the worlds' trainings: plain GRPO's gain, how the positive control and GCPO end beside it, and
    what a step with RD's weights alone gains over one of GRPO before training."""
    beside = [f"{display_name(name)} minus GRPO" for name in ("drop_half", "gcpo_cd", "gcpo_bot")]
    columns: dict[str, tuple[str, dict[str, str], str]] = {
        "GRPO minus no training": ("gate", {"decoding": "sampled"}, "gain"),
        **{name: ("table1_pairs", {"label": name}, "difference") for name in beside},
        "one step with RD alone": ("one_step_table", {"method": "rd_only", "policy": "starting policy"}, "gain"),
    }
    cells = {
        (row["task"], world, name): with_interval(float(row[value]), float(row["low"]), float(row["high"]))
        for profile, world in WORLDS.items()
        for name, (table, chosen, value) in columns.items()
        for row in table_of(profile, table).to_dict("records")
        if chosen.items() <= row.items()
    }
    made = pd.Series(cells).rename_axis(["task", "world", None]).unstack().reindex(columns=[*columns])
    made = made.sort_index(ascending=[False, True]).fillna("not yet").reset_index()
    return (
        "Trainings in points of the score, with 95 % intervals; the last column has how much more than a step of GRPO "
        "one with RD alone gains before training, in per cent:\n\n"
        f"{markdown(made)}\n"
        "Half of the questions dropped is the positive control ([notebook 21](notebooks/21_table1.ipynb); the step: "
        "[notebook 28](notebooks/28_one_step.ipynb))."
    )


def movable(group_size: int = 16, prompts: int = 8) -> str:
    """Return in words how far GCPO's weights move on groups of real answers (:mod:`gcpo.reports.real_answers`)."""
    known = real_answers()
    found = known["measures"].query("group_size == @group_size and wrong == 'dispersed'")
    of_group = found.groupby("measure")["q50"].max()
    steps = known["steps"].query("group_size == @group_size and prompts == @prompts")
    of_step = 100 * steps.groupby("method")["q50"].max()
    off = {name: 100 * alpha_g(ALPHA, group_size) * of_group[name] ** 2 for name in ("bot", "cd")}
    added = 100 * (weight_range("rd_only", None, group_size)[1] - 1)
    return (
        f"On groups of {group_size} real answers, from the papers' own benchmarks, BoT takes at most "
        f"{off['bot']:.0f} % off a question's weight and CD {off['cd']:.0f} % (the most dispersed answers that a "
        f"search finds), while RD adds up to {added:.0f} %. Between the {prompts} questions of a typical "
        f"step BoT's weights differ by {of_step['bot_only']:.1f} % at most and RD's by {of_step['rd_only']:.0f} % "
        "([notebook 36](notebooks/36_real_answers.ipynb))."
    )


def counted(profile: str) -> str:
    """Return how many claims have which verdict: findings by paper, theorems and definitions of all papers together."""
    table = table_of(profile, "ledger_counts")
    numbers = [str(column) for column in table if column not in ("kind", "paper")]
    table[numbers] = table[numbers].astype(int)
    of = [
        f"findings of {paper}" if kind == "finding" else f"{kind}s"
        for kind, paper in table[["kind", "paper"]].to_numpy()
    ]
    return markdown(table.assign(of=of).groupby("of", sort=False)[numbers].sum().reset_index())


def exhibits(root: str = "") -> pd.DataFrame:
    """Every table and figure of the four papers, and sections that stand for one.

    Columns: paper, exhibit, shows, notebooks (links, from a page whose way to the project's root is ``root``), lacks
    (missing parts, and why), grid (its runs at the paper's own scale; its name begins with that of its profile) and why
    (none can be made).
    """
    table = pd.read_csv(str(resources.files("gcpo") / "exhibits.csv"), dtype=str, keep_default_na=False)
    stems = notebooks()
    linked = [[f"[{n}]({root}notebooks/{stems[n]}.ipynb)" for n in numbers.split()] for numbers in table["notebooks"]]
    return table.assign(notebooks=[", ".join(links) for links in linked])


def sources(profile: str) -> str:
    """Return whose records the pages are made from, as the ledger says (:func:`gcpo.reports.ledger.source`)."""
    return str(pd.read_csv(paths.REFERENCE / profile / "ledger_counts.csv", dtype=str)["records"][0])


def readme_results(profile: str) -> str:
    """Return the README's results from marker to marker."""
    parts = [
        findings(profile),
        f"{trained()} {movable()}",
        f"{WORDS} {READING}",
        f"How many claims have which verdict ({sources(profile)}):\n\n{counted(profile)}",
        KINDS,
    ]
    return f"{START}\n\n" + "\n\n".join(part.strip() for part in parts) + f"\n\n{END}"


def write_readme(profile: str) -> None:
    """Rewrite the parts of the README between markers, from the reference of a profile and CITATION.cff."""
    readme, about = paths.ROOT / "README.md", read_yaml(paths.ROOT / "CITATION.cff")
    blocks = {
        (START, END): readme_results(profile),
        (NEEDS, END_NEEDS): readme_needs(profile),
        (PUBLIC, END_PUBLIC): public_links(about),
        (CITE, END_CITE): citation(about),
    }
    text = readme.read_text()
    for (start, end), block in blocks.items():
        before, there, rest = text.partition(start)
        text = before + block + rest.partition(end)[2] if there else text
    readme.write_text(text)


def public_links(about: Mapping[str, Any]) -> str:
    """Return links to notebook 00 in Binder and to the site, from marker to marker; none before CITATION.cff names a
    public repository (``repository-code``)."""
    where = str(about.get("repository-code", "")).rstrip("/")
    owner, _, name = where.removeprefix("https://github.com/").partition("/")
    first = "urlpath=lab/tree/notebooks/00_start_here.ipynb"
    binder = f" · [Run it in Binder](https://mybinder.org/v2/gh/{owner}/{name}/main?{first})"
    site = f" · [Documentation](https://{owner}.github.io/{name}/)"
    return f"{PUBLIC}{binder + site if name else ''}{END_PUBLIC}"


def citation(about: Mapping[str, Any]) -> str:
    """Return what to cite, with version and date, from marker to marker."""
    return f"{CITE}gcpo {about['version']} ({about['date-released']}), [CITATION.cff](CITATION.cff){END_CITE}"


def needs_table(profile: str) -> pd.DataFrame:
    """Return hardware, time and memory of one training run as measured, of a reference and at the paper's scale.

    Measured are medians over GCPO-BoT's and GRPO's runs of the policy that most runs of a task have; time counts as in
    :func:`gcpo.reports.sweep.taken`. At the paper's scale it is the time of GCPO-BoT's steps in
    `benchmarks/paper_scale.py`, as many as the profile has, in micro-batches of 8 and without its evaluations.

    Columns: profile, task, hardware, time of a run, memory, known by.
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
    steps = pd.read_csv(paths.MEASURED / "paper_training.csv").set_index("case")
    parts = steps["figure"][["generation of 128 answers, shared", "gcpo_bot, shared, without generation"]]
    memory, hardware = steps.loc["gcpo_bot, shared, memory", ["figure", "hardware"]]
    known = f"measured ({steps['rounds']['gcpo_bot, shared, step']} steps; random weights)"
    hours = load_profile("paper")["max_steps"] * parts.sum() / 3600
    task = "prompts of 512 tokens, answers of 256"
    rows.append(["paper", task, hardware, f"{hours:.1f} h", f"{memory:.0f} GB", known])
    return pd.DataFrame(rows, columns=["profile", "task", "hardware", "time of a run", "memory", "known by"])


def _hardware(machine: dict[str, Any]) -> str:
    return ", ".join(sorted(set(machine["gpus"]))) or f"{machine['cores']} cores"


def readme_needs(profile: str) -> str:
    """The README's table of hardware, time and memory, from marker to marker."""
    return f"{NEEDS}\n\n{markdown(needs_table(profile))}\n{END_NEEDS}"


def results_page(profile: str) -> str:
    """Return RESULTS.md."""
    parts = [
        PREAMBLE,
        f"## How many claims have which verdict\n\n{counted(profile)}\n{KINDS}",
        f"## Five questions\n\n{quoted(profile)}",
        f"## Does training work here?\n\n{trained()}",
    ]
    return "\n\n".join(part.strip() for part in parts) + f"\n\n*Made from {sources(profile)}.*\n"


def exhibits_page() -> str:
    """Return docs/exhibits.md: where each table and figure of the four papers is made, and what it lacks."""
    return f"""# Every table and figure

`python -m gcpo publish` writes this page: where each of the four papers' tables and figures is made, what it
lacks (runs that were not made yet, or models and data), and the grid that makes it at the paper's own scale, or why
none does.

{markdown(exhibits("../"))}"""


def write_results(profile: str) -> None:
    """Write RESULTS.md and docs/exhibits.md."""
    (paths.ROOT / "RESULTS.md").write_text(results_page(profile))
    (paths.ROOT / "docs" / "exhibits.md").write_text(exhibits_page())
