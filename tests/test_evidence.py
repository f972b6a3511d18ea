"""Comparisons and verdicts: seeds that both have, Holm within the family, five words, and declared margins."""

from __future__ import annotations

import math
from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from record_builders import evaluated, finished, planned, scored, write_grid

from gcpo import paths
from gcpo import statistics as s
from gcpo.reports import claims, evidence, margins, records
from gcpo.reports.evidence import Comparison, decide
from gcpo.runs.profiles import ParameterError, yaml_text
from gcpo.statistics import Interval

BASE = [0.50, 0.51, 0.49, 0.50, 0.505]
GAINS = [0.041, 0.039, 0.043, 0.038, 0.042]  # by seed: clearly not 0


def plus(gains: list[float], of: list[float] = BASE) -> list[float]:
    return [a + b for a, b in zip(of, gains, strict=True)]


def sampled(means: dict[str, list[float]]) -> pd.DataFrame:
    return scored(means).query("decoding == 'sampled'")


def matrix(scores: pd.DataFrame, label: str) -> np.ndarray:
    part = scores[scores["label"] == label]
    return 100 * part.pivot(index="seed", columns="query", values="f1").to_numpy()


def between(low: float, high: float, *, label: str = "a", against: str = "b", family: int = 1) -> Comparison:
    """A comparison with this interval, also after Holm."""
    found = Interval((low + high) / 2, low, high)
    return Comparison(label, against, 10, "10 seeds each", found, found, 0.5, 1.5, family)


# --- comparison -----------------------------------------------------------------------------------------------------


def test_a_comparison_is_the_training_difference_of_label_less_base() -> None:
    scores = sampled({"grpo": BASE, "se": plus(GAINS)})
    found = evidence.paired_comparisons(scores, "f1", [("se", "grpo")])["se", "grpo"]
    a, b = matrix(scores, "se"), matrix(scores, "grpo")
    assert found.interval == s.training_difference(a, b) == found.corrected
    assert found.interval.estimate == pytest.approx(100 * np.mean(GAINS))
    assert (found.p, found.mde) == (s.training_draws(a, b).p, s.minimal_detectable(a, b))
    assert (found.seeds, found.compared, found.family) == (5, "5 seeds each", 1)
    shuffled = scores.sample(frac=1, random_state=0)  # questions are paired by name and seeds by number
    assert evidence.paired_comparisons(shuffled, "f1", [("se", "grpo")])["se", "grpo"] == found
    back = evidence.paired_comparisons(scores, "f1", [("grpo", "se")])["grpo", "se"]
    assert found.interval.low > 0 > back.interval.high


def test_seeds_that_only_one_has_are_left_out_and_said() -> None:
    ten = [0.5 + 0.01 * (seed % 3) for seed in range(10)]
    scores = sampled({"grpo": ten, "se": plus([0.05, 0.04, 0.06], ten[4:7])})
    scores.loc[scores["label"] == "se", "seed"] += 4  # 4 to 6, of 0 to 9: found by number and not by place
    found = evidence.paired_comparisons(scores, "f1", [("se", "grpo"), ("grpo", "se")])
    assert found["grpo", "se"].compared == "10 and 3 seeds: compared on 3"
    assert found["se", "grpo"].compared == "3 and 10 seeds: compared on 3"
    assert found["se", "grpo"].seeds == 3
    assert found["se", "grpo"].interval.estimate == pytest.approx(5, abs=0.3)
    alone = evidence.paired_comparisons(scores[scores["seed"].between(4, 6)], "f1", [("se", "grpo")])["se", "grpo"]
    assert found["se", "grpo"].interval == alone.interval
    shown = evidence.differences(scores, "f1").set_index("label")
    assert shown.loc["grpo", "mean"] == pytest.approx(100 * np.mean(ten))  # of all that it has
    assert shown.loc["se", "compared"] == "3 and 10 seeds: compared on 3"


@pytest.mark.parametrize(
    ("own", "first", "said"),
    [
        ([0.5], 0, "1 and 5 seeds: cannot be compared"),
        ([], 0, "0 and 5 seeds: cannot be compared"),
        (plus(GAINS), 10, "5 and 5 seeds: cannot be compared"),
    ],
)
def test_with_less_than_two_seeds_in_common_nothing_is_compared(own: list[float], first: int, said: str) -> None:
    scores = sampled({"grpo": BASE, "kle": plus(GAINS), "se": own})
    scores.loc[scores["label"] == "se", "seed"] += first
    found = evidence.paired_comparisons(scores, "f1", [("se", "grpo"), ("kle", "grpo")])
    assert list(found) == [("se", "grpo"), ("kle", "grpo")] and found["kle", "grpo"].family == 1
    missing = found["se", "grpo"]
    assert missing.compared == said and not missing.tested
    assert all(map(math.isnan, (*missing.interval, *missing.corrected, missing.p, missing.mde)))


def test_other_questions_are_an_error() -> None:
    scores = sampled({"grpo": BASE, "se": BASE})
    scores.loc[(scores["label"] == "se") & (scores["query"] == "q3"), "query"] = "another"
    with pytest.raises(ValueError, match=r"se and grpo were tested on different questions \(2 that only one has\)"):
        evidence.paired_comparisons(scores, "f1", [("se", "grpo")])


def test_a_family_is_corrected_by_holm_in_p_interval_and_what_is_detectable() -> None:
    rng = np.random.default_rng(4)
    means = {"grpo": BASE} | {f"m{k}": plus(list(rng.normal(0, 0.006, 5))) for k in range(9)} | {"se": plus(GAINS)}
    scores, pairs = sampled(means), [(name, "grpo") for name in means if name != "grpo"]
    found = evidence.paired_comparisons(scores, "f1", pairs)
    alone = {pair: evidence.paired_comparisons(scores, "f1", [pair])[pair] for pair in pairs}
    assert [c.p for c in found.values()] == s.holm([c.p for c in alone.values()])
    for pair, made in found.items():  # nine of ten are open: each is judged at 5 % over nine
        assert made.family == 10 and made.interval == alone[pair].interval
        assert made.level == pytest.approx(1 - 0.05 / (10 if pair[0] == "se" else 9))
        a, b = matrix(scores, pair[0]), matrix(scores, "grpo")
        assert made.corrected == s.training_draws(a, b).interval(made.level)
        assert made.mde == pytest.approx(s.minimal_detectable(a, b, level=made.level)) and made.mde > alone[pair].mde


# --- the table of differences ---------------------------------------------------------------------------------------


def test_the_table_has_every_label_with_its_difference_from_the_base() -> None:
    scores = sampled({"grpo": BASE, "se": plus(GAINS), "once": [0.7]})
    found = evidence.differences(scores, "f1", margin=5.0).set_index("label")
    assert found["seeds"].tolist() == [5, 5, 1]
    assert found["mean"].tolist() == pytest.approx([50.1, 100 * np.mean(plus(GAINS)), 70])
    assert found.loc["grpo", "std"] == pytest.approx(100 * np.std(BASE, ddof=1))
    assert found.loc["once", ["std", "difference", "low", "high", "p", "mde", "equivalent"]].isna().all()
    assert found.loc["grpo", ["difference", "p", "mde", "equivalent"]].isna().all()
    row = found.loc["se"]
    single = evidence.paired_comparisons(scores, "f1", [("se", "grpo")])["se", "grpo"]
    assert row[["difference", "low", "high", "p", "mde"]].tolist() == [*single.interval, single.p, single.mde]
    assert row["against"] == "grpo" and row["equivalent"] is True
    assert evidence.differences(scores, "f1", margin=4.0).set_index("label").loc["se", "equivalent"] is False
    own = evidence.differences(scores, "f1", {"se": "once", "once": "grpo", "grpo": "none"}).set_index("label")
    assert own["against"].to_dict() == {"grpo": "none", "se": "once", "once": "grpo"}  # each has a base of its own
    assert own["compared"]["grpo"] == "5 and 0 seeds: cannot be compared" and math.isnan(own["difference"]["grpo"])
    assert own["gaps"]["se"] == [-15.9] and own["gaps"]["grpo"] == [] and own["mean"]["grpo"] == found["mean"]["grpo"]
    assert row["gaps"] == pytest.approx([100 * gain for gain in GAINS], abs=0.01) and row["each"][0] == 54.1


# --- spread ---------------------------------------------------------------------------------------------------------


def test_less_spread_is_above_zero_and_its_interval_is_that_of_the_ratio() -> None:
    rng = np.random.default_rng(0)
    wide, narrow = 0.5 + rng.normal(0, 0.05, 8), 0.5 + rng.normal(0, 0.001, 8)
    scores = sampled({"grpo": list(wide), "se": list(narrow)})
    found = evidence.spreads(scores, "f1", [("se", "grpo"), ("grpo", "se"), ("kle", "grpo")])
    there, back, missing = found.values()
    assert there.interval.estimate == pytest.approx(math.log(np.std(wide) / np.std(narrow)))
    assert decide([there]).label == "holds" and decide([back]).label == "fails"
    assert not missing.tested and missing.compared == "0 and 8 seeds: cannot be compared (3 are needed)"
    assert there.family == 2 and there.corrected.low < there.interval.low
    assert "ln of the standard deviation of GRPO over that of SE: " in decide([there]).because


def test_runs_that_do_not_vary_have_no_ratio_of_spreads_and_runs_that_are_the_same_have_one() -> None:
    both = {"grpo": [0.4, 0.5, 0.63], "care": [0.4, 0.5, 0.63], "se": [0.41, 0.5, 0.6], "kle": [0.5, 0.5, 0.5]}
    scores = sampled(both)
    scores.loc[scores["label"] == "kle", "f1"] = 1.0
    same, _, flat = evidence.spreads(scores, "f1", [(name, "grpo") for name in ("care", "se", "kle")]).values()
    assert same.tested and same.corrected == pytest.approx((0, 0, 0), abs=1e-6)
    assert decide([same], [0.5]).label == "ruled out" and decide([same]).label == "inconclusive"
    assert not flat.tested and flat.compared == "3 seeds each (one does not vary)" and (same.family, same.p) == (2, 1)


# --- a figure of each run ---------------------------------------------------------------------------------------------


def figures_of(**values: list[float]) -> pd.DataFrame:
    rows = [(label, seed, value) for label, each in values.items() for seed, value in enumerate(each)]
    return pd.DataFrame(rows, columns=["label", "seed", "value"])


def test_figures_of_runs_are_paired_by_seed() -> None:
    # Gaps 1, 2, 3: mean 2, standard error 1 / sqrt 3, and t(2) at 97.5 % is 4.302653.
    table = figures_of(grpo=[10, 20, 30], se=[11, 22, 33], kle=[5], care=[12, 22, 32])
    pairs = [("se", "grpo"), ("kle", "grpo"), ("care", "grpo"), ("empo", "grpo")]
    one, missing, constant, absent = evidence.by_seed(table, pairs, "entropy, nats").values()
    assert one.interval == pytest.approx((2, 2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)))
    assert one.p == pytest.approx(0.07418, abs=1e-5) and one.family == 1  # two-sided p of t = 2 sqrt 3
    assert one.what == "entropy, nats, SE minus GRPO" and one.compared == "3 seeds each"
    assert not missing.tested and missing.compared == "1 and 3 seeds: cannot be compared"
    assert not constant.tested and not absent.tested
    corrected = evidence.by_seed(figures_of(grpo=[0, 0, 0], se=[1, 2, 3], kle=[1, 3, 5]), pairs[:2], "x")
    assert {made.family for made in corrected.values()} == {2}
    assert corrected["se", "grpo"].corrected.low < corrected["se", "grpo"].interval.low


# --- words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "effect", "expected"),
    [
        (0.1, 2, 6.8, "holds"),
        (-2, -0.1, 6.8, "fails"),
        (-1, 1, 6.8, "ruled out"),
        (-1, 7, 6.8, "inconclusive"),  # zero and the paper's effect
        (0, 1, 6.8, "ruled out"),
        (-1, 1, nan, "inconclusive"),  # the paper prints no effect
        (-9, -8, 6.8, "fails"),
        (-1, 1, -6, "inconclusive"),  # the paper's own table is on the other side
        (-9, 1, -6, "inconclusive"),
        (7, 9, 6.8, "holds"),
    ],
)
def test_every_word(low: float, high: float, effect: float, expected: str) -> None:
    assert decide([between(low, high)], [effect]).label == expected


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ((0.064, 0.012, 0.119), ["+0.06", "+0.01", "+0.12"]),
        ((0.064, 0.002, 0.119), ["+0.064", "+0.002", "+0.119"]),
        ((-0.003, -0.04, 0.03), ["+0.00", "-0.04", "+0.03"]),
    ],
)
def test_numbers_have_a_sign_and_zero_has_no_minus(numbers: tuple[float, float, float], shown: list[str]) -> None:
    assert evidence.signed(*numbers) == shown


def test_the_corrected_interval_decides() -> None:
    wide = Comparison("a", "b", 3, "", Interval(1, 0.5, 1.5), Interval(1, -0.5, 2.5), 0.2, 1.0, 9)
    assert decide([wide]).label == "inconclusive"
    assert (decide([wide], [2.0]).label, decide([wide], [3.0]).label) == ("inconclusive", "ruled out")
    assert (decide([wide]).low, decide([wide]).high) == (-0.5, 2.5)


@pytest.mark.parametrize("kind", ["scores", "figures", "spreads"])
def test_an_interval_of_any_kind_misses_zero_where_p_says_so(kind: str) -> None:
    """In a family of three: at Holm's level for p after Holm, and at 95 % for p alone."""
    rng = np.random.default_rng(0)
    base = 0.5 + rng.normal(0, 0.01, 8)
    shifts = {"grpo": base, "told": base + rng.normal(0.05, 0.002, 8), "open": base + rng.normal(0, 0.01, 8)}
    shifts["wide"] = 0.5 + rng.normal(0, 0.4, 8)
    means = {label: list(values) for label, values in shifts.items()}
    pairs = [(label, "grpo") for label in ("told", "open", "wide")]
    found = {
        "scores": lambda: evidence.paired_comparisons(sampled(means), "f1", pairs),
        "figures": lambda: evidence.by_seed(figures_of(**means), pairs, "score"),
        "spreads": lambda: evidence.spreads(sampled(means), "f1", pairs),
    }[kind]()
    assert {made.p < 0.05 for made in found.values()} == {True, False}
    for made in found.values():
        for estimate, low, high in (made.interval, made.corrected):
            assert low <= estimate <= high
        assert (made.corrected.low > 0 or made.corrected.high < 0) == (made.p < 0.05)
        assert math.isnan(made.mde) == (kind != "scores")


def test_a_verdict_has_the_fields_of_what_decided_it() -> None:
    table = figures_of(a=[3, 4, 2, 5, 3], b=[0, 0, 0, 1, 0], c=[2, 5, 3, 4, 3.5])
    family = evidence.by_seed(table, [("a", "b"), ("a", "c")], "nats")
    found, made = decide([*family.values()], [2.0, -1.0]), family["a", "c"]
    assert (found.label, found.subject, found.against, found.unit, found.n) == ("inconclusive", "a", "c", "nats", 5)
    assert (found.estimate, found.low, found.high) == made.corrected and found.effect == -1.0
    assert found.level == pytest.approx(0.95)  # the smaller p is judged at 5 % over 2, and then this one at 5 %
    assert [part.rpartition(": ")[0] for part in found.parts] == [
        "holds: nats, a minus b",
        "inconclusive: nats, a minus c",
    ]
    assert found.note == "The paper's own table contradicts it (a minus c: -1.00)."
    assert decide([made, UNMADE]).parts[1] == "not tested: c minus b: 1 and 10 seeds: cannot be compared."
    assert math.isnan(decide([made]).effect)


UNMADE = Comparison("c", "b", 1, "1 and 10 seeds: cannot be compared")


@pytest.mark.parametrize(
    ("comparisons", "effects", "expected", "decisive"),
    [
        ([between(1, 2), between(0.5, 3)], [], "holds", 0.5),  # the weakest
        ([between(1, 2), between(-1, 3)], [2.0, 2.0], "inconclusive", -1),
        ([between(1, 2), between(-3, -1), UNMADE], [], "fails", -3),  # whatever is missing
        ([between(1, 2), UNMADE], [], "not tested", nan),
        ([between(-1, 9), between(-2, 1)], [5.0, 5.0], "ruled out", -2),  # of one, hence of both
        ([between(-1, 1), between(-2, 9)], [nan, 5.0], "inconclusive", -2),
    ],
)
def test_a_claim_that_joins_comparisons_needs_all(
    comparisons: list[Comparison], effects: list[float], expected: str, decisive: float
) -> None:
    found = decide(comparisons, effects)
    assert found.label == expected
    assert found.low == pytest.approx(decisive, nan_ok=True)


def family_of(label: str, own: tuple[float, float], corrected: tuple[float, float]) -> Comparison:
    """A comparison of a family of six, whose own interval Holm widens."""
    one, wide = (Interval(sum(ends) / 2, *ends) for ends in (own, corrected))
    return Comparison(label, "b", 10, "10 seeds each", one, wide, 0.06, 1.5, 6)


WEAK, STRONG = family_of("weak", (0.1, 3), (-0.5, 3.6)), family_of("strong", (1, 2), (0.5, 2.5))


def test_a_joined_claim_holds_by_each_part_s_own_interval_and_fails_by_a_corrected_one() -> None:
    assert (decide([WEAK, STRONG]).label, decide([WEAK]).label) == ("holds", "inconclusive")  # alone: its family's
    assert (decide([WEAK, STRONG]).low, decide([WEAK, STRONG]).level) == (0.1, 0.95)
    below = family_of("below", (-3, -0.1), (-3.6, 0.5))
    assert decide([STRONG, below], margin=9.0).label == "ruled out"  # below zero alone, and not after correction
    assert decide([STRONG, family_of("below", (-3, -1), (-3.6, -0.4))]).label == "fails"
    # A part that holds rules nothing out, also where its corrected interval holds zero and lies below the effect.
    assert decide([WEAK, between(-1, 9)], [5.0, 5.0]).label == "inconclusive"


def test_every_part_of_a_joined_claim_is_shown_with_the_interval_that_decides_it() -> None:
    parts = [WEAK, STRONG, family_of("c", (-1, 0.5), (-2, 1.5)), replace(UNMADE, absent="its weight cannot act")]
    found = decide(parts, [nan, 1.4, 6.2, nan], command="python -m gcpo grid g", margin=2.0)
    assert found.label == "ruled out" and (found.low, found.high, found.effect) == (-2, 1.5, 6.2)
    assert found.because == (
        "2 of 4 comparisons hold, 1 is ruled out, 1 is not tested. The least favourable is c minus b: "
        "-0.25 points (95 % CI -2.00 to +1.50, corrected for 6 comparisons, 10 seeds each). "
        "This rules out the paper's +6.20."
    )
    assert found.parts == (
        "holds: weak minus b: +1.55 points (95 % CI +0.10 to +3.00, 10 seeds each).",
        "holds: strong minus b: +1.50 points (95 % CI +1.00 to +2.00, 10 seeds each). The paper has +1.40.",
        "ruled out: c minus b: -0.25 points (95 % CI -2.00 to +1.50, corrected for 6 comparisons, 10 seeds each). "
        "This rules out the paper's +6.20.",
        "not tested: c minus b: its weight cannot act.",
    )
    both = decide([WEAK, STRONG]).because
    assert both.startswith("Both comparisons hold. The least favourable is weak minus b: +1.55 points")


def test_the_margin_is_the_size_where_the_paper_prints_no_gain() -> None:
    assert decide([between(-1, 1)], margin=2.0).label == "ruled out"
    assert decide([between(-1, 3)], margin=2.0).label == "inconclusive"
    assert decide([between(-1, 3)], [6.0], margin=2.0).label == "ruled out"  # the paper's own is what was claimed
    assert decide([between(-1, 1)], [-6.0], margin=2.0).label == "ruled out"  # its table has no gain to rule out
    assert (
        "Too few runs to tell 0 from 2.00, the margin declared beforehand."
        in decide([between(-1, 3)], margin=2.0).because
    )
    assert "A difference of 1.50 would have been detected." in decide([between(-1, 3)], margin=2.0).because


def test_what_does_not_occur_is_not_compared_and_counts_for_nothing() -> None:
    scores = sampled({"grpo": BASE, "se": plus(GAINS), "kle": plus(GAINS)})
    pairs = [("se", "grpo"), ("kle", "grpo")]
    found = evidence.paired_comparisons(scores, "f1", pairs, absent={("kle", "grpo"): "its weight cannot act"})
    assert found["se", "grpo"].family == 1 and not found["kle", "grpo"].tested
    verdict = decide([found["kle", "grpo"]], [3.0], command="python -m gcpo grid g")
    assert (verdict.label, verdict.because) == ("not tested", "KLE minus GRPO: its weight cannot act.")


def test_the_effects_belong_to_their_comparisons() -> None:
    one, other = between(-1, 2), between(-1, 5)
    assert decide([one, other], [3.0, 6.0]).label == "ruled out"
    assert decide([one, other], [1.0, 4.0]).label == "inconclusive"
    assert decide([one, other], [1.0, 6.0]).effect == 6.0
    assert evidence.effects_of({"se": 72.24, "grpo": 67.02}, [("se", "grpo"), ("grpo", "se"), ("se", "x")]) == (
        pytest.approx([5.22, -5.22, nan], nan_ok=True)
    )
    with pytest.raises(ValueError, match="1 effects for 2 comparisons"):
        decide([one, other], [1.0])
    with pytest.raises(ValueError, match="needs a comparison"):
        decide([])


def test_missing_runs_and_a_closed_gate_say_what_to_do() -> None:
    missing = decide([between(1, 2), UNMADE], command="python -m gcpo grid g")
    assert missing.because == (
        "1 of 2 comparisons is not tested, 1 holds. For example, c minus b: 1 and 10 seeds: "
        "cannot be compared. First: python -m gcpo grid g."
    )
    closed = decide([between(1, 2)], [3.0], closed="The gate failed on tinymath: ...")
    assert (closed.label, closed.because) == ("not tested", "The gate failed on tinymath: ...")
    assert math.isnan(closed.low) and closed.effect == 3.0


def test_a_verdict_carries_its_interval_the_papers_effect_and_what_is_detectable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    verdicts = claims.Verdicts("21_b", "reference of profile p")
    verdicts("one", "4.2", "a beats b", decide([between(-0.25, 0.75, family=4)], [6.8]), "More.")
    verdicts("two", "4.3", "a beats c", decide([between(1, 2)], [-6.06]))
    said = capsys.readouterr().out
    assert "a minus b: +0.25 points (95 % CI -0.25 to +0.75, 10 seeds each)" in said
    assert "10 seeds each). This rules out the paper's +6.80. More." in said
    assert "The paper's own table contradicts it (a minus b: -6.06)." in said
    table = verdicts.table()
    assert [table.index.name, *table] == [
        "source", "claim", "verdict", "difference", "low", "high", "paper_effect", "mde", "seeds", "records",
    ]  # fmt: skip
    row = table.loc["4.2"]
    assert row[["verdict", "seeds", "records"]].tolist() == ["ruled out", 10, "reference of profile p"]
    assert row[["difference", "low", "high", "paper_effect", "mde"]].tolist() == [0.25, -0.25, 0.75, 6.8, 1.5]


UNKNOWN, NO, YES = (decide([between(*ends)], [5.0]) for ends in ((-1, 9), (-1, 1), (1, 2)))


@pytest.mark.parametrize(
    ("verdicts", "depends"),
    [
        ([UNKNOWN, UNKNOWN, UNKNOWN], "inconclusive"),
        ([NO, UNKNOWN, NO], "inconclusive"),
        ([NO, NO, NO], "no"),
        ([NO, YES, UNKNOWN], "yes"),  # two decide, and differently
        ([NO, decide([UNMADE]), YES], "not tested"),
    ],
)
def test_whether_a_word_depends_on_a_setting_is_not_known_where_a_setting_is_open(
    verdicts: list[claims.Verdict], depends: str
) -> None:
    lines = [("tinyqa", rate, verdict) for rate, verdict in zip((0.5, 1, 2), verdicts, strict=True)]
    table = claims.by_setting(lines, ["task", "rate"])
    shown = {"inconclusive": "inconclusive: +4.0 (-1.0 to +9.0)", "ruled out": "ruled out: +0.0 (-1.0 to +1.0)"}
    assert table["depends"].tolist() == [depends] and table[0.5].tolist() == [shown[verdicts[0].label]]


# --- from records ---------------------------------------------------------------------------------------------------


def verdict_of(profile: str) -> claims.Verdict:
    runs = records.find(profile, "g")
    scores = records.gather(runs, "eval", ["label", "seed"]).query("decoding == 'sampled'")
    return decide([evidence.paired_comparisons(scores, "f1", [("se", "grpo")])["se", "grpo"]], [6.8])


@pytest.mark.usefixtures("places")
def test_a_verdict_changes_when_a_record_is_changed() -> None:
    write_grid("g", [{"kind": "train", "method": ["grpo", "se"], "seed": [0, 1, 2]}])
    for seed in range(3):
        finished(method="grpo", seed=seed, tables=evaluated(0.50 + 0.001 * seed))
        finished(method="se", seed=seed, tables=evaluated(0.54 + 0.002 * seed))
    assert verdict_of("p").label == "holds"
    finished(method="se", seed=0, tables=evaluated(0.50))  # one of its runs is another
    assert verdict_of("p").label == "inconclusive"
    path = planned(method="se", seed=1).folder / "eval.csv"
    path.write_text(path.read_text().replace("0.5", "0.4"))  # edited: no longer a record
    assert verdict_of("p").label == "inconclusive" and verdict_of("p").n == 2
    for seed in range(3):
        finished(method="se", seed=seed, tables=evaluated(0.46 - 0.002 * seed))
    assert verdict_of("p").label == "fails"


# --- margins --------------------------------------------------------------------------------------------------------


def test_the_declared_margins_are_good_and_cover_what_is_rewarded() -> None:
    found = margins.margins()
    assert found["tinyqa"]["f1"] > 0 and found["tinymath"]["accuracy"] > 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tinyqa": {"f1": 0}}, r"m\.yaml: tinyqa\.f1: Input should be greater than 0, got 0\."),
        ({"tinyqa": {"f1": True}}, r"tinyqa\.f1: Input should be a valid number, got True\."),
        ({"tinyqa": {"f1": math.inf}}, r"tinyqa\.f1: Input should be a finite number, got inf\."),
        ({"tinyqua": {"f1": 1}}, r"m\.yaml: Unknown task 'tinyqua'\. Did you mean 'tinyqa'\?"),
        ({"tinyqa": {"f2": 1}}, r"m\.yaml: tinyqa\.f2: no such metric\. Valid names: "),
        ({"tinyqa": 2}, r"m\.yaml: tinyqa: Input should be a valid dictionary, got 2\."),
        ([1], r"m\.yaml: margins: Input should be a valid dictionary, got \[1\]\."),
    ],
)
def test_a_bad_margin_is_an_error_in_one_line_with_file_and_key(tmp_path: Path, values: object, message: str) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(yaml_text(values))
    with pytest.raises(ParameterError, match=message) as raised:
        margins.margins(path)
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("places")
def test_a_missing_file_of_margins_is_named() -> None:
    with pytest.raises(ParameterError, match=r"margins\.yaml cannot be read: No such file"):
        margins.margins()
    assert not (paths.PARAMS / "statistics").exists()
