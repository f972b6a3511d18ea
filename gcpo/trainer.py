"""GCPOTrainer: TRL's GRPOTrainer with the advantages of every method in :data:`gcpo.methods.METHODS`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from gcpo.methods import ALPHA, get_method, group_factors, group_weights
from gcpo.rewards import final_answer
from gcpo.rollouts import from_texts
from gcpo.semantics import Embedder, Entailment


@dataclass
class GCPOConfig(GRPOConfig):
    """TRL's GRPOConfig and the settings of the method.

    ``loss_type`` and ``scale_rewards`` default to None: the method's own ("grpo" and "group", the objective of GCPO's
    Eq. 1). TRL's default loss, "dapo", averages over tokens; set it explicitly to have it.

    Args:
        method: a name in :data:`gcpo.methods.METHODS`.
        alpha: alpha_base; the strength of a weight is alpha / log G (GCPO, section 3.4). 0 gives the base method.
        reward_range: lowest and highest possible (weighted, summed) reward; normalises RD (GCPO, Eq. 11).
        embedding_model: a sentence-transformers path or Hub name; loaded only for methods that read embeddings.
        entailment_model: a sequence classification path or Hub name; loaded only for methods that read clusters or NLI.
        entailment_threshold: a response joins a cluster at this entailment probability or above (GCPO, App. E.3).
        use_full_completion_for_clustering: embed and cluster the whole completion instead of the extracted answer,
            as GCPO does for mathematics.

    Raises:
        ValueError: unknown method (with the nearest valid name), or a setting outside its range.
    """

    method: str = field(default="gcpo_bot", metadata={"help": "A name in gcpo.methods.METHODS."})
    alpha: float = field(default=ALPHA, metadata={"help": "alpha_base; strength is alpha / log G."})
    reward_range: tuple[float, float] = field(default=(0.0, 2.0), metadata={"help": "Lowest and highest reward."})
    embedding_model: str = field(default="all-MiniLM-L6-v2", metadata={"help": "Path or Hub name."})
    entailment_model: str = field(default="FacebookAI/roberta-large-mnli", metadata={"help": "Path or Hub name."})
    entailment_threshold: float = field(default=0.35, metadata={"help": "Entailment probability to join a cluster."})
    use_full_completion_for_clustering: bool = field(default=False, metadata={"help": "True for mathematics."})
    loss_type: str | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "TRL's loss_type; None: the method's own."}
    )
    scale_rewards: str | bool | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "As in TRL; None: the method's own."}
    )

    def __post_init__(self) -> None:
        row = get_method(self.method)
        if self.alpha < 0:
            raise ValueError(f"alpha must be at least 0, got {self.alpha}.")
        if not self.reward_range[0] < self.reward_range[1]:
            raise ValueError(f"reward_range must be (low, high) with low < high, got {self.reward_range}.")
        if not 0 <= self.entailment_threshold <= 1:
            raise ValueError(f"entailment_threshold is a probability, got {self.entailment_threshold}.")
        self.loss_type = "grpo" if self.loss_type is None else self.loss_type
        self.scale_rewards = "group" if self.scale_rewards is None else self.scale_rewards
        super().__post_init__()
        if row.permuted and self.generation_batch_size == self.num_generations:
            raise ValueError(
                f"{self.method} permutes weights across the groups of a generation batch, and this one holds "
                f"{self.generation_batch_size} completions in groups of {self.num_generations}: one group. "
                "Raise per_device_train_batch_size or steps_per_generation."
            )


class GCPOTrainer(GRPOTrainer):
    """TRL's GRPOTrainer whose advantages are multiplied by a method's weights: A~ = A * omega (GCPO, section 3.4).

    It overrides `_calculate_rewards`, the only place that sees rewards and texts together, to keep them; and
    `_generate_and_score_completions`, to multiply the advantages while groups are still whole (TRL shuffles rows right
    after). Everything else is inherited. Evaluation batches are not modulated: nothing is learnt from them.

    Beside TRL's metrics it logs every measure and weight: per step as ``gcpo/...``, per completion as columns of TRL's
    completions table, whose advantages are the modulated ones.

    Args:
        model: as in TRL, with everything that `GRPOTrainer` accepts.
        reward_funcs: as in TRL.
        args: a :class:`GCPOConfig`.
        answer_extractor: completion text -> answer, or None when there is none; answers are embedded and clustered.
        embedder: used instead of loading ``args.embedding_model``.
        entailment: used instead of loading ``args.entailment_model``.
        trl_args, trl_kwargs: every other argument of `GRPOTrainer`, in its order or by name.

    Raises:
        TypeError: ``args`` is not a GCPOConfig.
        OSError: an embedding or entailment model that the method needs cannot be loaded.
    """

    args: GCPOConfig
    num_generations: int
    _logs: dict[str, Any]
    model: Any

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GCPOConfig | None = None,
        *trl_args: Any,
        answer_extractor: Callable[[str], str | None] = final_answer,
        embedder: Embedder | None = None,
        entailment: Entailment | None = None,
        **trl_kwargs: Any,
    ) -> None:
        args = args if args is not None else GCPOConfig("gcpo-output")
        if not isinstance(args, GCPOConfig):
            raise TypeError(f"args must be a gcpo.GCPOConfig, got {type(args).__name__}; it takes the same settings.")
        self.method = get_method(args.method)
        self.answer_extractor = answer_extractor
        # Loaded before the policy: a wrong name should not cost the minutes a large policy takes.
        if "embeddings" in self.method.reads and embedder is None:
            embedder = Embedder(args.embedding_model, device=args.device)
        if self.method.reads & {"clusters", "nli"} and entailment is None:
            entailment = Entailment(args.entailment_model, device=args.device)
        self.embedder, self.entailment = embedder, entailment
        self._warned_range = False
        self._scored: tuple[Tensor, list[str]] | None = None
        super().__init__(model, reward_funcs, args, *trl_args, **trl_kwargs)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.method.factors and self.model.training:
            self._scored = rewards, gather_object([_text(completion) for completion in completions])
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self._scored is None:
            return output
        (per_function, texts), self._scored = self._scored, None
        rewards = (per_function * self.reward_weights.to(per_function.device)).nansum(dim=1)
        rewards[per_function.isnan().all(dim=1)] = torch.nan
        rewards = rewards.view(-1, self.num_generations)
        self._check_range(rewards)

        columns = self._group_columns(rewards, texts)
        weight = group_weights(self.args.method, columns, seed=self.args.seed + self.state.global_step)
        broken = ~weight.isfinite()
        columns["weight"] = torch.where(broken, 1.0, weight)
        self._metrics["train"]["gcpo/replaced_weights"].append(broken.sum().item())

        every = columns["weight"].repeat_interleave(self.num_generations)
        local = slice(len(inputs) * self.accelerator.process_index, len(inputs) * (self.accelerator.process_index + 1))
        output["advantages"] = output["advantages"] * every[local].to(output["advantages"].dtype)
        self._log_modulation(columns, every)
        return output

    def _group_columns(self, rewards: Tensor, texts: list[str]) -> dict[str, Tensor]:
        """Scores and weights of all groups; processes share the work, so that all of them see the same values."""
        size, rank, world = self.num_generations, self.accelerator.process_index, self.accelerator.num_processes
        mine = list(range(rank, len(rewards), world))
        names = [name for factor in self.method.factors for name in (factor.measure, factor.weight)]
        columns = {name: torch.zeros(len(rewards)) for name in [*names, "no_answer"]}
        if mine:
            rollouts = from_texts(
                rewards[mine].cpu(),
                [texts[size * group : size * (group + 1)] for group in mine],
                extract=self.answer_extractor,
                full_completion=self.args.use_full_completion_for_clustering,
                embedder=self.embedder,
                entailment=self.entailment,
                threshold=self.args.entailment_threshold,
                reward_range=self.args.reward_range,
            )
            for name, values in group_factors(self.args.method, rollouts, alpha=self.args.alpha).items():
                columns[name][mine] = values.float()
            columns["no_answer"][mine] = 1 - rollouts.answered.float().mean(dim=1)
        device = self.accelerator.device
        # Every group is one process's own and zero elsewhere, so the sum is exact.
        return {name: self.accelerator.reduce(values.to(device), "sum") for name, values in columns.items()}

    def _check_range(self, rewards: Tensor) -> None:
        low, high = self.args.reward_range
        outside = rewards[(rewards < low) | (rewards > high)]
        if len(outside) and not self._warned_range:
            self._warned_range = True
            warnings.warn(
                f"A reward of {outside[0].item():.4g} lies outside reward_range {(low, high)}. Rewards are used as "
                "they are; only RD is clipped to [0, 1]. Set GCPOConfig(reward_range=...) to what rewards can reach.",
                stacklevel=2,
            )

    def _log_modulation(self, columns: dict[str, Tensor], every: Tensor) -> None:
        for name, values in columns.items():
            self._metrics["train"][f"gcpo/{name}"].append(values.mean().item())
            self._logs["extra"][name].extend(values.repeat_interleave(self.num_generations).tolist())
        self._metrics["train"]["gcpo/weight_min"].append(columns["weight"].min().item())
        self._metrics["train"]["gcpo/weight_max"].append(columns["weight"].max().item())
        # TRL has just logged the unmodulated advantages of this batch: replace them by the ones trained on.
        logged = self._logs["advantages"]
        recent = [logged.pop() for _ in range(len(every))][::-1]
        modulated = torch.tensor(recent, device=every.device) * every
        logged.extend(modulated.tolist())
        self._metrics["train"]["gcpo/abs_advantage"].append(modulated.abs().mean().item())


def _text(completion: Any) -> str:
    """The text of a completion: itself, or the contents of its messages in a conversation."""
    if isinstance(completion, str):
        return completion
    contents: Iterable[Any] = (message.get("content") or "" for message in completion)
    return "".join(part if isinstance(part, str) else str(part) for part in contents)
