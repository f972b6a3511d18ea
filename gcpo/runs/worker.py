"""One of several processes that train a run together: ``python -m gcpo.runs.worker FOLDER``, started by accelerate.

It trains as the run of one process does; records, validation and evaluation are left to the process that waits. What
that one needs stands in the run's folder: the policy, those along the way, and TRL's log.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState

from gcpo import io
from gcpo.processes import exit_with_parent
from gcpo.runs import gpus
from gcpo.runs.launch import LOG
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.policies import quiet, starting_policy
from gcpo.runs.record import Run, load
from gcpo.runs.train import build_trainer, fit, quarters, settings
from gcpo.trainer import GCPOTrainer


class _Policies(transformers.TrainerCallback):
    """Saves the policy where validation will look at it; all processes together, since each may have a part of it."""

    def __init__(self, trainer: GCPOTrainer, folder: Path, steps: list[int]) -> None:
        self.trainer, self.folder, self.steps = trainer, folder, steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in self.steps:
            self.trainer.save_model(str(self.folder / f"{state.global_step:06d}"))


def generate_together(model: torch.nn.Module) -> None:
    """Tell a policy that FSDP shares out to generate until all processes are done: each layer's weights are gathered
    from all of them, and one that ended early would leave the others waiting. transformers sees it of the models that
    it shards itself alone; accelerate shards this one."""
    for module in model.modules():
        if isinstance(module, transformers.GenerationMixin):
            setattr(module, "_is_fsdp_managed_module", True)  # noqa: B010 (an attribute that its class does not declare)


def work(folder: Path) -> None:
    """Train the run whose manifest is in ``folder``."""
    quiet()
    PartialState()  # gives this process its GPU, before anything is put on one
    params = validate(load(folder).manifest["params"], str(folder))
    plan, run = Plan("train", params), Run(folder)
    rows = plan.load(params.train_split, params.train_limit, seed=params.seed).rows
    model, tokens = starting_policy(plan)
    trainer = build_trainer(plan, model, tokens, rows, folder)
    if trainer.is_fsdp_enabled:
        generate_together(trainer.model)
    steps = quarters(params.max_steps)[1:-1] if params.validation_limit else []
    fit(trainer, run, _Policies(trainer, folder / "validation", steps))
    trainer.accelerator.wait_for_everyone()  # after which all that is left to do is to end
    peaks = trainer.accelerator.gather(torch.tensor([gpus.peak_memory()], device=trainer.accelerator.device))
    if trainer.is_world_process_zero():
        made = {"trl": settings(trainer), "log": trainer.state.log_history}
        made["peak_gpu_memory_gb"] = peaks.max().item()
        io.write(folder / LOG, json.dumps(made, default=str))
    trainer.accelerator.end_training()


if __name__ == "__main__":
    exit_with_parent(os.getppid())
    work(Path(sys.argv[1]))
