"""Gradient statistics of a policy: V(q) and every uncertainty measure for each of many queries (GCPO, App. D), and the
assumption behind them, that rollouts which differ in meaning differ in gradient (App. C).

All of it follows from the inner products of a group's gradients at the temperature they were sampled at. The paper's
V(q) (Eq. 20) is of A_i g_i; Eq. 2-3 and App. C speak of g_i, without advantages: columns of that begin with ``score_``,
and pairs are of g_i unless they say otherwise.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import psutil
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from gcpo import gradients, measures, statistics
from gcpo.methods import base_advantages
from gcpo.methods.components import likelihoods
from gcpo.one_pass import gradient_grams
from gcpo.rollouts import Rollouts
from gcpo.runs.distributed import AT_ONCE
from gcpo.runs.evaluate import Sampled, ask, in_chunks, measured
from gcpo.runs.params import Params
from gcpo.runs.plan import Plan
from gcpo.runs.policies import cut_by, rollouts_of
from gcpo.runs.record import Run
from gcpo.tasks.base import Row
from gcpo.tasks.sampling import batches, grade, prompt_ids
from gcpo.trainer.prefix import shared

PAIRS = 20  # pairs of a query kept in pairs.csv
CHUNK = 10  # queries between two writes at most: what a kill can lose


def gradient_statistics(params: Params) -> Run:
    """Sample G answers to each held-out query and write what follows; a finished run is returned as it is.

    ``queries.csv``, one line per query, with its document where a task has several questions about one:

    - V (Eq. 20, over ``gradient_parameters``, of adapters alone with ``lora_rank``, at the temperature of sampling),
      V_t1 (the same rollouts and advantages, g_i at temperature 1; missing with ``gradient_parameters``), V_within and
      V_between (its parts by the clusters of BoT, Eq. 3; their sum is V), score_within and score_between (the same of
      g_i), mean_squared_norm (of the group's mean A_i g_i);
    - the measures of :data:`gcpo.reports.alignment.MEASURES`; the same with the suffix ``_half`` from the first half of
      the group alone, and V_half from the other half, advantages included (missing where G < 4);
    - pair_spearman: over the group's pairs, of 1 - cosine of the embeddings with |g_i - g_j|; pair_spearman_distinct
      leaves out pairs of equal texts, pair_spearman_advantage takes A_i g_i; missing where either side is constant;
    - success_rate (mean of the task's first metric), zero_variance (of rewards), clusters (how many), mean_tokens,
      answered.

    ``rivals.csv``, one line per query: :data:`gcpo.reports.alignment.RIVALS`, of the group and of its first half.

    ``answers.csv``, one line per answer: query, sample (its number among the question's), reward and text.

    ``pairs.csv``: :data:`PAIRS` pairs of every query, drawn by the seed; columns as in :func:`pair_table`.

    With ``at_step`` the policy is that of the training run of the same parameters with so many steps, which is made
    first unless it is there.
    """
    return measured("gradients", params, _measure)


def _measure(plan: Plan, run: Run, questions: Sequence[Row], model: Any, tokens: Any) -> None:
    params, limit = plan.params, limit_of(plan.params, model, tokens, questions)
    rollouts, size = rollouts_of(plan), params.group_size

    def measure(chunk: slice, seed: int) -> dict[str, pd.DataFrame]:
        rng, found = np.random.default_rng(seed), []
        sampled = ask(plan, model, tokens, questions[chunk], size, params.temperature)
        for tables in _statistics(plan, model, rollouts, questions[chunk], sampled, limit):
            count = len(tables["pairs"])
            kept = np.sort(rng.choice(count, size=min(PAIRS, count), replace=False))
            found.append({**tables, "pairs": tables["pairs"].iloc[kept]})
            run.progress(chunk.start + len(found), len(questions), "questions")
        return {name: pd.concat([tables[name] for tables in found]) for name in found[0]}

    prompts, longest = [row.messages for row in questions], params.max_completion_length
    chunks = [*batches(tokens, prompts, n=size, max_new_tokens=longest, batch_size=CHUNK)]
    for name, table in in_chunks(plan, run, chunks, measure).items():
        run.table(f"{name}.csv", table)
    run.manifest["cut"] = cut_by(rollouts.keywords["embedder"], rollouts.keywords["entailment"])
    written = pd.read_csv(run.folder / "queries.csv", float_precision="round_trip")
    means = written[["success_rate", "zero_variance", "pair_spearman"]].mean().dropna().astype(float)
    run.manifest["results"] = {"queries": len(written), **means.to_dict()}


def uncertainties(rollouts: Rollouts) -> dict[str, Float[Tensor, " B"]]:
    """Return every measure of the rollouts' groups by its column; clusters weigh sequences by mean log-likelihood."""
    r, clusters, likelihood = rollouts, rollouts.clusters, likelihoods(rollouts)[0]
    total, lengths = (r.logps * r.mask).sum(-1), r.mask.sum(-1)
    return {
        "token_entropy": measures.token_entropy(r.entropies, r.mask),
        "se": measures.semantic_entropy(clusters),
        "cd": measures.cosine_dispersion(r.embeddings),
        "bot": measures.barycentric_transport(r.embeddings, clusters),
        "se_rao": measures.semantic_entropy(clusters, likelihood, estimator="rao"),
        "se_mc": measures.semantic_entropy(clusters, likelihood, estimator="mc"),
        "kle": measures.kernel_language_entropy(r.nli),
        "predictive_entropy": measures.predictive_entropy(r.exact_clusters),
        "sequence_entropy": measures.sequence_entropy(total),
        "sequence_entropy_mean": measures.sequence_entropy(total, normalise=True, lengths=lengths),
        "self_consistency": measures.self_consistency(clusters),
        "rd": measures.reward_dispersion(r.rewards, r.reward_range),
    }


def rivals(rollouts: Rollouts) -> dict[str, Float[Tensor, " B"]]:
    """Return every rival measure of the rollouts' groups by its column."""
    r = rollouts
    return {
        "snne": measures.nearest_neighbour_entropy(r.embeddings),
        "eigenscore": measures.eigenscore(r.embeddings),
        "degree": measures.degree_uncertainty(r.nli),
        "eccentricity": measures.eccentricity(r.nli),
        "eigenvalues": measures.eigenvalue_uncertainty(r.nli),
        "density": measures.semantic_density(r.nli, likelihoods(r)[0], groups=r.exact_clusters),
    }


def _statistics(
    plan: Plan, model: Any, rollouts: Callable[..., Rollouts], rows: Sequence[Row], sampled: Sampled, limit: float
) -> Iterator[dict[str, pd.DataFrame]]:
    """Yield, of each query, its lines of ``queries.csv``, ``rivals.csv`` and ``answers.csv``, and all its pairs."""
    task, size = plan.task, plan.params.group_size
    groups, per_token = sampled.groups(size), sampled.of_tokens(size)
    scores = grade(task, rows, groups)
    rewards = torch.tensor([[task.reward_of(score) for score in group] for group in scores])

    def first(count: int) -> Rollouts:
        texts = [group[:count] for group in groups]
        return rollouts(rewards[:, :count], texts, **{name: values[:, :count] for name, values in per_token.items()})

    whole, half = first(size), size // 2 if size >= 4 else 0
    part = first(half) if half else None

    def with_half(of: Callable[[Rollouts], dict[str, Tensor]]) -> dict[str, Tensor]:
        columns, halves = of(whole), of(part) if part else {}
        missing = torch.full((len(rows),), torch.nan)
        return columns | {f"{name}_half": halves.get(name, missing) for name in columns}

    columns, beside = with_half(uncertainties), with_half(rivals)
    advantages, others = base_advantages(rewards), base_advantages(rewards[:, half:]) if half else None
    for i, row in enumerate(rows):
        gram, plain = _gradients(plan, model, sampled, i, advantages[i], limit)
        pairs = pair_table(whole.embeddings[i], gram, advantages[i], whole.clusters[i], groups[i])
        line = {
            "query": row.id,
            **({"document": row.document} if row.document else {}),
            **variances(gram, advantages[i], whole.clusters[i]),
            "V_t1": plain,
            "V_half": variance(gram[half:, half:], others[i]) if others is not None else np.nan,
            **{name: float(values[i]) for name, values in columns.items()},
            **pair_correlations(pairs),
            "success_rate": sum(score[task.metrics[0]] for score in scores[i]) / size,
            "zero_variance": bool((rewards[i] == rewards[i][0]).all()),
            "clusters": len(whole.clusters[i].unique()),
            "mean_tokens": float(whole.mask[i].sum(-1).float().mean()),
            "answered": float(whole.answered[i].float().mean()),
        }
        other = {"query": row.id, **{name: float(values[i]) for name, values in beside.items()}}
        said = {"query": row.id, "sample": range(size), "reward": rewards[i].tolist(), "text": groups[i]}
        tables = {"queries": pd.DataFrame([line]), "rivals": pd.DataFrame([other]), "pairs": pairs.assign(query=row.id)}
        yield tables | {"answers": pd.DataFrame(said)}


def _gradients(
    plan: Plan, model: Any, sampled: Sampled, query: int, advantages: Float[Tensor, " G"], limit: float
) -> tuple[Float[Tensor, "G G"], float]:
    """Return the inner products of a query's gradients at the temperature of sampling, and V(q) at temperature 1; from
    one pass of all rows as well where the gradients of all rows at once exceed the limit, or what is ample."""
    params = plan.params
    group = slice(params.group_size * query, params.group_size * (query + 1))
    batch = sampled.ids[group], sampled.attention[group], sampled.completion[group]
    chosen, heats = params.gradient_parameters, [params.temperature, *[1.0] * (params.gradient_parameters is None)]
    size, width = sum(p.numel() for p in gradients.chosen_parameters(model, chosen)), batch[0].shape[1]
    apart = gradients.pass_bytes(model, 1, width, width) + 4 * size * (params.group_size + 4)
    if params.share_prompts or apart > min(limit, gradients.AMPLE):
        reads: Any = {"reads": partial(shared, model)} if params.share_prompts else {}
        found = gradient_grams(model, *batch, params=chosen, temperatures=heats, memory_limit=limit, **reads)
        return found[0], variance(found[1], advantages) if found[1:] else np.nan
    gram = gradients.gradient_gram(model, *batch, params=chosen, temperature=params.temperature)
    return gram, gradients.gradient_variance(model, *batch, advantages, params=chosen, temperature=1.0).variance


def limit_of(
    params: Params, model: Any, tokens: Any, questions: Sequence[Row], rows: int = 1, kept: float = 0.0
) -> float:
    """Return the bytes that gradients may take beside the model: ``memory_limit``, or three quarters of what is free
    now, shared among the runs that are made at once.

    Raises:
        MemoryError: the prompt of a question, in so many rows and beside the bytes that are kept, needs more.
    """
    with contextlib.suppress(AttributeError, TypeError):  # no glibc
        ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what is freed goes back, else it takes twice the room
    own, shared = params.memory_limit, int(os.environ.get(AT_ONCE, 1))
    limit = 0.75 * _free(model.device) / shared if own is None else 1e9 * own
    for row, ids in zip(questions, prompt_ids(tokens, [row.messages for row in questions]), strict=True):
        if (need := kept + gradients.pass_bytes(model, rows, len(ids) + 1, 2, gradients.checkpointed(model))) > limit:
            raise gradients.too_much(f"question {row.id}, a prompt of {len(ids)} tokens", need, limit)
    return limit


def _free(device: torch.device) -> float:
    """Return the free bytes of a GPU, or of this machine."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def variance(gram: Float[Tensor, "G G"], advantages: Float[Tensor, " G"]) -> float:
    """Return V(q), Eq. 20, from the inner products of g_i."""
    return variances(gram, advantages, torch.zeros(len(gram), dtype=torch.long))["V"]


def variances(
    gram: Float[Tensor, "G G"], advantages: Float[Tensor, " G"], clusters: Int[Tensor, " G"]
) -> dict[str, float]:
    """Return V(q), Eq. 20, with its parts within and between clusters (Eq. 3), and those of the variance of g_i."""
    scaled = advantages.double().unsqueeze(-1) * advantages.double() * gram
    within, between = (float(part) for part in gradients.gram_decomposition(scaled, clusters))
    score_within, score_between = (float(part) for part in gradients.gram_decomposition(gram, clusters))
    return {
        "V": within + between,
        "V_within": within,
        "V_between": between,
        "score_within": score_within,
        "score_between": score_between,
        "mean_squared_norm": float(scaled.mean()),
    }


def pair_table(
    embeddings: Float[Tensor, "G d"],
    gram: Float[Tensor, "G G"],
    advantages: Float[Tensor, " G"],
    clusters: Int[Tensor, " G"],
    texts: Sequence[str],
) -> pd.DataFrame:
    """Return the pairs i < j of a group: how far they are in meaning, and how far in gradient (GCPO App. C, F.4).

    Columns: first and second (places in the group), embedding_distance (1 - cosine, App. C's d), gradient_distance
    |g_i - g_j|, advantage_distance |A_i g_i - A_j g_j|, same_cluster, same_text. Embedding distances are rounded to
    1e-6, float32's precision, below which equal answers would differ.
    """
    first, second = torch.triu_indices(len(gram), len(gram), 1)
    unit = normalize(embeddings.double(), dim=-1)
    scaled = advantages.double().unsqueeze(-1) * advantages.double() * gram
    return pd.DataFrame(
        {
            "first": first,
            "second": second,
            "embedding_distance": (1 - (unit[first] * unit[second]).sum(-1)).clamp(min=0).round(decimals=6),
            "gradient_distance": gradients.gram_distances(gram)[first, second],
            "advantage_distance": gradients.gram_distances(scaled)[first, second],
            "same_cluster": clusters[first] == clusters[second],
            "same_text": [texts[i] == texts[j] for i, j in zip(first.tolist(), second.tolist(), strict=True)],
        }
    )


def pair_correlations(pairs: pd.DataFrame) -> dict[str, float]:
    """Return Spearman's correlations of embedding with gradient distances over a group's pairs; nan where one side is
    constant."""
    different = pairs[~pairs["same_text"]]
    return {
        "pair_spearman": _rho(pairs, "gradient_distance"),
        "pair_spearman_distinct": _rho(different, "gradient_distance"),
        "pair_spearman_advantage": _rho(pairs, "advantage_distance"),
    }


def _rho(pairs: pd.DataFrame, column: str) -> float:
    enough = len(pairs) >= statistics.FEWEST_POINTS
    return statistics.spearman(pairs["embedding_distance"], pairs[column]) if enough else np.nan
