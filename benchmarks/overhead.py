"""Overhead of each method over TRL's own GRPOTrainer, as ratios of step times measured in one process.

Steps of all trainers alternate, so that a slow minute of the machine hits all of them; ratios are medians over rounds.
Methods that read pi / pi_old take two steps per generation, and are compared with a GRPOTrainer that does so too.
Run it with `make bench`; times on a busy machine mean little.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from gcpo import world
from gcpo.methods import METHODS
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.policies import quiet
from gcpo.runs.profiles import load_profile
from gcpo.runs.train import build_trainer
from gcpo.tasks.sampling import load_policy


def iterations(method: str) -> int:
    """Optimiser steps per generation."""
    return 2 if METHODS[method].in_loss else 1


def limit(method: str) -> float:
    """Return the most that a method's step may cost, as a multiple of TRL's: by the most expensive thing it reads."""
    row = METHODS[method]
    if row.needs_entailment(full_completion=False):
        return 1.5
    if row.reads & {"logps", "entropies", "ratios"}:
        return 1.25
    return 1.15 if row.reads & {"embeddings", "clusters"} else 1.02


def make(method: str | None, num_iterations: int, folder: Path) -> GRPOTrainer:
    """A trainer of the laptop profile; None for TRL's own."""
    chosen = {"method": method or "grpo", "max_steps": 10_000, "grpo": {"num_iterations": num_iterations}}
    plan = Plan("train", validate({**load_profile("laptop"), **chosen}))
    model, tokens = load_policy(world.resolve(plan.params.policy, "policy"))
    rows = plan.task.load("train", limit=plan.params.train_limit).rows
    trainer = build_trainer(plan, model, tokens, rows, folder)
    if method is not None:
        return trainer
    own = {name: getattr(trainer.args, name) for name in GRPOConfig.__dataclass_fields__ if hasattr(trainer.args, name)}
    plain = GRPOConfig(str(folder), **{k: v for k, v in own.items() if k in KEPT})
    return GRPOTrainer(model, trainer.reward_funcs, plain, train_dataset=trainer.train_dataset, processing_class=tokens)


KEPT = (
    "per_device_train_batch_size", "num_generations", "max_completion_length", "learning_rate", "beta", "temperature",
    "loss_type", "scale_rewards", "max_steps", "report_to", "disable_tqdm", "log_completions",
    "num_completions_to_print", "seed", "gradient_checkpointing", "bf16", "num_iterations",
)  # fmt: skip


def generations(trainer: GRPOTrainer) -> Any:
    """Times of one generation and its steps, one at a time: sampling, scoring, losses and updates."""
    trainer.create_optimizer_and_scheduler(1000)
    trainer.current_gradient_accumulation_steps = 1  # set by the training loop, which is not used here
    while True:
        start = time.perf_counter()
        for count, batch in enumerate(trainer.get_train_dataloader(), start=1):
            trainer.model.train()
            trainer.training_step(trainer.model, batch, None)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            if count % trainer.num_iterations == 0:
                yield time.perf_counter() - start
                start = time.perf_counter()


def main() -> None:
    """Print a line per method: median time, ratio to TRL's own, and its spread over rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--methods", nargs="*", default=[name for name, row in METHODS.items() if not row.permuted])
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    wanted = [(None, n) for n in sorted({iterations(method) for method in options.methods})]
    wanted += [(method, iterations(method)) for method in options.methods]
    with tempfile.TemporaryDirectory() as folder:
        running = {key: generations(make(*key, Path(folder))) for key in wanted}
        times: dict[tuple[str | None, int], list[float]] = {key: [] for key in running}
        for round_ in range(options.rounds + 2):
            for key, measuring in running.items():
                # The same random numbers for all: the same completions until weights differ.
                torch.manual_seed(round_)
                seconds = next(measuring)
                if round_ >= 2:  # caches and allocators are warm
                    times[key].append(seconds)
    for (name, n), measured in times.items():
        ratios = sorted(a / b for a, b in zip(measured, times[None, n], strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(
            f"{name or 'TRL GRPOTrainer':16s} {statistics.median(measured):7.3f} s per generation and its {n} step(s), "
            f"{statistics.median(ratios):5.3f} of TRL's [{low:.3f}, {high:.3f}]"
            + (f", limit {limit(name)}" if name else "")
        )


if __name__ == "__main__":
    main()
