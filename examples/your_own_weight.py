"""A weight of your own, in five lines: a function of the rollouts of a batch, given as the method.

Two weights by difficulty, which the papers of this repository do not have and which compete with GCPO's RD: both give
hard questions more, where RD gives more to questions whose rewards differ. `python examples/your_own_weight.py` prints
what they make of three groups, and trains two steps with one of them. docs/own_weight.md has every field of the
rollouts; the grid your_own_weight.yaml beside this file asks what one step with each weight gains.
"""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from torch import Tensor

from gcpo import GCPOConfig, GCPOTrainer
from gcpo.methods import weights
from gcpo.rollouts import Rollouts
from gcpo.tasks import get_task
from gcpo.world import bootstrap

GAMMA = 0.5  # of the focal weight: a hyperparameter of F-GRPO
TEMPERATURE = 2.0  # of DGPO's public training scripts


def focal(rollouts: Rollouts) -> Tensor:
    """F-GRPO (arXiv 2602.06717): (1 - share of right answers) ** gamma, here with the mean correctness as the share."""
    return (1 - rollouts.correctness.nanmean(1)).clamp(min=0) ** GAMMA


def difficulty(rollouts: Rollouts) -> Tensor:
    """DGPO's DQW (arXiv 2601.20614): n softmax(-mean / T) over the n groups whose rewards differ. A group without any
    right answer counts as easy, as in its authors' code."""
    mean = rollouts.correctness.nanmean(1)
    differ = rollouts.rewards.amax(1) > rollouts.rewards.amin(1)
    score = (-torch.where(mean > 0, mean, 1) / TEMPERATURE).masked_fill(~differ, -torch.inf)
    return torch.where(differ, differ.sum() * score.softmax(0), 1)


def main() -> None:
    """Print both weights, and RD's, of an easy, a half-known and a hard question; train two steps with one of them."""
    right = torch.tensor([[1.0, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]])
    groups = Rollouts(right, reward_range=(0.0, 1.0))
    for method in ("rd_only", focal, difficulty):
        name = method if isinstance(method, str) else method.__name__
        print(f"{name:10s}", *(f"{weight:.3f}" for weight in weights(method, groups)[:, 0].tolist()))

    task, policy = get_task("tinyqa"), str(bootstrap().policy)
    asked = task.load("train", limit=16).rows
    rows = [{"prompt": [{"role": "user", "content": r.prompt}], "references": list(r.references)} for r in asked]

    def reward(completions: list[list[dict[str, str]]], references: list[list[str]], **_: object) -> list[float]:
        return [task.reward(answer[0]["content"], of) for answer, of in zip(completions, references, strict=True)]

    reward.reward_range = task.reward_range  # type: ignore[attr-defined]  # what it can reach
    with tempfile.TemporaryDirectory() as folder:
        args = GCPOConfig(folder, method=focal, max_steps=2, logging_steps=1, bf16=False, report_to="none")
        trainer = GCPOTrainer(policy, reward_funcs=reward, args=args, train_dataset=Dataset.from_list(rows))
        trainer.train()
    print(*(f"step {log['step']}: mean weight {log['gcpo/w_own']:.3f}" for log in trainer.state.log_history[:-1]))


if __name__ == "__main__":
    main()
