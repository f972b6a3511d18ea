"""Gradient statistics of a policy: V(q) and every uncertainty measure for each of many queries (GCPO, App. D)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from torch import Tensor

from gcpo import measures, records, statistics, world
from gcpo.evaluation import generate, load_policy, texts
from gcpo.gradients import gradient_variance
from gcpo.methods import base_advantages
from gcpo.params import Params
from gcpo.rollouts import from_texts
from gcpo.semantics import Embedder, Entailment
from gcpo.tasks import get_task
from gcpo.training import models, quiet

CHUNK = 10  # queries between two writes: what a kill can lose

# Column -> what figures call it. The paper's four measures come first.
MEASURES = {
    "token_entropy": "Entropy",
    "se": "SE",
    "cd": "CD",
    "bot": "BoT",
    "se_rao": "SE (Rao)",
    "se_mc": "SE (MC)",
    "kle": "KLE",
    "predictive_entropy": "Predictive entropy",
    "self_consistency": "1 - consistency",
    "rd": "RD",
}


def gradient_statistics(params: Params) -> records.Run:
    """Sample G answers to each held-out query and write ``queries.csv``; a finished run is returned as it is.

    Columns, one line per query: V (Eq. 20, over ``gradient_parameters``), mean_squared_norm (of the group's mean
    gradient), the measures of :data:`MEASURES`, success_rate (mean of the task's first metric), zero_variance (of
    rewards), mean_tokens, answered. Chunks of queries are seeded by themselves, so that a run that was killed goes on
    to the same result.
    """
    run = records.load(records.folder("gradients", params))
    if run.finished:
        return run
    with records.record("gradients", params) as run:
        quiet()
        split = get_task(params.task).load(params.eval_split, limit=params.eval_limit, revision=params.data_revision)
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
                lines = _chunk(params, model, tokens, embedder, entailment, split.rows[first : first + CHUNK])
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


def _chunk(
    params: Params, model: Any, tokens: Any, embedder: Embedder, entailment: Entailment, rows: Any
) -> list[dict[str, Any]]:
    task, size = get_task(params.task), params.group_size
    ids, attention, completion = generate(
        model,
        tokens,
        [row.prompt for row in rows],
        n=size,
        temperature=params.temperature,
        max_new_tokens=params.max_completion_length,
    )
    flat = texts(tokens, ids, completion)
    groups = [flat[size * i : size * (i + 1)] for i in range(len(rows))]
    answers = [[task.extract(text) for text in group] for group in groups]
    scores = [
        [task.score(answer, row.references) for answer in group] for group, row in zip(answers, rows, strict=True)
    ]
    rewards = torch.tensor([[2.0 * s[task.reward_metric] for s in group] for group in scores])
    advantages = base_advantages(rewards)
    logps, entropies, mask = _token_statistics(model, ids, attention, completion, params.temperature)
    lengths = mask.sum(-1)
    rollouts = from_texts(
        rewards,
        groups,
        extract=task.extract,
        full_completion=task.full_completion,
        embedder=embedder,
        entailment=entailment,
        threshold=params.entailment_threshold,
        reward_range=params.reward_range,
    )
    per_response = ((logps * mask).sum(-1) / lengths.clamp(min=1)).view(len(rows), size)
    columns = {
        "token_entropy": measures.token_entropy(entropies.view(len(rows), size, -1), mask.view(len(rows), size, -1)),
        "se": measures.semantic_entropy(rollouts.clusters),
        "cd": measures.cosine_dispersion(rollouts.embeddings),
        "bot": measures.barycentric_transport(rollouts.embeddings, rollouts.clusters),
        "se_rao": measures.semantic_entropy(rollouts.clusters, per_response, estimator="rao"),
        "se_mc": measures.semantic_entropy(rollouts.clusters, per_response, estimator="mc"),
        "kle": measures.kernel_language_entropy(rollouts.nli),
        "predictive_entropy": measures.predictive_entropy(per_response),
        "self_consistency": measures.self_consistency(rollouts.clusters),
        "rd": measures.reward_dispersion(rewards, params.reward_range),
    }
    lines = []
    for i, row in enumerate(rows):
        own = slice(size * i, size * (i + 1))
        stats = gradient_variance(
            model, ids[own], attention[own], completion[own], advantages[i], params=params.gradient_parameters
        )
        lines.append(
            {
                "query": row.id,
                "V": stats.variance,
                "mean_squared_norm": stats.mean_squared_norm,
                **{name: float(values[i]) for name, values in columns.items()},
                "success_rate": sum(s[task.metrics[0]] for s in scores[i]) / size,
                "zero_variance": bool((rewards[i] == rewards[i, 0]).all()),
                "mean_tokens": float(lengths[own].float().mean()),
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


def selected(queries: pd.DataFrame, *, drop_top: float = 0.0, keep_zero: bool = True) -> pd.DataFrame:
    """The queries an analysis is about.

    Args:
        drop_top: share of the queries with the largest V to leave out; the paper leaves out 2 % (App. D.1: 20 of 1000).
        keep_zero: keep the queries whose rewards have no variance (V = 0, tied at the lowest rank).
    """
    kept = queries if keep_zero else queries[~queries["zero_variance"]]
    return kept.sort_values("V", kind="stable").head(len(kept) - round(drop_top * len(kept)))


def alignment(queries: pd.DataFrame, names: list[str], n: int = 10000, seed: int = 0) -> pd.DataFrame:
    """How each measure aligns with V (GCPO Eq. 21-23, App. D.4-D.7), a row per measure.

    Columns: spearman with low and high (95 % bootstrap over queries), auc and precision at the top 10 %, and mae
    (squared gradient units) and heldout_spearman of a 5-fold linear prediction.
    """
    rows = {}
    for name in names:
        u, v = queries[name].to_numpy(), queries["V"].to_numpy()
        rho, low, high = statistics.spearman_interval(u, v, n, seed)
        mae, heldout = statistics.heldout_prediction(u, v, seed=seed)
        rows[MEASURES[name]] = {
            "spearman": rho,
            "low": low,
            "high": high,
            "auc": statistics.top_auc(u, v),
            "precision": statistics.precision_at_top(u, v),
            "mae": mae,
            "heldout_spearman": heldout,
        }
    return pd.DataFrame(rows).T.rename_axis("measure").reset_index()


def advantage_of(queries: pd.DataFrame, best: str, others: list[str], n: int = 10000, seed: int = 0) -> pd.DataFrame:
    """Spearman of ``best`` with V minus that of each other measure, by paired bootstrap (GCPO App. D.6)."""
    v = queries["V"].to_numpy()
    rows = [
        (MEASURES[name], *statistics.paired_bootstrap(queries[best].to_numpy(), queries[name].to_numpy(), v, n, seed))
        for name in others
    ]
    return pd.DataFrame(rows, columns=["measure", "difference", "low", "high"])
