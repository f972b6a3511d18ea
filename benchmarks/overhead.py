"""Overhead of each method over TRL's own GRPOTrainer, as ratios of step times measured in one process.

A method is measured with TRL's own pass and with prompts that are shared. Steps of all trainers alternate, so that a
slow minute of the machine hits all of them; ratios are medians over rounds, of the processor's time on a CPU. Methods
that read pi / pi_old take two steps per generation, and are compared with a GRPOTrainer that does so too. What a method
costs is what it reads, so that one of those that read the same stands for all; `--methods` takes any. It writes
`benchmarks/results/overhead.csv`, and ends with 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timing import Line, now, ratio, report
from trl import GRPOConfig, GRPOTrainer

from gcpo import world
from gcpo.methods import METHODS
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.policies import quiet
from gcpo.runs.profiles import load_profile
from gcpo.runs.train import build_trainer
from gcpo.tasks.sampling import load_policy

# What shared prompts have to save: the most that a step may cost, as a multiple of TRL's.
SHARED = {
    "tinyqa": {"grpo": 0.35, "gcpo_cd": 0.5, "gcpo_bot": 0.65},
    "tinymath": {"grpo": 0.65, "gcpo_cd": 1.0, "gcpo_bot": 1.15},
}


class Case(NamedTuple):
    """One trainer that is measured."""

    task: str
    method: str | None  # None for TRL's own
    shares: bool
    num_iterations: int  # optimiser steps per generation

    @property
    def limit(self) -> float | None:
        """The most that a step may cost: with TRL's pass, by the most expensive thing that the method reads."""
        if self.method is None:
            return None
        if self.shares:
            return SHARED[self.task].get(self.method)
        row = METHODS[self.method]
        if row.needs_entailment(full_completion=False):
            return 1.5
        if row.reads & {"logps", "entropies", "ratios"}:
            return 1.25
        return 1.15 if row.reads & {"embeddings", "clusters"} else 1.02


def make(case: Case, folder: Path) -> GRPOTrainer:
    """Return a trainer of the laptop profile."""
    chosen = {"task": case.task, "method": case.method or "grpo", "share_prompts": case.shares, "max_steps": 10_000}
    chosen["grpo"] = {"num_iterations": case.num_iterations}
    plan = Plan("train", validate({**load_profile("laptop"), **chosen}))
    model, tokens = load_policy(world.resolve(plan.params.policy, "policy"))
    rows = plan.task.load("train", limit=plan.params.train_limit).rows
    trainer = build_trainer(plan, model, tokens, rows, folder)
    if case.method is not None:
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
        start = now()
        for count, batch in enumerate(trainer.get_train_dataloader(), start=1):
            trainer.model.train()
            trainer.training_step(trainer.model, batch, None)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            if count % trainer.num_iterations == 0:
                yield now() - start
                start = now()


def one_of_each() -> list[str]:
    """Return one method of those that read the same; GCPO's own come first."""
    names = [*SHARED["tinyqa"], *(name for name, row in METHODS.items() if not row.permuted)]
    kinds: dict[object, str] = {}
    for name in names:
        kinds.setdefault((METHODS[name].reads, METHODS[name].in_loss, METHODS[name].needs_entailment(False)), name)
    return list(kinds.values())


def main() -> int:
    """Print and write a line per trainer: ratio to TRL's own with its quartiles over rounds, and its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tasks", nargs="*", default=[*SHARED])
    parser.add_argument("--methods", nargs="*", default=one_of_each())
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    steps = {method: 2 if METHODS[method].in_loss else 1 for method in options.methods}
    lines = []
    for task in options.tasks:
        cases = [Case(task, None, False, n) for n in sorted({*steps.values()})]
        cases += [Case(task, method, shares, n) for method, n in steps.items() for shares in (False, True)]
        lines += [line(case, times) for case, times in measured(cases, options.rounds).items() if case.method]
    return 1 if report("overhead", lines) else 0


def measured(cases: list[Case], rounds: int) -> dict[Case, tuple[list[float], list[float]]]:
    """Return the times of each case's generations, and of TRL's own in the same rounds."""
    with tempfile.TemporaryDirectory() as folder:
        running = {case: generations(make(case, Path(folder))) for case in cases}
        times: dict[Case, list[float]] = {case: [] for case in cases}
        for round_ in range(rounds + 2):
            for case, measuring in running.items():
                # The same random numbers for all: the same completions until weights differ.
                torch.manual_seed(round_)
                seconds = next(measuring)
                if round_ >= 2:  # caches and allocators are warm
                    times[case].append(seconds)
    return {case: (own, times[Case(case.task, None, False, case.num_iterations)]) for case, own in times.items()}


def line(case: Case, times: tuple[list[float], list[float]]) -> Line:
    """Return what was found of a case."""
    name = f"{case.task} {case.method or 'plain'}, {case.num_iterations} step(s)" + (", shared" if case.shares else "")
    return ratio(name, "TRL's GRPOTrainer", {name: times[0], "TRL's GRPOTrainer": times[1]}, case.limit)


if __name__ == "__main__":
    sys.exit(main())
