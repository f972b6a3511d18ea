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


def refused(plans: Iterable[Plan]) -> list[str]:
    """Return what TRL says against settings of training runs, a line per kind of complaint with the first such run."""
    quiet()
    found: dict[str, str] = {}
    for plan in plans:
        if plan.kind == "train" and plan.params.max_steps:
            rows = plan.trainer["per_device_train_batch_size"] * plan.params.processes
            as_one = plan.params.model_copy(update={"processes": 1, "micro_batch": rows})
            try:
                configure(Plan("train", as_one), plan.folder, plan.params.entailment)
            except (ValueError, TypeError, ImportError) as error:
                found.setdefault(" ".join(str(error).split()), plan.id)
    return [f"TRL refuses {id_}: {why}" for why, id_ in found.items()]


def unreadable(plans: Iterable[Plan]) -> list[str]:
    """Return what is wrong with the data of runs, a line for each split: its first row is loaded, if it can be here."""
    wanted: dict[tuple[str, str, str | None], None] = {}
    for plan in plans if os.environ.get(DATA_DIR) or not HF_HUB_OFFLINE else ():
        params, trains = plan.params, plan.kind == "train" and plan.params.max_steps > 0
        splits = [params.eval_split] + [params.train_split] * trains
        splits += [params.validation_split] * (trains and params.validation_limit > 0)
        wanted |= {(params.task, split, params.data_revision): None for split in splits if sources(params.task)}
    found = []
    for task, split, revision in wanted:
        try:
            if split not in sources(task):
                raise ValueError(f"there is no such split, only {', '.join(sources(task))}")
            sources(task)[split].probe(revision)
        except (OSError, ValueError) as error:
            found.append(f"{task}/{split} cannot be read: {' '.join(str(error).split())}")
    return found


if __name__ == "__main__":  # as gcpo.cli asks for it
    print(json.dumps(refused(Plan(kind, validate(values)) for kind, values in json.load(sys.stdin))))
