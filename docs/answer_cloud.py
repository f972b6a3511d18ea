"""Write the answers of the answer cloud, docs/pieces/cloud.json, and their picture: run this file (five minutes on two
cores); with ``--picture`` the picture alone, from the answers that are there.

GRPO trains on tinyqa with the laptop profile and seed 0. The starting policy and four checkpoints answer the first test
questions sixteen times each; shown is the question on which the share of right answers rises most, as training should
look. Its texts lie in the plane in which MiniLM's embeddings of all of them spread most.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.figure import Figure
from sklearn.decomposition import PCA

from gcpo import measures
from gcpo.reports.figures import PALETTE, set_style
from gcpo.runs.evaluate import evaluation
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.policies import rollouts_of
from gcpo.runs.profiles import load_profile
from gcpo.semantics import Embedder

DOCS = Path(__file__).resolve().parent
FILE, PICTURE = DOCS / "pieces" / "cloud.json", DOCS / "pictures" / "answer_cloud.png"
STEPS, QUESTIONS, SAMPLES = (0, 16, 32, 48, 64), 24, 16


def asked(step: int) -> tuple[Plan, pd.DataFrame]:
    """Return the plan of the evaluation of a checkpoint, and its sampled answers: query, completion."""
    own = {"task": "tinyqa", "method": "grpo", "seed": 0, "at_step": step, "validation_limit": 0}
    params = validate({**load_profile("laptop"), **own, "eval_limit": QUESTIONS, "eval_samples": SAMPLES})
    run = evaluation(params)
    answers = pd.read_parquet(run.folder / "completions.parquet").query("decoding == 'sampled'")
    return Plan("evaluate", params), answers


def group(plan: Plan, row: Any, given: list[str]) -> dict[str, float]:
    """Return the measures of one group of answers."""
    rewards = torch.tensor([[plan.task.reward(text, row.references) for text in given]])
    found = rollouts_of(plan)(rewards, [given])
    return {
        "SE": float(measures.semantic_entropy(found.clusters)),
        "CD": float(measures.cosine_dispersion(found.embeddings)),
        "BoT": float(measures.barycentric_transport(found.embeddings, found.clusters)),
        "RD": float(measures.reward_dispersion(rewards, plan.task.reward_range)),
    }


def cloud() -> dict[str, Any]:
    """Return the answers: question, references, samples, texts (each with x, y and whether it is right) and, for each
    checkpoint, its step, how often each text was given, and the measures of the group."""
    found = {step: asked(step) for step in STEPS}
    plan, _ = found[0]
    rows = {row.id: row for row in plan.load("test", QUESTIONS).rows}

    def right(text: str, name: str) -> bool:
        return plan.task.score(text, rows[name].references)["f1"] == 1

    shares = pd.DataFrame(
        {
            step: own.groupby("query")["completion"].apply(lambda of: of.map(lambda text: right(text, of.name)).mean())
            for step, (_, own) in found.items()
        }
    )
    name = (shares[STEPS[-1]] - shares[STEPS[0]]).idxmax()
    given = {step: own.loc[own["query"] == name, "completion"].str.strip().tolist() for step, (_, own) in found.items()}
    texts = list(dict.fromkeys(text for own in given.values() for text in own))
    unit = torch.nn.functional.normalize(Embedder("all-MiniLM-L6-v2")(texts).double(), dim=1).numpy()
    plane = PCA(2).fit_transform(unit).round(4).tolist()
    points = [
        {"step": step, "counts": [own.count(text) for text in texts],
         "measures": {key: round(value, 3) for key, value in group(plan, rows[name], own).items()}}
        for step, own in given.items()
    ]  # fmt: skip
    dots = [{"text": t, "x": x, "y": y, "right": right(t, name)} for t, (x, y) in zip(texts, plane, strict=True)]
    question = rows[name].prompt.rsplit(". ", 1)[-1].strip()
    return {
        "question": question, "references": list(rows[name].references), "samples": SAMPLES,
        "texts": dots, "checkpoints": points,
    }  # fmt: skip


def picture(cloud: dict[str, Any]) -> Figure:
    """Return a panel per checkpoint, with a dot per text, as large as it was given often."""
    set_style()
    drawn, axes = plt.subplots(1, len(cloud["checkpoints"]), figsize=(10.4, 3.4), sharex=True, sharey=True)
    for axis, point in zip(axes, cloud["checkpoints"], strict=True):
        for text, count in zip(cloud["texts"], point["counts"], strict=True):
            if count:
                look = {"color": PALETTE[0 if text["right"] else 1], "marker": "o" if text["right"] else "X"}
                axis.scatter(text["x"], text["y"], s=22 * count, alpha=0.75, linewidth=0, **look)
        said = "\n".join(f"{name} {value:.2f}" for name, value in point["measures"].items())
        axis.set(title=f"step {point['step']}", xticks=[], yticks=[])
        axis.set_xlabel(said, fontsize=8)
    axes[0].margins(0.2)
    return drawn


if __name__ == "__main__":
    if "--picture" not in sys.argv:
        FILE.write_text(json.dumps(cloud(), ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    drawn = picture(json.loads(FILE.read_text(encoding="utf-8")))
    drawn.savefig(PICTURE, bbox_inches="tight", metadata={"Software": None})
