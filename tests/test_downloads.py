"""Downloads that a machine without a network needs, against the profiles' own values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import script

from gcpo.runs.estimates import KNOWN
from gcpo.runs.grids import expand, fitting
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.profiles import load_profile
from gcpo.tasks import get_task, sources

downloads = script("workflow/downloads.py")
needed = downloads.needed
PAPERS = ("paper", "paper_seed", "paper_egpo", "paper_cw")


def plans(profile: str) -> list[Plan]:
    own = Plan("train", validate(load_profile(profile)))
    return [own, *(plan for grid in fitting(profile) for plan in expand(grid, profile))]


@pytest.mark.parametrize("profile", PAPERS)
def test_every_policy_and_every_split_of_a_profile_is_listed_with_its_revision(profile: str) -> None:
    listed, asked = needed(plans(profile)), plans(profile)
    assert len(listed) == len({(one.name, one.place, one.revision, one.files) for one in listed})
    named = {one.name for one in listed if one.kind == "model"}
    policies = {plan.params.policy for plan in asked}
    assert policies <= named and all(name in KNOWN.policies or name in KNOWN.downloads for name in named)
    places = {one.place for one in listed if one.kind == "data"}
    for plan in asked:
        source = sources(plan.params.task)[plan.params.eval_split]
        assert f"$GCPO_DATA_DIR/{source.folder}/{source.split}.jsonl" in places
    assert {one.revision for one in listed if one.name == "allenai/qasper"} <= {"refs/convert/parquet"}


def test_a_model_that_no_method_reads_is_not_listed() -> None:
    def models(**changes: Any) -> dict[str, float | None]:
        plan = Plan("train", validate({**load_profile("paper"), **changes}))
        return {one.name: one.size for one in needed([plan]) if one.kind == "model"}

    alone = models(method="grpo")
    assert list(alone) == ["Qwen/Qwen2.5-1.5B-Instruct"]
    assert alone["Qwen/Qwen2.5-1.5B-Instruct"] == pytest.approx(2 * 1.543714304)  # GB: two bytes of each weight
    both = {"FacebookAI/roberta-large-mnli", "sentence-transformers/all-MiniLM-L6-v2"}
    assert models(method="gcpo_bot").keys() - alone.keys() == both
    assert models(method="gcpo_cd").keys() - alone.keys() == both - {"FacebookAI/roberta-large-mnli"}


def test_generated_tasks_and_embedded_models_need_nothing() -> None:
    assert [one.name for one in needed(plans("laptop"))] == ["sentence-transformers/all-MiniLM-L6-v2"]


def test_the_command_lists_them_offline_and_says_how_to_bring_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert downloads.main(["paper_figure1", "--profile", "paper"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert any("deepmind/narrativeqa @ main: default, test (columns document.id" in line for line in said)
    assert "hf download Qwen/Qwen2.5-1.5B-Instruct" in said
    assert "python workflow/downloads.py paper_figure1 --profile paper --fetch DIR" in said
    assert said[-1].startswith("there: HF_HUB_OFFLINE=1") and said[-1].endswith("GCPO_DATA_DIR=DIR")
    (count,) = (line for line in said if " downloads of paper, " in line)
    assert int(count.split()[0]) == sum(line.startswith(("model ", "data ")) for line in said)


def test_what_is_fetched_is_read_from_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"question": "How many?", "answer": "two and two\n#### 4"}
    asked: list[Any] = []

    def records(source: Any, revision: Any) -> Any:
        asked.append((source.dataset, source.split, revision))
        yield "row 1", record

    monkeypatch.setattr(downloads, "hub_records", records)
    plan = Plan("evaluate", validate({"task": "gsm8k", "data_revision": "abc"}))
    (path,) = downloads.fetch([plan], tmp_path)
    assert asked == [("openai/gsm8k", "test", "abc")] and json.loads(path.read_text()) == record
    monkeypatch.setenv("GCPO_DATA_DIR", str(tmp_path))
    (row,) = get_task("gsm8k").load("test", limit=None).rows
    assert row.references == ("4",)
    assert list(downloads.fetch([plan], tmp_path)) == [path] and len(asked) == 1  # what is there stays
