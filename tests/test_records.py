"""Run records and grids: atomic manifests, runs found again, and the committed reference."""

import math
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from record_builders import TINY, failed, finished, planned, publish, write_grid, write_profile

from gcpo import io, paths, world
from gcpo.reports import records
from gcpo.runs import record
from gcpo.runs.grids import expand, varied
from gcpo.runs.params import Params, validate
from gcpo.runs.plan import label
from gcpo.runs.profiles import ParameterError

pytestmark = pytest.mark.usefixtures("places")


# --- finding runs ---------------------------------------------------------------------------------------------------


def test_find_gives_finished_runs_only() -> None:
    done = finished(seed=0, results={"greedy_f1": 0.25, "sampled_f1": 0.125})
    failed(seed=1)
    with record.record(planned(seed=2)):
        found = records.find("p")
    (row,) = found.to_dict("records")
    made = {"id": done.folder.name, "folder": done.folder, "kind": "train", "commit": "c0ffee", "dirty": False}
    ran = {"seed": 0, "method": "gcpo_bot", "group_size": 4, "greedy_f1": 0.25, "sampled_f1": 0.125, "reference": False}
    assert (made | ran).items() <= row.items() and {*Params.model_fields} <= {*row}
    assert row["seconds"] >= 0 and row["peak_memory_gb"] > 0
    assert records.find("p")["seed"].tolist() == [0, 2]


def test_runs_are_listed_with_what_departs_and_compared(call: Any) -> None:
    first, second = finished(seed=0, alpha=0.25), finished(seed=1, results={"greedy_f1": 0.75})
    broken = failed(seed=2, beta=0.5)
    with record.record(planned(seed=3)) as going:
        lines = [line.split() for line in call("runs", "--profile", "p").out.splitlines()[1:]]
    assert [line[0] for line in lines] == [run.folder.name for run in (going, broken, second, first)]
    texts = [" ".join(line) for line in lines]
    for text, said in zip(
        texts, ("running, or killed", "beta 0.5 FAILED", "greedy_f1 0.75 0", "alpha 0.25 f"), strict=True
    ):
        assert said in text and text.endswith("0 days 00:00")
    ids = [run.folder.name for run in (first, second)]
    table = [line.split() for line in call("compare", *ids, "--profile", "p").out.splitlines()]
    assert ["alpha", "0.25", "0.6"] in table and ["greedy_f1", "0.5", "0.75"] in table
    assert not {"method", "task", "commit"} & {line[0] for line in table}
    wrong = call("compare", ids[0], ids[1][:-1], "--profile", "p", status=2).err
    assert wrong.splitlines()[-1].startswith(
        f"gcpo: no finished run {ids[1][:-1]} of profile p. Did you mean '{ids[1]}'?"
    )


def test_an_id_that_reads_as_missing_is_an_id() -> None:
    ids = ["nan", "NA", "None", "null", "007"]
    finished(tables={"eval": pd.DataFrame({"query": ids, "document": ids, "f1": [0.5, math.nan, 1, 0, 0]})})
    publish()
    for reference in (False, True):
        found = records.gather(records.find("p", reference=reference), "eval", ["seed"])
        assert found["query"].tolist() == found["document"].tolist() == ids and [*found["f1"].isna()] == [0, 1, 0, 0, 0]


def test_find_a_grid_gives_its_runs_only() -> None:
    write_grid("g", [{"kind": "train", "seed": [0, 1]}, {"kind": "gradients", "seed": [0]}])
    failed(seed=1)
    assert records.find("p").empty and records.find("p", "g").empty
    ours = [finished(seed=0), finished("gradients", seed=0)]
    others = [finished(seed=0, alpha=0.5), finished("gradients", seed=1)]
    assert set(records.find("p", "g")["id"]) == {run.folder.name for run in ours}
    assert len(records.find("p")) == len(ours + others)
    write_profile("p", {"alpha": 0.25})  # training before that is of no grid now; the starting policy knows no alpha
    assert records.find("p", "g")["kind"].tolist() == ["gradients"]


def test_coverage_counts_what_a_grid_asks_for_and_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [{"kind": "train", "method": ["grpo", "se"], "seed": [0, 1, 2]}, {"kind": "train", "max_steps": [0]}]
    write_grid("g", [*blocks, {"kind": "gradients", "task": ["tinymath"]}])
    finished(method="grpo", seed=0)
    failed(method="grpo", seed=1)
    finished(method="grpo", seed=7)  # not asked for
    monkeypatch.setattr(record, "environment", lambda: {"code": "c0de", "commit": "beef" * 10, "dirty": True})
    finished(method="grpo", seed=2)
    finished(max_steps=0)
    found = records.coverage("g", "p")
    assert [*found] == "task run wanted finished failed left_out dirty commits why source".split()
    assert found.drop(columns=["left_out", "why"]).to_numpy().tolist() == [
        ["tinyqa", "grpo", 3, 2, 1, 1, "beefbee, c0ffee", "this machine"],
        ["tinyqa", "se", 3, 0, 0, 0, "", "this machine"],
        ["tinyqa", "no training", 1, 1, 0, 1, "beefbee", "this machine"],
        ["tinymath", "gradients", 1, 0, 0, 0, "", "this machine"],
    ]
    assert not found["left_out"].any() and not found["why"].any()
    publish()
    published = records.coverage("g", "p", reference=True)
    assert set(published["source"]) == {"reference"} and published["finished"].tolist() == [2, 0, 1, 0]


def with_tables() -> None:
    """Two runs of one task and one of another, whose tables have other columns, and one run without training."""
    for seed, task in ((0, "tinyqa"), (1, "tinyqa"), (0, "tinymath")):
        score = {"f1" if task == "tinyqa" else "accuracy": [seed / 2, 1.0]}
        lines = pd.DataFrame({"query": ["a", "b"], **score, "decoding": "greedy"})
        logged = pd.DataFrame({"step": [1, 2], "reward": [0.5, None]})
        finished(task=task, seed=seed, tables={"eval": lines, "metrics": logged})
    finished(max_steps=0, tables={"eval": pd.DataFrame({"query": ["a"], "f1": [0.25]})})
    finished("gradients", tables={"queries": pd.DataFrame({"V": [1.5], "zero_variance": [False]})})


def test_gather_joins_the_tables_of_runs_with_their_keys() -> None:
    with_tables()
    trained = records.find("p").query("kind == 'train' and max_steps > 0 and task == 'tinyqa'")
    found = records.gather(trained, "eval", ["label", "seed"])
    scores = [("a", 0.0, 0), ("b", 1.0, 0), ("a", 0.5, 1), ("b", 1.0, 1)]
    assert [*found] == ["query", "f1", "decoding", "label", "seed"]
    assert found.to_numpy().tolist() == [[name, f1, "greedy", "gcpo_bot", seed] for name, f1, seed in scores]
    assert records.gather(pd.DataFrame(), "eval", ["seed"]).empty


def test_the_reference_gives_the_tables_of_the_run_folders() -> None:
    with_tables()
    own = records.find("p")
    publish()
    committed = records.find("p", reference=True)
    same = [column for column in own if column not in ("folder", "reference")]
    pd.testing.assert_frame_equal(committed[same], own[same])
    assert committed["reference"].all() and {*committed["folder"]} == {paths.REFERENCE / "p"}
    assert records.find("q", reference=True).empty
    for name, kind in (("eval", "train"), ("metrics", "train"), ("queries", "gradients")):
        parts = [table[(table["kind"] == kind) & (table["max_steps"] > 0)] for table in (own, committed)]
        ours, theirs = (records.gather(part, name, ["id", "task", "seed"]) for part in parts)
        assert len(ours) and ours["task"].nunique() == (2 if kind == "train" else 1)
        pd.testing.assert_frame_equal(ours, theirs[ours.columns])
    assert "f1" not in records.gather(committed.query("task == 'tinymath'"), "eval", ["seed"])


@pytest.mark.parametrize("reference", [False, True])
def test_a_table_that_a_run_does_not_have_is_an_error_that_names_the_run(reference: bool) -> None:
    with_tables()
    publish()
    found = records.find("p", reference=reference).query("max_steps == 0")
    (name,) = found["id"]
    with pytest.raises(FileNotFoundError, match=f"run {name} has no table 'metrics'"):
        records.gather(found, "metrics", ["seed"])
    every = records.find("p", reference=reference)
    assert sorted(records.gather(every, "metrics", ["seed"], optional=True)["seed"]) == [0, 0, 0, 0, 1, 1]


# --- what must not stand beside one another ---------------------------------------------------------------------------


def test_what_a_grid_varies_is_a_column_and_part_of_the_label() -> None:
    blocks = [
        {"kind": "train", "method": ["gcpo_bot", "grpo"], "alpha": [0.1, 0.6], "group_size": [4, 8]},
        {"kind": "train", "method": ["gcpo_bot"], "learning_rate": [1e-3, 2e-3], "seed": [0, 1]},
        {"kind": "train", "method": ["grpo"], "grpo": [{"num_iterations": 2}], "entailment_threshold": [0.35]},
        {"kind": "train", "max_steps": [0]},
    ]
    write_grid("g", blocks)
    labels = {plan.label for plan in expand("g", "p")}
    assert {label for label in labels if label.startswith("gcpo_bot") and label.endswith("=8")} == {
        "gcpo_bot alpha=0.1 group_size=8",
        "gcpo_bot alpha=0.6 group_size=8",
    }
    assert {"gcpo_bot learning_rate=0.002", "grpo num_iterations=2", "no training"} <= labels
    finished(alpha=0.1), finished(alpha=0.6, group_size=8), finished("train", method="grpo", group_size=8)
    found = records.find("p", "g").set_index("label")
    assert found.loc["gcpo_bot alpha=0.1 group_size=4", ["alpha", "group_size"]].tolist() == [0.1, 4]
    assert found.loc["gcpo_bot alpha=0.6 group_size=8", "alpha"] == 0.6
    assert math.isnan(found.loc[found["method"] == "grpo", "alpha"].item())  # it has none, whatever was given


def test_without_a_grid_a_label_says_in_what_runs_differ() -> None:
    finished(alpha=0.1), finished(alpha=0.2), finished(max_steps=0), finished("gradients")
    assert set(records.find("p")["label"]) == {"gcpo_bot alpha=0.1", "gcpo_bot alpha=0.2", "no training", "gradients"}


def test_alpha_is_the_alpha_that_ran() -> None:
    alphas = {"gcpo_bot": 0.6, "seed_grpo": 0.0417, "qhawkeye": 0.2, "egpo": math.nan}
    for method in alphas:
        finished(method=method)
    assert records.find("p").set_index("method")["alpha"].to_dict() == pytest.approx(alphas, nan_ok=True)


def of_world(monkeypatch: pytest.MonkeyPatch, root: Path, weights: str) -> Path:
    """A world in a folder of its own, from which the runs that follow start."""
    monkeypatch.setattr(paths, "WORLDS", root)
    folder = world.folder("policy")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_text(weights)
    (folder.parent / "quality.json").write_text("{}")
    io.seal(folder.parent)
    return folder.parent


def other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs that follow are of other code."""
    monkeypatch.setattr(record, "environment", lambda: {"code": "0ther", "commit": "beef" * 10, "dirty": False})


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ("models", "models of one name, policy 'tiny'.*: 2 with .*, 1 with"),
        ("code", "2 with .*c0de.*1 with .*0ther.*any_code"),
    ],
)
def test_runs_of_different_code_or_worlds_are_compared_only_when_asked_for(
    differs: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_grid("g", [{"kind": "train", "seed": [0, 1, 2]}])
    of_world(monkeypatch, tmp_path / "here", "some")
    finished(seed=0), finished(seed=1)
    other_code(monkeypatch) if differs == "code" else of_world(monkeypatch, tmp_path / "elsewhere", "other")
    finished(seed=5)  # of no concern to the grid
    assert len(records.find("p", "g")) == 2
    finished(seed=2)
    with pytest.raises(record.RecordError, match=said):
        records.find("p", "g")
    assert len(records.find("p", "g", any_code=True)) == 3 and len(records.find("p")) == 4


def test_the_world_is_a_factor_like_any_other_also_beside_records_older_than_the_parameter() -> None:
    write_grid("g", [{"kind": "train", "world_seed": [0, 1]}])
    for seed in (0, 1):
        finished(max_steps=4, world_seed=seed)
    assert records.find("p", "g")["label"].tolist() == [f"gcpo_bot world_seed={seed}" for seed in (0, 1)]
    older = {key: value for key, value in validate(TINY).model_dump().items() if key != "world_seed"}
    assert varied([("train", older), ("train", {**older, "world_seed": 1})]) == {("train", True): ["world_seed"]}
    assert label("train", older, ["world_seed"]) == "gcpo_bot world_seed=0"


def test_runs_on_data_that_changed_are_compared_only_when_asked_for() -> None:
    write_grid("g", [{"kind": "train", "seed": [0, 1]}])
    write_grid("same", [{"kind": "train", "seed": [0, 2]}])
    for seed, revision in enumerate(("old", "new", "old")):
        run, own = finished(seed=seed), {"dataset": "d", "generator_seed": seed, "cut": seed}  # of the seed's questions
        run.manifest |= {"commit": f"{seed}", "data": {"train": own, "eval": {"dataset": "d", "revision": revision}}}
        run.write()
    with pytest.raises(record.RecordError, match=r"data of one name, tinyqa, eval: .*(new|old).*(new|old).*any_"):
        records.find("p", "g")
    assert len(records.find("p", "g", any_code=True)) == len(records.find("p", "same")) == 2


def test_an_interrupted_run_has_no_time() -> None:
    failed(seed=0)
    finished(seed=0), finished(seed=1)
    assert records.find("p").set_index("seed")["seconds"].isna().to_dict() == {0: True, 1: False}


@pytest.mark.parametrize("differs", [None, "code", "models"])
def test_a_reference_keeps_what_can_be_compared_with_this_machine_s_runs(
    differs: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_grid("g", [{"kind": "train", "seed": [0, 2]}])
    write_grid("h", [{"kind": "train", "seed": [0, 1]}])
    of_world(monkeypatch, tmp_path / "here", "some")
    finished(seed=0), finished(seed=1), finished(seed=5)
    publish()
    shutil.rmtree(paths.OUTPUTS)
    assert [run.manifest["params"]["seed"] for run in records.to_publish("p")] == [0, 1, 5]  # nothing has run here
    if differs == "code":
        other_code(monkeypatch)
    if differs == "models":
        of_world(monkeypatch, tmp_path / "elsewhere", "other")
    finished(seed=2)
    kept = {None: [2, 0, 1, 5], "code": [2, 1, 5], "models": [2]}[differs]  # other code: where no grid has both
    assert [run.manifest["params"]["seed"] for run in records.to_publish("p")] == kept


# --- grids ----------------------------------------------------------------------------------------------------------


def params_of(grid: str, **overrides: Any) -> list[Params]:
    return [plan.params for plan in expand(grid, "p", overrides)]


def test_a_block_is_every_combination_of_its_lists_and_a_run_that_two_share_is_there_once() -> None:
    blocks = [{"kind": "train", "method": ["grpo", "se"], "seed": [0, 1, 2]}, {"kind": "gradients"}]
    write_grid("g", [*blocks, {"kind": "train", "method": ["se"], "seed": [2, 3]}])
    found = [(plan.kind, plan.params.method, plan.params.seed) for plan in expand("g", "p")]
    trained = [("train", method, seed) for method in ("grpo", "se") for seed in (0, 1, 2)]
    assert found == [*trained, ("gradients", "gcpo_bot", 0), ("train", "se", 3)]


def test_a_grid_overrules_the_profile_and_other_values_overrule_both() -> None:
    write_profile("p", {"alpha": 0.1, "seed": 5, "beta": 0.1})
    write_grid("g", [{"kind": "train", "alpha": [0.2, 0.3], "seed": [7]}])
    assert [(q.alpha, q.seed, q.beta) for q in params_of("g")] == [(0.2, 7, 0.1), (0.3, 7, 0.1)]
    assert [(q.alpha, q.beta) for q in params_of("g", beta=0.2)] == [(0.2, 0.2), (0.3, 0.2)]
    with pytest.raises(ParameterError, match=r"g\.yaml .*seed"):
        params_of("g", seed=9)
