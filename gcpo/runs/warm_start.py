"""Warm start: supervised steps on a few training questions, after which a policy answers as shortly as it is asked to.

Reinforcement learning cannot begin where every answer is a sentence and scores next to nothing. The questions are taken
from those of all runs that start from the policy (:attr:`gcpo.runs.plan.Plan.taken`).
"""

from typing import Any

import pandas as pd
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from gcpo import io
from gcpo.runs.params import Params
from gcpo.runs.plan import WARM_ROWS, WARM_START, Plan
from gcpo.runs.policies import models, quiet, starting_policy
from gcpo.runs.record import Run, claim, placeless, record

RATE = 2e-5
NOTHING_ELSE: dict[str, Any] = {  # is written, and each row is whole and is run as it is
    **{"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_steps": 1},
    **{"max_length": None, "gradient_checkpointing": False, "lr_scheduler_type": "constant"},
}


def warm_start(params: Params) -> Run:
    """Make ``warm_steps`` supervised steps on :data:`gcpo.runs.plan.WARM_ROWS` questions of ``train_split`` each, by
    TRL's SFTTrainer, unless that run is finished; an interrupted one begins anew.

    Writes ``policy/`` and ``metrics.csv``: step, loss (of the first accepted answer's tokens, in nats), grad_norm.
    """
    plan = Plan(WARM_START, params)
    with claim(plan) as run:
        if not run.finished:
            with record(plan) as run:
                _train(plan, run)
    return run


def _train(plan: Plan, run: Run) -> None:
    quiet()
    params = plan.params
    split = plan.load(params.train_split, WARM_ROWS * params.warm_steps)
    run.manifest["data"] = {"train": split.source}
    model, tokens = starting_policy(plan)
    run.manifest["models"] = models(params, model)
    chosen: dict[str, Any] = {"max_steps": params.warm_steps, "learning_rate": RATE}
    chosen |= {"per_device_train_batch_size": WARM_ROWS, "seed": params.seed, "bf16": params.dtype == "bfloat16"}
    args = SFTConfig(str(run.folder), use_cpu=not torch.cuda.is_available(), **chosen, **NOTHING_ELSE)
    columns = {
        "prompt": [row.messages for row in split.rows],
        "completion": [[{"role": "assistant", "content": row.references[0]}] for row in split.rows],
        "chat_template_kwargs": [params.chat_template_kwargs] * len(split.rows),
    }
    trainer = SFTTrainer(model, args=args, train_dataset=Dataset.from_dict(columns), processing_class=tokens)
    trainer.train()
    trainer.save_model(str(run.folder / "policy"))
    run.manifest["trl"] = placeless(args.to_dict())
    log = pd.DataFrame([entry for entry in trainer.state.log_history if "loss" in entry])
    run.table("metrics.csv", log[["step", "loss", "grad_norm"]])
    run.manifest["results"] = {"questions": len(split.rows), "loss": float(log["loss"].iloc[-10:].mean())}


def made_first(plan: Plan) -> dict[str, Any]:
    """Make the warm start of a run, if it has one, and return what its manifest says of it."""
    if not plan.warm:
        return {}
    made = warm_start(plan.warm.params)
    return {WARM_START: {"run": made.manifest["id"], "policy": io.hashes(made.folder / "policy")}}
