"""Alignment of uncertainty measures with the gradient variance V(q) (GCPO, App. D), every figure with its interval.

An interval is over queries: one set of bootstrap resamples serves every measure and every rollout seed, so that what is
compared is compared on the same queries (App. D.6). A figure is the mean over rollout seeds of the figure of each; the
noise of rollouts is averaged over seeds, not resampled. Of several trainings the interval is over these too.

The paper does not say of which checkpoint its Figure 1 is: :func:`at_checkpoints` decides its claims.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations, permutations, product
from math import nan
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import norm

from gcpo import statistics
from gcpo.reports.tables import NAMES, with_interval
from gcpo.reports.verdicts import FAILS, INCONCLUSIVE, RULED_OUT, UNTESTED, Evidence, Verdict, decide, family, pooled
from gcpo.statistics import Array, Draws, draws_over_seeds

MEASURES, RIVALS = NAMES["measures"], NAMES["rivals"]  # column -> what figures call it
FOUR = ("token_entropy", "se", "cd", "bot")
CHANCE = {"spearman": 0.0, "auc": 0.5, "precision": 0.1, "mae": nan, "heldout_spearman": 0.0}
COLUMNS = ["measure", "statistic", "estimate", "low", "high", "p"]
START = "starting policy"
TRAINING = "training_seed"  # tells the trainings apart whose policies were asked; missing of a starting policy


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
    """Agreement of the measures' rankings of queries with ``target``, with one shared bootstrap.

    Args:
        queries: lines of ``queries.csv`` of one or more runs; with several, ``seed`` tells them apart, and
            ``training_seed``, where it is there, the trainings whose policies they are of, and ``document`` what is
            drawn with all its queries.
        target: the column to rank by: V, or success_rate (Table 3).
        drop_top, keep_zero: the queries of each run that count, as in :func:`selected`.
        n: resamples of the queries.
    """

    def __init__(
        self, queries: pd.DataFrame, target: str = "V", *, drop_top: float = 0, keep_zero: bool = True, n: int = 10000
    ) -> None:
        names = pd.Index(sorted(set(queries["query"])))
        units = names.to_series()
        if "document" in queries:  # questions about one document are drawn together
            units = queries.drop_duplicates("query").set_index("query")["document"].reindex(names).fillna(units)
        drawn, place = np.unique(units, return_inverse=True)
        # The first row is what was seen, the others are resamples of it; a query is drawn alike for all runs.
        counts = statistics.seen_and_resampled(len(drawn), n, 0)
        self._counts = counts if len(drawn) == len(names) else counts[:, place]
        self._trainings: dict[float, list[tuple[pd.DataFrame, Any]]] = {}  # with the places of its queries
        apart = [queries[name] for name in (TRAINING, "seed") if name in queries]
        for _, run in queries.groupby(apart or (lambda line: 0), dropna=False):
            table = selected(run, drop_top=drop_top, keep_zero=keep_zero).set_index("query").sort_index()
            known = table, names.get_indexer(table.index)
            self._trainings.setdefault(_trainings(run).iloc[0], []).append(known)
        self._runs, self.target = [run for runs in self._trainings.values() for run in runs], target
        self.seeds, self.queries = len(self._runs), min(len(table) for table, _ in self._runs)
        self._found: dict[tuple[str, str], Array] = {}

    def draws(self, measure: str, statistic: str = "spearman") -> Draws:
        """One of the statistics of :data:`CHANCE` of a measure: the mean over runs, and its draws.

        spearman (Eq. 21), auc and precision at the top 10 % (Eq. 22-23, ties in expectation), mae (in V's unit) and
        heldout_spearman of a line fitted on the other folds (App. D.7; folds of queries, which resamples keep apart).
        """
        return draws_over_seeds(self._replicates(measure, statistic))

    def less(self, measure: str, other: str, statistic: str = "spearman", of: Alignment | None = None) -> Draws:
        """The statistic of one measure less that of another, on the same resamples (App. D.6); the other's with another
        target where ``of`` is an alignment of the same queries."""
        return draws_over_seeds(self._replicates(measure, statistic) - (of or self)._replicates(other, statistic))

    def table(self, measures: Sequence[str] = FOUR, kinds: Sequence[str] = tuple(CHANCE)) -> pd.DataFrame:
        """measure, statistic, estimate, low, high (95 %), p (of chance; two-sided, same resamples), queries, seeds."""
        each = product(measures, kinds)
        rows = [(MEASURES[name], kind, *_numbers(self.draws(name, kind), CHANCE[kind])) for name, kind in each]
        return pd.DataFrame(rows, columns=COLUMNS).assign(queries=self.queries, seeds=self.seeds)

    def differences(self, best: str, others: Sequence[str], statistic: str = "spearman") -> pd.DataFrame:
        """measure, statistic, estimate (``best`` less the measure), low, high, p."""
        rows = [(MEASURES[name], statistic, *_numbers(self.less(best, name, statistic))) for name in others]
        return pd.DataFrame(rows, columns=COLUMNS)

    def reliability(self, measure: str) -> dict[str, Draws]:
        """How well two draws of answers agree on a measure, on the target, and on both: rank correlations over queries.

        "measure" and "target": of one column in a draw with the same column in another (their reliabilities); "apart":
        of the measure in one draw with the target in another, so that they share no answers; "corrected": the latter
        over the root of the product of the former two (Spearman's correction for attenuation). Means over all pairs of
        draws of a policy; without draws where each has one.
        """
        pairs = {"measure": (measure, measure), "target": (self.target, self.target), "apart": (measure, self.target)}
        found = {name: self._across(*columns) for name, columns in pairs.items()}
        with np.errstate(invalid="ignore"):
            found["corrected"] = found["apart"] / np.sqrt(found["measure"] * found["target"])
        return {name: draws_over_seeds(values) for name, values in found.items()}

    def less_apart(self, measure: str, other: str) -> Draws:
        """:meth:`less` of rank correlations, of measures in one draw of answers with the target in another."""
        return draws_over_seeds(self._across(measure, self.target) - self._across(other, self.target))

    def _across(self, first: str, second: str) -> Array:
        """Return rho of a column in one draw of answers with a column in another: (1 + n, trainings), means over pairs;
        of queries that both draws have, and of 2,000 resamples at most."""
        pairs = combinations if first == second else permutations  # of one column the other way round is the same
        each = []
        for runs in self._trainings.values():
            found = []
            for (one, places), (other, _) in pairs(runs, 2):
                here = one.index.isin(other.index)
                u, v = (of.loc[one.index[here], name].to_numpy(float) for of, name in ((one, first), (other, second)))
                found.append(statistics.replicates("spearman", u, v, self._counts[:2001, places[here]]))
            each += [np.mean(found, axis=0)] if found else []
        return np.stack(each or [np.full(1, nan)], axis=1)

    def _replicates(self, measure: str, statistic: str) -> Array:
        if (key := (measure, statistic)) not in self._found:
            means = []
            for runs in self._trainings.values():
                columns = [(table[[measure, self.target]].to_numpy(float).T, places) for table, places in runs]
                each = [statistics.replicates(statistic, u, v, self._counts[:, at]) for (u, v), at in columns]
                means.append(np.mean(each, axis=0))
            self._found[key] = np.stack(means, axis=1)
        return self._found[key]


def _trainings(lines: pd.DataFrame) -> pd.Series:
    """Return which training each line is of; -1 of a starting policy, or where there is no telling."""
    return lines[TRAINING].fillna(-1) if TRAINING in lines else pd.Series(-1, lines.index)


def comparisons(found: Mapping[str, Draws | Mapping[str, Draws]]) -> pd.DataFrame:
    """Return what is claimed to be above 0, by what it is called, corrected together
    (:func:`gcpo.reports.verdicts.family`); of each world where a mean over worlds counts. What cannot be computed has
    no estimate."""
    each = {name: draws if isinstance(draws, Mapping) else {"": draws} for name, draws in found.items()}
    return family({(name, ""): {of: _evidence(one) for of, one in worlds.items()} for name, worlds in each.items()})


def in_worlds(each: Mapping[str, Mapping[str, Draws]]) -> dict[str, dict[str, Draws]]:
    """Return what each world has, by what it is called and by world: what all of them have."""
    names = [name for name in next(iter(each.values())) if all(name in of for of in each.values())]
    return {name: {world: of[name] for world, of in each.items()} for name in names}


def realised(found: Mapping[str, Draws | Mapping[str, Draws]], size: float) -> float:
    """Return how many of 100 experiments like this one would find all of it above 0 by their own intervals, if each
    true value were ``size``: by the noise of these draws, which are made together."""
    each = [pooled([*of.values()]) if isinstance(of, Mapping) else of for of in found.values()]
    above = [size + of.draws - of.estimate > of.estimate - of.interval().low for of in each]
    return 100 * float(np.mean(np.all(above, axis=0))) if len({len(of.draws) for of in each}) == 1 else nan


def _evidence(draws: Draws) -> Evidence | str:
    if not len(draws.draws) or np.isnan(draws.estimate):
        return "nothing to rank, because one side is constant"
    _, low, high = draws.interval()  # not the draws' deviation: of a ratio a few of them lie very far out
    detectable = statistics.DETECTABLE * (high - low) / (2 * float(norm.ppf(0.975)))
    return Evidence(draws.interval, draws.p, lambda _: detectable, draws)


def at_checkpoints(
    found: Mapping[str, Mapping[str, Draws | Mapping[str, Draws]]],
    effects: Mapping[str, float] | None = None,
    margin: float = nan,
    blind: Mapping[str, str] | None = None,
    only: Collection[str] = (),
) -> Verdict:
    """Return the verdict on a claim that names no checkpoint: asked of every policy, and decided where they agree.

    Args:
        found: by what a policy is called, what is claimed to be above 0 of it.
        effects: the paper's own numbers, where it prints any.
        margin: the smallest effect that would matter, where the paper prints none.
        blind: of each policy, why a null says nothing there (:func:`gcpo.reports.verdicts.decide`).
        only: what is claimed, if not all; the rest are members of its families.

    Policies of which it cannot be asked do not count. Where some say "fails" and the others "ruled out" it is the
    latter; where they differ otherwise, "inconclusive". The numbers are those of the first policy that says this, or
    else of the first; ``parts`` has a row for each policy.
    """
    known, nothing = effects or {}, "There are no runs of it."
    each = {}
    for policy, parts in found.items():
        claimed, why = [name for name in parts if name in (only or parts)], (blind or {}).get(policy, "")
        printed, table = [known.get(name, nan) for name in claimed], comparisons(parts).loc[claimed]
        each[policy] = decide(table, printed, margin, None if claimed else nothing, why)
    if not (asked := [verdict for verdict in each.values() if verdict["verdict"] != UNTESTED]):
        return next(iter(each.values()), decide(None, closed=nothing))
    words = {verdict["verdict"] for verdict in asked}
    final = min(words) if len(words) == 1 else RULED_OUT if words == {RULED_OUT, FAILS} else INCONCLUSIVE
    shown = next((verdict for verdict in asked if verdict["verdict"] == final), asked[0])
    return {**shown, "verdict": final, "parts": pd.DataFrame([{**each[policy], "policy": policy} for policy in each])}


def as_text(draws: Draws, digits: int = 2) -> str:
    """'0.41 [0.30, 0.52]'; a dash where there was nothing to rank."""
    return with_interval(*draws.interval(), digits) if len(draws.draws) else "–"


def _numbers(draws: Draws, chance: float = 0.0) -> tuple[float, ...]:
    """Return the estimate, low, high and p of a statistic; p is of its value by chance, nan where that is not known."""
    if not len(draws.draws):
        return (nan,) * 4
    p = nan if np.isnan(chance) else Draws(draws.estimate, draws.draws - chance).p
    return *draws.interval(), p
