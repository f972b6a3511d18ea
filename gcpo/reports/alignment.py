"""How measures of uncertainty align with the gradient variance V(q) (GCPO, App. D), every figure with its interval.

An interval is over queries: one set of bootstrap resamples serves every measure and every rollout seed, so that what is
compared is compared on the same queries (App. D.6). A figure is the mean over rollout seeds of the figure of each; the
noise of rollouts is averaged over seeds, not resampled.

The paper does not say of which checkpoint its Figure 1 is: :func:`at_checkpoints` decides its claims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.model_selection import KFold

from gcpo import statistics
from gcpo.methods import base_advantages
from gcpo.reports.claims import EXCLUDED, FAILS, OPEN, UNTESTED, Verdict, deciding, signed, word
from gcpo.reports.tables import with_interval
from gcpo.statistics import Draws

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
    "sequence_entropy": "Sequence entropy",
    "sequence_entropy_mean": "Sequence entropy per token",
    "self_consistency": "1 - consistency",
    "rd": "RD",
}
FOUR = ("token_entropy", "se", "cd", "bot")
TOP = 0.1  # the share of queries that App. D.5 is about
NEAR = 0.2  # answers no further apart than this, in 1 - cosine of their embeddings, are near ones
CHANCE = {"spearman": 0.0, "auc": 0.5, "precision": TOP, "mae": nan, "heldout_spearman": 0.0}
STATISTICS = tuple(CHANCE)
FOLDS = 5
STRIP = 2**17  # counts of resamples at a time: a megabyte, which stays in a processor's cache

Array = NDArray[np.float64]


def selected(queries: pd.DataFrame, *, drop_top: float = 0.0, keep_zero: bool = True) -> pd.DataFrame:
    """The queries an analysis is about.

    Args:
        queries: a table of gradient statistics, a line per query.
        drop_top: share of the queries with the largest V to leave out; the paper leaves out 2 % (App. D.1: 20 of 1000).
        keep_zero: keep the queries whose rewards have no variance (V = 0, tied at the lowest rank).
    """
    kept = queries if keep_zero else queries[~queries["zero_variance"].astype(bool)]
    return kept.sort_values("V", kind="stable").head(len(kept) - round(drop_top * len(kept)))


def halves(queries: pd.DataFrame) -> pd.DataFrame:
    """The table with every measure from the first half of each group and V from the other, so that no rollout is in
    both; empty where groups were too small for that."""
    own = {name: queries[f"{name}_half"] for name in MEASURES if f"{name}_half" in queries}
    table = queries.assign(**own, V=queries["V_half"], zero_variance=queries["V_half"] == 0)
    return table[queries["V_half"].notna()]


class Alignment:
    """How measures rank queries as ``target`` does, for one task and policy, with the bootstrap that all share.

    Args:
        queries: lines of ``queries.csv`` of one or more runs; with several, ``seed`` tells them apart.
        target: the column to rank by: V, or success_rate (Table 3).
        drop_top, keep_zero: the queries of each run that count, as in :func:`selected`.
        n: resamples of the queries.
        seed: of the resampling.
    """

    def __init__(
        self,
        queries: pd.DataFrame,
        target: str = "V",
        *,
        drop_top: float = 0.0,
        keep_zero: bool = True,
        n: int = 10000,
        seed: int = 0,
    ) -> None:
        runs = [part for _, part in queries.groupby("seed")] if "seed" in queries else [queries]
        kept = [selected(run, drop_top=drop_top, keep_zero=keep_zero).set_index("query").sort_index() for run in runs]
        names = pd.Index(sorted(set(queries["query"])))
        self.target, self.seed = target, seed
        self.seeds, self.queries = len(runs), min(map(len, kept))
        # The first row is what was seen, the others are resamples of it; a query is drawn alike for all runs.
        drawn = np.random.default_rng(seed).multinomial(len(names), np.full(len(names), 1 / len(names)), size=n)
        counts = np.vstack([np.ones(len(names)), drawn])
        self._runs = [(table, counts[:, names.get_indexer(table.index)]) for table in kept]
        self._found: dict[tuple[str, str], Array] = {}

    def draws(self, measure: str, statistic: str = "spearman") -> Draws:
        """One of :data:`STATISTICS` of a measure: the mean over runs, and its resamples.

        spearman (Eq. 21), auc and precision at the top 10 % (Eq. 22-23, ties in expectation), mae (in V's unit) and
        heldout_spearman of a line fitted on the other folds (App. D.7; folds of queries, which resamples keep apart).
        """
        return _draws(self._replicates(measure, statistic))

    def less(self, measure: str, other: str, statistic: str = "spearman", of: Alignment | None = None) -> Draws:
        """The statistic of one measure less that of another, on the same resamples (App. D.6); the other's with another
        target where ``of`` is an alignment of the same queries."""
        return _draws(self._replicates(measure, statistic) - (of or self)._replicates(other, statistic))

    def table(self, measures: Sequence[str] = FOUR, kinds: Sequence[str] = STATISTICS) -> pd.DataFrame:
        """measure, statistic, estimate, low, high (95 %), p (of chance; two-sided, same resamples), queries, seeds."""
        rows = [
            {"measure": MEASURES[measure], "statistic": kind, **_row(self.draws(measure, kind), CHANCE[kind])}
            for measure in measures
            for kind in kinds
        ]
        return pd.DataFrame(rows).assign(queries=self.queries, seeds=self.seeds)

    def differences(self, best: str, others: Sequence[str], statistic: str = "spearman") -> pd.DataFrame:
        """measure, statistic, estimate (``best`` less the measure), low, high, p."""
        rows = [
            {"measure": MEASURES[name], "statistic": statistic, **_row(self.less(best, name, statistic))}
            for name in others
        ]
        return pd.DataFrame(rows)

    def ratio(self, part: str, whole: str | None = None) -> Draws:
        """The sum of one column over that of another, or a column's mean; queries where it is missing do not count."""
        found = []
        for table, counts in self._runs:
            known = table[part].notna().to_numpy()
            below = np.ones(known.sum()) if whole is None else table[whole].to_numpy()[known]
            with np.errstate(invalid="ignore", divide="ignore"):
                found.append(counts[:, known] @ table[part].to_numpy()[known] / (counts[:, known] @ below))
        return _draws(np.mean(found, axis=0))

    def _replicates(self, measure: str, statistic: str) -> Array:
        key = measure, statistic
        if key not in self._found:
            found, each = _STATISTIC[statistic], []
            for table, counts in self._runs:
                columns = table[measure].to_numpy(float), table[self.target].to_numpy(float)
                strips = np.array_split(counts, 1 + counts.size // STRIP)
                each.append(np.concatenate([found(*columns, strip) for strip in strips]))
            self._found[key] = np.mean(each, axis=0)
        return self._found[key]


def decide(found: Mapping[str, Draws], effects: Mapping[str, float] | None = None, missing: str = "") -> Verdict:
    """The verdict on a claim that all these are above 0, their intervals corrected together by Holm's method.

    Args:
        found: what is claimed to be above 0, by what it is called.
        effects: the paper's own numbers, where it prints any; "effect excluded" is about these.
        missing: why it was not tested, if it was not.

    It is not tested where one cannot be computed; else :data:`gcpo.reports.claims.PRECEDENCE` says which decides it.
    The numbers are those of the one that did.
    """
    effects = effects or {}
    undefined = [name for name, draws in found.items() if not len(draws.draws) or np.isnan(draws.estimate)]
    if missing or not found:
        return Verdict(UNTESTED, missing or "There are no runs of it.")
    if undefined:
        return Verdict(UNTESTED, f"Nothing to rank: {', '.join(undefined)}, where one side is constant.")
    levels = statistics.holm_levels([draws.p for draws in found.values()])
    intervals = {name: draws.interval(level) for (name, draws), level in zip(found.items(), levels, strict=True)}
    words = {name: word(low, high, effects.get(name, nan)) for name, (_, low, high) in intervals.items()}
    final, name = deciding(words, {name: interval.low for name, interval in intervals.items()})
    mde = statistics.DETECTABLE * float(np.std(found[name].draws))
    effect = effects.get(name, nan)
    text = f"{name}: {signed(*intervals[name])} (95 % over queries"
    text += f", corrected for {len(found)})" if len(found) > 1 else ")"
    text += f"; the paper's: {effect:+.2f}" if effect == effect else "; the paper prints no number"
    return Verdict(final, f"{text}; detectable: {mde:.2f}.", *intervals[name], effect, mde)


def at_checkpoints(
    found: Mapping[str, Mapping[str, Draws]], effects: Mapping[str, float] | None = None, missing: str = ""
) -> Verdict:
    """The verdict on a claim that names no checkpoint: asked of every policy measured, and decided where they agree.

    Args:
        found: by what a policy is called, what is claimed to be above 0 of it, as in :func:`decide`.
        effects: as in :func:`decide`.
        missing: likewise.

    Policies of which it cannot be asked do not count. Where some say "does not hold" and the others "effect excluded"
    it is the latter; where they differ otherwise, "cannot tell". The numbers are those of the first policy that says
    this, or else of the first.
    """
    each = {name: decide(parts, effects, missing) for name, parts in found.items()}
    asked = [verdict for verdict in each.values() if verdict.word != UNTESTED]
    if not asked:
        return next(iter(each.values()), Verdict(UNTESTED, missing or "There are no runs of it."))
    words = {verdict.word for verdict in asked}
    final = asked[0].word if len(words) == 1 else EXCLUDED if words == {EXCLUDED, FAILS} else OPEN
    shown = next((verdict for verdict in asked if verdict.word == final), asked[0])
    lines = []
    for name, verdict in each.items():
        short = verdict.because.partition(" (95 %")[0]
        found_with = f", detectable {verdict.mde:.2f}" if verdict.mde == verdict.mde else ""
        lines.append(f"{name}: {verdict.word}, {short}{found_with}")
    said = "; ".join(lines)
    said = said[0].upper() + said[1:]
    family = max(map(len, found.values()))
    text = "It depends on the checkpoint, which the paper does not name. " if len(words) > 1 else ""
    text += f"{said} (95 % over queries{f', corrected for {family}' if family > 1 else ''})"
    known = [f"{name}: {effect:+.2f}" for name, effect in (effects or {}).items() if f" {name}: " in said]
    text += f"; the paper's {', '.join(known)}." if known else "; the paper prints no number."
    return replace(shown, word=final, because=text)


def of_either_sign(draws: Draws) -> Draws:
    """The same, turned round where the estimate is below 0: above 0 at a level where its interval does not hold 0."""
    sign = -1.0 if draws.estimate < 0 else 1.0
    return Draws(sign * draws.estimate, sign * draws.draws)


def mean_over_queries(lines: pd.DataFrame, column: str, n: int = 10000, seed: int = 0) -> Draws:
    """The mean of a column over lines that have it, and its resamples of queries with all their lines."""
    sums = lines.dropna(subset=[column]).groupby("query")[column].agg(["sum", "size"])
    if sums.empty:
        return Draws(nan, np.empty(0))
    drawn = np.random.default_rng(seed).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=n)
    counts = np.vstack([np.ones(len(sums)), drawn])
    return _draws(counts @ sums["sum"].to_numpy(float) / (counts @ sums["size"].to_numpy(float)))


def rank_correlations(pairs: pd.DataFrame, column: str = "gradient_distance", within: float = NEAR) -> pd.DataFrame:
    """How distance in meaning goes with a column inside each group, over its pairs of different texts that are near.

    Args:
        pairs: lines of ``pairs.csv`` of one or more runs, told apart by ``seed``.
        column: what 1 - cosine of the embeddings is compared with.
        within: the largest 1 - cosine that counts.

    Returns:
        seed, query, rho (Spearman's; nan where a side is constant) and pairs, for groups of three such pairs or more.
    """
    near = pairs[~pairs["same_text"].astype(bool) & (pairs["embedding_distance"] <= within)]
    rows = [
        {
            "seed": seed,
            "query": query,
            "rho": statistics.spearman(part["embedding_distance"].to_numpy(), part[column].to_numpy()),
            "pairs": len(part),
        }
        for (seed, query), part in near.groupby(["seed", "query"])
        if len(part) >= statistics.FEWEST_POINTS
    ]
    return pd.DataFrame(rows, columns=["seed", "query", "rho", "pairs"])


def right_against_wrong(
    pairs: pd.DataFrame, queries: pd.DataFrame, size: int, reward_range: tuple[float, float]
) -> pd.DataFrame:
    """Pairs of a right and a wrong answer, and how far their gradients point the same way.

    Only from groups half of which earn the most there is and half the least (RD = 1). All their advantages are a or -a,
    so |A_i g_i - A_j g_j| is a |g_i - g_j| for answers of one reward and a |g_i + g_j| for a right and a wrong one.
    Both are recorded, which tells these pairs from the others and gives their inner product.

    Args:
        pairs: lines of ``pairs.csv`` of runs of one policy, told apart by ``seed``.
        queries: lines of ``queries.csv`` of the same runs.
        size: G.
        reward_range: the least and the most that an answer can earn.

    Returns:
        the columns of ``pairs``, with alignment: 2 <g_i, g_j> / (|g_i|^2 + |g_j|^2), in [-1, 1]. It has the cosine's
        sign and is at most as large, the same where both are of one length; apart is 1 - alignment.
    """
    least, most = reward_range
    rewards = torch.tensor([[float(least), float(most)] * (size // 2)])
    scale = float(base_advantages(rewards).max())
    groups = queries.loc[np.isclose(queries["rd"], 1), ["seed", "query"]]
    found = pairs.merge(groups, on=["seed", "query"])
    minus, plus = found["gradient_distance"] ** 2, (found["advantage_distance"] / scale) ** 2
    alignment = (plus - minus) / (plus + minus)
    mixed = (minus > 0) & ~np.isclose(plus, minus, rtol=1e-6, atol=0)
    return found.assign(alignment=alignment, apart=1 - alignment)[mixed].reset_index(drop=True)


def as_text(draws: Draws, digits: int = 2) -> str:
    """'0.41 [0.30, 0.52]'; a dash where there was nothing to rank."""
    return with_interval(*draws.interval(), digits) if len(draws.draws) else "–"


def _draws(replicates: Array) -> Draws:
    resampled = replicates[1:]
    return Draws(float(replicates[0]), resampled[~np.isnan(resampled)])


def _row(draws: Draws, chance: float = 0.0) -> dict[str, float]:
    if not len(draws.draws):
        return dict.fromkeys(("estimate", "low", "high", "p"), nan)
    estimate, low, high = draws.interval()
    p = nan if np.isnan(chance) else Draws(estimate, draws.draws - chance).p
    return {"estimate": estimate, "low": low, "high": high, "p": p}


def _heldout(u: Array, v: Array, counts: Array) -> tuple[Array, Array]:
    """(mean absolute error, Spearman) on held-out folds; the rank of a line's prediction is u's, or turned round."""
    if len(u) < FOLDS * statistics.FEWEST_POINTS:
        return np.full(len(counts), nan), np.full(len(counts), nan)
    errors, rhos = [], []
    for train, test in KFold(FOLDS, shuffle=True, random_state=0).split(u):
        total = counts[:, train].sum(1)
        mean_u, mean_v = (counts[:, train] @ x[train] / total for x in (u, v))
        covariance = counts[:, train] @ (u * v)[train] / total - mean_u * mean_v
        spread = counts[:, train] @ (u**2)[train] / total - mean_u**2
        with np.errstate(invalid="ignore", divide="ignore"):
            slope = np.where(spread > 1e-12 * mean_u**2, covariance / spread, 0.0)[:, None]
            predicted = mean_v[:, None] + slope * (u[test] - mean_u[:, None])
            errors.append((counts[:, test] * np.abs(v[test] - predicted)).sum(1) / counts[:, test].sum(1))
            sign = np.where(slope[:, 0] == 0, nan, np.sign(slope[:, 0]))
        rhos.append(sign * statistics.rhos(u[test], v[test], counts[:, test]))
    known = ~np.isnan(rhos)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.mean(errors, axis=0), np.where(known, rhos, 0).sum(0) / known.sum(0)


_STATISTIC = {
    **statistics.RANKINGS,
    "mae": lambda u, v, counts: _heldout(u, v, counts)[0],
    "heldout_spearman": lambda u, v, counts: _heldout(u, v, counts)[1],
}
