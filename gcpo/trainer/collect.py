"""From TRL's batch of rows to the whole groups that methods read, wherever their rows lie."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Float
from torch import Tensor

from gcpo.measures import REWARD_RANGE
from gcpo.rollouts import Rollouts
from gcpo.semantics import Embedder, Entailment, TextFeatures, answer_mask
from gcpo.trainer.config import GCPOConfig
from gcpo.trainer.scores import Scores

Batch = dict[str, Any]  # TRL's dictionary of tensors, from generation to the loss
PolicyPass = Callable[[Batch], tuple[Tensor, Any]]


def loss_mask(inputs: Batch) -> Tensor:
    """Return the mask of the tokens in TRL's loss."""
    return inputs["completion_mask"] * inputs["tool_mask"] if "tool_mask" in inputs else inputs["completion_mask"]


def logit_pass(model: Any, output: Batch, at_once: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the self-certainty of each token's distribution, at the sampling temperature, and the token's own logit,
    of which TRL's pass keeps neither; both (rows, T), by passes of ``at_once`` rows."""
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    long = output["completion_ids"].shape[1]
    certainties, own = [], []
    for rows in torch.arange(len(ids)).split(at_once):
        given = {"input_ids": ids[rows], "attention_mask": attention[rows], "logits_to_keep": long + 1}
        logits = model(**given).logits[:, :-1].float()
        scaled = logits / temperature
        certainties.append(scaled.logsumexp(-1) - scaled.mean(-1))
        own.append(logits.gather(2, ids[rows, -long:].unsqueeze(2)).squeeze(2))
    return torch.cat(certainties), torch.cat(own)


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
        logit_pass: batch -> self-certainties and logits of its tokens under that policy.
        decode: token ids -> text, without special tokens.
    """

    args: GCPOConfig
    accelerator: Accelerator
    group_size: int
    scores: Scores
    extract: Callable[[str], str | None]
    embedder: Embedder | None
    entailment: Entailment | None
    policy_pass: PolicyPass
    logit_pass: PolicyPass
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
        return Rollouts(
            rewards.view(-1, size),
            correctness=None if correctness is None else correctness.view(-1, size),
            reward_range=self.scores.range or REWARD_RANGE,  # which a method that asks for it has
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
        policy, logits = (functools.cache(lambda of=of: of(output)) for of in (self.policy_pass, self.logit_pass))
        return {
            "logps": lambda: policy()[0],
            "entropies": lambda: policy()[1],
            "mask": lambda: loss_mask(output),
            "answer_mask": lambda: self._answer_mask(output),
            "certainties": lambda: logits()[0],
            "token_logits": lambda: logits()[1],
            "ref_logps": lambda: output["ref_per_token_logps"],
        }

    def _answer_mask(self, output: Batch) -> Tensor:
        mask = output["completion_mask"]
        rows = zip(output["completion_ids"], mask.sum(1), strict=True)
        ids = [row[: int(length)].tolist() for row, length in rows]
        # GRPO-CARE asks for the answer itself; an entropy's scope, for all that follows the reasoning.
        reward = self.args.resolved_method().reward
        extract = self.extract if reward and "answer_mask" in reward.reads else None
        answers = answer_mask(ids, self.decode, extract).to(mask.device)
        return torch.nn.functional.pad(answers, (0, mask.shape[1] - answers.shape[1]))
