"""Fields of TRL's GRPOConfig that a parameter file may set under ``grpo``, and their values."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from gcpo.errors import nearest

# Fields of GRPOConfig that parameters of another name decide; a parameter of the same name decides its own.
DECIDED = {
    "num_generations": "group_size",
    "per_device_train_batch_size": "prompts_per_step",
    "output_dir": "profile",
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed", "parallelism_config"), "accelerate"),
}
# Fields of GRPOConfig that a run leaves alone, by the reason why.
REFUSED = {
    "is a secret or a place, which every record would keep: set HF_TOKEN in the environment, and push the finished "
    "policy": (
        "push_to_hub hub_token hub_model_id hub_private_repo hub_strategy hub_always_push hub_revision run_name "
        "log_completions_hub_repo logging_dir trackio_space_id trackio_bucket_id trackio_static_space_id"
    ),
    "is the runner's, whose records and resumption rest on it: leave it out": (
        "log_completions logging_strategy save_strategy save_total_limit save_only_model save_on_each_node "
        "resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint auto_find_batch_size "
        "remove_unused_columns disable_tqdm reward_weights local_rank"
    ),
    "does nothing in a run, which loads its own policy, counts steps (max_steps) and asks held-out questions itself: "
    "leave it out": (
        "num_train_epochs do_train do_eval do_predict eval_strategy eval_steps eval_delay eval_on_start "
        "per_device_eval_batch_size num_generations_eval prediction_loss_only load_best_model_at_end "
        "metric_for_best_model greater_is_better model_init_kwargs trust_remote_code"
    ),
}
AT_LEAST_ONE = ("num_iterations", "gradient_accumulation_steps", "steps_per_generation")  # fields of GRPOConfig


def no_truth(value: Any) -> Any:
    """Refuse a truth value as a number, which pydantic would read as 0 or 1."""
    if isinstance(value, bool):
        raise ValueError("Input should be a number")
    return value


def typed(fields: Mapping[str, Any], parameters: Container[str]) -> dict[str, Any]:
    """Return fields of GRPOConfig as values of the types that TRL declares.

    Raises:
        ValueError: a field that there is not, that one of our own ``parameters`` decides, or that a run leaves alone.
    """
    from trl import GRPOConfig  # seconds to import, so only when used

    valid = get_type_hints(GRPOConfig)
    for name in fields:
        for reason, names in REFUSED.items():
            if name in names.split():
                raise ValueError(f"{name!r} {reason}")
        if name in DECIDED or name in parameters:
            raise ValueError(f"{name!r} is set by the parameter {DECIDED.get(name, name)!r}; set that instead")
        if name not in valid:
            raise ValueError(f"GRPOConfig has no field {name!r}.{nearest(name, sorted(valid))[:200]}")
    found = {name: _typed(name, value, valid[name]) for name, value in fields.items()}
    for name in AT_LEAST_ONE:
        if found.get(name) is not None and found[name] < 1:
            raise ValueError(f"{name} must be at least 1, got {found[name]}")
    return found


def _typed(name: str, value: Any, kind: Any) -> Any:
    kinds = get_args(kind) or (kind,)
    try:
        if bool not in kinds and {int, float}.intersection(kinds):
            no_truth(value)
        return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{name}: {error.errors()[0]['msg']} (got {value!r})") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error} (got {value!r})") from None
