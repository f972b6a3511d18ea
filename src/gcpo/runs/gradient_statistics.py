"""Gradient statistics of a policy: V(q) and every uncertainty measure for each of many queries (GCPO, App. D)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from jaxtyping import Float
from torch import Tensor

from gcpo import measures, world
from gcpo.gradients import gradient_variance
from gcpo.methods import base_advantages
from gcpo.methods.parts import likelihoods
from gcpo.rollouts import Rollouts
from gcpo.runs.manifest import Run, claim, record
from gcpo.runs.params import Params
from gcpo.runs.plan import Plan
from gcpo.runs.train import models, quiet
from gcpo.semantics import Embedder, Entailment, from_texts
from gcpo.tasks.base import Row
from gcpo.tasks.evaluation import generate, load_policy, texts

CHUNK = 10  # queries between two writes: what a kill can lose


def gradient_statistics(params: Params) -> Run:
    """Sample G answers to each held-out query and write ``queries.csv``; a finished run is returned as it is.

    Columns, one line per query: V (Eq. 20, over ``gradient_parameters``), mean_squared_norm (of the group's mean
    gradient), the measures of :data:`gcpo.reports.alignment.MEASURES`, success_rate (mean of the task's first metric),
    zero_variance (of rewards), mean_tokens, answered. Chunks of queries are seeded by themselves, so that a run that
    was killed goes on to the same result.
    """
    plan = Plan("gradients", params)
    with claim(plan) as run:
        return run if run.finished else _measure(plan)


def _measure(plan: Plan) -> Run:
    params = plan.params
    with record(plan) as run:
        quiet()
        split = plan.task.load(params.eval_split, limit=params.eval_limit, revision=params.data_revision)
        run.manifest["data"] = {"eval": split.source}
        model, tokens = load_policy(
            world.resolve(params.policy, "policy"), revision=params.policy_revision, dtype=params.dtype
        )
        run.manifest["models"] = models(params, model)
        embedder = Embedder(params.embedder)
        entailment = Entailment(world.resolve(params.entailment, "entailment"))
        run.write()
        parts = run.folder / "chunks"
        parts.mkdir(exist_ok=True)
        for first in range(0, len(split.rows), CHUNK):
            path = parts / f"{first:06d}.csv"
            if not path.exists():
                transformers.set_seed(params.seed * 1_000_003 + first)
                lines = _chunk(plan, model, tokens, embedder, entailment, split.rows[first : first + CHUNK])
                _write(path, lines)
                run.progress(min(first + CHUNK, len(split.rows)), len(split.rows), "queries")
        queries = pd.concat([pd.read_csv(path) for path in sorted(parts.glob("*.csv"))], ignore_index=True)
        run.table("queries.csv", queries)
        run.manifest["results"] = {
            "queries": len(queries),
            "success_rate": float(queries["success_rate"].mean()),
            "zero_variance": float(queries["zero_variance"].mean()),
        }
        shutil.rmtree(parts)
    return run


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    draft = path.with_suffix(".draft")
    pd.DataFrame(lines).to_csv(draft, index=False, float_format="%.9g")
    draft.replace(path)


def uncertainties(rollouts: Rollouts) -> dict[str, Float[Tensor, " B"]]:
    """Every measure of the rollouts' groups by its column; sequences count by their length-normalised likelihoods."""
    r, clusters, likelihood = rollouts, rollouts.clusters, likelihoods(rollouts)[0]
    return {
        "token_entropy": measures.token_entropy(r.entropies, r.mask),
        "se": measures.semantic_entropy(clusters),
        "cd": measures.cosine_dispersion(r.embeddings),
        "bot": measures.barycentric_transport(r.embeddings, clusters),
        "se_rao": measures.semantic_entropy(clusters, likelihood, estimator="rao"),
        "se_mc": measures.semantic_entropy(clusters, likelihood, estimator="mc"),
        "kle": measures.kernel_language_entropy(r.nli),
        "predictive_entropy": measures.predictive_entropy(likelihood),
        "self_consistency": measures.self_consistency(clusters),
        "rd": measures.reward_dispersion(r.rewards, r.reward_range),
    }


def _chunk(
    plan: Plan, model: Any, tokens: Any, embedder: Embedder, entailment: Entailment, rows: Sequence[Row]
) -> list[dict[str, Any]]:
    """A line for each query."""
    params, task, shape = plan.params, plan.task, (len(rows), plan.params.group_size)
    ids, attention, completion = generate(
        model,
        tokens,
        [row.prompt for row in rows],
        n=params.group_size,
        temperature=params.temperature,
        max_new_tokens=params.max_completion_length,
    )
    flat = texts(tokens, ids, completion)
    groups = [flat[shape[1] * i : shape[1] * (i + 1)] for i in range(len(rows))]
    scores = [
        [task.score(task.extract(text), row.references) for text in group]
        for group, row in zip(groups, rows, strict=True)
    ]
    logps, entropies, mask = _token_statistics(model, ids, attention, completion, params.temperature)
    rollouts = from_texts(
        torch.tensor([[task.reward_of(score) for score in group] for group in scores]),
        groups,
        extract=task.extract,
        full_completion=task.full_completion,
        embedder=embedder,
        entailment=entailment,
        threshold=params.entailment_threshold,
        reward_range=task.reward_range,
        logps=logps.unflatten(0, shape),
        entropies=entropies.unflatten(0, shape),
        mask=mask.unflatten(0, shape),
    )
    columns, advantages = uncertainties(rollouts), base_advantages(rollouts.rewards)
    lines = []
    for i, row in enumerate(rows):
        group = slice(shape[1] * i, shape[1] * (i + 1))
        stats = gradient_variance(
            model, ids[group], attention[group], completion[group], advantages[i], params=params.gradient_parameters
        )
        rewards = rollouts.rewards[i]
        lines.append(
            {
                "query": row.id,
                "V": stats.variance,
                "mean_squared_norm": stats.mean_squared_norm,
                **{name: float(values[i]) for name, values in columns.items()},
                "success_rate": sum(score[task.metrics[0]] for score in scores[i]) / shape[1],
                "zero_variance": bool((rewards == rewards[0]).all()),
                "mean_tokens": float(rollouts.mask[i].sum(-1).float().mean()),
                "answered": float(rollouts.answered[i].float().mean()),
            }
        )
    return lines


@torch.no_grad()
def _token_statistics(
    model: Any, ids: Tensor, attention: Tensor, completion: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability and entropy of every completion token under the distribution it was sampled from."""
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    start = int(completion.any(0).float().argmax())
    kept = []
    for rows in torch.arange(len(ids)).split(64):
        outputs = model(input_ids=ids[rows], attention_mask=attention[rows], position_ids=positions[rows])
        logs = (outputs.logits[:, start - 1 : -1].float() / temperature).log_softmax(-1)
        chosen = logs.gather(-1, ids[rows, start:].unsqueeze(-1)).squeeze(-1)
        kept.append((chosen.cpu(), -(logs.exp() * logs).sum(-1).cpu()))
    logps, entropies = (torch.cat(parts) for parts in zip(*kept, strict=True))
    return logps, entropies, completion[:, start:].cpu()
