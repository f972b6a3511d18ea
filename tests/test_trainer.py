"""GCPOTrainer against TRL's own trainer, and what it computes, logs and refuses."""

from __future__ import annotations

import gc
import math
import statistics
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from gcpo import GCPOConfig, GCPOTrainer
from gcpo.methods import BASES, METHODS, get_method
from gcpo.runs.params import load_profile, validate
from gcpo.runs.train import build_trainer
from gcpo.tasks import get_task
from gcpo.tasks.evaluation import load_policy
from gcpo.weights import weight_range
from gcpo.world import resolve

G, PROMPTS, STEPS = 4, 3, 3
ROWS = G * PROMPTS

WITH_ALPHA = [n for n, row in METHODS.items() if row.factors and row.factors[0].granularity == "group"]
GRPO = {"loss_type": "grpo", "scale_rewards": "group"}  # the base of all, seed_grpo too
PRODUCT = "bot_only*egpo*cw_grpo"  # a weight per group, per response and per token
OFF_POLICY = {"num_iterations": 2}
# What a method cannot do without: two steps per generation for ratios other than 1, TRL's reference for GRPO-CARE.
NEEDS: dict[str, dict[str, Any]] = {
    "r2vpo": OFF_POLICY,
    "clip_cov": {**OFF_POLICY, "method_options": {"band": (0.01, 5.0)}},  # tokens of an untrained policy covary little
    "kl_cov": OFF_POLICY,
    "care": {"beta": 1e-3},
}
# One method of each family.
FAMILIES = ["dapo", "seed_grpo", "empo", "care", "egpo", "edge_grpo", "cw_grpo", "r2vpo", "clip_cov", "kl_cov", PRODUCT]

pytestmark = pytest.mark.filterwarnings("ignore:.*equals GRPO")


class Vowels:
    """An embedder of four dimensions: how often each vowel occurs; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, texts: list[str]) -> Tensor:
        self.calls += 1
        return torch.tensor([[1.0 + text.count(v) for v in "aeio"] for text in texts])


class FirstByte:
    """An entailment model: texts entail one another when they begin alike, else they contradict."""

    def pairs(self, premises: list[str], hypotheses: list[str]) -> Tensor:
        same = [p[:1] == h[:1] for p, h in zip(premises, hypotheses, strict=True)]
        return torch.tensor([[0.9, 0.05, 0.05] if s else [0.05, 0.05, 0.9] for s in same]).view(-1, 3)


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def draw(text: str, among: int) -> int:
    """A number of 0, ..., among - 1 that a text decides."""
    return zlib.crc32(text.encode()) % among


def reward(completions: list[Any], **_: Any) -> list[float]:
    """0, 0.5, ..., 2: completions differ in it, and some are right."""
    return [draw(text_of(completion), 5) / 2 for completion in completions]


def table(*groups: Sequence[float | None]) -> Callable[..., list[float | None]]:
    """A reward function that gives these rewards, whatever the completions."""

    def fixed(completions: list[Any], **_: Any) -> list[float | None]:
        assert len(completions) == ROWS
        return [value for group in groups for value in group]

    return fixed


def letter(text: str) -> str | None:
    """An answer of four, or none."""
    return (None, "a", "e", "io", "oo")[draw(text, 5)]


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS,
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
        "bf16": False,
        **changes,
    }


def dataset(conversational: bool = True) -> Dataset:
    texts = [f"Say {word}" for word in ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": text}] if conversational else text} for text in texts]
    )


def gcpo_trainer(scratch: Path, folder: Path, method: str, **changes: Any) -> GCPOTrainer:
    model, tokens = load_policy(str(scratch))
    trl_arguments: dict[str, Any] = {"train_dataset": dataset(), "answer_extractor": letter}
    for key in ("train_dataset", "peft_config", "answer_extractor", "rollout_func"):
        if key in changes:
            trl_arguments[key] = changes.pop(key)
    reward_funcs = changes.pop("reward_funcs", reward)
    return GCPOTrainer(
        model,
        reward_funcs,
        GCPOConfig(method=method, **settings(folder, **{**NEEDS.get(method, {}), **changes})),
        processing_class=tokens,
        embedder=Vowels() if "embeddings" in get_method(method).reads else None,
        entailment=FirstByte() if get_method(method).entails(False) else None,
        **trl_arguments,
    )


def losses(trainer: GRPOTrainer) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """(loss, gradient norm) of each step, and the trained weights."""
    trainer.train()
    steps = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    return steps, {name: value.clone() for name, value in trainer.model.state_dict().items()}


def same(a: tuple[Any, dict[str, Tensor]], b: tuple[Any, dict[str, Tensor]]) -> bool:
    return a[0] == b[0] and all(torch.equal(a[1][name], b[1][name]) for name in a[1])


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """TRL collects garbage after every training: what has been imported need not be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Pass:
    """One forward pass that TRL made for log-probabilities."""

    def __init__(self, model: Any, logps: Tensor, entropies: Tensor | None) -> None:
        self.model, self.logps, self.entropies = model, logps, entropies
        self.gradient = torch.is_grad_enabled()


class Spy:
    """What TRL's own methods were given and gave: every pass, and the batch that the last loss has read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.passes: list[Pass] = []
        self.read: dict[str, Any] = {}
        logps, loss = GRPOTrainer._get_per_token_logps_and_entropies, GRPOTrainer._compute_loss

        def seen_logps(trainer: Any, model: Any, *arguments: Any, **keywords: Any) -> Any:
            found = logps(trainer, model, *arguments, **keywords)
            self.passes.append(Pass(model, found[0], found[1]))
            return found

        def seen_loss(trainer: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
            value = loss(trainer, model, inputs)
            self.read = dict(inputs)
            return value

        patch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", seen_logps)
        patch.setattr(GRPOTrainer, "_compute_loss", seen_loss)

    @property
    def advantages(self) -> Tensor:
        """Those that TRL's loss has read, by group."""
        return self.read["advantages"].unflatten(0, (PROMPTS, G))


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[str]], None]:
    """Puts texts in the place of samples; one that is as long as allowed has no end-of-sequence token."""

    def script(texts: Sequence[str]) -> None:
        def sample(trainer: Any, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
            assert len(prompt_ids) == len(texts)
            tokens = trainer.processing_class
            ids = [[*tokens(text, add_special_tokens=False)["input_ids"], tokens.eos_token_id] for text in texts]
            return [row[: trainer.max_completion_length] for row in ids], None

        monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", sample)

    return script


def generate(trainer: GRPOTrainer) -> dict[str, Any]:
    """The first generation batch in its order: every prompt's rows are next to one another."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    torch.manual_seed(3)
    return trainer._generate_and_score_completions([trainer.train_dataset[i] for i in range(PROMPTS) for _ in range(G)])


def loss_of(trainer: GRPOTrainer, batch: dict[str, Any]) -> Tensor:
    return trainer._compute_loss(trainer.model, batch)


def move(trainer: GRPOTrainer, by: float = 0.03) -> None:
    """Moves the policy, as steps of an optimiser would."""
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=noise))


def extra(trainer: GCPOTrainer, column: str) -> Tensor:
    """A column of the completions table, by group."""
    return torch.tensor(list(trainer._logs["extra"][column])).view(PROMPTS, G)


def logged_advantages(trainer: GCPOTrainer) -> Tensor:
    return torch.tensor(list(trainer._logs["advantages"])).view(PROMPTS, G)


def close(found: Any, expected: Any) -> None:
    found, expected = (torch.as_tensor(values, dtype=torch.float64) for values in (found, expected))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


# --- against TRL ----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("method", ["r2vpo", "kl_cov"])
def test_on_policy_a_method_of_ratios_equals_grpo_bit_for_bit(
    scratch: Path, tmp_path: Path, grpo_run: Any, method: str
) -> None:
    assert same(losses(gcpo_trainer(scratch, tmp_path, method, num_iterations=1)), grpo_run)


@pytest.mark.parametrize("method", ["r2vpo", "kl_cov"])
def test_off_policy_it_differs(scratch: Path, tmp_path: Path, method: str) -> None:
    grpo = losses(gcpo_trainer(scratch, tmp_path, "grpo", **OFF_POLICY))
    assert not same(losses(gcpo_trainer(scratch, tmp_path, method)), grpo)


# --- every method ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_its_weights_keep_to_their_range(scratch: Path, tmp_path: Path, method: str) -> None:
    trainer = gcpo_trainer(scratch, tmp_path, method)
    steps, weights = losses(trainer)
    assert len(steps) == STEPS and any(norm > 0 for _, norm in steps)
    assert all(math.isfinite(number) for step in steps for number in step)
    assert all(value.isfinite().all() for value in weights.values())
    low, high = weight_range(method, None, G)
    stages = {"advantage": "gcpo/weight", "loss": "gcpo/loss_weight"}
    for name in {stages[factor.stage] for factor in METHODS[method].factors}:
        lowest, highest = (
            [entry[f"{name}_{end}"] for entry in trainer.state.log_history if f"{name}_{end}" in entry]
            for end in ("min", "max")
        )
        assert low * (1 - 1e-6) <= min(lowest) < max(highest) <= high * (1 + 1e-6)
    assert all(entry.get("gcpo/replaced_weights", 0) == 0 for entry in trainer.state.log_history)


# --- by hand --------------------------------------------------------------------------------------------------------

# Entirely wrong, as 1 is not above the middle; mixed, and one without a reward; entirely right.
MIXED = ((0, 0.5, 0, 1), (0, None, 2, 0.5), (2, 2, 2, 2))
EVERY = [value for group in MIXED for value in group]
# Of all lengths, from none (an end-of-sequence token) to cut off.
TEXTS = ("aye", "or not", "", "else it", "no", "I do", "yes", "so", "ooo", "at ease", "ae", "up")
Rewards = Sequence[float | None]


def there(values: Rewards) -> list[float]:
    return [value for value in values if value is not None]


def grpo(rewards: Rewards, scale: str = "group", everything: Rewards = ()) -> list[float]:
    """GCPO's Eq. 1 for one group; 0 where there is no reward."""
    mean = statistics.fmean(there(rewards))
    spread = 1.0
    if scale != "none":
        spread = statistics.stdev(there(rewards if scale == "group" else everything)) + 1e-4
    return [0.0 if r is None else (r - mean) / spread for r in rewards]


def egpo(entropy: Sequence[float], rewards: Rewards) -> list[float]:
    """EGPO's Eqs. 6-8."""
    mean = statistics.fmean(h for h, r in zip(entropy, rewards, strict=True) if r is not None)
    weight = []
    for h, r in zip(entropy, rewards, strict=True):
        low, high = (1.0, 2.0) if r is not None and r > 1 else (0.8, 1.0)
        weight.append(1.0 if r is None else min(max(mean / (h + 1e-5), low), high))
    return weight


def reinforced(base: Sequence[float], rewards: Rewards) -> list[float]:
    """EGPO's Eq. 13: -1 for every response of an entirely wrong group."""
    wrong = max(there(rewards)) <= 1
    return [-1.0 if wrong and r is not None else a for a, r in zip(base, rewards, strict=True)]


def cw_grpo(logps: Sequence[Sequence[float]], base: Sequence[float], rewards: Rewards) -> list[list[float]]:
    """CW-GRPO, section 2.3, for one group."""
    kept = [i for i, r in enumerate(rewards) if r is not None]
    level = statistics.fmean(x for i in kept for x in logps[i])
    mean = statistics.fmean(base[i] for i in kept)
    covariance = {i: [(x - level) * (base[i] - mean) for x in logps[i]] for i in kept}
    sigma = statistics.pstdev([c for row in covariance.values() for c in row])
    if sigma == 0:
        return [[1.0] * len(row) for row in logps]
    kernel = {i: [math.exp(-(c**2) / (2 * sigma**2)) for c in row] for i, row in covariance.items()}
    scale = sum(map(len, kernel.values())) / sum(map(sum, kernel.values()))
    return [[scale * k for k in kernel[i]] if i in kept else [1.0] * len(row) for i, row in enumerate(logps)]


def bot(answers: Sequence[str | None]) -> float:
    """GCPO's Eqs. 9-10 for one group: a cluster is a first letter, and a missing answer is alone."""
    unit = torch.nn.functional.normalize(Vowels()(["no answer" if a is None else a for a in answers]), dim=1)
    first = [f"none {i}" if a is None else a[:1] for i, a in enumerate(answers)]
    barycentre = torch.zeros(unit.shape[1])
    for label in set(first):
        members = unit[[i for i, other in enumerate(first) if other == label]]
        barycentre += len(members) / len(answers) * torch.nn.functional.normalize(members.mean(0), dim=0)
    return (1 - barycentre.norm().item()) / 2


def by_token(values: Tensor, batch: dict[str, Any]) -> list[list[list[float]]]:
    """Token values by group and response, without padding."""
    lengths = batch["completion_mask"].sum(1).tolist()
    rows = [row[:length] for row, length in zip(values.tolist(), lengths, strict=True)]
    return [rows[G * q : G * (q + 1)] for q in range(PROMPTS)]


def by_response(values: Tensor, batch: dict[str, Any]) -> list[list[float]]:
    return [[statistics.fmean(row) for row in group] for group in by_token(values, batch)]


def answers_of(trainer: GCPOTrainer) -> list[list[str | None]]:
    found = [trainer.answer_extractor(text_of(c)) for c in trainer._logs["completion"]]
    return [found[G * q : G * (q + 1)] for q in range(PROMPTS)]


def test_gcpo_bot_by_hand(scratch: Path, tmp_path: Path, spy: Spy) -> None:
    trainer = gcpo_trainer(scratch, tmp_path, "gcpo_bot")
    batch = generate(trainer)
    loss_of(trainer, batch)
    strength = 0.6 / math.log(G)
    rewards = torch.tensor(list(trainer._logs["rewards"]["reward"])).view(PROMPTS, G).tolist()
    for q, (answers, r) in enumerate(zip(answers_of(trainer), rewards, strict=True)):
        transport = bot(answers)
        rd = sum(abs(x - statistics.fmean(r)) for x in r) / (2 / G * (G // 2) * (G - G // 2) * 2)
        weight = (1 - strength * transport**2) * (1 + strength * rd)
        close(extra(trainer, "u_geo")[q], [transport] * G)
        close(extra(trainer, "rd")[q], [rd] * G)
        close(extra(trainer, "weight")[q], [weight] * G)
        close(spy.advantages[q], [weight * a for a in grpo(r)])
    close(logged_advantages(trainer), spy.advantages)
    assert extra(trainer, "u_geo").unique().numel() > 2  # groups differ


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_egpo_by_hand(scratch: Path, tmp_path: Path, spy: Spy, scripted: Callable, scale: str) -> None:
    scripted(TEXTS)
    trainer = gcpo_trainer(scratch, tmp_path, "egpo", reward_funcs=table(*MIXED), scale_rewards=scale)
    batch = generate(trainer)
    entropy = by_response(-spy.passes[0].logps, batch)
    loss_of(trainer, batch)
    expected = []
    for q, rewards in enumerate(MIXED):
        base, weight = reinforced(grpo(rewards, scale, EVERY), rewards), egpo(entropy[q], rewards)
        expected.append([a * w for a, w in zip(base, weight, strict=True)])
        close(extra(trainer, "w_entropy")[q], weight)
    close(spy.advantages, expected)
    close(logged_advantages(trainer), expected)
    assert all(-1 <= a <= -0.8 for a in expected[0]) and expected[1][1] == 0 and expected[2] == [0] * G


def test_edge_grpo_by_hand(scratch: Path, tmp_path: Path, spy: Spy, scripted: Callable) -> None:
    scripted(TEXTS)
    trainer = gcpo_trainer(scratch, tmp_path, "edge_grpo", reward_funcs=table(*MIXED))
    batch = generate(trainer)
    (only,) = spy.passes
    assert only.entropies is not None
    entropy = by_response(only.entropies, batch)
    loss_of(trainer, batch)
    for q, rewards in enumerate(MIXED):
        mean = statistics.fmean(h for h, r in zip(entropy[q], rewards, strict=True) if r is not None)
        close(spy.advantages[q], [a * mean / h for a, h in zip(grpo(rewards), entropy[q], strict=True)])
    close(logged_advantages(trainer), spy.advantages)


def test_cw_grpo_by_hand_token_by_token(scratch: Path, tmp_path: Path, spy: Spy, scripted: Callable) -> None:
    scripted(TEXTS)
    trainer = gcpo_trainer(scratch, tmp_path, "cw_grpo", reward_funcs=table(*MIXED))
    batch = generate(trainer)
    logps = by_token(spy.passes[0].logps, batch)
    loss_of(trainer, batch)
    assert spy.read["advantages"].shape == batch["completion_ids"].shape
    for q, rewards in enumerate(MIXED):
        base = grpo(rewards)
        weight = cw_grpo(logps[q], base, rewards)
        for i, row in enumerate(weight):
            close(spy.advantages[q, i, : len(row)], [base[i] * w for w in row])
            close(logged_advantages(trainer)[q, i], base[i] * statistics.fmean(row))
        close(sum(sum(row) for row in weight), sum(map(len, weight)))


def test_seed_grpo_by_hand(scratch: Path, tmp_path: Path, spy: Spy, scripted: Callable) -> None:
    scripted(TEXTS)
    trainer = gcpo_trainer(scratch, tmp_path, "seed_grpo", reward_funcs=table(*MIXED))
    batch = generate(trainer)
    likelihood = by_response(spy.passes[0].logps, batch)
    found = loss_of(trainer, batch)
    expected = []
    for q, (answers, rewards) in enumerate(zip(answers_of(trainer), MIXED, strict=True)):
        mass: dict[Any, float] = {}
        for i, (answer, r) in enumerate(zip(answers, rewards, strict=True)):
            if r is not None:  # a missing answer is a cluster of its own
                key = i if answer is None else answer
                mass[key] = mass.get(key, 0) + math.exp(likelihood[q][i])
        total = sum(mass.values())
        entropy = -sum(p / total * math.log(p / total) for p in mass.values())
        weight = 1 / (1 + 0.0417 / math.log(G) * entropy)
        close(extra(trainer, "se")[q], [entropy] * G)
        expected.append([a * weight for a in grpo(rewards, "none")])
    close(spy.advantages, expected)
    # Dr. GRPO's loss at ratio 1: the sum over tokens by a constant.
    tokens = batch["completion_mask"].sum(1).view(PROMPTS, G)
    close(found.detach(), -(spy.advantages * tokens).sum() / (ROWS * trainer.max_completion_length))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_empo_by_hand_and_the_logged_rewards_are_the_tasks(
    scratch: Path, tmp_path: Path, spy: Spy, scripted: Callable, scale: str
) -> None:
    # Clusters by first letter; "x" says nothing. Two of three agree; all differ; two pairs, one without a reward.
    answers = ["apple", "ant", "x", "bee", "a", "b", "c", "d", "up", "us", "it", "in"]
    tasks = ((0, 2, 2, 0), (0, 0, 1, 2), (2, 0, None, 1))
    shares: list[list[float | None]] = [[1 / 2, 1 / 2, 0, 1 / 4], [0] * 4, [2 / 3, 2 / 3, None, 1 / 3]]
    scripted(answers)
    trainer = gcpo_trainer(
        scratch,
        tmp_path,
        "empo",
        reward_funcs=table(*tasks),
        scale_rewards=scale,
        answer_extractor=lambda text: None if text == "x" else text,
    )
    batch = generate(trainer)
    loss_of(trainer, batch)
    everything = [share for group in shares for share in group]
    close(spy.advantages, [[*grpo(group, scale, everything)] for group in shares])
    close(logged_advantages(trainer), spy.advantages)
    close(extra(trainer, "method_reward").nan_to_num(-1), [[-1 if s is None else s for s in g] for g in shares])
    logged = torch.tensor(list(trainer._logs["rewards"]["fixed"])).view(PROMPTS, G)
    close(logged.nan_to_num(-1), [[-1 if r is None else r for r in group] for group in tasks])
    assert trainer._metrics["train"]["reward"] == pytest.approx([10 / 11])


def test_care_by_hand_and_the_logged_rewards_are_the_tasks(
    scratch: Path, tmp_path: Path, spy: Spy, scripted: Callable
) -> None:
    texts = ["so a", "so be", "x cde", "no", "is e", "is ot", "of i", "be", "q u", "w us", "e in", "it"]
    tasks = ((2, 1.5, 2, 2), (0.1, 0, 0.1, 0), (1, None, 1, 2))
    scripted(texts)
    trainer = gcpo_trainer(
        scratch,
        tmp_path,
        "care",
        reward_funcs=table(*tasks),
        answer_extractor=lambda text: text.split()[1] if " " in text else None,
        method_options={"margin": 1e-4},  # an untrained reference finds nothing likely
    )
    move(trainer)  # the reference is another model by now
    batch = generate(trainer)
    (reference,) = spy.passes
    assert reference.model is trainer.ref_model
    logps = by_token(reference.logps, batch)
    loss_of(trainer, batch)

    def rewarded(first_of: Callable[[str], int]) -> list[list[float | None]]:
        found: list[list[float | None]] = []
        for q, group in enumerate(tasks):
            mean = statistics.fmean(there(group))
            accurate = [i for i, r in enumerate(group) if r is not None and r > 0.2 and r >= mean]
            confidence = {
                i: min(math.exp(statistics.fmean(logps[q][i][first_of(texts[G * q + i]) :])), 0.95) for i in accurate
            }
            likely = [i for i in accurate if confidence[i] >= statistics.fmean(confidence.values()) - 1e-4]
            found.append([None if r is None else r + (0.5 * r if i in likely else 0) for i, r in enumerate(group)])
        return found

    # A byte is a token. The answer reaches the end of the text, and with it the end-of-sequence token.
    rewards = rewarded(lambda text: text.index(" ") + 1 if " " in text else 0)
    assert rewards[0] != list(tasks[0]) and rewards[1] == list(tasks[1])
    assert rewards != rewarded(lambda text: 0)  # of the whole completion others are likely
    close(spy.advantages, [grpo(group) for group in rewards])
    logged = torch.tensor(list(trainer._logs["rewards"]["fixed"])).view(PROMPTS, G)
    close(logged.nan_to_num(-1), [[-1 if r is None else r for r in group] for group in tasks])
    (mean,) = trainer._metrics["train"]["reward"]
    assert mean == pytest.approx(statistics.fmean(r for group in tasks for r in there(group)))


@pytest.mark.parametrize(
    ("allowed", "lengths"),
    [
        (6, ((2, 5, 6, 4), (6, 2, 3, 6), (6, 3, 4, 5))),
        (8, ((2, 7, 6, 4), (7, 2, 3, 6), (6, 3, 4, 7))),  # nobody reaches the end
    ],
)
def test_dapo_by_hand_dropped_groups_leave_the_token_count(
    scratch: Path,
    tmp_path: Path,
    spy: Spy,
    scripted: Callable,
    allowed: int,
    lengths: tuple[tuple[int, ...], ...],
) -> None:
    tasks = ((0, 0.5, 2, 1), (1, 1, 1, 1), (2, 0, None, 0))
    scripted(["x" * (n if n == allowed else n - 1) for group in lengths for n in group])
    trainer = gcpo_trainer(scratch, tmp_path, "dapo", reward_funcs=table(*tasks), max_completion_length=allowed)
    batch = generate(trainer)
    found = loss_of(trainer, batch)

    def cost(length: int) -> float:
        """The last fifth of what is allowed costs up to half of the rewards' range, which is 2."""
        return max(0.0, (length - 0.8 * allowed) / (0.2 * allowed))

    expected = [
        [0.0] * G  # equal rewards
        if q == 1
        else grpo([None if r is None else r - cost(n) for r, n in zip(group, lengths[q], strict=True)])
        for q, group in enumerate(tasks)
    ]
    close(spy.advantages, expected)
    kept = sum(lengths[0]) + sum(lengths[2])
    assert batch["num_items_in_batch"] == kept
    assert batch["completion_mask"].sum(1).tolist() == [*lengths[0], *[0] * G, *lengths[2]]
    total = sum(a * n for q in (0, 2) for a, n in zip(expected[q], lengths[q], strict=True))
    close(found.detach(), -total / kept)
    assert trainer._metrics["train"]["gcpo/dropped_groups"] == pytest.approx([1 / 3])
    assert list(trainer._logs["rewards"]["fixed"])[:8] == [*tasks[0], *tasks[1]]


def test_r2vpo_by_hand_inside_the_loss(scratch: Path, tmp_path: Path, spy: Spy, scripted: Callable) -> None:
    scripted(TEXTS)
    trainer = gcpo_trainer(scratch, tmp_path, "r2vpo", reward_funcs=table(*MIXED))
    batch = generate(trainer)
    close(batch["advantages"].view(PROMPTS, G), [grpo(rewards) for rewards in MIXED])  # not yet
    move(trainer)
    loss_of(trainer, batch)
    ratios = by_token((spy.passes[-1].logps - spy.passes[0].logps).exp(), batch)
    for q, rewards in enumerate(MIXED):
        variance = [statistics.pvariance(row) for row in ratios[q]]
        close(spy.advantages[q], [a / (1 + v) for a, v in zip(grpo(rewards), variance, strict=True)])
        assert max(variance) > 0.01


def covariances(
    logps: Tensor, batch: dict[str, Any], tasks: Sequence[Rewards], base: Sequence[float]
) -> dict[tuple[int, int], float]:
    """Cui et al.: (log pi - mean)(A - mean) of each token by row and place, with means over the tokens of the batch."""
    rows = [row for group in by_token(logps, batch) for row in group]
    kept = [i for i, r in enumerate(r for rewards in tasks for r in rewards) if r is not None]
    level = statistics.fmean(x for i in kept for x in rows[i])
    mean = statistics.fmean(base[i] for i in kept for _ in rows[i])
    return {(i, t): (x - level) * (base[i] - mean) for i in kept for t, x in enumerate(rows[i])}


@pytest.mark.parametrize("method", ["clip_cov", "egpo*clip_cov"])
def test_clip_cov_by_hand_inside_the_loss(
    scratch: Path, tmp_path: Path, spy: Spy, scripted: Callable, method: str
) -> None:
    scripted(TEXTS)
    low, high = 0.02, 0.4
    trainer = gcpo_trainer(
        scratch,
        tmp_path,
        method,
        reward_funcs=table(*MIXED),
        method_options={"band": (low, high), "share": 1.0},  # everything inside the band
        epsilon=0.05,
        epsilon_high=0.1,
        **OFF_POLICY,
    )
    batch = generate(trainer)
    move(trainer)
    loss_of(trainer, batch)
    base = [a for rewards in MIXED for a in grpo(rewards)]
    weight = [1.0] * ROWS
    if method != "clip_cov":  # covariances are with the base advantage, whatever its weight
        base = [a for rewards in MIXED for a in reinforced(grpo(rewards), rewards)]
        entropy = by_response(-spy.passes[0].logps, batch)
        weight = [w for q, rewards in enumerate(MIXED) for w in egpo(entropy[q], rewards)]
    ratios = (spy.passes[-1].logps - spy.passes[0].logps).exp().tolist()
    covariance = covariances(spy.passes[-1].logps.detach(), batch, MIXED, base)
    inside = {token for token, c in covariance.items() if low < c < high}
    stopped = {
        (i, t)
        for i, t in covariance
        if (ratios[i][t] < 0.95 and base[i] < 0) or (ratios[i][t] > 1.1 and base[i] > 0)  # TRL's clip does it
    }
    advantages = torch.tensor([a * w for a, w in zip(base, weight, strict=True)])
    expected = advantages.unsqueeze(1).repeat(1, batch["completion_ids"].shape[1])
    for token in inside - stopped:
        expected[token] = 0
    close(spy.read["advantages"], expected)
    assert inside - stopped and inside & stopped and set(covariance) - inside
    counted = batch["completion_mask"].sum().item()
    (share,) = trainer._metrics["train"]["gcpo/w_clip"]
    assert share == pytest.approx(1 - len(inside - stopped) / counted)  # padding is not counted


def test_clip_cov_draws_its_share_anew_in_each_step(scratch: Path, tmp_path: Path, spy: Spy) -> None:
    tasks = ((0, 0.5, 0, 1), (0, 1, 2, 0.5), (2, 2, 0, 0))  # no advantage is 0
    options = {"band": (0.0, 5.0), "share": 0.1}
    trainer = gcpo_trainer(scratch, tmp_path, "clip_cov", reward_funcs=table(*tasks), method_options=options)
    batch = generate(trainer)
    covariance = covariances(spy.passes[0].logps, batch, tasks, [a for rewards in tasks for a in grpo(rewards)])
    drawn = []
    for step in (0, 0, 1):
        trainer.state.global_step = step
        loss_of(trainer, batch)
        drawn.append({(int(i), int(t)) for i, t in spy.read["advantages"].eq(0).nonzero()})
    assert all(len(tokens) == int(0.1 * len(covariance)) for tokens in drawn)
    assert all(0 < covariance[token] < 5 for tokens in drawn for token in tokens)
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("accumulated", [1, 3])
def test_kl_cov_by_hand_is_grpos_loss_and_a_penalty(
    scratch: Path, tmp_path: Path, spy: Spy, scripted: Callable, accumulated: int
) -> None:
    scripted(TEXTS)
    trainer = gcpo_trainer(
        scratch,
        tmp_path,
        "kl_cov",
        reward_funcs=table(*MIXED),
        method_options={"share": 0.2, "coefficient": 3.0},
        gradient_accumulation_steps=accumulated,
        per_device_train_batch_size=ROWS // accumulated,
    )
    batch = generate(trainer)
    move(trainer)
    grpos = GRPOTrainer._compute_loss(trainer, trainer.model, batch)
    found = loss_of(trainer, batch)
    logps = spy.passes[-1].logps
    covariance = covariances(logps.detach(), batch, MIXED, [a for rewards in MIXED for a in grpo(rewards)])
    chosen = sorted(covariance, key=covariance.__getitem__)[-int(0.2 * len(covariance)) :]
    tokens = batch["completion_mask"].sum()
    penalty = sum(3 * (logps[token] - spy.passes[0].logps[token]).abs() for token in chosen) / tokens
    close(found.detach(), (grpos + penalty / accumulated).detach())
    assert trainer._metrics["train"]["gcpo/penalty"] == pytest.approx([penalty.item()])
    parameters = list(trainer.model.parameters())
    gradients = torch.autograd.grad(found, parameters, retain_graph=True)
    expected = torch.autograd.grad(grpos + penalty / accumulated, parameters)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
    assert penalty > 0.01


def test_a_product_by_hand_multiplies_the_weights_of_group_response_and_token(
    scratch: Path, tmp_path: Path, spy: Spy, scripted: Callable
) -> None:
    scripted(TEXTS)
    trainer = gcpo_trainer(scratch, tmp_path, PRODUCT, reward_funcs=table(*MIXED))
    batch = generate(trainer)
    (only,) = spy.passes
    logps, entropy = by_token(only.logps, batch), by_response(-only.logps, batch)
    loss_of(trainer, batch)
    for q, (answers, rewards) in enumerate(zip(answers_of(trainer), MIXED, strict=True)):
        base = reinforced(grpo(rewards), rewards)
        kept = [a for a, r in zip(answers, rewards, strict=True) if r is not None]
        group, response = 1 - 0.6 / math.log(G) * bot(kept) ** 2, egpo(entropy[q], rewards)
        for i, token in enumerate(cw_grpo(logps[q], base, rewards)):
            close(spy.advantages[q, i, : len(token)], [base[i] * group * response[i] * w for w in token])


# --- what a pass costs, and what is left as it was ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changes", "trls", "ours"),
    [
        ("grpo", {}, 0, 0),
        ("dapo", {}, 0, 0),
        ("gcpo_bot", {}, 0, 0),
        ("empo", {}, 0, 0),
        ("clip_cov", {"num_iterations": 1}, 0, 0),
        ("kl_cov", {}, 1, 0),
        ("r2vpo", {}, 1, 0),
        ("care", {}, 1, 0),
        ("seed_grpo", {}, 0, 1),
        ("egpo", {}, 0, 1),
        ("egpo", {"per_device_train_batch_size": G, "gradient_accumulation_steps": PROMPTS}, 0, 1),
        ("egpo", OFF_POLICY, 1, 0),
        ("egpo", {"per_device_train_batch_size": G, "steps_per_generation": PROMPTS}, 1, 0),
        ("cw_grpo", {"beta": 1e-3}, 1, 1),
        ("edge_grpo", {}, 0, 1),
        ("edge_grpo", OFF_POLICY, 1, 1),  # TRL's has no entropies
        (PRODUCT, {}, 0, 1),
        ("seed_grpo*edge_grpo*cw_grpo", {}, 0, 1),
    ],
    ids=str,
)
def test_old_log_probabilities_cost_one_pass_and_only_where_a_method_reads_them(
    scratch: Path, tmp_path: Path, spy: Spy, method: str, changes: dict[str, Any], trls: int, ours: int
) -> None:
    trainer = gcpo_trainer(scratch, tmp_path, method, **changes)
    batch = generate(trainer)
    assert len(spy.passes) == trls + ours
    assert not any(one.gradient for one in spy.passes)
    reads = get_method(method).reads
    assert [one.entropies is not None for one in spy.passes] == [False] * trls + ["entropies" in reads] * ours
    assert all(one.model is trainer.model for one in spy.passes[trls:])
    loss_of(trainer, batch)
    assert len(spy.passes) == trls + ours + 1 and spy.passes[-1].gradient


@pytest.mark.parametrize("method", ["r2vpo", "clip_cov", "kl_cov", "egpo*r2vpo"])
def test_the_batch_that_trl_uses_again_stays_as_it_is(scratch: Path, tmp_path: Path, spy: Spy, method: str) -> None:
    trainer = gcpo_trainer(scratch, tmp_path, method, **OFF_POLICY)
    batch = generate(trainer)
    kept = {key: value.clone() for key, value in batch.items()}
    move(trainer)
    first = loss_of(trainer, batch)
    assert batch.keys() == kept.keys() and all(torch.equal(batch[key], kept[key]) for key in kept)
    changed = spy.read["advantages"] if method != "kl_cov" else first
    assert not torch.equal(changed, batch["advantages"])  # what the loss read was another object
    assert torch.equal(loss_of(trainer, batch), first)


# --- TRL's settings -------------------------------------------------------------------------------------------------

SPLIT = {"per_device_train_batch_size": G, "steps_per_generation": PROMPTS}  # off-policy: a step per group's worth
ACCUMULATED = {"per_device_train_batch_size": G, "gradient_accumulation_steps": PROMPTS}
STRADDLING = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}  # half of the middle group in each


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *((method, SPLIT) for method in FAMILIES),
        *((method, OFF_POLICY) for method in ("dapo", "seed_grpo", "care", "egpo", "cw_grpo", PRODUCT)),
        *((method, {**OFF_POLICY, **ACCUMULATED}) for method in ("clip_cov", "kl_cov")),
        *((method, {"scale_rewards": "batch"}) for method in ("dapo", "r2vpo", "kl_cov", PRODUCT)),
        *((method, {"scale_rewards": "none"}) for method in ("care", "edge_grpo", "clip_cov")),
        *((method, {"bf16": True}) for method in ("dapo", "care", "egpo", "cw_grpo", "r2vpo", "kl_cov")),
        *((method, {"beta": 0.01}) for method in ("gcpo_cd", "cw_grpo")),
        ("gcpo_cd", {"mask_truncated_completions": True}),
        ("cw_grpo", {"top_entropy_quantile": 0.5}),
        ("egpo", {"importance_sampling_level": "sequence"}),
        ("kl_cov", {"importance_sampling_level": "sequence"}),
        ("gcpo_bot", {"multi_objective_aggregation": "normalize_then_sum"}),
    ],
    ids=str,
)
def test_trains_under_trls_settings(scratch: Path, tmp_path: Path, method: str, changes: dict[str, Any]) -> None:
    steps, weights = losses(gcpo_trainer(scratch, tmp_path, method, **changes))
    assert len(steps) == STEPS
    assert all(math.isfinite(number) for step in steps for number in step)
    assert all(value.isfinite().all() for value in weights.values())


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *((method, STRADDLING) for method in FAMILIES if method not in ("clip_cov", "kl_cov")),
        *((method, ACCUMULATED) for method in ("dapo", PRODUCT)),
    ],
    ids=str,
)
def test_gradient_accumulation_changes_nothing(
    scratch: Path, tmp_path: Path, method: str, changes: dict[str, Any]
) -> None:
    """All statistics are of whole groups: where TRL cuts the batch makes no difference but rounding."""
    sgd = {"optim": "sgd", "learning_rate": 0.3, "max_steps": 4}  # Adam would divide rounding errors by themselves
    whole = losses(gcpo_trainer(scratch, tmp_path, method, **sgd))
    parts = losses(gcpo_trainer(scratch, tmp_path, method, **sgd, **changes))
    for name, value in whole[1].items():
        torch.testing.assert_close(parts[1][name], value, atol=1e-5, rtol=1e-4)
    start = load_policy(str(scratch))[0].state_dict()
    assert max((value - start[name]).abs().max() for name, value in whole[1].items()) > 1e-3


@pytest.mark.parametrize("method", ["dapo", "egpo", "cw_grpo", "r2vpo", "clip_cov", "kl_cov", PRODUCT])
def test_every_loss_of_trl_reads_the_same_advantages(scratch: Path, tmp_path: Path, spy: Spy, method: str) -> None:
    trainer = gcpo_trainer(scratch, tmp_path, method, epsilon_high=5.0, **OFF_POLICY)
    batch = generate(trainer)
    move(trainer)
    loss_of(trainer, batch)
    expected = spy.advantages
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"):
        trainer.loss_type = loss_type
        found = loss_of(trainer, batch)
        assert torch.equal(spy.advantages, expected)
        gradients = torch.autograd.grad(found, list(trainer.model.parameters()))
        assert found.isfinite() and all(gradient.isfinite().all() for gradient in gradients)
        assert any(gradient.abs().max() > 1e-6 for gradient in gradients)


@pytest.mark.parametrize("loss_type", ["bnpo", "cispo", "luspo", "vespo"])
def test_the_users_loss_is_the_one_that_trains(scratch: Path, tmp_path: Path, loss_type: str) -> None:
    trainer = gcpo_trainer(scratch, tmp_path, PRODUCT, loss_type=loss_type, epsilon_high=5.0)
    assert trainer.loss_type == loss_type
    steps, _ = losses(trainer)
    assert all(math.isfinite(number) for step in steps for number in step)


SOME_REWARDS = ((0, None, 2, 0.5), (None, None, None, None), (None, 1, None, None))
NO_REWARDS = ((None,) * G,) * PROMPTS


@pytest.mark.parametrize(
    ("method", "tasks"),
    [
        *((method, SOME_REWARDS) for method in ("gcpo_bot", *FAMILIES)),
        *((method, NO_REWARDS) for method in ("gcpo_bot", "dapo", "empo", "egpo", "cw_grpo", "kl_cov")),
    ],
    ids=str,
)
def test_responses_without_a_reward_train_nothing(
    scratch: Path, tmp_path: Path, spy: Spy, method: str, tasks: Sequence[Rewards]
) -> None:
    trainer = gcpo_trainer(scratch, tmp_path, method, reward_funcs=table(*tasks), max_steps=2)
    batch = generate(trainer)
    move(trainer)
    found = loss_of(trainer, batch)
    assert found.isfinite()
    assert not spy.advantages.isnan().any()
    none = torch.tensor([[r is None for r in group] for group in tasks])
    assert spy.advantages[none].eq(0).all()
    assert spy.advantages[2].eq(0).all() or method == "egpo" or method == PRODUCT  # one reward has nothing beside it
    weight = extra(trainer, "weight") if get_method(method).factors else torch.ones(PROMPTS, G)
    assert weight.isfinite().all()
    steps, weights = losses(trainer)
    assert all(math.isfinite(number) for step in steps for number in step)
    assert all(value.isfinite().all() for value in weights.values())


@pytest.mark.parametrize("method", ["gcpo_bot", *FAMILIES])
def test_completions_that_are_empty_or_cut_off(
    scratch: Path, tmp_path: Path, spy: Spy, scripted: Callable, method: str
) -> None:
    cut = "too long"
    scripted([cut, "", "", "a", cut, cut, cut, cut, "", "", "", ""])
    tasks = ((2, 0, 0.5, 1), (0, 2, 1, 0), (2, 0, 0, 2))
    trainer = gcpo_trainer(
        scratch, tmp_path, method, reward_funcs=table(*tasks), mask_truncated_completions=True, max_steps=2
    )
    batch = generate(trainer)
    assert batch["completion_mask"].sum(1).tolist() == [0, 1, 1, 2, 0, 0, 0, 0, 1, 1, 1, 1]
    move(trainer)
    assert loss_of(trainer, batch).isfinite()
    assert not spy.advantages.isnan().any()
    if {factor.granularity for factor in get_method(method).factors} == {"response"}:
        base = torch.tensor([grpo(group) for group in tasks])
        close(spy.advantages[1], base[1])  # nothing to compare: weight 1
        close(spy.advantages[0, 0], base[0, 0])
    steps, _ = losses(trainer)
    assert all(math.isfinite(number) for step in steps for number in step)


def environment(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """A rollout function of TRL's: the policy's tokens, and an environment's between them."""
    ids = [[97 + (7 * row + place) % 26 for place in range(6)] for row in range(len(prompts))]
    own = [[1, 1, int(row % 3 == 0), 0, 1, int(row % 2 == 0)] for row in range(len(prompts))]
    logprobs = [[-5.0] * 6 for _ in prompts]
    return {"prompt_ids": [[65, 66]] * len(prompts), "completion_ids": ids, "logprobs": logprobs, "env_mask": own}


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("method", ["egpo", "cw_grpo", "dapo", "r2vpo"])
def test_tokens_of_an_environment_take_no_part(scratch: Path, tmp_path: Path, spy: Spy, method: str) -> None:
    tasks = ((0, 0.5, 0, 1), (1, 1, 1, 1), (2, 0, 0, 0.5))
    trainer = gcpo_trainer(scratch, tmp_path, method, reward_funcs=table(*tasks), rollout_func=environment)
    batch = generate(trainer)
    own = batch["tool_mask"].bool()
    assert own.float().mean() < 1
    move(trainer)
    loss_of(trainer, batch)
    if method == "dapo":
        assert batch["num_items_in_batch"] == own[:G].sum() + own[2 * G :].sum()
        return
    for q, rewards in enumerate(tasks):
        rows = range(G * q, G * (q + 1))
        logps = [spy.passes[0].logps[i][own[i]].tolist() for i in rows]
        base = grpo(rewards)
        if method == "egpo":
            base = reinforced(base, rewards)
            weight = egpo([-statistics.fmean(row) for row in logps], rewards)
            close(spy.advantages[q], [a * w for a, w in zip(base, weight, strict=True)])
        elif method == "r2vpo":
            ratios = [(spy.passes[-1].logps - spy.passes[0].logps).exp()[i][own[i]].tolist() for i in rows]
            close(spy.advantages[q], [a / (1 + statistics.pvariance(r)) for a, r in zip(base, ratios, strict=True)])
        else:
            for i, row in enumerate(cw_grpo(logps, base, rewards)):
                close(spy.advantages[q, i][own[rows[i]]], [base[i] * w for w in row])


@pytest.mark.parametrize("method", ["gcpo_cd", "egpo", "cw_grpo", "kl_cov", PRODUCT])
def test_peft_adapters_train_and_the_base_stays(scratch: Path, tmp_path: Path, method: str) -> None:
    before = load_policy(str(scratch))[0].state_dict()["model.layers.0.mlp.up_proj.weight"]
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    _, weights = losses(gcpo_trainer(scratch, tmp_path, method, peft_config=adapter))
    base = next(value for name, value in weights.items() if "layers.0.mlp.up_proj.base_layer.weight" in name)
    trained = next(value for name, value in weights.items() if "layers.0.mlp.up_proj.lora_B" in name)
    assert torch.equal(base, before) and trained.abs().sum() > 0


def test_care_with_adapters_has_no_reference_to_move(scratch: Path, tmp_path: Path) -> None:
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    with pytest.raises(NotImplementedError, match="sync_ref_model=True` while using a PEFT model"):
        gcpo_trainer(scratch, tmp_path, "care", peft_config=adapter)


# --- logs and evaluation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dapo", "empo", "gcpo_bot", "egpo", "cw_grpo", "kl_cov", PRODUCT])
def test_an_evaluation_is_trls_own(scratch: Path, tmp_path: Path, method: str) -> None:
    def evaluated(name: str, **changes: Any) -> dict[str, float]:
        trainer = gcpo_trainer(scratch, tmp_path, name, per_device_eval_batch_size=2 * G, **changes)
        torch.manual_seed(5)
        found = trainer.evaluate(dataset().select(range(4)))
        return {key: value for key, value in found.items() if not any(part in key for part in ("time", "second"))}

    found = evaluated(method)
    assert found == pytest.approx(evaluated("grpo", **BASES[get_method(method).base]), nan_ok=True)
    assert not any("gcpo" in key for key in found)


@pytest.mark.parametrize("method", ["gcpo_bot", "empo", PRODUCT])
def test_the_completions_table_pairs_rows_and_weights_before_and_after_an_evaluation(
    scratch: Path, tmp_path: Path, method: str
) -> None:
    trainer = gcpo_trainer(
        scratch,
        tmp_path,
        method,
        per_device_eval_batch_size=G,
        log_completions=True,
        num_completions_to_print=0,
        max_steps=2,
    )
    trainer.evaluate(dataset().select(range(1)))
    trainer.train()
    trained = pd.read_parquet(tmp_path / "completions" / "completions_00002.parquet")
    assert len(trained) == ROWS and trained["weight"].notna().all()
    torch.testing.assert_close(list(trained["abs_advantage"]), list(trained["advantage"].abs()), atol=1e-5, rtol=1e-5)
    trainer.evaluate(dataset().select(range(2)))
    table_after = pd.read_parquet(tmp_path / "completions" / "completions_00002.parquet")
    assert len(table_after) == ROWS
    evaluated = table_after["weight"].isna()
    assert evaluated.tolist() == [False] * (ROWS - 2 * G) + [True] * 2 * G
    last = trained.tail(ROWS - 2 * G)
    pd.testing.assert_frame_equal(table_after[~evaluated].reset_index(drop=True), last.reset_index(drop=True))


@pytest.mark.parametrize("method", ["gcpo_bot", "egpo", "cw_grpo", "egpo_c5", PRODUCT])
def test_equalised_weights_have_mean_1_over_the_batch(
    scratch: Path, tmp_path: Path, scripted: Callable, method: str
) -> None:
    scripted(TEXTS)
    tasks = ((0, 0.5, 0, 1), (0, 1, 2, 0.5), (2, 0, 0, 1))
    trainer = gcpo_trainer(scratch, tmp_path, method, reward_funcs=table(*tasks), equalize_mean=True)
    batch = generate(trainer)
    weight = extra(trainer, "weight").flatten()
    # What is logged for a response is the mean over its tokens; the batch's is over tokens where tokens are weighed.
    counts = batch["completion_mask"].sum(1) if get_method(method).granularity == "token" else torch.ones(ROWS)
    assert (weight * counts).sum() / counts.sum() == pytest.approx(1, abs=1e-5)
    assert weight.std() > 1e-3


def test_equalised_weights_of_the_loss_have_mean_1_over_its_rows(
    scratch: Path, tmp_path: Path, spy: Spy, scripted: Callable
) -> None:
    scripted(TEXTS)
    tasks = ((0, 0.5, 0, 1), (0, 1, 2, 0.5), (2, 0, 0, 1))
    trainer = gcpo_trainer(scratch, tmp_path, "r2vpo", reward_funcs=table(*tasks), equalize_mean=True)
    batch = generate(trainer)
    move(trainer)
    loss_of(trainer, batch)
    weight = spy.advantages / torch.tensor([grpo(group) for group in tasks])
    assert weight.mean() == pytest.approx(1, abs=1e-3) and weight.std() > 0.01


# --- which responses are right --------------------------------------------------------------------------------------


def style(completions: list[Any], **_: Any) -> list[float]:
    return [float(i % 3 * 5) for i in range(len(completions))]


def correct(completions: list[Any], **_: Any) -> list[float]:
    return [float(i % G == 3) for i in range(len(completions))]


@pytest.mark.parametrize("method", ["egpo", "care", "care_agreement", PRODUCT])
def test_a_sum_of_rewards_does_not_say_what_is_right(scratch: Path, tmp_path: Path, method: str) -> None:
    with pytest.raises(
        ValueError, match=r"a sum of 2 rewards does not say: set correctness_reward to .*style, correct"
    ):
        gcpo_trainer(scratch, tmp_path, method, reward_funcs=[style, correct])


@pytest.mark.parametrize("method", ["gcpo_bot", "edge_grpo", "cw_grpo", "empo", "egspo"])
def test_methods_that_do_not_ask_take_any_sum(scratch: Path, tmp_path: Path, method: str) -> None:
    trainer = gcpo_trainer(scratch, tmp_path, method, reward_funcs=[style, correct], reward_range=(0.0, 11.0))
    generate(trainer)


def test_correctness_is_the_column_that_is_named(scratch: Path, tmp_path: Path, spy: Spy) -> None:
    trainer = gcpo_trainer(
        scratch,
        tmp_path,
        "egpo",
        reward_funcs=[style, correct],
        reward_range=(0.0, 11.0),
        correctness_reward="correct",
        correctness_range=(0.0, 1.0),
    )
    batch = generate(trainer)
    entropy = by_response(-spy.passes[0].logps, batch)
    rights = [float(i % G == 3) for i in range(ROWS)]
    sums = [i % 3 * 5 + right for i, right in enumerate(rights)]
    loss_of(trainer, batch)
    for q in range(PROMPTS):
        rows = slice(G * q, G * (q + 1))
        weight = egpo(entropy[q], [2 * right for right in rights[rows]])
        close(spy.advantages[q], [a * w for a, w in zip(grpo(sums[rows]), weight, strict=True)])


def test_an_unknown_correctness_reward_is_named_with_the_nearest(scratch: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no reward function 'corect'\. Did you mean 'correct'\?.*style, correct"):
        gcpo_trainer(scratch, tmp_path, "egpo", reward_funcs=[style, correct], correctness_reward="corect")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"reward_funcs": style}, "style"),
        ({"reward_funcs": [correct, style], "correctness_reward": "style"}, "style"),
        ({"reward_funcs": correct, "correctness_range": (-1.0, 0.5)}, "correct"),
    ],
    ids=str,
)
def test_a_reward_outside_the_range_is_no_correctness_signal(
    scratch: Path, tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    trainer = gcpo_trainer(scratch, tmp_path, "egpo", **changes)
    with pytest.raises(ValueError, match=rf"egpo asks which responses are right, and '{name}' gave \d+, outside \("):
        generate(trainer)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_the_reference_of_care_moves_by_a_moving_average(scratch: Path, tmp_path: Path) -> None:
    changes = {"ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.25, "max_steps": 5}
    trainer = gcpo_trainer(scratch, tmp_path, "care", **changes)
    expected = {name: value.clone() for name, value in trainer.ref_model.state_dict().items()}

    class Follow(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step % 2 == 0:
                for name, value in model.state_dict().items():
                    expected[name] = 0.75 * expected[name] + 0.25 * value

    trainer.add_callback(Follow())
    _, policy = losses(trainer)
    for name, value in trainer.ref_model.state_dict().items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)
    start = load_policy(str(scratch))[0].state_dict()
    for other in (start, policy):
        assert any(not torch.equal(expected[name], other[name]) for name in start)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("care", {"ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}),
        ("clip_cov", {"num_iterations": 1, "method_options": {"band": (0.0, 5.0), "share": 0.2}}),
        ("gcpo_shuffled", {"alpha": 1.5}),
        (PRODUCT, {}),
    ],
    ids=str,
)
def test_a_resumed_run_ends_as_an_uninterrupted_one_bit_for_bit(
    scratch: Path, tmp_path: Path, method: str, changes: dict[str, Any]
) -> None:
    changes = {**changes, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = gcpo_trainer(scratch, tmp_path, method, **changes)
    steps, weights = losses(whole)
    checkpoint = tmp_path / "checkpoint-2"
    assert (checkpoint / "reference.pt").exists() == (method == "care")
    resumed = gcpo_trainer(scratch, tmp_path / "again", method, **changes)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert [(e["loss"], e["grad_norm"]) for e in resumed.state.log_history if "loss" in e] == steps
    assert all(torch.equal(value, weights[name]) for name, value in resumed.model.state_dict().items())
    if method == "care":
        reference = whole.ref_model.state_dict()
        assert all(torch.equal(value, reference[name]) for name, value in resumed.ref_model.state_dict().items())
        kept = torch.load(checkpoint / "reference.pt", weights_only=True)
        assert any(not torch.equal(kept[name], value) for name, value in reference.items())


def test_the_reference_is_written_before_what_makes_a_checkpoint_complete(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def save(trainer: Any, model: Any, trial: Any) -> None:
        seen.append((tmp_path / "checkpoint-1" / "reference.pt").exists())

    monkeypatch.setattr(transformers.Trainer, "_save_checkpoint", save)
    losses(gcpo_trainer(scratch, tmp_path, "care", max_steps=1, save_strategy="steps", save_steps=1))
    assert seen == [True]


# --- models and bad input -------------------------------------------------------------------------------------------


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


def test_plain_prompts_and_a_custom_answer_extractor(scratch: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    def first_letter(text: str) -> str | None:
        seen.append(text)
        return text[:1] or None

    trainer = gcpo_trainer(
        scratch, tmp_path, "gcpo_bot", train_dataset=dataset(conversational=False), answer_extractor=first_letter
    )
    losses(trainer)
    assert len(seen) == STEPS * ROWS


def test_unscorable_responses_get_no_advantage_and_no_part_in_the_statistics(scratch: Path, tmp_path: Path) -> None:
    trainer = gcpo_trainer(scratch, tmp_path, "rd_only", reward_funcs=table(*[(None, 0.5, 1.0, 1.5)] * PROMPTS))
    output = generate(trainer)
    # Deviations 0.5, 0, 0.5 of at most 2/3 * 1 * 2 * 2 = 8/3, so RD = 3/8.
    close(extra(trainer, "rd"), [[3 / 8] * G] * PROMPTS)
    advantages = output["advantages"].view(PROMPTS, G)
    assert (advantages[:, 0] == 0).all() and (advantages[:, 3] > 1).all()


def test_a_weight_that_is_not_finite_is_replaced_by_one_and_counted(scratch: Path, tmp_path: Path) -> None:
    trainer = gcpo_trainer(scratch, tmp_path, "cd_only")
    trainer.embedder = lambda texts: torch.zeros(len(texts), 4)  # no text has a direction
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["gcpo/replaced_weights"] for entry in steps] == [ROWS] * STEPS
    assert all(entry["gcpo/weight"] == 1 for entry in steps)


def test_equal_rewards_leave_the_policy_as_it_is(scratch: Path, tmp_path: Path) -> None:
    before = load_policy(str(scratch))[0].state_dict()
    _, after = losses(gcpo_trainer(scratch, tmp_path, "gcpo_bot", reward_funcs=table(*[(1.0,) * G] * PROMPTS)))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_reward_outside_its_range_warns_once_and_only_rd_is_clipped(scratch: Path, tmp_path: Path) -> None:
    trainer = gcpo_trainer(scratch, tmp_path, "rd_only", reward_funcs=table(*[(9.0, 0.0) * (G // 2)] * PROMPTS))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    about = [str(w.message) for w in caught if "reward_range" in str(w.message)]
    assert len(about) == 1 and "9" in about[0]
    assert set(trainer._logs["extra"]["rd"]) == {1.0}


def test_shuffled_weights_are_those_of_other_groups(scratch: Path, tmp_path: Path) -> None:
    trainer = gcpo_trainer(scratch, tmp_path, "gcpo_shuffled")
    generate(trainer)
    own = (extra(trainer, "w_geo") * extra(trainer, "w_rd"))[:, 0]
    weight = extra(trainer, "weight")[:, 0]
    torch.testing.assert_close(weight.sort().values, own.sort().values)
    assert len(own.unique()) == PROMPTS and (weight != own).all()


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


# --- the embedded world ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_the_laptop_profile_within_its_range(tmp_path: Path, method: str) -> None:
    size = 8  # half of the profile's, as are the prompts, for time
    changes = {"method": method, "max_steps": 20, "group_size": size, "prompts_per_step": 2, "save_steps": 1000}
    off_policy = OFF_POLICY if get_method(method).in_loss else {}
    params = validate({**load_profile("laptop"), **changes, "grpo": off_policy})
    task = get_task(params.task)
    transformers.set_seed(0)
    model, tokens = load_policy(resolve("tiny", "policy"))
    trainer = build_trainer(params, task, model, tokens, task.load("train", limit=100).rows, tmp_path)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 20
    assert all(math.isfinite(entry[key]) for entry in logged for key in ("loss", "grad_norm", "reward") if key in entry)
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())
    assert all(entry.get("gcpo/replaced_weights", 0) == 0 for entry in logged)
    low, high = weight_range(method, None, size)
    for name in ("weight", "loss_weight"):
        for entry in logged:
            if f"gcpo/{name}_min" in entry:
                assert low * (1 - 1e-6) <= entry[f"gcpo/{name}_min"]
                assert entry[f"gcpo/{name}_max"] <= high * (1 + 1e-6)


def test_a_full_reward_at_the_middle_of_the_range_warns_once_that_nothing_is_right(
    scratch: Path, tmp_path: Path
) -> None:
    def zero_or_one(completions: list[Any], **_: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    for reward_range, expected in (((0.0, 2.0), 1), ((0.0, 1.0), 0)):
        trainer = gcpo_trainer(scratch, tmp_path, "egpo", reward_funcs=zero_or_one, reward_range=reward_range)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
        assert sum("exactly at 1" in str(w.message) for w in caught) == expected
