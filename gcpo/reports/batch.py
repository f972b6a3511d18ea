"""One batch of answers of the embedded policy, for notebooks that look at what methods make of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gcpo import measures, world
from gcpo.rollouts import Rollouts
from gcpo.runs.policies import quiet
from gcpo.runs.train import task_reward
from gcpo.semantics import Embedder, Entailment
from gcpo.tasks import get_task
from gcpo.tasks.sampling import load_policy
from gcpo.trainer import GCPOConfig, GCPOTrainer


class Recorder(GCPOTrainer):
    """Keeps the groups that it scores."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.collect, self.collector.rollouts = self.collector.rollouts, self.keep  # type: ignore[method-assign]

    def keep(self, per_function: Tensor, texts: Sequence[str], output: dict[str, Any]) -> Rollouts:
        rollouts = self.collect(per_function, texts, output)
        self.rewards, self.texts, self.output = rollouts.rewards, list(texts), output
        self.features = {name: getattr(rollouts, name) for name in rollouts.features}
        self.fresh = self.ratios()
        return rollouts

    def ratios(self) -> Tensor:
        """Of new to old probability, for every sampled token and the policy as it is now."""
        now = self._policy_pass(self.output)[0].view_as(self.features["logps"])
        return (now - self.features["logps"]).exp()


class OneBatch(NamedTuple):
    """Groups in order of success; of equal success, those whose meanings differ most come first.

    Attributes:
        rollouts: rewards, every feature before the policy moves, and the ratios that a second step would see.
        binary: the same answers with reward 2 for a perfect one and 0 for all others.
        fresh: pi / pi_old of every token before the policy moves.
        questions: the last sentence of each prompt.
        answers: of each question, as sampled.
    """

    rollouts: Rollouts
    binary: Rollouts
    fresh: Tensor
    questions: list[str]
    answers: list[list[str]]


def one_batch(
    folder: Path,
    *,
    n_prompts: int = 16,
    group_size: int = 16,
    temperature: float = 0.7,
    longest: int = 16,
    learning_rate: float = 5e-4,
    seed: int = 0,
) -> OneBatch:
    """Sample questions of tinyqa in one real training step of `GCPOTrainer`, which writes to `folder`.

    The step itself favours nobody, so it is GRPO's: EG-SPO with both of its bounds set to 1 reads entropies and
    changes nothing.
    """
    import transformers
    from datasets import Dataset

    quiet()
    task = get_task("tinyqa")
    rows = [
        {"prompt": [{"role": "user", "content": row.prompt}], "references": list(row.references)}
        for row in task.load("train", limit=n_prompts, seed=seed).rows
    ]
    args = GCPOConfig(
        str(folder / "run"),
        method="egspo",
        method_options={"correct": (1.0, 1.0), "wrong": (1.0, 1.0)},
        max_steps=1,
        learning_rate=learning_rate,
        beta=0.002,
        seed=seed,
        per_device_train_batch_size=n_prompts * group_size,
        num_generations=group_size,
        temperature=temperature,
        max_completion_length=longest,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    transformers.set_seed(seed)
    policy, tokens = load_policy(world.resolve("tiny", "policy"))
    trainer = Recorder(
        policy,
        task_reward(task),
        args,
        processing_class=tokens,
        embedder=Embedder("all-MiniLM-L6-v2"),
        entailment=Entailment(world.resolve("tiny", "entailment")),
        train_dataset=Dataset.from_list(rows),
        answer_extractor=task.extract,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()

    correct = trainer.features["correctness"].gt(0.5).sum(1)
    dispute = measures.semantic_entropy(trainer.features["clusters"])
    order = torch.tensor(sorted(range(n_prompts), key=lambda i: (correct[i], -dispute[i])))
    known = {name: x[order] for name, x in trainer.features.items() if name != "correctness"}
    known["ratios"] = trainer.ratios()[order]
    rewards = trainer.rewards[order]
    prompts = tokens.batch_decode(trainer.output["prompt_ids"][::group_size], skip_special_tokens=True)
    return OneBatch(
        Rollouts(rewards, **known, max_completion_length=longest),
        Rollouts(2 * rewards.gt(1.99).float(), **known, max_completion_length=longest),
        trainer.fresh[order],
        [prompts[i].split(" . ")[-1] for i in order],
        [trainer.texts[group_size * i : group_size * (i + 1)] for i in order],
    )
