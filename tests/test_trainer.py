"""GCPOTrainer against TRL's own trainer, and what every method makes of whole groups: advantages, logs, checkpoints."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers as h
import pandas as pd
import papers
import pytest
import torch
from helpers import first_letter
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import create_model_from_path

from gcpo import GCPOTrainer
from gcpo.methods import BASES, METHODS, advantages, get_method, weights
from gcpo.rollouts import Rollouts
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.train import build_trainer
from gcpo.semantics import Entailment
from gcpo.tasks.sampling import load_policy
from gcpo.trainer.trainer import text_of
from gcpo.weights import weight_range

WITH_ALPHA = [name for name, row in METHODS.items() if row.alpha is not None]
IN_LOSS = ("r2vpo", "clip_cov", "kl_cov")  # test_trainer_loss.py
GRPO = {"loss_type": "grpo", "scale_rewards": "group"}  # the base of all, seed_grpo too

Make = Callable[..., GCPOTrainer]
Script = Callable[..., None]

pytestmark = [pytest.mark.usefixtures("frozen"), pytest.mark.filterwarnings("ignore:.*equals GRPO")]


# --- against TRL ----------------------------------------------------------------------------------------------------


def same(a: tuple[Any, dict[str, Any]], b: tuple[Any, dict[str, Any]]) -> bool:
    return a[0] == b[0] and all(torch.equal(a[1][name], b[1][name]) for name in a[1])


@pytest.fixture(scope="module")
def grpo_run(scratch: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return h.losses(h.make_trainer(scratch, tmp_path_factory.mktemp("grpo"), "grpo"))


def test_grpo_equals_trls_own_trainer_bit_for_bit(scratch: Path, tmp_path: Path, grpo_run: Any) -> None:
    model, tokens = load_policy(str(scratch))
    args = GRPOConfig(**h.settings(tmp_path, **GRPO))
    trainer = GRPOTrainer(model, h.reward, args, train_dataset=h.dataset(), processing_class=tokens)
    assert same(h.losses(trainer), grpo_run)
    assert any(norm > 0 for _, norm in grpo_run[0])  # otherwise nothing was compared


@pytest.mark.parametrize("method", WITH_ALPHA)
def test_alpha_zero_equals_grpo_bit_for_bit_and_alpha_one_does_not(make: Make, grpo_run: Any, method: str) -> None:
    assert same(h.losses(make(method, alpha=0.0, **GRPO)), grpo_run)
    assert not same(h.losses(make(method, alpha=1.0, **GRPO)), grpo_run)


@pytest.mark.parametrize("method", ["r2vpo", "kl_cov"])
def test_on_policy_a_method_of_ratios_equals_grpo_bit_for_bit(make: Make, grpo_run: Any, method: str) -> None:
    assert same(h.losses(make(method, num_iterations=1)), grpo_run)


# --- every method ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_its_weights_keep_to_their_range(make: Make, method: str) -> None:
    trainer = make(method)
    h.check_finite(trainer)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    if METHODS[method].factors:
        (low, high), name = weight_range(method, None, h.G), "loss_weight" if method in IN_LOSS else "weight"
        ends = [[entry[f"gcpo/{name}_{end}"] for entry in steps] for end in ("min", "max")]
        assert low * (1 - 1e-6) <= min(ends[0]) < max(ends[1]) <= high * (1 + 1e-6)
    assert any(entry["grad_norm"] > 0 for entry in steps)
    assert all(entry.get("gcpo/replaced_weights", 0) == 0 for entry in steps)


# --- what a loss reads ----------------------------------------------------------------------------------------------


SEED_PRINTED = {"form": "linear", "estimator": "counts", "alpha_norm": "none"}  # SEED-GRPO Eq. 6


def over_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over a response's tokens; of padding, which has weight 1, where it has none."""
    if values.ndim == 2:
        return values
    mean = torch.where(mask, values, 0).sum(-1) / mask.sum(-1).clamp(min=1)
    return torch.where(mask.any(-1), mean, values[..., 0])


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *((method, {}) for method in METHODS if method not in IN_LOSS),
        *((method, {"scale_rewards": scale}) for method in ("egpo", "empo") for scale in ("batch", "none")),
        *((method, h.OFF_POLICY) for method in ("egpo", "edge_grpo")),  # TRL's own pass is there, without entropies
        *((method, {"bf16": True}) for method in ("egpo", "cw_grpo")),
        *((method, {"mask_truncated_completions": True}) for method in ("egpo", "cw_grpo")),
        *((method, {"equalize_mean": True}) for method in ("gcpo_bot", "cw_grpo")),
        *((method, {"reward_range": (-1.0, 4.0)}) for method in ("gcpo_cd", "egpo", "dapo")),
        ("gcpo_bot", {"alpha": 1.2}),
        ("gcpo_bot", {"use_full_completion_for_clustering": True}),
        *((method, {"method_options": {"clusters": "bidirectional"}}) for method in ("gcpo_bot", "empo")),
        ("seed_grpo", {"alpha": 0.02, "method_options": SEED_PRINTED}),
        ("se", {"entailment_threshold": 0.95}),
        ("care", {"method_options": {"margin": 1e-4}}),  # an untrained reference finds nothing likely
        ("egpo", {"importance_sampling_level": "sequence"}),
        ("cw_grpo", {"top_entropy_quantile": 0.5, "beta": 0.01}),
    ],
    ids=h.case_id,
)
def test_the_loss_reads_the_advantages(make: Make, spy: h.Spy, scripted: Script, method: str, changes: Any) -> None:
    scripted()
    halves = [[r if r is None else r / 2 for r in group] for group in h.MIXED]
    trainer = make(method, reward_funcs=h.table(*halves), reward_weights=[2.0], answer_extractor=h.last_word, **changes)
    if method == "care":
        h.move(trainer)  # the reference is another model by now
    batch = h.generate(trainer)
    assert h.loss_of(trainer, batch).isfinite()
    rollouts = h.rollouts_of(trainer, spy, h.MIXED)
    options = {"seed": trainer.args.seed, **changes.get("method_options", {})}
    options |= {name: changes[name] for name in ("alpha", "equalize_mean") if name in changes}
    expected = advantages(method, rollouts, scale_rewards=changes.get("scale_rewards"), **options)
    weight = weights(method, rollouts, **options)
    assert spy.advantages.dtype == torch.float32
    h.assert_close(h.tokens_of(spy.advantages, spy.mask), h.tokens_of(expected, spy.mask), "what the loss reads")
    h.assert_close(h.logged_advantages(trainer), over_tokens(expected, spy.mask), "what is logged")
    if METHODS[method].components:
        h.assert_close(h.extra(trainer, "weight"), over_tokens(weight, spy.mask), "the logged weight")
        h.assert_close(h.extra(trainer, "abs_advantage"), over_tokens(expected.abs(), spy.mask), "its logged size")
        h.assert_close(h.extra(trainer, "no_answer"), ~rollouts.answered, "the logged missing answers")
        metrics, kept = trainer._metrics["train"], h.tokens_of(weight, spy.mask)
        h.assert_close(metrics["gcpo/weight"], [h.extra(trainer, "weight").mean()], "the mean in the logs")
        h.assert_close(metrics["gcpo/weight_min"] + metrics["gcpo/weight_max"], [kept.min(), kept.max()], "the ends")
    if method == "empo":
        h.assert_close(h.extra(trainer, "method_reward"), METHODS["empo"].reward(rollouts), "the logged reward")


@pytest.mark.parametrize(
    ("method", "options", "own"), [("care", {"margin": 1e-6}, 0), ("egpo", {"scope": "answer"}, 1)], ids=h.case_id
)
def test_the_answers_tokens_are_the_answer_itself_or_all_that_follows_the_thought(
    make: Make, spy: h.Spy, scripted: Script, method: str, options: dict[str, Any], own: int
) -> None:
    words = "oa so io se eie s st eia ati sa oi tes".split()
    scripted([f"{word[::-1]}</think> so {word}" for word in words])
    rewards = ((2, 1.5, 2, 0), (2, 0, 2, 2), (1, None, 1, 2))
    changes = {"method_options": options, "max_completion_length": 20, "answer_extractor": h.last_word}
    trainer = make(method, reward_funcs=h.table(*rewards), **changes)
    h.move(trainer)
    h.loss_of(trainer, h.generate(trainer))
    begins = (lambda text: text.rfind(" ") + 1, lambda text: text.find(">") + 1, lambda text: 0)
    found = [advantages(method, h.rollouts_of(trainer, spy, rewards, at), **options) for at in begins]
    expected = found.pop(own)
    h.assert_close(spy.advantages, expected)
    assert all((other - expected).abs().max() > 1e-3 for other in found)


def test_shuffled_weights_move_anew_in_every_step(make: Make, spy: h.Spy, scripted: Script) -> None:
    scripted()
    rewards = ((0, 0.5, 0, 1), (0, 0, 2, 0.5), (2, 0, 2, 2))
    trainer = make("gcpo_shuffled", reward_funcs=h.table(*rewards), answer_extractor=h.last_word)
    moved = []
    for step in range(4):
        trainer.state.global_step = step
        h.generate(trainer)
        weight = weights("gcpo_shuffled", h.rollouts_of(trainer, spy, rewards), seed=7 + step)
        h.assert_close(h.extra(trainer, "weight"), weight)
        moved.append(tuple(weight[:, 0].tolist()))
    assert len(set(moved)) == 2  # of three groups, there are two ways to move all


# --- several reward functions ---------------------------------------------------------------------------------------


def style(completions: list[Any], **_: Any) -> list[float | None]:
    return [None if i == 1 else float(i % 3 * 5) for i in range(len(completions))]


def correct(completions: list[Any], **_: Any) -> list[float | None]:
    return [None if i in (1, 5) else float(i % h.G == 3) for i in range(len(completions))]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_rewards_are_summed_by_their_weights_and_unscorable_only_where_all_are(
    make: Make, spy: h.Spy, scripted: Script, aggregation: str
) -> None:
    scripted()
    trainer = make(
        "gcpo_bot",
        reward_funcs=[style, correct],
        reward_weights=[0.5, 3.0],
        reward_range=(0.0, 8.0),
        multi_objective_aggregation=aggregation,
        answer_extractor=h.last_word,
    )
    h.generate(trainer)
    sums = [[i % 3 * 2.5 + 3 * (i % h.G == 3) for i in range(h.G * q, h.G * (q + 1))] for q in range(h.PROMPTS)]
    sums[0][1] = math.nan
    weight = weights("gcpo_bot", h.rollouts_of(trainer, spy, sums))
    h.assert_close(h.extra(trainer, "weight"), weight)
    h.assert_close(
        h.logged_advantages(trainer), spy.generated["advantages"].view(h.PROMPTS, h.G) * weight
    )  # TRL's own base


def test_correctness_is_the_column_that_is_named(make: Make, spy: h.Spy, scripted: Script) -> None:
    scripted()
    trainer = make(
        "egpo",
        reward_funcs=[style, correct],
        reward_range=(0.0, 11.0),
        correctness_reward="correct",
        correctness_range=(-1.0, 2.5),
        answer_extractor=h.last_word,
        train_dataset=h.dataset(conversational=False),
    )
    h.generate(trainer)
    sums = h.numbers([[0, None, 10, 1], [5, 10, 0, 6], [10, 0, 5, 11]])
    rights = h.numbers([[0, None, 0, 1], [0, None, 0, 1], [0, 0, 0, 1]])
    expected = advantages("egpo", h.rollouts_of(trainer, spy, sums.tolist(), correctness=(rights + 1) / 3.5))
    h.assert_close(h.logged_advantages(trainer), expected)
    assert (expected != advantages("egpo", h.rollouts_of(trainer, spy, sums.tolist()))).any()


def test_a_bad_reward_late_in_a_run_does_not_end_it(make: Make) -> None:
    step = iter(range(100))

    def late(completions: list[Any], **_: Any) -> list[float]:
        bad = {1: -0.5, 2: -math.inf}.get(next(step), 0.0)
        return [bad, *([0.0, 2.0] * len(completions))[: len(completions) - 1]]

    seen: list[Any] = []
    trainer = make("egpo", reward_funcs=late, max_steps=4, callback=seen.append)
    with pytest.warns(UserWarning, match="'late' gave -0.5, outside") as caught:
        trainer.train()
    assert trainer.state.global_step == len(seen) == 4
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())
    assert any("A reward is -inf" in str(warning.message) for warning in caught)


def test_the_text_of_a_conversation_is_what_the_assistant_says_last() -> None:
    asks = {"role": "assistant", "content": "", "tool_calls": []}
    told = {"role": "tool", "content": "3 letters found"}
    assert text_of([asks, told, {"role": "assistant", "content": "Three"}]) == "Three"
    assert text_of([{"role": "assistant", "content": "Three"}, asks]) == "Three"
    assert text_of([asks, told]) == "" and text_of("Three") == "Three"


# --- groups that leave the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", [6, 10])  # with ten, nobody gets near the end
def test_dapo_drops_equal_rewards_and_long_texts_cost(make: Make, spy: h.Spy, scripted: Script, allowed: int) -> None:
    scripted()
    tasks = ((0, 0.5, 2, 1), (1, 1, 1, 1), (2, 0, 0.5, 0))
    trainer = make("dapo", reward_funcs=h.table(*tasks), max_completion_length=allowed)
    batch = h.generate(trainer)
    found = h.loss_of(trainer, batch)
    lengths = [[min(len(text) + 1, allowed) for text in h.TEXTS[h.G * q : h.G * (q + 1)]] for q in range(h.PROMPTS)]
    costs = [[papers.dapo_eq13(n, allowed) for n in group] for group in lengths]
    base = [papers.grpo([r + c for r, c in zip(*rows, strict=True)]) for rows in zip(tasks, costs, strict=True)]
    base[1] = [0.0] * h.G
    kept = torch.tensor([[1.0], [0.0], [1.0]]) * torch.tensor(lengths)
    h.assert_close(spy.advantages, base)
    assert batch["completion_mask"].sum(1).tolist() == kept.flatten().tolist()
    assert batch["num_items_in_batch"] == kept.sum()
    h.assert_close(found.detach(), -(torch.tensor(base) * kept).sum() / kept.sum())
    assert trainer._metrics["train"]["gcpo/dropped_groups"] == pytest.approx([1 / 3])


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
def test_groups_with_equal_rewards_may_leave_the_denominator(make: Make, loss: str) -> None:
    """As if the batch had had the other two groups alone."""
    rewards = h.table((0, 0.5, 2, 1), (1, 1, 1, 1), (2, 0, 0.5, 0))
    gradients, counts = [], []
    for drops in (False, True):
        trainer = make("grpo", reward_funcs=rewards, loss_type=loss, drop_equal_groups=drops)
        batch = h.generate(trainer)
        (found,) = torch.autograd.grad(h.loss_of(trainer, batch), [trainer.model.lm_head.weight])
        gradients.append(found)
        counts.append(batch["completion_mask"].sum() if loss == "dapo" else 3 - drops)
    h.assert_close(gradients[1] * counts[1], gradients[0] * counts[0])
    assert counts[0] > counts[1] and gradients[0].norm() > 1e-3


def test_alpha_goes_linearly_to_its_last_value(make: Make) -> None:
    rewards = h.table((0, 0.5, 2, 1), (1, 1, 1, 1), (2, 0, 0.5, 0))
    seen: list[Rollouts] = []
    trainer = make("gcpo_bot", reward_funcs=rewards, alpha=0.8, alpha_end=0.2, max_steps=4, callback=seen.append)
    for step, alpha in ((1, 0.6), (3, 0.2)):
        trainer.state.max_steps, trainer.state.global_step = 4, step
        h.generate(trainer)
        expected = weights("gcpo_bot", seen[-1], alpha=alpha)
        found = torch.tensor(trainer._logs["extra"]["weight"])[-expected.numel() :]
        h.assert_close(found.view_as(expected), expected)
    with pytest.raises(ValueError, match="alpha_end must be at least 0"):
        make("gcpo_bot", alpha_end=-1.0)


# --- logs and evaluation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dapo", "gcpo_bot", "kl_cov", "cw_grpo"])
def test_an_evaluation_is_trls_own(make: Make, method: str) -> None:
    def evaluated(name: str, **changes: Any) -> dict[str, float]:
        trainer = make(name, per_device_eval_batch_size=2 * h.G, **changes)
        torch.manual_seed(5)
        found = trainer.evaluate(h.dataset().select(range(4)))
        return {key: value for key, value in found.items() if not any(part in key for part in ("time", "second"))}

    found = evaluated(method)
    assert found == pytest.approx(evaluated("grpo", **BASES[get_method(method).base]), nan_ok=True)
    assert not any("gcpo" in key for key in found)


@pytest.mark.parametrize("method", ["gcpo_bot", "empo"])
def test_a_completions_table_pairs_rows_and_weights_around_evaluations(make: Make, tmp_path: Path, method: str) -> None:
    logs = {"log_completions": True, "num_completions_to_print": 0}
    trainer = make(method, per_device_eval_batch_size=h.G, max_steps=2, **logs)
    trainer.evaluate(h.dataset().select(range(1)))
    trainer.train()
    trained = pd.read_parquet(tmp_path / "completions" / "completions_00002.parquet")
    assert len(trained) == h.ROWS
    assert trained["weight"].notna().all()
    h.assert_close(list(trained["abs_advantage"]), list(trained["advantage"].abs()))
    trainer.evaluate(h.dataset().select(range(2)))
    after = pd.read_parquet(tmp_path / "completions" / "completions_00002.parquet")
    assert after["weight"].isna().tolist() == [False] * (h.ROWS - 2 * h.G) + [True] * 2 * h.G
    left = h.ROWS - 2 * h.G
    pd.testing.assert_frame_equal(after.head(left), trained.tail(left).reset_index(drop=True))


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_the_reference_is_of_the_policys_commit(scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan("train", validate({"policy": str(scratch), "method": "grpo", "beta": 0.1}))
    model, tokens = load_policy(str(scratch))
    model.config._commit_hash = "c0ffee"  # as transformers notes it of a policy on the Hub
    revisions: list[str | None] = []

    def loaded(name: str, revision: str | None = None, **options: Any) -> Any:
        revisions.append(revision)
        return create_model_from_path(name, **options)

    monkeypatch.setattr("trl.trainer.grpo_trainer.create_model_from_path", loaded)
    build_trainer(plan, model, tokens, plan.task.load("train", limit=8).rows, tmp_path)
    assert revisions == ["c0ffee"]


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("care", {"ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}),
        ("clip_cov", {"num_iterations": 1, "method_options": {"band": (0.0, 5.0), "share": 0.2}}),
        ("gcpo_shuffled", {"alpha": 1.5}),
        ("cw_grpo", {"beta": 0.01}),
    ],
    ids=h.case_id,
)
def test_a_resumed_run_ends_as_a_whole_one(make: Make, tmp_path: Path, method: str, changes: dict[str, Any]) -> None:
    changes = {**changes, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = make(method, **changes)
    steps, weights = h.losses(whole)
    checkpoint = tmp_path / "checkpoint-2"
    assert f"trained with {method}, a method introduced in [" in (tmp_path / "README.md").read_text()
    assert (checkpoint / "reference.pt").exists() == (method == "care")  # only one that moves is kept
    resumed = make(method, **changes, output_dir=str(tmp_path / "again"))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert [(e["loss"], e["grad_norm"]) for e in resumed.state.log_history if "loss" in e] == steps
    assert all(torch.equal(value, weights[name]) for name, value in resumed.model.state_dict().items())
    if method == "care":
        reference, file = whole.ref_model.state_dict(), checkpoint / "reference.pt"
        assert all(torch.equal(value, reference[name]) for name, value in resumed.ref_model.state_dict().items())
        kept = torch.load(file, weights_only=True)
        assert any(not torch.equal(kept[name], value) for name, value in reference.items())
        file.write_bytes(file.read_bytes()[:1000])  # as a full disk leaves it
        with pytest.raises(OSError, match=r"checkpoint-2/reference.pt cannot be read"):
            make(method, **changes, output_dir=str(tmp_path / "cut")).train(resume_from_checkpoint=str(checkpoint))


# --- models and bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changes", "missing"),
    [
        ("rd_only", {}, None),
        ("cd_only", {}, "embedding"),
        ("se", {"method_options": {"clusters": "bidirectional"}}, "entailment"),
        ("se", {"method_options": {"clusters": "exact"}}, None),
        ("empo", {"use_full_completion_for_clustering": True}, None),  # mathematics needs no model
        ("gcpo_bot", {"entailment": Entailment(first_letter)}, "embedding"),
        ("gcpo_bot", {"embedder": h.vowel_counts}, "entailment"),
    ],
    ids=h.case_id,
)
def test_only_needed_models_are_loaded(make: Make, method: str, changes: dict[str, Any], missing: str | None) -> None:
    absent = {"embedding_model": "no/embedding", "entailment_model": "no/entailment"}
    changes = {"embedder": None, "entailment": None, **absent, **changes}
    if missing is None:
        assert h.losses(make(method, **changes, max_steps=1))[0]
    else:
        with pytest.raises(OSError, match=rf"'no/{missing}' \(a Hub name.*(has one|rd_only needs none).$"):
            make(method, **changes)


def no_direction_in_the_first_group(texts: list[str]) -> Tensor:
    return torch.ones(len(texts), 4) * (torch.arange(len(texts)) >= h.G).unsqueeze(1)


@pytest.mark.parametrize(
    ("changes", "generations"),
    [
        ({}, h.STEPS),
        ({"equalize_mean": True}, h.STEPS),
        *(({**h.OFF_POLICY, **more}, 2) for more in ({}, h.ACCUMULATED, {"logging_steps": 2}, {"logging_steps": 5})),
    ],
    ids=h.case_id,
)
def test_a_weight_that_is_not_finite_is_1_and_counted(make: Make, changes: dict[str, Any], generations: int) -> None:
    """Over the passes of the loss, each of which counts its own, and over the steps between two logs."""
    trainer = make("cd_only", embedder=no_direction_in_the_first_group, **changes)
    trainer.train()
    history = trainer.state.log_history
    assert sum(entry.get("gcpo/replaced_weights", 0) for entry in history) == h.G * generations
    assert {entry["gcpo/weight"] for entry in history if "gcpo/weight" in entry} == {1}


def test_a_pass_takes_the_number_of_completion_tokens_by_name_too(make: Make) -> None:
    trainer, ids = make("grpo"), torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 9, 8]])
    given = trainer.model, ids, torch.ones_like(ids)
    assert trainer._get_per_token_logps_and_entropies(*given, logits_to_keep=2)[0].shape == (2, 2)
