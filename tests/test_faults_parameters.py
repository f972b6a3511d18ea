"""Bad parameter files, grids and commands: one line that names the file, the key and the way out, and no work done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcpo import paths
from gcpo.cli import main
from gcpo.runs.grids import expand
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.profiles import ParameterError, load_profile, parse_yaml, read_yaml, yaml_text
from gcpo.runs.record import Run

# What stands in a file, and what is said of it, with the line where the fault is.
FILES: dict[str, tuple[bytes, str]] = {
    "tab": (b"profile: mine\n\tseed: 1\n", "line 2: found character '\\t' that cannot start any token"),
    "two documents": (b"seed: 1\n---\nseed: 2\n", "line 2: but found another document"),
    "not UTF-8": (b"profile: caf\xe9\n", "cannot be read: it is not UTF-8"),
    "NUL": (b"profile: a\x00b\n", "not readable as YAML"),
    "a tag": (b"seed: !!python/object/apply:os.getcwd []\n", "line 1: could not determine a constructor for the tag"),
    "an alias that is not there": (b"seed: *other\n", "line 1: found undefined alias"),
    "5,000 digits": (b"seed: " + b"9" * 5000 + b"\n", "not readable as YAML (Exceeds the limit"),
    "a deep nest": (b"seed: " + b"[" * 5000 + b"\n", "not readable as YAML"),
    "a key twice": (b"seed: 1\nalpha: 0.5\nseed: 2\n", 'line 3: found duplicate key "seed"'),
    "a key twice inside": (b"grpo: {epsilon: 0.1, epsilon: 0.2}\n", 'line 1: found duplicate key "epsilon"'),
    "no mapping": (b"- seed\n", "expected a mapping of parameter names to values, got list"),
    "unclosed": (b"grpo: {epsilon: 0.1\n", "line 2: expected ',' or '}'"),
}


@pytest.mark.parametrize("fault", FILES)
@pytest.mark.parametrize("command", ["run", "grid smoke", "check smoke"])
def test_a_broken_file_is_one_line_with_its_name(
    fault: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, message = FILES[fault]
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    assert main([*command.split(), "--profile", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gcpo: {path}") and message in line


def test_a_folder_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ParameterError, match=r"folder\.yaml cannot be read: Is a directory"):
        read_yaml(tmp_path / "folder.yaml")
    with pytest.raises(ParameterError, match="cannot be read: No such file"):
        read_yaml(tmp_path / "none.yaml")


COMMANDS: dict[str, tuple[list[str], str]] = {
    "a brace": (["run", "-p", "seed", "{"], "gcpo: -p seed, line 1: expected the node content"),
    "a word for a number": (["run", "-p", "seed", "x"], "gcpo: Bad smoke with -p: seed: Input should be a valid integ"),
    "a misspelt parameter": (["run", "-p", "sede", "1"], "smoke with -p: sede: unknown parameter. Did you mean 'seed'"),
    "a misspelt profile": (["run", "--profile", "smok"], "gcpo: Unknown profile 'smok'. Did you mean 'smoke'?"),
    "a misspelt grid": (["grid", "zooo"], "gcpo: Unknown grid 'zooo'. Did you mean 'zoo'?"),
    "a word in a grid": (
        ["grid", "smoke", "-p", "group_size", "many"],
        "gcpo: Bad run of smoke.yaml with smoke.yaml: group_size: Input should be a valid integer",
    ),
    "a grid outside": (["grid", "../x"], "gcpo: '../x' is no name of a grid: letters, digits, - and _"),
    "a profile outside": (["report", "--profile", "../x"], "gcpo: '../x' is no name of a profile"),
    "a profile of 300 characters": (["run", "--profile", "p" * 300], "is no name of a profile"),
    "an empty grid": (["grid", ""], "gcpo: '' is no name of a grid"),
    "an axis overridden": (["grid", "smoke", "-p", "max_steps", "2"], "smoke.yaml varies max_steps itself"),
    "the same split": (["run", "-p", "train_split", "test"], "gcpo: train_split and eval_split are both 'test'"),
}


@pytest.mark.parametrize("fault", COMMANDS)
def test_a_bad_command_is_one_line(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = COMMANDS[fault]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("jobs", ["0", "-1", "1.5", "many"])
def test_no_jobs_are_refused(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grid", "smoke", "--jobs", jobs]) == 2
    assert "Invalid value for '--jobs': Input should be " in capsys.readouterr().err


def test_what_is_trained_on_may_be_measured_or_left_untrained() -> None:
    same = {"train_split": "test", "eval_split": "test"}
    assert Plan("gradients", validate(same)).id and Plan("train", validate({**same, "max_steps": 0})).id


def test_fields_of_grpo_are_laid_over_the_profile_s_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usual = {"bf16": True, "gradient_checkpointing": True, "lr_scheduler_type": "linear"}
    grid = tmp_path / "g.yaml"
    grid.write_text("- {kind: train, grpo: [{num_iterations: 2, bf16: false}]}")
    (plan,) = expand(str(grid), "paper")
    assert plan.params.grpo == {**usual, "bf16": False, "num_iterations": 2}
    (plan,) = expand("smoke", "paper", {"grpo": {"use_vllm": True}})[:1]
    assert plan.params.grpo == {**usual, "use_vllm": True}
    seen: list[Plan] = []
    monkeypatch.setattr("gcpo.paths.OUTPUTS", tmp_path)
    monkeypatch.setattr("gcpo.cli._refuse", lambda _: None)
    monkeypatch.setattr("gcpo.runs.runner.run_grid", lambda plans, jobs, *_: seen.extend(plans) or [Run(tmp_path)])
    assert main(["evaluate", "--profile", "paper", "-p", "grpo", "{top_p: 0.9}"]) == 1
    assert seen[0].params.grpo == {**usual, "top_p": 0.9}


def test_a_grid_named_twice_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Plan] = []
    monkeypatch.setattr("gcpo.paths.OUTPUTS", tmp_path)
    monkeypatch.setattr("gcpo.cli._refuse", lambda _: None)
    monkeypatch.setattr("gcpo.runs.runner.run_grid", lambda plans, jobs, *_: seen.extend(plans) or [])
    monkeypatch.setattr("gcpo.world.resolve", lambda name, *_: name)
    assert main(["grid", "smoke", "smoke", "--profile", "smoke"]) == 0
    assert len(seen) == len(expand("smoke", "smoke"))


def test_an_own_grid_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("- {kind: train, seed: [0, 1]}\n")
    assert [plan.params.seed for plan in expand(str(path), "smoke")] == [0, 1]
    path.write_text("kind: train\n")
    with pytest.raises(ParameterError, match=r"mine\.yaml: expected a list of blocks"):
        expand(str(path), "smoke")


GRIDS = {
    "nothing": ("", "expected a list of blocks"),
    "no kind": ("- {seed: [0]}", "kind must be one of train, gradients, evaluate, one_step, got None"),
    "no list": ("- {kind: train, seed: 1}", "seed must be a list of values, got 1."),
    "no block": ("[]", "expected a list of blocks"),
    "an axis without values": ("- {kind: train, seed: []}", "seed must be a list of values, got []"),
    "a misspelt exclusion": (
        "- {kind: train, method: [all, -gcpo_bott]}",
        "method '-gcpo_bott' leaves out none of them. Did you mean 'gcpo_bot'?",
    ),
    "no method left": ("- {kind: train, method: [grpo, -grpo]}", "no method is left of ['grpo', '-grpo']"),
    "a password": ("- {kind: train, policy: 'http://bob:SECRET@host'}", "policy: a password or token, which every rec"),
    "profile as an axis": ("- {kind: train, profile: [a, b]}", "profile is no axis of a grid"),
    "a list as a key": ("- {kind: train, ? [a, b] : 1}", "('a', 'b') must be a list of values"),
}


@pytest.mark.parametrize("fault", GRIDS)
def test_a_grid_that_means_no_runs_is_one_line(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, message = GRIDS[fault]
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert main(["grid", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gcpo: {path}: {message}")


PLAIN = st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=8)
NESTED = st.recursive(  # bounded: a large nest takes minutes to draw, and says nothing more
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(sorted(load_profile("smoke"))) | st.text(max_size=12)


def refusal(call: Callable[[], object]) -> str | None:
    """The message with which parameters are refused; any other error is the test's failure."""
    try:
        call()
    except ParameterError as error:
        return str(error)
    return None


@settings(max_examples=700, deadline=None)
@given(st.dictionaries(KEYS, NESTED, max_size=4))
def test_any_mapping_is_accepted_or_refused_with_the_name_of_its_source(values: dict[str, Any]) -> None:
    message = refusal(lambda: validate(values, "mine.yaml"))
    assert message is None or message.startswith("Bad mine.yaml:")


@settings(max_examples=1000, deadline=None)
@given(st.text(st.sampled_from("ab:-{}[]#&*!|>'\"%@`,?\t\n 01~\x00é"), max_size=30))
def test_any_text_is_a_value_or_an_error_that_names_it(text: str) -> None:
    message = refusal(lambda: parse_yaml(text, "mine.yaml"))
    assert message is None or (message.startswith("mine.yaml") and "\n" not in message)


AXES = st.dictionaries(KEYS, st.lists(NESTED, max_size=2) | NESTED, max_size=3)
BLOCKS = st.lists(
    st.builds(lambda axes, kind: {**axes, "kind": kind}, AXES, st.sampled_from(["train", "gradients", 3])),
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(blocks=BLOCKS | NESTED)
def test_any_grid_is_expanded_or_refused_with_the_name_of_its_file(blocks: Any, grids: Path) -> None:
    path = grids / "mine.yaml"
    path.write_text(yaml_text(blocks))
    message = refusal(lambda: expand(str(path), "smoke"))
    assert message is None or message.startswith((str(path), "Bad run of mine.yaml with smoke.yaml:"))


@pytest.fixture(scope="module")
def grids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grids")


def kinds(value: Any) -> set[type]:
    """The types in a nested value, its own and those of keys and members."""
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return {type(value)}.union(*map(kinds, inner))


def test_the_project_s_own_files_hold_plain_values() -> None:
    files = [*paths.PARAMS.glob("*.yaml"), *(paths.PARAMS / "grids").glob("*.yaml")]
    assert len(files) > 4
    for path in files:
        values = read_yaml(path)
        assert kinds(values) <= {dict, list, str, int, float, bool, type(None)}
        assert parse_yaml(yaml_text(values), "again") == values


@pytest.mark.parametrize(
    ("text", "value"),
    [("010", 10), ("1_000", 1000), ("5e-5", 5e-5), ("1e3", 1000.0), ("on", "on"), ("no", "no"), ("1:30", "1:30")],
)
def test_values_are_read_as_yaml_1_2_says(text: str, value: Any) -> None:
    found = parse_yaml(text, "mine.yaml")
    assert found == value and type(found) is type(value)
