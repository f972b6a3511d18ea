"""One step, paired: what every method's weights would gain from the same rollouts, and what any weights could.

A policy answers training questions, in the batches of a step, and held-out ones. Each method makes an update u_b of
every batch b (:mod:`gcpo.updates`). Its gain is that of the expected reward on the held-out questions, to first order,
per unit of step: sum_b <h, P_b u_b> / sqrt(sum_b |P_b u_b|^2). The preconditioner P_b is GRPO's for all methods, which
keeps the gain quasi-concave in weights: under SGD the factor c_b that clipping leaves of GRPO's update, under Adam
c_b / (sqrt(v_b) + epsilon), with v_b = beta_2 v + (1 - beta_2) (c_b u_b)^2 of GRPO's u_b, and v the mean of (c u)^2
over batches of held-out questions: Adam at rest.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import transformers
from jaxtyping import Bool, Float
from scipy.linalg import block_diag
from torch import Tensor

from gcpo import measures, seeds, updates
from gcpo.gradients import checkpointed, chosen_parameters, computed_again, pass_bytes
from gcpo.methods import METHODS, Method, modulate
from gcpo.rollouts import Rollouts
from gcpo.runs.evaluate import Sampled, ask, in_chunks, measured
from gcpo.runs.gradients import limit_of
from gcpo.runs.params import Params
from gcpo.runs.plan import Plan
from gcpo.runs.policies import rollouts_of
from gcpo.runs.record import Run, read_table
from gcpo.tasks.base import Row, check_disjoint
from gcpo.tasks.sampling import grade
from gcpo.trainer.prefix import sharing
from gcpo.weights import weight_range

BASE = "grpo"  # the method that gains are relative to
ORACLE = "oracle"  # any weights of at least 0
FOLDS = 10  # of the held-out questions, each with a gradient of its own
DOTS = [f"dot_{fold}" for fold in range(FOLDS)]
EVEN, ODD = slice(0, None, 2), slice(1, None, 2)
CHOSEN_BY = {"ceiling": slice(None), "even": EVEN, "odd": ODD}  # kind of weights -> the folds that choose them
COUNTED_ON = {"own": slice(None), "ceiling": slice(None), "even": ODD, "odd": EVEN}


def one_step(params: Params) -> Run:
    """Measure the gain of one step of each method of ``compared``, on the same rollouts, unless that run is finished.

    The batches are ``step_batches`` times ``prompts_per_step`` questions of ``train_split``, the first that a run of
    this seed trains on. With ``at_step`` the
    policy is that of the training run of the same parameters with so many steps, which is made first.

    ``updates.csv``, a line per batch, optimizer ("sgd", "adam"), method and kind of weights: dot_0 to dot_9 (<h, P u>,
    with h of each fold of held-out questions), square (|P u|^2) and spread (highest less lowest weight, over the mean,
    where questions have one weight each). Kinds are "own"; "ceiling", the weights within the method's range that gain
    most on all folds, which flatters them; "even" and "odd", those that gain most on these folds alone. The method
    "oracle" has the range of all weights that are at least 0.

    ``questions.csv``, a line per training question and optimizer: batch, query, reward (its answers' mean), dot_0 to
    dot_9 and square (of its part of GRPO's update), and its weight by each method that gives it one; with
    ``reward_noise`` also misgraded, whether its rewards are another's (:func:`misgraded`). ``grams.csv``, a
    line per batch and optimizer, has the inner products of these parts, gram_0 to gram_63 of eight questions, of which
    the gain of any weights follows.

    ``gains.csv``, the gain of each line's method and weights over GRPO's, less 1 (:func:`gains`).
    """
    return measured("one_step", params, _measure)


def _measure(plan: Plan, run: Run, questions: Sequence[Row], model: Any, tokens: Any) -> None:
    params, at_once = plan.params, plan.params.prompts_per_step
    splits = {"train": plan.load(params.train_split, params.step_batches * at_once, seed=params.seed)}
    splits["eval"] = plan.load(params.eval_split, params.eval_limit)
    splits = check_disjoint(splits, skip=params.skip_malformed)
    run.manifest["data"] = {name: split.source for name, split in splits.items()}
    rows = splits["train"].rows
    asker = Asker(plan, model, tokens, [*rows, *questions])
    chunks = [slice(at_once * batch, at_once * (batch + 1)) for batch in range(len(rows) // at_once)]

    @functools.cache
    def held() -> Held:  # a run that goes on makes it again
        transformers.set_seed(params.seed)
        return _held_out(asker, questions, lambda done: run.progress(done, len(questions), "held-out questions"))

    def measure(chunk: slice, seed: int) -> dict[str, pd.DataFrame]:
        known = held()
        transformers.set_seed(seed)
        return _batch(asker, known, rows[chunk], chunk.start // at_once)

    tables = in_chunks(plan, run, chunks, measure)
    run.table("updates.csv", pd.concat([tables["updates"], _ceilings(tables, asker.methods, params.group_size)]))
    run.table("questions.csv", tables["questions"])
    grams = tables["grams"]
    run.table("grams.csv", grams[["batch", "optimizer"]].join(pd.DataFrame([*grams["gram"]]).add_prefix("gram_")))
    found = gains(read_table(run.folder / "updates.csv"))
    run.table("gains.csv", found)
    own = found.query("weights == 'own' and optimizer == 'adam'").set_index("method")["gain"]
    reached = {f"gain_{name}": float(gain) for name, gain in own.items() if name != BASE}
    run.manifest["results"] = {"batches": len(chunks), "questions": len(questions), **reached}


class Asker:
    """A policy and the methods that are compared, with only the models that these read.

    Raises:
        MemoryError: as :func:`gcpo.runs.gradients.limit_of`.
    """

    def __init__(self, plan: Plan, model: Any, tokens: Any, questions: Sequence[Row]) -> None:
        params, self.plan, self.model, self.tokens = plan.params, plan, model, tokens
        self.methods = updates.of_one_step((BASE, *params.compared))
        embeds = params.noise_among == "dispersed" or any("embeddings" in row.reads for row in self.methods.values())
        entails = any(row.needs_entailment(plan.task.full_completion) for row in self.methods.values())
        self.read = rollouts_of(plan, embeds, entails)
        self.parameters = chosen_parameters(model, params.gradient_parameters)
        self.size = sum(p.numel() for p in self.parameters)
        # Of each fold and part of an update, twice when it is scaled, a vector of all parameters; and some in between.
        others = [row for row in self.methods.values() if not updates.one_family(row)]
        kept = 4.0 * self.size * (FOLDS + 4 + 2 * (params.prompts_per_step + len(others)))
        # Bytes that a pass may take.
        self.room = limit_of(params, model, tokens, questions, params.group_size, kept) - kept

    def rollouts(self, rows: Sequence[Row]) -> tuple[Sampled, Rollouts]:
        """Return G answers to each question, and what methods read of them."""
        size, task = self.plan.params.group_size, self.plan.task
        sampled = ask(self.plan, self.model, self.tokens, rows, size, self.plan.params.temperature)
        scores = [[task.reward_of(score) for score in group] for group in grade(task, rows, sampled.groups(size))]
        return sampled, self.rewarded(sampled, torch.tensor(scores))

    def rewarded(self, sampled: Sampled, rewards: Float[Tensor, "B G"]) -> Rollouts:
        """Return what methods read of answers with these rewards."""
        size = self.plan.params.group_size
        return self.read(rewards, sampled.groups(size), **sampled.of_tokens(size))

    def gradients(self, sampled: Sampled, group: int, sets: Sequence[Float[Tensor, "B G T"]]) -> list[Tensor]:
        """Return sum c grad log pi over the tokens of a group, with c of each set of coefficients, as flat vectors."""
        params = self.plan.params
        rows = slice(params.group_size * group, params.group_size * (group + 1))
        ids, attention, start = sampled.ids[rows], sampled.attention[rows], sampled.ids.shape[1] - sampled.mask.shape[1]
        if not any(of[group].any() for of in sets):
            return [torch.zeros(self.size, device=ids.device)] * len(sets)
        inputs = {"input_ids": ids, "attention_mask": attention, "position_ids": (attention.cumsum(1) - 1).clamp(min=0)}
        shares = sharing(params.share_prompts, self.model, width=start)
        fits = pass_bytes(self.model, len(ids), ids.shape[1], sampled.mask.shape[1] + 1) <= self.room
        with torch.enable_grad(), shares, computed_again([] if fits else checkpointed(self.model)) as options:
            logits = self.model(**inputs, **options, logits_to_keep=ids.shape[1] - start + 1).logits[:, :-1].float()
            logs = (logits / params.temperature).log_softmax(-1).gather(-1, ids[:, start:].unsqueeze(-1)).squeeze(-1)
            how: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
            sums = [(of[group].to(logs.device) * logs).sum() for of in sets]
            found = (torch.autograd.grad(one, self.parameters, **how) for one in sums)
            return [torch.cat([part.flatten().float() for part in parts]) for parts in found]


def misgraded(
    rewards: Float[Tensor, "B G"], share: float, seed: int, dispersion: Float[Tensor, " B"] | None = None
) -> tuple[Float[Tensor, "B G"], Bool[Tensor, " B"]]:
    """Return rewards of which a share of the questions, in expectation, has those of another question's answers, drawn
    with replacement, and which questions these are.

    Args:
        rewards: of at least two questions.
        share: of all questions, at most a third with a dispersion.
        seed: of the draw.
        dispersion: of each question, to choose from the third with the largest; from all without.
    """
    count, size = rewards.shape
    draw = torch.Generator().manual_seed(seed)
    among = torch.arange(count) if dispersion is None else dispersion.topk(math.ceil(count / 3)).indices
    wrong = torch.zeros(count, dtype=torch.bool)
    wrong[among] = torch.rand(len(among), generator=draw) < share * count / len(among)
    others = (torch.arange(count) + torch.randint(1, count, (count,), generator=draw)) % count
    drawn = rewards[others].gather(1, torch.randint(size, (count, size), generator=draw))
    return torch.where(wrong.unsqueeze(1), drawn, rewards), wrong


class Held(NamedTuple):
    """Gradients of the expected reward on each fold of held-out questions, and the mean square of GRPO's updates."""

    gradients: Float[Tensor, "F P"]
    second: Float[Tensor, " P"]


def _held_out(asker: Asker, questions: Sequence[Row], said: Callable[[int], None]) -> Held:
    at_once = asker.plan.params.prompts_per_step
    gradients = torch.zeros(FOLDS, asker.size, device=asker.parameters[0].device)
    second = torch.zeros_like(gradients[0])
    starts = range(0, len(questions), at_once)
    for start in starts:
        sampled, rollouts = asker.rollouts(questions[start : start + at_once])
        sets = updates.reward_coefficients(rollouts), updates.token_coefficients(METHODS[BASE], rollouts)
        update = torch.zeros_like(second)
        for group in range(len(rollouts.rewards)):
            of_reward, own = asker.gradients(sampled, group, sets)
            gradients[(start + group) % FOLDS] += of_reward
            update += own
        second += (_left(asker.plan, update) * update).square() / len(starts)
        said(min(start + at_once, len(questions)))
    counts = torch.tensor([len(range(fold, len(questions), FOLDS)) for fold in range(FOLDS)], device=second.device)
    return Held(gradients / counts.unsqueeze(1), second)


def _left(plan: Plan, update: Tensor) -> float:
    """Return the factor that clipping to ``max_grad_norm`` leaves of an update; a norm of 0 clips nothing."""
    most = plan.trainer["max_grad_norm"]
    return min(1.0, most / max(float(update.norm()), 1e-30)) if most else 1.0


def _preconditioners(plan: Plan, held: Held, update: Tensor) -> dict[str, Tensor]:
    """Return P of a batch by optimizer, from GRPO's update of it."""
    left, decay = torch.tensor(_left(plan, update), device=update.device), plan.trainer["adam_beta2"]
    second = decay * held.second + (1 - decay) * (left * update).square()
    return {"sgd": left, "adam": left / (second.sqrt() + plan.trainer["adam_epsilon"])}


def _batch(asker: Asker, held: Held, rows: Sequence[Row], number: int) -> dict[str, pd.DataFrame]:
    """Return the lines of a batch: of updates, of questions, and the inner products of the questions' parts."""
    sampled, rollouts = asker.rollouts(rows)
    params, count = asker.plan.params, len(rows)
    wrong = None
    if params.reward_noise:
        spread = measures.cosine_dispersion(rollouts.embeddings) if params.noise_among == "dispersed" else None
        rewards, wrong = misgraded(rollouts.rewards, params.reward_noise, seeds.of_noise(params.seed, number), spread)
        rollouts = asker.rewarded(sampled, rewards)
    seed = seeds.of_step(params.seed, number)
    drawn = {name: row.seeded(seed) for name, row in asker.methods.items()}
    weights = {name: modulate(row, rollouts).weight[:, 0] for name, row in drawn.items() if updates.one_family(row)}
    others = {name: updates.token_coefficients(row, rollouts) for name, row in drawn.items() if name not in weights}
    sets = [updates.token_coefficients(METHODS[BASE], rollouts), *others.values()]
    vectors = torch.zeros(count + len(others), held.second.numel(), device=held.second.device)
    for group in range(count):
        vectors[group], *more = asker.gradients(sampled, group, sets)
        for place, own in enumerate(more, count):
            vectors[place] += own
    unit = torch.eye(len(vectors), dtype=torch.float64)
    mixes = {name: weight.double() @ unit[:count] for name, weight in weights.items()}
    mixes |= dict(zip(others, unit[count:], strict=True))
    spreads = {name: float((weight.max() - weight.min()) / weight.mean()) for name, weight in weights.items()}
    found: dict[str, list[dict[str, Any]]] = {"updates": [], "questions": [], "grams": []}
    for optimizer, scale in _preconditioners(asker.plan, held, vectors[:count].sum(0)).items():
        scaled, at = vectors * scale, {"batch": number, "optimizer": optimizer}
        gram, dots = (scaled @ scaled.T).double().cpu(), (scaled @ held.gradients.T).double().cpu()
        for name, mix in mixes.items():
            line = at | {"method": name, "weights": "own", "spread": spreads.get(name)}
            found["updates"].append(line | _numbers(mix @ gram @ mix, mix @ dots))
        for place, row in enumerate(rows):
            line = at | {"query": row.id, "reward": float(rollouts.rewards[place].nanmean())}
            line |= {name: float(weight[place]) for name, weight in weights.items()}
            line |= {} if wrong is None else {"misgraded": bool(wrong[place])}
            found["questions"].append(line | _numbers(gram[place, place], dots[place]))
        found["grams"].append(at | {"gram": gram[:count, :count].flatten().tolist()})
    return {name: pd.DataFrame(lines) for name, lines in found.items()}


def _numbers(square: Any, dots: Any) -> dict[str, float]:
    return {"square": float(square)} | dict(zip(DOTS, dots.tolist(), strict=True))


def _ceilings(tables: Mapping[str, pd.DataFrame], methods: Mapping[str, Method], size: int) -> pd.DataFrame:
    """Return lines of updates by the weights that gain most, of every bounded range and of the oracle's; G is size."""
    ranges = {name: weight_range(name, None, size) for name, row in methods.items() if updates.one_family(row)}
    ranges = {name: ends for name, ends in ranges.items() if ends[0] < ends[1] < np.inf} | {ORACLE: (0.0, np.inf)}
    lines = []
    for optimizer, of in tables["questions"].groupby("optimizer", sort=False):
        grams = tables["grams"].query("optimizer == @optimizer")
        squares = [np.reshape(gram, (-1, math.isqrt(len(gram)))) for gram in grams["gram"]]
        dots, every = of[DOTS].to_numpy(), block_diag(*squares)
        places = [np.flatnonzero(of["batch"] == batch) for batch in grams["batch"]]
        for (name, ends), (kind, folds) in itertools.product(ranges.items(), CHOSEN_BY.items()):
            weight = updates.ceiling(dots[:, folds].mean(1), every, *ends)
            for batch, place, square in zip(grams["batch"], places, squares, strict=True):
                line = {"batch": batch, "optimizer": optimizer, "method": name, "weights": kind}
                own = weight[place]
                lines.append(line | _numbers(own @ square @ own, own @ dots[place]))
    return pd.DataFrame(lines)


def gains(table: pd.DataFrame) -> pd.DataFrame:
    """Return a line per optimizer, method and kind of weights of ``updates.csv``: gain, over GRPO's on the same folds,
    less 1. Weights that one half of the folds chose count on the other half; nan where GRPO's update is zero."""

    def total(lines: pd.DataFrame, kind: str) -> float:
        return float(updates.total_gain(lines[DOTS].to_numpy()[:, COUNTED_ON[kind]], lines["square"].to_numpy())[0])

    found = []
    base = table[(table["method"] == BASE) & (table["weights"] == "own")].groupby("optimizer")
    for (optimizer, name, kind), own in table.groupby(["optimizer", "method", "weights"], sort=False):
        grpo = total(base.get_group(optimizer), str(kind))
        gain = total(own, str(kind)) / grpo - 1 if grpo else math.nan
        found.append({"optimizer": optimizer, "method": name, "weights": kind, "gain": gain})
    return pd.DataFrame(found)
