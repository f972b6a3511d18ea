"""Weights of one's own: functions of the rollouts in the trainer, in runs and in verl, and what is refused."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from helpers import by_group, generate, script, table

from gcpo import GCPOConfig, paths
from gcpo.methods import base_advantages, expand, get_method, weights
from gcpo.reports.methods import markdown
from gcpo.rollouts import Rollouts
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.verl import Settings

example = script("examples/your_own_weight.py")
REWARDS = ((0, 2, 2, 0), (1, 1, 1, 1), (0, 0, 0, 0.7))


def hard(rollouts: Rollouts, power: float = 1.0) -> torch.Tensor:
    """Hard questions count more."""
    return (1 - rollouts.correctness.mean(1)) ** power


FUNCTIONS = {
    "group": lambda rollouts: 1 / (1 + rollouts.rewards.mean(1)),
    "response": lambda rollouts: 1 + rollouts.rewards,
    "token": lambda rollouts: 1 + rollouts.mask * rollouts.rewards.unsqueeze(-1),
}


@pytest.mark.parametrize("unit", FUNCTIONS)
def test_the_trainer_multiplies_advantages_by_what_the_function_gives(make: Any, unit: str) -> None:
    seen: list[Rollouts] = []
    trainer = make(FUNCTIONS[unit], reward_funcs=table(*REWARDS), callback=seen.append)
    trained_on = expand(by_group(generate(trainer)["advantages"]), 3)
    (rollouts,) = seen
    expected = expand(base_advantages(rollouts.rewards), 3) * expand(FUNCTIONS[unit](rollouts), 3)
    kept = rollouts.mask if unit == "token" else 1
    torch.testing.assert_close(trained_on * kept, (expected * kept).to(trained_on), rtol=1e-5, atol=1e-6)
    assert trainer.args.method == f"{__name__}:<lambda>" and trainer.method.granularity == unit


WRONG = {
    "shape (3,), expected (B,), (B, G) or (B, G, T) with (B, G) = (2, 4)": lambda rollouts: torch.ones(3),
    "gives a float": lambda rollouts: 1.0,
    "[nan, nan, nan, nan]": lambda rollouts: rollouts.rewards / rollouts.rewards.sum(1, keepdim=True),
    "gives -1, and a weight is at least 0": lambda rollouts: -rollouts.rewards,
    "Did you mean 'embeddings'?": lambda rollouts: rollouts.embedings,
    "no 'ratios'": lambda rollouts: rollouts.ratios.mean(2),  # which there are in the loss alone
}


@pytest.mark.parametrize("said", WRONG)
def test_what_is_no_weight_is_refused_in_one_line_before_a_model_is_loaded(said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tried on") as error:
        GCPOConfig(str(tmp_path), method=WRONG[said], bf16=False)
    assert said in str(error.value) and "\n" not in str(error.value)
    for name, said in (("nowhere:mine", "No module.*PYTHON"), ("math:no", "attribute 'no'.$"), ("a.b", "module:name")):
        with pytest.raises(ValueError, match=f"Unknown method .*{said}"):
            get_method(name)


def test_what_is_written_of_a_function_has_no_address() -> None:
    with pytest.raises(ValueError, match=f"^{__name__}:hard has no option 'form'. It has none.$"):
        get_method(hard, form="linear")
    half, whole = (get_method(partial(hard, power=power)) for power in (0.5, 1))
    assert half.rule == whole.rule == "Hard questions count more." and half.constants() != whole.constants()
    assert half.constants()["parts"][0]["function"].startswith(f"{__name__}:hard ")


def test_a_lambda_trains_and_saves_and_a_function_is_found_again(make: Any, tmp_path: Path) -> None:
    trainer = make(lambda r: 1 - r.correctness.mean(1), max_steps=1, save_steps=1, save_strategy="steps")
    trainer.train()
    (path,) = tmp_path.glob("**/checkpoint-1/training_args.bin")
    assert torch.load(path, weights_only=False).method.endswith("<lambda>")
    for method in (hard, "gcpo_bot"):
        args = GCPOConfig(str(tmp_path), method=method, bf16=False)
        assert pickle.loads(pickle.dumps(args)).resolved_method() == args.resolved_method()


def test_a_trial_finds_what_the_function_reads() -> None:
    found = get_method(lambda r: r.clusters * r.correctness * r.embeddings.norm(dim=2) * r.reward_range[1])
    assert (found.reads, found.needs_entailment(False)) == ({"clusters", "embeddings"}, True)
    assert (found.needs_correctness, found.reads_range, found.granularity) == (True, True, "response")
    assert get_method(lambda r: r.cluster_labels("exact") * r.entropies.sum(2)).reads == {"exact_clusters", "entropies"}


def test_responses_without_a_reward_keep_weight_1() -> None:
    rollouts = Rollouts(torch.tensor([[1.0, torch.nan, 0.0], [torch.nan] * 3]))
    assert weights(lambda r: 2 + r.rewards, rollouts).tolist() == [[3, 1, 2], [1, 1, 1]]


def test_a_run_is_named_by_its_function_s_place_and_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    plans = []
    for name, power in (("mine_a", 1), ("mine_b", 2)):
        (tmp_path / f"{name}.py").write_text(f"def hard(r):\n    return (1 - r.correctness.mean(1)) ** {power}\n")
        plans.append(Plan("train", validate({"method": f"{name}:hard"})))
    first, second = (plan.values["method"]["parts"][0]["function"].split() for plan in plans)
    assert first[0] == "mine_a:hard" and first[1] != second[1] and plans[0].id.startswith("tinyqa-hard-0-")
    assert Settings(method="mine_a:hard").row.needs_correctness


@pytest.mark.slow
def test_the_example_has_the_weights_of_its_papers_and_trains(capsys: pytest.CaptureFixture[str]) -> None:
    groups = Rollouts(torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]), reward_range=(0, 1))
    focal, difficulty = (weights(function, groups)[:, 0] for function in (example.focal, example.difficulty))
    torch.testing.assert_close(focal, torch.tensor([0.5, 0.75**0.5, 0.0, 1.0]))
    easy, hard = torch.tensor([-0.75, -0.25]).div(2).exp()
    torch.testing.assert_close(
        difficulty, torch.stack([2 * easy / (easy + hard), 2 * hard / (easy + hard), *torch.ones(2)])
    )

    example.main()
    assert "step 2: mean weight" in capsys.readouterr().out
    kept = markdown(pd.read_csv(paths.ROOT / "examples/your_own_weight.csv", dtype=str))
    assert kept in (paths.ROOT / "docs/own_weight.md").read_text()
