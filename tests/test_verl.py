"""The methods in verl: rows to groups and back, its trainer with a stand-in, and its own code where it is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import Vowels, first_letter
from torch import Tensor

import gcpo
from gcpo import methods, verl
from gcpo.methods import METHODS
from gcpo.rollouts import Rollouts
from gcpo.semantics import Embedder, Entailment, from_texts
from gcpo.verl import Settings, Step, advantages, command_line, grouped, settings_of, take

RUNS = [name for name, row in METHODS.items() if not verl.refusal(row)]
GROUPS, SIZE, LONGEST, PADS, ENDS = 5, 4, 7, 3, (0.0, 1.0)
CONSTANTS = {"reward_range": ENDS, "seed": 3}
in_verl = pytest.mark.skipif(bool(verl.MISSING), reason="verl is not installed (make test-verl)")


@dataclass
class Batch:
    """N rows as verl hands them over: out of order, two groups that lack one and two, and rows of padding without a
    token; ``groups`` are the numbers of each group's rows, in the order in which groups and rows appear."""

    keys: list[str]
    rewards: Tensor
    mask: Tensor
    features: dict[str, Tensor]
    groups: list[list[int]]

    @classmethod
    def drawn(cls, seed: int) -> Batch:
        g = torch.Generator().manual_seed(seed)
        names = [f"u{group}" for group in range(GROUPS) for _ in range(SIZE)]
        for left_out in (2 * SIZE + 3, 2 * SIZE, 1):
            del names[left_out]
        names += ["pad0"] * PADS
        keys = [names[place] for place in torch.randperm(len(names), generator=g).tolist()]
        count, real = len(keys), torch.tensor([key != "pad0" for key in keys])
        lengths = torch.randint(1, LONGEST + 1, (count,), generator=g)
        labels = ("clusters", "exact_clusters", "math_clusters", "task_clusters")
        features = {
            "logps": -torch.rand(count, LONGEST, generator=g),
            "entropies": torch.rand(count, LONGEST, generator=g),
            "embeddings": torch.randn(count, 6, generator=g),
            "answered": torch.randint(0, 2, (count,), generator=g),
            **{name: torch.randint(0, 3, (count,), generator=g) for name in labels},
        }
        rewards = torch.rand(count, generator=g) if seed % 2 else torch.randint(0, 2, (count,), generator=g).float()
        mask = ((torch.arange(LONGEST) < lengths.unsqueeze(1)) & real.unsqueeze(1)).float()
        groups = {key: [row for row, other in enumerate(keys) if other == key] for key in keys if key != "pad0"}
        return cls(keys, rewards, mask, features, list(groups.values()))

    def of(self, rows: Tensor) -> dict[str, Tensor]:
        """Features of rows (B, G), where -1 is no row, of which a method must not read anything."""
        g = torch.Generator().manual_seed(9)
        nli = torch.rand(len(self.keys), len(self.keys), 3, generator=g).softmax(-1)
        known = {name: values[rows] for name, values in self.features.items()}
        for values in known.values():
            values[rows < 0] = 0
        return known | {"nli": nli[rows[:, :, None], rows[:, None, :]]}

    @property
    def rollouts(self) -> Rollouts:
        """Rollouts of the same completions; a group that lacks some has rewards that are NaN."""
        rows = torch.tensor([[*group, *[-1] * (SIZE - len(group))] for group in self.groups])
        rewards = self.rewards[rows].masked_fill(rows < 0, torch.nan)
        mask = self.mask[rows] * (rows >= 0).unsqueeze(2)
        return Rollouts(rewards, reward_range=ENDS, mask=mask, max_completion_length=LONGEST + 1, **self.of(rows))

    def rows(self, values: Tensor) -> Tensor:
        """Values of groups as rows with tokens."""
        found = torch.zeros_like(self.mask)
        for group, own in zip(self.groups, values, strict=True):
            for row, value in zip(group, own, strict=False):
                found[row] = value * self.mask[row]
        return found


def settings(method: str, **more: Any) -> Settings:
    return Settings(**{"method": method, "reward_range": ENDS, "max_completion_length": LONGEST + 1, **more})


# --- rows and groups --------------------------------------------------------------------------------------------------


def test_rows_are_grouped_by_key_in_order_and_short_groups_are_filled() -> None:
    real = torch.tensor([True, True, False, True, True, True])
    rows = grouped(["b", "a", "pad", "b", "b", "a"], real)
    assert rows.tolist() == [[0, 3, 4], [1, 5, -1]]
    taken = take(torch.arange(12.0).view(6, 2), rows, -7.0)
    assert taken.tolist() == [[[0, 1], [6, 7], [8, 9]], [[2, 3], [10, 11], [-7, -7]]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RUNS)
def test_a_method_gives_rows_what_it_gives_groups(name: str, seed: int) -> None:
    given = Batch.drawn(seed)
    step = Step(settings(name, seed=3), 4, given.of)
    found = advantages(step, given.rewards, given.mask, given.keys)
    torch.testing.assert_close(found, given.rows(methods.advantages(name, given.rollouts, seed=7)))
    weight = methods.weights(name, given.rollouts, seed=7)
    kept = weight[given.rollouts.scorable] if weight.ndim == 2 else weight[given.rollouts.mask.bool()]
    assert step.metrics["gcpo/weight_min"] == pytest.approx(kept.min().item())
    assert weight.ndim == 3 or step.metrics["gcpo/weight"] == pytest.approx(kept.mean().item(), rel=1e-5)
    assert step.metrics["gcpo/replaced_weights"] == 0


def test_padding_alone_has_no_advantage() -> None:
    found = advantages(Step(Settings(method="grpo")), torch.ones(2), torch.zeros(2, 3), ["a", "b"])
    assert found.shape == (2, 3) and not found.any()


def test_a_weight_that_is_not_finite_becomes_one_and_is_counted() -> None:
    embeddings = torch.eye(2)[[0, 1, 0, 0]] * torch.tensor([[1.0], [1], [0], [0]])  # b's have no direction
    step = Step(settings("cd_only"), features=lambda rows: {"embeddings": embeddings[rows]})
    found = advantages(step, rewards := torch.tensor([0.0, 1, 0, 1]), torch.ones(4, 1), ["a", "a", "b", "b"])
    base, weight = methods.base_advantages(rewards.view(2, 2)), step.metrics["gcpo/weight_min"]
    assert step.metrics["gcpo/replaced_weights"] == 2 and weight < 0.9
    assert found.flatten().tolist() == pytest.approx([*(base[0] * weight).tolist(), *base[1].tolist()])


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changes", "named"),
    [
        ("gcpo_bott", {}, ["gcpo_bott", "gcpo_bot"]),
        ("se", {"gcpo": {"method_options": {"frm": 1}}}, ["frm", "form"]),
        ("se", {"gcpo": {"metod": "se"}}, ["metod"]),
        ("rd_only", {"gcpo": {}}, ["algorithm.gcpo.reward_range", "rd_only"]),
        ("egpo", {"gcpo": {}}, ["algorithm.gcpo.reward_range", "egpo"]),
        ("rd_only", {"use_kl_in_reward": True}, ["algorithm.use_kl_in_reward", "rd_only"]),
        ("kl_cov", {}, ["kl_cov", "GCPOTrainer"]),
        ("care", {}, ["care", "GCPOTrainer"]),
    ],
)
def test_what_cannot_work_is_refused_by_its_name(method: str, changes: dict[str, Any], named: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        settings_of({"adv_estimator": f"gcpo/{method}", "gcpo": CONSTANTS, **changes})
    assert all(name in str(caught.value) for name in named)


def test_a_method_that_reads_more_than_rewards_asks_for_the_trainer_and_range_is_watched() -> None:
    rewards, keys = torch.tensor([0.0, 2.0]), ["a", "a"]
    with pytest.raises(ValueError, match=r"gcpo_shuffled.*clusters, embeddings, the number of the step.*gcpo_sync"):
        advantages(Step(settings("gcpo_shuffled")), rewards, torch.ones(2, 1), keys)
    with pytest.warns(UserWarning, match=r"rd_only.*reward_range \(0.0, 1.0\)"):
        advantages(Step(settings("rd_only")), rewards, torch.ones(2, 1), keys)


def test_settings_have_the_names_and_defaults_of_the_trainers() -> None:
    own, of_trl = ({each.name: each for each in fields(made)} for made in (Settings, gcpo.GCPOConfig))
    assert own.keys() - of_trl.keys() == {"answer_extractor", "device"}
    same = own.keys() - {"answer_extractor", "method_options", "seed", "max_completion_length", "device"}
    assert {name: own[name].default for name in same} == {name: of_trl[name].default for name in same}


def test_the_command_line_has_the_loss_of_the_methods_base() -> None:
    actor = "actor_rollout_ref.actor."
    assert command_line("gcpo_cd") == [
        "algorithm.adv_estimator=gcpo/gcpo_cd",
        "+algorithm.gcpo.reward_range=[0,1]",
        f"{actor}loss_agg_mode=seq-mean-token-mean",
        f"{actor}clip_ratio_high=0.2",
        "trainer.v1.trainer_mode=gcpo_sync",
    ]
    assert command_line("dapo")[2:5] == [
        f"{actor}loss_agg_mode=token-mean",
        f"{actor}clip_ratio_high=0.28",
        "algorithm.filter_groups.enable=true",
    ]


# --- the trainer ------------------------------------------------------------------------------------------------------

WORDS = ("ape", "to eat", "I ate", "no", "oh no", "io", "a ooo", "at ease", "")


def decode(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """Tokens are words; the last one of a completion is silent."""
    return " ".join(WORDS[number] for number in ids[:-1])


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin with stand-ins for what it imports; verl's trainer asks the estimator that is set."""
    known: dict[str, Any] = {}

    class PPOTrainerSync:
        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Tensor:
            last = (batch.given.mask.sum(1) - 1).clamp(min=0).long().unsqueeze(1)
            scores = torch.zeros_like(batch.given.mask).scatter_(1, last, batch.given.rewards.unsqueeze(1))
            estimate, config = known[self.algorithm["adv_estimator"]], self.algorithm  # type: ignore[attr-defined]
            own = {"token_level_rewards": scores, "response_mask": batch.given.mask, "index": batch.given.keys}
            return estimate(**own, config=config)[0]

    def register(name: str) -> Any:
        return lambda made: known.setdefault(name, made)

    omega = SimpleNamespace(create=dict, to_container=lambda of, resolve: of)
    stand_ins: dict[str, dict[str, Any]] = {
        "transfer_queue": {"kv_batch_get": lambda keys, place, select_fields: known["data"]},
        "omegaconf": {"OmegaConf": omega},
        **{name: {"__version__": "0"} for name in ("verl", "verl.trainer", "verl.trainer.ppo")},
        "verl.trainer.ppo.core_algos": {"ADV_ESTIMATOR_REGISTRY": known, "register_adv_est": register},
        "verl.trainer.ppo.v1": {"PPOTrainerSync": PPOTrainerSync, "register_trainer": register},
    }
    for name, has in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(has)
    spec = importlib.util.spec_from_file_location("verl_plugin", verl.__file__)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "verl_plugin", module)
    spec.loader.exec_module(module)
    module.known = known  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("name", RUNS)
def test_the_trainer_reads_what_the_method_reads(plugin: Any, name: str) -> None:
    given, g = Batch.drawn(1), torch.Generator().manual_seed(1)
    lengths = given.mask.sum(1).int().clamp(min=1).tolist()
    ids = [torch.randint(0, len(WORDS), (length,), generator=g) for length in lengths]

    def nested(name: str) -> Tensor:
        rows = [row[:length] for row, length in zip(given.features[name], lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    plugin.known["data"] = {
        "responses": torch.nested.as_nested_tensor(ids, layout=torch.jagged),
        "old_log_probs": nested("logps"),
        "entropy": nested("entropies"),
    }
    trainer = object.__new__(plugin.known["gcpo_sync"])
    trainer.algorithm = {"adv_estimator": f"gcpo/{name}", "gcpo": CONSTANTS}
    trainer.settings = plugin.settings_of(trainer.algorithm, max_completion_length=LONGEST + 1)
    meaning = {"embedder": Embedder(Vowels()), "entailment": Entailment(first_letter), "threshold": 0.35}
    meaning |= {"extract": lambda text: text.strip() or None, "full_completion": False}
    trainer.meaning, trainer.tokenizer, trainer.global_steps = meaning, SimpleNamespace(decode=decode), 4
    keys = [f"{key}_{row}_0" for row, key in enumerate(given.keys)]
    found = trainer._compute_advantage(SimpleNamespace(keys=keys, partition_id="train", given=given), metrics := {})
    texts = [[decode(ids[row].tolist()) for row in group] + [""] * (SIZE - len(group)) for group in given.groups]
    known = {feature: getattr(given.rollouts, feature) for feature in ("logps", "entropies", "mask")}
    known |= {"reward_range": ENDS, "max_completion_length": LONGEST + 1}
    ours = from_texts(given.rollouts.rewards, texts, **meaning, **known)
    torch.testing.assert_close(found, given.rows(methods.advantages(name, ours, seed=3 + 4)))
    assert metrics["gcpo/replaced_weights"] == 0 and "gcpo/weight" in metrics
    with pytest.raises(ValueError, match="a_0_1"):
        trainer._compute_advantage(SimpleNamespace(keys=["a_0_0", "a_0_1"]), {})


# --- in verl's own code -----------------------------------------------------------------------------------------------


@in_verl
@pytest.mark.parametrize("name", RUNS)
def test_verls_advantages_are_those_of_the_method(name: str) -> None:
    import numpy as np
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    given, config = Batch.drawn(1), {"adv_estimator": f"gcpo/{name}", "gcpo": {**CONSTANTS, "reward_range": [0, 1]}}
    algorithm = OmegaConf.create({"gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False, **config})
    last = (given.mask.sum(1) - 1).clamp(min=0).long().unsqueeze(1)
    rewards = torch.zeros_like(given.mask).scatter_(1, last, given.rewards.unsqueeze(1))
    keys = {"uid": np.array(given.keys, dtype=object)}
    data = DataProto.from_dict({"token_level_rewards": rewards, "response_mask": given.mask}, non_tensors=keys)
    own = settings_of(algorithm, max_completion_length=LONGEST + 1)
    token = verl._step.set(Step(own, 4, given.of))
    try:
        out = compute_advantage(data, algorithm.adv_estimator, config=algorithm).batch["advantages"]
    finally:
        verl._step.reset(token)
    torch.testing.assert_close(out, given.rows(methods.advantages(name, given.rollouts, seed=3 + 4)))


@in_verl
@pytest.mark.parametrize(("name", "expected"), [("grpo", 3.5), ("dr_grpo", 9 / 20), ("dapo", 3)])
def test_the_loss_that_is_set_is_the_bases(name: str, expected: float) -> None:
    """Per completion, over a constant length, per token: what TRL computes of the three loss types."""
    from verl.trainer.ppo.core_algos import agg_loss

    losses, mask = torch.tensor([[1.0, 3, 9], [5, 9, 9]]), torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    mode, *scale = (setting.partition("=")[2] for setting in verl.LOSSES[name])
    assert agg_loss(losses, mask, mode, loss_scale_factor=10 if scale else None).item() == pytest.approx(expected)


def in_a_process(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python where gcpo is installed with its entry point."""
    info = folder / "gcpo-0.1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gcpo\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\ngcpo = gcpo.verl\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), **environment}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


def test_the_module_prints_settings_and_says_whether_verl_has_the_plugin(tmp_path: Path) -> None:
    done = in_a_process(tmp_path, "-m", "gcpo.verl", "cd_only")
    assert done.stdout.splitlines()[:4] == command_line("cd_only")
    if verl.MISSING:
        assert done.returncode == 1 and "pip install verl==" in done.stderr
    else:
        assert done.stdout.splitlines()[-1].startswith("verl ") and done.returncode == 0
        done = in_a_process(tmp_path, "-m", "gcpo.verl", VERL_USE_EXTERNAL_PLUGINS="none")
        assert done.returncode == 1 and "VERL_USE_EXTERNAL_PLUGINS" in done.stderr
