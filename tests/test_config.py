"""GCPOConfig: what a method sets in TRL's config, what the user's own settings change, and what is refused."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import OFF_POLICY, G, case_id, settings
from trl import TrlParser

from gcpo import GCPOConfig
from gcpo.methods import METHODS, get_method

Make = Callable[..., GCPOConfig]

# What no method changes unless its row says so: the objective of GCPO's Eq. 1, and TRL's schedule of a reference.
STILL = {"sync_ref_model": False, "ref_model_sync_steps": 512, "ref_model_mixup_alpha": 0.6}
GRPO = {"loss_type": "grpo", "scale_rewards": "group", "epsilon_high": None, **STILL}
DR_GRPO = {"loss_type": "dr_grpo", "scale_rewards": "none"}
CARE = {"sync_ref_model": True, "ref_model_sync_steps": 10, "ref_model_mixup_alpha": 0.005}  # EMA 0.995


def config(folder: Path, **changes: Any) -> GCPOConfig:
    """Settings of two groups per step."""
    return GCPOConfig(**settings(folder, **{"per_device_train_batch_size": 2 * G, **changes}))


@pytest.fixture
def quiet(tmp_path: Path) -> Make:
    """As above, where every warning is an error."""

    def make(**changes: Any) -> GCPOConfig:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            return config(tmp_path, **changes)

    return make


def test_a_command_line_gives_all_settings(tmp_path: Path) -> None:
    given = ["--method", "seed_grpo", "--reward_range", "0", "1", "--correctness_range", "-1", "1"]
    given += ["--method_options", '{"form": "linear"}', "--scale_rewards", "none"]
    plain = ["--output_dir", str(tmp_path), "--bf16", "false", "--use_cpu", "true"]
    (parsed,) = TrlParser((GCPOConfig,)).parse_args_and_config([*plain, *given])
    assert (parsed.reward_range, parsed.correctness_range, parsed.scale_rewards) == ((0, 1), (-1, 1), "none")
    assert parsed.resolved_method() == get_method("seed_grpo", form="linear", seed=parsed.seed)
    (default,) = TrlParser((GCPOConfig,)).parse_args_and_config(plain)
    assert default.method == "gcpo_bot" and default.reward_range is None


@pytest.mark.parametrize("given", [1.0, "01", (0, 1, 2), ("0", "1"), (0, float("inf")), (1, 0)], ids=str)
def test_a_range_that_is_no_two_numbers_is_refused(quiet: Make, given: Any) -> None:
    for name in ("reward_range", "correctness_range"):
        with pytest.raises(ValueError, match=f"^{name} must be"):
            quiet(**{name: given})


# --- what a method sets ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        *((method, {}) for method in ("grpo", "gcpo_bot", "empo", "cw_grpo", "clip_cov")),
        *((method, DR_GRPO) for method in ("dr_grpo", "seed_grpo")),
        ("dapo", {"loss_type": "dapo", "epsilon_high": 0.28}),
        ("care", CARE),
    ],
    ids=case_id,
)
def test_a_method_sets_its_objective_and_the_rest_is_trls(quiet: Make, method: str, expected: dict[str, Any]) -> None:
    made = quiet(method=method, beta=1e-3 if "care" in method else 0.0)
    assert {name: getattr(made, name) for name in GRPO} == {**GRPO, **expected}
    assert made.epsilon == 0.2


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("gcpo_bot", {"loss_type": "bnpo"}),
        ("dr_grpo", {"loss_type": "dapo"}),
        ("dr_grpo", {"scale_rewards": "group"}),
        ("dapo", {"epsilon_high": 0.0}),
        ("gcpo_bot", {"sync_ref_model": True, "beta": 0.1}),
        ("care", {"ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.0, "beta": 0.1}),
    ],
    ids=case_id,
)
def test_what_the_user_sets_wins(quiet: Make, method: str, changes: dict[str, Any]) -> None:
    made = quiet(method=method, **changes)
    assert {name: getattr(made, name) for name in changes} == changes


# --- strictly on-policy ---------------------------------------------------------------------------------------------

# vLLM's correction is another ratio, of the training to the sampling model, by which TRL multiplies the loss.
STEPS: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"steps_per_generation": 2, "gradient_accumulation_steps": 4}, True),
    ({"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 1}, True),
    ({"use_vllm": True, "vllm_importance_sampling_correction": True}, True),
    (OFF_POLICY, False),
    ({"steps_per_generation": 2}, False),
    ({"generation_batch_size": 4 * G}, False),
    ({"num_iterations": 2, "gradient_accumulation_steps": 3}, False),
]


@pytest.mark.parametrize(("changes", "on_policy"), STEPS, ids=case_id)
@pytest.mark.parametrize("method", ["r2vpo", "kl_cov"])
def test_on_policy_a_method_of_ratios_says_once_that_it_equals_grpo(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, method: str, changes: dict[str, Any], on_policy: bool
) -> None:
    assert config(tmp_path, method=method, **changes).on_policy == on_policy
    said = [warning for warning in recwarn if "GRPO" in str(warning.message)]
    assert [warning.filename for warning in said] == [__file__] * on_policy  # which points to the settings


def test_other_methods_say_nothing_on_policy(quiet: Make) -> None:
    for method in METHODS.keys() - {"r2vpo", "kl_cov"}:
        assert quiet(method=method, beta=1e-6).on_policy


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["alpha", "alpha_end"])
def test_alpha_without_a_use_is_pointed_out(tmp_path: Path, name: str) -> None:
    with pytest.warns(UserWarning, match=f"grpo has no alpha: {name}=0.3") as caught:
        config(tmp_path, method="grpo", **{name: 0.3})
    assert caught[0].filename == __file__


ONE_ROW = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": G}
BY_SEQUENCE = {"importance_sampling_level": "sequence"}
APART = {"multi_objective_aggregation": "normalize_then_sum", "beta": 0.1}
CUT = {"mask_truncated_completions": True}
# Methods, settings that they cannot work with, and the setting that the refusal names.
CONFLICTS: list[tuple[str, dict[str, Any], str]] = [
    ("bot_only", {"entailment_threshold": -0.1}, "entailment_threshold=-0.1"),
    ("gcpo_shuffled", {"per_device_train_batch_size": G}, "per_device_train_batch_size"),
    ("care", {"beta": 0.0}, "beta"),
    *((method, BY_SEQUENCE, "importance_sampling_level") for method in ("clip_cov", "cw_grpo")),
    *((method, APART, "multi_objective_aggregation") for method in ("dapo", "care", "care_agreement", "empo")),
    ("dapo", CUT, "mask_truncated_completions"),
    ("dapo", {"max_completion_length": None}, "max_completion_length"),
    *((method, ONE_ROW, "per_device_train_batch_size") for method in ("clip_cov", "kl_cov")),
]


@pytest.mark.parametrize(("method", "changes", "named"), CONFLICTS, ids=case_id)
def test_impossible_settings_are_refused_at_once(quiet: Make, method: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"^{method} .*{named}"):
        quiet(method=method, **changes)


@pytest.mark.parametrize("given", ["{", "[1]", [1]])
def test_options_that_are_no_mapping_are_refused(quiet: Make, given: Any) -> None:
    with pytest.raises(ValueError, match="method_options is"):
        quiet(method_options=given)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "clip_cov", **ONE_ROW, "per_device_train_batch_size": 2},
        {"method": "cw_grpo", **ONE_ROW},
        *({"method": method, "alpha": 0.3} for method in ("rd_only", "seed_grpo", "qhawkeye")),
    ],
    ids=case_id,
)
def test_what_a_method_can_work_with_is_accepted(quiet: Make, changes: dict[str, Any]) -> None:
    made = quiet(**changes)
    assert all(getattr(made, name) == value for name, value in changes.items())


def test_a_moving_reference_is_refused_where_models_are_shared(quiet: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint keeps it whole, and there no process has the whole of it."""

    def refused() -> None:
        with pytest.raises(ValueError, match="sync_ref_model"):
            quiet(method="care", beta=0.1)
        assert not quiet(method="gcpo_bot", beta=0.1).sync_ref_model

    with monkeypatch.context() as patch:
        patch.setattr("gcpo.trainer.config.is_deepspeed_zero3_enabled", lambda: True)
        refused()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    refused()
