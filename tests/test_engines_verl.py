"""The methods inside verl, on a CPU: its own paths from rewards to advantages, its losses, and how it finds us."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_batches import LONGEST, Batch, batch
from helpers import ROWS, G, Vowels, first_letter

pytest.importorskip("verl")

import numpy as np
import verl.trainer.ppo.v1.trainer_base as base
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transformers import TrainerCallback
from verl import DataProto
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, agg_loss
from verl.trainer.ppo.ray_trainer import compute_advantage

from gcpo import engines, methods
from gcpo.engines import verl as engine
from gcpo.errors import UserError
from gcpo.methods import METHODS
from gcpo.semantics import Embedder, Entailment, from_texts
from gcpo.world import resolve

logging.getLogger("verl").setLevel(logging.ERROR)
RUNS = [name for name, row in METHODS.items() if not engines.refusal(row)]
PRODUCTS = ["bot_only*egpo*cw_grpo", "cd_only*rd_only*egpo"]
CONSTANTS = {"reward_range": [0, 1], "seed": 3}


def algorithm(name: str, **changes: Any) -> Any:
    own = {"adv_estimator": f"gcpo/{name}", "gcpo": CONSTANTS}
    if "*" in name:
        own = {"adv_estimator": "gcpo", "gcpo": {**CONSTANTS, "method": name}}
    return OmegaConf.create({"gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False, **own, **changes})


def data(given: Batch) -> DataProto:
    """As verl holds a batch: the reward stands at the last token."""
    last = (given.mask.sum(1) - 1).clamp(min=0).long().unsqueeze(1)
    rewards = torch.zeros_like(given.mask).scatter_(1, last, given.rewards.unsqueeze(1))
    tensors = {"token_level_rewards": rewards, "response_mask": given.mask}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(given.keys, dtype=object)})


# --- from rewards to advantages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", [*RUNS, *PRODUCTS])
def test_verls_advantages_are_those_of_the_method(name: str, seed: int) -> None:
    given, config = batch(seed), algorithm(name)
    own = engine.settings_of(config, max_completion_length=LONGEST + 1)
    token = engine._step.set(engine.Step(4, own, given.of, metrics := {}))
    try:
        out = compute_advantage(data(given), config.adv_estimator, config=config).batch["advantages"]
    finally:
        engine._step.reset(token)
    wanted = torch.zeros_like(out)
    for group, values in zip(given.groups, methods.advantages(name, given.rollouts, seed=3 + 4), strict=True):
        for row, value in zip(group, values, strict=False):
            wanted[row] = value * given.mask[row]
    torch.testing.assert_close(out, wanted)
    assert metrics["gcpo/replaced_weights"] == 0 and "gcpo/weight" in metrics


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rd_only", "qhawkeye"])
def test_a_method_that_reads_rewards_alone_needs_no_trainer_of_ours(name: str) -> None:
    given = batch(1)
    out = compute_advantage(data(given), f"gcpo/{name}", config=algorithm(name)).batch["advantages"]
    first, values = given.groups[0], methods.advantages(name, given.rollouts)[0]
    for row, value in zip(first, values, strict=False):
        torch.testing.assert_close(out[row], value * given.mask[row])


def test_grpo_is_verls_own_up_to_its_epsilon() -> None:
    theirs = compute_advantage(data(batch(3)), "grpo", config={}).batch["advantages"]  # std + 1e-6, ours 1e-4
    ours = compute_advantage(data(batch(3)), "gcpo/grpo", config=algorithm("grpo")).batch["advantages"]
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "gcpo_bot",
            {},
            "gcpo_bot reads clusters, embeddings, which engines hand to no estimator: in verl, set ",
        ),
        ("r2vpo", {}, "r2vpo acts in the loss"),
        ("rd_only", {"gcpo": {}}, "algorithm.gcpo.reward_range is missing"),
        (
            "rd_only",
            {"use_kl_in_reward": True},
            "algorithm.use_kl_in_reward adds to the rewards that rd_only measures",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_a_line(name: str, changes: dict, said: str) -> None:
    with pytest.raises(UserError) as caught:
        compute_advantage(data(batch(0)), f"gcpo/{name}", config=algorithm(name, **changes))
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


# --- in verl's trainer, from texts ----------------------------------------------------------------------------------

WORDS = ("ape", "to eat", "I ate", "no", "oh no", "io", "a ooo", "at ease", "")


class Words:
    """A tokenizer whose tokens are words; the last token of a completion is silent."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(WORDS[number] for number in ids[:-1])


class Keys(list):
    partition_id = "train"

    @property
    def keys(self) -> list[str]:
        return list(self)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Batch, dict]]:
    """Advantages of a batch by the trainer's own `_compute_advantage`, between which and the workers lies a queue."""

    def run(given: Batch, config: Any, meaning: dict[str, Any], ids: list[list[int]]) -> tuple[Any, dict]:
        lengths = given.mask.sum(1).int().clamp(min=1).tolist()

        def nested(values: torch.Tensor) -> torch.Tensor:
            rows = [row[:length] for row, length in zip(values, lengths, strict=True)]
            return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

        store = {
            "response_mask": nested(given.mask),
            "responses": torch.nested.as_nested_tensor([torch.tensor(row) for row in ids], layout=torch.jagged),
            "rm_scores": nested(data(given).batch["token_level_rewards"]),
            "old_log_probs": nested(given.features["logps"]),
            "entropy": nested(given.features["entropies"]),
        }

        def get(keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
            found = TensorDict({name: store[name] for name in select_fields if name in store}, batch_size=len(keys))
            if "uid" in select_fields:
                found["uid"] = NonTensorStack(*given.keys)
            return found

        put: dict[str, Any] = {}
        monkeypatch.setattr(base.tq, "kv_batch_get", get)
        monkeypatch.setattr(base.tq, "kv_batch_put", lambda keys, partition_id, fields: put.update(fields=fields))
        trainer = object.__new__(engine.GCPOTrainerSync)
        trainer.settings = engine.settings_of(config.algorithm, max_completion_length=LONGEST + 1)
        trainer.meaning, trainer.tokenizer, trainer.global_steps, trainer.config = meaning, Words(), 4, config
        trainer._compute_advantage(Keys(f"{key}_{row}_0" for row, key in enumerate(given.keys)), metrics := {})
        return put["fields"]["advantages"].unbind(), metrics

    return run


def compare(run: Callable[..., Any], name: str, seed: int, **models: Any) -> dict[str, Any]:
    """Check verl's way from texts to advantages against ours; return what verl logs."""
    given, g = batch(seed), torch.Generator().manual_seed(seed)
    lengths = given.mask.sum(1).int().clamp(min=1).tolist()
    ids = [torch.randint(0, len(WORDS), (length,), generator=g).tolist() for length in lengths]
    meaning = {"extract": lambda text: text.strip() or None, "full_completion": False, "threshold": 0.35, **models}
    config = OmegaConf.create({"algorithm": algorithm(name), "actor_rollout_ref": {"rollout": {"n": 4}}})
    out, logged = run(given, config, meaning, ids)
    texts = [[Words().decode(ids[row]) for row in group] for group in given.groups]
    texts = [[*group, *[""] * (4 - len(group))] for group in texts]
    theirs = given.rollouts
    known = {feature: getattr(theirs, feature) for feature in ("logps", "entropies", "mask")}
    ours = from_texts(theirs.rewards, texts, reward_range=(0, 1), max_completion_length=LONGEST + 1, **meaning, **known)
    for group, values in zip(given.groups, methods.advantages(name, ours, seed=3 + 4), strict=True):
        for row, value in zip(group, values, strict=False):
            wanted = (value * given.mask[row])[: lengths[row]]
            torch.testing.assert_close(out[row], wanted)
    assert not any(out[row].any() for row, key in enumerate(given.keys) if key == "pad0")
    return logged


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*RUNS, *PRODUCTS])
def test_verls_trainer_reads_what_the_method_reads(trained: Callable[..., Any], name: str, seed: int) -> None:
    logged = compare(trained, name, seed, embedder=Embedder(Vowels()), entailment=Entailment(first_letter))
    assert logged["gcpo/replaced_weights"] == 0


@pytest.mark.parametrize("name", ["cd_only", "bot_only", "gcpo_cd", "gcpo_bot", "bot_only*egpo", "cd_only*cw_grpo"])
def test_dispersion_and_transport_with_real_models(trained: Callable[..., Any], name: str) -> None:
    models = {"embedder": Embedder("all-MiniLM-L6-v2"), "entailment": Entailment(resolve("tiny", "entailment"))}
    logged = compare(trained, name, 0, **models)
    assert logged["gcpo/weight_min"] < 0.999  # real models tell the words apart


def test_a_session_of_several_completions_is_refused() -> None:
    trainer = object.__new__(engine.GCPOTrainerSync)
    with pytest.raises(UserError, match="a_0_1: gcpo weighs groups of single completions"):
        trainer._compute_advantage(Keys(["a_0_0", "a_0_1"]), {})


def test_the_trainer_refuses_before_it_loads_anything() -> None:
    config = OmegaConf.create({"algorithm": algorithm("clip_cov"), "data": {"max_response_length": 8}})
    with pytest.raises(UserError, match="clip_cov acts in the loss"):
        engine.GCPOTrainerSync(config)
    config = OmegaConf.create({"algorithm": {"adv_estimator": "grpo"}, "data": {"max_response_length": 8}})
    with pytest.raises(UserError, match=r"algorithm.adv_estimator is grpo: gcpo_sync is for gcpo's"):
        engine.GCPOTrainerSync(config)


# --- a training -----------------------------------------------------------------------------------------------------

ACTOR = {
    "strategy": "fsdp2",
    "fsdp_config.use_torch_compile": "false",
    "ppo_micro_batch_size_per_gpu": ROWS,
    "optim.lr": "1e-2",
    "optim.weight_decay": "0",
    "optim.total_training_steps": 5,
}
OTHERS = {
    "model.use_remove_padding": "false",  # which needs flash attention
    "model.enable_gradient_checkpointing": "false",
    "rollout.name": "vllm",
    "rollout.log_prob_micro_batch_size_per_gpu": ROWS,
    "rollout.n": G,
    "rollout.calculate_log_probs": "false",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcpo_bot", "egpo"])
def test_five_steps_in_verl_are_five_steps_of_our_trainer(
    make: Callable[..., Any], scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Same completions, and with them the same policy after each step: verl computes all that lies between the two."""
    trainer = make(name, max_steps=5, lr_scheduler_type="constant", learning_rate=1e-2, temperature=1.0)
    batches, weights, scored = [], [], []
    whole, rewards = trainer._generate_and_score_completions, trainer._calculate_rewards

    def keep_rewards(*arguments: Any) -> Any:
        scored.append(rewards(*arguments))
        return scored[-1]

    def keep(inputs: Any) -> Any:
        out = whole(inputs)
        kept = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        group = torch.arange(ROWS) // G
        batches.append({**{key: out[key].clone() for key in kept}, "rewards": scored[-1].squeeze(1), "group": group})
        return out

    class Keep(TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            weights.append({key: value.detach().clone() for key, value in model.state_dict().items()})

    monkeypatch.setattr(trainer, "_calculate_rewards", keep_rewards)
    monkeypatch.setattr(trainer, "_generate_and_score_completions", keep)
    trainer.add_callback(Keep())
    trainer.train()
    torch.save({"policy": str(scratch), "batches": batches}, recorded := tmp_path / "recorded.pt")
    overrides = [
        f"{'+' * key.startswith('+')}actor_rollout_ref.{key.strip('+')}={value}" for key, value in OTHERS.items()
    ]
    overrides += [f"actor_rollout_ref.actor.{key}={value}" for key, value in ACTOR.items()]
    overrides += [f"actor_rollout_ref.actor.ppo_mini_batch_size={ROWS // G}", "data.max_response_length=6"]
    overrides += ["+actor_rollout_ref.model.override_config.attn_implementation=sdpa"]
    overrides += ["+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32"]
    own = [setting.replace("[0,1]", "[0,2]") for setting in engines.settings(name)]
    environment = {"VERL_USE_EXTERNAL_MODULES": "verl_on_cpu,gcpo.engines.verl", "VERL_PLATFORM": "cpu"}
    script = str(Path(__file__).with_name("verl_on_cpu.py"))
    done = in_a_process(tmp_path, script, str(recorded), *overrides, *own, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = torch.load(recorded.with_suffix(".verl"))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for ours, log, theirs in zip(weights, logged, steps, strict=True):
        assert theirs["metrics"]["gcpo/weight"] == pytest.approx(log["gcpo/weight"], rel=1e-5)
        assert theirs["metrics"]["actor/grad_norm"] == pytest.approx(log["grad_norm"], rel=1e-3)
        for key, value in theirs["weights"].items():
            torch.testing.assert_close(value, ours[key], atol=2e-5, rtol=1e-3)
    first = next(iter(weights[0]))
    assert not torch.equal(weights[0][first], weights[4][first])  # the policy has moved


# --- the losses that the settings name ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
def test_the_loss_that_is_set_is_the_bases(name: str) -> None:
    """Per completion, over a constant length, per token: what TRL computes of the three loss types."""
    losses, mask = torch.tensor([[1.0, 3, 9], [5, 9, 9]]), torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    given = [setting.partition(".actor.")[2] for setting in engines.settings(name)]
    mode = next(setting.partition("=")[2] for setting in given if setting.startswith("loss_agg_mode="))
    scale = 10 if "loss_scale_factor=${data.max_response_length}" in given else None
    found = agg_loss(losses, mask, mode, loss_scale_factor=scale)
    wanted = {"grpo": ((1 + 3) / 2 + 5) / 2, "dr_grpo": (1 + 3 + 5) / (2 * 10), "dapo": (1 + 3 + 5) / 3}
    assert found.item() == pytest.approx(wanted[name])


# --- how verl finds us ----------------------------------------------------------------------------------------------


def in_a_process(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python where gcpo is installed with its entry point."""
    info = tmp_path / "gcpo-0.1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gcpo\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\ngcpo = gcpo.engines.verl\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), **environment}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


def test_verl_loads_the_plugin_by_itself(tmp_path: Path) -> None:
    script = """
import verl.trainer.ppo.v1.trainer_base as base
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
print("gcpo/gcpo_bot" in ADV_ESTIMATOR_REGISTRY, base.get_trainer_cls("gcpo_sync").__name__)
"""
    done = in_a_process(tmp_path, "-c", script)
    assert done.stdout.splitlines()[-1:] == ["True GCPOTrainerSync"], done.stderr


def test_check_says_whether_verl_has_loaded_the_plugin(tmp_path: Path) -> None:
    done = in_a_process(tmp_path, "-m", "gcpo", "check", "verl", "gcpo_bot")
    assert done.stdout.splitlines()[0] == "algorithm.adv_estimator=gcpo/gcpo_bot"
    assert done.stdout.splitlines()[-1].endswith(" has loaded gcpo's plugin"), done.stderr
    done = in_a_process(tmp_path, "-m", "gcpo", "check", "verl", VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode == 2
    assert "VERL_USE_EXTERNAL_PLUGINS=none keeps gcpo's plugin out of verl: unset it" in done.stderr


def test_every_method_has_an_estimator_in_verl() -> None:
    assert {"gcpo", *(f"gcpo/{name}" for name in METHODS)} <= set(ADV_ESTIMATOR_REGISTRY)
