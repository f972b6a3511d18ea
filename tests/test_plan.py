"""A run's plan: every value resolved, an id that names them all, and labels that tell runs of a grid apart."""

import dataclasses
import inspect
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig

from gcpo import GCPOConfig, paths, world
from gcpo.methods import METHODS, table
from gcpo.runs import plan as plans
from gcpo.runs.params import Params, validate
from gcpo.runs.plan import KINDS, PINNED, READ, Plan, label
from gcpo.runs.profiles import load_profile
from gcpo.runs.train import configure

GOLDEN = json.loads((Path(__file__).parent / "golden" / "trl_defaults.json").read_text())

# Another value of a parameter, which another run is due to, where it is no number or truth value that can be changed.
OTHER: dict[str, Any] = {
    **{"task": "tinymath", "method": "grpo", "method_options": {"form": "linear"}, "policy": "scratch", "alpha": 0.5},
    **{"policy_revision": "main", "data_revision": "main", "dtype": "bfloat16", "reward": "binary"},
    **{"embedder": "other", "entailment": "other", "full_completion": True, "grpo": {"epsilon": 0.1}},
    **{"system_prompt": "Be brief.", "prompt_template": "{prompt} Be brief.", "format_reward": "think"},
    **{"chat_template_kwargs": {"thinking": True}, "gradient_parameters": ["lm_head"], "noise_among": "dispersed"},
    **{"train_split": "spare", "validation_split": "spare", "eval_split": "validation", "compared": ["kle"]},
}
for _key, _field in Params.model_fields.items():
    if isinstance(_field.default, int | float) and _key not in OTHER:
        _more = _field.default + (1 if isinstance(_field.default, int) else 0.1)
        OTHER[_key] = not _field.default if isinstance(_field.default, bool) else _more
for _key in ("skip_malformed", "at_step"):  # can only turn an error into this very run; are of another training
    OTHER.pop(_key)

# The same run, written in two ways.
SAME: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((kind, {"memory_limit": 0.5}, {}) for kind in KINDS),
    *(("train", {key: value}, {}) for key, value in (("skip_malformed", True), ("report_to", "x"), ("profile", "x"))),
    ("train", {"accelerate": "fsdp"}, {}),  # with one process
    ("train", {"alpha": 0.6}, {}),
    ("train", {"method": "qhawkeye", "alpha": 0.2}, {"method": "qhawkeye"}),
    ("train", {"method": "grpo", "alpha": 0.3}, {"method": "grpo"}),  # it has none
    ("train", {"method": "cd_only", "method_options": {"form": "square"}}, {"method": "cd_only"}),
    ("train", {"grpo": {"num_iterations": 1}, "temperature": "9e-1"}, {}),
    ("train", {"max_completion_length": {"tinymath": 48, "default": 16}}, {}),
    ("train", {"task": "tinymath", "reward": "binary", "full_completion": True}, {"task": "tinymath"}),
    ("one_step", {"compared": ["kle", "se", "kle"]}, {"compared": ["se", "kle"]}),
    ("one_step", {"grpo": {"num_iterations": 2}}, {}),
    ("gradients", {"method": "grpo", "learning_rate": 1e-4, "max_steps": 7}, {}),  # of the starting policy
    ("gradients", {"at_step": 2, "max_steps": 7}, {"at_step": 2}),  # whose training's steps those are
    ("gradients", {"seed": 2, "at_step": 4, "training_seed": 2}, {"seed": 2, "at_step": 4}),
]
# All different.
APART: list[tuple[str, list[dict[str, Any]]]] = [
    ("train", [{}, *({"processes": 2, "accelerate": name} for name in ("ddp", "zero3", "fsdp"))]),
    ("train", [{"method": "qhawkeye"}, {"method": "qhawkeye", "alpha": 0.6}]),
    ("train", [{"task": "qasper"}, {"task": "qasper", "context": "evidence"}]),
    ("one_step", [{}, {"compared": ["se"]}, {"grpo": {"max_grad_norm": 0.5}}]),
    ("gradients", [{}, {"at_step": 1}, *({"at_step": 2, **one} for one in ({}, {"method": "grpo"}, {"alpha": 0.1}))]),
    ("gradients", [{"seed": one, "at_step": 4, "training_seed": other} for one in (2, 3) for other in (2, 100)]),
]


def id_of(kind: str = "train", **values: Any) -> str:
    return Plan(kind, validate({"warm_steps": 2 * (kind == "warm_start"), **values})).id


@pytest.mark.parametrize(("kind", "values", "others"), SAME)
def test_a_run_is_the_same_however_it_is_written(kind: str, values: dict[str, Any], others: dict[str, Any]) -> None:
    assert id_of(kind, **values) == id_of(kind, **others)


@pytest.mark.parametrize(("kind", "runs"), APART)
def test_runs_of_other_results_have_other_ids(kind: str, runs: list[dict[str, Any]]) -> None:
    assert len({id_of(kind, **values) for values in runs}) == len(runs)


def test_another_value_is_tried_for_every_parameter() -> None:
    apart = {"profile", "skip_malformed", "at_step", "report_to", "accelerate", "trained_on", "training_seed"}
    assert set(OTHER) == set(Params.model_fields) - apart - {"training_values", "context", "memory_limit"}


def test_a_configuration_of_accelerate_counts_by_its_content_and_not_by_its_name(tmp_path: Path) -> None:
    own, offloading = tmp_path / "own.yaml", tmp_path / "offloading.yaml"
    own.write_text((paths.PARAMS / "accelerate" / "zero3.yaml").read_text())
    offloading.write_text(own.read_text().replace("offload_optimizer_device: none", "offload_optimizer_device: cpu"))
    ids = [id_of(processes=2, accelerate=str(path)) for path in ("zero3", own, offloading)]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    ("values", "at_once", "accumulated"),
    [({}, 8, 1), ({"processes": 2}, 4, 1), ({"processes": 2, "micro_batch": 2}, 2, 2), ({"processes": 8}, 1, 1)],
)
def test_processes_share_the_completions_of_a_step(values: dict[str, Any], at_once: int, accumulated: int) -> None:
    trainer = Plan("train", validate({"group_size": 4, "prompts_per_step": 2, **values})).trainer
    assert trainer["per_device_train_batch_size"] == at_once
    assert trainer["gradient_accumulation_steps"] == accumulated


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_another_one_for_what_it_reads_alone(kind: str) -> None:
    resolved = {"reward", "full_completion", "world_seed", *(["compared"] if kind == "one_step" else [])}
    resolved |= {"method_options", "alpha", "grpo", "micro_batch"} if kind == "train" else set()
    others = {key: id_of(kind, **{key: value}) for key, value in OTHER.items()}
    assert {key for key, other in others.items() if other != id_of(kind)} == READ[kind] - {"context"} | resolved
    assert len({*others.values()} - {id_of(kind)}) == len(READ[kind] - {"context"} | resolved)
    if kind not in ("train", "warm_start"):
        assert id_of(kind, at_step=2) != id_of(kind, at_step=2, method="grpo")  # that is of its training


def test_another_world_asks_other_questions() -> None:
    here, there = (Plan("train", validate({"world_seed": world})).load("test", 20) for world in (0, 1))
    assert here.rows == Plan("train", validate({})).task.load("test", limit=20).rows
    assert not {row.prompt for row in here.rows} & {row.prompt for row in there.rows}


def test_a_training_on_another_task_has_the_values_of_that_task() -> None:
    splits, lengths = {"olympiadbench": "whole", "default": "test"}, {"math": 7, "short": 1, "solution": 9}
    by_task = {"eval_split": splits, "max_completion_length": lengths}
    looked_at = {**by_task, "task": "olympiadbench", "trained_on": "math", "at_step": 4}
    made = Plan("evaluate", validate(looked_at))
    assert made.params.training_values == {"eval_split": "test", "max_completion_length": 7}
    assert (made.params.eval_split, made.params.max_completion_length) == ("whole", 9)
    trained = Plan("train", validate({**by_task, "task": "math", "max_steps": 4}))
    assert made.training and made.training.id == trained.id
    assert Plan("evaluate", validate(made.params.model_dump(mode="json"))).id == made.id  # as its record has it
    kept = Plan("evaluate", validate({**looked_at, "training_values": {"max_completion_length": 8}}))
    assert kept.training and kept.training.params.max_completion_length == 8


def test_answers_of_one_policy_are_drawn_by_seeds_of_their_own() -> None:
    drawn = Plan("gradients", validate({"seed": 2, "at_step": 4, "training_seed": 100}))
    assert drawn.training and drawn.training.id == id_of(seed=100, max_steps=4)
    assert Plan("gradients", validate({})).training is None


def test_runs_read_no_parameter_that_is_no_part_of_their_values() -> None:
    from gcpo.runs import evaluate, gradients, one_step

    resolved = {"world_seed", "skip_malformed", "memory_limit", "compared"}  # or no part of the result
    for kind, module in {"gradients": gradients, "evaluate": evaluate, "one_step": one_step}.items():
        read = set(re.findall(r"params\.(\w+)", inspect.getsource(module))) & set(Params.model_fields)
        assert read and read <= READ[kind] | resolved


def test_a_changed_default_is_a_new_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: id_of(method=name) for name in METHODS}
    hub = id_of(policy="a/b", entailment="c/d")
    stronger = dataclasses.replace(table.BOT, alpha=0.7)
    row = dataclasses.replace(METHODS["gcpo_bot"], factors=(stronger, table.RD))
    with monkeypatch.context() as changed:
        changed.setitem(METHODS, "gcpo_bot", row)
        assert id_of(method="gcpo_bot") != before["gcpo_bot"]
        assert id_of(method="gcpo_cd") == before["gcpo_cd"]
    with monkeypatch.context() as changed:
        changed.setitem(PINNED, "weight_decay", 0.1)
        assert not {id_of(method=name) for name in METHODS} & set(before.values())
    with monkeypatch.context() as changed:
        changed.setattr(plans, "SCHEMA", 99)
        assert not {id_of(method=name) for name in METHODS} & set(before.values())
    with monkeypatch.context() as changed:
        changed.setattr(world, "key", lambda *_: "another")
        assert id_of() != before["gcpo_bot"]
        assert id_of(policy="a/b", entailment="c/d") == hub  # which has nothing of the embedded world
    assert {name: id_of(method=name) for name in METHODS} == before


@pytest.mark.parametrize(
    ("kind", "values", "varied", "expected"),
    [
        ("train", {"method": "se"}, (), "se"),
        ("train", {"method": "se", "max_steps": 0}, ("max_steps",), "no training"),
        ("train", {"method": "r2vpo", "grpo": {"num_iterations": 2}}, ("grpo",), "r2vpo num_iterations=2"),
        ("train", {"method": "se", "method_options": {"form": "focal"}}, ("method_options",), "se form=focal"),
        ("train", {"method": "gcpo_bot", "alpha": 0.1}, ("alpha", "group_size"), "gcpo_bot alpha=0.1 group_size=4"),
        ("train", {"method": "se", "max_steps": 0, "policy": "x"}, ("policy", "max_steps"), "no training policy=x"),
        ("gradients", {"method": "se"}, (), "gradients"),
        ("evaluate", {"method": "se", "at_step": 4}, ("at_step",), "evaluate se at_step=4"),
    ],
)
def test_a_run_is_called_by_what_sets_it_apart(kind: str, values: Any, varied: Any, expected: str) -> None:
    assert label(kind, validate(values).model_dump(), varied) == expected


# --- TRL's settings ---------------------------------------------------------------------------------------------------


def test_every_setting_of_trl_s_config_is_known_by_its_default() -> None:
    """Another TRL may bring a setting that decides results, or another default: pin it in PINNED, or know that it does
    not matter, and write it to golden/trl_defaults.json."""
    fields = [field for field in dataclasses.fields(GRPOConfig) if field.init]
    found = {
        field.name: repr(field.default) if field.default is not dataclasses.MISSING else field.default_factory.__name__
        for field in fields
    }
    assert found == GOLDEN


@pytest.mark.parametrize("method", METHODS)
def test_the_config_that_runs_has_the_settings_that_the_plan_names(method: str) -> None:
    made = Plan("train", validate({**load_profile("laptop"), "method": method, "seed": 3}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that r2vpo and kl_cov want more steps is tested elsewhere
        config = GCPOConfig("x", method=method, use_cpu=True, **made.trainer)
    for name, value in made.trainer.items():
        assert getattr(config, name) == value, name
    assert config.resolved_method().constants() == {"power": 1.0} | made.values["method"]  # a default later than ids


@pytest.mark.parametrize("method", ["clip_cov", "egpo"])
def test_the_method_that_runs_is_the_plan_s_also_where_the_loss_clips_elsewhere(method: str) -> None:
    made = Plan("train", validate({"method": method, "grpo": {"epsilon": 0.1, "num_iterations": 2}}))
    assert GCPOConfig("x", method=method, use_cpu=True, **made.trainer).resolved_method() == made.method


@pytest.mark.parametrize(("asked", "given"), [(True, None), (False, False)])
def test_a_run_shares_prompts_where_its_parameters_say_so(asked: bool, given: bool | None, tmp_path: Path) -> None:
    assert configure(Plan("train", validate({"share_prompts": asked})), tmp_path, "tiny").share_prompts is given
