"""Settings that TRL refuses, found before a run is started."""

from __future__ import annotations

from collections.abc import Iterable

from gcpo.runs.plan import Plan
from gcpo.runs.policies import quiet
from gcpo.runs.train import configure

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
