"""Runs as jobs of SLURM or Snakemake: as JSON, with all that such an engine has to know, and read from it again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gcpo.runs.distributed import SHARED
from gcpo.runs.estimates import GB, Estimate
from gcpo.runs.params import validate
from gcpo.runs.plan import KINDS, Plan
from gcpo.runs.profiles import ParameterError
from gcpo.runs.record import states


def entries(plans: Iterable[Plan]) -> list[dict[str, Any]]:
    """Return a description of each run and of the training runs that runs look at, in an order in which they can be
    made: id, kind, state, ids of the runs that it needs, resources and parameters."""
    listed: dict[str, Plan] = {}
    for plan in plans:
        listed |= {one.id: one for one in (plan.training, plan) if one}
    return [
        {
            "id": plan.id,
            "kind": plan.kind,
            "state": state,
            "needs": [plan.training.id] if plan.training else [],
            "resources": resources(plan),
            "parameters": plan.params.model_dump(mode="json"),
        }
        for plan, state in zip(listed.values(), states(listed.values()), strict=True)
    ]


def resources(plan: Plan) -> dict[str, float | None]:
    """Return the GPUs of a run, which an embedded policy does not need, and what is estimated of each of them (GB, and
    hours of the whole run); None where the policy is not known here."""
    found: dict[str, float | None] = {"gpus": 0, "gpu_memory_gb": None, "hours": None}
    if "policy" in plan.embedded:
        return found
    found["gpus"] = plan.params.processes if plan.kind == "train" else 1  # its training is a job of its own
    with contextlib.suppress(OSError):
        cost = Estimate(plan)
        found |= {"gpu_memory_gb": round(cost.peak / GB, 1), "hours": round(cost.hours / cost.gpus, 2)}
    return found


def read(path: Path) -> Plan:
    """Return the run of a file that holds one of :func:`entries`.

    Raises:
        ParameterError: the file cannot be read, is none, or this version gives its parameters another id.
    """
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        kind, name, values = entry["kind"], entry["id"], {**entry["parameters"]}
        KINDS[kind]
    except OSError as error:
        raise ParameterError(f"{path} cannot be read: {error.strerror}; {SHARED}.") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ParameterError(f"{path}: expected one line of gcpo grid NAME --dry-run --json.") from None
    plan = Plan(kind, validate(values, str(path)))
    if plan.id != name:
        again = "plan again with gcpo grid NAME --dry-run --json"
        raise ParameterError(f"{path}: the run {name} is {plan.id} to this version of gcpo; {again}.")
    return plan
