"""The comparisons of PROTOCOL.md: its pairs, its controls, and how often its claims get which verdict."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

import numpy as np
import pandas as pd
import pytest
from record_builders import evaluated, finished, write_grid, write_profile

from gcpo import paths, reports
from gcpo.reports import evidence, headline, power, records
from gcpo.reports.claims import Verdict
from gcpo.reports.headline import GCPO, RIGHT
from gcpo.runs.grids import expand
from gcpo.statistics import Draws

PROTOCOL = paths.ROOT / "PROTOCOL.md"


def runs(means: Mapping[str, float], spread: float = 0.01, seeds: int = 8, questions: int = 40) -> pd.DataFrame:
    """Scores whose seeds scatter by ``spread`` around a method's mean; questions are the same for all."""
    rng = np.random.default_rng(0)
    hardness = 0.2 * rng.normal(size=questions)
    parts = []
    for label, mean in means.items():
        for seed in range(seeds):
            scores = mean + spread * rng.normal() + hardness + 0.01 * rng.normal(size=questions)
            parts.append(pd.DataFrame({"label": label, "seed": seed, "query": range(questions), "f1": scores}))
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize("profile", ["world_a", "world_b"])
def test_the_grid_has_the_runs_of_every_pair_and_control_with_equal_seeds(profile: str) -> None:
    plans = expand("headline", profile)
    seeds = {
        (task, plan.label): {
            other.params.seed for other in plans if (other.params.task, other.label) == (task, plan.label)
        }
        for plan in plans
        for task in [plan.params.task]
    }
    assert set(map(frozenset, seeds.values())) == {frozenset(range(100, 108))}
    for task in ("tinyqa", "tinymath"):
        labels = {label for of, label in seeds if of == task}
        pairs = [pair for listed in headline.claims_on(labels).values() for pair in listed]
        assert {label for pair in pairs for label in pair} | {*headline.CONTROLS, "no training"} <= labels


def test_care_is_compared_with_a_grpo_of_its_own_where_there_is_one() -> None:
    claims = headline.claims_on({"grpo", "care", *RIGHT})
    assert RIGHT in claims[headline.UNCERTAIN] and ("care", "grpo") not in claims[headline.UNCERTAIN]
    assert ("care", "grpo") in headline.claims_on({"grpo", "care"})[headline.UNCERTAIN]
    assert all(("gcpo_bot", name) in claims[headline.ALL] for name in headline.BASELINES)


def test_a_null_counts_only_where_a_control_is_told_from_grpo() -> None:
    null = runs({"grpo": 0.5, "gcpo_bot": 0.5})
    comparison = evidence.paired_comparisons(null, "f1", [("gcpo_bot", "grpo")]).values()
    seen = headline.controls("tinyqa", runs({"grpo": 0.5, "drop_half": 0.3, "se_shuffled": 0.5}), "f1")
    unseen = headline.controls("tinyqa", runs({"grpo": 0.5, "drop_half": 0.5}), "f1")
    assert seen.told == ["drop_half"] and not seen.blind
    assert list(seen.table["seen"]) == [True, False]
    assert not unseen.told and unseen.blind.startswith("None of 1 positive controls is clear of GRPO on tinyqa")
    nothing = headline.controls("tinyqa", null, "f1")
    assert nothing.blind == "No positive control was trained on tinyqa, so a null says nothing."
    for controls, word in ((seen, "ruled out"), (unseen, "not tested"), (nothing, "not tested")):
        verdict = evidence.decide([*comparison], [20.0], blind=controls.blind)
        assert verdict.label == word
        assert verdict.because.startswith(controls.blind)


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize(("dropped", "word"), [(0.4, "ruled out"), (0.5, "not tested"), (None, "not tested")])
def test_a_report_rules_nothing_out_where_its_runs_have_no_control_that_was_seen(
    dropped: float | None, word: str
) -> None:
    methods = ["grpo", "se", *(["drop_half"] if dropped else [])]
    write_grid("g", [{"kind": "train", "method": methods, "seed": [0, 1, 2]},
                     {"kind": "train", "method": ["grpo"], "max_steps": [0], "seed": [0, 1, 2]}])  # fmt: skip
    write_grid("headline", [{"kind": "train", "method": ["grpo"], "seed": [0, 1, 2]}])
    for seed in range(3):
        end = 0.001 * seed
        finished(method="grpo", seed=seed, max_steps=0, tables=evaluated(0.2 + end))
        for method, score in {"grpo": 0.5, "se": 0.5, "drop_half": dropped}.items():
            if score:
                finished(method=method, seed=seed, tables=evaluated(score + end * (1 + (method == "se"))))
    report, pair = reports.open("p", "g"), ("se", "grpo")
    scores = records.gather(report.runs(), "eval", ["label", "seed"]).query("decoding == 'sampled'")
    made = [evidence.paired_comparisons(scores, "f1", [pair])[pair]]
    verdict, controls = report.decide("tinyqa", made, [20.0], margin=2.0), report.controls["tinyqa"]
    assert verdict.label == word, verdict.because
    assert controls.blind in verdict.because and bool(controls.told) == (word == "ruled out")
    closed = report.decide("tinyqa", made, closed="No case.", margin=2.0)
    assert (closed.label, closed.because) == ("not tested", "No case.")


def test_what_is_seen_stands_without_controls() -> None:
    scores = runs({"grpo": 0.3, "gcpo_bot": 0.5})
    comparison = evidence.paired_comparisons(scores, "f1", [("gcpo_bot", "grpo")]).values()
    assert evidence.decide([*comparison], [20.0], blind="No control.").label == "holds"


def test_power_is_that_of_students_t_on_the_seeds() -> None:
    scores = runs(dict.fromkeys(["grpo", "gcpo_bot"], 0.5), spread=0.02, seeds=40)
    pilot = scores.groupby(["label", "seed"])["f1"].mean().unstack("label")
    error = (pilot["gcpo_bot"] - pilot["grpo"]).std(ddof=1) * np.sqrt(1 / 8)
    claims = {"a": [("gcpo_bot", "grpo")]}
    size = 100 * error * 3  # of three standard errors: t with 7 degrees of freedom finds it in 73 % of the experiments
    truth = {"grpo": 50.0, "gcpo_bot": 50.0 + size}
    drawn = power.verdicts_drawn(scores, "f1", claims, truth, effects=truth, n=200)["a"]
    assert drawn["holds"] / 200 == pytest.approx(0.73, abs=0.1)
    alike = power.verdicts_drawn(scores, "f1", claims, dict.fromkeys(truth, 50.0), effects=truth, n=200)["a"]
    assert alike["holds"] / 200 < 0.08 and alike["ruled out"] / 200 == pytest.approx(0.73, abs=0.1)
    shown = power.table({power.PAPER: {"a": drawn}, power.NOTHING: {"a": alike}}).iloc[0]
    assert list(shown) == ["a", drawn["holds"] / 2, alike["holds"] / 2, alike["ruled out"] / 2]


def test_what_the_paper_does_not_print_is_a_margin_below_gcpo() -> None:
    paper = {"grpo": 67.0, "care": 71.0, **dict(zip(GCPO, (73.0, 74.0), strict=True))}
    truths = power.truths(paper, ["grpo", "rd_only", "care reward=binary", *GCPO], margin=2)
    assert truths[power.PAPER] == {"grpo": 67, "rd_only": 71, "care reward=binary": 71, "gcpo_cd": 73, "gcpo_bot": 74}
    assert len(set(truths[power.NOTHING].values())) == 1
    scores = runs({"grpo": 0.5, "gcpo_bot": 0.5}, seeds=1)
    with pytest.raises(ValueError, match="share 1 seeds"):
        power.verdicts_drawn(scores, "f1", {"a": [("gcpo_bot", "grpo")]}, paper, effects={})


def test_the_power_beside_a_verdict_is_what_the_protocol_printed() -> None:
    printed = re.findall(r"^\| (.*?) \| (tiny\w+) \| (\d+) \| (\d+) \| (\d+) \|$", PROTOCOL.read_text(), flags=re.M)
    known = power.promised().drop(columns="supposed")
    assert [(*row[:2], *map(int, row[2:])) for row in printed] == [*known.itertuples(index=False, name=None)]
    told = power.beside(Verdict("inconclusive", "Too few."), headline.ALL, "tinyqa")
    said = "Too few. If the paper's numbers were true here, 21 of 100 such experiments would say *holds*."
    assert (told.label, told.because) == ("inconclusive", said)
    assert told.because.endswith(told.power) and told.power != told.because
    assert power.beside(told, "another claim", "tinyqa") == told


def test_the_power_of_gradients_and_of_one_step_is_made_again_from_the_pilot() -> None:
    made = [power.of_gradients("laptop", "figure1", 0.1), power.of_steps("laptop", "one_step", 2)]
    columns = ["claim", "task", "holds if the paper", "holds if nothing", "ruled out if nothing"]
    rows, known = (part.set_index(columns[:2])[columns[2:]] for part in (pd.concat(made), power.promised()))
    assert len(rows) == 6
    assert (rows - known.loc[rows.index]).abs().to_numpy().max() <= 1  # whole per cent of 300 experiments


@pytest.mark.parametrize(("truth", "word", "share"), [(2.8, "holds", 80), (0.0, "holds", 2.5), (0.0, "ruled out", 80)])
def test_an_effect_of_2_8_standard_errors_is_found_four_times_out_of_five(
    truth: float, word: str, share: float
) -> None:
    drawn = Draws(7.0, 7 + np.random.default_rng(0).normal(size=4000))
    assert 100 * power.words_drawn({"a": drawn}, truth, 2.8, n=2000)[word] / 2000 == pytest.approx(share, abs=3)


@pytest.mark.usefixtures("places")
def test_runs_of_the_protocol_are_shown_for_a_task_when_all_of_its_runs_are_there() -> None:
    for profile in ("world_a", "p"):
        write_profile(profile, {})
    tasks: dict[str, list[str]] = {"task": ["tinyqa", "tinymath"]}
    write_grid("headline", [{"kind": "train", "method": ["grpo"], "seed": [0, 1], "max_steps": [0, 1], **tasks}])
    for seed, steps, task in itertools.product((0, 1), (0, 1), tasks["task"]):
        if (seed, steps, task) != (1, 1, "tinymath"):
            metric = "f1" if task == "tinyqa" else "accuracy"
            for profile in ("world_a", "p"):
                tables = evaluated(0.2 + steps / 2 + seed / 100, metric=metric)
                finished(profile=profile, seed=seed, max_steps=steps, method="grpo", task=task, tables=tables)
    report, free = reports.open("world_a", "headline"), reports.open("p", "headline")
    why = "3 of 4 runs are finished, and PROTOCOL.md compares none before all are."
    assert report.waiting == {"tinymath": why} and not free.waiting
    assert [*report.metric] == ["tinyqa"] and [*free.metric] == tasks["task"]
    assert set(report.runs()["task"]) == {*report.gate.table["task"]} == {"tinyqa"}
    assert report.gate.closed("tinyqa") is None and report.gate.tasks == tasks["task"]
    verdict = report.decide("tinymath", [], margin=2.0, claim=headline.ALL)
    assert (verdict.label, verdict.because) == ("not tested", f"The gate cannot be judged on tinymath: {why}")
    assert set(free.runs()["task"]) == {*tasks["task"]}
    finished(profile="world_a", seed=1, max_steps=1, method="grpo", task="tinymath", tables=tables)
    assert not reports.open("world_a", "headline").waiting


@pytest.mark.usefixtures("places")
def test_runs_that_the_protocol_does_not_name_are_named_in_the_coverage_and_compared_with_none() -> None:
    for profile, seed in (("world_a", 0), ("world_b", 1), ("p", 0)):
        write_profile(profile, {"world_seed": seed})
    write_grid("headline", [{"kind": "train", "method": ["grpo"], "seed": [100]}])
    write_grid("operating_point", [{"kind": "train", "method": ["grpo"], "seed": [0]}])
    strays = {}
    for profile in ("world_a", "p"):
        for seed in (100, 0):
            finished(profile=profile, method="grpo", seed=seed, tables=evaluated(0.5))
        for seed, world in ((300, 0), (100, 1)):
            made = finished(profile=profile, seed=seed, world_seed=world, tables=evaluated(0.5))
            strays[made.folder.name] = f"PROTOCOL.md names no such run of world A (seed {seed}, world_seed {world})"
    report = reports.open("world_a", "headline")
    row = report.coverage.set_index("run").loc["(of no run here)"]
    assert (row["wanted"], row["finished"], row["left_out"]) == (0, 0, 2)
    assert sorted(row["why"].split("; ")) == sorted(f"{name}: {why}" for name, why in strays.items())
    assert report.runs()["seed"].tolist() == [100] and set(report.runs()["world_seed"]) == {0}
    assert "why" not in reports.open("p", "headline").coverage  # runs of one's own need no protocol


@pytest.mark.usefixtures("places")
def test_controls_count_when_all_headline_runs_of_their_task_are_there() -> None:
    write_profile("world_a", {})
    seeds, task = [0, 1, 2], {"task": ["tinymath"]}
    write_grid("headline", [{"kind": "train", "method": ["grpo", "drop_half"], "seed": seeds, **task}])
    write_grid("others", [{"kind": "train", "method": ["grpo"], "seed": seeds, **task}])
    runs = list(itertools.product(seeds, {"grpo": 0.6, "drop_half": 0.3}.items()))
    for number, (seed, (method, score)) in enumerate(runs, start=1):
        tables = evaluated(score + seed / 100, metric="accuracy")
        finished(profile="world_a", seed=seed, method=method, task="tinymath", tables=tables)
        if number >= len(runs) - 1:  # of the control a run is missing, or none
            controls = reports.open("world_a", "others").controls["tinymath"]
            assert [*controls.found] == ["drop_half"] * (number == len(runs))
