"""The methods as verl's estimators of advantages: ``algorithm.adv_estimator=gcpo/gcpo_bot``.

verl loads this module by its entry point ``verl.plugins``. A method that reads rewards alone needs nothing else. What
the others read, verl hands to no estimator; ``trainer.v1.trainer_mode=gcpo_sync`` is verl's synchronous trainer, which
does. Constants stand below ``algorithm.gcpo`` (:class:`gcpo.engines.rows.Settings`). ``gcpo check verl METHOD`` prints
the settings.
"""

from __future__ import annotations

import functools
import pkgutil
import warnings
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any

import verl
from torch import Tensor

from gcpo.engines import MODE, untried
from gcpo.engines.rows import Features, Settings, advantages, take
from gcpo.errors import UserError
from gcpo.methods import METHODS
from gcpo.semantics import Embedder, Entailment, TextFeatures, answer_mask

if said := untried(verl.__version__):
    warnings.warn(said, stacklevel=2)
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import register_adv_est
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer

TOKENS = {"logps": "old_log_probs", "entropies": "entropy"}  # features of tokens by verl's names


@dataclass(frozen=True)
class Step:
    """A training step of :class:`GCPOTrainerSync`: what its estimator reads, and where it logs."""

    number: int
    settings: Settings
    features: Features | None
    metrics: dict[str, Any]


_step: ContextVar[Step | None] = ContextVar("gcpo_step", default=None)


def settings_of(algorithm: Any, **known: Any) -> Settings:
    """Return the settings of verl's ``algorithm``; the method is what follows the estimator's slash.

    Raises:
        UserError: as :meth:`gcpo.engines.rows.Settings.of`; another estimator, or a KL term in the rewards.
    """
    given: Any = OmegaConf.to_container(OmegaConf.create(algorithm.get("gcpo") or {}), resolve=True)
    engine, _, method = str(algorithm.get("adv_estimator")).partition("/")
    if engine != "gcpo":
        raise UserError(f"algorithm.adv_estimator is {engine}: {MODE} is for gcpo's, such as gcpo/gcpo_bot.")
    settings = Settings.of({**known, **given, **({"method": method} if method else {})}, "algorithm.gcpo")
    if settings.row.components and algorithm.get("use_kl_in_reward"):
        way = "set it to false, and actor_rollout_ref.actor.use_kl_loss=true for a KL term in the loss"
        raise UserError(f"algorithm.use_kl_in_reward adds to the rewards that {settings.method} measures: {way}.")
    return settings


def estimate(token_level_rewards: Tensor, response_mask: Tensor, index: Any, config: Any, **_: Any) -> Any:
    """Return advantages and returns (N, T), as verl asks of its estimators; ``config`` is its ``algorithm``."""
    step = _step.get() or Step(0, settings_of(config), None, {})
    rewards = token_level_rewards.sum(-1)
    found, logged = advantages(step.settings, rewards, response_mask, list(index), step.number, step.features)
    step.metrics.update(logged)
    return found, found


for _name in ("gcpo", *(f"gcpo/{method}" for method in METHODS)):  # one that cannot run says why when it is asked
    register_adv_est(_name)(estimate)


@register_trainer(MODE)
class GCPOTrainerSync(PPOTrainerSync):
    """verl's synchronous trainer, whose estimator may read texts, log-probabilities and entropies.

    It overrides one method, ``_compute_advantage``, to fetch what the method reads while verl computes advantages, and
    adds measures and weights to verl's metrics as ``gcpo/...``. Models of meaning run in verl's driver, which has no
    GPU of its own unless ``algorithm.gcpo.device`` says so.

    Raises:
        UserError: as :func:`settings_of`.
        OSError: a model of meaning cannot be loaded.
    """

    def __init__(self, config: Any) -> None:
        self.settings = own = settings_of(config.algorithm, max_completion_length=config.data.max_response_length)
        whole = own.use_full_completion_for_clustering
        # Loaded before the policy: a wrong name should not cost the minutes that a large policy takes.
        embedder = Embedder(own.embedding_model, device=own.device) if "embeddings" in own.row.reads else None
        entailment = Entailment(own.entailment_model, device=own.device) if own.row.needs_entailment(whole) else None
        self.meaning: dict[str, Any] = {"embedder": embedder, "entailment": entailment, "full_completion": whole}
        self.meaning |= {"extract": pkgutil.resolve_name(own.answer_extractor), "threshold": own.entailment_threshold}
        config.trainer.v1.trainer_mode = "sync"  # verl's own parts ask whether the mode is this one
        super().__init__(config)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if several := next((key for key in batch.keys if not key.endswith("_0")), None):
            raise UserError(f"{several}: gcpo weighs groups of single completions, and this session has several.")
        read = {name: field for name, field in TOKENS.items() if name in self.settings.row.reads}
        data = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=["responses", *read.values()])
        ids = [row.tolist() for row in data["responses"].unbind()]
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=True)

        def features(rows: Tensor) -> dict[str, Any]:
            texts = [["" if row < 0 else decode(ids[row]) for row in group] for group in rows.tolist()]
            meant = TextFeatures(texts, **self.meaning)
            known: dict[str, Any] = {name: functools.partial(getattr, meant, name) for name in meant.readable}
            known["answer_mask"] = lambda: take(answer_mask(ids, decode), rows, False)
            tokens = {name: data[field].to_padded_tensor(0.0).float().cpu() for name, field in read.items()}
            return known | {name: take(values, rows, 0.0) for name, values in tokens.items()}

        within = copy_context()
        within.run(_step.set, Step(self.global_steps, self.settings, features, metrics))
        return within.run(super()._compute_advantage, batch, metrics)
