"""The behaviour of TRL 1.10 to 1.16 that GCPOTrainer relies on: a failure names what breaks with another TRL."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers as h
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from gcpo.tasks.sampling import load_policy
from gcpo.trainer.trainer import PASS

pytestmark = pytest.mark.usefixtures("frozen")

GENERATE = "_generate_and_score_completions"
LOGPS = "_get_per_token_logps_and_entropies"
Make = Callable[..., GRPOTrainer]


@pytest.fixture
def trl(scratch: Path, tmp_path: Path) -> Make:
    """TRL's own trainer."""

    def make(**changes: Any) -> GRPOTrainer:
        model, tokens = load_policy(str(scratch))
        args = GRPOConfig(**h.settings(tmp_path, **{"loss_type": "grpo", **changes}))
        return GRPOTrainer(model, h.reward, args, train_dataset=h.dataset(), processing_class=tokens)

    return make


def passed(trainer: GRPOTrainer, batch: dict[str, Any], **options: Any) -> Any:
    """A forward pass of TRL's over the completions of a batch."""
    ids, mask = (torch.cat([batch[f"prompt_{key}"], batch[f"completion_{key}"]], 1) for key in ("ids", "mask"))
    return getattr(trainer, LOGPS)(trainer.model, ids, mask, batch["completion_ids"].shape[1], **options)


# --- _generate_and_score_completions --------------------------------------------------------------------------------

KEYS = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"}


@pytest.mark.parametrize(
    ("changes", "more"),
    [({}, set()), (h.OFF_POLICY, {"old_per_token_logps"}), ({"beta": 0.1}, {"ref_per_token_logps"})],
    ids=h.case_id,
)
def test_what_a_generation_holds(trl: Make, changes: dict[str, Any], more: set[str]) -> None:
    batch = h.generate(trl(**changes))
    assert batch.keys() == KEYS | more, f"{GENERATE}: the keys of its output"
    shape = batch["completion_ids"].shape
    assert batch["advantages"].shape == shape[:1] == (h.ROWS,), f"{GENERATE}: one advantage per row"
    assert all(batch[key].shape == shape for key in {"completion_mask", *more}), f"{GENERATE}: token rows, one length"
    total, about = batch["num_items_in_batch"], f"{GENERATE}, dropped groups: num_items_in_batch is"
    assert total == batch["completion_mask"].sum(), f"{about} the tokens of the batch"
    assert total.ndim == 0, f"{about} a number, which the split leaves whole"


@pytest.mark.parametrize(
    ("accumulated", "steps", "iterations"),
    [(1, 1, 1), (4, 2, 2), (4, 4, 1), (2, 4, 1), (1, 1, 2), (3, 2, 1), (2, 2, 2)],
)
def test_old_logps_exist_where_steps_are_not_aligned(trl: Make, accumulated: int, steps: int, iterations: int) -> None:
    trainer = trl(
        per_device_train_batch_size=h.ROWS // steps,
        gradient_accumulation_steps=accumulated,
        steps_per_generation=steps,
        num_iterations=iterations,
    )
    assert ("old_per_token_logps" in h.generate(trainer)) == (accumulated % (steps * iterations) != 0), (
        "GCPOConfig.on_policy and our own pass: when TRL keeps old_per_token_logps"
    )


# --- _compute_loss and _get_per_token_logps_and_entropies -----------------------------------------------------------


def test_the_loss_asks_for_logps_once_and_reads_advantages_after(trl: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trl()
    batch = h.generate(trainer)
    before = h.loss_of(trainer, batch)
    inherited = GRPOTrainer._get_per_token_logps_and_entropies

    def change(self: Any, *arguments: Any, **keywords: Any) -> Any:
        batch["advantages"] = 3 * batch["advantages"] + 1
        return inherited(self, *arguments, **keywords)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", change)
    # At ratio 1 the loss is minus the mean advantage. A second call, or an earlier reading, would show in it.
    h.assert_close(h.loss_of(trainer, batch).item(), 3 * before.item() - 1, f"{LOGPS}: the loss reads what it changes")


def test_log_probabilities_come_first_of_three_and_entropies_second(trl: Make) -> None:
    trainer = trl()
    batch = h.generate(trainer)
    logps, entropies, _ = passed(trainer, batch, batch_size=5, compute_entropy=True)
    assert {"pixel_values", "image_grid_thw", "num_images"} <= PASS.keys(), f"{LOGPS}: the names of images"
    ids, mask = (torch.cat([batch[f"prompt_{key}"], batch[f"completion_{key}"]], 1) for key in ("ids", "mask"))
    with torch.no_grad():
        plain = trainer.model(ids, attention_mask=mask).logits[:, -h.LONGEST - 1 : -1].log_softmax(-1)
    tokens = batch["completion_mask"].bool()
    chosen = plain.gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(logps[tokens].detach(), chosen[tokens], msg=f"{LOGPS}: log-probabilities first")
    shannon = -(plain.exp() * plain).sum(-1)
    torch.testing.assert_close(entropies[tokens].detach(), shannon[tokens], msg=f"{LOGPS}: Shannon entropies second")


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"])
def test_advantages_of_tokens_are_as_good_as_advantages_of_rows(trl: Make, loss_type: str) -> None:
    trainer = trl(**h.OFF_POLICY, loss_type=loss_type, epsilon_high=5.0)
    batch = h.generate(trainer)
    h.move(trainer)
    tokens = batch["advantages"].unsqueeze(1).expand(batch["completion_ids"].shape)
    by_row, by_token = h.loss_of(trainer, batch), h.loss_of(trainer, {**batch, "advantages": tokens})
    assert torch.equal(by_row, by_token), f"_compute_loss, {loss_type}: advantages may be (rows, tokens)"
    other = h.loss_of(trainer, {**batch, "advantages": tokens * (torch.arange(tokens.shape[1]) > 1)})
    assert not torch.equal(by_row, other), f"_compute_loss, {loss_type}: each token has its own advantage"


def test_the_ratio_is_of_the_old_log_probabilities_or_1(trl: Make) -> None:
    trainer = trl(**h.OFF_POLICY, epsilon=100.0)  # no clipping
    batch = h.generate(trainer)
    h.move(trainer)
    logps = passed(trainer, batch)[0].detach()
    tokens, counts = batch["completion_mask"], batch["completion_mask"].sum(1)
    ratios = ((logps - batch["old_per_token_logps"]).exp() * tokens).sum(1) / counts
    about = "weights in the loss: pi_old is old_per_token_logps, and without them the policy itself"
    torch.testing.assert_close(h.loss_of(trainer, batch), -(ratios * batch["advantages"]).mean(), msg=about)
    del batch["old_per_token_logps"]
    torch.testing.assert_close(h.loss_of(trainer, batch), -batch["advantages"].mean(), msg=about)


def test_the_loss_of_a_step_is_divided_by_the_steps_that_are_accumulated(trl: Make) -> None:
    trainer = trl(**h.ACCUMULATED, max_steps=1)
    trainer.train()
    about = "weights in the loss: the penalty is divided like TRL's loss"
    assert trainer.current_gradient_accumulation_steps == h.PROMPTS, about
    batch = {**h.generate(trainer), "advantages": torch.ones(h.ROWS)}
    assert h.loss_of(trainer, batch).item() == pytest.approx(-1 / h.PROMPTS), about
