"""One batch of answers of the embedded policy, for notebooks that look at what methods make of it."""

from pathlib import Path
from typing import Any, NamedTuple

import transformers
from datasets import Dataset
from torch import Tensor

from gcpo import measures, world
from gcpo.rollouts import Rollouts
from gcpo.runs.policies import quiet
from gcpo.runs.train import task_reward
from gcpo.semantics import Embedder, Entailment
from gcpo.tasks import get_task
from gcpo.tasks.sampling import load_policy
from gcpo.trainer import GCPOConfig, GCPOTrainer


class _Trainer(GCPOTrainer):
    """Keeps the batch that it has generated, to look at it again when the policy has moved."""

    def _policy_pass(self, output: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        self.generated = output
        return super()._policy_pass(output)


class Batch(NamedTuple):
    """Groups in order of success; of equal success, those whose meanings differ most come first.

    Attributes:
        rollouts: rewards, every feature before the policy moves, and the ratios that a second step would see.
        binary: the same answers with reward 2 for a perfect one and 0 for all others.
        questions: the last sentence of each prompt.
        answers: of each question, as sampled.
    """

    rollouts: Rollouts
    binary: Rollouts
    questions: list[str]
    answers: list[list[str]]


def sample_batch(folder: Path, n_prompts: int = 16, seed: int = 0, **settings: Any) -> Batch:
    """Sample answers to questions of tinyqa in one real training step of `GCPOTrainer`, which writes to `folder`.

    The step itself favours nobody, so it is GRPO's: EG-SPO with both of its bounds set to 1 reads entropies and
    changes nothing. ``settings`` are fields of `GCPOConfig` that take the place of those below.
    """
    quiet()
    usual = {"num_generations": 16, "temperature": 0.7, "max_completion_length": 16, "learning_rate": 5e-4}
    settings = usual | settings
    size, neutral = settings["num_generations"], {"correct": (1.0, 1.0), "wrong": (1.0, 1.0)}
    settings |= {"method": "egspo", "method_options": neutral, "max_steps": 1, "beta": 0.002, "seed": seed}
    settings |= {"per_device_train_batch_size": n_prompts * size, "bf16": False}
    settings |= {"report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    task = get_task("tinyqa")
    rows = task.load("train", limit=n_prompts, seed=seed).rows
    transformers.set_seed(seed)
    policy, tokens = load_policy(world.resolve("tiny", "policy"))
    scored: list[Rollouts] = []
    trainer = _Trainer(
        *(policy, task_reward(task), GCPOConfig(str(folder / "run"), **settings)),
        processing_class=tokens,
        embedder=Embedder("all-MiniLM-L6-v2"),
        entailment=Entailment(world.resolve("tiny", "entailment")),
        train_dataset=Dataset.from_list([{"prompt": row.messages, "references": [*row.references]} for row in rows]),
        answer_extractor=task.extract,
        callback=scored.append,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    (seen,) = scored
    moved, _ = trainer._policy_pass(trainer.generated)
    ratios = (moved.view_as(seen.logps) - seen.logps).exp()
    correct, dispute = seen.correctness.gt(0.5).sum(1), measures.semantic_entropy(seen.clusters)
    order = sorted(range(n_prompts), key=lambda i: (correct[i], -dispute[i]))
    known = {name: getattr(seen, name)[order] for name in seen.features if name != "correctness"}
    known |= {"ratios": ratios[order], "max_completion_length": trainer.max_completion_length}
    prompts, texts = ([messages[-1]["content"] for messages in trainer._logs[of]] for of in ("prompt", "completion"))
    questions = [prompts[size * i].split(" . ")[-1] for i in order]
    answers = [texts[size * i : size * (i + 1)] for i in order]
    rewards = seen.rewards[order]
    return Batch(Rollouts(rewards, **known), Rollouts(2 * rewards.gt(1.99).float(), **known), questions, answers)
