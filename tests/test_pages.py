"""Pages are what templates make of the reference; code in pages runs as printed; exhibits have grids."""

import functools
import re
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from gcpo import paths
from gcpo.errors import UserError
from gcpo.reports import publish, records, replay, tables, templates
from gcpo.runs.grids import expand, owner
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.profiles import load_profile
from gcpo.tasks import GENERATED, TASKS

README = (paths.ROOT / "README.md").read_text()
CODE = re.compile(r"```(?:python)?\n(.*?)```", flags=re.S)
EXAMPLES = CODE.findall((paths.ROOT / "docs" / "use.md").read_text())


def test_pages_are_those_that_templates_make_of_the_reference() -> None:
    made = templates.pages()
    assert {*made} == {"README.md", "RESULTS.md", "METHODS.md", "docs/exhibits.md", "docs/notebooks.md"}
    assert {name: (paths.ROOT / name).read_text() for name in made} == made, "python -m gcpo.reports.templates"


@pytest.mark.parametrize("column", ["verdict", "beside"])
def test_no_page_is_made_when_the_ledger_has_another_word(column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(profile: str, name: str, **settings: object) -> pd.DataFrame:
        table = tables.written(profile, name, **settings)
        return table.assign(**{column: "fails"}) if name == "headlines" else table

    monkeypatch.setattr(templates, "written", changed)
    with pytest.raises(UserError, match=r"README.md.j2: .*gcpo-4-2-baselines.*'inconclusive'.*'fails'"):
        templates.pages()


def test_the_first_screen_says_what_the_ledger_says() -> None:
    """Suppression by entropy costs on short answers, a lost half is seen, and RD alone helps a step."""
    half = tables.written("world_a", "table1_controls", reference=True).query("control.str.startswith('half')")
    assert half["task"].tolist() == ["tinyqa", "tinymath"] and half["seen"].all()
    pairs = tables.written("world_a", "table1_pairs", reference=True).set_index(["task", "label"])
    assert (pairs.loc[[("tinyqa", "SE minus GRPO"), ("tinyqa", "KLE minus GRPO")], "high"] < 0).all()
    level = pairs.query("label in ['GCPO-CD minus GRPO', 'GCPO-BoT minus GRPO']")
    assert len(level) == 4 and (level["low"] < 0).all() and level["high"].between(0, 4.5).all()
    assert pd.read_csv(paths.ROOT / "docs/pictures/gains.csv")["estimate"][0] == level["difference"].iloc[0]
    step = tables.written("world_a", "one_step_pooled", reference=True).query("policy == 'starting policy'")
    gain = step.query("task == 'tinyqa'").set_index("method")
    assert gain.loc["rd_only", "low"] > 0 > gain.loc["cd_only", "high"]


def test_the_front_page_is_short_and_soon_has_something_to_run() -> None:
    """700 words, 300 before the first command, and in a sentence two numbers and an interval at most."""
    shown = re.sub(r"<!--.*?-->|!\[.*?\]\(.*?\)|(?<=\])\(.*?\)", "", README)
    counts = [len(re.findall(r"\S*\w\S*", text)) for text in (CODE.sub("", shown), shown.partition("```")[0])]
    assert counts[0] <= 700 and counts[1] <= 300, counts
    for sentence in re.split(r"(?<=[.?:]) |[|\n]", CODE.sub("", shown)):
        rest, intervals = re.subn(r"\[\S+, \S+\]", "", sentence)
        assert len(re.findall(r"(?<![\w.])[-+]?\d[\d.]*", rest)) <= 2 and intervals <= 1, sentence


def test_the_mathematics_without_a_trainer() -> None:
    exec(EXAMPLES[1].replace("weights(", "weight = weights("), names := {})
    # Rewards that differ are boosted more than geometry damps.
    assert names["weight"].shape == (1, 4) and (names["weight"] > 1).all()


@pytest.mark.slow
def test_examples_of_a_trl_run_train_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(EXAMPLES[0], names := {})
    steps = [entry for entry in names["trainer"].state.log_history if "loss" in entry]
    assert len(steps) == 5 and any(step["reward"] > 0 for step in steps)
    assert all(0.9 < step["gcpo/weight"] < 1.3 for step in steps)
    exec("".join(CODE.findall(README)[1:3]), {})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_make_reproduce_makes_stands_beside_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = expand("reproduce", "world_a")
    assert re.findall(r"^make reproduce .* (\d+) runs", README, flags=re.M) == [str(len(plans))]
    commands = subprocess.run(["make", "-n", "reproduce"], cwd=paths.ROOT, capture_output=True, text=True, check=True)
    assert " -m gcpo grid reproduce --profile world_a " in commands.stdout
    kept = records.runs("world_a", reference=True)
    monkeypatch.setattr(records, "runs", lambda *_, **__: kept)  # as if this machine had made them
    table = replay.compare("world_a", "reproduce")
    assert len(table) == len({(plan.params.task, plan.label) for plan in plans})
    assert {*table["found"]} == {replay.IDENTICAL} and table["here"].notna().all()


# --- the papers' exhibits -------------------------------------------------------------------------------------------

EXHIBITS = pd.read_csv(templates.EXHIBITS, dtype=str, keep_default_na=False)
GRIDS = sorted({*EXHIBITS["grid"]} - {""})
OF_PAPERS = {"GCPO": "paper", "SEED-GRPO": "paper_seed", "EGPO": "paper_egpo", "CW-GRPO": "paper_cw"}


@functools.cache
def plans(grid: str) -> list[Plan]:
    return expand(grid, owner(grid) or "")


def test_what_is_promised_at_a_paper_s_scale_has_a_grid_or_says_why_not() -> None:
    by = dict([*EXHIBITS.groupby("state")])
    assert {*by} == {"whole", "to the table", "out"} and by["out"]["why"].ne("").all()
    assert {*by["to the table"]["grid"]} - {""} == publish.OF_PAPERS | {"paper_figure1"}
    of_paper = {paper: {owner(grid) for grid in part["grid"] if grid} for paper, part in EXHIBITS.groupby("paper")}
    assert of_paper == {paper: {profile} for paper, profile in OF_PAPERS.items()}
    assert {path.stem for path in (paths.PARAMS / "grids").glob("paper_*.yaml")} == {*GRIDS}
    assert {plan.params.task for grid in GRIDS for plan in plans(grid)} == {*TASKS} - {*GENERATED}


@pytest.mark.parametrize("profile", OF_PAPERS.values())
def test_a_policy_that_is_looked_at_is_trained_by_a_grid_of_its_profile(profile: str) -> None:
    own = [plan for grid in GRIDS if owner(grid) == profile for plan in plans(grid)]
    trained = {plan.id for plan in own if plan.kind == "train"}
    assert not [plan.training.id for plan in own if plan.training and plan.training.id not in trained]


# What each paper states: settings of TRL's or of ours, and their places.
STATED = {
    # App. E.3.
    "paper": "learning_rate=5e-5 max_steps=2000 num_generations=16 beta=0.002 temperature=0.9 use_bias_correction_kl=0",
    # Section 4.1 and Table 3, whose 928 steps are eight optimiser steps each.
    "paper_seed": "max_completion_length=3000 num_generations=8 max_steps=7424 steps_per_generation=32 "
    "scale_rewards=none loss_type=dr_grpo",
    # Section 4.1, and verl's defaults.
    "paper_egpo": "max_completion_length=3072 max_steps=770 loss_type=dapo weight_decay=0.01 delta=3",
    # Table 5 and section 3.1.
    "paper_cw": "learning_rate=1e-6 num_generations=12 per_device_train_batch_size=12 gradient_accumulation_steps=4 "
    "max_steps=100 max_completion_length=4096 temperature=0.7 warmup_steps=0.1 use_bias_correction_kl=0",
}


@pytest.mark.parametrize("profile", STATED)
def test_a_profile_has_what_its_paper_states(profile: str) -> None:
    trainer = Plan("train", validate(load_profile(profile))).trainer
    for name, value in (setting.split("=") for setting in STATED[profile].split()):
        assert trainer[name] == (float(value) if value[0].isdigit() else value), name
