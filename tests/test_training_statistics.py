"""Differences of training: what interval, p value and power promise, they keep on data of known spread."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.stats import t as student
from statsmodels.stats.multitest import multipletests

from gcpo import paths
from gcpo import statistics as s

SPREADS = {  # over seeds, over questions, of single answers
    "answers alone": (0.0, 0.0, 10.0),
    "seeds": (2.0, 0.0, 10.0),
    "questions": (0.0, 5.0, 10.0),
    "all": (1.0, 5.0, 10.0),
}


def scores(rng: np.random.Generator, seeds: int, questions: int, spread: tuple[float, float, float]) -> np.ndarray:
    of_seeds, of_questions, of_answers = spread
    return (
        rng.normal(0, of_seeds, (seeds, 1))
        + rng.normal(0, of_questions, (1, questions))
        + rng.normal(0, of_answers, (seeds, questions))
    )


def pair(seed: int, seeds: int = 5, questions: int = 40, gain: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return (scores(rng, seeds, questions, SPREADS["all"]) + gain, scores(rng, seeds, questions, SPREADS["all"]))


def test_the_difference_is_that_of_the_means() -> None:
    a, b = pair(0)
    assert s.training_difference(a, b).estimate == pytest.approx(a.mean() - b.mean())
    assert s.training_difference(torch.tensor(a), b.tolist()) == s.training_difference(a, b)


def test_what_a_seed_or_a_question_does_to_both_is_taken_out() -> None:
    a, b = pair(0)
    rng = np.random.default_rng(1)
    both = rng.normal(0, 100, (5, 1)) + rng.normal(0, 100, (1, 40))
    assert s.training_difference(a + both, b + both) == pytest.approx(s.training_difference(a, b), abs=1e-9)
    assert s.minimal_detectable(a + both, b + both) == pytest.approx(s.minimal_detectable(a, b))


@pytest.mark.parametrize("level", [0.95, 0.997])
@pytest.mark.parametrize("seed", range(5))
def test_seeds_alone_give_the_interval_of_students_t_test_at_any_level(level: float, seed: int) -> None:
    of_seeds = np.array([1.0, 3.0, 2.0, 6.0])
    a = of_seeds[:, None] + np.zeros((4, 50))  # every question alike
    _, low, high = s.training_draws(a, np.zeros_like(a), seed=seed).interval(level)
    width = student.ppf((1 + level) / 2, 3) * of_seeds.std(ddof=1) / 2
    assert (low, high) == pytest.approx((3 - width, 3 + width), rel=0.02)


def test_questions_alone_give_the_interval_of_their_resampling() -> None:
    of_questions = np.random.default_rng(0).exponential(size=60)
    a = of_questions + np.zeros((5, 60))  # every seed alike
    found = s.training_difference(a, np.zeros_like(a), seed=3)
    assert found == pytest.approx(s.paired_query_bootstrap(of_questions, np.zeros(60), seed=3))


def test_no_spread_at_all_is_a_point() -> None:
    one, none = np.ones((3, 5)), np.zeros((3, 5))
    assert s.training_difference(one, none) == (1, 1, 1)
    assert s.training_draws(one, none).p == 1e-4 and s.training_draws(one, one).p == 1
    assert s.minimal_detectable(one, none) == 0


def test_standard_errors_are_those_of_the_analysis_of_variance_by_loops() -> None:
    a, b = pair(2, seeds=4, questions=7)
    d, rows, columns = a - b, (a - b).mean(1), (a - b).mean(0)
    rest = [[d[i, j] - rows[i] - columns[j] + d.mean() for j in range(7)] for i in range(4)]
    of_rows = sum(7 * (row - d.mean()) ** 2 for row in rows) / 3
    of_columns = sum(4 * (column - d.mean()) ** 2 for column in columns) / 6
    of_cells = sum(x * x for line in rest for x in line) / 18
    over_seeds, over_questions, share = s._standard_errors(d)
    assert over_seeds == pytest.approx(math.sqrt(of_rows / 28))
    assert over_questions == pytest.approx(math.sqrt(max(0, of_columns - of_cells) / 28))
    assert share == pytest.approx(max(0, of_columns - of_cells) / of_columns)


@pytest.mark.slow
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("seeds", [3, 5, 10, 20])
def test_an_interval_covers_the_truth_in_95_of_100_cases(seeds: int, spread: str) -> None:
    rng, cases = np.random.default_rng(seeds), 1000
    hits = 0
    for case in range(cases):
        paired = scores(rng, seeds, 60, SPREADS[spread])
        _, low, high = s.training_difference(paired, np.zeros_like(paired), n=600, seed=case)
        hits += low <= 0 <= high
    assert 0.93 <= hits / cases <= 0.97


@pytest.mark.parametrize(
    ("seeds", "comparisons", "power"),
    [(2, 62, 0.8), (3, 4, 0.8), (5, 20, 0.5), (10, 17, 0.8), (2, 1, 0.06), (2, 1, 0.999), (3, 1, 0.95)],
)
def test_the_detectable_size_is_found_with_the_power_and_at_the_level_that_were_asked_for(
    seeds: int, comparisons: int, power: float
) -> None:
    a, b = pair(0, seeds=seeds)
    error = np.hypot(*s._standard_errors(a - b)[:2])
    rng = np.random.default_rng(0)  # a t test by hand: its bar, and draws of what it sees
    seen = rng.standard_normal(200_000) + s.minimal_detectable(a, b, power, 1 - 0.05 / comparisons) / error
    bar = student(seeds - 1).ppf(1 - 0.025 / comparisons)
    told = np.abs(seen) > bar * np.sqrt(rng.chisquare(seeds - 1, 200_000) / (seeds - 1))
    assert told.mean() == pytest.approx(power, abs=0.005)


@pytest.mark.parametrize("case", range(8))
def test_holm_is_statsmodels(case: int) -> None:
    p_values = np.random.default_rng(case).uniform(0, 0.2, 1 + 3 * case).round(2)  # with ties
    assert s.holm(p_values.tolist()) == multipletests(p_values, method="holm")[1].tolist()
    assert s.holm([]) == []


@pytest.mark.parametrize(
    ("p_values", "shares"),
    [
        ([0.001, 0.2, 0.02, 0.03], [4, 3, 3, 3]),  # 0.001 < 0.05/4, 0.02 > 0.05/3: those from it on share its level
        ([0.001, 0.002, 0.03], [3, 2, 1]),  # all rejected
        ([0.9], [1]),
        ([], []),
    ],
)
def test_holm_levels_by_hand(p_values: list[float], shares: list[int]) -> None:
    assert s.holm_levels(p_values) == pytest.approx([1 - 0.05 / share for share in shares])


@pytest.mark.parametrize("case", range(8))
def test_an_interval_at_its_holm_level_misses_zero_where_holm_rejects(case: int) -> None:
    draws = [s.training_draws(*pair(10 * case + k, gain=gain)) for k, gain in enumerate((0, 0.8, 1.6, 2.4, -3.2))]
    for family in (draws, *([one] for one in draws)):  # alone each has 95 % and its own p
        p_values = [d.p for d in family]
        for d, level, p in zip(family, s.holm_levels(p_values), s.holm(p_values), strict=True):
            _, low, high = d.interval(level)
            assert (low > 0 or high < 0) == (p < 0.05) and 1e-4 <= d.p <= 1


def test_draws_give_the_interval_and_the_p_value_of_one_drawing() -> None:
    a, b = pair(3, gain=1.5)
    draws = s.training_draws(a, b, n=500, seed=4)
    assert len(draws.draws) == 500
    assert draws.interval() == s.training_difference(a, b, n=500, seed=4)
    assert draws.p == 2 * min((draws.draws <= 0).mean(), (draws.draws >= 0).mean())
    _, low, high = draws.interval(0.5)
    assert (low, high) == pytest.approx(tuple(np.percentile(draws.draws, [25, 75])))


def test_the_ratio_of_spreads_is_pitman_and_morgans() -> None:
    cells = json.loads((paths.NOTEBOOKS / "21_table1.ipynb").read_text())["cells"]
    exec("".join(next(c["source"] for c in cells if c["id"] == "t1-spread-ratio")), given := {"np": np, "stats": stats})
    x, y = np.random.default_rng(0).multivariate_normal([0, 0], [[4, 1.2], [1.2, 1]], size=12).T
    ratio, low, high = (spread_ratio := given["spread_ratio"])(x, y, 0.95)
    assert ratio == pytest.approx(x.std() / y.std())
    assert spread_ratio(y, x, 0.95) == pytest.approx((1 / ratio, 1 / high, 1 / low))
    for end in (low, high):  # at an end of the interval the test of that ratio is just at 5 %
        assert stats.pearsonr(x / end + y, x / end - y).pvalue == pytest.approx(0.05, abs=1e-9)
    assert spread_ratio(x, x, 0.95) == pytest.approx((1, 1, 1))


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(-0.5, 0.9, True), (-1.0, 0.5, False), (0.2, 1.1, False), (-3.0, 3.0, False)]
)
def test_equivalence_is_an_interval_within_the_margin(low: float, high: float, expected: bool) -> None:
    assert s.equivalent(low, high, 1.0) is expected
