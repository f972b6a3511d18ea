"""A page per method for the site: what it does, facts, equation, a worked group, what we measured, how to use it, code.

Facts come from its row of ``METHODS``, words and equations from docs/methods.yaml, numbers from the reference.
"""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path

import torch

from gcpo.methods import METHODS, weights
from gcpo.methods.forms import FORMS
from gcpo.methods.group import GroupFactor
from gcpo.methods.table import Method
from gcpo.reports.methods import weight_range_in_words
from gcpo.reports.tables import CALLED, with_interval, written
from gcpo.rollouts import Rollouts
from gcpo.runs.profiles import read_yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "methods"
WORDS = read_yaml(ROOT / "docs" / "methods.yaml")
SIZES = (4, 8, 16)
WIDTH, HEIGHT, EDGE, TOP = 360, 200, 44, 30  # of a curve's picture, in pixels
MEASURES = {  # of a factor, as the equations above its curve have it
    "BarycentricTransport": "BoT",
    "CosineDispersion": "CD",
    "KernelEntropy": "VNE",
    "RewardDispersion": "RD",
    "RewardVariance": "Var",
    "SemanticEntropy": "SE",
}


def write() -> list[str]:
    """Write the pages that have changed into docs/methods, which git ignores, and return their names."""
    FOLDER.mkdir(exist_ok=True)
    for name, row in METHODS.items():
        path, text = FOLDER / f"{name}.md", page(name, row)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return list(METHODS)


def page(name: str, row: Method) -> str:
    """Return the page of a method in Markdown."""
    facts = {
        "Paper": row.paper,
        "Rule": f"`{row.rule}`".replace("|", r"\|"),
        "Acts on": {"base": "nothing: it is a base advantage", "advantage": "advantages", "reward": "rewards"}.get(
            row.acts, "the loss"
        ),
        "One weight per": row.granularity,
        "Effect": row.direction or "none beside its base advantage",
        "Reads": ", ".join(["rewards", *sorted(row.reads)]),
        "Weight": reach(name),
    }
    table = "\n".join(["| fact | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items())])
    words = WORDS.get(name, {})
    parts = [f"# {CALLED[name]}: `{name}`", words.get("says", ""), f"## Quick facts\n\n{table}"]
    if words:
        parts.append(f"## Key equation\n\n$$\n{words['equation']}\n$$")
    parts += [worked(name, row), measured(name)]
    curves = [
        curve(factor) for factor in row.factors if isinstance(factor, GroupFactor) and factor.highest(16) < math.inf
    ]
    if curves:
        parts.append("## Weight against measure\n\n" + "\n\n".join(curves))
    parts.append(f"""## Use it
In a script of your own, in place of TRL's classes:

```python
from gcpo import GCPOConfig, GCPOTrainer

args = GCPOConfig("output", method="{name}")
```

As a run of this project, on the embedded policy and on Qwen2.5-1.5B (one GPU of 80 GB):

```
gcpo run --profile laptop -p method {name}
gcpo run --profile paper -p method {name} -p task math
```""")
    if sources := dict.fromkeys(type(one) for one in row.components):
        code = "\n\n".join(f"```python\n{inspect.getsource(source)}```" for source in sources)
        parts.append(f"## Code\n\n{code}")
    if rows := choices(name):
        parts.append("## Where the paper is silent\n\n| | gap, and what we do |\n|---|---|\n" + "\n".join(rows))
    ends = [f"{row.paper}; [all methods](../../METHODS.md); [the words](../glossary.md)"]
    ends += [f"[notebook {words['read'][:2]}](../../notebooks/{words['read']}.ipynb)"] if words else []
    parts.append(f"## Read on\n\n{'; '.join(reversed(ends))}.")
    return "\n\n".join(filter(None, parts)) + "\n"


def reach(name: str) -> str:
    """Return the range of a method's weight, once where it is the same for groups of all sizes."""
    found = {size: weight_range_in_words(name, size) for size in SIZES}
    if len({*found.values()}) == 1:
        return found[SIZES[0]]
    return "; ".join(f"{words} at G = {size}" for size, words in found.items())


def worked(name: str, row: Method) -> str:
    """Return what a method makes of the four answers of notebook 00; nothing of one that reads more than they have."""
    if row.acts != "advantage" or not row.reads <= {"clusters", "embeddings"} or "our control" in row.paper:
        return ""
    arrows = torch.tensor([[[1, 0], [1, 0], [0.8, 0.6], [0, 1]]])
    four = Rollouts(torch.tensor([[2.0, 2, 0, 0]]), embeddings=arrows, clusters=torch.tensor([[0, 0, 1, 2]]))
    weight = weights(name, four)[0, 0].item()
    return f"""## A worked group

[Notebook 00](../../notebooks/00_start_here.ipynb) has four answers: two right ones in one cluster, a near miss, and a
wrong one. GRPO's advantages are +0.866 and -0.866. This method's weight is {weight:.3f}, so they become
{0.866 * weight:+.3f} and {-0.866 * weight:+.3f}."""


def measured(name: str) -> str:
    """Return a method's score minus GRPO's in both worlds, as report 21 has it, and its gain of one step."""
    pairs = written("world_a", "table1_pairs", reference=True)
    pairs = pairs[pairs["label"] == f"{CALLED[name]} minus GRPO"].set_index("task")
    steps = written("world_a", "one_step_pooled", reference=True)
    steps = steps[(steps["method"] == name) & (steps["policy"] == "starting policy")].set_index("task")
    rows = []
    for task, called in {"tinyqa": "short answers", "tinymath": "mathematics"}.items():
        score = with_interval(*pairs.loc[task, ["difference", "low", "high"]]) if task in pairs.index else ""
        gain = with_interval(*steps.loc[task, ["estimate", "low", "high"]]) if task in steps.index else ""
        rows.append(f"| {called} | {score} | {gain} |")
    if pairs.empty and steps.empty:
        return ""
    head = "| task | score minus GRPO's, points | one step minus GRPO's, % of GRPO's gain |\n|---|---|---|\n"
    says = "Means over both worlds with their own 95 % intervals ([21](../../notebooks/21_table1.ipynb),"
    return (
        "## What we measured\n\n"
        + head
        + "\n".join(rows)
        + (f"\n\n*{says} [28](../../notebooks/28_one_step.ipynb)). Empty: not compared so.*")
    )


def choices(name: str) -> list[str]:
    """Return the rows of DEVIATIONS.md that name a method."""
    lines = (ROOT / "DEVIATIONS.md").read_text().splitlines()
    named = [line.split(" | ") for line in lines if re.match(r"\| \d", line) and f"`{name}`" in line]
    return [f"{cells[0]} | {cells[1]} |" for cells in named]


def curve(factor: GroupFactor) -> str:
    """Return a factor's weight over all values of its measure for groups of 16, as a drawing in HTML."""
    most = factor.highest(16)
    score = torch.linspace(0, most, 61, dtype=torch.float64)
    weight = FORMS[factor.form](score, factor.strength(16))
    low, high = min(0.75, weight.min().item()), max(1.25, weight.max().item())

    def across(value: float) -> float:
        return EDGE + (WIDTH - EDGE - 10) * value / most

    def down(value: float) -> float:
        return TOP + (HEIGHT - EDGE - TOP) * (high - value) / (high - low)

    points = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in zip(score.tolist(), weight.tolist(), strict=True))
    name = MEASURES[factor.kind]
    said = f"Weight of {name} over {name}: {weight[0]:.3f} at 0, {weight[-1]:.3f} at {most:.3g}"
    text = 'font-size="12" fill="currentColor"'
    marks = "".join(
        f'<text {text} x="{EDGE - 6}" y="{down(value) + 4:.1f}" text-anchor="end">{value:.3f}</text>'
        for value in dict.fromkeys((1.0, round(weight[-1].item(), 3)))
    )
    return (
        f'<svg role="img" aria-label="{said}" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" style="max-width: 100%">'
        f'<path d="M {EDGE} {down(1):.1f} H {WIDTH}" stroke="currentColor" stroke-dasharray="3"/>'
        f'<text {text} x="0" y="12">weight ω<tspan dy="3" font-size="9">{name}</tspan></text>'
        f'<polyline points="{points}" fill="none" stroke="#3182bd" stroke-width="3"/>{marks}'
        f'<text {text} x="{EDGE}" y="{HEIGHT - 20}">0</text>'
        f'<text {text} x="{WIDTH}" y="{HEIGHT - 20}" text-anchor="end">{most:.3g}</text>'
        f'<text {text} x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{name} (G = 16)</text></svg>'
    )
