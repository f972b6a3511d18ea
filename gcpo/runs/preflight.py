"""Settings that TRL refuses, and data that cannot be read, found before a run is started."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable

from huggingface_hub.constants import HF_HUB_OFFLINE

from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.policies import quiet
from gcpo.runs.train import configure
from gcpo.tasks import sources
from gcpo.tasks.reading import DATA_DIR

# TRL's trainer checks this only once it has the policy.
MOVING = "{}'s reference model follows the policy, and with adapters (lora_rank) there is none: set lora_rank: 0"


def refused(plans: Iterable[Plan]) -> list[str]:
    """Return what TRL says against settings of training runs, a line per kind of complaint with the first such run."""
    quiet()
    found: dict[str, str] = {}
    for plan in plans:
        if plan.kind == "train" and plan.params.max_steps:
            if plan.params.lora_rank and plan.trainer.get("sync_ref_model"):
                found.setdefault(MOVING.format(plan.params.method), plan.id)
                continue
            at_once = plan.trainer["per_device_train_batch_size"] * plan.params.processes
            as_one = plan.params.model_copy(update={"processes": 1, "micro_batch": at_once})
            try:
                configure(Plan("train", as_one), plan.folder, plan.params.entailment)
            except (ValueError, TypeError, ImportError) as error:
                found.setdefault(" ".join(str(error).split()), plan.id)
    return [f"TRL refuses {id_}: {why}" for why, id_ in found.items()]


def unreadable(plans: Iterable[Plan]) -> list[str]:
    """Return what is wrong with the data of runs, a line for each split: its first row is loaded, if it can be here."""
    if not os.environ.get(DATA_DIR) and HF_HUB_OFFLINE:
        return []
    wanted = dict.fromkeys(
        (plan.params.task, split, plan.params.data_revision) for plan in plans for split in asked_splits(plan)
    )
    found = []
    for task, split, revision in wanted:
        try:
            if source := sources(task).get(split):
                source.probe(revision)
            elif sources(task):  # others are generated
                raise ValueError(f"there is no such split, only {', '.join(sources(task))}")
        except (OSError, ValueError) as error:
            found.append(f"{task}/{split} cannot be read: {' '.join(str(error).split())}")
    return found


def asked_splits(plan: Plan) -> list[str]:
    """Return the splits that a run reads."""
    params = plan.params
    along = [params.validation_split] * bool(params.validation_limit)
    return [params.eval_split, *([params.train_split, *along] if plan.kind == "train" and params.max_steps else [])]


if __name__ == "__main__":  # as gcpo.cli asks for it
    print(json.dumps(refused(Plan(kind, validate(values)) for kind, values in json.load(sys.stdin))))
