"""GCPOTrainer inside TRL's loss, what its passes cost, and how it goes with TRL's other settings."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import helpers as h
import papers
import pytest
import torch
from trl import GRPOTrainer

from gcpo import GCPOTrainer
from gcpo.methods import advantages, weights
from gcpo.tasks.sampling import load_policy

FAMILIES = ["gcpo_bot", "dapo", "empo", "care", "egpo", "edge_grpo", "cw_grpo", "r2vpo", "clip_cov", "kl_cov"]
VARIED = ((0, 0.5, 0, 1), (0, 1, 2, 0.5), (2, 2, 0, 0))  # no advantage is 0

Make = Callable[..., GCPOTrainer]
Script = Callable[..., None]

pytestmark = [pytest.mark.usefixtures("frozen"), pytest.mark.filterwarnings("ignore:.*equals GRPO")]


# --- weights and penalties of ratios --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "changes"),
    [
        ("r2vpo", {}, {}),
        ("r2vpo", {"lambda_": 3.0}, {"bf16": True}),
        ("r2vpo", {}, {"equalize_mean": True}),
        ("clip_cov", {"band": (0.0, 5.0), "share": 1.0}, {"epsilon": 0.05, "epsilon_high": 5.0}),
        ("clip_cov", {"band": (0.0, 5.0), "share": 1.0}, {"epsilon": 0.05}),
        ("clip_cov", {"band": (0.0, 5.0), "share": 0.2, "clip": (0.1, 0.1)}, {}),
    ],
    ids=h.case_id,
)
def test_the_loss_reads_advantages_weighted_by_the_ratios_of_its_step(
    make: Make, spy: h.Spy, scripted: Script, method: str, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    scripted()
    trained = {"reward_funcs": h.table(*h.MIXED), "answer_extractor": h.last_word, "method_options": options}
    trainer = make(method, **trained, **h.OFF_POLICY, **changes)
    batch = h.generate(trainer)
    h.move(trainer)
    trainer.state.global_step = 5
    h.loss_of(trainer, batch)
    options = {"seed": trainer.args.seed + 5, "equalize_mean": trainer.args.equalize_mean, **options}
    if method == "clip_cov":  # TRL's own clip, unless the method's is set
        options["clip"] = (0.05, changes.get("epsilon_high", 0.05))
    rollouts = h.rollouts_of(trainer, spy, h.MIXED, ratios=spy.ratios)
    expected = advantages(method, rollouts, **options)
    h.assert_close(h.tokens_of(spy.advantages, spy.mask), h.tokens_of(expected, spy.mask))
    assert not torch.equal(spy.read["advantages"], batch["advantages"])
    weight = h.tokens_of(weights(method, rollouts, **options), spy.mask)
    metrics = trainer._metrics["train"]
    assert metrics["gcpo/loss_weight_min"] == pytest.approx([weight.min().item()], rel=1e-4)
    assert metrics["gcpo/loss_weight_max"] == pytest.approx([weight.max().item()], rel=1e-4)
    if method == "clip_cov":
        assert metrics["gcpo/w_clip"] == pytest.approx([weight.mean().item()], rel=1e-4)


@pytest.mark.parametrize("accumulated", [1, 3])
def test_kl_cov_is_grpos_loss_and_a_penalty(make: Make, spy: h.Spy, scripted: Script, accumulated: int) -> None:
    scripted()
    trainer = make(
        "kl_cov",
        reward_funcs=h.table(*h.MIXED),
        method_options={"share": 0.2, "coefficient": 3.0},
        gradient_accumulation_steps=accumulated,
        per_device_train_batch_size=h.ROWS // accumulated,
    )
    batch = h.generate(trainer)
    h.move(trainer)
    grpos = GRPOTrainer._compute_loss(trainer, trainer.model, batch)
    found = h.loss_of(trainer, batch)
    logps, old = spy.passes[-1].logps, spy.passes[0].logps
    base = advantages("grpo", h.rollouts_of(trainer, spy, h.MIXED)).flatten().tolist()
    kept = h.numbers(h.MIXED).isfinite().flatten().nonzero().flatten().tolist()
    rows = [logps[i][spy.mask.flatten(0, 1)[i]].tolist() for i in kept]
    covariances = papers.covariances(rows, [base[i] for i in kept])
    ranked = sorted((c, i, t) for i, row in zip(kept, covariances, strict=True) for t, c in enumerate(row))
    chosen = [(i, t) for _, i, t in ranked[-int(0.2 * len(ranked)) :]]
    penalty = sum(3 * (logps[token] - old[token]).abs() for token in chosen) / spy.mask.sum()
    expected = grpos + penalty / accumulated
    h.assert_close(found.detach(), expected.detach())
    assert penalty > 0.01
    assert trainer._metrics["train"]["gcpo/penalty"] == pytest.approx([penalty.item()])
    parameters = list(trainer.model.parameters())
    gradients = torch.autograd.grad(found, parameters, retain_graph=True)
    for a, b in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


# --- what a pass costs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changes", "trls", "ours"),
    [
        ("grpo", {}, 0, 0),
        ("gcpo_bot", {}, 0, 0),
        ("kl_cov", {}, 1, 0),
        ("care", {}, 1, 0),
        ("egpo", {}, 0, 1),
        ("egpo", h.ACCUMULATED, 0, 1),
        ("egpo", h.OFF_POLICY, 1, 0),
        ("egpo", h.SPLIT, 1, 0),
        ("cw_grpo", {"beta": 1e-3}, 1, 1),
        ("edge_grpo", {}, 0, 1),
        ("edge_grpo", h.OFF_POLICY, 1, 1),  # TRL's has no entropies
    ],
    ids=h.case_id,
)
def test_old_log_probabilities_cost_one_pass_and_only_where_a_method_reads_them(
    make: Make, spy: h.Spy, method: str, changes: dict[str, Any], trls: int, ours: int
) -> None:
    trainer = make(method, **changes)
    batch = h.generate(trainer)
    assert len(spy.passes) == trls + ours
    assert not any(one.gradient for one in spy.passes)
    assert [one.entropies is not None for one in spy.passes] == [False] * trls + ["edge_grpo" in method] * ours
    assert all(one.model is trainer.model for one in spy.passes[trls:])
    h.loss_of(trainer, batch)
    assert len(spy.passes) == trls + ours + 1
    assert spy.passes[-1].gradient
    for one in spy.sampled(trainer):  # the policy has not moved
        h.assert_close(h.by_group(one.logps)[spy.mask], h.by_group(spy.passes[-1].logps.detach())[spy.mask])


# --- where TRL cuts a batch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dapo", "egpo", "cw_grpo", "r2vpo"])
def test_rows_keep_their_own_where_trl_shuffles_them(make: Make, spy: h.Spy, scripted: Script, method: str) -> None:
    texts = [f"{'aeio'[i % 4] * (i % 3 + 1)} {chr(97 + i)}" for i in range(h.ROWS)]  # each row's own
    scripted(texts)
    trainer = make(method, reward_funcs=h.table(*VARIED), answer_extractor=h.last_word, max_steps=h.PROMPTS, **h.SPLIT)
    trainer.train()
    expected = advantages("grpo" if method == "r2vpo" else method, h.rollouts_of(trainer, spy, VARIED)).flatten(0, 1)
    ids = spy.generated["completion_ids"].tolist()
    rows = [[ids.index(row) for row in read["completion_ids"].tolist()] for read in spy.reads]
    order = [row for own in rows for row in own]
    assert sorted(order) == list(range(h.ROWS)) != order
    for step, (own, read) in enumerate(zip(rows, spy.reads, strict=True)):
        wanted, mask = expected[own], read["completion_mask"].bool()
        if "r2vpo" in method:
            ratios = (read["logps"] - spy.passes[0].logps[own]).exp()
            variance = torch.stack([row[kept].var(correction=0) for row, kept in zip(ratios, mask, strict=True)])
            assert (variance.max() > 1e-4) == (step > 0)
            wanted = wanted / (1 + variance)
        h.assert_close(h.tokens_of(read["advantages"], mask), h.tokens_of(wanted, mask), f"step {step}")


STRADDLING = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}  # half of the middle group in each


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *((method, STRADDLING) for method in ("dapo", "seed_grpo", "care", "egpo", "r2vpo", "cw_grpo")),
        ("dapo", h.ACCUMULATED),
    ],
    ids=h.case_id,
)
def test_gradient_accumulation_changes_nothing(make: Make, scratch: Path, method: str, changes: dict[str, Any]) -> None:
    """All statistics are of whole groups: where TRL cuts the batch makes no difference but rounding."""
    sgd = {"optim": "sgd", "learning_rate": 0.3, "max_steps": 4}  # Adam would divide rounding errors by themselves
    whole, parts = h.losses(make(method, **sgd))[1], h.losses(make(method, **sgd, **changes))[1]
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, atol=1e-5, rtol=1e-4)
    start = load_policy(str(scratch))[0].state_dict()
    assert max((value - start[name]).abs().max() for name, value in whole.items()) > 1e-3


# --- what is missing ------------------------------------------------------------------------------------------------

SOME_REWARDS = ((0, None, 2, 0.5), (None, None, None, None), (None, 1, None, None))
NO_REWARDS = ((None,) * h.G,) * h.PROMPTS


@pytest.mark.parametrize(
    ("method", "tasks"),
    [
        *((method, SOME_REWARDS) for method in FAMILIES),
        *((method, NO_REWARDS) for method in ("gcpo_bot", "dapo", "empo", "cw_grpo", "kl_cov")),
    ],
    ids=h.case_id,
)
def test_without_a_reward_nothing_is_trained(make: Make, spy: h.Spy, method: str, tasks: Sequence[h.Rewards]) -> None:
    trainer = make(method, reward_funcs=h.table(*tasks), max_steps=2)
    batch = h.generate(trainer)
    h.move(trainer)
    assert h.loss_of(trainer, batch).isfinite()
    assert not spy.advantages.isnan().any()
    assert spy.advantages[h.numbers(tasks).isnan()].eq(0).all()
    if method != "egpo":  # which reinforce an entirely wrong group
        assert spy.advantages[2].eq(0).all()  # one reward has nothing beside it
    assert h.extra(trainer, "weight").isfinite().all()
    h.check_finite(trainer)


@pytest.mark.parametrize("method", [method for method in FAMILIES if method != "dapo"])  # which refuses such masks
def test_completions_that_are_empty_or_cut_off(make: Make, spy: h.Spy, scripted: Script, method: str) -> None:
    cut = "too long"
    scripted([cut, "", "", "a", cut, cut, cut, cut, "", "", "", ""])
    tasks = ((2, 0, 0.5, 1), (0, 2, 1, 0), (2, 0, 0, 2))
    trainer = make(method, reward_funcs=h.table(*tasks), mask_truncated_completions=True, max_steps=2)
    batch = h.generate(trainer)
    assert batch["completion_mask"].sum(1).tolist() == [0, 1, 1, 2, 0, 0, 0, 0, 1, 1, 1, 1]
    h.move(trainer)
    assert h.loss_of(trainer, batch).isfinite()
    assert not spy.advantages.isnan().any()
    if method in ("egpo", "edge_grpo", "r2vpo"):
        base = advantages("grpo", h.rollouts_of(trainer, spy, tasks))
        h.assert_close(spy.advantages[1], base[1])  # nothing to compare: weight 1
        h.assert_close(spy.advantages[0, 0], base[0, 0])
    h.check_finite(trainer)


def environment(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """A rollout function of TRL's: the policy's tokens, and an environment's between them."""
    ids = [[97 + (7 * row + place) % 26 for place in range(6)] for row in range(len(prompts))]
    own = [[1, 1, int(row % 3 == 0), 0, 1, int(row % 2 == 0)] for row in range(len(prompts))]
    logprobs = [[-5.0] * 6 for _ in prompts]
    return {"prompt_ids": [[65, 66]] * len(prompts), "completion_ids": ids, "logprobs": logprobs, "env_mask": own}


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("method", ["egpo", "cw_grpo", "dapo", "r2vpo"])
def test_tokens_of_an_environment_take_no_part(make: Make, spy: h.Spy, method: str) -> None:
    tasks = ((0, 0.5, 0, 1), (1, 1, 1, 1), (2, 0, 0, 0.5))
    trainer = make(method, reward_funcs=h.table(*tasks), rollout_func=environment)
    batch = h.generate(trainer)
    assert not spy.mask.all()
    h.move(trainer)
    h.loss_of(trainer, batch)
    ratios = {"ratios": spy.ratios} if method == "r2vpo" else {}
    expected = advantages(method, h.rollouts_of(trainer, spy, tasks, **ratios))
    h.assert_close(h.tokens_of(spy.advantages, spy.mask), h.tokens_of(expected, spy.mask))
    assert (batch["num_items_in_batch"] == spy.mask[[0, 2]].sum()) == (method == "dapo")
