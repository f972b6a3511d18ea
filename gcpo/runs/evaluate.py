"""Answers of a policy to held-out questions: what they score, how long they are, and how sure it was of them."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor

from gcpo import io, seeds, statistics
from gcpo.masked import mean
from gcpo.runs.params import Params
from gcpo.runs.plan import Plan
from gcpo.runs.policies import load_policy_to_evaluate
from gcpo.runs.record import Run, claim, record
from gcpo.runs.train import train
from gcpo.runs.warm_start import made_first
from gcpo.semantics import answer_mask
from gcpo.tasks.base import Row
from gcpo.tasks.sampling import batches, ends, generate, texts, token_statistics
from gcpo.trainer.prefix import sharing

CHUNKS = "parts"  # folder of what a run has done, until it is finished


def evaluation(params: Params) -> Run:
    """Ask for a greedy and ``eval_samples`` sampled answers to each held-out question, unless that run is finished.

    ``answers.csv``, one line per answer:

    - query, decoding ("greedy", "sampled") and sample (its number among the question's, from 0);
    - every metric of the task, in [0, 1], and answered, whether there is an answer in it;
    - tokens, its length with the token that ends it, and cut_off, whether ``max_completion_length`` ended it instead;
    - nll, the mean over its tokens of their negative log-probability at the temperature of sampling, in nats: what EGPO
      calls entropy (Eq. 5), of greedy answers as well; entropy, the mean of the entropies of the distributions that
      tokens are drawn from. Both also of its parts: nll_thinking, up to the last ``</think>``, and nll_answer, after
      it. An answer without ``</think>`` has no thinking part, and a part without tokens no number.

    ``scores.csv``, what they come to (:func:`scores`), and ``completions.parquet``, their texts.

    With ``at_step`` the policy is that of the training run of the same parameters with so many steps, which is made
    first unless it is there.
    """
    return measured("evaluate", params, _evaluate)


def measured(kind: str, params: Params, measure: Callable[[Plan, Run, Sequence[Row], Any, Any], None]) -> Run:
    """Make a run of held-out questions to a policy, whose training comes first; a finished run is returned as it is.

    ``measure`` gets plan, run, questions, model and tokenizer.
    """
    plan = Plan(kind, params)
    with claim(plan) as run:
        if run.finished:
            return run
        trained = train(plan.training.params) if plan.training else None
        started = made_first(plan)
        with record(plan) as run:
            run.manifest |= started
            measure(plan, run, *load_policy_to_evaluate(plan, run, trained))
            shutil.rmtree(run.folder / CHUNKS)
    return run


def in_chunks(
    plan: Plan, run: Run, chunks: Sequence[slice], measure: Callable[[slice, int], Mapping[str, pd.DataFrame]]
) -> dict[str, pd.DataFrame]:
    """Return the tables that ``measure`` makes of each chunk of the questions, one below the other.

    A chunk is seeded by itself, with the seed that ``measure`` gets, and written at once: a run that was killed goes on
    from there, to the same result.
    """
    total = chunks[-1].stop
    run.progress(0, total, "questions")
    for chunk in chunks:
        path = run.folder / CHUNKS / f"{chunk.start:06d}"
        if not path.exists():
            seed = seeds.of_chunk(plan.params.seed, chunk.start)
            transformers.set_seed(seed)
            with io.replacing(path) as draft:
                draft.mkdir()
                for name, table in measure(chunk, seed).items():
                    table.to_parquet(draft / f"{name}.parquet", index=False)
        run.progress(chunk.stop, total, "questions")
    tables: dict[str, list[pd.DataFrame]] = {}
    for path in sorted((run.folder / CHUNKS).glob("*/*.parquet")):
        tables.setdefault(path.stem, []).append(pd.read_parquet(path))
    return {name: pd.concat(some, ignore_index=True) for name, some in tables.items()}


def _evaluate(plan: Plan, run: Run, questions: Sequence[Row], model: Any, tokens: Any) -> None:
    params = plan.params

    def measure(chunk: slice, _: int) -> dict[str, pd.DataFrame]:
        asked = partial(_answers, plan, model, tokens, questions[chunk])
        sampled = [asked("sampled", params.eval_samples)] if params.eval_samples else []
        return {"answers": pd.concat([asked("greedy", 1), *sampled])}

    sizes = {"n": max(1, params.eval_samples), "max_new_tokens": params.max_completion_length}
    chunks = [*batches(tokens, [row.messages for row in questions], **sizes)]
    answers = in_chunks(plan, run, chunks, measure)["answers"]
    with io.replacing(run.folder / "completions.parquet") as draft:
        answers[["query", "decoding", "sample", "completion"]].to_parquet(draft, index=False)
    run.table("answers.csv", answers.drop(columns="completion"))
    table = scores(answers, [*plan.task.metrics, "answered"])
    run.table("scores.csv", table)
    values = zip(table["statistic"] + "_" + table["metric"], table["value"], strict=True)
    run.manifest["results"] = {**dict(values), "questions": len(questions)}


class Sampled(NamedTuple):
    """Answers to some questions, those to one next to one another, each measured at the temperature of sampling."""

    ids: Int[Tensor, "N L"]
    attention: Int[Tensor, "N L"]
    completion: Int[Tensor, "N L"]
    logps: Float[Tensor, "N T"]
    entropies: Float[Tensor, "N T"]
    mask: Int[Tensor, "N T"]
    texts: list[str]

    def groups(self, size: int) -> list[list[str]]:
        """Return the texts in groups of ``size``, the answers to one question."""
        return [self.texts[start : start + size] for start in range(0, len(self.texts), size)]

    def of_tokens(self, size: int) -> dict[str, Float[Tensor, "B G T"]]:
        """Return logps, entropies and mask in groups of ``size``."""
        return {name: getattr(self, name).unflatten(0, (-1, size)) for name in ("logps", "entropies", "mask")}


def ask(plan: Plan, model: Any, tokens: Any, rows: Sequence[Row], n: int, temperature: float) -> Sampled:
    """Return ``n`` answers to each question; temperature 0 is greedy decoding."""
    prompts, longest = [row.messages for row in rows], plan.params.max_completion_length
    shares = plan.params.share_prompts
    with sharing(shares, model):
        made = generate(model, tokens, prompts, n=n, temperature=temperature, max_new_tokens=longest)
    with sharing(shares, model, width=int(made[2].any(0).float().argmax())):
        measured = token_statistics(model, *made, plan.params.temperature)
    return Sampled(*made, *measured, texts(tokens, made[0], made[2]))


def _answers(plan: Plan, model: Any, tokens: Any, rows: Sequence[Row], decoding: str, n: int) -> pd.DataFrame:
    """Return the lines of ``answers.csv`` of some questions, with each answer's text."""
    task, last = plan.task, set(ends(model, tokens))
    sampled = ask(plan, model, tokens, rows, n, plan.params.temperature if decoding == "sampled" else 0.0)
    made = [row[kept].tolist() for row, kept in zip(sampled.ids.cpu(), sampled.completion.bool().cpu(), strict=True)]
    lines = []
    for number, (text, ids) in enumerate(zip(sampled.texts, made, strict=True)):
        row, answer = rows[number // n], task.extract(text)
        line = {"query": row.id, "decoding": decoding, "sample": number % n, **task.score(answer, row.references)}
        lines.append(line | {"answered": float(answer is not None), "tokens": len(ids), "cut_off": ids[-1] not in last})
    decode = partial(tokens.decode, skip_special_tokens=True)
    sure = certainty(sampled.logps, sampled.entropies, sampled.mask, made, decode)
    return pd.DataFrame(lines).assign(**sure, completion=sampled.texts)


def certainty(
    logps: Float[Tensor, "N T"],
    entropies: Float[Tensor, "N T"],
    mask: Int[Tensor, "N T"],
    ids: Sequence[Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> dict[str, list[float]]:
    """Return nll and entropy of N completions and their parts by column of ``answers.csv``; nan where no token is.

    Args:
        logps: log-probabilities of the tokens, in nats.
        entropies: of the distributions that they were drawn from, in nats.
        mask: which tokens are the completion's.
        ids: those tokens.
        decode: tokens to text.
    """
    kept = mask.bool()
    answers = answer_mask(ids, decode)
    after = torch.nn.functional.pad(answers, (0, kept.shape[1] - answers.shape[1])).to(kept.device)
    columns = {}
    for suffix, part in {"": kept, "_thinking": kept & ~after, "_answer": kept & after}.items():
        for name, values in {"nll": -logps, "entropy": entropies}.items():
            averages = mean(values.double(), part).squeeze(-1)
            columns[name + suffix] = averages.where(part.any(-1), torch.nan).tolist()
    return columns


def scores(answers: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """Return the scores of answers, a row per metric and statistic: value, low and high (95 % interval), in [0, 1].

    Statistics are greedy; avg@n, the mean of a question's n samples; and pass@k for k = 2, 4, 8, ... up to n, the best
    of k samples, by its unbiased estimate (:func:`gcpo.statistics.best_of`). All are means over questions, which the
    intervals resample: they are about other questions, not about another training of the policy.

    Args:
        answers: lines of ``answers.csv``.
        metrics: the columns to score, in [0, 1].
    """
    rows = []
    for metric in metrics:
        of = {
            decoding: lines.pivot(index="query", columns="sample", values=metric).to_numpy()
            for decoding, lines in answers.groupby("decoding")
        }
        each = {"greedy": of["greedy"][:, 0]}
        if (samples := of.get("sampled")) is not None:
            n = samples.shape[1]
            each[f"avg@{n}"] = samples.mean(axis=1)
            each |= {f"pass@{2**i}": statistics.best_of(samples, 2**i) for i in range(1, n.bit_length())}
        for name, values in each.items():
            value, low, high = statistics.mean_interval(values)
            rows.append({"metric": metric, "statistic": name, "value": value, "low": low, "high": high})
    return pd.DataFrame(rows)
