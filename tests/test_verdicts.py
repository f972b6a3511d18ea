"""Comparisons and verdicts: seeds that both have, Holm within the family, five words, and what is written of them."""

import math
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from record_builders import scored

from gcpo import statistics as s
from gcpo.reports import verdicts
from gcpo.reports.verdicts import Verdicts, compare, decide, differences

BASE = [0.50, 0.51, 0.49, 0.50, 0.505]
GAINS = [0.041, 0.039, 0.043, 0.038, 0.042]  # by seed: clearly not 0


def plus(gains: list[float], of: list[float] = BASE) -> list[float]:
    return [a + b for a, b in zip(of, gains, strict=True)]


def sampled(means: dict[str, list[float]]) -> pd.DataFrame:
    return scored(means).query("decoding == 'sampled'")


def matrix(scores: pd.DataFrame, label: str) -> np.ndarray:
    part = scores[scores["label"] == label]
    return 100 * part.pivot(index="seed", columns="query", values="f1").to_numpy()


def row(own: tuple[float, float], corrected: tuple[float, float] | None = None, label: str = "a") -> pd.DataFrame:
    """A comparison with b as a table of one row, with its own and its corrected interval; nan has no estimate."""
    why, level = ("1 and 10 seeds" if math.isnan(own[0]) else ""), (0.99 if corrected else 0.95)
    values = [sum(own) / 2, *own, *(corrected or own), level, 0.5, 1.5, why, 10, "points"]
    index = pd.MultiIndex.from_tuples([(label, "b")], names=["label", "against"])
    return pd.DataFrame([values], index, columns=verdicts.FAMILY)


def word(*rows: pd.DataFrame, **how: Any) -> str:
    return str(decide(pd.concat(rows), **how)["verdict"])


# --- comparisons ----------------------------------------------------------------------------------------------------


def test_a_comparison_is_the_training_difference_of_label_less_base() -> None:
    scores = sampled({"grpo": BASE, "se": plus(GAINS)})
    table = compare(scores, "f1", [("se", "grpo"), ("se", "grpo")])
    found, a, b = table.loc[("se", "grpo")], matrix(scores, "se"), matrix(scores, "grpo")
    assert len(table) == 1 and tuple(found[["estimate", "low", "high"]]) == s.training_difference(a, b)
    assert found["estimate"] == pytest.approx(100 * np.mean(GAINS))
    assert (found["low_family"], found["high_family"], found["level"]) == (found["low"], found["high"], 0.95)
    assert (found["p"], found["mde"], found["n"]) == (s.training_draws(a, b).p, s.minimal_detectable(a, b), 5)
    shuffled = scores.sample(frac=1, random_state=0)  # questions are paired by name and seeds by number
    pd.testing.assert_frame_equal(compare(shuffled, "f1", [("se", "grpo")]), table)


def test_seeds_that_only_one_has_are_left_out() -> None:
    ten = [0.5 + 0.01 * (seed % 3) for seed in range(10)]
    scores = sampled({"grpo": ten, "se": plus([0.05, 0.04, 0.06], ten[4:7])})
    scores.loc[scores["label"] == "se", "seed"] += 4  # 4 to 6, of 0 to 9: found by number and not by place
    both = [compare(part, "f1", [("se", "grpo")]).iloc[0] for part in (scores, scores[scores["seed"].between(4, 6)])]
    assert both[0]["n"] == 3 and tuple(both[0]) == tuple(both[1])
    shown = differences(scores, "f1").set_index("label")
    assert shown.loc["grpo", "mean"] == pytest.approx(100 * np.mean(ten))  # of all that it has


@pytest.mark.parametrize(
    ("own", "first", "absent", "said"),
    [([0.5], 0, {}, "1 and 5"), ([], 0, {}, "0 and 5"), (BASE, 10, {}, "5 and 5"), (BASE, 0, "cannot act", "cannot")],
)
def test_without_two_common_seeds_or_a_case_nothing_is_compared(own: Any, first: int, absent: Any, said: str) -> None:
    scores = sampled({"grpo": BASE, "kle": plus(GAINS), "se": own})
    scores.loc[scores["label"] == "se", "seed"] += first
    table = compare(scores, "f1", [("se", "grpo"), ("kle", "grpo")], absent and {("se", "grpo"): absent})
    missing, kept = table.to_dict("records")
    assert said in missing["why"] and kept["why"] == "" and kept["level"] == 0.95  # alone in its family
    assert all(math.isnan(missing[name]) for name in ("estimate", "low", "high_family", "p", "mde"))
    verdict = decide(table.iloc[:1], [3.0])
    assert (verdict["verdict"], verdict["because"]) == ("not tested", missing["why"])


def test_other_questions_are_an_error() -> None:
    scores = sampled({"grpo": BASE, "se": BASE})
    scores.loc[(scores["label"] == "se") & (scores["query"] == "q3"), "query"] = "another"
    with pytest.raises(ValueError, match=r"different questions: .*eval_split.*eval_limit"):
        compare(scores, "f1", [("se", "grpo")])


def test_a_family_is_corrected_by_holm_in_p_interval_and_what_is_detectable() -> None:
    rng = np.random.default_rng(4)
    means = {"grpo": BASE} | {f"m{k}": plus(list(rng.normal(0, 0.006, 5))) for k in range(9)} | {"se": plus(GAINS)}
    scores, pairs = sampled(means), [(name, "grpo") for name in means if name != "grpo"]
    found, alone = compare(scores, "f1", pairs), pd.concat(compare(scores, "f1", [pair]) for pair in pairs)
    assert found["p"].tolist() == s.holm(alone["p"].tolist())
    assert found[["estimate", "low", "high"]].equals(alone[["estimate", "low", "high"]])
    for pair, made in zip(pairs, found.to_dict("records"), strict=True):  # nine of ten are open: 5 % over nine
        a, b = matrix(scores, pair[0]), matrix(scores, "grpo")
        assert made["level"] == pytest.approx(1 - 0.05 / (10 if pair[0] == "se" else 9))
        assert (made["low_family"], made["high_family"]) == s.training_draws(a, b).interval(made["level"])[1:]
        assert made["mde"] == pytest.approx(s.minimal_detectable(a, b, level=made["level"]))


def test_the_table_of_differences_has_every_label_with_its_own_base() -> None:
    scores = sampled({"grpo": BASE, "se": plus(GAINS), "once": [0.7]})
    found = differences(scores, "f1", margin=5.0).set_index("label")
    assert found["seeds"].tolist() == [5, 5, 1] and found["mean"].tolist() == pytest.approx([50.1, 54.16, 70])
    assert found.loc["grpo", "std"] == pytest.approx(100 * np.std(BASE, ddof=1))
    missing = ["difference", "low", "high", "p", "mde", "equivalent"]
    assert found.loc["once", ["std", *missing]].isna().all() and found.loc["grpo", missing].isna().all()
    single = compare(scores, "f1", [("se", "grpo")]).iloc[0]
    assert found.loc["se", missing[:5]].tolist() == single[["estimate", "low", "high", "p", "mde"]].tolist()
    tight = differences(scores, "f1", margin=4.0).set_index("label")
    assert found.loc["se", "equivalent"] is True and tight.loc["se", "equivalent"] is False
    own = differences(scores, "f1", {"se": "once", "once": "grpo", "grpo": "none"}).set_index("label")
    assert own["against"].to_dict() == {"grpo": "none", "se": "once", "once": "grpo"}
    assert (own["gaps"]["se"], own["gaps"]["grpo"], own["compared"].tolist()) == ([-15.9], [], [0, 1, 1])


def test_an_interval_misses_zero_where_p_says_so() -> None:
    """In a family of three: at Holm's level for p after Holm, and at 95 % for p alone."""
    rng = np.random.default_rng(0)
    means = {"grpo": list(0.5 + rng.normal(0, 0.01, 8)), "wide": list(0.5 + rng.normal(0, 0.4, 8))}
    means |= {"told": plus(list(rng.normal(0.05, 0.002, 8)), means["grpo"])}
    means |= {"open": plus(list(rng.normal(0, 0.01, 8)), means["grpo"])}
    found = compare(sampled(means), "f1", [(label, "grpo") for label in ("told", "open", "wide")])
    assert set(found["p"] < 0.05) == {True, False}
    assert (verdicts.clear(found) == (found["p"] < 0.05)).all()
    assert found["estimate"].between(found["low"], found["high"]).all() and found["mde"].notna().all()


def test_a_test_of_its_own_makes_the_evidence_or_says_why_there_is_none() -> None:
    def medians(own: pd.DataFrame, other: pd.DataFrame) -> verdicts.Evidence | str:
        gap = float(own.median().median() - other.median().median())
        return verdicts.Evidence(lambda level: s.Interval(gap, gap - level, gap + level), 0.5) if gap else "no gap"

    scores = sampled({"grpo": BASE, "se": plus(GAINS), "care": BASE})
    found = compare(scores, "f1", [("se", "grpo"), ("care", "grpo")], test=medians)
    assert found["estimate"].iloc[0] == pytest.approx(0.04, abs=0.003)
    assert found["why"].tolist() == ["", "no gap"]


# --- cases that do not occur ----------------------------------------------------------------------------------------


def logged(label: str, method: str, *steps: tuple[float, float, float]) -> pd.DataFrame:
    """Weights of a method as (least, mean, most) of each step."""
    columns = ["gcpo/weight_min", "gcpo/weight", "gcpo/weight_max"]
    return pd.DataFrame([*steps], columns=columns).assign(label=label, method=method)


def test_the_range_of_a_weight_is_the_median_over_steps_of_its_range_over_its_mean() -> None:
    damped = logged("se x=1", "se", (0.4, 0.8, 1.0), (0.9, 1.0, 1.0), (0.7, 0.8, 0.9))  # 0.75, 0.1 and 0.25
    in_loss = logged("r2vpo", "r2vpo", (1, 1, 1)).assign(**{"gcpo/loss_weight_min": 0.9, "gcpo/loss_weight_max": 1.0})
    metrics = pd.concat([damped, in_loss, logged("care", "care", (1, 1, 1)), logged("grpo", "grpo", (1, 1, 1))])
    assert verdicts.weight_ranges(metrics) == pytest.approx({"se x=1": 0.25, "r2vpo": 0.1})


def test_methods_whose_weights_cannot_act_are_not_told_apart() -> None:
    still, moving = (0.996, 1.0, 1.0), (0.98, 1.0, 1.0)  # ranges of 0.4 % and 2 %
    weights = {"bot_only": still, "cd_only": moving, "gcpo_bot": moving, "rd_only": moving}
    base = logged("grpo", "grpo", (1, 1, 1)), logged("empo", "empo", (1, 1, 1))
    metrics = pd.concat([*base, *(logged(name, name, steps) for name, steps in weights.items())])
    scores = scored({name: [0.5, 0.6, 0.7] for name in [*weights, "grpo", "empo"]})
    pairs = [("bot_only", "grpo"), ("cd_only", "grpo"), ("gcpo_bot", "rd_only"), ("bot_only", "empo")]
    apart = scores.assign(f1=scores["f1"] + 0.001 * pd.factorize(scores["label"])[0])  # no two are one
    by = {("gcpo_bot", "rd_only"): "bot_only"}
    found = verdicts.cannot_differ(pairs, metrics, apart, "f1", by)
    assert [*found] == [("bot_only", "grpo"), ("gcpo_bot", "rd_only")]  # EMPO acts on rewards, whatever the weights
    assert "0.40 %" in found["bot_only", "grpo"]


@pytest.mark.parametrize(("differing", "one"), [(2, True), (3, False)])
def test_methods_of_which_half_of_the_runs_answer_alike_are_one(differing: int, one: bool) -> None:
    base = [0.5, 0.51, 0.52, 0.53]
    other = [score + 0.1 * (seed < differing) for seed, score in enumerate(base)]
    scores = scored({"grpo": base, "care": other})
    metrics = pd.concat([logged("grpo", "grpo", (1, 1, 1)), logged("care", "care", (1, 1, 1))])
    found = verdicts.cannot_differ([("care", "grpo")], metrics, scores, "f1")
    assert [*found] == [("care", "grpo")] * one and all(why.startswith("2 of 4 seeds") for why in found.values())


# --- words ----------------------------------------------------------------------------------------------------------


NONE = (nan, nan)


@pytest.mark.parametrize(
    ("intervals", "effects", "margin", "expected", "decisive"),
    [
        ([(0.1, 2)], [6.8], nan, "holds", 0),
        ([(-2, -0.1)], [6.8], nan, "fails", 0),
        ([(-1, 1)], [6.8], nan, "inconclusive", 0),  # a sentence says which is above, and not by how much
        ([(-1, 1)], [6.8], 2, "inconclusive", 0),
        ([(-1, 1)], [], nan, "inconclusive", 0),  # the paper prints no effect
        ([(-1, 1)], [nan], 2, "ruled out", 0),  # the margin is the size where the paper prints no gain
        ([(-1, 1)], [-6], 2, "ruled out", 0),
        ([(-1, 3)], [nan], 2, "inconclusive", 0),
        # A claim that joins comparisons needs all.
        ([(1, 2), (0.5, 3)], [], nan, "holds", 1),  # the weakest
        ([(1, 2), (-1, 3)], [2, 2], nan, "inconclusive", 1),
        ([(1, 2), (-3, -1), NONE], [], nan, "fails", 1),  # whatever is missing
        ([(1, 2), NONE], [], nan, "not tested", None),
        ([(-1, 9), (-2, 1)], [nan, nan], 5, "ruled out", 1),  # of one, hence of both
        ([(-1, 9), (-2, 1)], [nan, 5], 5, "inconclusive", 1),  # the effects belong to their comparisons
        ([(-1, 1), (-2, 9)], [5, nan], 5, "inconclusive", 1),
    ],
)
def test_every_word(intervals: Any, effects: Any, margin: float, expected: str, decisive: int | None) -> None:
    found = decide(pd.concat(map(row, intervals)), effects, margin)
    assert found["verdict"] == expected and len(found["parts"]) == len(intervals)
    shown = (found.get("low", nan), found.get("high", nan))
    assert shown == pytest.approx(NONE if decisive is None else intervals[decisive], nan_ok=True)


def test_a_joined_claim_holds_by_each_part_s_own_interval_and_fails_by_a_corrected_one() -> None:
    weak, strong = row((0.1, 3), (-0.5, 3.6), "weak"), row((1, 2), (0.5, 2.5), "strong")
    assert (word(weak, strong), word(weak)) == ("holds", "inconclusive")  # alone: its family's
    found = decide(pd.concat([weak, strong]))
    assert (found["label"], found["low"], found["level"]) == ("weak", 0.1, 0.95)
    wide = row((0.5, 1.5), (-0.5, 2.5))
    assert (word(wide, margin=2.0), word(wide, margin=3.0)) == ("inconclusive", "ruled out")
    below = row((-3, -0.1), (-3.6, 0.5))
    assert word(strong, below, margin=9.0) == "ruled out"  # below zero alone, and not after correction
    assert decide(below, margin=9.0)["level"] == 0.99
    assert word(strong, row((-3, -1), (-3.6, -0.4))) == "fails"
    # A part that holds rules nothing out, also where its corrected interval holds zero and lies below the effect.
    assert word(weak, row((-1, 9)), margin=5.0) == "inconclusive"
    parts = decide(pd.concat([weak, strong, below, row(NONE)]), margin=9.0)["parts"]
    assert parts["verdict"].tolist() == ["holds", "holds", "ruled out", "not tested"]
    assert parts["low"].tolist()[:3] == [0.1, 1, -3.6]  # each with the interval that decided it


def test_without_a_case_or_a_control_there_is_no_verdict_and_a_reason() -> None:
    for effects, margin, how in (([3.0], nan, {"closed": "No."}), ([], 3.0, {"blind": "No."})):
        found = decide(row((-1, 1)), effects, margin, **how)
        assert (found["verdict"], found["because"]) == ("not tested", "No.") and "low" not in found
    told = [word(row(ends), blind="No control.") for ends in ((1, 2), (-2, -1), (-1, 1))]
    assert told == ["holds", "fails", "inconclusive"] and word(row((1, 2)), closed="No.") == "not tested"
    for rows, effects in ((row((1, 2)).iloc[:0], []), (pd.concat([row(NONE), row(NONE)]), [1.0])):
        with pytest.raises(ValueError, match=r"needs a comparison|[Ll]ength"):
            decide(rows, effects)


@pytest.mark.parametrize(("high", "blind", "excluded"), [(3.0, "", "yes"), (7.0, "", "no"), (3.0, "No control.", "")])
def test_a_printed_size_below_which_the_interval_lies_is_a_remark(high: float, blind: str, excluded: str) -> None:
    found = decide(row((-1, high)), [6.8], blind=blind)
    assert (found["verdict"], found["excluded"]) == ("inconclusive", excluded)
    assert decide(row((-1, high)), [nan])["excluded"] == ""


# --- two worlds -----------------------------------------------------------------------------------------------------


def test_two_worlds_are_two_draws_of_one_question() -> None:
    worlds = {"world A": {"grpo": BASE, "se": plus(GAINS)}, "world B": {"grpo": BASE, "se": plus([-x for x in GAINS])}}
    each = {name: sampled(means).assign(world=name) for name, means in worlds.items()}
    both = compare(pd.concat(each.values()), "f1", [("se", "grpo")]).iloc[0]
    alone = {name: compare(scores, "f1", [("se", "grpo")]).iloc[0] for name, scores in each.items()}
    a, b = alone.values()
    assert both["estimate"] == pytest.approx((a["estimate"] + b["estimate"]) / 2) == pytest.approx(0)
    assert both["n"] == a["n"] + b["n"] and both[verdicts.APART] == "0.0001"  # the smallest p of the draws
    # Two independent means: the spread of their mean is that of one over the root of two.
    half = (a["high"] - a["low"]) / 2
    assert (both["high"] - both["low"]) / 2 == pytest.approx(half / math.sqrt(2), rel=0.12)
    assert both["mde"] == pytest.approx(math.hypot(a["mde"], b["mde"]) / 2)
    assert both["world A"].startswith(f"{a['estimate']:.3g} [") and both["world B"].startswith(f"{b['estimate']:.3g} [")
    one = compare(each["world A"].drop(columns="world"), "f1", [("se", "grpo")]).iloc[0]
    assert one.equals(a) and "world A" not in one


def test_a_pair_that_one_world_lacks_is_not_pooled() -> None:
    a = sampled({"grpo": BASE, "se": plus(GAINS)}).assign(world="world A")
    b = sampled({"grpo": BASE, "se": [0.5]}).assign(world="world B")
    found = compare(pd.concat([a, b]), "f1", [("se", "grpo")])
    assert word(found) == "not tested" and found["why"].iloc[0].startswith("world B: ")


def test_the_papers_effects_are_those_of_pairs_of_which_it_prints_both() -> None:
    found = verdicts.paper_effects({"se": 72.24, "grpo": 67.02}, [("se", "grpo"), ("grpo", "se"), ("se", "x")])
    assert found == pytest.approx([5.22, -5.22, nan], nan_ok=True)


# --- records --------------------------------------------------------------------------------------------------------


def test_verdicts_are_shown_and_kept_with_what_decided_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = Verdicts("21_b", "reference of profile p")
    parts = pd.concat([row((0.1, 0.9), label="gcpo_bot"), row((-0.25, 0.75))])
    book("one", "4.2", "a beats b", decide(parts, [nan, 6.8], 9.0), "More.", "tinyqa")
    book.add("two", "4.3", "a beats c", True)
    said = capsys.readouterr().out
    assert "Inconclusive: a beats b (4.2, tinyqa). More." in said and "GCPO-BoT minus b" in said and "two" not in said
    shown = book.write(tmp_path).drop(columns="records").iloc[0].tolist()
    assert shown == ["a beats b", "inconclusive", 0.25, -0.25, 0.75, 6.8, 1.5, 10]
    written = pd.read_csv(tmp_path / "verdicts_21.csv", dtype=str, keep_default_na=False)
    assert [*written] == verdicts.RECORD and written["verdict"].tolist() == ["inconclusive", "holds"]
    assert written.loc[0, ["label", "against", "low", "effect", "n"]].tolist() == ["a", "b", "-0.25", "6.8", "10"]
    assert len(written["parts"][0].splitlines()) == 3 and written["low"][1] == ""
    with pytest.raises(ValueError, match=r"'on'.*one, two"):
        book.show("on")


def test_checks_without_runs_are_silent_and_shown_by_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = Verdicts("01_a")
    for task, decided in (("tinyqa", np.bool_(True)), ("tinymath", False), ("", None)):
        book.add("one", "Eq. 1", "a", decided, "By hand.", task)
    assert capsys.readouterr().out == ""
    book.show("one", "tinymath")
    assert "'Fails: a (Eq. 1, tinymath). By hand.'" in (shown := capsys.readouterr().out) and "tinyqa" not in shown
    assert [*book.write(tmp_path)] == ["claim", "verdict"] and (tmp_path / "01.csv").exists()
