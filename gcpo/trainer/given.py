"""Arguments of the trainer beside TRL's own: checked, and models of meaning loaded, before the policy is. And what an
error of torch means."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers.integrations import deepspeed

from gcpo.semantics import Embedder, Entailment
from gcpo.trainer.config import GCPOConfig
from gcpo.trainer.scores import Scores


def check(args: Any, model: Any, peft_config: Any) -> None:
    """Refuse another trainer's config, and adapters where the method moves a reference model."""
    if not isinstance(args, GCPOConfig):
        raise TypeError(f"args must be a gcpo.GCPOConfig, got {type(args).__name__}; it takes the same settings.")
    if args.resolved_method().trl.get("sync_ref_model") and (peft_config or hasattr(model, "peft_config")):
        raise ValueError(
            f"{args.method} keeps a reference model that moves, and TRL has none for adapters: train all weights, "
            "or take a method without one, such as care_agreement."
        )


def check_functions(answer_extractor: Any, embedder: Any, entailment: Any, callback: Any) -> None:
    """Refuse what would fail after the first generation only, which takes minutes of a large policy."""
    models = {"embedder": ("Embedder", "embedding_model"), "entailment": ("Entailment", "entailment_model")}
    functions = {"answer_extractor": answer_extractor, "embedder": embedder, "callback": callback}
    for name, given in {**functions, "entailment": entailment}.items():
        fits = callable(given) if name in functions else hasattr(given, "pairs")
        if not fits and (given is not None or name == "answer_extractor"):
            model, setting = models.get(name, ("", ""))
            way = f"gcpo.semantics.{model}({given!r}), or GCPOConfig({setting}={given!r})" if model else "a function"
            raise TypeError(f"{name} is {given!r}, a {type(given).__name__}: give {way}.")


def check_rewards(args: GCPOConfig, functions: Any) -> None:
    """Refuse functions whose rewards the method cannot read, as :class:`gcpo.trainer.scores.Scores` does of all kinds
    of rewards once TRL has named them."""
    listed = functions if isinstance(functions, list) else [functions]
    weights = args.reward_weights or [1.0] * len(listed)
    if len(weights) == len(listed) and all(hasattr(one, "__name__") for one in listed):
        Scores(args, listed, [one.__name__ for one in listed], torch.tensor(weights))


def models(
    args: GCPOConfig, embedder: Embedder | None, entailment: Entailment | None
) -> tuple[Embedder | None, Entailment | None]:
    """Return the models that the method reads: those given, else those of the config."""
    method = args.resolved_method()
    with unsharded():
        if "embeddings" in method.reads and embedder is None:
            embedder = Embedder(args.embedding_model, device=args.device)
        if method.needs_entailment(args.use_full_completion_for_clustering) and entailment is None:
            entailment = Entailment(args.entailment_model, device=args.device)
    return embedder, entailment


@contextlib.contextmanager
def unsharded() -> Iterator[None]:
    """Load the embedder and the entailment model unsharded: under ZeRO-3, transformers shards every model it loads, and
    only trained parameters are gathered."""
    wanted = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if wanted is not None and (config := wanted()) is not None:
            deepspeed.set_hf_deepspeed_config(config)


@contextlib.contextmanager
def explained(args: GCPOConfig, step: int) -> Iterator[None]:
    """Say what it means that torch cannot sample."""
    try:
        yield
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        raise RuntimeError(
            f"The policy's probabilities are not finite at step {step}: training has diverged, or a setting is extreme "
            f"(learning_rate={args.learning_rate}, temperature={args.temperature})."
        ) from error
