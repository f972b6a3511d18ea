"""GCPOTrainer against TRL's own trainer, and what it computes, logs and refuses."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from gcpo import GCPOConfig, GCPOTrainer
from gcpo.evaluation import load_policy
from gcpo.methods import METHODS

G, PROMPTS, STEPS = 4, 3, 3
WITH_ALPHA = [n for n, row in METHODS.items() if row.factors and row.factors[0].granularity == "group"]
GRPO = {"loss_type": "grpo", "scale_rewards": "group"}  # the base of all, seed_grpo too


class Vowels:
    """An embedder of four dimensions: how often each vowel occurs; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, texts: list[str]) -> torch.Tensor:
        self.calls += 1
        return torch.tensor([[1.0 + text.count(v) for v in "aeio"] for text in texts])


class FirstByte:
    """An entailment model: texts entail one another when they begin alike, else they contradict."""

    def pairs(self, premises: list[str], hypotheses: list[str]) -> torch.Tensor:
        same = [p[:1] == h[:1] for p, h in zip(premises, hypotheses, strict=True)]
        return torch.tensor([[0.9, 0.05, 0.05] if s else [0.05, 0.05, 0.9] for s in same]).view(-1, 3)


def reward(completions: list[Any], **_: Any) -> list[float]:
    """The share of lower-case letters, 0 to 2: random completions differ in it."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [2.0 * sum(ch.islower() for ch in text) / max(len(text), 1) for text in texts]


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": G * PROMPTS,
        "num_generations": G,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "max_steps": STEPS,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 7,
        "use_cpu": True,
        **changes,
    }


def dataset(conversational: bool = True) -> Dataset:
    texts = [f"Say {word}" for word in ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": text}] if conversational else text} for text in texts]
    )


def gcpo_trainer(scratch: Path, folder: Path, method: str, **changes: Any) -> GCPOTrainer:
    model, tokens = load_policy(str(scratch))
    trl_arguments: dict[str, Any] = {"train_dataset": dataset()}
    for key in ("train_dataset", "peft_config", "answer_extractor"):
        if key in changes:
            trl_arguments[key] = changes.pop(key)
    reward_funcs = changes.pop("reward_funcs", reward)
    reads = METHODS[method].reads
    return GCPOTrainer(
        model,
        reward_funcs,
        GCPOConfig(method=method, **settings(folder, **changes)),
        processing_class=tokens,
        embedder=Vowels() if "embeddings" in reads else None,
        entailment=FirstByte() if METHODS[method].entails(False) else None,
        **trl_arguments,
    )


def losses(trainer: GRPOTrainer) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """(loss, gradient norm) of each step, and the trained weights."""
    trainer.train()
    steps = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    return steps, {name: value.clone() for name, value in trainer.model.state_dict().items()}


def same(a: tuple[Any, dict[str, torch.Tensor]], b: tuple[Any, dict[str, torch.Tensor]]) -> bool:
    return a[0] == b[0] and all(torch.equal(a[1][name], b[1][name]) for name in a[1])


@pytest.fixture(scope="module")
def grpo_run(scratch: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return losses(gcpo_trainer(scratch, tmp_path_factory.mktemp("grpo"), "grpo"))


def test_grpo_equals_trls_own_trainer_bit_for_bit(scratch: Path, tmp_path: Path, grpo_run: Any) -> None:
    model, tokens = load_policy(str(scratch))
    own = GRPOTrainer(
        model,
        reward,
        GRPOConfig(**settings(tmp_path, loss_type="grpo", scale_rewards="group")),
        train_dataset=dataset(),
        processing_class=tokens,
    )
    assert same(losses(own), grpo_run)
    assert any(norm > 0 for _, norm in grpo_run[0])  # otherwise nothing was compared


@pytest.mark.parametrize("method", WITH_ALPHA)
def test_alpha_zero_equals_grpo_bit_for_bit(scratch: Path, tmp_path: Path, grpo_run: Any, method: str) -> None:
    assert same(losses(gcpo_trainer(scratch, tmp_path, method, alpha=0.0, **GRPO)), grpo_run)


@pytest.mark.parametrize("method", WITH_ALPHA)
def test_alpha_one_differs_from_grpo(scratch: Path, tmp_path: Path, grpo_run: Any, method: str) -> None:
    assert not same(losses(gcpo_trainer(scratch, tmp_path, method, alpha=1.0, **GRPO)), grpo_run)


def test_modulated_advantage_is_the_base_times_the_weight_and_is_what_is_logged(scratch: Path, tmp_path: Path) -> None:
    trainer = gcpo_trainer(scratch, tmp_path, "gcpo_bot")
    trainer.model.train()
    batch = [trainer.train_dataset[i] for i in range(PROMPTS) for _ in range(G)]
    torch.manual_seed(3)
    output = trainer._generate_and_score_completions(batch)
    rewards = torch.tensor(list(trainer._logs["rewards"]["reward"])).view(PROMPTS, G)
    base = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    extra = {name: torch.tensor(list(values)).view(PROMPTS, G) for name, values in trainer._logs["extra"].items()}
    # Recomputed by hand from the logged texts: Eq. 7-11 at G = 4, alpha = 0.6.
    strength = 0.6 / math.log(G)
    texts = [c[0]["content"] for c in trainer._logs["completion"]]
    for q in range(PROMPTS):
        group = texts[G * q : G * (q + 1)]
        answers = [trainer.answer_extractor(text) for text in group]
        unit = torch.nn.functional.normalize(Vowels()([a if a is not None else "no answer" for a in answers]), dim=1)
        first = [a[:1] if a is not None else f"none {i}" for i, a in enumerate(answers)]
        barycentre = torch.zeros(4)
        for label in set(first):
            members = unit[[i for i in range(G) if first[i] == label]]
            barycentre += len(members) / G * torch.nn.functional.normalize(members.mean(0), dim=0)
        bot = (1 - barycentre.norm().item()) / 2
        rd = (rewards[q] - rewards[q].mean()).abs().sum().item() / (2 / G * (G // 2) * (G - G // 2) * 2)
        weight = (1 - strength * bot**2) * (1 + strength * rd)
        torch.testing.assert_close(extra["u_geo"][q], torch.full((G,), bot), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(extra["rd"][q], torch.full((G,), rd), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(extra["weight"][q], torch.full((G,), weight), atol=1e-5, rtol=1e-5)
    modulated = base * extra["weight"]
    torch.testing.assert_close(output["advantages"].view(PROMPTS, G), modulated, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.tensor(list(trainer._logs["advantages"])).view(PROMPTS, G), modulated)
    assert (extra["weight"] != 1).any()


def test_grpo_loads_and_calls_no_semantic_model(scratch: Path, tmp_path: Path) -> None:
    trainer = gcpo_trainer(scratch, tmp_path, "grpo", embedding_model="no/such", entailment_model="no/such")
    losses(trainer)
    assert trainer.embedder is None and trainer.entailment is None


def test_one_embedding_call_per_step_and_none_in_evaluation(scratch: Path, tmp_path: Path) -> None:
    trainer = gcpo_trainer(scratch, tmp_path, "cd_only", per_device_eval_batch_size=G, num_generations_eval=2)
    trainer.train()
    assert trainer.embedder.calls == STEPS
    trainer.evaluate(dataset().select(range(4)))
    assert trainer.embedder.calls == STEPS


@pytest.mark.parametrize(
    "changes",
    [
        {"num_iterations": 2},
        {"per_device_train_batch_size": G, "gradient_accumulation_steps": PROMPTS},
        {"per_device_train_batch_size": G // 2, "steps_per_generation": 2 * PROMPTS},
        {"scale_rewards": "batch"},
        {"scale_rewards": "none"},
        {"loss_type": "dapo"},
        {"beta": 0.01},
        {"mask_truncated_completions": True},
    ],
    ids=str,
)
def test_trains_under_trls_settings(scratch: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    steps, weights = losses(gcpo_trainer(scratch, tmp_path, "gcpo_cd", **changes))
    assert len(steps) == STEPS and all(math.isfinite(loss) for loss, _ in steps)
    assert all(value.isfinite().all() for value in weights.values())


def test_plain_prompts_and_a_custom_answer_extractor(scratch: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    def first_letter(text: str) -> str | None:
        seen.append(text)
        return text[:1] or None

    trainer = gcpo_trainer(
        scratch, tmp_path, "gcpo_bot", train_dataset=dataset(conversational=False), answer_extractor=first_letter
    )
    losses(trainer)
    assert len(seen) == STEPS * G * PROMPTS


def test_peft_adapters_train_and_the_base_stays(scratch: Path, tmp_path: Path) -> None:
    from peft import LoraConfig

    before = load_policy(str(scratch))[0].state_dict()["model.layers.0.mlp.up_proj.weight"]
    trainer = gcpo_trainer(
        scratch, tmp_path, "gcpo_cd", peft_config=LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    _, weights = losses(trainer)
    base = next(value for name, value in weights.items() if "layers.0.mlp.up_proj.base_layer.weight" in name)
    adapter = next(value for name, value in weights.items() if "layers.0.mlp.up_proj.lora_B" in name)
    assert torch.equal(base, before) and adapter.abs().sum() > 0


def test_unscorable_responses_get_no_advantage_and_no_part_in_the_statistics(scratch: Path, tmp_path: Path) -> None:
    def some(completions: list[Any], **_: Any) -> list[float | None]:
        return [None if i % G == 0 else float(i % G) / 2 for i in range(len(completions))]

    trainer = gcpo_trainer(scratch, tmp_path, "rd_only", reward_funcs=some)
    trainer.model.train()
    output = trainer._generate_and_score_completions([trainer.train_dataset[0]] * G * PROMPTS)
    # Rewards 0.5, 1, 1.5: deviations 0.5, 0, 0.5 of at most 2/3 * 1 * 2 * 2 = 8/3, so RD = 3/8.
    assert list(trainer._logs["extra"]["rd"]) == pytest.approx([3 / 8] * G * PROMPTS)
    advantages = output["advantages"].view(PROMPTS, G)
    assert (advantages[:, 0] == 0).all() and (advantages[:, 3] > 1).all()


def test_a_weight_that_is_not_finite_is_replaced_by_one_and_counted(scratch: Path, tmp_path: Path) -> None:
    trainer = gcpo_trainer(scratch, tmp_path, "cd_only")
    trainer.embedder = lambda texts: torch.zeros(len(texts), 4)  # no text has a direction
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["gcpo/replaced_weights"] for entry in steps] == [G * PROMPTS] * STEPS
    assert all(entry["gcpo/weight"] == 1 for entry in steps)


def test_equal_rewards_leave_the_policy_as_it_is(scratch: Path, tmp_path: Path) -> None:
    def flat(completions: list[Any], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    before = load_policy(str(scratch))[0].state_dict()
    _, after = losses(gcpo_trainer(scratch, tmp_path, "gcpo_bot", reward_funcs=flat))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_reward_outside_its_range_warns_once_and_only_rd_is_clipped(scratch: Path, tmp_path: Path) -> None:
    def far(completions: list[Any], **_: Any) -> list[float]:
        return [9.0 if i % 2 else 0.0 for i in range(len(completions))]

    trainer = gcpo_trainer(scratch, tmp_path, "rd_only", reward_funcs=far)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    about = [str(w.message) for w in caught if "reward_range" in str(w.message)]
    assert len(about) == 1 and "9" in about[0]
    assert set(trainer._logs["extra"]["rd"]) == {1.0}


def test_shuffled_weights_are_those_of_other_groups(scratch: Path, tmp_path: Path) -> None:
    trainer = gcpo_trainer(scratch, tmp_path, "gcpo_shuffled")
    trainer.model.train()
    trainer._generate_and_score_completions([trainer.train_dataset[i] for i in range(PROMPTS) for _ in range(G)])
    extra = {name: torch.tensor(list(values))[::G] for name, values in trainer._logs["extra"].items()}
    own = extra["w_geo"] * extra["w_rd"]
    torch.testing.assert_close(extra["weight"].sort().values, own.sort().values)
    assert len(own.unique()) == PROMPTS and (extra["weight"] != own).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "gcpo_bt"}, "gcpo_bot"),
        ({"alpha": -1.0}, "alpha"),
        ({"reward_range": (1.0, 1.0)}, "reward_range"),
        ({"entailment_threshold": 35.0}, "probability"),
        ({"num_generations": 1}, "at least 2 generations"),
        ({"method": "gcpo_shuffled", "per_device_train_batch_size": G}, "one group"),
    ],
)
def test_impossible_settings_are_refused_before_any_work(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GCPOConfig(**{**settings(tmp_path), **changes})


@pytest.mark.parametrize("setting", ["embedding_model", "entailment_model"])
def test_a_model_that_cannot_be_loaded_is_named(scratch: Path, tmp_path: Path, setting: str) -> None:
    model, tokens = load_policy(str(scratch))
    args = GCPOConfig(method="gcpo_bot", **settings(tmp_path), **{setting: "nobody/nothing"})
    with pytest.raises(OSError, match=r"nobody/nothing.*Hub name"):
        GCPOTrainer(
            model,
            reward,
            args,
            train_dataset=dataset(),
            processing_class=tokens,
            embedder=None if setting == "embedding_model" else Vowels(),
        )


def test_a_plain_grpo_config_is_refused(scratch: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="GCPOConfig"):
        GCPOTrainer(str(scratch), reward, GRPOConfig(**settings(tmp_path)), train_dataset=dataset())


def test_trl_still_behaves_as_the_trainer_relies_on(scratch: Path, tmp_path: Path) -> None:
    """The behaviour of TRL 1.16 that the two overrides need; a failure names the override that breaks."""
    trainer = gcpo_trainer(scratch, tmp_path, "grpo")
    trainer.model.train()
    calls: list[torch.Size] = []
    inherited = GRPOTrainer._calculate_rewards

    def spy(self: Any, *arguments: Any) -> torch.Tensor:
        rewards = inherited(self, *arguments)
        calls.append(rewards.shape)
        return rewards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOTrainer, "_calculate_rewards", spy)
        output = trainer._generate_and_score_completions(
            [trainer.train_dataset[i] for i in range(PROMPTS) for _ in range(G)]
        )
    assert calls == [(G * PROMPTS, 1)], "_calculate_rewards: called once per generation, (rows, functions)"
    assert output["advantages"].shape == (G * PROMPTS,), "_generate_and_score_completions: one advantage per row"
    sums = output["advantages"].view(PROMPTS, G).sum(1)
    assert sums.abs().max() < 1e-4, "_generate_and_score_completions: consecutive rows are one group"
    logged = torch.tensor(list(trainer._logs["advantages"]))
    torch.testing.assert_close(logged, output["advantages"], msg="_logs['advantages']: this batch, in order")
    assert trainer._logs["advantages"].maxlen == G * PROMPTS, "_logs: holds one generation batch"
