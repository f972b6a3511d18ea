"""The methods in verl: its trainer with stand-ins for what it asks, and verl's own code where it is installed."""

import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import first_letter, vowel_counts
from torch import Tensor

import gcpo
from gcpo import methods, paths, verl
from gcpo.methods import BASES, METHODS, expand
from gcpo.rollouts import Rollouts
from gcpo.semantics import Embedder, Entailment, from_texts
from gcpo.verl import Settings, Step, advantages, asks, settings_of

RUNS = [name for name, row in METHODS.items() if not verl.refusal(row)]
GROUPS, SIZE, LONGEST, ENDS = 5, 4, 7, (0.0, 1.0)
AGGREGATIONS = {"grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm", "dapo": "token-mean"}
in_verl = pytest.mark.skipif(bool(verl.MISSING), reason="verl is not installed (make test-verl)")


def settings(method: str) -> Settings:
    return Settings(method=method, reward_range=ENDS, max_completion_length=LONGEST + 1, seed=3)


def drawn() -> dict[str, Tensor]:
    """Groups (B, G) as rollouts have them: one lacks a completion and one two, without rewards and tokens."""
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, LONGEST + 1, (GROUPS, SIZE, 1), generator=g)
    lengths[1, 3:], lengths[3, 2:] = 0, 0
    rewards, logps, entropies = torch.rand(3, GROUPS, SIZE, LONGEST, generator=g)
    rewards = rewards[..., 0].masked_fill(lengths.squeeze(2) == 0, torch.nan)
    return {"rewards": rewards, "logps": -logps, "entropies": entropies, "mask": torch.arange(LONGEST) < lengths}


def by_row(values: Tensor) -> Tensor:
    """Values of groups (B, G, ...) as rows (N, ...) with the rows of a group apart, as verl may have them."""
    return values.transpose(0, 1).flatten(0, 1)


def as_verl_has(given: dict[str, Tensor]) -> dict[str, Any]:
    """Rows as verl hands them to an estimator: in the place of completions that a group lacks are rows of padding."""
    rewards, mask = by_row(given["rewards"]).nan_to_num(), by_row(given["mask"])
    keys = [f"u{row % GROUPS}" if tokens.any() else "pad" for row, tokens in enumerate(mask)]
    by_token = mask / mask.sum(1, keepdim=True).clamp(min=1) * rewards.unsqueeze(1)
    return {"token_level_rewards": by_token, "response_mask": mask.float(), "index": keys}


def as_rows(given: dict[str, Tensor], values: Tensor) -> Tensor:
    """Advantages of groups as rows with tokens."""
    return by_row(expand(values, 3) * given["mask"])


# --- the estimator ----------------------------------------------------------------------------------------------------


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


def test_a_method_that_reads_more_than_rewards_asks_for_the_trainer_and_range_is_watched() -> None:
    rewards, keys = torch.tensor([0.0, 2.0]), ["a", "a"]
    with pytest.raises(ValueError, match=r"gcpo_shuffled.*clusters, embeddings, the number of the step.*gcpo_sync"):
        advantages(Step(settings("gcpo_shuffled")), rewards, torch.ones(2, 1), keys)
    with pytest.warns(UserWarning, match=r"rd_only.*reward_range \(0.0, 1.0\)"):
        advantages(Step(settings("rd_only")), rewards, torch.ones(2, 1), keys)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changes", "named"),
    [
        ("se", {"gcpo": {"method_options": {"frm": 1}}}, "frm.*form"),
        ("rd_only", {}, "algorithm.gcpo.reward_range.*rd_only"),
        ("egpo", {}, "algorithm.gcpo.reward_range.*egpo"),
        ("rd_only", {"gcpo": {"reward_range": ENDS}, "use_kl_in_reward": True}, "algorithm.use_kl_in_reward.*rd_only"),
        ("kl_cov", {}, "kl_cov.*GCPOTrainer"),
        ("care", {}, "care.*GCPOTrainer"),
    ],
)
def test_what_cannot_work_is_refused_by_its_name(method: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        settings_of({"adv_estimator": f"gcpo/{method}", **changes})


def test_settings_have_the_names_and_defaults_of_the_trainers() -> None:
    own, of_trl = ({each.name: each.default for each in fields(made)} for made in (Settings, gcpo.GCPOConfig))
    differing = {name for name in own if name not in of_trl or own[name] != of_trl[name]}
    assert differing <= {"answer_extractor", "method_options", "seed", "max_completion_length", "device"}


def test_the_page_names_the_base_and_the_loss_of_every_method() -> None:
    others = {name: METHODS[name].base for name in RUNS if METHODS[name].base != "grpo"}
    assert others == {"dr_grpo": "dr_grpo", "seed_grpo": "dr_grpo", "dapo": "dapo"}
    assert [name for name in RUNS if METHODS[name].drops_equal] == ["dapo"]
    assert {base.get("epsilon_high", 0.2) for base in BASES.values()} == {0.2, BASES["dapo"]["epsilon_high"], 0.28}
    page = " ".join((paths.ROOT / "docs" / "verl.md").read_text().split())
    said = re.findall(r"`loss_agg_mode=(\S+)(?: loss_scale_factor=\S+)? clip_ratio_high=(\S+)`", page)
    assert said == [(way, "0.28" if base == "dapo" else "0.2") for base, way in AGGREGATIONS.items()]


# --- the trainer ------------------------------------------------------------------------------------------------------

WORDS = ("ape", "to eat", "I ate", "no", "oh no", "io", "a ooo", "at ease", "")


def decode(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """Tokens are words; the last one of a completion is silent."""
    return " ".join(WORDS[number] for number in ids[:-1])


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Parts that the plugin registers with stand-ins for verl, of which the trainer asks the estimator that is set."""
    known: dict[str, Any] = {}

    class PPOTrainerSync:
        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Tensor:
            return known[self.estimator](**batch.given, config=None)[0]  # type: ignore[attr-defined]

    def register(name: str) -> Any:
        return lambda made: known.setdefault(name, made)

    stand_ins: dict[str, dict[str, Any]] = {
        "transfer_queue": {"kv_batch_get": lambda keys, place, select_fields: known["data"]},
        "omegaconf": {"OmegaConf": None},
        **{name: {} for name in ("verl", "verl.trainer", "verl.trainer.ppo")},
        "verl.trainer.ppo.core_algos": {"register_adv_est": register},
        "verl.trainer.ppo.v1": {"PPOTrainerSync": PPOTrainerSync, "register_trainer": register},
    }
    for name, has in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(has)
    runpy.run_path(verl.__file__)
    return known


@pytest.mark.parametrize("name", RUNS)
def test_the_trainer_gives_rows_what_the_method_gives_groups(known: dict[str, Any], name: str) -> None:
    given, g = drawn(), torch.Generator().manual_seed(1)
    lengths = given["mask"].sum(2).clamp(min=1)  # a row of padding has a token, of which nothing is learnt
    ids = [torch.randint(0, len(WORDS), (length,), generator=g) for length in by_row(lengths).tolist()]

    def nested(rows: Sequence[Tensor]) -> Tensor:
        cut = [row[: len(own)] for row, own in zip(rows, ids, strict=True)]
        return torch.nested.as_nested_tensor(cut, layout=torch.jagged)

    known["data"] = {"responses": nested(ids), "old_log_probs": nested(list(by_row(given["logps"])))}
    known["data"]["entropy"] = nested(list(by_row(given["entropies"])))
    trainer = object.__new__(known["gcpo_sync"])
    trainer.estimator, trainer.settings, trainer.global_steps = f"gcpo/{name}", settings(name), 4
    meaning = {"embedder": Embedder(vowel_counts), "entailment": Entailment(first_letter), "threshold": 0.35}
    meaning |= {"extract": lambda text: text.strip() or None, "full_completion": False}
    trainer.meaning, trainer.tokenizer = meaning, SimpleNamespace(decode=decode)
    keys = [f"{row}_0" for row in range(len(ids))]
    batch = SimpleNamespace(keys=keys, partition_id="train", given=as_verl_has(given))
    found = trainer._compute_advantage(batch, metrics := {})

    texts = [[decode(ids[GROUPS * place + group].tolist()) for place in range(SIZE)] for group in range(GROUPS)]
    limits: dict[str, Any] = {"reward_range": ENDS, "max_completion_length": LONGEST + 1}
    ours = from_texts(groups=texts, **given, **meaning, **limits)
    torch.testing.assert_close(found, as_rows(given, methods.advantages(name, ours, seed=3 + 4)))
    weight = methods.weights(name, ours, seed=3 + 4)
    kept = weight[ours.scorable] if weight.ndim == 2 else weight[given["mask"]]
    found_ends = metrics["gcpo/weight_min"], metrics["gcpo/weight_max"]
    assert found_ends == pytest.approx((kept.min().item(), kept.max().item()))
    assert weight.ndim == 3 or metrics["gcpo/weight"] == pytest.approx(kept.mean().item(), rel=1e-5)
    assert metrics["gcpo/replaced_weights"] == 0
    with pytest.raises(ValueError, match="a_0_1"):
        trainer._compute_advantage(SimpleNamespace(keys=["a_0_0", "a_0_1"]), {})


# --- in verl's own code -----------------------------------------------------------------------------------------------


@in_verl
@pytest.mark.parametrize("name", [name for name in RUNS if not asks(METHODS[name])])
def test_verls_advantages_are_those_of_the_method(name: str) -> None:
    import numpy as np
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    given, config = drawn(), {"adv_estimator": f"gcpo/{name}", "gcpo": {"reward_range": [0, 1]}}
    algorithm = OmegaConf.create({"gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False, **config})
    rows = as_verl_has(given)
    keys = {"uid": np.array(rows.pop("index"), dtype=object)}
    data = DataProto.from_dict(rows, non_tensors=keys)
    found = compute_advantage(data, algorithm.adv_estimator, config=algorithm).batch["advantages"]
    expected = methods.advantages(name, Rollouts(given["rewards"], reward_range=ENDS))
    torch.testing.assert_close(found, as_rows(given, expected))


@in_verl
@pytest.mark.parametrize(("name", "expected"), [("grpo", 3.5), ("dr_grpo", 9 / 20), ("dapo", 3)])
def test_the_loss_that_is_set_is_the_bases(name: str, expected: float) -> None:
    """Per completion, over a constant length, per token: what TRL computes of the three loss types."""
    from verl.trainer.ppo.core_algos import agg_loss

    losses, mask = torch.tensor([[1.0, 3, 9], [5, 9, 9]]), torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    scale = 10 if name == "dr_grpo" else None
    assert agg_loss(losses, mask, AGGREGATIONS[name], loss_scale_factor=scale).item() == pytest.approx(expected)


@in_verl
def test_verl_has_loaded_the_plugin_by_its_entry_point() -> None:
    asked = re.search(r'python -c "(from verl.*known\))"', (paths.ROOT / "docs" / "verl.md").read_text())
    assert asked and subprocess.check_output([sys.executable, "-c", asked[1]], text=True).strip() == "True"
