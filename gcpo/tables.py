"""Tables of results: ours from run records, the papers' from CSV files in the package, and the README's."""

from __future__ import annotations

import math
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd

from gcpo import paths, statistics
from gcpo.methods import METHODS
from gcpo.weights import weight_range

INTERVAL = 95  # per cent, of every interval the project reports


def reported(name: str) -> pd.DataFrame:
    """The numbers of one table of a paper, e.g. ``reported("gcpo_table1")``; as printed there, in their units."""
    return pd.read_csv(str(resources.files("gcpo") / "reported" / f"{name}.csv"))


def with_interval(mean: float, low: float, high: float, digits: int = 1) -> str:
    """'61.2 [60.1, 62.3]'."""
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


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


def last_completions(folder: Path, prompts: int = 2, each: int = 3) -> pd.DataFrame:
    """Completions of the last step: ``each`` of the first ``prompts`` prompts, with rewards, scores and weights."""
    table = pd.read_parquet(max((folder / "completions").glob("*.parquet")))
    table["prompt"] = [f"... {_words(messages)[-48:]}" for messages in table["prompt"]]
    table["completion"] = [_words(messages) for messages in table["completion"]]
    first = table.groupby("prompt", sort=False).head(each).head(prompts * each)
    return first.drop(columns="step").round(3).reset_index(drop=True)


def _words(messages: Any) -> str:
    return messages if isinstance(messages, str) else messages[-1]["content"]


def verdict(low: float, high: float) -> bool | None:
    """What an interval of a difference decides about "it is above zero": True, False, or None where it holds zero."""
    return True if low > 0 else False if high < 0 else None


def compare(scores: pd.DataFrame, metric: str, against: str = "grpo", seed: int = 0) -> pd.DataFrame:
    """One metric of every method, in per cent, a row per method.

    Args:
        scores: lines of ``eval.csv`` with columns method, seed, query and the metric, of one decoding.
        metric: the column to compare.
        against: the method that differences are taken from.

    Returns:
        method, seeds (how many), mean, std (n - 1 over seeds), low and high (95 %, resampling seeds: with three seeds
        too narrow, so all seeds are given in ``each``), difference from ``against`` with difference_low and
        difference_high (95 %, paired, resampling questions), and improvement, the probability that a run beats a run
        of ``against``. What one seed alone cannot tell (std, low, high, improvement) is missing.
    """
    matrices = {
        method: 100 * part.pivot(index="seed", columns="query", values=metric).to_numpy()
        for method, part in scores.groupby("method", sort=False)
    }
    rows = []
    for method, matrix in matrices.items():
        runs = matrix.mean(axis=1)
        row: dict[str, Any] = {
            "method": method,
            "seeds": len(runs),
            "mean": runs.mean(),
            "each": runs.round(2).tolist(),
        }
        if len(runs) > 1:
            _, low, high = statistics.stratified_bootstrap([runs], seed=seed).mean
            row |= {"std": runs.std(ddof=1), "low": low, "high": high}
        if method != against and against in matrices:
            names = ("difference", "difference_low", "difference_high")
            row |= dict(
                zip(names, statistics.paired_query_bootstrap(matrix, matrices[against], seed=seed), strict=True)
            )
            other = matrices[against].mean(axis=1)
            if min(len(runs), len(other)) > 1:
                row["improvement"] = statistics.probability_of_improvement([runs], [other], seed=seed)[0]
        rows.append(row)
    return pd.DataFrame(rows)


def beats(scores: pd.DataFrame, metric: str, method: str, other: str) -> bool | None:
    """Whether a method is better than another one, where luck of the questions and luck of the seed must agree.

    True if the seed-averaged difference is above zero for any choice of questions (its 95 % interval is) and every seed
    of the method is above every seed of the other (with three of each, luck does that once in twenty); False if both
    are the other way round; None where either leaves it open. ``scores`` as in :func:`compare`.
    """
    table = compare(scores[scores["method"].isin([method, other])], metric, against=other).set_index("method")
    row: Any = table.loc[method]
    rival: Any = table.loc[other, "each"]
    questions = verdict(row["difference_low"], row["difference_high"])
    seeds = True if min(row["each"]) > max(rival) else False if max(row["each"]) < min(rival) else None
    return questions if questions == seeds else None


def write_table(table: pd.DataFrame, folder: Path, name: str) -> None:
    """Write a table as CSV, Markdown and LaTeX."""
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")
    (folder / f"{name}.md").write_text(markdown(table))
    body = [" & ".join(row) + r" \\" for row in _cells(table)]
    head = " & ".join(map(str, table.columns)) + r" \\"
    lines = [
        rf"\begin{{tabular}}{{{'l' * table.shape[1]}}}",
        r"\hline",
        head,
        r"\hline",
        *body,
        r"\hline",
        r"\end{tabular}",
    ]
    (folder / f"{name}.tex").write_text(
        "\n".join(line.replace("%", r"\%").replace("_", r"\_") for line in lines) + "\n"
    )


def markdown(table: pd.DataFrame) -> str:
    """A table in Markdown; missing values are empty."""
    rows = [table.columns.map(str).tolist(), ["---"] * table.shape[1], *_cells(table)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cells(table: pd.DataFrame) -> list[list[str]]:
    rows = table.astype(object).to_numpy().tolist()
    return [["" if value is None or value != value else str(value) for value in row] for row in rows]


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


def write_readme(profile: str) -> None:
    """Rewrite the parts of the README between markers: the table of methods, and the results from the reference tables
    of a profile."""
    results = []
    for name, caption in RESULTS.items():
        path = paths.REFERENCE / profile / f"{name}.md"
        if path.exists():
            results.append(f"{caption}\n\n{path.read_text()}")
    readme = paths.ROOT / "README.md"
    text = readme.read_text()
    text = _between(text, START, END, results)
    readme.write_text(_between(text, METHODS_START, METHODS_END, [markdown(methods_table())]))


def _between(text: str, start: str, end: str, parts: list[str]) -> str:
    block = "\n".join([f"{start}\n", *parts, end])
    return re.sub(f"{start}.*?{end}", lambda _: block, text, flags=re.S)


START, END = "<!-- results: written by python -m gcpo report --publish -->", "<!-- end of results -->"
METHODS_START, METHODS_END = START.replace("results", "methods"), END.replace("results", "methods")
# The tables that the README shows, and what it says above them.
RESULTS = {
    "claims_figure1": "**Figure 1** (alignment of uncertainty with gradient variance), claim by claim:",
    "claims_table1": "**Table 1** (training), claim by claim:",
    "table1": "**Table 1 on tinyqa**, F1 of sampled answers in per cent, beside the paper's NarrativeQA:",
    "zoo": "**All methods**, three seeds: sampled answers in per cent, difference from GRPO (95 % over questions):",
    "claims_zoo": "**All methods**, claim by claim:",
    "cost": "**Cost** of Table 1's runs:",
}
