"""The methods in other engines, without the engines: rows to groups and back, settings, and what is refused."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
import types
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from engine_batches import LONGEST, batch

import gcpo
from gcpo import engines, methods, paths
from gcpo.cli import main
from gcpo.engines import rows
from gcpo.engines.rows import Settings
from gcpo.errors import UserError
from gcpo.methods import METHODS
from gcpo.reports.methods import methods_page
from gcpo.rollouts import Rollouts

RUNS = [name for name, row in METHODS.items() if not engines.refusal(row)]
RANGE = (0.0, 1.0)


def settings(method: str, **more: object) -> Settings:
    return Settings(method=method, reward_range=RANGE, max_completion_length=LONGEST + 1, **more)  # type: ignore[arg-type]


def test_rows_are_grouped_by_key_in_order_and_short_groups_are_filled() -> None:
    keys = ["b", "a", "pad", "b", "b", "a"]
    real = torch.tensor([True, True, False, True, True, True])
    assert rows.grouped(keys, real).tolist() == [[0, 3, 4], [1, 5, -1]]
    taken = rows.take(torch.arange(12.0).view(6, 2), rows.grouped(keys, real), -7.0)
    assert taken.tolist() == [[[0, 1], [6, 7], [8, 9]], [[2, 3], [10, 11], [-7, -7]]]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", RUNS)
def test_a_method_gives_rows_what_it_gives_groups(name: str, seed: int) -> None:
    given = batch(seed)
    found, logged = rows.advantages(
        settings(name, seed=3), given.rewards, given.mask, given.keys, step=4, features=given.of
    )
    wanted = methods.advantages(name, given.rollouts, seed=7)
    weight = methods.weights(name, given.rollouts, seed=7)
    everywhere = torch.zeros_like(found)
    for group, values in zip(given.groups, wanted, strict=True):
        for row, value in zip(group, values, strict=False):
            everywhere[row] = value * given.mask[row]
    torch.testing.assert_close(found, everywhere)
    assert logged[rows.REPLACED] == 0
    real = torch.tensor([[place < len(group) for place in range(4)] for group in given.groups])
    kept = weight[real] if weight.ndim == 2 else weight[given.rollouts.mask.bool()]
    assert logged["gcpo/weight_min"] == pytest.approx(kept.min().item())
    if weight.ndim == 2:
        assert logged["gcpo/weight"] == pytest.approx(kept.mean().item(), rel=1e-5)


def test_a_short_group_has_the_mean_and_deviation_of_its_own_rewards() -> None:
    # (0, 1, 1): mean 2/3, deviation sqrt(1/3); (0, 2): mean 1, deviation sqrt(2); epsilon 1e-4
    rewards, keys = torch.tensor([0.0, 0, 1, 2, 1]), ["a", "b", "a", "b", "a"]
    found, _ = rows.advantages(Settings(method="grpo"), rewards, torch.ones(5, 1), keys)
    low, high, far = -2 / 3 / (3**-0.5 + 1e-4), 1 / 3 / (3**-0.5 + 1e-4), 1 / (2**0.5 + 1e-4)
    assert found.squeeze(1).tolist() == pytest.approx([low, -far, high, far, high])


def test_a_weight_that_is_not_finite_becomes_one_and_is_counted() -> None:
    embeddings = torch.eye(2)[[0, 1, 0, 0]] * torch.tensor([[1.0], [1], [0], [0]])  # b's have no direction
    rewards, keys = torch.tensor([0.0, 1, 0, 1]), ["a", "a", "b", "b"]
    features = lambda rows: {"embeddings": embeddings[rows]}  # noqa: E731
    found, logged = rows.advantages(settings("cd_only"), rewards, torch.ones(4, 1), keys, features=features)
    base = methods.base_advantages(rewards.view(2, 2))
    # Two orthogonal answers: cosine 0, so CD = 1 - 1/2; strength 0.6 / log 2.
    assert logged[rows.REPLACED] == 2
    assert found.view(2, 2)[1].tolist() == base[1].tolist()
    assert found.view(2, 2)[0].tolist() == pytest.approx((base[0] * logged["gcpo/weight_min"]).tolist())
    assert logged["gcpo/weight_min"] < 0.9


def test_a_batch_of_padding_alone_has_no_advantages() -> None:
    found, logged = rows.advantages(Settings(method="grpo"), torch.ones(2), torch.zeros(2, 3), ["x", "y"])
    assert found.shape == (2, 3) and not found.any() and logged == {}


def test_rewards_outside_of_the_range_are_told() -> None:
    with pytest.warns(UserWarning, match=r"rd_only: there are rewards outside of reward_range \(0.0, 1.0\), and"):
        rows.advantages(settings("rd_only"), torch.tensor([0.0, 2.0]), torch.ones(2, 1), ["a", "a"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"metod": "se"}, "algorithm.gcpo has no setting 'metod'. Did you mean 'method'?"),
        ({"method": "gcpo_bott"}, "Unknown method 'gcpo_bott'. Did you mean 'gcpo_bot'?"),
        ({"method": "se", "method_options": {"frm": 1}}, "se has no option 'frm'. Did you mean 'form'?"),
        ({"method": "rd_only"}, "algorithm.gcpo.reward_range is missing: rd_only measures rewards"),
        ({"method": "egpo"}, "algorithm.gcpo.reward_range is missing: egpo measures rewards"),
        (
            {"method": "r2vpo"},
            "r2vpo acts in the loss, of which an engine's estimator of advantages sees nothing: ",
        ),
        ({"method": "kl_cov"}, "kl_cov acts in the loss"),
        ({"method": "care", "reward_range": RANGE}, "care needs settings of TRL's trainer"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_a_line(given: dict, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        assert Settings.of(given, "algorithm.gcpo").row  # a method is looked up when first asked for
    assert "\n" not in str(caught.value)


def test_a_method_that_reads_more_than_rewards_says_what_and_how() -> None:
    with pytest.raises(
        UserError, match=r"gcpo_shuffled reads clusters, embeddings, the number of the step, .*gcpo_sync"
    ):
        rows.advantages(settings("gcpo_shuffled"), torch.ones(2), torch.ones(2, 1), ["a", "a"])


def test_settings_have_the_names_and_defaults_of_the_trainers() -> None:
    own = {each.name: each for each in fields(Settings)}
    of_trl = {each.name: each.default for each in fields(gcpo.GCPOConfig)}
    assert own.keys() - of_trl.keys() == {"answer_extractor", "device"}
    same = own.keys() - {"answer_extractor", "method_options", "seed", "max_completion_length", "device"}
    assert {name: own[name].default for name in same} == {name: of_trl[name] for name in same}


def test_settings_of_verl_are_those_of_the_methods_base() -> None:
    actor = "actor_rollout_ref.actor."
    assert engines.settings("grpo") == [
        "algorithm.adv_estimator=gcpo/grpo",
        f"{actor}loss_agg_mode=seq-mean-token-mean",
        f"{actor}clip_ratio_high=0.2",
    ]
    assert engines.settings("gcpo_cd") == [
        "algorithm.adv_estimator=gcpo/gcpo_cd",
        "+algorithm.gcpo.reward_range=[0,1]",
        f"{actor}loss_agg_mode=seq-mean-token-mean",
        f"{actor}clip_ratio_high=0.2",
        "trainer.v1.trainer_mode=gcpo_sync",
    ]
    assert engines.settings("dapo")[2:5] == [
        f"{actor}loss_agg_mode=token-mean",
        f"{actor}clip_ratio_high=0.28",
        "algorithm.filter_groups.enable=true",
    ]


def test_the_page_of_methods_says_of_each_whether_it_runs_in_verl() -> None:
    section = methods_page().partition("## In verl")[2]
    for name, row in METHODS.items():
        line = next(line for line in section.splitlines() if f"`{name}`" in line)
        assert (engines.refusal(row) in line) if engines.refusal(row) else line.startswith("| yes")


def test_check_prints_settings_and_says_that_verl_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)  # as if it were not installed
    assert main(["check", "verl", "cd_only"]) == 2
    said = capsys.readouterr()
    assert said.out.splitlines() == engines.settings("cd_only")
    assert said.err.startswith("gcpo: verl or its plugin cannot be imported (") and "pip install verl==" in said.err
    assert main(["check", "verl", "clip_cov"]) == 2
    assert "gcpo: clip_cov acts in the loss" in capsys.readouterr().err


@pytest.mark.parametrize(("version", "tried"), [("0.8.0", False), ("0.9.0", True), ("0.9.1", True), ("0.10.0", False)])
def test_a_verl_that_the_tests_have_not_seen_is_told(version: str, tried: bool) -> None:
    said = engines.untried(version)
    assert said == "" if tried else said.startswith(f"verl {version}: gcpo was tried with 0.9.0 to 0.9.1; pip install")


def test_the_entry_point_of_verl_is_a_module_of_ours() -> None:
    project = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]
    place = project["entry-points"]["verl.plugins"]["gcpo"]
    assert (Path(gcpo.__file__).parents[1] / Path(*place.split("."))).with_suffix(".py").exists()


def test_skyrl_has_the_methods_that_read_rewards_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for its registry: SkyRL pads with copies of the first row, whose keys are pad0, pad1, ..."""
    known: dict = {}
    place = "skyrl.backends.skyrl_train.utils.ppo_utils"
    for name in (place.rsplit(".", count)[0] for count in range(4, -1, -1)):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[place].register_advantage_estimator = lambda name: lambda call: known.setdefault(name, call)
    monkeypatch.delitem(sys.modules, "gcpo.engines.skyrl", raising=False)
    importlib.import_module("gcpo.engines.skyrl")
    assert sorted(known) == [f"gcpo/{name}" for name in "dr_grpo grpo qhawkeye rd_only".split()]
    monkeypatch.setenv("GCPO_SETTINGS", '{"reward_range": [0, 1]}')
    rewards = torch.tensor([[0.0], [1], [1], [0], [0]])
    given = {"token_level_rewards": rewards, "response_mask": torch.ones(5, 1), "index": ["a", "a", "b", "b", "pad0"]}
    found, _ = known["gcpo/rd_only"](**given, config=None, values=None)
    wanted = methods.advantages("rd_only", Rollouts(torch.tensor([[0.0, 1], [1, 0]]), reward_range=RANGE))
    assert found.squeeze(1).tolist() == pytest.approx([*wanted.flatten().tolist(), 0])
