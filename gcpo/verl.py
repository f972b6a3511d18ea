"""The methods as verl's estimators of advantages: ``algorithm.adv_estimator=gcpo/gcpo_bot``.

verl loads this module by its entry point ``verl.plugins``. A method that reads rewards alone needs nothing else. What
the others read, verl hands to no estimator; ``trainer.v1.trainer_mode=gcpo_sync`` is verl's synchronous trainer, which
does. Constants stand below ``algorithm.gcpo`` (:class:`Settings`); docs/verl.md has the loss of each base in verl's
words. The module can be imported without verl.
"""

import functools
import pkgutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gcpo import seeds
from gcpo.errors import UserError
from gcpo.masked import mean
from gcpo.measures import REWARD_RANGE
from gcpo.methods import METHODS, Method, Modulation, expand, get_method, modulate
from gcpo.methods.reward import OverlongPenalty
from gcpo.rollouts import Rollouts

try:
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from verl.trainer.ppo.core_algos import register_adv_est
    from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer

    from gcpo.semantics import Embedder, Entailment, TextFeatures, answer_mask
except ImportError as error:
    MISSING, PPOTrainerSync = str(error), object
else:
    MISSING = ""

MODE = "gcpo_sync"  # verl's trainer mode that hands estimators what they read beside rewards
TOKENS = {"logps": "old_log_probs", "entropies": "entropy"}  # features of tokens by verl's names


def refusal(row: Method) -> str:
    """Return why a method cannot run in verl, or an empty text."""
    if row.in_loss:
        return "acts in the loss, of which verl's estimator of advantages sees nothing"
    return "needs settings of TRL's trainer, such as a reference model that moves" if row.trl else ""


def asks(row: Method) -> list[str]:
    """Return what a method needs beside the rewards and tokens of its rows."""
    draws = row.permuted or any(factor.seeded(1) != factor.seeded(2) for factor in row.factors)
    longest = isinstance(row.reward, OverlongPenalty)
    return [*sorted(row.reads - {"mask"}), *["max_completion_length"] * longest, *["the number of the step"] * draws]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A method and its constants, by the names of :class:`gcpo.GCPOConfig`.

    Beside these, ``answer_extractor`` is the place of a function, "package.module:name", and ``device`` that of the
    models of meaning.
    """

    method: str = "gcpo_bot"
    method_options: Mapping[str, Any] = field(default_factory=dict)
    alpha: float | None = None
    equalize_mean: bool = False
    scale_rewards: str | None = None
    reward_range: tuple[float, float] | None = None
    max_completion_length: int | None = None
    seed: int = 0
    answer_extractor: str = "gcpo.rewards:any_answer"
    embedding_model: str = "all-MiniLM-L6-v2"
    entailment_model: str = "FacebookAI/roberta-large-mnli"
    entailment_threshold: float = 0.35
    use_full_completion_for_clustering: bool = False
    device: str | None = None

    @functools.cached_property
    def row(self) -> Method:
        """Return the method with its constants; raises ``UserError`` if it cannot run in verl."""
        row = get_method(self.method, alpha=self.alpha, seed=self.seed, **self.method_options)
        if why := refusal(row):
            raise UserError(f"{self.method} {why}: train it with gcpo.GCPOTrainer.")
        return row


def settings_of(algorithm: Any, **known: Any) -> Settings:
    """Return the settings that stand in verl's ``algorithm``; the method is what follows the estimator's slash.

    Raises:
        TypeError: a setting of another name.
        ValueError: a method that is unknown or cannot run in verl, a KL term in the rewards that it measures, or no
            range of rewards where it needs one.
    """
    given, method = algorithm.get("gcpo") or {}, str(algorithm.get("adv_estimator")).partition("/")[2]
    given = given if MISSING else OmegaConf.to_container(OmegaConf.create(given), resolve=True)
    own = Settings(**{**known, **given, **({"method": method} if method else {})})
    if (own.row.reads_range or own.row.needs_correctness) and own.reward_range is None:
        raise UserError(f"algorithm.gcpo.reward_range is missing, such as [0,1]: {own.method} measures rewards by it.")
    if own.row.components and algorithm.get("use_kl_in_reward"):
        way = "set it to false, and actor_rollout_ref.actor.use_kl_loss=true for a KL term in the loss"
        raise UserError(f"algorithm.use_kl_in_reward adds to the rewards that {own.method} measures: {way}.")
    return own


def grouped(keys: Sequence[Any], real: Tensor) -> Tensor:
    """Return row numbers (B, G), groups in order of first appearance; -1 fills groups that have fewer rows than others.

    Rows that are not ``real`` (N,), with which verl pads batches, belong to no group.
    """
    places: dict[Any, list[int]] = {}
    for number in real.nonzero().flatten().tolist():
        places.setdefault(keys[number], []).append(number)
    return pad_sequence([torch.tensor(rows) for rows in places.values()], batch_first=True, padding_value=-1)


def take(values: Tensor, rows: Tensor, fill: float) -> Tensor:
    """Return the values of rows (B, G), in groups, with ``fill`` where there is no row."""
    return values[rows.clamp(min=0)].masked_fill(expand(rows < 0, rows.ndim + values.ndim - 1), fill)


@dataclass(frozen=True)
class Step:
    """Values that the estimator reads in a training step of :class:`GCPOTrainerSync`, and where it logs.

    ``features`` of rollouts are made of row numbers (B, G), where -1 is no row; without, a method has rewards alone.
    """

    settings: Settings
    number: int = 0
    features: Callable[[Tensor], Mapping[str, Any]] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


def advantages(step: Step, rewards: Tensor, mask: Tensor, keys: Sequence[Any]) -> Tensor:
    """Return the modulated advantages (N, T) of N rows, 0 outside of the token mask, and log what they are made of.

    A row without a token is no completion. A group with fewer rows than others counts as one in which the missing
    completions have no reward. A weight that is not finite becomes 1 and is counted, as in the trainer.

    Args:
        step: with the method's settings.
        rewards: (N,), one per row.
        mask: (N, T), 1 on tokens of the completion that are learnt from.
        keys: of the rows' groups.

    Raises:
        UserError: the method reads more than rewards, and the step has no features; or it gives no finite weight.
    """
    own, tokens = step.settings, mask.cpu().bool()
    row = own.row.seeded(seeds.of_step(own.seed, step.number))
    if step.features is None and (asked := asks(row)):
        raise UserError(f"{own.method} reads {', '.join(asked)}: set trainer.v1.trainer_mode={MODE}.")
    if not tokens.any():
        return torch.zeros(tokens.shape, device=mask.device)
    rows = grouped(keys, tokens.any(1))
    limits = own.reward_range or REWARD_RANGE
    features = {"mask": lambda: take(tokens, rows, False), **(step.features(rows) if step.features else {})}
    scores = take(rewards.float().cpu(), rows, torch.nan)
    rollouts = Rollouts(scores, reward_range=limits, max_completion_length=own.max_completion_length, **features)
    if row.reads_range and ((scores < limits[0]) | (scores > limits[1])).any():
        warnings.warn(f"{own.method} clips rewards outside of reward_range {tuple(limits)}: widen it.", stacklevel=2)
    found = modulate(row, rollouts, equalize_mean=own.equalize_mean, scale_rewards=own.scale_rewards)
    broken, real = ~found.weight.isfinite(), rows >= 0
    if broken.all():
        raise UserError(f"{own.method}: no weight of step {step.number} is finite. Look at alpha and at what it reads.")
    found = found._replace(weight=torch.where(broken, 1.0, found.weight))
    step.metrics.update(logged(found, rollouts, real), **{"gcpo/replaced_weights": broken[real].sum().item()})
    values = expand(found.advantages, 3).float()  # one per completion, or per token
    out = torch.zeros(len(tokens), values.shape[2]).index_put((rows[real],), values[real])
    return (out * tokens).to(mask.device)


def logged(found: Modulation, rollouts: Rollouts, real: Tensor) -> dict[str, float]:
    """Return means of measures and weights over completions, those of token columns over their tokens first."""
    means = {}
    for name, values in {**found.columns, "weight": found.weight, "abs_advantage": found.advantages.abs()}.items():
        of_rows = mean(values, rollouts.mask).squeeze(-1) if values.ndim == 3 else expand(values, 2).expand(real.shape)
        means[f"gcpo/{name}"] = of_rows[real].nanmean().item()
    weight = found.weight[rollouts.mask if found.weight.ndim == 3 else real]
    return {**means, "gcpo/weight_min": weight.min().item(), "gcpo/weight_max": weight.max().item()}


_step: ContextVar[Step | None] = ContextVar("gcpo_step", default=None)


def estimate(token_level_rewards: Tensor, response_mask: Tensor, index: Any, config: Any, **_: Any) -> Any:
    """Return advantages and returns (N, T), as verl asks of its estimators; ``config`` is its ``algorithm``."""
    step = _step.get() or Step(settings_of(config))
    found = advantages(step, token_level_rewards.sum(-1), response_mask, list(index))
    return found, found


class GCPOTrainerSync(PPOTrainerSync):
    """verl's synchronous trainer, whose estimator may read texts, log-probabilities and entropies.

    It overrides one method, ``_compute_advantage``, to fetch what the method reads while verl computes advantages, and
    adds measures and weights to verl's metrics as ``gcpo/...``. Models of meaning run in verl's driver, which has no
    GPU of its own unless ``algorithm.gcpo.device`` says so.

    Raises:
        ValueError: as :func:`settings_of`.
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
        within.run(_step.set, Step(self.settings, self.global_steps, features, metrics))
        return within.run(super()._compute_advantage, batch, metrics)


if not MISSING:
    register_trainer(MODE)(GCPOTrainerSync)
    for _name in ("gcpo", *(f"gcpo/{method}" for method in METHODS)):  # one that cannot run says why when it is asked
        register_adv_est(_name)(estimate)
