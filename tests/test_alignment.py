"""Figures of alignment with intervals: what is seen is what gcpo.statistics computes, and intervals cover."""

import math
from math import nan
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gcpo import statistics
from gcpo.reports import alignment
from gcpo.reports.verdicts import Verdict, decide
from gcpo.statistics import Draws


def queries(size: int = 60, seed: int = 0, runs: int = 1) -> pd.DataFrame:
    """Queries with ties and zeros in V, of several rollout seeds: bot follows V best and se is coarse."""
    rng = np.random.default_rng(seed)
    hardness = rng.normal(size=size)
    parts = []
    for run in range(runs):
        v = np.maximum(np.exp(hardness + rng.normal(size=size)).round(2) - 0.5, 0)
        columns: dict[str, Any] = {
            "token_entropy": rng.normal(size=size),
            "se": (hardness + rng.normal(size=size)).round(),
            "cd": hardness + rng.normal(size=size),
            "bot": hardness + 0.2 * rng.normal(size=size),
        }
        names = [f"q{i}" for i in range(size)]
        parts.append(pd.DataFrame({"query": names, "seed": run, "V": v, "zero_variance": v == 0, **columns}))
    return pd.concat(parts, ignore_index=True).sample(frac=1, random_state=seed)


RANKINGS = {"spearman": statistics.spearman, "auc": statistics.top_auc, "precision": statistics.precision_at_top}


def exact(name: str, table: pd.DataFrame) -> dict[str, float]:
    u, v = (table.sort_values("query")[column].to_numpy() for column in (name, "V"))
    heldout = zip(("mae", "heldout_spearman"), statistics.heldout_prediction(u, v), strict=True)
    return {name: function(u, v) for name, function in RANKINGS.items()} | dict(heldout)


@pytest.mark.parametrize("keep_zero", [True, False])
@pytest.mark.parametrize("drop_top", [0.0, 0.1])
@pytest.mark.parametrize("name", alignment.FOUR)
def test_what_is_seen_is_the_mean_over_seeds_of_statistics(name: str, drop_top: float, keep_zero: bool) -> None:
    table = queries(runs=2)
    found = alignment.Alignment(table, drop_top=drop_top, keep_zero=keep_zero, n=20)
    runs = [alignment.selected(part, drop_top=drop_top, keep_zero=keep_zero) for _, part in table.groupby("seed")]
    assert (found.seeds, found.queries) == (2, min(map(len, runs)))
    for statistic, expected in pd.DataFrame([exact(name, run) for run in runs]).mean().items():
        assert found.draws(name, statistic).estimate == pytest.approx(expected), statistic


def test_a_resample_has_the_statistics_of_the_table_that_it_draws() -> None:
    table = queries(40).sort_values("query").reset_index(drop=True)
    drawn = np.random.default_rng(0).multinomial(40, np.full(40, 1 / 40), size=5)
    found = alignment.Alignment(table, drop_top=0.1, n=5)
    kept = alignment.selected(table, drop_top=0.1).sort_index()  # what is left out changes no draw of the others
    for statistic, function in RANKINGS.items():  # folds of the others keep copies of a query together
        repeated = [kept.loc[np.repeat(kept.index, counts[kept.index])] for counts in drawn]
        expected = [function(part["se"].to_numpy(), part["V"].to_numpy()) for part in repeated]
        assert found.draws("se", statistic).draws == pytest.approx(expected), statistic


def test_differences_are_paired() -> None:
    found = alignment.Alignment(queries(runs=2), n=500)
    for statistic in alignment.CHANCE:
        own = found.less("bot", "token_entropy", statistic)
        expected = found.draws("bot", statistic).draws - found.draws("token_entropy", statistic).draws
        np.testing.assert_allclose(own.draws, expected)
        assert found.less("bot", "bot", statistic).interval() == (0, 0, 0)
    table = found.differences("bot", ["token_entropy", "se"], "auc")
    assert list(table["measure"]) == ["Entropy", "SE"] and (table["low"] <= table["estimate"]).all()


def test_several_trainings_widen_the_interval_by_their_spread() -> None:
    parts = [queries(runs=2, seed=seed).assign(training_seed=100.0 + seed) for seed in range(4)]
    found = alignment.Alignment(pd.concat(parts), n=4000)
    each = [alignment.Alignment(part, n=4000).less("bot", "se") for part in parts]
    own = found.less("bot", "se")
    assert own.estimate == pytest.approx(np.mean([one.estimate for one in each]))
    over_queries = np.mean([one.draws for one in each], axis=0).std()
    # Student's t with 3 has the variance 3.
    over_trainings = np.std([one.estimate for one in each], ddof=1) / 2 * np.sqrt(3 / (3 - 2))
    assert own.draws.std() == pytest.approx(np.hypot(over_queries, over_trainings), rel=0.15)
    alone = alignment.Alignment(parts[0].assign(training_seed=nan), n=4000).less("bot", "se")
    np.testing.assert_array_equal(alone.draws, each[0].draws)  # of the starting policy: queries alone


def test_two_draws_of_answers_tell_how_reliable_a_measure_is() -> None:
    """Signals of rho 0.6 in 800 queries, seen through noise that halves the variance of one and leaves the other."""
    rng = np.random.default_rng(5)
    signal = rng.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], size=800)
    shared = {"query": [f"q{i}" for i in range(800)], "zero_variance": False}
    runs = [
        pd.DataFrame(shared | {"seed": seed, "se": signal[:, 0] + rng.normal(size=800), "V": signal[:, 1]})
        for seed in range(3)
    ]
    found = alignment.Alignment(pd.concat(runs), n=400).reliability("se")
    assert found["target"].estimate == 1
    assert found["measure"].estimate == pytest.approx(0.5, abs=0.06)
    assert found["apart"].estimate == pytest.approx(0.6 * np.sqrt(0.5), abs=0.06)
    low, high = found["corrected"].interval()[1:]
    assert low < 0.6 < high and 0.03 < high - low < 0.2
    assert alignment.Alignment(pd.concat(runs).assign(cd=lambda t: -t["se"]), n=10).less_apart("se", "cd").estimate == (
        pytest.approx(2 * found["apart"].estimate)
    )
    of_pair = statistics.spearman(runs[0]["se"].to_numpy(), runs[1]["se"].to_numpy())
    two = alignment.Alignment(pd.concat(runs[:2]), n=10).reliability("se")
    assert two["measure"].estimate == pytest.approx(of_pair)
    assert not any(len(one.draws) for one in alignment.Alignment(runs[0], n=10).reliability("se").values())


def test_a_measure_that_is_constant_has_no_rank() -> None:
    found = alignment.Alignment(queries().assign(bot=1.0), n=50)
    assert np.isnan(found.draws("bot").estimate) and not len(found.draws("bot").draws)
    assert found.table(["bot"], ["spearman"])[["estimate", "low", "high", "p"]].isna().all(axis=None)
    verdict = decide(alignment.comparisons({"a": draws(0.5), "b": found.draws("bot")}))
    assert verdict["verdict"] == "not tested" and "one side is constant" in verdict["because"]


def test_few_queries_have_no_held_out_folds() -> None:
    found = alignment.Alignment(queries(12), n=20)
    assert np.isnan(found.draws("cd", "mae").estimate) and np.isfinite(found.draws("cd").estimate)


def test_halves_take_measures_and_v_from_different_rollouts() -> None:
    table = queries(5).assign(**{f"{name}_half": 7.0 for name in alignment.MEASURES}, V_half=[1.0, 0, nan, 2, 3])
    found = alignment.halves(table)
    assert len(found) == 4 and (found["cd"] == 7).all()
    assert list(found["V"]) == [1, 0, 2, 3] and list(found["zero_variance"]) == [False, True, False, False]


# --- verdicts ---------------------------------------------------------------------------------------------------------


def draws(centre: float, spread: float = 0.1, seed: int = 0) -> Draws:
    return Draws(centre, centre + spread * np.random.default_rng(seed).normal(size=4000))


def decided(found: dict[str, Draws], margin: float = nan) -> Verdict:
    return decide(alignment.comparisons(found), margin=margin)


@pytest.mark.parametrize(
    ("centres", "expected"),
    [
        ([0.5, 0.6], "holds"),
        ([-0.5, -0.6], "fails"),
        ([0.0, 0.0], "ruled out"),
        ([-0.5, 0.0], "ruled out"),
        ([0.5, -0.5], "inconclusive"),
        ([0.5, 0.0], "inconclusive"),
        ([nan, 0.5], "holds"),
        ([nan, 0.5, -0.5], "inconclusive"),
        ([nan, nan], "not tested"),
    ],
)
def test_a_claim_that_names_no_checkpoint_is_decided_where_they_agree(centres: list[float], expected: str) -> None:
    nothing = Draws(nan, np.empty(0))
    found = {str(place): {"a": nothing if np.isnan(x) else draws(x)} for place, x in enumerate(centres)}
    verdict = alignment.at_checkpoints(found, margin=0.6)
    assert verdict["verdict"] == expected
    if expected != "not tested":
        words = {name: decided(parts, 0.6)["verdict"] for name, parts in found.items()}
        asked = [name for name, word in words.items() if word != "not tested"]
        shown = next((name for name in asked if words[name] == expected), asked[0])
        assert verdict["estimate"] == found[shown]["a"].estimate
        assert dict(verdict["parts"][["policy", "verdict"]].to_numpy().tolist()) == words


@pytest.mark.parametrize("nothing", [{}, {"start": {}}])
def test_a_claim_without_runs_is_not_tested(nothing: Any) -> None:
    assert alignment.at_checkpoints(nothing)["verdict"] == "not tested"


def test_a_margin_rules_out_where_the_paper_prints_nothing_and_only_where_a_control_was_seen() -> None:
    found = {"start": {"a": draws(0.0)}, "end": {"a": draws(0.0)}}
    blind = dict.fromkeys(found, "No control was seen.")
    ways: list[dict[str, Any]] = [{}, {"margin": 0.6}, {"margin": 0.6, "blind": blind}]
    words = [alignment.at_checkpoints(found, **how)["verdict"] for how in ways]
    assert words == ["inconclusive", "ruled out", "not tested"]


def test_worlds_are_pooled_by_what_both_have() -> None:
    a, b = {"x": draws(0.4), "y": draws(0.1)}, {"x": draws(0.2)}
    found = alignment.in_worlds({"world A": a, "world B": b})
    assert [*found] == ["x"]
    row = alignment.comparisons(found).iloc[0]
    assert row["estimate"] == pytest.approx(0.3) and row["world B"].startswith("0.2 [")
    alone = a["x"].interval()
    assert row["high"] - row["low"] == pytest.approx((alone.high - alone.low) / math.sqrt(2), rel=0.1)


def test_realised_power_is_the_share_of_draws_in_which_all_would_be_clear() -> None:
    one = draws(0.4)  # a deviation of 0.1: a true 0.196 is found half of the time
    assert alignment.realised({"x": one}, 0.196) == pytest.approx(50, abs=3)
    assert alignment.realised({"x": one, "y": one}, 0.196) == alignment.realised({"x": one}, 0.196)
    assert alignment.realised({"x": one, "y": draws(0.4, seed=1)}, 0.196) == pytest.approx(25, abs=3)
