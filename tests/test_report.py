"""A report: the gate, the positive controls, the margins and the protocol that let its runs decide a claim."""

import itertools
import math
import re
import shutil
from pathlib import Path

import pytest
from record_builders import evaluated, finished, publish, write_grid, write_profile

from gcpo import paths
from gcpo.reports import records, verdicts
from gcpo.reports import report as protocol
from gcpo.reports.report import CONTROLS, RIGHT, Report, claims_on, margins
from gcpo.runs.grids import expand
from gcpo.runs.profiles import ParameterError, yaml_text
from gcpo.runs.record import RecordError
from gcpo.statistics import Interval

LEARNS = {"start": (0.40, 0.50), "grpo": (0.60, 0.62)}  # sampled and greedy
TASKS: dict[str, list[str]] = {"task": ["tinyqa", "tinymath"]}
METRIC = {"tinyqa": "f1", "tinymath": "accuracy"}
PROTOCOL = (paths.ROOT / "PROTOCOL.md").read_text()
CLEAR = verdicts.family({("a", "b"): verdicts.Evidence(lambda level: Interval(2.0, 1.0, 3.0), 0.001)})


# --- the gate -------------------------------------------------------------------------------------------------------


@pytest.fixture
def table1(places: Path) -> None:
    every = {"kind": "train", **TASKS, "method": ["grpo"]}
    write_grid("headline", [every])
    seeds = {**every, "seed": [0, 1, 2]}
    write_grid("table1", [{**seeds, "method": ["grpo", "se"]}, {**seeds, "max_steps": [0]}])


def made(task: str, grpo: tuple[float, float], start: tuple[float, float] = LEARNS["start"], seeds: int = 3) -> None:
    for seed in range(seeds):
        wobble, metric = 0.004 * (seed - 1), METRIC[task]
        finished(task=task, method="grpo", seed=seed, tables=evaluated(grpo[0] + wobble, grpo[1] - wobble, metric))
        finished(task=task, method="grpo", seed=seed, max_steps=0, tables=evaluated(*start, metric))


@pytest.mark.usefixtures("table1")
def test_the_gate_is_open_where_sampled_and_greedy_rise() -> None:
    made("tinyqa", LEARNS["grpo"])
    made("tinymath", LEARNS["grpo"])
    finished(method="grpo", seed=0, learning_rate=0.01, tables=evaluated(0.9))  # other settings are not the gate's
    report = Report("p", "table1")
    assert report.closed == {"tinyqa": "", "tinymath": ""}
    row = report.gate.set_index(["task", "decoding"]).loc[("tinyqa", "sampled")]
    assert row[["start", "grpo", "gain", "std"]].tolist() == pytest.approx([40, 60, 20, 0.4])
    assert 0 < row["low"] < 20 < row["high"] < 25 and row["seeds"] == 3
    assert report.gate["metric"].tolist() == ["f1", "f1", "accuracy", "accuracy"]
    publish()
    shutil.rmtree(paths.OUTPUTS)
    assert Report("p", "table1").closed["tinyqa"] and not Report("p", "table1", True).closed["tinyqa"]


@pytest.mark.usefixtures("table1")
@pytest.mark.parametrize("grpo", [(0.60, 0.48), (0.60, 0.50), (0.38, 0.62)])
def test_one_decoding_that_does_not_rise_closes_the_gate(grpo: tuple[float, float]) -> None:
    made("tinyqa", LEARNS["grpo"])
    made("tinymath", grpo)
    report = Report("p", "table1")
    assert not report.closed["tinyqa"] and "tinymath" in report.closed["tinymath"]
    verdicts = [report.decide(task, CLEAR, margin=2.0) for task in ("tinyqa", "tinymath", "narrativeqa")]
    assert [verdict["verdict"] for verdict in verdicts] == ["holds", "not tested", "not tested"]
    assert verdicts[1]["because"] == report.closed["tinymath"] and "narrativeqa" in verdicts[2]["because"]


@pytest.mark.usefixtures("table1")
@pytest.mark.parametrize("seeds", [0, 1])
def test_missing_runs_close_the_gate_with_what_makes_them(seeds: int) -> None:
    made("tinymath", LEARNS["grpo"], seeds=seeds)
    why = Report("p", "table1").closed["tinymath"]
    assert f"{seeds} of 3" in why and "python -m gcpo grid table1 --profile p" in why


# --- controls, margins and what stands at the head ------------------------------------------------------------------


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize(("dropped", "word"), [(0.4, "ruled out"), (0.5, "not tested"), (None, "not tested")])
def test_a_report_rules_nothing_out_where_no_control_of_its_runs_was_seen(dropped: float | None, word: str) -> None:
    base = {"kind": "train", "method": ["grpo"], "seed": [0, 1, 2]}
    write_grid("g", [{**base, "method": ["grpo", "se", "drop_half"]}, {**base, "max_steps": [0]}])
    write_grid("headline", [base])
    for seed in range(3):
        end = 0.001 * seed
        finished(method="grpo", seed=seed, max_steps=0, tables=evaluated(0.2 + end))
        for method, score in {"grpo": 0.5, "se": 0.5 + end, "drop_half": dropped}.items():
            if score:
                finished(method=method, seed=seed, tables=evaluated(score + end))
    report = Report("p", "g")
    scores = records.gather(report.runs(), "eval", ["label", "seed"]).query("decoding == 'sampled'")
    found = verdicts.compare(scores, "f1", [("se", "grpo")])
    verdict = report.decide("tinyqa", found, margin=2.0)
    assert verdict["verdict"] == word and verdict.get("because", "") == report.blind["tinyqa"]
    closed = report.decide("tinyqa", found, closed="No case.", margin=2.0)
    assert (closed["verdict"], closed["because"]) == ("not tested", "No case.")


@pytest.mark.usefixtures("places")
def test_controls_count_when_all_headline_runs_of_their_task_are_there() -> None:
    write_profile("world_a", {})
    base = {"kind": "train", "method": ["grpo"], "seed": [0, 1, 2], "task": ["tinymath"]}
    write_grid("headline", [{**base, "method": ["grpo", "drop_half"]}])
    write_grid("others", [base])
    runs = itertools.product(range(3), {"grpo": 0.6, "drop_half": 0.3}.items())
    for number, (seed, (method, score)) in enumerate(runs):
        tables = evaluated(score + seed / 100, metric="accuracy")
        finished(profile="world_a", seed=seed, method=method, task="tinymath", tables=tables)
        if number >= 4:  # of the control a run is missing, or none
            controls = Report("world_a", "others").controls["tinymath"]
            assert [*controls.index] == [("drop_half", "grpo")] * (number == 5)


@pytest.mark.usefixtures("places")
def test_a_report_opens_what_stands_at_its_head(tmp_path: Path) -> None:
    write_grid("g", [{"kind": "train", **TASKS, "seed": [0, 1]}])
    report = Report("p", "g", write_to=str(tmp_path))
    assert (report.folder, Report("p", "g").folder) == (tmp_path, None)
    (paths.PARAMS / "statistics").mkdir()
    declared = yaml_text({task: {of: 2.0} for task, of in METRIC.items()})
    (paths.PARAMS / "statistics" / "margins.yaml").write_text(declared)
    assert report.margin == dict.fromkeys(METRIC, 2.0)
    with pytest.raises(RecordError, match="python -m gcpo grid g --profile p"):
        report.runs()
    finished(tables=evaluated(0.5))
    report = Report("p", "g")
    assert len(report.runs()) == report.coverage["finished"].sum() == 1
    with pytest.raises(RecordError, match="python -m gcpo grid g --profile p"):
        report.runs("kind == 'gradients'")


@pytest.mark.usefixtures("places")
def test_a_second_world_counts_beside_the_first_where_both_are_the_protocols() -> None:
    base = {"kind": "train", "method": ["grpo"], "seed": [0, 1], "max_steps": [0, 1]}
    write_grid("headline", [base])
    for number, profile in enumerate(("world_a", "world_b", "p")):
        write_profile(profile, {"world_seed": number % 2})
        for seed, steps in itertools.product((0, 1), (0, 1)):
            tables = evaluated(0.2 + steps / 2 + seed / 100 + number / 50)
            finished(profile=profile, world_seed=number % 2, seed=seed, max_steps=steps, method="grpo", tables=tables)
    both = Report("world_a", "headline", second="world_b")
    assert both.worlds == {"world_a": "world A", "world_b": "world B"} and len(both.runs()) == 8
    assert len(both.of_first(both.runs())) == 4 == len(Report("world_a", "headline").runs())
    assert both.gate["world"].tolist() == ["world A", "world A", "world B", "world B"]
    assert both.coverage["finished"].sum() == 8 and not both.closed["tinyqa"] and "world B" in both.source
    for profile, second in (("world_b", "world_b"), ("p", "world_b"), ("world_a", "p")):
        assert len(Report(profile, "headline", second=second).worlds) == 1


@pytest.mark.parametrize("wrong", [0, math.inf])
def test_a_bad_margin_is_an_error_with_file_and_key(tmp_path: Path, wrong: object) -> None:
    (tmp_path / "m.yaml").write_text(yaml_text({"tinyqa": {"f1": wrong}}))
    with pytest.raises(ParameterError, match=r"(?s)m\.yaml: .*tinyqa.f1"):
        margins(tmp_path / "m.yaml")


# --- the protocol ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["world_a", "world_b"])
def test_the_grid_has_the_runs_of_every_pair_and_control_with_equal_seeds(profile: str) -> None:
    seeds: dict[tuple[str, str], set[int]] = {}
    for plan in expand("headline", profile):
        seeds.setdefault((plan.params.task, plan.label), set()).add(plan.params.seed)
    assert set(map(frozenset, seeds.values())) == {frozenset(range(100, 108))}
    for task in METRIC:
        labels = {label for of, label in seeds if of == task}
        pairs = [pair for listed in claims_on(labels).values() for pair in listed]
        assert {label for pair in pairs for label in pair} | {*CONTROLS, "no training"} <= labels


def test_care_is_compared_with_a_grpo_of_its_own_where_there_is_one() -> None:
    claims = claims_on({"grpo", "care", *RIGHT})
    assert RIGHT in claims[protocol.UNCERTAIN] and ("care", "grpo") not in claims[protocol.UNCERTAIN]
    assert ("care", "grpo") in claims_on({"grpo", "care"})[protocol.UNCERTAIN]


@pytest.mark.usefixtures("places")
def test_runs_of_the_protocol_are_shown_for_a_task_when_all_of_its_runs_are_there() -> None:
    write_profile("world_a", {})
    write_grid("headline", [{"kind": "train", "method": ["grpo"], "seed": [0, 1], "max_steps": [0, 1], **TASKS}])
    for seed, steps, task in itertools.product((0, 1), (0, 1), METRIC):
        tables = evaluated(0.2 + steps / 2 + seed / 100, metric=METRIC[task])
        for profile in ("world_a", "p") if (seed, steps, task) != (1, 1, "tinymath") else ():
            finished(profile=profile, seed=seed, max_steps=steps, method="grpo", task=task, tables=tables)
    report, free = Report("world_a", "headline"), Report("p", "headline")
    assert "3 of 4" in report.waiting["tinymath"] and not free.waiting
    assert [*report.metric] == ["tinyqa"] and [*free.metric] == [*METRIC]
    assert set(report.runs()["task"]) == {*report.gate["task"]} == {"tinyqa"} and not report.closed["tinyqa"]
    verdict = report.decide("tinymath", margin=2.0, claim=protocol.ALL)
    assert (verdict["verdict"], verdict["because"]) == ("not tested", report.waiting["tinymath"])
    assert "power" not in verdict and set(free.runs()["task"]) == {*METRIC}
    finished(profile="world_a", seed=1, max_steps=1, method="grpo", task="tinymath", tables=tables)
    assert not Report("world_a", "headline").waiting


# --- its power ------------------------------------------------------------------------------------------------------


def test_the_power_beside_a_verdict_is_what_the_protocol_printed() -> None:
    printed = re.findall(r"^\| (.*?) \| (tiny\w+) \| (\d+) \| (\d+) \| (\d+) \|$", PROTOCOL, flags=re.M)
    known = protocol.protocol_power().drop(columns="supposed")
    assert [(*row[:2], *map(int, row[2:])) for row in printed] == [*known.itertuples(index=False, name=None)]
    verdict = {"verdict": "inconclusive"}
    shown = protocol.with_power(verdict, protocol.ALL, "tinyqa", 99.0)
    assert shown == {"verdict": "inconclusive", "power": 21, "realised": 99.0}
    assert protocol.with_power(verdict, "another claim", "tinyqa", 99.0) == verdict
