"""From TRL's batch of rows to the whole groups that methods read, wherever their rows lie."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from gcpo.errors import nearest
from gcpo.rollouts import Rollouts
from gcpo.semantics import answer_mask, from_texts

_PASS_ARGUMENTS = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters.keys()


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """The tokens that TRL's loss counts."""
    return inputs["completion_mask"] * inputs["tool_mask"] if "tool_mask" in inputs else inputs["completion_mask"]


class WholeGroups:
    """The part of :class:`gcpo.GCPOTrainer` that reads: it makes :class:`gcpo.rollouts.Rollouts` of all groups of a
    generation batch, equal in every process, from rewards, texts and TRL's output."""

    # Of the trainer.
    accelerator: Any
    answer_extractor: Callable[[str], str | None]
    args: Any
    embedder: Any
    entailment: Any
    max_completion_length: Any
    method: Any
    model: Any
    num_generations: int
    reward_func_names: list[str]
    reward_weights: Tensor
    _correctness: int
    _get_per_token_logps_and_entropies: Callable[..., Any]
    _tokenizer: Any

    _warned_range = False
    _warned_middle = False

    def _correctness_column(self) -> int:
        names, wanted = self.reward_func_names, self.args.correctness_reward
        if wanted is not None and wanted not in names:
            raise ValueError(f"correctness_reward: no reward function {wanted!r}.{nearest(wanted, names)}")
        if wanted is None and self.method.judges and len(names) > 1:
            raise ValueError(
                f"{self.args.method} asks which responses are right, and a sum of {len(names)} rewards does not say: "
                f"set correctness_reward to one of {', '.join(names)}, and correctness_range to what it can reach."
            )
        return names.index(wanted) if wanted is not None else 0

    def _local(self, rows: int) -> slice:
        return slice(rows * self.accelerator.process_index, rows * (self.accelerator.process_index + 1))

    def _gathered(self, rows: Tensor) -> Tensor:
        """The rows of all processes, padded to one length."""
        padded = self.accelerator.pad_across_processes(rows, dim=1) if rows.ndim > 1 else rows
        return self.accelerator.gather(padded)

    def _rollouts(self, per_function: Tensor, texts: list[str], output: dict[str, Any]) -> Rollouts:
        """The groups of all processes; a feature that costs a model's pass is computed when first read."""
        size, device = self.num_generations, self.accelerator.device
        rewards = (per_function * self.reward_weights.to(device)).nansum(dim=1)
        rewards = rewards.masked_fill(per_function.isnan().all(dim=1), torch.nan).view(-1, size)
        low, high = self.args.correctness_range or self.args.reward_range
        column = rewards.flatten() if self.args.correctness_reward is None else per_function[:, self._correctness]
        self._check_range(rewards, column)

        # Processes share the groups, so that none embeds or classifies what another one has done; one for which no
        # group is left takes the first again, so that every process has features of the same shape.
        mine = list(range(self.accelerator.process_index, len(rewards), self.accelerator.num_processes)) or [0]
        part = from_texts(
            rewards[mine].cpu(),
            [texts[size * group : size * (group + 1)] for group in mine],
            extract=self.answer_extractor,
            full_completion=self.args.use_full_completion_for_clustering,
            embedder=self.embedder,
            entailment=self.entailment,
            threshold=self.args.entailment_threshold,
            reward_range=self.args.reward_range,
        )

        def shared(name: str) -> Callable[[], Tensor]:
            def of_all() -> Tensor:
                groups = dict(gather_object(list(zip(mine, getattr(part, name).cpu(), strict=True))))
                return torch.stack([groups[group] for group in sorted(groups)]).to(device)

            return of_all

        def whole(rows: Callable[[], Tensor]) -> Callable[[], Tensor]:
            return lambda: self._gathered(rows().float()).view(*rewards.shape, -1)

        policy = functools.cache(lambda: self._policy_pass(output))
        return Rollouts(
            rewards,
            **{name: shared(name) for name in part.features if name != "correctness"},
            logps=whole(lambda: policy()[0]),
            entropies=whole(lambda: policy()[1]),
            mask=whole(lambda: loss_mask(output)),
            answer_mask=whole(lambda: self._answer_mask(output)),
            ref_logps=whole(lambda: output["ref_per_token_logps"]),
            correctness=((column - low) / (high - low)).view_as(rewards),
            reward_range=self.args.reward_range,
            max_completion_length=self.max_completion_length,
        )

    def _policy_pass(self, output: dict[str, Any]) -> tuple[Tensor, Any]:
        """Log-probabilities (and entropies, if the method reads them) under the policy that sampled: it has not moved
        yet. Those that TRL has computed are used."""
        entropy = "entropies" in self.method.reads
        if "old_per_token_logps" in output and not entropy:
            return output["old_per_token_logps"], None
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        images = {key: output[key] for key in output.keys() & _PASS_ARGUMENTS}
        checkpointing: Any = self.args.gradient_checkpointing_kwargs
        with torch.no_grad(), disable_gradient_checkpointing(self.model, checkpointing):
            logps, entropies, _ = self._get_per_token_logps_and_entropies(
                self.model,
                ids,
                attention,
                output["completion_ids"].shape[1],
                batch_size=self.args.per_device_train_batch_size,
                compute_entropy=entropy,
                **images,
            )
        return logps, entropies

    def _answer_mask(self, output: dict[str, Any]) -> Tensor:
        mask = output["completion_mask"]
        ids = [row[: int(length)].tolist() for row, length in zip(output["completion_ids"], mask.sum(1), strict=True)]
        decode = functools.partial(self._tokenizer.decode, skip_special_tokens=True)
        # GRPO-CARE asks for the answer itself; an entropy's scope, for all that follows the reasoning.
        found = answer_mask(ids, decode, self.answer_extractor if self.method.reward else None).to(mask.device)
        return torch.nn.functional.pad(found, (0, mask.shape[1] - found.shape[1]))

    def _check_range(self, rewards: Tensor, column: Tensor) -> None:
        low, high = self.args.correctness_range or self.args.reward_range
        outside = column[(column < low) | (column > high)]
        if self.method.judges and len(outside):
            raise ValueError(
                f"{self.args.method} asks which responses are right, and {self.reward_func_names[self._correctness]!r} "
                f"gave {outside[0].item():.4g}, outside {(low, high)}: that is no correctness signal. Name the reward "
                "function that is one with correctness_reward, or set correctness_range to what it can reach."
            )
        if self.method.judges and not self._warned_middle and column.nan_to_num(low).max() == (low + high) / 2:
            self._warned_middle = True
            warnings.warn(
                f"{self.args.method} calls a response right above the middle of {(low, high)}, and the best of this "
                f"batch are exactly at {(low + high) / 2:.4g}: if that is a full reward, set reward_range (or "
                "correctness_range) to what rewards can reach; now every response counts as wrong.",
                stacklevel=2,
            )
        low, high = self.args.reward_range
        outside = rewards[(rewards < low) | (rewards > high)]
        if len(outside) and not self._warned_range:
            self._warned_range = True
            warnings.warn(
                f"A reward of {outside[0].item():.4g} lies outside reward_range {(low, high)}. Rewards are used as "
                "they are; only measures of them are clipped to [0, 1]. Set GCPOConfig(reward_range=...) to what "
                "rewards can reach.",
                stacklevel=2,
            )
