"""Policies that runs start from, train and evaluate."""

import logging
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import peft
import transformers

from gcpo import io, world
from gcpo.rollouts import Rollouts
from gcpo.runs.params import Params
from gcpo.runs.plan import Plan
from gcpo.runs.record import Run
from gcpo.semantics import Embedder, Entailment, from_texts
from gcpo.semantics.rules import RULES, by_rule
from gcpo.tasks.base import Row
from gcpo.tasks.sampling import check_lengths, load_policy


def starting_policy(plan: Plan) -> tuple[Any, Any]:
    """Return the policy that a run trains, and its tokenizer; raises as :func:`gcpo.tasks.sampling.load_policy`.

    Everything that is drawn from here on, while policy, adapters and trainer are built, depends on the run's seed.
    """
    params = plan.params
    warm = str(plan.warm.folder / "policy") if plan.warm else None
    name = warm or world.resolve(params.policy, "policy", params.world_seed)
    revision = None if warm else params.policy_revision
    transformers.set_seed(params.seed)
    return load_policy(name, revision=revision, dtype=params.dtype, template=params.chat_template_kwargs)


def trained_policy(plan: Plan, folder: Path) -> tuple[Any, Any]:
    """Return the policy that a training run saved in ``folder``, and its tokenizer.

    Adapters (``lora_rank``) are put on the starting policy, as in training.
    """
    params = plan.params
    if not params.lora_rank:
        return load_policy(str(folder), dtype=params.dtype, template=params.chat_template_kwargs)
    model, tokens = starting_policy(plan)  # training with adapters saves the adapters alone
    return peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True).eval(), tokens


def load_policy_to_evaluate(plan: Plan, run: Run, trained: Run | None) -> tuple[Sequence[Row], Any, Any]:
    """Return held-out questions, model and tokenizer of a run without training; the manifest names them.

    The policy is that of its training run or, without one, the starting policy; with adapters (``lora_rank``) if it
    was trained with them, or if gradients are of the adapters alone. Raises as
    :func:`gcpo.tasks.sampling.load_policy` and :func:`gcpo.tasks.sampling.check_lengths`.
    """
    quiet()
    params = plan.params
    split = plan.load(params.eval_split, params.eval_limit)
    run.manifest["data"] = {"eval": split.source}
    if trained is not None:
        made = trained.folder / "policy"
        run.manifest["training"] = {"run": trained.manifest["id"], "policy": io.hashes(made)}
        model, tokens = trained_policy(plan, made)
    else:
        model, tokens = starting_policy(plan)
        if params.lora_rank and plan.kind != "evaluate":  # of gradients
            model = peft.get_peft_model(model, lora(params)).eval()
    check_lengths(model, tokens, split.rows, params.max_completion_length)
    run.manifest["models"] = models(params, model)
    return split.rows, model, tokens


def judge(params: Params) -> Entailment:
    """Return the entailment model of a run, or the rule in its place; the embedded one is made when first asked for."""
    if params.entailment in RULES:
        return by_rule(params.entailment, params.embedder, params.entailment_error)
    name = world.resolve(params.entailment, "entailment", params.world_seed)
    return Entailment(name, error=params.entailment_error)


def rollouts_of(plan: Plan, embeds: bool = True, entails: bool = True) -> partial[Rollouts]:
    """Return :func:`gcpo.semantics.from_texts` with the task's rules and the run's models; those that are not read are
    not loaded."""
    params, task = plan.params, plan.task
    return partial(
        from_texts,
        extract=task.extract,
        full_completion=task.full_completion,
        embedder=Embedder(params.embedder) if embeds else None,
        entailment=judge(params) if entails else None,
        threshold=params.entailment_threshold,
        reward_range=task.reward_range,
        max_completion_length=params.max_completion_length,
    )


def cut_by(*models: Embedder | Entailment | None) -> dict[str, dict[str, int]]:
    """Return, for the manifest, what each model of meaning has read, and how much of it was longer than it reads."""
    return {type(model).__name__: {"read": model.misses, "cut": model.cut} for model in models if model is not None}


def lora(params: Params) -> Any:
    """Return the adapters of a run, whose ``lora_rank`` is above 0."""
    rank = params.lora_rank
    return peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def models(params: Params, policy: Any) -> dict[str, Any]:
    """Return the models of a run for its manifest, with the commit of a policy from the Hub."""
    named = {kind: getattr(params, kind) for kind in ("policy", "embedder", "entailment")}
    return {**named, "policy_revision": getattr(policy.config, "_commit_hash", None)}


def quiet() -> None:
    """Silence progress bars and advice that a notebook's reader cannot act on."""
    from datasets.utils.logging import disable_progress_bar

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
