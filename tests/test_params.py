"""Parameters: every mistake is named with its key, its value and the way out; cells and schema are the parameters'."""

import ast
import inspect
import json
import math
import runpy
import types
from pathlib import Path
from typing import Any

import jsonschema
import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl import GRPOConfig

from gcpo import paths
from gcpo.methods import METHODS
from gcpo.runs import params as module
from gcpo.runs.params import Params, from_notebook, validate
from gcpo.runs.plan import KINDS
from gcpo.runs.profiles import ParameterError, load_profile, profiles
from gcpo.tasks import TASKS

FIELDS = set(inspect.signature(GRPOConfig).parameters)


def refused(**values: Any) -> str:
    """The message about values that are not accepted."""
    with pytest.raises(ParameterError) as raised:
        validate(values, "test.yaml")
    message = str(raised.value)
    assert message.startswith("Bad test.yaml: ")
    return message


# Values that are refused, the key that is named, and what else the message has: the value, or the way out.
TWO, GENERATE = {"processes": 2}, "generation_kwargs"
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"grop_size": 4}, "grop_size", "'group_size'?"),
    ({"method": "gcpo_bt"}, "method", "'gcpo_bot'?"),
    ({"task": "tinymaths"}, "task", "'tinymath'?"),
    ({"alpha": {"tinymth": 0.1, "default": 1}}, "alpha", "'tinymath'?"),
    ({"alpha": {"default": 1}, "task": {"default": "tinyqa"}}, "task", "a valid string"),
    ({"max_completion_length": {"tinymath": 3}}, "max_completion_length", "no value for task 'tinyqa'"),
    ({"max_completion_length": {"short": 64}, "task": "math"}, "max_completion_length", "'math', 'solution'"),
    ({"profile": "reference"}, "profile", "outputs/reference"),
    ({"prompt_template": "Answer."}, "prompt_template", "'Answer.'"),
    ({"chat_template_kwargs": {"add_generation_prompt": 0}}, "chat_template_kwargs", "'add_generation_prompt'"),
    ({"method_options": {"forn": "linear"}}, "method", "'form'?"),
    ({"method_options": {"alpha": 0.6}}, "method_options", "'alpha'"),
    ({"method_options": {"correct": 1}, "method": "egpo"}, "method_options", "{'correct': 1}"),
    ({"micro_batch": 3}, "micro_batch", "3 does not divide the completions of a step, 8"),
    ({"processes": 4, "micro_batch": 4}, "micro_batch", "4 does not divide the completions of a step, 8"),
    ({"trained_on": "math"}, "trained_on", "at_step"),
    ({"training_seed": 1}, "training_seed", "at_step"),
    ({"grpo": {"num_iterations": 3}}, "save_steps", "a multiple of 3"),
    ({"grpo": {"steps_per_generation": 4}, "micro_batch": 4, "save_steps": 3}, "save_steps", "a multiple of 2"),
    ({"grpo": {"num_iteration": 2}}, "grpo", "'num_iterations'?"),
    ({"grpo": {"epsilon": "abc"}}, "grpo", "epsilon: Input should be a valid number"),
    ({"grpo": {"epsilon": math.inf}}, "grpo", "(got inf)"),
    ({"grpo": {GENERATE: {"max_new_tokens": 1}}}, "grpo", "'max_completion_length'"),
    ({"grpo": {GENERATE: {"tipical_p": 0.9}}}, "grpo", "'typical_p'?"),
    ({"grpo": {"hub_token": "x"}}, "grpo", "set HF_TOKEN in the environment"),
    ({"grpo": {"push_to_hub": True}}, "grpo", "'push_to_hub' is a secret or a place"),
    ({"grpo": {"deepspeed": "x.json"}}, "grpo", "'accelerate'"),
    ({"grpo": {"gradient_accumulation_steps": 2}}, "grpo", "'micro_batch'"),
    *(({"grpo": {k: 1}}, "grpo", f"{k!r} is set by the parameter") for k in sorted(FIELDS & {*Params.model_fields})),
]


# Values of another type, or out of range: named with their key.
WRONG: dict[str, list[Any]] = {
    **{"group_size": ["four", 4.5, 1], "temperature": [math.nan], "max_steps": [True], "seed": ["1.5", None]},
    **{"policy": [7, ""], "profile": ["../elsewhere"]},
}
RANGES: dict[str, tuple[list[Any], list[Any]]] = {  # of fields of grpo: within, and without
    "epsilon": ([0, 5.0], [-1e-9]),
    "delta": ([None, 1.5], [0]),
    "top_p": ([0.1, 1], [0, 1.01]),
    "num_iterations": ([1], [0]),
}
BAD += [({key: value}, key, f"(got {value!r})") for key, values in WRONG.items() for value in values]
BAD += [({"grpo": {key: one}}, "grpo", f"{key}: ") for key, (_, outside) in RANGES.items() for one in outside]


@pytest.mark.parametrize(("values", "key", "said"), BAD)
def test_a_mistake_is_one_line_with_key_and_value_or_the_way_out(values: dict[str, Any], key: str, said: str) -> None:
    (line,) = refused(**values).splitlines()
    assert line.startswith(f"Bad test.yaml: {key}: ") and said in line


def test_every_problem_is_listed_at_once_and_a_strange_name_with_the_valid_ones() -> None:
    message = refused(alpha=-1, group_size="four", tmperature=1).removeprefix("Bad test.yaml: ")
    assert {line.split(":")[0].strip() for line in message.splitlines()} == {"group_size", "alpha", "tmperature"}
    for values, valid in (({"xyzzy": 1}, Params.model_fields), ({"method": "xyz"}, METHODS), ({"task": "zzz"}, TASKS)):
        assert all(name in refused(**values) for name in valid)


def test_values_at_the_edge_of_what_is_possible_are_accepted() -> None:
    for values in (
        {"group_size": 2, "prompts_per_step": 1, "max_steps": 0, "eval_samples": 0, "alpha": 0, "beta": 0},
        *({"entailment_threshold": edge} for edge in (0, 1)),
        {"save_steps": 2, "micro_batch": 2, "grpo": {"num_iterations": 2, "steps_per_generation": 2}},
        {"save_steps": 4, "grpo": {"num_iterations": 3}},  # no checkpoint before the last step
        {"grpo": {"generation_kwargs": {"suppress_tokens": [1], "no_repeat_ngram_size": 3}}},
        {"grpo": {"use_vllm": True, "generation_kwargs": {"bad_words": ["x"]}}},
        {"grpo": {"alpha_end": 0.0, "drop_equal_groups": True}},
        *({"grpo": {key: one}} for key, (within, _) in RANGES.items() for one in within if key != "num_iterations"),
    ):
        accepted = validate(values).model_dump(mode="json")
        assert {key: accepted[key] for key in values} == values


def test_numbers_in_a_text_are_numbers_where_those_are_wanted_and_texts_stay_texts() -> None:
    found = validate({"seed": "3", "group_size": 1e1, "max_steps": 2.0})
    assert (found.seed, found.group_size, found.max_steps) == (3, 10, 2)
    made = validate({"method": "kle", "method_options": {"t": "5e-5", "form": "square"}})
    assert made.method_options == {"t": 5e-5, "form": "square"}
    given = {"epsilon_high": "5e-5", "max_grad_norm": "1e0", "optim_args": "2024", "bf16": "on", "num_iterations": "2"}
    typed = validate({"grpo": given}).grpo
    assert list(typed.values()) == [5e-5, 1.0, "2024", True, 2] and isinstance(typed["optim_args"], str)


def test_every_field_that_a_run_leaves_alone_is_one_of_this_trl() -> None:
    names = set(module.REFUSED["grpo"])
    assert names - {"logging_dir"} <= FIELDS  # an older transformers has that
    assert {*module.BOUNDS, *module.ADDRESSES} <= FIELDS
    secret = {name for name in FIELDS if "hub" in name or "token" in name}
    assert secret - {"include_num_input_tokens_seen", "average_tokens_across_devices"} <= names


# --- a value for each task ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by_task", "expected"),
    [
        ({"tinymath": 48, "default": 16}, {"tinymath": 48, "tinyqa": 16, None: 16}),  # the default task is tinyqa
        ({"tinyqa": 12}, {"tinyqa": 12, None: 12}),
        ({"gsm8k": 3, "solution": 2, "default": 1}, {"gsm8k": 3, "math": 2, "tinyqa": 1}),
    ],
)
def test_a_mapping_gives_each_task_its_value(by_task: dict[str, int], expected: dict[Any, int]) -> None:
    for task, value in expected.items():
        named = {"task": task} if task else {}
        assert validate({**named, "max_completion_length": by_task}).max_completion_length == value


# --- secrets, adapters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"grpo": {"vllm_server_base_url": "http://bob:SECRET@127.0.0.1:8000"}}, "grpo.vllm_server_base_url"),
        ({"grpo": {"optim_args": "to=postgres://bob:SECRET@host/x"}}, "grpo.optim_args"),
        ({"grpo": {"generation_kwargs": {"a": [{"b": "ftp://:SECRET@host"}]}}}, "grpo.generation_kwargs.a.b"),
        ({"policy": "https://bob:SECRET/1@host/model"}, "policy"),
        ({"policy": {"tinyqa": "https://host/m?revision=2&token=SECRET"}}, "policy.tinyqa"),
        ({"entailment": "hf_SECRETabcdefghijklmnop"}, "entailment"),
        ({"system_prompt": "Authorization: Basic SECRETabc="}, "system_prompt"),
        ({"chat_template_kwargs": {"api_key": "SECRET"}}, "chat_template_kwargs.api_key"),
        ({"nothing": "http://bob:SECRET@host", "group_size": "http://bob:SECRET@host"}, "nothing"),
    ],
)
def test_a_secret_is_refused_with_its_key_and_not_shown(values: dict[str, Any], key: str) -> None:
    (line,) = refused(**values).splitlines()
    assert line.startswith(f"Bad test.yaml: {key}: ") and "in the environment" in line and "SECRET" not in line


def test_what_only_looks_like_a_secret_is_none() -> None:
    grpo = {"vllm_server_base_url": "http://127.0.0.1:8000/v1", "vllm_server_host": "::1"}
    said = "See https://a.org/@user, http://a.org:80/b@2, me@a.org; a Basic understanding of tokens. Key: value?"
    given = {"grpo": grpo, "system_prompt": said, "policy": "Qwen/Qwen2.5-0.5B", "policy_revision": "0c1d" * 10}
    assert validate({**given, "chat_template_kwargs": {"bos_token": "<s>"}}).system_prompt == said


def test_a_folder_of_adapters_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path.parent)
    for path in (str(tmp_path), f"./{tmp_path.name}"):
        line = refused(policy=path)
        assert line.startswith("Bad test.yaml: policy: ") and "merge_and_unload" in line and path in line


# --- notebooks and the schema for editors ---------------------------------------------------------------------------


def parameters_cell(notebook: str) -> dict[str, Any]:
    """The names and literals of the cell that papermill replaces."""
    cells = nbformat.read(paths.NOTEBOOKS / f"{notebook}.ipynb", as_version=4).cells
    (cell,) = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    return {line.targets[0].id: ast.literal_eval(line.value) for line in ast.parse(cell.source).body}


@pytest.mark.parametrize("notebook", KINDS.values())
def test_the_parameters_cell_of_a_run_notebook_is_the_smoke_profile_and_the_defaults(notebook: str) -> None:
    cell, smoke = parameters_cell(notebook), load_profile("smoke")
    assert list(cell) == list(Params.model_fields)
    own = {"warm_steps": 2} if notebook == KINDS["warm_start"] else {}  # which has some
    assert validate(cell) == validate(smoke | own) and validate(smoke) == Params() == validate({})
    assert "params = from_notebook(globals())" in (paths.NOTEBOOKS / f"{notebook}.ipynb").read_text()
    plain = ("grpo", "chat_template_kwargs", "method_options", "training_values")
    for name, value in cell.items():
        assert not isinstance(value, dict) or name in plain or value == smoke[name], name


def namespace(**more: Any) -> dict[str, Any]:
    """Globals of a notebook when its second code cell runs."""
    ipython = {"In": ["", "seed = 0"], "Out": {}, "_": "", "_i1": "seed = 0", "_dh": [], "__name__": "__main__"}
    objects = {"get_ipython": len, "exit": object(), "math": math, "Params": Params, "space": types.SimpleNamespace()}
    return {**ipython, **objects, **parameters_cell("10_train"), **more}


def test_the_parameters_of_a_notebook_are_the_plain_values_of_its_globals() -> None:
    assert from_notebook(namespace()) == Params()
    assert from_notebook(namespace(seed=3, learning_rate="5e-5")) == Params(seed=3, learning_rate=5e-5)
    for value in (4, "4", 4.0, None, [4], {"default": 4}, True):  # of which papermill only warns
        with pytest.raises(ParameterError, match=r"grop_size: .*'group_size'\?"):
            from_notebook(namespace(grop_size=value))


def test_the_schema_is_the_one_of_these_parameters_and_every_profile_satisfies_it() -> None:
    kept = json.loads((paths.PARAMS / "schema.json").read_text())
    assert kept == runpy.run_path(str(paths.ROOT / "docs" / "schema.py"))["schema"]()
    for name in profiles():
        assert (paths.PARAMS / f"{name}.yaml").read_text().startswith("# yaml-language-server: $schema=schema.json\n")
        jsonschema.validate(load_profile(name), kept)
    for values in ({"grop_size": 4}, {"group_size": "four"}, {"seed": True}, {"alpha": {"default": "strong"}}):
        refused(**values)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(values, kept)


# --- whatever comes -------------------------------------------------------------------------------------------------

PLAIN = st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=8)
NESTED = st.recursive(  # bounded: a large nest takes minutes to draw, and says nothing more
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(sorted(load_profile("smoke"))) | st.text(max_size=12)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(KEYS, NESTED, max_size=4))
def test_any_mapping_is_accepted_or_refused_as_parameters_are(values: dict[str, Any]) -> None:
    message = "mine.yaml"
    try:
        accepted = validate(values, "mine.yaml")
        assert validate(accepted.model_dump()) == accepted
    except ParameterError as error:
        message = str(error)
    assert "mine.yaml" in message
