"""Write the answers of the answer cloud, gcpo/reports/cloud/answers.json: run this file (five minutes on two cores).

GRPO trains on tinyqa with the laptop profile and seed 0. The starting policy and four checkpoints answer the first test
questions sixteen times each; shown is the question on which the share of right answers rises most, as training should
look. Its texts lie in the plane in which MiniLM's embeddings of all of them spread most.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from sklearn.decomposition import PCA

from gcpo import measures
from gcpo.runs.evaluate import evaluation
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.policies import rollouts_of
from gcpo.runs.profiles import load_profile
from gcpo.semantics import Embedder

FILE = Path(__file__).resolve().parents[1] / "gcpo" / "reports" / "cloud" / "answers.json"
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
    """Return the answers as :func:`gcpo.reports.cloud.read` has them."""
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


if __name__ == "__main__":
    FILE.write_text(json.dumps(cloud(), ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
