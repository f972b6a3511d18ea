"""Rows of a batch, in any order and each with the key of its group, to groups of completions and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gcpo import seeds
from gcpo.engines import MODE, asks, checked
from gcpo.errors import UserError, nearest
from gcpo.masked import mean
from gcpo.measures import REWARD_RANGE
from gcpo.methods import Method, Modulation, expand, modulate
from gcpo.rollouts import Feature, Rollouts

REPLACED = "gcpo/replaced_weights"  # in logs, as in the trainer
Features = Callable[[Tensor], Mapping[str, Feature]]  # row numbers (B, G), -1 for none -> features of Rollouts


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

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str) -> Settings:
        """Return the settings that stand at a place of an engine's configuration.

        Raises:
            ValueError: a setting of another name, a method that no engine can run, or a range that the method needs.
        """
        if unknown := sorted(given.keys() - cls.__dataclass_fields__.keys()):
            raise UserError(f"{where} has no setting {unknown[0]!r}.{nearest(unknown[0], cls.__dataclass_fields__)}")
        made = cls(**given)
        if (made.row.reads_range or made.row.needs_correctness) and made.reward_range is None:
            raise UserError(f"{where}.reward_range is missing: {made.method} measures rewards by it, such as [0,1].")
        return made

    @cached_property
    def row(self) -> Method:
        """Return the method with its constants."""
        return checked(self.method, alpha=self.alpha, seed=self.seed, **self.method_options)


def grouped(keys: Sequence[Any], real: Bool[Tensor, " N"]) -> Int64[Tensor, "B G"]:
    """Return row numbers, groups in order of first appearance; -1 fills groups that have fewer rows than the largest.

    Rows that are not ``real``, with which engines pad batches, belong to no group.
    """
    places: dict[Any, list[int]] = {}
    for row, (key, counts) in enumerate(zip(keys, real.tolist(), strict=True)):
        if counts:
            places.setdefault(key, []).append(row)
    return pad_sequence([torch.tensor(rows) for rows in places.values()], batch_first=True, padding_value=-1)


def take(values: Tensor, rows: Int64[Tensor, "B G"], fill: float) -> Tensor:
    """Return the values of rows, in groups, with ``fill`` where there is no row."""
    return values[rows.clamp(min=0)].masked_fill(expand(rows < 0, rows.ndim + values.ndim - 1), fill)


def advantages(
    settings: Settings,
    rewards: Tensor,
    mask: Tensor,
    keys: Sequence[Any],
    step: int = 0,
    features: Features | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return the modulated advantages (N, T) of N rows, 0 outside of the token mask, and what to log of them.

    A row without a token is no completion. A group with fewer rows than others counts as one in which the missing
    completions have no reward. A weight that is not finite becomes 1 and is counted, as in the trainer.

    Args:
        settings: the method.
        rewards: (N,), one per row.
        mask: (N, T), 1 on tokens of the completion that are learnt from.
        keys: of the rows' groups.
        step: number of the step, for methods that draw random numbers.
        features: what the method reads beside rewards and mask.

    Raises:
        UserError: the method reads more, and there are no features; or it gives no finite weight.
    """
    row = settings.row.seeded(seeds.of_step(settings.seed, step))
    if features is None and (asked := asks(row)):
        way = f"in verl, set trainer.v1.trainer_mode={MODE}; elsewhere, train it with gcpo.GCPOTrainer"
        raise UserError(f"{settings.method} reads {', '.join(asked)}, which engines hand to no estimator: {way}.")
    tokens = mask.cpu().bool()
    if not tokens.any():
        return torch.zeros(tokens.shape, device=mask.device), {}
    rows = grouped(keys, tokens.any(1))
    limits = settings.reward_range or REWARD_RANGE
    known: dict[str, Any] = {"reward_range": limits, "max_completion_length": settings.max_completion_length}
    known |= {"mask": lambda: take(tokens, rows, False), **(features(rows) if features else {})}
    rollouts = Rollouts(take(rewards.float().cpu(), rows, torch.nan), **known)
    if row.reads_range and ((rollouts.rewards < limits[0]) | (rollouts.rewards > limits[1])).any():
        said = (
            f"{settings.method}: there are rewards outside of reward_range {tuple(limits)}, and its measures clip them"
        )
        warnings.warn(f"{said}. Set reward_range to what rewards can reach.", stacklevel=2)
    found = modulate(row, rollouts, equalize_mean=settings.equalize_mean, scale_rewards=settings.scale_rewards)
    broken = ~found.weight.isfinite()
    if broken.all():
        raise UserError(f"{settings.method}: no weight of step {step} is finite. Look at alpha and at what it reads.")
    found = found._replace(weight=torch.where(broken, 1.0, found.weight))
    real = rows >= 0
    values = expand(found.advantages, 3).float()  # one per completion, or per token
    out = torch.zeros(len(tokens), values.shape[2]).index_put((rows[real],), values[real])
    return (out * tokens).to(mask.device), _logged(found, rollouts, real) | {REPLACED: broken[real].sum().item()}


def _logged(found: Modulation, rollouts: Rollouts, real: Tensor) -> dict[str, float]:
    """Return means of measures and weights over completions, those of token columns over their tokens first."""
    logged = {}
    for name, values in {**found.columns, "weight": found.weight, "abs_advantage": found.advantages.abs()}.items():
        of_rows = mean(values, rollouts.mask).squeeze(-1) if values.ndim == 3 else expand(values, 2).expand(real.shape)
        logged[f"gcpo/{name}"] = of_rows[real].nanmean().item()
    kept = rollouts.mask if found.weight.ndim == 3 else real
    weight = found.weight.expand(kept.shape)[kept]
    return logged | {"gcpo/weight_min": weight.min().item(), "gcpo/weight_max": weight.max().item()}
