"""Ranges of rewards and correctness of responses: said, declared or refused, before training and during it."""

import contextlib
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import OFF_POLICY, G, case_id, settings
from papers import features, sampled
from trl import rewards as trls

from gcpo import GCPOConfig
from gcpo.methods import METHODS, advantages
from gcpo.rollouts import Rollouts
from gcpo.runs.train import task_reward
from gcpo.tasks import get_task
from gcpo.trainer.collect import Scores, declared_range

Make = Callable[..., Scores]
NAN = math.nan


def plain(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def right(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def reaching(low: float, high: float) -> Callable[..., list[float]]:
    """A reward function that declares its range."""

    def declared(completions: list[Any], **_: Any) -> list[float]:
        return [low] * len(completions)

    declared.reward_range = (low, high)  # type: ignore[attr-defined]
    return declared


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def scores(method: str, *functions: Any, names: str = "", weights: Any = None, **changes: Any) -> Scores:
        more: dict[str, Any] = {"beta": 0.1} if "care" in method else OFF_POLICY
        args = GCPOConfig(method=method, **settings(tmp_path, **more, per_device_train_batch_size=2 * G, **changes))
        given = names.split() or [getattr(f, "__name__", type(f).__name__) for f in functions]
        return Scores(args, functions, given, torch.tensor(weights or [1.0] * len(functions)))

    return scores


# --- what is known --------------------------------------------------------------------------------------------------

LONG, SHORT = [list(range(100))], [[1]]
BOXED, WRONG = [[{"content": r"\boxed{2}"}]], [[{"content": r"\boxed{3}"}]]
THOUGHT = [[{"content": "<think>\nso\n</think>\n" + r"\boxed{2}"}]]
SOLVED = {"solution": ["$2$"]}


RANGES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (trls.accuracy_reward, {"completions": WRONG, **SOLVED}, {"completions": BOXED, **SOLVED}),
    (trls.reasoning_accuracy_reward, {"completions": BOXED, **SOLVED}, {"completions": THOUGHT, **SOLVED}),
    (trls.think_format_reward, {"completions": BOXED}, {"completions": THOUGHT}),
    (trls.get_soft_overlong_punishment(50, 10), {"completion_ids": LONG}, {"completion_ids": SHORT}),
]


@pytest.mark.parametrize(("function", "lowest", "highest"), RANGES, ids=case_id)
def test_trls_rewards_have_the_ranges_they_give(function: Any, lowest: dict[str, Any], highest: dict[str, Any]) -> None:
    assert declared_range(function) == (function(**lowest)[0], function(**highest)[0])
    assert declared_range(functools.partial(function)) == declared_range(function)


def test_a_function_declares_its_range_and_another_of_a_known_name_does_not() -> None:
    assert declared_range(reaching(-1, 4)) == (-1, 4)
    assert declared_range(functools.partial(reaching(-1, 4))) == (-1, 4)

    def accuracy_reward(completions: list[Any], **_: Any) -> list[float]:  # not TRL's
        return []

    assert declared_range(accuracy_reward) is None
    with pytest.raises(ValueError, match=r"declared\.reward_range must be \(low, high\), two numbers"):
        declared_range(reaching(1, 1))


def test_a_tasks_reward_declares_what_the_task_says() -> None:
    task = get_task("tinyqa")
    assert declared_range(task_reward(task)) == task.reward_range == (0, 2)


@pytest.mark.parametrize(
    ("functions", "weights", "expected"),
    [
        ([trls.accuracy_reward], None, (0, 1)),
        ([trls.accuracy_reward, trls.think_format_reward], [1.0, 0.5], (0, 1.5)),
        ([reaching(-1, 2), reaching(0, 1)], [2.0, -3.0], (-5, 4)),  # 2 [-1, 2] and -3 [0, 1] = [-3, 0]
        ([trls.get_soft_overlong_punishment(8, 2), reaching(0, 1)], [1.0, 2.0], (-1, 2)),
    ],
    ids=case_id,
)
def test_the_range_of_a_sum_is_made_of_its_parts(make: Make, functions: Any, weights: Any, expected: Any) -> None:
    assert make("gcpo_bot", *functions, weights=weights).range == expected
    assert make("gcpo_bot", *functions, weights=weights, reward_range=(-9, 9)).range == (-9, 9)  # the user's own


# --- what is asked for ----------------------------------------------------------------------------------------------

ASKING_RIGHT = [name for name, row in METHODS.items() if row.needs_correctness]
MEASURING = [name for name, row in METHODS.items() if row.reads_range]


def test_methods_that_measure_rewards_are_those_whose_result_depends_on_the_range() -> None:
    given = features(*sampled(0, 4, 4))
    given["correctness"] = given["rewards"] / 2
    changed = []
    for method in METHODS:
        one, other = (advantages(method, Rollouts(**given, reward_range=(0, high))) for high in (2, 4))
        changed += [method] if not torch.equal(one, other) else []
    assert changed == MEASURING and {"gcpo_bot", "dapo"} < {*MEASURING} < {*METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_only_a_method_that_measures_rewards_asks_what_they_can_reach(make: Make, method: str) -> None:
    setting = "reward_range" if method in MEASURING else "correctness_range"
    if method not in {*MEASURING, *ASKING_RIGHT}:
        assert make(method, plain, right).range is None  # any sum will do
        return
    if method in ASKING_RIGHT:
        with pytest.raises(ValueError, match=f"^{method} .*correctness_reward.* plain, right"):
            make(method, plain, right, reward_range=(0, 3))
    with pytest.raises(ValueError, match=rf"^{method} measures rewards by .*{setting}=\[0, 1\]\), or plain\.rew"):
        make(method, plain)
    made = make(method, plain, reward_range=(0, 3))
    assert made.range == made.correctness_range == (0, 3)


TWICE = {"names": "<lambda> <lambda>"}
RIGHT = {"correctness_reward": "right"}
# Method, rewards, settings, and what the refusal names: the functions, the setting, a value that would do.
UNKNOWN: list[tuple[str, list[Any], dict[str, Any], str]] = [
    ("gcpo_bot", [reaching(0, 2), plain, right], {}, "plain, right.*reward_range=.0, 4.*plain.reward_range"),
    ("gcpo_bot", [reaching(0, 2), plain], {"weights": [1.0, -2.0]}, "plain.*reward_range=.-2, 2."),
    ("gcpo_bot", [trls.get_repetition_penalty_reward()], {}, "repetition_penalty_reward.*reward_range"),
    ("egpo", [reaching(0, 1), right], RIGHT, "right.*correctness_range=.0, 1"),
    ("egpo", [plain, right], TWICE, "<lambda>, <lambda>, each with a __name__"),
    ("egpo", [plain, plain], {"correctness_reward": "plain"}, "plain, plain, each with a __name__"),
    ("rd_only", [plain, right], {"correctness_reward": "rigth"}, "'rigth'. Did you mean 'right'"),
]


@pytest.mark.parametrize(("method", "functions", "changes", "named"), UNKNOWN, ids=case_id)
def test_what_nothing_declares_is_refused(make: Make, method: str, functions: Any, changes: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make(method, *functions, **changes)


def test_the_range_of_correctness_is_that_of_the_function_that_is_named(make: Make) -> None:
    two = [reaching(0, 1), plain]
    named = {"names": "right style", "correctness_reward": "right"}
    assert make("egpo", *two, **named).correctness_range == (0, 1)  # and what style can reach is not asked
    assert make("egpo", *two, **named, reward_range=(0, 9)).correctness_range == (0, 1)
    assert make("egpo", *two, **named, correctness_range=(0, 2)).correctness_range == (0, 2)
    assert make("egpo", plain, right, correctness_reward="right", reward_range=(0, 9)).correctness_range == (0, 9)


# --- while it goes on -----------------------------------------------------------------------------------------------


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values).unsqueeze(1)


@pytest.mark.parametrize(
    ("function", "changes", "stops"),
    [
        (plain, {"reward_range": (0, 2)}, True),
        (plain, {"reward_range": (0, 1)}, False),
        (plain, {"correctness_range": (0, 2)}, False),  # 1 is half of a full reward, as the user says
        (reaching(0, 2), {}, False),  # or as the function does
        (reaching(0, 2), {"reward_range": (0, 2)}, False),
    ],
    ids=case_id,
)
@pytest.mark.filterwarnings("error::UserWarning")
def test_a_first_batch_of_full_rewards_that_are_the_middle_of_the_range_stops(
    make: Make, function: Any, changes: dict[str, Any], stops: bool
) -> None:
    full, about = rows(0, 1, NAN, 1), r"at most 1, .*: set correctness_range to \[0.0, 1.0\] .* to \[0.0, 2.0\]"
    make("egpo", function, **changes)(rows(0, 1, 0.5, 1))  # F1, of which none is above 1/2
    make("grpo", function, **changes)(full)
    scores, late = make("egpo", function, **changes), make("egpo", function, **changes)
    late(rows(0, 0, 0, 0))
    with pytest.raises(ValueError, match=about) if stops else contextlib.nullcontext():
        scores(full)
    with pytest.warns(UserWarning, match=about) if stops else contextlib.nullcontext():
        late(full)  # a run of days goes on


@pytest.mark.parametrize("functions", [(right,), (plain, right)])
@pytest.mark.parametrize(
    ("changes", "value"),
    [({"reward_range": (0, 2)}, 10), ({"correctness_range": (-1, 0.5)}, 1), ({"correctness_range": (0.5, 1)}, 0)],
    ids=case_id,
)
def test_a_reward_outside_a_range_is_no_signal(make: Make, functions: Any, changes: dict[str, Any], value: int) -> None:
    scores = make("egpo", *functions, correctness_reward="right", **changes)
    with pytest.raises(ValueError, match=rf"egpo asks .* 'right' gave {value}, outside .* correctness_range"):
        scores(torch.full((3, len(functions)), float(value)))


@pytest.mark.parametrize("value", [9, -9])
def test_a_reward_outside_its_range_is_told_once(make: Make, recwarn: pytest.WarningsRecorder, value: int) -> None:
    scores = make("rd_only", plain, reward_range=(0, 2))
    recwarn.clear()
    for _ in range(3):
        scores(rows(value, 2))
    (said,) = recwarn
    assert f"A reward of {value}, which measures clip, is outside reward_range (0.0, 2.0)" in str(said.message)
