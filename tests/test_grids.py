"""Parameter files and grids: a fault is one line that names the file, the key and the way out; toy size; what fits."""

from pathlib import Path
from typing import Any

import papermill
import pytest

from gcpo import paths
from gcpo.runs.grids import expand, fitting, grids
from gcpo.runs.params import profile_name, validate
from gcpo.runs.plan import KINDS, Plan
from gcpo.runs.profiles import load_profile, parse_yaml, profiles
from gcpo.tasks import TASKS

COMPANIONS = ("paper_seed", "paper_egpo", "paper_cw", "real")

# What stands in a parameter file, or in a grid, and what is said of it, with the line where the fault is.
FILES: dict[str, tuple[bytes, str, str]] = {
    "tab": (b"profile: mine\n\tseed: 1\n", "line 2: ", "profile"),
    "not UTF-8": (b"profile: caf\xe9\n", "it is not UTF-8", "profile"),
    "a tag": (b"seed: !!python/object/apply:os.getcwd []\n", "line 1: ", "profile"),
    "a key twice": (b"seed: 1\nalpha: 0.5\nseed: 2\n", 'line 3: found duplicate key "seed"', "profile"),
    "no mapping": (b"- seed\n", "got list", "profile"),
    "nothing": (b"", "list of blocks", "grid"),
    "no kind": (b"- {seed: [0]}", "one of train, gradients, evaluate, one_step, warm_start, got None", "grid"),
    "no list of values": (b"- {kind: train, seed: 1}", "seed must be a list of values, got 1", "grid"),
    "a password": (b"- {kind: train, policy: 'http://bob:SECRET@host'}", "policy: a password or token", "grid"),
    "profile as an axis": (b"- {kind: train, profile: [a, b]}", "--profile", "grid"),
}
COMMANDS: dict[str, tuple[list[str], str]] = {
    "a brace": (["run", "-p", "seed", "{"], "-p seed, line 1: "),
    "a misspelt parameter": (["run", "-p", "sede", "1"], "'seed'?"),
    "a misspelt grid": (["grid", "zooo"], "'zoo'?"),
    "a misspelt profile": (["run", "--profile", "smok"], "'smoke'?"),
    "a profile outside": (["report", "--profile", "../x"], "Unknown profile '../x'"),
    "an axis overridden": (["grid", "smoke", "-p", "max_steps", "2"], "smoke.yaml lists max_steps"),
    "the same split": (["run", "-p", "train_split", "test"], "train_split and eval_split are both 'test'"),
    "a sharing that there is not": (["run", "-p", "processes", "2", "-p", "accelerate", "zero"], "'zero3'?"),
}


@pytest.mark.parametrize("fault", FILES)
def test_a_broken_file_is_one_line_with_its_name(fault: str, tmp_path: Path, call: Any) -> None:
    content, said, kind = FILES[fault]
    (path := tmp_path / "mine.yaml").write_bytes(content)
    for command in ("run --profile", "grid smoke --profile") if kind == "profile" else ("grid",):
        (line,) = call(*command.split(), str(path), status=2).err.splitlines()
        assert line.startswith(f"gcpo: {path}") and said in line


@pytest.mark.parametrize("fault", COMMANDS)
def test_a_bad_command_is_one_line(fault: str, call: Any) -> None:
    words, message = COMMANDS[fault]
    (line,) = call(*words, status=2).err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("text", "value"),
    [("010", 10), ("1_000", 1000), ("5e-5", 5e-5), ("1e3", 1000.0), ("on", "on"), ("no", "no"), ("1:30", "1:30")],
)
def test_values_are_read_as_yaml_1_2_says(text: str, value: Any) -> None:
    found = parse_yaml(text, "mine.yaml")
    assert found == value and type(found) is type(value)


# --- the project's own files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", profiles())
def test_every_profile_is_valid_for_every_task_and_papermill_reads_it_as_we_do(name: str) -> None:
    values = load_profile(name)
    by_papermill = papermill.iorw.read_yaml_file(str(paths.PARAMS / f"{name}.yaml"))  # YAML 1.1
    for task in TASKS:
        made = validate({**values, "task": task}, name)
        assert made == validate({**by_papermill, "task": task}) and (made.task, made.profile) == (task, name)


@pytest.mark.parametrize(("grid", "profile"), [(grid, profile) for profile in profiles() for grid in fitting(profile)])
def test_every_grid_is_valid_with_every_profile_that_it_fits_and_at_toy_size(grid: str, profile: str) -> None:
    for name in (profile, f"{profile}-toy") if profile in ("laptop", "paper", *COMPANIONS) else (profile,):
        found = expand(grid, name)
        assert found and {plan.kind for plan in found} <= {*KINDS}
        assert {plan.params.profile for plan in found} == {name}


def test_every_grid_fits_some_profiles_and_not_the_others() -> None:
    ours, theirs = fitting("laptop"), fitting("paper")
    companions = [grid for name in COMPANIONS for grid in fitting(name)]
    assert sorted([*ours, *theirs, *companions]) == grids() and {"table1", "figure1"} <= set(ours)
    assert {"paper_table1", "paper_table2", "paper_figure1"} <= set(theirs)
    assert fitting("smoke") == fitting("laptop-toy") == ours and fitting("single_gpu") == fitting("paper-toy") == theirs


def test_the_two_worlds_differ_in_their_seed_alone() -> None:
    a, b = (load_profile(name) for name in ("world_a", "world_b"))
    assert {key for key in a.keys() | b.keys() if a.get(key) != b.get(key)} == {"profile", "world_seed"}


# --- what a grid means ----------------------------------------------------------------------------------------------


def test_an_own_grid_is_a_path_and_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for seeds in ([0, 1], [2]):
        path.write_text(f"- {{kind: train, seed: {seeds}}}\n")
        assert [plan.params.seed for plan in expand(str(path), "smoke")] == seeds
    assert expand(str(path), "smoke")[0] is expand(str(path), "smoke")[0]  # and resolved once while it has not


def test_a_grid_knows_the_middle_and_the_end_of_training(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"  # which says no max_steps
    own.write_text("profile: own\n")
    for profile in ("world_a", str(own)):
        most = validate(load_profile(profile)).max_steps
        assert {plan.params.at_step for plan in expand("steps", profile)} == {0, most // 2, most}


def test_fields_of_grpo_are_laid_over_the_profile_s_one_by_one(tmp_path: Path) -> None:
    usual = {"bf16": True, "gradient_checkpointing": True, "lr_scheduler_type": "linear"}
    usual |= {"use_bias_correction_kl": False}
    grid = tmp_path / "g.yaml"
    grid.write_text("- {kind: train, grpo: [{num_iterations: 2, bf16: false}]}")
    (plan,) = expand(str(grid), "paper")
    assert plan.params.grpo == {**usual, "bf16": False, "num_iterations": 2}
    (plan,) = expand("smoke", "paper", {"grpo": {"use_vllm": True}})[:1]
    assert plan.params.grpo == {**usual, "use_vllm": True}


def plan(profile: str, **changes: Any) -> Plan:
    return Plan("train", validate({**load_profile(profile), **changes}))


def test_toy_size_is_smaller_and_nothing_else() -> None:
    changes = {"task": "math", "method": "seed_grpo", "method_options": {"form": "linear"}, "alpha": 0.02, "seed": 0}
    real, small = plan("paper", **changes), plan("paper-toy", **changes)
    assert small.method.constants() == real.method.constants()
    sizes = {"max_steps", "save_steps", "per_device_train_batch_size", "max_completion_length"}
    kept = set(real.trainer) - sizes - {"gradient_accumulation_steps"}
    assert {key: small.trainer[key] for key in kept} == {key: real.trainer[key] for key in kept}
    assert small.trainer["num_generations"] == 16 and small.trainer["gradient_accumulation_steps"] == 16
    found = small.params
    assert (found.profile, found.max_steps, found.eval_limit) == ("paper-toy", 2, 4)
    assert (found.policy, found.entailment, found.embedder) == ("untrained", "tiny", real.params.embedder)


def test_a_profile_given_by_its_path_has_a_toy_size_too(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("profile: mine\nmax_steps: 64\nalpha: 0.3\ngrpo: {use_vllm: true, num_iterations: 2}\n")
    found = load_profile(f"{own}-toy")
    assert profile_name(f"{own}-toy") == found["profile"] == "mine-toy"
    assert (found["alpha"], found["max_steps"]) == (0.3, 2)
    assert found["grpo"] == {"use_vllm": False, "steps_per_generation": None, "num_iterations": 2}


def test_a_grid_makes_nothing_larger_than_toy_size(tmp_path: Path) -> None:
    grid = tmp_path / "own.yaml"
    grid.write_text("""
- {kind: train, task: [tinyqa], method: [se, grpo], seed: [0, 1, 2], max_steps: [0, 64, 128], policy: [tiny-3m, a/b]}
- {kind: gradients, task: [tinymath], at_step: [0, 32, max_steps], eval_limit: [3, 1000], alpha: [0.2]}
""")
    found = [made.params for made in expand(str(grid), "laptop-toy")]
    trained = [(p.method, p.seed, p.max_steps, p.policy, p.policy_revision) for p in found[:24]]
    steps, stands = (0, 2, 4), [("tiny-3m", "tiny"), ("untrained", "a/b")]
    assert trained == [(m, s, n, *p) for m in ("se", "grpo") for s in (0, 1) for n in steps for p in stands]
    assert {one.alpha for one in found[24:]} == {0.2}
    assert [(one.at_step, one.eval_limit) for one in found[24:]] == [(n, m) for n in (0, 5, 2) for m in (3, 4)]
    assert len(expand(str(grid), "laptop")) == 2 * 3 * 3 * 2 + 3 * 2
