"""The power of the protocol: how often a claim gets each verdict if the paper's numbers are true, and if nothing is.

Experiments are drawn from a pilot's runs and go through the very functions that decide: seeds and questions are drawn
with replacement, the same ones for all methods, so that methods that move together still do; each method's mean is then
set to the truth that is supposed. Seeds' departures from a method's mean are widened by sqrt(k / (k - 1)), as k drawn
ones vary less than new ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from math import nan, sqrt
from typing import Any

import numpy as np
import pandas as pd

from gcpo.reports import alignment, one_step, records
from gcpo.reports.report import GCPO, GEOMETRY, STEPS, claims_on, margins, protocol_power
from gcpo.reports.tables import gcpo_means
from gcpo.reports.verdicts import HOLDS, RULED_OUT, Pair, compare, decide, paper_effects
from gcpo.statistics import Draws
from gcpo.tasks import get_task

NOTHING = "nothing"
PAPER = "the paper"


def labels_of(claims: Mapping[str, Sequence[Pair]]) -> list[str]:
    """Return the labels that claims compare, each once."""
    return list(dict.fromkeys(label for pairs in claims.values() for pair in pairs for label in pair))


def truths(paper: Mapping[str, float], labels: Sequence[str], margin: float) -> dict[str, dict[str, float]]:
    """Return the mean of each method, in per cent, if the paper's are true and if all methods are one.

    What the paper prints no number of is a margin below the lower of GCPO's two.
    """
    below = min(paper[name] for name in GCPO) - margin
    return {
        PAPER: {label: paper.get(label.split()[0], below) for label in labels},
        NOTHING: dict.fromkeys(labels, below),
    }


def verdicts_drawn(
    scores: pd.DataFrame,
    metric: str,
    claims: Mapping[str, Sequence[Pair]],
    truth: Mapping[str, float],
    *,
    effects: Mapping[str, float],
    margin: float = nan,
    seeds: int = 8,
    n: int = 400,
    seed: int = 0,
) -> dict[str, Counter[str]]:
    """Return how many of ``n`` experiments give each claim which verdict.

    Args:
        scores: the pilot's evaluations with columns label, seed, query and the metric (in [0, 1]), of one task and
            decoding.
        metric: the column to compare.
        claims: pairs of labels by claim; all of them are corrected together, as in a report.
        truth: the mean of each label, in per cent.
        effects: the paper's means, as a report hands them to the verdict.
        margin: the smallest effect that would matter where the paper prints none, in points.
        seeds: of each experiment.
        n: how many experiments.
        seed: of the drawing.

    Raises:
        ValueError: the pilot's methods share fewer than two seeds.
    """
    labels = labels_of(claims)
    wide = {
        label: scores[scores["label"] == label].pivot(index="seed", columns="query", values=metric) for label in labels
    }
    common = sorted(set.intersection(*(set(table.index) for table in wide.values())))
    if len(common) < 2:
        raise ValueError(f"the pilot's methods share {len(common)} seeds: power needs two at least")
    pilot = np.stack([wide[label].loc[common].to_numpy() for label in labels])
    pilot -= pilot.mean(axis=(1, 2), keepdims=True)
    pilot += (sqrt(len(common) / (len(common) - 1)) - 1) * pilot.mean(axis=2, keepdims=True)
    pilot += np.array([truth[label] / 100 for label in labels])[:, None, None]
    questions = pilot.shape[2]
    lines = pd.MultiIndex.from_product([labels, range(seeds), range(questions)], names=["label", "seed", "query"])
    rng, found = np.random.default_rng(seed), {claim: Counter[str]() for claim in claims}
    for _ in range(n):
        drawn = pilot[:, rng.integers(len(common), size=seeds)][:, :, rng.integers(questions, size=questions)]
        experiment = pd.Series(drawn.ravel(), lines, name=metric).reset_index()
        family = compare(experiment, metric, [pair for pairs in claims.values() for pair in pairs])
        for claim, pairs in claims.items():
            found[claim][decide(family.loc[[*pairs]], paper_effects(effects, pairs), margin)["verdict"]] += 1
    return found


def of_pilot(profile: str, grid: str, alike: Mapping[str, str], seeds: int = 8, n: int = 300) -> pd.DataFrame:
    """Return :func:`table` for each task, from the runs of a grid in the committed reference.

    Args:
        profile: whose runs are the pilot.
        grid: where they are, with the labels of :mod:`gcpo.reports.report`.
        alike: task -> the benchmark whose printed numbers are supposed to be true of it.
        seeds: of each experiment.
        n: experiments of each truth.
    """
    runs = records.find(profile, grid, reference=True).query("kind == 'train' and max_steps > 0")
    lines = records.gather(runs, "eval", ["task", "label", "seed"]).query("decoding == 'sampled'")
    parts = []
    for task, benchmark in alike.items():
        scores, metric, paper = lines[lines["task"] == task], get_task(task).reward_metric, gcpo_means(benchmark)
        claims = claims_on(set(scores["label"]))
        options: dict[str, Any] = {"effects": paper, "margin": margins()[task][metric], "seeds": seeds, "n": n}
        drawn = {
            name: verdicts_drawn(scores, metric, claims, truth, **options)
            for name, truth in truths(paper, labels_of(claims), options["margin"]).items()
        }
        parts.append(table(drawn).assign(task=task))
    return pd.concat(parts, ignore_index=True)


def words_drawn(found: Mapping[str, Draws], truth: float, margin: float, n: int = 300) -> Counter[str]:
    """Return how many of ``n`` experiments give which verdict to the claim that all of these are above 0.

    An experiment is one of the pilot's resamples, the same for all of them, moved so that each has the mean ``truth``;
    its own draws lie around it as the pilot's lie around what was seen.

    Args:
        found: the pilot's statistics by their names, with as many draws each.
        truth: of every statistic, in its unit.
        margin: the smallest effect that would matter.
        n: how many experiments.
    """
    around = {name: one.draws - one.estimate for name, one in found.items()}
    size, drawn = len(next(iter(around.values()))), Counter[str]()
    for at in np.linspace(0, size - 1, n).astype(int):
        seen = {name: Draws(truth + own[at], truth + own[at] + own) for name, own in around.items()}
        drawn[decide(alignment.comparisons(seen), margin=margin)["verdict"]] += 1
    return drawn


def of_gradients(profile: str, grid: str, margin: float) -> pd.DataFrame:
    """Return the columns of :func:`table`, and task, for App. D.4's claim on the starting policy: ρ(CD, V) and
    ρ(BoT, V) above ρ(SE, V) and ρ(token entropy, V). "The paper" is a difference of ``margin`` in each pair."""
    runs = records.find(profile, grid, reference=True).query("kind == 'gradients' and at_step == 0")
    lines = records.gather(runs[runs["policy"] == runs["policy"].mode()[0]], "queries", ["task", "seed"])
    found = {}
    for task, part in lines.groupby("task", sort=False):
        known = alignment.Alignment(part, drop_top=0.02, n=2000)
        pairs = product(("cd", "bot"), ("token_entropy", "se"))
        found[task] = {GEOMETRY: {" − ".join(pair): known.less(*pair) for pair in pairs}}
    return _of_draws(found, margin)


def of_steps(profile: str, grid: str, margin: float) -> pd.DataFrame:
    """Return the columns of :func:`table`, and task, for a step under Adam with the weights of GCPO-CD and GCPO-BoT:
    above RD alone, and above GRPO, by ``margin`` per cent of GRPO's gain if "the paper"."""
    runs = records.find(profile, grid, reference=True).query("kind == 'one_step' and at_step == 0")
    lines = records.gather(runs.assign(run=runs["id"]), "updates", ["task", "run", "at_step"])
    found = {}
    for task, part in lines[lines["optimizer"] == "adam"].groupby("task", sort=False):
        gains = one_step.relative_gains(part)
        found[task] = {claim: one_step.leads(gains, other) for other, claim in STEPS.items()}
    return _of_draws(found, margin)


def _of_draws(found: Mapping[Any, Mapping[str, Mapping[str, Draws]]], margin: float) -> pd.DataFrame:
    def drawn(claims: Mapping[str, Mapping[str, Draws]], truth: float) -> dict[str, Counter[str]]:
        return {claim: words_drawn(each, truth, margin) for claim, each in claims.items()}

    parts = [
        table({PAPER: drawn(claims, margin), NOTHING: drawn(claims, 0.0)}).assign(task=task)
        for task, claims in found.items()
    ]
    return pd.concat(parts, ignore_index=True)


def table(drawn: Mapping[str, Mapping[str, Counter[str]]]) -> pd.DataFrame:
    """Return the three probabilities of each claim, in per cent, from :func:`verdicts_drawn` under both truths."""

    def share(truth: str, claim: str, word: str) -> float:
        return 100 * drawn[truth][claim][word] / drawn[truth][claim].total()

    rows = [
        (claim, share(PAPER, claim, HOLDS), share(NOTHING, claim, HOLDS), share(NOTHING, claim, RULED_OUT))
        for claim in drawn[PAPER]
    ]
    return pd.DataFrame(rows, columns=["claim", "holds if the paper", "holds if nothing", "ruled out if nothing"])


def main() -> None:
    """Print the tables of PROTOCOL.md, made again from the pilot: the lines of ``gcpo/power.csv``."""
    alike = {"tinyqa": "narrativeqa", "tinymath": "math500"}
    made = [
        of_pilot("laptop", "table1", alike),
        of_gradients("laptop", "figure1", 0.1),
        of_steps("laptop", "one_step", 2),
    ]
    rows = pd.concat(made).round().astype(dict.fromkeys(made[0].columns[1:4], int))
    supposed = protocol_power().set_index(["claim", "task"])["supposed"]
    rows["supposed"] = [supposed[tuple(row)] for row in rows[["claim", "task"]].to_numpy()]
    print(rows[[*protocol_power()]].to_csv(index=False), end="")


if __name__ == "__main__":
    main()
