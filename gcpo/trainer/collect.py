"""From TRL's batch of rows to the whole groups that methods read: rewards and what they can reach, and features,
wherever their rows lie."""

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Float
from torch import Tensor
from transformers.integrations import deepspeed

from gcpo.errors import nearest
from gcpo.measures import REWARD_RANGE
from gcpo.rollouts import Rollouts
from gcpo.semantics import Embedder, Entailment, TextFeatures, answer_mask
from gcpo.trainer.config import GCPOConfig, Range, as_range

Batch = dict[str, Any]  # TRL's dictionary of tensors, from generation to the loss

# Values between which TRL's own reward functions lie, by name, where they are the same for all users.
OF_TRL: dict[str, Range] = {
    **dict.fromkeys(("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"), (0.0, 1.0)),
    "soft_overlong_punishment_reward": (-1.0, 0.0),
}


# --- rewards ----------------------------------------------------------------------------------------------------------


def declared_range(function: Any) -> Range | None:
    """Return the lowest and highest reward of a function that declares them as ``reward_range``, or that is TRL's."""
    name = getattr(function, "__name__", type(function).__name__)
    if (limits := getattr(function, "reward_range", None)) is not None:
        return as_range(f"{name}.reward_range", limits)
    if isinstance(function, functools.partial):
        return declared_range(function.func)
    trls = (getattr(function, "__module__", None) or "").startswith("trl.rewards")
    return OF_TRL.get(name) if trls else None


class Scores:
    """Rewards and correctness of batches, and what they can reach.

    A range is what the config says, else what the reward functions declare, weighted and summed.

    Args:
        args: the method, ranges and the name of the correctness reward.
        functions, names, weights: of the rewards, in TRL's order.

    Attributes:
        range: lowest and highest reward; None if the method does not ask and nothing declares them.
        correctness_range: those of the correctness reward, above whose middle a response is right; likewise.

    Raises:
        ValueError: ``args.correctness_reward`` is no reward function, or none is named where several could be meant; or
            the method asks for a range that nothing declares.
    """

    def __init__(self, args: GCPOConfig, functions: Sequence[Any], names: Sequence[str], weights: Tensor) -> None:
        self.method, self.name, self.names, self.weights = args.resolved_method(), args.method, list(names), weights
        self.column = self._column(args.correctness_reward)
        ranges = [declared_range(function) for function in functions]
        ends = [[w * end for end in limits or (0, 1)] for w, limits in zip(weights.tolist(), ranges, strict=True)]
        low, high = sum(map(min, ends)), sum(map(max, ends))
        summed = (low, high) if None not in ranges and low < high else None
        declared = summed if self.column is None else ranges[self.column]
        self.range: Any = args.reward_range or summed
        self.correctness_range: Any = args.correctness_range or (self.column is not None and declared) or self.range
        # Who gives rewards knows what they reach; a range that the user has set may have been for another reward.
        self._sure = self.correctness_range in (args.correctness_range, declared)
        unknown = [name for name, limits in zip(names, ranges, strict=True) if not limits] or self.names
        if self.method.reads_range and not self.range:
            self._refuse("reward_range", unknown, low, high)
        if self.method.needs_correctness and not self.correctness_range:
            self._refuse("correctness_range", unknown if self.column is None else [names[self.column]], 0, 1)
        self._batches, self._warned = 0, set[str]()

    def _column(self, wanted: str | None) -> int | None:
        """Return the place of the correctness reward, None where all rewards say it, summed."""
        names, asks = self.names, self.method.needs_correctness
        if wanted is not None and wanted not in names:
            raise ValueError(f"correctness_reward: no reward function {wanted!r}.{nearest(wanted, names)}")
        if (asks and wanted is None and len(names) > 1) or (wanted is not None and names.count(wanted) > 1):
            which = f"one of {', '.join(names)}, each with a __name__ of its own"
            raise ValueError(
                f"{self.name} asks what is right: set correctness_reward to {which}, and correctness_range."
            )
        return None if wanted is None else names.index(wanted)

    def _refuse(self, setting: str, unknown: Sequence[str], low: float, high: float) -> None:
        raise ValueError(
            f"{self.name} measures rewards by what they can reach, which nothing says of {', '.join(unknown)}. If each "
            f"is from 0 to 1, write GCPOConfig({setting}=[{low:g}, {high:g}]), or {unknown[0]}.reward_range = (0, 1) "
            "below the function."
        )

    def __call__(self, per_function: Float[Tensor, "N F"]) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
        """Return the weighted sum of the rewards, NaN where there is none, and correctness in [0, 1] where its range is
        known."""
        self._batches += 1
        weights = self.weights.to(per_function.device)
        rewards = (per_function * weights).nansum(dim=1).masked_fill(per_function.isnan().all(dim=1), torch.nan)
        for value in rewards[rewards.isinf()].tolist():
            self._complain("infinite", f"A reward is {value}: such a response counts as unscored.")
        rewards = rewards.masked_fill(rewards.isinf(), torch.nan)
        if self.method.reads_range and self.range:
            way = f"reward_range {self.range}. Set GCPOConfig(reward_range=...) to what rewards can reach."
            for value in _outside(rewards, *self.range):
                self._complain("range", f"A reward of {value:.4g}, which measures clip, is outside {way}")
        if self.correctness_range is None:
            return rewards, None
        low, high = self.correctness_range
        correctness = rewards if self.column is None else per_function[:, self.column]
        if self.method.needs_correctness:
            self._check_correctness(correctness, low, high)
        return rewards, (correctness.clamp(low, high) - low) / (high - low)

    def _check_correctness(self, correctness: Tensor, low: float, high: float) -> None:
        """Complain of what is no correctness in this range, and of a best that is wrong as only more than the middle is
        right."""
        known, middle = set(correctness[~correctness.isnan()].tolist()), (low + high) / 2
        asks = f"{self.name} asks which responses are right, and {self.names[self.column or 0]!r} gave"
        for value in _outside(correctness, low, high):
            way = "name another correctness_reward, or set correctness_range to what it reaches"
            self._complain("correctness", f"{asks} {value:.4g}, outside {(low, high)}: {way}.", stops=True)
        if not self._sure and middle in known and known <= {low, middle}:
            way = f"set correctness_range to {[low, middle]} if that is a full reward, to {[low, high]} if half of one"
            best = f"at most {middle:.4g}, the middle of {(low, high)} above which is right"
            self._complain("middle", f"{asks} {best}: {way}.", stops=True)

    def _complain(self, kind: str, message: str, stops: bool = False) -> None:
        """Warn once; what ``stops`` a training is an error in its first batch, while a run of days goes on."""
        if stops and self._batches == 1:
            raise ValueError(message)
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, stacklevel=4)


def _outside(values: Tensor, low: float, high: float) -> list[float]:
    return values[(values < low) | (values > high)].tolist()


def refuse_rewards(args: GCPOConfig, functions: Any) -> None:
    """Raise before a policy is loaded what :class:`Scores` would after it, of functions that have names by then."""
    listed = functions if isinstance(functions, list) else [functions]
    weights = args.reward_weights or [1.0] * len(listed)
    if len(weights) == len(listed) and all(hasattr(one, "__name__") for one in listed):
        Scores(args, listed, [one.__name__ for one in listed], torch.tensor(weights))


# --- models of meaning ------------------------------------------------------------------------------------------------


def load_models(
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


def unsharded() -> AbstractContextManager[Any]:
    """Load models whole: under ZeRO-3 transformers shards every model, and gathers the parameters of trained ones."""
    return patch.object(deepspeed, "_hf_deepspeed_config_weak_ref", None)


# --- features ---------------------------------------------------------------------------------------------------------


def loss_mask(inputs: Batch) -> Tensor:
    """Return the mask of the tokens in TRL's loss."""
    return inputs["completion_mask"] * inputs["tool_mask"] if "tool_mask" in inputs else inputs["completion_mask"]


@dataclass
class Collector:
    """Makes :class:`gcpo.rollouts.Rollouts` of all groups of a generation batch, equal in every process.

    Args:
        args: the method that reads the rollouts, and how texts are embedded and clustered.
        accelerator: of the processes that share the batch.
        group_size: G, responses per prompt.
        scores: the rewards of all processes, from those of each function.
        extract: completion text -> answer, or None when there is none.
        embedder, entailment: the models, or None where the method reads none.
        policy_pass: batch -> log-probabilities and entropies (or None) of its rows under the policy that sampled them.
        decode: token ids -> text, without special tokens.
    """

    args: GCPOConfig
    accelerator: Accelerator
    group_size: int
    scores: Scores
    extract: Callable[[str], str | None]
    embedder: Embedder | None
    entailment: Entailment | None
    policy_pass: Callable[[Batch], tuple[Tensor, Any]]
    decode: Callable[[Sequence[int]], str]

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
        rewards, correctness = self.scores(per_function)
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
        policy = functools.cache(lambda: self.policy_pass(output))  # one pass for both
        of_tokens: dict[str, Callable[[], Tensor]] = {
            "logps": lambda: policy()[0],
            "entropies": lambda: policy()[1],
            "mask": lambda: loss_mask(output),
            "answer_mask": lambda: self._answer_mask(output),
            "ref_logps": lambda: output["ref_per_token_logps"],
        }
        return Rollouts(
            rewards.view(-1, size),
            correctness=None if correctness is None else correctness.view(-1, size),
            reward_range=self.scores.range or REWARD_RANGE,  # which a method that asks for it has
            max_completion_length=self.args.max_completion_length,
            **{name: functools.partial(self._shared, meanings, mine, name) for name in meanings.readable},
            **{name: functools.partial(self._whole, rows) for name, rows in of_tokens.items()},
        )

    def _shared(self, meanings: TextFeatures, mine: list[int], name: str) -> Tensor:
        """Return a feature of all groups, each from the process that has computed it."""
        rows = [row.clone() for row in getattr(meanings, name).cpu()]  # gathering a view would send its whole storage
        everywhere = dict(gather_object(list(zip(mine, rows, strict=True))))
        return torch.stack([everywhere[group] for group in sorted(everywhere)]).to(self.accelerator.device)

    def _whole(self, local: Callable[[], Tensor]) -> Tensor:
        """Return a token feature of all processes' rows, in groups."""
        rows = self.gathered(local().float())
        return rows.view(-1, self.group_size, rows.shape[1])

    def _answer_mask(self, output: Batch) -> Tensor:
        mask = output["completion_mask"]
        rows = zip(output["completion_ids"], mask.sum(1), strict=True)
        ids = [row[: int(length)].tolist() for row, length in rows]
        # GRPO-CARE asks for the answer itself; an entropy's scope, for all that follows the reasoning.
        reward = self.args.resolved_method().reward
        extract = self.extract if reward and "answer_mask" in reward.reads else None
        answers = answer_mask(ids, self.decode, extract).to(mask.device)
        return torch.nn.functional.pad(answers, (0, mask.shape[1] - answers.shape[1]))
