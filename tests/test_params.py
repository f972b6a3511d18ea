"""Parameters: every mistake is named with its key, its value and the way out, and all files and notebooks are good."""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import types
from pathlib import Path
from typing import Any

import jsonschema
import nbformat
import papermill
import pytest

from gcpo import paths
from gcpo.methods import METHODS
from gcpo.runs import fields
from gcpo.runs.grids import expand, fitting, grids
from gcpo.runs.params import Params, from_notebook, schema, validate
from gcpo.runs.plan import KINDS
from gcpo.runs.profiles import ParameterError, load_profile, parse_yaml, profiles
from gcpo.tasks import TASKS


def refused(**values: Any) -> str:
    """The message about values that are not accepted."""
    with pytest.raises(ParameterError) as raised:
        validate(values, "test.yaml")
    message = str(raised.value)
    assert message.startswith(("Bad test.yaml: ", "Bad test.yaml:\n"))
    return message


def parameters_cell(notebook: str) -> dict[str, Any]:
    """The names and literals of the cell that papermill replaces."""
    cells = nbformat.read(paths.NOTEBOOKS / f"{notebook}.ipynb", as_version=4).cells
    (cell,) = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    return {line.targets[0].id: ast.literal_eval(line.value) for line in ast.parse(cell.source).body}


# --- names ----------------------------------------------------------------------------------------------------------


def test_defaults_are_valid() -> None:
    assert validate({}) == Params()


@pytest.mark.parametrize(
    ("values", "key", "nearest"),
    [
        ({"grop_size": 4}, "grop_size", "group_size"),
        ({"learningrate": 1}, "learningrate", "learning_rate"),
        ({"method": "gcpo_bt"}, "method", "gcpo_bot"),
        ({"method": "rdonly"}, "method", "rd_only"),
        ({"task": "tinymaths"}, "task", "tinymath"),
        ({"task": "narrativqa"}, "task", "narrativeqa"),
        ({"alpha": {"tinymth": 0.1, "default": 1}}, "alpha", "tinymath"),
        ({"report_to": "tensorbord"}, "report_to", "tensorboard"),
        ({"grpo": {"num_iteration": 2}}, "grpo", "num_iterations"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest_one(values: dict[str, Any], key: str, nearest: str) -> None:
    message = refused(**values)
    assert re.search(rf"^Bad test.yaml: {key}: .*[Dd]id you mean '{nearest}'\?", message, re.MULTILINE), message


def test_an_unknown_name_that_is_like_nothing_comes_with_the_valid_ones() -> None:
    message = refused(xyzzy=1)
    assert "xyzzy: unknown parameter. Valid names: profile, task, method" in message
    assert all(name in message for name in Params.model_fields)
    assert all(name in refused(method="xyzzy") for name in METHODS)
    assert all(name in refused(task="zzz") for name in TASKS)


def test_every_problem_is_listed_at_once() -> None:
    message = refused(alpha=-1, group_size="four", tmperature=1)
    assert {line.split(":")[0].strip() for line in message.splitlines()[1:]} == {"group_size", "alpha", "tmperature"}


# --- types and ranges -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("group_size", "four"),
        ("group_size", 4.5),
        *(("group_size", value) for value in (0, 1)),
        *(("temperature", value) for value in (0, 1e-320, math.nan)),
        ("max_steps", -1),
        ("max_steps", True),
        *(("seed", value) for value in ("1.5", None, 0.5, -1, 2**32)),
        ("alpha", "strong"),
        ("alpha", -0.1),
        ("alpha", math.nan),
        ("learning_rate", math.inf),
        ("beta", [0.1]),
        ("entailment_threshold", 1.1),
        ("dtype", "float16"),
        ("task", 3),
        ("task", ["tinyqa"]),
        ("method", None),
        ("policy", 7),
        ("gradient_parameters", "lm_head"),
        *(("profile", name) for name in ("../elsewhere", "x" * 300)),
        ("grpo", 3),
        *((name, "") for name in ("policy", "embedder", "entailment")),
        ("lora_rank", 10**6),
        ("group_size", 10**20),
        ("max_steps", 10**12),
        ("learning_rate", 1e30),
    ],
)
def test_a_wrong_value_is_named_with_its_key(key: str, value: Any) -> None:
    (line,) = refused(**{key: value}).splitlines()
    assert line.startswith(f"Bad test.yaml: {key}: ")
    assert line.endswith(f" (got {value!r})")


@pytest.mark.parametrize("key", ["learning_rate", "alpha", "beta", "temperature", "entailment_threshold"])
def test_5e_5_is_a_number_from_a_file_and_from_papermill(key: str) -> None:
    assert getattr(validate(parse_yaml(f"{key}: 5e-5", "x")), key) == 5e-5
    assert getattr(validate({key: "5e-5"}), key) == 5e-5  # as papermill reads a file, by YAML 1.1


def test_numbers_in_a_text_are_accepted_where_whole_numbers_are_wanted() -> None:
    found = validate({"seed": "3", "group_size": 1e1, "max_steps": 2.0})
    assert (found.seed, found.group_size, found.max_steps) == (3, 10, 2)


@pytest.mark.parametrize(
    ("values", "key", "reason"),
    [
        ({"method": "gcpo_shuffled", "prompts_per_step": 1}, "prompts_per_step", "gcpo_shuffled .* needs at least 2"),
        ({"method_options": {"forn": "linear"}}, "method", "gcpo_bot has no option 'forn'. Did you mean 'form'"),
        (
            {"max_completion_length": {"tinymath": 3}},
            "max_completion_length",
            "no value for task 'tinyqa' and no defau",
        ),
        ({"alpha": {3: 0.1, "default": 1}}, "alpha", "Unknown task '3'"),
        ({"train_limit": 1}, "train_limit", "1 questions are fewer than the 2 of a step"),
        *(({"profile": name}, "profile", f"outputs/{name} has another use") for name in ("reference", "world")),
        ({"alpha": 0.2, "method_options": {"alpha": 0.6}}, "method_options", "alpha is a parameter of its own"),
        ({"method_options": {"form": {"a": 1}}}, "method_options", "form is .* a number, a word or a list of them"),
        ({"method": "egpo", "method_options": {"correct": 1}}, "method_options", "a value of the wrong type"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs", "tokenize is what a run gives"),
        ({"chat_template_kwargs": {"add_generation_prompt": 0}}, "chat_template_kwargs", "add_generation_prompt is"),
        ({"method_options": {(1, 2): 3}}, "method_options.*", "Input should be a valid string"),
        ({"micro_batch": 3}, "micro_batch", "3 does not divide the 8 completions"),
        ({"trained_on": "math"}, "trained_on", "set both"),
        ({"training_seed": 1}, "training_seed", "set both"),
        ({"trained_on": "mth", "at_step": 2}, "trained_on", "Unknown task 'mth'. Did you mean 'math'"),
        ({"processes": 3}, "processes", "3 do not divide the 8 completions"),
        ({"processes": 4, "micro_batch": 4}, "micro_batch", "not divide the 2 completions .* each of 4 processes"),
        ({"processes": 2, "accelerate": "zero"}, ".*accelerate 'zero'. Did you mean 'zero3'.*names", "ddp"),
        ({"micro_batch": 4, "grpo": {"gradient_accumulation_steps": 2}}, "micro_batch", "keep one"),
        ({"grpo": {"num_iterations": 3}}, "save_steps", "from step 2 would .* a multiple of 3, as 3 "),
        ({"micro_batch": 4, "save_steps": 3, "grpo": {"steps_per_generation": 4}}, "save_steps", "of 2, as 4 "),
        ({"micro_batch": 4, "save_steps": 3, "grpo": {"generation_batch_size": 16}}, "save_steps", "of 2, as 4 "),
    ],
)
def test_an_impossible_combination_is_an_error(values: dict[str, Any], key: str, reason: str) -> None:
    assert re.search(rf"^Bad test.yaml: {key}: .*{reason}", refused(**values), re.MULTILINE)


def test_values_at_the_edge_of_what_is_possible_are_accepted() -> None:
    for values in (
        {"group_size": 2, "prompts_per_step": 1, "max_steps": 0, "eval_samples": 0, "alpha": 0, "beta": 0},
        {"entailment_threshold": 0},
        {"entailment_threshold": 1},
        {"method": "gcpo_shuffled", "prompts_per_step": 2},
        {"save_steps": 2, "micro_batch": 2, "grpo": {"num_iterations": 2, "steps_per_generation": 2}},
        {"save_steps": 4, "grpo": {"num_iterations": 3}},  # no checkpoint before the last step
    ):
        accepted = validate(values).model_dump(mode="json")
        assert {key: accepted[key] for key in values} == values


# --- a value for each task ------------------------------------------------------------------------------------------


def test_a_mapping_gives_each_task_its_value() -> None:
    longest = {"tinymath": 48, "default": 16}
    assert validate({"task": "tinymath", "max_completion_length": longest}).max_completion_length == 48
    assert validate({"task": "tinyqa", "max_completion_length": longest}).max_completion_length == 16
    assert validate({"max_completion_length": longest}).max_completion_length == 16  # the default task is tinyqa
    assert validate({"max_completion_length": {"tinyqa": 12}}).max_completion_length == 12


def test_a_value_of_none_for_a_task_is_its_value() -> None:
    revision = {"tinyqa": None, "default": "main"}
    assert validate({"policy_revision": revision}).policy_revision is None
    assert validate({"policy_revision": revision, "task": "tinymath"}).policy_revision == "main"


@pytest.mark.parametrize(
    ("task", "lengths"),
    [
        *((task, (64, 48, 16)) for task in ("tinyqa", "narrativeqa", "qasper", "hotpotqa", "mmlu_stem")),
        *((task, (1024, 512, 16)) for task in ("math", "aime24", "olympiadbench", "amc23", "minerva")),
        ("gsm8k", (512, 320, 16)),
        ("tinymath", (64, 48, 40)),
        ("tinymath_think", (64, 48, 48)),
    ],
)
def test_a_task_says_how_long_its_answers_are(task: str, lengths: tuple[int, ...]) -> None:
    for profile, length in zip(("paper", "single_gpu", "laptop"), lengths, strict=True):
        assert validate({**load_profile(profile), "task": task}).max_completion_length == length


def test_a_length_of_answers_goes_before_the_default_and_after_the_task() -> None:
    lengths = {"gsm8k": 3, "solution": 2, "default": 1}
    found = [validate({"task": task, "max_completion_length": lengths}) for task in ("gsm8k", "math", "tinyqa")]
    assert [made.max_completion_length for made in found] == [3, 2, 1]
    message = refused(task="math", max_completion_length={"short": 64, "gsm8k": 3})
    assert "no value for task 'math', 'solution' answers, and no default, only for short" in message


def test_the_value_of_a_task_is_checked_too() -> None:
    assert re.search(r"alpha: .*\(got 'strong'\)", refused(alpha={"default": "strong"}))


def test_the_task_itself_has_no_value_for_each_task() -> None:
    assert "task: Input should be a valid string" in refused(task={"default": "tinyqa"}, alpha={"default": 1})


# --- GRPOConfig -----------------------------------------------------------------------------------------------------


def test_numbers_inside_grpo_are_numbers_and_texts_stay_texts() -> None:
    given = {"epsilon_high": "5e-5", "max_grad_norm": "1e0", "optim_args": "2024", "bf16": "on", "num_iterations": "2"}
    found = validate({"grpo": given}).grpo
    assert found == {
        "epsilon_high": 5e-5,
        "max_grad_norm": 1.0,
        "optim_args": "2024",
        "bf16": True,
        "num_iterations": 2,
    }
    assert isinstance(found["optim_args"], str)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("epsilon", "abc", "epsilon: Input should be a valid number, unable to parse string as a number (got 'abc')"),
        ("epsilon", True, "epsilon: Input should be a number (got True)"),
        ("epsilon", math.inf, "epsilon: Input should be a finite number (got inf)"),
        ("num_iterations", 2.5, "num_iterations: Input should be a valid integer, got a number with a fractional part"),
        ("num_iterations", 0, "num_iterations: Input should be greater than or equal to 1 (got 0)"),
        ("optim", 3, "optim: Input should be 'adamw_torch'"),
        ("generation_kwargs", [1], "generation_kwargs: Input should be a valid dictionary"),
        ("generation_kwargs", '{"max_new_tokens": 1}', "generation_kwargs: Input should be a valid dictionary"),
        ("accelerator_config", "/etc/passwd", "accelerator_config: Input should be a valid dictionary"),
        ("hub_token", "SECRET", "'hub_token' is a secret or a place, .*: set HF_TOKEN in the environment"),
        ("push_to_hub", True, "'push_to_hub' is a secret or a place"),
        ("run_name", "mine", "'run_name' is a secret or a place"),
        ("resume_from_checkpoint", "x", "'resume_from_checkpoint' is the runner's"),
        ("remove_unused_columns", True, "'remove_unused_columns' is the runner's"),
        ("num_train_epochs", 3, "'num_train_epochs' does nothing in a run"),
        ("model_init_kwargs", {"trust_remote_code": True}, "'model_init_kwargs' does nothing in a run"),
        ("deepspeed", "x.json", "'deepspeed' is set by the parameter 'accelerate'"),
    ],
)
def test_a_grpo_field_of_another_type_or_that_is_not_a_run_s_is_one_line(field: str, value: Any, said: str) -> None:
    (line,) = refused(grpo={"top_p": 0.9, field: value}).splitlines()
    assert re.search(rf"^Bad test.yaml: grpo: {said.replace('(', '[(]').replace(')', '[)]')}", line), line
    assert "SECRET" not in line


def test_every_field_that_a_run_leaves_alone_is_one_of_this_trl() -> None:
    from trl import GRPOConfig

    names = set(fields.REFUSED)
    assert names - {"logging_dir"} <= set(inspect.signature(GRPOConfig).parameters)  # an older transformers has that
    assert {*fields.BOUNDS, *fields.DECIDED, *fields.ADDRESSES} <= set(inspect.signature(GRPOConfig).parameters)
    secret = {name for name in inspect.signature(GRPOConfig).parameters if "hub" in name or "token" in name}
    assert secret - {"include_num_input_tokens_seen", "average_tokens_across_devices"} <= names


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("num_generations", "group_size"),
        ("per_device_train_batch_size", "prompts_per_step"),
        ("output_dir", "profile"),
        *((name, name) for name in ("learning_rate", "beta", "temperature", "max_completion_length", "max_steps")),
        *((name, name) for name in ("save_steps", "seed")),
    ],
)
def test_a_grpo_field_that_a_parameter_owns_is_an_error_that_names_it(name: str, parameter: str) -> None:
    assert f"grpo: {name!r} is set by the parameter {parameter!r}" in refused(grpo={name: 1})


def test_every_parameter_that_grpo_config_knows_too_is_owned() -> None:
    from trl import GRPOConfig

    for name in set(Params.model_fields) & set(inspect.signature(GRPOConfig).parameters):
        assert f"{name!r} is set by the parameter" in refused(grpo={name: 1}), name


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("epsilon", [0, 5.0], [-1, -1e-9]),
        ("epsilon_high", [None, 0.28], [-0.1]),
        ("delta", [None, 1.5], [0, -1]),
        ("top_p", [0.1, 1], [0, 1.01, 5]),
        ("min_p", [None, 0, 1], [-0.1, 1.1]),
        ("top_k", [0, 50], [-1]),
        ("repetition_penalty", [0.5, 2], [0, -1]),
        ("top_entropy_quantile", [0, 0.2, 1], [-0.1, 9]),
        ("weight_decay", [0, 0.1], [-1]),
        ("max_grad_norm", [0, 1], [-1]),
        ("adam_beta2", [0, 0.999], [1, -0.1]),
        ("adam_epsilon", [1e-8], [0, -1]),
        ("warmup_steps", [0, 0.1, 10], [-1]),
        ("label_smoothing_factor", [0, 1], [2]),
        ("vllm_server_port", [1, 65535], [0, 65536]),
    ],
)
def test_a_number_of_grpo_has_its_range(field: str, good: list[Any], bad: list[Any]) -> None:
    assert [validate({"grpo": {field: value}}).grpo[field] for value in good] == good
    for value in bad:
        (line,) = refused(grpo={field: value}).splitlines()
        assert line.startswith(f"Bad test.yaml: grpo: {field}: ") and line.endswith(f"(got {value!r})")


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        *((key, "max_completion_length") for key in ("max_new_tokens", "max_length", "max_tokens")),
        *((key, "group_size") for key in ("num_return_sequences", "n")),
        *((key, "parameter of that name") for key in ("temperature", "seed")),
        *((key, "field of that name of grpo") for key in ("top_k", "top_p", "min_p", "repetition_penalty")),
        *((key, "tokenizer") for key in ("eos_token_id", "pad_token_id", "stop_token_ids")),
        *((key, "leave it out") for key in ("num_beams", "do_sample", "return_dict_in_generate", "stop_strings")),
    ],
)
def test_generation_kwargs_override_nothing_that_has_an_owner(key: str, instead: str) -> None:
    for engine in ({}, {"use_vllm": True}):
        (line,) = refused(grpo={"generation_kwargs": {key: 1}, **engine}).splitlines()
        assert line.startswith(f"Bad test.yaml: grpo: generation_kwargs: {key!r} is ") and instead in line


def test_generation_kwargs_have_names_that_their_engine_knows() -> None:
    assert "no 'nonsense'. Valid names: " in refused(grpo={"generation_kwargs": {"nonsense": 5}})
    assert "Did you mean 'typical_p'?" in refused(grpo={"generation_kwargs": {"tipical_p": 0.9}})
    for own in ({"suppress_tokens": [1], "no_repeat_ngram_size": 3}, {"cache_implementation": "static"}):
        assert validate({"grpo": {"generation_kwargs": own}}).grpo["generation_kwargs"] == own
    assert validate({"grpo": {"use_vllm": True, "generation_kwargs": {"bad_words": ["x"]}}})


# --- secrets, adapters, long messages -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"grpo": {"vllm_server_base_url": "http://bob:SECRET@127.0.0.1:8000"}}, "grpo.vllm_server_base_url"),
        ({"grpo": {"vllm_server_base_url": "http://SECRET@host"}}, "grpo.vllm_server_base_url"),
        ({"grpo": {"vllm_server_host": "bob:SECRET@host"}}, "grpo.vllm_server_host"),
        ({"grpo": {"vllm_server_host": "SECRET@host"}}, "grpo.vllm_server_host"),
        ({"grpo": {"optim_args": "to=postgres://bob:SECRET@host/x"}}, "grpo.optim_args"),
        ({"grpo": {"generation_kwargs": {"a": [{"b": "ftp://:SECRET@host"}]}}}, "grpo.generation_kwargs.a.b"),
        ({"grpo": {"generation_kwargs": {"http://a:SECRET@host": 1}}}, "grpo.generation_kwargs"),
        ({"policy": "https://bob:SECRET/1@host/model"}, "policy"),
        ({"policy": {"tinyqa": "https://host/m?revision=2&token=SECRET"}}, "policy.tinyqa"),
        ({"embedder": "bob:SECRET@host"}, "embedder"),
        ({"entailment": "hf_SECRETabcdefghijklmnop"}, "entailment"),
        ({"system_prompt": "Ask http://bob:SECRET@host first."}, "system_prompt"),
        ({"system_prompt": "Authorization: Basic SECRETabc="}, "system_prompt"),
        ({"chat_template_kwargs": {"api_key": "SECRET"}}, "chat_template_kwargs.api_key"),
        ({"gradient_parameters": ["x", "http://bob:SECRET@host"]}, "gradient_parameters"),
        ({"nothing": "http://bob:SECRET@host", "group_size": "http://bob:SECRET@host"}, "nothing"),
    ],
)
def test_a_secret_is_refused_with_its_key_and_not_shown(values: dict[str, Any], key: str) -> None:
    (line,) = refused(**values).splitlines()
    assert line.startswith(f"Bad test.yaml: {key}: ") and "in the environment" in line
    assert "SECRET" not in line


def test_what_only_looks_like_a_secret_is_none() -> None:
    grpo = {"vllm_server_base_url": "http://127.0.0.1:8000/v1", "vllm_server_host": "::1"}
    said = "See https://a.org/@user, http://a.org:80/b@2, me@a.org; a Basic understanding of tokens. Key: value?"
    given = {"grpo": grpo, "system_prompt": said, "policy": "Qwen/Qwen2.5-0.5B", "policy_revision": "0c1d" * 10}
    assert validate({**given, "chat_template_kwargs": {"bos_token": "<s>"}}).system_prompt == said
    loop: dict[str, Any] = {}
    loop["grpo"] = loop  # as an alias in YAML makes it
    assert "grpo: 'grpo' is set by" in refused(**loop)


@pytest.mark.parametrize("name", ["policy", "embedder", "entailment"])
def test_a_folder_of_adapters_is_no_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path.parent)
    for path in (str(tmp_path), f"./{tmp_path.name}"):
        (line,) = refused(**{name: path}).splitlines()
        assert line.startswith(f"Bad test.yaml: {name}: ") and "merge_and_unload" in line and path in line


def test_a_message_is_of_bounded_length() -> None:
    message = refused(**{f"key{number}": "x" for number in range(20_000)}, seed="9" * 10**6)
    assert message.endswith("\n  and 19991 more") and len(message) < 50_000


# --- files and notebooks --------------------------------------------------------------------------------------------


def test_there_are_profiles_and_grids() -> None:
    assert {"smoke", "laptop", "single_gpu", "paper"} <= set(profiles())
    assert {"smoke", "table1", "figure1"} <= set(grids())


@pytest.mark.parametrize("name", profiles())
def test_every_profile_is_valid_for_every_task(name: str) -> None:
    values = load_profile(name)
    assert values["profile"] == name
    for task in TASKS:
        assert validate({**values, "task": task}, name).task == task


@pytest.mark.parametrize("name", profiles())
def test_papermill_reads_the_profiles_as_we_do(name: str) -> None:
    by_papermill = papermill.iorw.read_yaml_file(str(paths.PARAMS / f"{name}.yaml"))  # YAML 1.1
    assert [validate({**by_papermill, "task": task}) for task in TASKS] == [
        validate({**load_profile(name), "task": task}) for task in TASKS
    ]


@pytest.mark.parametrize(("grid", "profile"), [(grid, profile) for profile in profiles() for grid in fitting(profile)])
def test_every_grid_is_valid_with_every_profile(grid: str, profile: str) -> None:
    found = expand(grid, profile)
    assert found
    assert {plan.kind for plan in found} <= set(KINDS)
    assert {plan.params.profile for plan in found} == {profile}


def test_a_grid_knows_the_middle_and_the_end_of_training(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"  # which says no max_steps
    own.write_text("profile: own\n")
    for profile in ("world_a", str(own)):
        most = validate(load_profile(profile)).max_steps
        assert {plan.params.at_step for plan in expand("steps", profile)} == {0, most // 2, most}


def test_the_two_worlds_differ_in_their_seed_alone() -> None:
    a, b = (load_profile(name) for name in ("world_a", "world_b"))
    assert {key for key in a.keys() | b.keys() if a.get(key) != b.get(key)} == {"profile", "world_seed"}


def test_the_smoke_profile_is_the_defaults() -> None:
    assert validate(load_profile("smoke")) == Params()
    assert Params().profile == "smoke"


@pytest.mark.parametrize("notebook", KINDS.values())
def test_the_parameters_cell_of_a_run_notebook_is_the_defaults_field_for_field(notebook: str) -> None:
    cell = parameters_cell(notebook)
    assert list(cell) == list(Params.model_fields)
    assert validate(cell) == Params()
    plain = ("grpo", "chat_template_kwargs", "method_options", "training_values")
    for name, value in cell.items():
        assert not isinstance(value, dict) or name in plain or value == load_profile("smoke")[name], name


# --- the schema for editors -----------------------------------------------------------------------------------------


def test_the_schema_is_the_one_of_these_parameters() -> None:
    kept = json.loads((paths.PARAMS / "schema.json").read_text())
    assert kept == schema(), "write it again: python -m gcpo.runs.params > params/schema.json"


@pytest.mark.parametrize("name", profiles())
def test_every_profile_names_the_schema_and_satisfies_it(name: str) -> None:
    assert (paths.PARAMS / f"{name}.yaml").read_text().startswith("# yaml-language-server: $schema=schema.json\n")
    jsonschema.validate(load_profile(name), schema())


@pytest.mark.parametrize(
    "values",
    [
        {"grop_size": 4},
        {"group_size": "four"},
        {"seed": True},
        {"alpha": {"default": "strong"}},
        {"task": {"default": "tinyqa"}},
    ],
)
def test_the_schema_refuses_what_the_parameters_refuse(values: dict[str, Any]) -> None:
    refused(**values)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, schema())


# --- notebooks' namespaces ------------------------------------------------------------------------------------------


def namespace(**more: Any) -> dict[str, Any]:
    """Globals of a notebook when its second code cell runs."""
    ipython = {"In": ["", "seed = 0"], "Out": {}, "_": "", "_i1": "seed = 0", "_dh": [], "__name__": "__main__"}
    objects = {"get_ipython": len, "exit": object(), "math": math, "Params": Params, "space": types.SimpleNamespace()}
    return {**ipython, **objects, **parameters_cell("10_train"), **more}


def test_the_parameters_of_a_notebook_are_the_plain_values_of_its_globals() -> None:
    assert from_notebook(namespace()) == Params()
    assert from_notebook(namespace(seed=3, learning_rate="5e-5")) == Params(seed=3, learning_rate=5e-5)


@pytest.mark.parametrize("value", [4, "4", 4.0, None, [4], {"default": 4}, True])
def test_a_misspelt_name_that_papermill_injects_is_caught(value: Any) -> None:
    with pytest.raises(ParameterError, match=r"Bad notebook parameters: grop_size: .*Did you mean 'group_size'\?"):
        from_notebook(namespace(grop_size=value))


def test_a_number_that_papermill_reads_as_text_is_a_number_among_the_method_s_options() -> None:
    made = validate({"method": "kle", "method_options": {"t": "5e-5", "form": "square"}})
    assert made.method_options == {"t": 5e-5, "form": "square"}
