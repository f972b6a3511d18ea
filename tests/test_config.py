"""GCPOConfig: what a method sets in TRL's config, what the user's own settings change, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gcpo import GCPOConfig
from gcpo.methods import METHODS

G = 4
SWITCHES = ("loss_type", "scale_rewards", "epsilon_high", "sync_ref_model", "ref_model_sync_steps")


Make = Callable[..., GCPOConfig]


def make(folder: Path, **changes: Any) -> GCPOConfig:
    """A GCPOConfig of two groups per step."""
    values = {"per_device_train_batch_size": 2 * G, "num_generations": G, "use_cpu": True, "report_to": "none"}
    return GCPOConfig(**{"output_dir": str(folder), **values, **changes})


@pytest.fixture
def config(tmp_path: Path) -> Make:
    """As above, where every warning is an error."""

    def quiet(**changes: Any) -> GCPOConfig:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            return make(tmp_path, **changes)

    return quiet


def switches(config: GCPOConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in (*SWITCHES, "ref_model_mixup_alpha")}


# --- what a method sets ---------------------------------------------------------------------------------------------

GRPO = {
    "loss_type": "grpo",
    "scale_rewards": "group",
    "epsilon_high": None,
    "sync_ref_model": False,
    "ref_model_sync_steps": 512,
    "ref_model_mixup_alpha": 0.6,
}


@pytest.mark.parametrize("method", ["grpo", "gcpo_bot", "empo", "egpo", "cw_grpo", "clip_cov"])
def test_the_objective_is_gcpos_equation_1_and_everything_else_trls(config: Make, method: str) -> None:
    assert switches(config(method=method)) == GRPO


@pytest.mark.parametrize("method", ["dr_grpo", "seed_grpo", "dr_grpo*egpo"])
def test_dr_grpo_sets_both_switches(config: Make, method: str) -> None:
    assert switches(config(method=method)) == {**GRPO, "loss_type": "dr_grpo", "scale_rewards": "none"}


def test_dapo_averages_over_tokens_and_clips_higher(config: Make) -> None:
    made = config(method="dapo")
    assert switches(made) == {**GRPO, "loss_type": "dapo", "epsilon_high": 0.28}
    assert made.epsilon == 0.2


@pytest.mark.parametrize("method", ["care", "care*bot_only"])
def test_care_moves_its_reference_by_half_a_percent_every_ten_steps(config: Make, method: str) -> None:
    care = {"sync_ref_model": True, "ref_model_sync_steps": 10, "ref_model_mixup_alpha": 0.005}  # EMA 0.995
    assert switches(config(method=method, beta=1e-3)) == {**GRPO, **care}


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("gcpo_bot", {"loss_type": "bnpo"}),
        ("dr_grpo", {"loss_type": "dapo"}),
        ("gcpo_bot", {"scale_rewards": "batch"}),
        ("dr_grpo", {"scale_rewards": "group"}),
        ("dapo", {"epsilon_high": 0.4}),
        ("dapo", {"epsilon_high": 0.0}),
        ("gcpo_bot", {"sync_ref_model": True, "beta": 0.1}),
        ("care", {"ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.5, "beta": 0.1}),
        ("care", {"ref_model_mixup_alpha": 0.0, "beta": 0.1}),
    ],
    ids=str,
)
def test_what_the_user_sets_wins(config: Make, method: str, changes: dict[str, Any]) -> None:
    made = config(method=method, **changes)
    assert {name: getattr(made, name) for name in changes} == changes


@pytest.mark.parametrize(("given", "meant"), [(False, "none"), (True, "group")])
@pytest.mark.parametrize("method", ["gcpo_bot", "dr_grpo"])
def test_the_truth_values_of_scale_rewards_are_the_users_too(
    config: Make, method: str, given: bool, meant: str
) -> None:
    assert config(method=method, scale_rewards=given).scale_rewards == meant


def test_methods_may_be_a_list(config: Make) -> None:
    assert config(method=["bot_only", "egpo"]).method == config(method="bot_only*egpo").method == "bot_only*egpo"


def test_options_reach_the_method(config: Make) -> None:
    made = config(method="se", method_options={"form": "focal"})
    assert made._options() == {"form": "focal"}
    assert config(method="se")._options() == {}


# --- strictly on-policy ---------------------------------------------------------------------------------------------

TWO_STEPS: list[dict[str, Any]] = [
    {"num_iterations": 2},
    {"steps_per_generation": 2},
    {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
    {"generation_batch_size": 4 * G},
    {"num_iterations": 2, "gradient_accumulation_steps": 3},
]
ONE_STEP: list[dict[str, Any]] = [
    {},
    {"gradient_accumulation_steps": 2},
    {"steps_per_generation": 2, "gradient_accumulation_steps": 4},
    {"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 1},
]


@pytest.mark.parametrize("changes", ONE_STEP, ids=str)
@pytest.mark.parametrize("method", ["r2vpo", "kl_cov"])
def test_on_policy_a_method_of_ratios_says_once_that_it_equals_grpo(
    tmp_path: Path, method: str, changes: dict[str, Any]
) -> None:
    with pytest.warns(UserWarning, match="equals GRPO") as caught:
        made = make(tmp_path, method=method, **changes)
    assert made.on_policy
    (about,) = [warning for warning in caught if "GRPO" in str(warning.message)]
    message = str(about.message)
    assert message.startswith(f"{method}: ") and "it equals GRPO" in message
    assert "num_iterations=2" in message and "steps_per_generation above gradient_accumulation_steps" in message
    assert about.filename == __file__  # it points to the settings


@pytest.mark.parametrize("changes", TWO_STEPS, ids=str)
@pytest.mark.parametrize("method", ["r2vpo", "kl_cov"])
def test_off_policy_a_method_of_ratios_says_nothing(config: Make, method: str, changes: dict[str, Any]) -> None:
    assert not config(method=method, **changes).on_policy


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("r2vpo", "kl_cov", "care")])
def test_other_methods_say_nothing_on_policy(config: Make, method: str) -> None:
    assert config(method=method).on_policy


def test_a_product_says_which_part_has_no_effect(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"bot_only\*r2vpo: .*its part in the loss equals GRPO"):
        make(tmp_path, method="bot_only*r2vpo")


def test_ratios_are_1_on_policy_whoever_samples(tmp_path: Path) -> None:
    """vLLM's correction is another ratio, of the training to the sampling model, by which TRL multiplies the loss."""
    with pytest.warns(UserWarning, match="equals GRPO"):
        assert make(tmp_path, method="r2vpo", use_vllm=True, vllm_importance_sampling_correction=True).on_policy


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["rd_only", "seed_grpo", "qhawkeye", "egpo*bot_only"])
def test_alpha_is_silent_where_a_method_has_one(config: Make, method: str) -> None:
    assert config(method=method, alpha=0.3).alpha == 0.3


@pytest.mark.parametrize("method", ["grpo", "dapo", "empo", "egpo", "cw_grpo", "clip_cov"])
def test_alpha_without_a_use_is_pointed_out(tmp_path: Path, method: str) -> None:
    with pytest.warns(UserWarning, match=f"{method} has no alpha: alpha=0.3 changes nothing") as caught:
        make(tmp_path, method=method, alpha=0.3)
    assert caught[0].filename == __file__


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"method": "gcpo_bt"}, r"Unknown method 'gcpo_bt'\. Did you mean 'gcpo_bot'\?"),
    ({"method": "bot_only*eg_po"}, r"Unknown method 'eg_po'\. Did you mean 'egpo'\?"),
    ({"method": "se", "method_options": {"fom": "linear"}}, r"se has no option 'fom'\. Did you mean 'form'\?"),
    ({"method": "se", "method_options": {"form": "cubic"}}, r"form is 'cubic', expected one of linear, "),
    ({"method": "grpo", "method_options": {"form": "linear"}}, r"grpo has no option 'form'\. It has none"),
    ({"method": "se", "method_options": '{"form": "linear"}'}, r"method_options must be a mapping"),
    ({"alpha": -0.1}, r"alpha must be at least 0, got -0\.1"),
    ({"alpha": float("nan")}, r"alpha must be at least 0, got nan"),
    ({"reward_range": (1.0, 1.0)}, r"reward_range must be \(low, high\) with low < high, got \(1\.0, 1\.0\)"),
    ({"reward_range": (2.0, 0.0)}, r"reward_range must be \(low, high\)"),
    ({"correctness_range": (1.0, 1.0)}, r"correctness_range must be \(low, high\)"),
    ({"entailment_threshold": 35.0}, r"entailment_threshold is a probability, got 35"),
    ({"method": "gcpo_shuffled", "per_device_train_batch_size": G}, r"one group\. Raise per_device_train_batch_size"),
    ({"method": "care"}, r"care asks a reference model.*set beta above 0"),
    ({"method": "bot_only*care", "beta": 0.0}, r"bot_only\*care asks a reference model.*set beta above 0"),
    *(
        (
            {"method": method, "importance_sampling_level": "sequence"},
            r"weighs tokens.*importance_sampling_level=\"token\"",
        )
        for method in ("cw_grpo", "clip_cov", "bot_only*cw_grpo")
    ),
    *(
        (
            {"method": method, "multi_objective_aggregation": "normalize_then_sum", "beta": 0.1},
            r"changes the summed reward.*set \"sum_then_normalize\"",
        )
        for method in ("dapo", "empo", "care", "care_agreement")
    ),
]


@pytest.mark.parametrize(("changes", "message"), IMPOSSIBLE, ids=lambda value: str(value)[:60])
def test_impossible_settings_are_refused_before_any_work(config: Make, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize("method", ["grpo", "gcpo_bot", "seed_grpo", "egpo"])
def test_a_group_of_one_is_refused_with_the_setting_that_makes_it(config: Make, method: str) -> None:
    with pytest.raises(ValueError, match=r"num_generations must be at least 2, got 1"):
        config(method=method, num_generations=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "kl_cov", "importance_sampling_level": "sequence", "num_iterations": 2},
        {"method": "r2vpo", "importance_sampling_level": "sequence", "num_iterations": 2},
        {"method": "egpo", "importance_sampling_level": "sequence"},
        {"method": "gcpo_bot", "multi_objective_aggregation": "normalize_then_sum"},
        {"method": "gcpo_shuffled"},
        {"method": "care", "beta": 1e-6},
    ],
    ids=str,
)
def test_what_a_method_can_work_with_is_accepted(config: Make, changes: dict[str, Any]) -> None:
    made = config(**changes)
    assert all(getattr(made, name) == value for name, value in changes.items())
