"""What can be known before a run is started: whether TRL takes its settings, and where models and data are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gcpo import world
from gcpo.runs.plan import UNREAD, Plan
from gcpo.runs.policies import quiet
from gcpo.runs.train import configure
from gcpo.semantics.models import embedder_path
from gcpo.tasks import sources
from gcpo.tasks.base import DATA_DIR, Source

SECONDS = 10.0  # to wait for an answer of the Hub
# Which its trainer says only when it has the policy.
MOVING = "{}'s reference model follows the policy, and with adapters (lora_rank) there is none: set lora_rank: 0"


def refused(plans: Iterable[Plan]) -> list[str]:
    """What TRL says against settings of training runs, a line for each kind of complaint with the first such run."""
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


def at_hand(plans: Sequence[Plan]) -> list[str]:
    """A line for each model and each split of a data set that the plans need, which says where it is, or that it is
    not on this machine and what to do."""
    models = dict.fromkeys(pair for plan in plans for pair in _models(plan))
    splits = dict.fromkeys(source for plan in plans for source in _splits(plan))
    return [f"{kind} {name}: {_model(kind, name)}" for kind, name in models] + [_data(source) for source in splits]


def _models(plan: Plan) -> list[tuple[str, str]]:
    """Kinds and names of the models that a plan loads."""
    params = plan.params
    reads = params.max_steps > 0 if plan.kind == "train" else "embedder" not in UNREAD[plan.kind]
    judged = reads and (plan.kind != "train" or plan.method.needs_entailment(plan.task.full_completion))
    judges = [("embedder", params.embedder)] * reads + [("entailment", params.entailment)] * judged
    return [("policy", params.policy), *judges]


def _splits(plan: Plan) -> list[Source]:
    """The sources of the splits that a plan reads, as far as its task has them."""
    params, known = plan.params, sources(plan.params.task)
    names = [params.eval_split]
    if plan.kind == "train":
        names += [params.train_split, *([params.validation_split] if params.validation_limit else [])]
    return [known[name] for name in names if name in known]


def _model(kind: str, name: str) -> str:
    if world.embedded(name, kind):
        return "made by this package"
    if Path(name).exists() or (kind == "embedder" and Path(embedder_path(name)).exists()):
        return "on this machine"
    from huggingface_hub import HfApi, try_to_load_from_cache  # seconds to import, and of no use to the embedded world
    from huggingface_hub.errors import HFValidationError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return "in the local cache of the Hub"
    except HFValidationError:
        return "NOT THERE: no such path, and no name of the Hub"
    way = "download it where there is a network, or give the path of a folder in Hub format"
    return _on_the_hub(lambda: HfApi().model_info(name, timeout=SECONDS), way)


def _data(source: Source) -> str:
    said = f"data {source.dataset} ({source.split})"
    if folder := os.environ.get(DATA_DIR):
        path = source.file(folder)
        return f"{said}: {path}" if path.is_file() else f"{said}: NOT THERE: {path} does not exist ({DATA_DIR} is set)"
    import datasets
    from huggingface_hub import HfApi

    if (Path(datasets.config.HF_DATASETS_CACHE) / source.dataset.replace("/", "___")).exists():
        return f"{said}: in the local cache of the Hub"
    way = f"set {DATA_DIR} to a folder that has {source.folder}/{source.split}.jsonl"
    return f"{said}: " + _on_the_hub(lambda: HfApi().dataset_info(source.dataset, timeout=SECONDS), way)


def _on_the_hub(ask: Callable[[], Any], way: str) -> str:
    """Whether the Hub has it, which is not asked where the environment forbids it."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return f"NOT THERE, and HF_HUB_OFFLINE is set: {way}"
    try:
        return f"on the Hub (commit {ask().sha})"
    except Exception as error:  # the HTTP library's own errors included
        return f"NOT REACHED ({type(error).__name__}): {way}"
