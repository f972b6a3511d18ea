"""From TRL's batch of rows to the whole groups that methods read, wherever their rows lie."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Float
from torch import Tensor

from gcpo.errors import nearest
from gcpo.rollouts import Rollouts
from gcpo.semantics import Embedder, Entailment, TextFeatures, answer_mask
from gcpo.trainer.config import GCPOConfig

Batch = dict[str, Any]  # TRL's dictionary of tensors, from generation to the loss
PATIENCE = 20  # batches without a reward in the upper half of the range before a warning
PolicyPass = Callable[[Batch], tuple[Tensor, Any]]


def loss_mask(inputs: Batch) -> Tensor:
    """Return the mask of the tokens in TRL's loss."""
    return inputs["completion_mask"] * inputs["tool_mask"] if "tool_mask" in inputs else inputs["completion_mask"]


@dataclass
class Collector:
    """Makes :class:`gcpo.rollouts.Rollouts` of all groups of a generation batch, equal in every process.

    Args:
        args: the method that reads the rollouts, ranges of rewards, the name of the correctness reward, and how texts
            are embedded and clustered.
        accelerator: of the processes that share the batch.
        group_size: G, responses per prompt.
        reward_names, reward_weights: of the reward functions, in TRL's order.
        extract: completion text -> answer, or None when there is none.
        embedder, entailment: the models, or None where the method reads none.
        policy_pass: batch -> log-probabilities and entropies (or None) of its rows under the policy that sampled them.
        decode: token ids -> text, without special tokens.

    Raises:
        ValueError: ``args.correctness_reward`` is no reward function, or none is named where several could be meant.
    """

    args: GCPOConfig
    accelerator: Accelerator
    group_size: int
    reward_names: list[str]
    reward_weights: Tensor
    extract: Callable[[str], str | None]
    embedder: Embedder | None
    entailment: Entailment | None
    policy_pass: PolicyPass
    decode: Callable[[Sequence[int]], str]
    warned: set[str] = field(default_factory=set)
    batches: int = 0
    highest: float = -math.inf  # highest reward so far

    def __post_init__(self) -> None:
        self.method = self.args.resolved_method()
        names, wanted = self.reward_names, self.args.correctness_reward
        if wanted is not None:
            if wanted not in names:
                raise ValueError(f"correctness_reward: no reward function {wanted!r}.{nearest(wanted, names)}")
            if (count := names.count(wanted)) > 1:
                raise ValueError(
                    f"correctness_reward: {count} reward functions are called {wanted!r}: give each a __name__ of its "
                    "own."
                )
        elif self.method.needs_correctness and len(names) > 1:
            raise ValueError(
                f"{self.args.method} asks which responses are right, and a sum of {len(names)} rewards does not say: "
                f"set correctness_reward to one of {', '.join(names)}, and correctness_range to what it can reach."
            )

    def local(self, rows: int) -> slice:
        """Return the place of this process's rows among those of all processes."""
        return slice(rows * self.accelerator.process_index, rows * (self.accelerator.process_index + 1))

    def gathered(self, rows: Tensor) -> Tensor:
        """Return the rows of all processes, padded to one length."""
        padded = self.accelerator.pad_across_processes(rows, dim=1) if rows.ndim > 1 else rows
        return self.accelerator.gather(padded)

    def rollouts(self, per_function: Float[Tensor, "N F"], texts: Sequence[str], output: Batch) -> Rollouts:
        """Return the groups of all processes; a feature that costs a model's pass is computed when first read.

        ``per_function`` and ``texts`` are the rewards and completions of all processes, ``output`` is TRL's batch of
        this process.
        """
        weights = self.reward_weights.to(per_function.device)
        rewards = (per_function * weights).nansum(dim=1).masked_fill(per_function.isnan().all(dim=1), torch.nan)
        if (infinite := rewards.isinf()).any():
            value = rewards[infinite][0].item()
            self._warn_once("infinite", f"A reward is {value}: such a response counts as unscored.")
        rewards = rewards.masked_fill(infinite, torch.nan)
        least, most = self.args.reward_range
        low, high = self.args.correctness_range or self.args.reward_range
        named = self.args.correctness_reward
        correctness = rewards if named is None else per_function[:, self.reward_names.index(named)]
        self._check_range(rewards, correctness)
        correctness = correctness.clamp(low, high)

        size = self.group_size
        groups = [texts[start : start + size] for start in range(0, len(texts), size)]
        # Processes share the groups, so that none embeds or classifies what another one has done; one for which no
        # group is left takes the first again, so that every process has features of the same shape.
        mine = list(range(self.accelerator.process_index, len(groups), self.accelerator.num_processes)) or [0]
        meanings = TextFeatures(
            [groups[group] for group in mine],
            extract=self.extract,
            full_completion=self.args.use_full_completion_for_clustering,
            embedder=self.embedder,
            entailment=self.entailment,
            threshold=self.args.entailment_threshold,
        )
        return Rollouts(
            rewards.view(-1, size),
            correctness=((correctness - low) / (high - low)).view(-1, size),
            reward_range=(least, most),
            max_completion_length=self.args.max_completion_length,
            **{name: functools.partial(self._shared, meanings, mine, name) for name in meanings.readable},
            **{name: functools.partial(self._whole, rows) for name, rows in self._token_features(output).items()},
        )

    def _shared(self, meanings: TextFeatures, mine: list[int], name: str) -> Tensor:
        """Return a feature of all groups, each from the process that has computed it."""
        own = [row.clone() for row in getattr(meanings, name).cpu()]  # gathering a view would send its whole storage
        everywhere = dict(gather_object(list(zip(mine, own, strict=True))))
        return torch.stack([everywhere[group] for group in sorted(everywhere)]).to(self.accelerator.device)

    def _whole(self, own: Callable[[], Tensor]) -> Tensor:
        """Return a token feature of all processes' rows, in groups."""
        rows = self.gathered(own().float())
        return rows.view(-1, self.group_size, rows.shape[1])

    def _token_features(self, output: Batch) -> dict[str, Callable[[], Tensor]]:
        """Return the token features of this process's rows, as functions; one pass gives both of the policy's."""
        policy = functools.cache(lambda: self.policy_pass(output))
        return {
            "logps": lambda: policy()[0],
            "entropies": lambda: policy()[1],
            "mask": lambda: loss_mask(output),
            "answer_mask": lambda: self._answer_mask(output),
            "ref_logps": lambda: output["ref_per_token_logps"],
        }

    def _answer_mask(self, output: Batch) -> Tensor:
        mask = output["completion_mask"]
        rows = zip(output["completion_ids"], mask.sum(1), strict=True)
        ids = [row[: int(length)].tolist() for row, length in rows]
        # GRPO-CARE asks for the answer itself; an entropy's scope, for all that follows the reasoning.
        reward = self.method.reward
        extract = self.extract if reward and "answer_mask" in reward.reads else None
        answers = answer_mask(ids, self.decode, extract).to(mask.device)
        return torch.nn.functional.pad(answers, (0, mask.shape[1] - answers.shape[1]))

    def _check_range(self, rewards: Tensor, correctness: Tensor) -> None:
        if not self.method.reads_range:
            return
        self.batches += 1
        low, high = self.args.correctness_range or self.args.reward_range
        outside = correctness[(correctness < low) | (correctness > high)]
        if self.method.needs_correctness and len(outside):
            asked = self.args.correctness_reward or self.reward_names[0]
            message = (
                f"{self.args.method} asks which responses are right, and {asked!r} "
                f"gave {outside[0].item():.4g}, outside {(low, high)}: that is no correctness signal. Name the reward "
                "function that is one with correctness_reward, or set correctness_range to what it can reach."
            )
            if self.batches == 1:
                raise ValueError(message)
            self._warn_once("correctness", f"{message} It is clipped to the range.")  # a run of days goes on
        if self.method.needs_correctness and correctness.nan_to_num(low).max() == (low + high) / 2:
            self._warn_once(
                "middle",
                f"{self.args.method} calls a response right above the middle of {(low, high)}, and the best of this "
                f"batch are exactly at {(low + high) / 2:.4g}: if that is a full reward, set reward_range (or "
                "correctness_range) to what rewards can reach; now every response counts as wrong.",
            )
        low, high = self.args.reward_range
        self.highest = max(self.highest, rewards.nan_to_num(low).max().item())
        if self.batches == PATIENCE and self.highest <= (low + high) / 2:
            self._warn_once(
                "half",
                f"No reward of {PATIENCE} batches was above the middle of reward_range {(low, high)}; the highest is "
                f"{self.highest:.4g}. {self.args.method} measures rewards by it: set GCPOConfig(reward_range=...) to "
                "what they can reach.",
            )
        outside = rewards[(rewards < low) | (rewards > high)]
        if len(outside):
            self._warn_once(
                "range",
                f"A reward of {outside[0].item():.4g} lies outside reward_range {(low, high)}. Rewards are used as "
                "they are; only measures of them are clipped to [0, 1]. Set GCPOConfig(reward_range=...) to what "
                "rewards can reach.",
            )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self.warned:
            self.warned.add(kind)
            warnings.warn(message, stacklevel=3)
