"""How far GCPO's weights can move on real answers, whatever the policy: the tables of outputs/reference/real_answers.

``python benchmarks/real_answers.py`` makes them from the rows below ``$GCPO_DATA_DIR``, in a quarter of an hour on one
core; notebook 36 does so with ``recompute``.

A policy can only write groups of answers. Here groups are made and not sampled: k of G answers are correct answers to a
question of a benchmark, the others are wrong. Wrong answers are those to other questions ("others"), which lie farther
off than a policy would go that reads its question, or near ones ("near"), of the same kind as a correct one: the answer
to another question on the same story or paper, the title of another paragraph, or the correct solution with the last
digit of its answer raised by one. Texts stay in memory.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from torch import Tensor

from gcpo import measures
from gcpo.methods import weights
from gcpo.reports.real_answers import ALPHA, FOLDER, NAMES, REACH, real_answers
from gcpo.reports.tables import write_table
from gcpo.rewards import boxed_answer
from gcpo.rollouts import Rollouts
from gcpo.semantics import Embedder
from gcpo.tasks.gsm8k import final_line
from gcpo.weights import alpha_g, weight_range

SIZES = (8, 16)  # answers of a group, G
PROMPTS = (4, 8, 32)  # of a step
METHODS = ("cd_only", "bot_only", "rd_only", "gcpo_cd", "gcpo_bot", "se", "kle")
CHUNK = 1024  # groups weighed at a time: a hundred megabytes of embeddings
YES_NO = {"yes": "no", "no": "yes"}

Array = NDArray[np.float64]


class Question(NamedTuple):
    """The correct answers to a question, and near wrong ones."""

    right: Sequence[str]
    near: Sequence[str]


class Pool(NamedTuple):
    """The distinct texts of a benchmark and, of each question, the places of correct and of near wrong ones."""

    texts: list[str]
    right: list[list[int]]
    near: list[list[int]]


def pool(questions: Iterable[Question]) -> Pool:
    """Return the texts of questions, each once; surrounding white space does not count."""
    place: dict[str, int] = {}

    def places(texts: Iterable[str]) -> list[int]:
        return list(dict.fromkeys(place.setdefault(text.strip(), len(place)) for text in texts))

    listed = [(places(question.right), places(question.near)) for question in questions]
    return Pool(list(place), [right for right, _ in listed], [near for _, near in listed])


def of_one_text(texts: Iterable[Sequence[Sequence[str]]]) -> Iterator[Question]:
    """Questions on the same text, given by their correct answers: answers to the others are near wrong ones."""
    for asked in texts:
        for own in asked:
            yield Question(own, [answer for other in asked for answer in other if answer not in own])


def changed(text: str, answer: str) -> list[str]:
    """Return a text with the last digit of its answer, where that stands last, raised by one (9 becomes 0).

    Nothing for an answer without a digit, or that is not in the text.
    """
    digit = re.search(r"\d(?=\D*$)", answer)
    before, found, after = text.rpartition(answer) if digit else ("", "", "")
    if not (digit and found):
        return []
    raised = str((int(digit[0]) + 1) % 10)
    return [before + answer[: digit.start()] + raised + answer[digit.end() :] + after]


def _records(folder: str, *splits: str) -> Iterator[dict[str, Any]]:
    for split in splits:
        with (Path(os.environ["GCPO_DATA_DIR"]) / folder / f"{split}.jsonl").open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def _narrativeqa() -> Iterator[Question]:
    books: dict[str, list[list[str]]] = {}
    for record in _records("narrativeqa", "test"):
        books.setdefault(record["document"]["id"], []).append([answer["text"] for answer in record["answers"]])
    return of_one_text(books.values())


def _qasper() -> Iterator[Question]:
    papers = [paper["qas"]["answers"] for paper in _records("qasper", "train", "validation", "test")]
    return of_one_text([[_reference(answer) for answer in asked["answer"]] for asked in paper] for paper in papers)


def _reference(answer: dict[str, Any]) -> str:
    """Return the string of Qasper's official evaluator."""
    if answer["unanswerable"]:
        return "Unanswerable"
    for text in (", ".join(answer["extractive_spans"]), answer["free_form_answer"]):
        if text.strip(", \n"):
            return " ".join(text.split())
    return "Yes" if answer["yes_no"] else "No"


def _hotpotqa() -> Iterator[Question]:
    for record in _records("hotpotqa", "train", "validation"):
        answer, titles = record["answer"], record["context"]["title"]
        near = [YES_NO[answer]] if answer in YES_NO else [title for title in titles if title != answer]
        yield Question([answer], near)


def _math() -> Iterator[tuple[list[str], str]]:
    for record in _records("math_train", "train"):
        yield [record["solution"]], boxed_answer(record["solution"]) or ""


def _olympiadbench() -> Iterator[tuple[list[str], str]]:
    for record in _records("olympiadbench", "train"):  # one file for both splits
        yield record["solution"], record["answer"]


def _gsm8k() -> Iterator[tuple[list[str], str]]:
    for record in _records("gsm8k", "train"):
        yield [record["answer"]], final_line(record["answer"]) or ""


def _solved(problems: Callable[[], Iterator[tuple[list[str], str]]], whole: bool) -> Iterator[Question]:
    """Problems with their solutions, which GCPO embeds (App. E.3), or with their final answers."""
    for solutions, answer in problems():
        texts = solutions if whole else [answer]
        yield Question(texts, changed(texts[0], answer))


BENCHMARKS: dict[str, Callable[[], Iterator[Question]]] = {
    "narrativeqa": _narrativeqa,
    "qasper": _qasper,
    "hotpotqa": _hotpotqa,
    "math": partial(_solved, _math, True),
    "olympiadbench": partial(_solved, _olympiadbench, True),
    "gsm8k": partial(_solved, _gsm8k, True),
    "math_answers": partial(_solved, _math, False),
    "olympiadbench_answers": partial(_solved, _olympiadbench, False),
}
"""The benchmarks that GCPO trains on, GSM8K, and final answers where GCPO embeds solutions."""


def read(benchmark: str) -> Pool:
    """Return the texts of a benchmark, from its files below ``$GCPO_DATA_DIR``."""
    return pool(BENCHMARKS[benchmark]())


def mixtures(answers: Pool, wrong: str, size: int, seed: int = 0) -> Int64[Tensor, "Q counts size"]:
    """Return the groups of each question with k = 0, 1, ..., G correct answers, as places in ``answers.texts``.

    Correct answers take turns where they are fewer than G, and so do near wrong ones, in random order. Answers to
    others are those to G different questions without an answer of this one. A question without near wrong answers has
    no groups with them.
    """
    rng, rows = np.random.default_rng(seed), []
    for own, taken in zip(answers.right, answers.near, strict=True):
        if wrong == "others":
            far = [other for other in answers.right if not {*own} & {*other}]
            taken = [rng.choice(far[place]) for place in rng.choice(len(far), size, replace=False)]
        if taken:
            rows.append([np.resize(own, size), np.resize(rng.permutation(taken), size)])
    right, other = torch.from_numpy(np.array(rows)).unsqueeze(2).unbind(1)
    return torch.where(_correct(size), right, other)


def _correct(size: int) -> Tensor:
    """Which answers are correct, in groups with 0, 1, ..., ``size`` of them."""
    return torch.arange(size) < torch.arange(size + 1).unsqueeze(1)


def weigh(embeddings: Float[Tensor, "N d"], groups: Int64[Tensor, "Q counts size"]) -> dict[str, Array]:
    """Return CD, BoT and all weights (alpha = 0.6) of the groups of :func:`mixtures`, each (Q, G + 1).

    Rewards are 2 for a correct and 0 for a wrong answer. Equal texts are one cluster, different ones are apart, and to
    KLE contradict each other. To BoT n copies are the same as one cluster or as n (Eq. 9 adds n/G of one direction).
    """
    rewards = 2 * _correct(groups.shape[-1]).double().repeat(len(groups), 1)
    pieces = zip(groups.flatten(0, 1).split(CHUNK), rewards.split(CHUNK), strict=True)
    parts = [_weighed(embeddings[piece].double(), piece, reward) for piece, reward in pieces]
    return {name: torch.cat([part[name] for part in parts]).view(groups.shape[:2]).numpy() for name in parts[0]}


def _weighed(embedded: Tensor, groups: Tensor, rewards: Tensor) -> dict[str, Tensor]:
    same = (groups.unsqueeze(-1) == groups.unsqueeze(-2)).double()
    nli = torch.stack([same, 0 * same, 1 - same], -1)
    rollouts = Rollouts(rewards, clusters=groups, embeddings=embedded, nli=nli)
    weighed = {method: weights(method, rollouts, alpha=ALPHA)[:, 0] for method in METHODS}
    return _disagreement(embedded, groups) | weighed


def _disagreement(embedded: Tensor, clusters: Tensor) -> dict[str, Tensor]:
    return {"cd": measures.cosine_dispersion(embedded), "bot": measures.barycentric_transport(embedded, clusters)}


def most_dispersed(pairs: Float[Tensor, "N N"], size: int) -> Int64[Tensor, " size"]:
    """Return, of N groups of different texts, the one with the largest sum over ``pairs``.

    Each group begins with another text and takes in, one by one, the text that adds most. With ``pairs`` = clip(1 -
    cos, 0, 1) the sum is G^2 CD (Eq. 7); with -cos it is -|sum of unit vectors|^2, by which BoT grows (Eq. 10).
    """
    chosen = torch.arange(len(pairs)).unsqueeze(1)
    while chosen.shape[1] < size:
        added = pairs[chosen].sum(1).scatter(1, chosen, -torch.inf)
        chosen = torch.cat([chosen, added.argmax(1, keepdim=True)], 1)
    return chosen[pairs[chosen.unsqueeze(2), chosen.unsqueeze(1)].sum((1, 2)).argmax()]


def clustered(embedded: Float[Tensor, "Q G d"], seed: int = 0, n: int = 50) -> float:
    """Return how far n random clusterings raise BoT above that of clusters of one answer each, at most over all groups.

    Where no cosine is negative they cannot: with S_k the sum of a cluster's unit vectors, Eq. 10 has |sum of (n_k /
    |S_k|) S_k|, every factor is at least 1, and no product of two S_k is negative.
    """
    size, generator = embedded.shape[1], torch.Generator().manual_seed(seed)
    alone = measures.barycentric_transport(embedded, torch.arange(size).expand(embedded.shape[:2]))
    drawn = [torch.randint(2 + k % (size - 1), embedded.shape[:2], generator=generator) for k in range(n)]
    return max(float((measures.barycentric_transport(embedded, labels) - alone).max()) for labels in drawn)


def _summary(values: Array, medians: Any, questions: int) -> dict[str, float]:
    """Return quantiles of values and, from resampled medians, the 95 % interval of their median."""
    ends = [*np.percentile(values, (5, 50, 95)).tolist(), *np.percentile(medians, (2.5, 97.5)).tolist()]
    exact = [0.0 if abs(end) < 1e-12 else end for end in ends]  # without what rounding leaves of a zero
    return dict(zip(("q05", "q50", "q95", "low", "high"), exact, strict=True)) | {"questions": questions}


def over_questions(values: Array, seed: int = 0, n: int = 1000) -> dict[str, float]:
    """Return quantiles of values, one per question, with the 95 % bootstrap interval of their median."""
    drawn = np.random.default_rng(seed).integers(0, len(values), (n, len(values)))
    return _summary(values, np.median(values[drawn], axis=1), len(values))


def over_steps(weight: Array, prompts: int, seed: int = 0, n: int = 200, steps: int = 1000) -> dict[str, float]:
    """Return quantiles of (highest - lowest) / mean over the weights of a step, with an interval of the median.

    ``weight`` is (Q, G + 1), from :func:`weigh`. Each prompt of a step is a random question with 1, 2, ... or G - 1
    correct answers, all equally likely: a group that is all correct or all wrong has no advantage to weigh. The
    interval is over questions, resampled n times; quantiles are of n times ``steps`` steps.
    """
    rng, (questions, counts) = np.random.default_rng(seed), weight.shape

    def ranges(listed: NDArray[np.int64], number: int) -> Array:
        shape = (number, prompts)
        drawn = weight[rng.choice(listed, shape), rng.integers(1, counts - 1, shape)]
        return np.ptp(drawn, axis=1) / drawn.mean(axis=1)

    every = np.arange(questions)
    medians = [np.median(ranges(rng.choice(every, questions), steps)) for _ in range(n)]
    return _summary(ranges(every, n * steps), medians, questions)


def tables(benchmark: str, embedder: Embedder, sizes: tuple[int, ...] = SIZES) -> dict[str, pd.DataFrame]:
    """Return the numbers of a benchmark, from its texts (:func:`read`).

    - "texts": how many questions, distinct correct texts, questions with several of them or with near wrong ones; the
      share of these whose first near wrong text has the embedding of the correct one; ``clustered`` of the largest G.
    - "measures": CD and BoT of groups with ``right`` correct answers, per G and kind of ``wrong`` answers; of correct
      answers where there are several ("none"); of the most dispersed group ("dispersed").
    - "steps": the range of each method's weights within a step.
    """
    answers = read(benchmark)
    embeddings = embedder(answers.texts)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    for size, wrong in itertools.product(sizes, ("others", "near")):
        groups, kind = mixtures(answers, wrong, size), {"group_size": size, "wrong": wrong}
        found = weigh(embeddings, groups)
        for measure, k in itertools.product(("cd", "bot"), range(size + 1)):
            rows["measures"].append(kind | {"right": k, "measure": measure} | over_questions(found[measure][:, k]))
        for method, prompts in itertools.product(METHODS, PROMPTS):
            rows["steps"].append(kind | {"method": method, "prompts": prompts} | over_steps(found[method], prompts))
        if wrong == "others":
            rows["measures"] += _extremes(answers, embeddings, found, size)
            apart = clustered(embeddings[groups[:, 0]].double())
    rows["texts"].append(_counts(answers, embeddings) | {"clustered": apart})
    return {name: pd.DataFrame(listed).assign(benchmark=benchmark) for name, listed in rows.items()}


def _extremes(answers: Pool, embeddings: Tensor, found: dict[str, Array], size: int) -> list[dict[str, Any]]:
    """Rows of correct answers alone, where there are several, and of the most dispersed group of correct answers."""
    several = np.array([len(right) > 1 for right in answers.right])
    unit = torch.nn.functional.normalize(embeddings[sorted({*itertools.chain(*answers.right)})].double(), dim=-1)
    cosine, rows = unit @ unit.mT, []
    for measure, pairs in (("cd", (1 - cosine).clamp(0, 1)), ("bot", -cosine)):
        kind = {"group_size": size, "measure": measure}
        if several.any():
            rows.append(kind | {"wrong": "none", "right": size} | over_questions(found[measure][several, -1]))
        group = unit[most_dispersed(pairs, size)]
        reached = _disagreement(group, torch.arange(size))[measure].reshape(1).numpy()
        rows.append(kind | {"wrong": "dispersed", "right": 0} | over_questions(reached))
    return rows


def _counts(answers: Pool, embeddings: Tensor) -> dict[str, float]:
    near = [(right[0], near[0]) for right, near in zip(answers.right, answers.near, strict=True) if near]
    one, other = (embeddings[list(places)] for places in zip(*near, strict=True))
    return {
        "questions": len(answers.right),
        "correct_texts": len({*itertools.chain(*answers.right)}),
        "several": sum(len(right) > 1 for right in answers.right),
        "near": len(near),
        "unseen": float((one == other).all(-1).double().mean()),
    }


def reach(known: dict[str, pd.DataFrame], group_size: int = 16, prompts: int = 8) -> pd.DataFrame:
    """Return in per cent the most that BoT and CD take off a weight, on the most dispersed correct answers, and that RD
    adds (bot, cd, rd); and the medians of the range of their weights in a step (bot_step, cd_step, rd_step)."""
    most = known["measures"].query("group_size == @group_size and wrong == 'dispersed'")
    found = most.groupby("measure")["q50"].max()
    steps = known["steps"].query("group_size == @group_size and prompts == @prompts").groupby("method")["q50"].max()
    off = {name: 100 * alpha_g(ALPHA, group_size) * found[name] ** 2 for name in ("bot", "cd")}
    in_a_step = {f"{name}_step": 100 * steps[f"{name}_only"] for name in ("bot", "cd", "rd")}
    return pd.DataFrame([off | {"rd": 100 * (weight_range("rd_only", None, group_size)[1] - 1)} | in_a_step])


if __name__ == "__main__":
    if "GCPO_DATA_DIR" not in os.environ:
        raise SystemExit("GCPO_DATA_DIR is not set: let it name a folder with <benchmark>/<split>.jsonl")
    minilm = Embedder("all-MiniLM-L6-v2", batch_size=1)  # hardly two texts have one length
    made = [tables(name, minilm) for name in BENCHMARKS]
    for table in NAMES:
        write_table(pd.concat([found[table] for found in made]), FOLDER, table, source=None)
    reach(real_answers()).to_csv(REACH, index=False)
