"""Comparisons and verdicts: seeds that both have, Holm within the family, five words, and declared margins."""

from __future__ import annotations

import math
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
    assert decide([there]).label == "holds" and decide([back]).label == "does not hold"
    assert not missing.tested and missing.compared == "0 and 8 seeds: cannot be compared (3 are needed)"
    assert there.family == 2 and there.corrected.low < there.interval.low
    assert "ln of grpo's standard deviation over se's" in decide([there]).because


def test_runs_that_do_not_vary_have_no_ratio_of_spreads_and_runs_that_are_the_same_have_one() -> None:
    both = {"grpo": [0.4, 0.5, 0.63], "care": [0.4, 0.5, 0.63], "se": [0.41, 0.5, 0.6], "kle": [0.5, 0.5, 0.5]}
    scores = sampled(both)
    scores.loc[scores["label"] == "kle", "f1"] = 1.0
    same, _, flat = evidence.spreads(scores, "f1", [(name, "grpo") for name in ("care", "se", "kle")]).values()
    assert same.tested and same.corrected == pytest.approx((0, 0, 0), abs=1e-6)
    assert decide([same], [0.5]).label == "effect excluded" and decide([same]).label == "cannot tell"
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
    assert one.what == "entropy, nats, se minus grpo" and one.compared == "3 seeds each"
    assert not missing.tested and missing.compared == "1 and 3 seeds: cannot be compared"
    assert not constant.tested and not absent.tested
    corrected = evidence.by_seed(figures_of(grpo=[0, 0, 0], se=[1, 2, 3], kle=[1, 3, 5]), pairs[:2], "x")
    assert {made.family for made in corrected.values()} == {2}
    assert corrected["se", "grpo"].corrected.low < corrected["se", "grpo"].interval.low


# --- over tasks -----------------------------------------------------------------------------------------------------


def runs_of(**scores: dict[str, list[float]]) -> pd.DataFrame:
    rows = [
        {"task": task, "label": label, "seed": seed, "score": score}
        for task, labels in scores.items()
        for label, values in labels.items()
        for seed, score in enumerate(values)
    ]
    return pd.DataFrame(rows)


def test_scores_are_normalised_before_tasks_are_pooled() -> None:
    # Task b has ten times task a's scale: start 0, grpo 1 on both, so "new" is 2 on a and 1.5 on b.
    runs = runs_of(
        a={"no training": [1, 1], "grpo": [2, 2], "new": [3, 3]},
        b={"no training": [10, 10], "grpo": [20, 20], "new": [25, 25], "half": [1, 2]},
    )
    found = evidence.overall(runs).set_index("label")
    assert found["IQM"].to_dict() == pytest.approx({"no training": 0, "grpo": 1, "new": 1.75})
    assert found["improvement"].drop("grpo").to_dict() == {"no training": 0, "new": 1}
    assert math.isnan(found.loc["grpo", "improvement"])


def test_a_label_with_few_seeds_is_set_beside_the_base_on_these() -> None:
    # grpo is 2 on its first two seeds and 4 on the others: "twin" is grpo on the first two, and no worse for it.
    task = {"no training": [1, 1, 1, 1], "grpo": [2, 2, 4, 4], "twin": [2, 2], "once": [9]}
    found = evidence.overall(runs_of(a=task, b=task)).set_index("label")
    assert found.loc["twin", ["IQM", "improvement"]].to_list() == pytest.approx([1, 0.5])
    assert "once" not in found.index


def test_a_base_that_does_not_learn_cannot_be_the_unit() -> None:
    with pytest.raises(ValueError, match="grpo is not above no training on b"):
        evidence.overall(runs_of(a={"no training": [1], "grpo": [2]}, b={"no training": [2], "grpo": [1]}))
    assert evidence.overall(runs_of(a={"grpo": [1, 2]})).empty
    assert evidence.overall(runs_of(a={"grpo": [2, 2], "no training": [1, 1]}, b={"grpo": [1, 2]})).empty


# --- words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "effect", "expected"),
    [
        (0.1, 2, 6.8, "holds"),
        (-2, -0.1, 6.8, "does not hold"),
        (-1, 1, 6.8, "effect excluded"),
        (-1, 7, 6.8, "cannot tell"),  # zero and the paper's effect
        (0, 1, 6.8, "effect excluded"),
        (-1, 1, nan, "cannot tell"),  # the paper prints no effect
        (-9, -8, 6.8, "does not hold"),
        (-1, 1, -6, "cannot tell"),  # the paper's own table is on the other side
        (-9, 1, -6, "cannot tell"),
        (7, 9, 6.8, "holds"),
    ],
)
def test_every_word(low: float, high: float, effect: float, expected: str) -> None:
    assert evidence.classify(low, high, effect) == expected
    assert decide([between(low, high)], [effect]).label == expected


def test_the_corrected_interval_decides() -> None:
    wide = Comparison("a", "b", 3, "", Interval(1, 0.5, 1.5), Interval(1, -0.5, 2.5), 0.2, 1.0, 9)
    assert decide([wide]).label == "cannot tell"
    assert (decide([wide], [2.0]).label, decide([wide], [3.0]).label) == ("cannot tell", "effect excluded")
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
    assert (found.label, found.subject, found.against, found.unit, found.n) == ("cannot tell", "a", "c", "nats", 5)
    assert (found.estimate, found.low, found.high) == made.corrected and found.effect == -1.0
    assert found.level == pytest.approx(0.95)  # the smaller p is judged at 5 % over 2, and then this one at 5 %
    assert [part.rpartition(":")[0] for part in found.parts] == [
        "holds: nats, a minus b", "cannot tell: nats, a minus c",
    ]  # fmt: skip
    assert found.note == "The paper's own table contradicts it (a minus c: -1.00)."
    assert decide([made, UNMADE]).parts[1] == "not tested: c and b: 1 and 10 seeds: cannot be compared"
    assert math.isnan(decide([made]).effect)


UNMADE = Comparison("c", "b", 1, "1 and 10 seeds: cannot be compared")


@pytest.mark.parametrize(
    ("comparisons", "effects", "expected", "decisive"),
    [
        ([between(1, 2), between(0.5, 3)], [], "holds", 0.5),  # the weakest
        ([between(1, 2), between(-1, 3)], [2.0, 2.0], "cannot tell", -1),
        ([between(1, 2), between(-3, -1), UNMADE], [], "does not hold", -3),  # whatever is missing
        ([between(1, 2), UNMADE], [], "not tested", nan),
        ([between(-1, 9), between(-2, 1)], [5.0, 5.0], "effect excluded", -2),  # of one, hence of both
        ([between(-1, 1), between(-2, 9)], [nan, 5.0], "cannot tell", -2),
    ],
)
def test_a_claim_that_joins_comparisons_needs_all(
    comparisons: list[Comparison], effects: list[float], expected: str, decisive: float
) -> None:
    found = decide(comparisons, effects)
    assert found.label == expected
    assert found.low == pytest.approx(decisive, nan_ok=True)


def test_the_effects_belong_to_their_comparisons() -> None:
    one, other = between(-1, 2), between(-1, 5)
    assert decide([one, other], [3.0, 6.0]).label == "effect excluded"
    assert decide([one, other], [1.0, 4.0]).label == "cannot tell"
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
    assert missing.because == f"Runs are missing (c and b: {UNMADE.compared}). First: python -m gcpo grid g."
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
    assert "a minus b, points: +0.25 [-0.25, +0.75] (95 %, corrected for 4 comparisons; 10 seeds each)" in said
    assert "the paper's effect: +6.80; detectable: 1.50. More." in said
    assert "The paper's own table contradicts it (a minus b: -6.06)." in said
    table = verdicts.table()
    assert [table.index.name, *table] == [
        "source", "claim", "verdict", "difference", "low", "high", "paper_effect", "mde", "seeds", "records",
    ]  # fmt: skip
    row = table.loc["4.2"]
    assert row[["verdict", "seeds", "records"]].tolist() == ["effect excluded", 10, "reference of profile p"]
    assert row[["difference", "low", "high", "paper_effect", "mde"]].tolist() == [0.25, -0.25, 0.75, 6.8, 1.5]


OPEN, NO, YES = (decide([between(*ends)], [5.0]) for ends in ((-1, 9), (-1, 1), (1, 2)))


@pytest.mark.parametrize(
    ("verdicts", "depends"),
    [
        ([OPEN, OPEN, OPEN], "cannot tell"),
        ([NO, OPEN, NO], "cannot tell"),
        ([NO, NO, NO], "no"),
        ([NO, YES, OPEN], "yes"),  # two decide, and differently
        ([NO, decide([UNMADE]), YES], "not tested"),
    ],
)
def test_whether_a_word_depends_on_a_setting_is_not_known_where_a_setting_is_open(
    verdicts: list[claims.Verdict], depends: str
) -> None:
    lines = [("tinyqa", rate, verdict) for rate, verdict in zip((0.5, 1, 2), verdicts, strict=True)]
    table = claims.by_setting(lines, ["task", "rate"])
    shown = {"cannot tell": "cannot tell +4.0 [-1.0, +9.0]", "effect excluded": "effect excluded +0.0 [-1.0, +1.0]"}
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
    assert verdict_of("p").label == "cannot tell"
    path = planned(method="se", seed=1).folder / "eval.csv"
    path.write_text(path.read_text().replace("0.5", "0.4"))  # edited: no longer a record
    assert verdict_of("p").label == "cannot tell" and verdict_of("p").n == 2
    for seed in range(3):
        finished(method="se", seed=seed, tables=evaluated(0.46 - 0.002 * seed))
    assert verdict_of("p").label == "does not hold"


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
