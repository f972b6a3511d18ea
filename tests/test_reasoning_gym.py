"""Tasks of the package reasoning-gym: questions by split and seed, its verifiers, and two of them trained on."""

from __future__ import annotations

import inspect
import math
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcpo import paths
from gcpo.runs.params import ParameterError, validate
from gcpo.runs.plan import Plan
from gcpo.runs.train import train
from gcpo.tasks import check_task, get_task
from gcpo.tasks import reasoning_gym as module

factory = pytest.importorskip("reasoning_gym.factory")

CHAIN_SUM = get_task("reasoning_gym:chain_sum")
SOME = ("chain_sum", "coin_flip", "letter_counting", "syllogism", "maze", "mini_sudoku", "word_sorting", "bf", "jugs")


def test_questions_depend_on_split_and_seed_alone_and_no_split_has_one_of_another() -> None:
    for name in ("coin_flip", "chain_sum"):
        task = get_task(f"reasoning_gym:{name}")
        splits = {split: task.load(split, limit=40).rows for split in ("train", "validation", "test")}
        seeds = [{row.id for row in task.load("train", limit=40, seed=seed).rows} for seed in (0, 1)]
        assert seeds[0] == {row.id for row in splits["train"]}
        if name == "chain_sum":
            assert not seeds[0] & seeds[1]
        prompts = [row.prompt for rows in splits.values() for row in rows]
        ids = [row.id for rows in splits.values() for row in rows]
        assert len(set(prompts)) == len(set(ids)) == len(prompts)
        for split, rows in splits.items():
            assert task.load(split, limit=10).rows == rows[:10]
    source = CHAIN_SUM.load("test", limit=1, seed=3).source
    assert source == {
        **{"dataset": "reasoning_gym:chain_sum", "split": "test", "generator_seed": 3},
        "version": module.importlib.metadata.version("reasoning-gym"),
    }


def test_a_task_of_few_questions_ends_with_them() -> None:
    rows = get_task("reasoning_gym:coin_flip").load("test", limit=10_000).rows
    assert 10 < len(rows) < 1000
    with pytest.raises(ValueError, match="chain_sum has no split 'dev'; it has train, validation, test"):
        CHAIN_SUM.load("dev", limit=1)


def test_a_question_is_the_same_in_another_process() -> None:
    code = (
        "from gcpo.tasks import get_task; t = get_task('reasoning_gym:word_sorting'); r = t.load('test', limit=3).rows;"
        "print([(x.id, x.references) for x in r], t.score(r[0].references[0], r[0].references))"
    )
    said = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(said) == 1 and "'accuracy': 1.0" in said.pop()


@pytest.mark.parametrize("name", SOME)
def test_the_packages_own_answer_is_right_and_another_questions_is_not_always(name: str) -> None:
    task = get_task(f"reasoning_gym:{name}")
    rows = task.load("test", limit=12).rows
    for row in rows:
        for said in (f"<answer>4</answer> so <answer>\n{row.references[0]}</answer>", row.references[0]):
            assert task.score(task.extract(said), row.references) == {"accuracy": 1.0, "score": 1.0}
        assert task.reward(f"<answer>{row.references[0]}</answer>", row.references) == 2.0
    others = [*rows[1:], rows[0]]
    shuffled = [
        task.score(other.references[0], row.references)["score"] for row, other in zip(rows, others, strict=True)
    ]
    assert sum(shuffled) < len(rows)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("so <answer> 12 </answer>.", "12"),
        ("<answer>1\n2</answer> or <answer>3</answer>", "3"),
        (r"4 + 8 is \boxed{12}", "12"),
        (" 12\n", "12"),
        ("<answer> </answer>", None),
        ("", None),
    ],
)
def test_the_answer_of_a_completion(said: str, answer: str | None) -> None:
    assert module.extract(said) == answer


@pytest.mark.parametrize("name", SOME)
@settings(max_examples=25, deadline=None)
@given(said=st.text(max_size=300) | st.text("0123456789.-+eE[]{}(),\"' \n", max_size=60))
def test_any_text_has_a_score(name: str, said: str) -> None:
    task = get_task(f"reasoning_gym:{name}")
    (row,) = task.load("train", limit=1).rows
    scores = task.score(task.extract(said), row.references)
    assert all(0.0 <= score <= 1.0 for score in scores.values()) and 0.0 <= task.reward(said, row.references) <= 2.0


def test_a_verifier_that_raises_hangs_or_gives_no_share_is_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    for given_back, score in ((None, 0), (math.nan, 0), (-0.1, 0), (1.01, 0), ("1", 0), (True, 1), (0.25, 0.25)):
        module._verified.cache_clear()
        monkeypatch.setattr(module, "_ask", lambda *_, value=given_back: value)
        assert CHAIN_SUM.score("1", ("1", "0/0")) == {"accuracy": float(score == 1), "score": score}
    module._verified.cache_clear()


def test_an_endless_verifier_is_ended_and_its_prints_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
from gcpo import grader
def answer(said):
    print("noise")
    while said == "endless":
        pass
    return len(said)
def serve():
    grader.serve({"answer": answer}, lambda *_: print("more noise"))
"""
    (tmp_path / "endless_verifier.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = module.grader.GraderProcess("endless_verifier", extra="tasks")
    assert [asked.ask("answer", said) for said in ("four", "endless", "three")] == [4, None, 5]
    asked.close()


@pytest.mark.slow
def test_ten_thousand_characters_take_less_than_two_seconds() -> None:
    rng = random.Random(0)
    texts = ["9" * 10_000, "[" * 10_000, "1 + " * 2_500, "".join(rng.choices("abc 01\n,[]", k=10_000))]
    for name in SOME:
        task = get_task(f"reasoning_gym:{name}")
        (row,) = task.load("train", limit=1).rows
        for said in texts:
            start = time.process_time(), time.perf_counter()
            assert 0.0 <= task.reward(said, row.references) <= 2.0
            assert time.perf_counter() - start[1] < 4, name  # the judge's limit is of processor time, 1.2 s


def test_names() -> None:
    with pytest.raises(ValueError, match=r"no task 'chan_sum'\. Did you mean 'chain_sum'\? Valid names: ab, acre"):
        check_task("reasoning_gym:chan_sum")
    with pytest.raises(ValueError, match="runs an answer as Python code"):
        check_task("reasoning_gym:n_queens")
    with pytest.raises(ParameterError, match=r"train_limit: reasoning-gym has no task 'chain_sums'\. Did you mean"):
        validate({"train_limit": {"reasoning_gym:chain_sums": 4, "default": 5}})
    values = {"task": "reasoning_gym:chain_sum", "train_limit": {"reasoning_gym:chain_sum": 4, "default": 5}}
    params = validate(values)
    assert params.train_limit == 4
    assert re.fullmatch(r"reasoning_gym\.chain_sum-gcpo_bot-0-[0-9a-f]{8}", Plan("train", params).folder.name)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ParameterError, match=r'task: .* needs the package reasoning-gym: pip install "gcpo\[tasks\]"'):
        validate({"task": "reasoning_gym:chain_sum"})


def test_verifiers_that_run_answers_as_code_are_left_out() -> None:
    evaluating = {
        name
        for name in module._names()
        if re.search(
            r"\b(eval|exec|sympify|\w+\.parse_expr)\(\s*answer|int\(parse_expr|float\(parse_expr", source(name)
        )
    }
    assert evaluating == module.EVALUATING


def source(name: str) -> str:
    return inspect.getsource(factory.DATASETS[name][0].score_answer)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), [("propositional_logic", "gcpo_bot"), ("chain_sum", "grpo")])
def test_the_embedded_policy_trains_on_them(
    name: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = paths.OUTPUTS / "world"
    monkeypatch.setattr(paths, "OUTPUTS", tmp_path)
    if world.exists():
        (tmp_path / "world").symlink_to(world.resolve())
    values: dict[str, Any] = {"task": f"reasoning_gym:{name}", "method": method, "max_steps": 2, "group_size": 8}
    run = train(validate({**values, "prompts_per_step": 4, "eval_limit": 4, "validation_limit": 0}))
    assert run.finished and run.manifest["data"]["train"]["dataset"] == values["task"]
    assert set(run.manifest["results"]) >= {"greedy_accuracy", "sampled_score"}
    metrics = pd.read_csv(run.folder / "metrics.csv")
    assert len(metrics) == 2
    if name == "propositional_logic":  # a sum of four digits is beyond the embedded policy: it is never rewarded
        assert (metrics["grad_norm"] > 0).any() and (metrics["reward"] > 0).any()
