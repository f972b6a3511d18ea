"""Every table and figure that is promised at the papers' own scale has a grid, whose runs and cost can be told."""

from __future__ import annotations

import functools

import pytest

from gcpo import paths
from gcpo.reports.pages import exhibits
from gcpo.runs.grids import expand, owner
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.profiles import load_profile
from gcpo.tasks import GENERATED, TASKS

EXHIBITS = exhibits()
GRIDS = sorted({*EXHIBITS["grid"]} - {""})
OF_PAPERS = {"GCPO": "paper", "SEED-GRPO": "paper_seed", "EGPO": "paper_egpo", "CW-GRPO": "paper_cw"}


def profile_of(grid: str) -> str:
    """Return the profile that a grid is named for."""
    profile = owner(grid)
    assert profile is not None, grid
    return profile


@functools.cache
def plans(grid: str) -> list[Plan]:
    return expand(grid, profile_of(grid))


def test_what_is_promised_at_a_paper_s_scale_has_a_grid_or_says_why_not() -> None:
    promised = EXHIBITS[EXHIBITS["lacks"].str.contains("profile paper")]
    lacks = promised[promised["grid"].eq("") & ~promised["why"].str.startswith("not reproducible: ")]
    assert len(promised) > 25 and lacks.empty, lacks
    assert EXHIBITS[EXHIBITS["grid"].ne("") & EXHIBITS["why"].ne("")].empty
    of_paper = {paper: {profile_of(grid) for grid in part["grid"] if grid} for paper, part in EXHIBITS.groupby("paper")}
    assert of_paper == {paper: {profile} for paper, profile in OF_PAPERS.items()}
    assert {path.stem for path in (paths.PARAMS / "grids").glob("paper_*.yaml")} == {*GRIDS}


@pytest.mark.parametrize("grid", GRIDS)
def test_a_policy_that_is_looked_at_is_trained_by_a_grid_of_its_profile(grid: str) -> None:
    others = [other for other in GRIDS if profile_of(other) == profile_of(grid)]
    trained = {plan.id for other in others for plan in plans(other) if plan.kind == "train"}
    assert not [plan.training.id for plan in plans(grid) if plan.training and plan.training.id not in trained]


def test_every_benchmark_is_asked_where_a_paper_asks_it() -> None:
    asked = {plan.params.task for grid in GRIDS for plan in plans(grid)}
    assert asked == set(TASKS) - set(GENERATED)
    trained = {plan.params.policy for plan in plans("paper_table2") if plan.kind == "train"}
    assert trained == {"Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-Math-1.5B"}
    whole = {plan.params.eval_split for grid in GRIDS for plan in plans(grid) if plan.params.task == "olympiadbench"}
    assert whole == {"test", "whole"}


def test_seed_grpo_is_trained_as_its_equation_6_is_printed() -> None:
    printed = [plan for plan in plans("paper_seed_table2") if plan.kind == "train" and plan.params.method_options]
    (part,) = {str(plan.method.constants()["parts"][0]) for plan in printed}
    assert len(printed) == 9
    for said in ("'form': 'linear'", "'estimator': 'counts'", "'alpha': 0.02", "'alpha_norm': 'log_g'"):
        assert said in part


# What each paper states: profile, a setting of TRL's or of ours, the value, and its place.
STATED = [
    ("paper", "learning_rate", 5e-5, "App. E.3"),
    ("paper", "max_steps", 2000, "App. E.3"),
    ("paper", "num_generations", 16, "App. E.3"),
    ("paper", "beta", 0.002, "App. E.3"),
    ("paper", "temperature", 0.9, "App. E.3"),
    ("paper_seed", "max_completion_length", 3000, "section 4.1"),
    ("paper_seed", "num_generations", 8, "Table 3"),
    ("paper_seed", "max_steps", 928, "Table 3"),
    ("paper_seed", "scale_rewards", "none", "section 4.1"),
    ("paper_seed", "loss_type", "dr_grpo", "section 4.1"),
    ("paper_egpo", "max_completion_length", 3072, "section 4.1"),
    ("paper_egpo", "max_steps", 770, "section 4.1"),
    ("paper_cw", "learning_rate", 1e-6, "Table 5"),
    ("paper_cw", "num_generations", 12, "Table 5"),
    ("paper_cw", "per_device_train_batch_size", 12, "Table 5"),
    ("paper_cw", "gradient_accumulation_steps", 4, "Table 5"),
    ("paper_cw", "max_steps", 100, "Table 5"),
    ("paper_cw", "max_completion_length", 4096, "Table 5"),
    ("paper_cw", "temperature", 0.7, "section 3.1"),
    ("paper_cw", "warmup_steps", 10, "Table 5: a tenth of 100"),
]


@pytest.mark.parametrize(("profile", "setting", "value", "place"), STATED)
def test_a_profile_has_what_its_paper_states(profile: str, setting: str, value: object, place: str) -> None:
    assert Plan("train", validate(load_profile(profile))).trainer[setting] == value, place


def test_egpo_s_steps_are_five_epochs_of_its_data() -> None:
    egpo = Plan("train", validate(load_profile("paper_egpo"))).params
    assert (10_000 - 128 - 8) // egpo.prompts_per_step * 5 == egpo.max_steps  # "about 770 steps"
