"""GCPOTrainer: TRL's GRPOTrainer with the advantages of every method in :data:`gcpo.methods.METHODS`."""

import inspect
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from gcpo import seeds
from gcpo.masked import deviations, mean
from gcpo.methods import Modulation, expand, modulate
from gcpo.papers import credit
from gcpo.rewards import any_answer
from gcpo.rollouts import Rollouts
from gcpo.semantics import Embedder, Entailment
from gcpo.trainer.collect import Collector, Scores, load_models, loss_mask, refuse_rewards
from gcpo.trainer.config import GCPOConfig
from gcpo.trainer.prefix import shares, sharing, together

# What TRL gives to a forward pass: of these, a batch keeps images.
PASS = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
REPLACED = "gcpo/replaced_weights"  # in logs: weights replaced since the last log
REFERENCE = "reference.pt"  # in a checkpoint: the reference model of a method that moves it


class GCPOTrainer(GRPOTrainer):
    """TRL's GRPOTrainer whose advantages are those of a method: A~ = A * omega (GCPO, section 3.4).

    It overrides seven methods, and nothing of TRL's loss or generation is repeated here:

    - `_calculate_rewards`, the only place that sees rewards and texts together, to keep them;
    - `_generate_and_score_completions`, to compute advantages while groups are whole (TRL shuffles rows right after);
      groups may lie in several processes;
    - `_compute_loss`, for methods that act in the loss, to hand TRL a copy of the batch;
    - `_get_per_token_logps_and_entropies`, the first thing TRL's loss calls, to change that copy's advantages by the
      ratios of this very step before TRL reads them;
    - this and `_generate_single_turn`, to compute a prompt once for all rows that share it (``share_prompts``), and
      `_prepare_inputs`, to put such rows into one micro-batch; and
    - `log`, to log a count as a count.

    A checkpoint also keeps a reference model that moves (`_save_checkpoint`, `_load_optimizer_and_scheduler`), and the
    model card says which method trained the model, and credits its papers (`create_model_card`).
    Evaluation batches are not modulated: nothing is learnt from them. The rewards that TRL logs are the task's own,
    also for methods that train on others.

    Beside TRL's metrics it logs every measure and weight: per step as ``gcpo/...``, per completion as columns of TRL's
    completions table, whose advantages are the modulated ones.

    Args:
        model, train_dataset, arguments, keywords: as in TRL.
        reward_funcs: as in TRL. A reward function may say what it can reach: ``reward.reward_range = (0.0, 1.0)``.
        args: a :class:`GCPOConfig`.
        answer_extractor: completion text -> answer, or None when there is none; answers are embedded and clustered.
            :func:`gcpo.rewards.any_answer` reads the usual formats.
        embedder: used instead of loading ``args.embedding_model``.
        entailment: used instead of loading ``args.entailment_model``.
        callback: called with the `Rollouts` of each batch that is scored for training, before the policy moves.

    Raises:
        TypeError: ``args`` is not a GCPOConfig; or ``answer_extractor``, ``embedder``, ``entailment`` or ``callback``
            cannot be called.
        ValueError: a method that reads correctness, and several reward functions of which none is named; or one that
            measures rewards, of which nothing says what they can reach.
        OSError: an embedding or entailment model that the method needs cannot be loaded.
    """

    args: GCPOConfig
    num_generations: int
    _logs: dict[str, Any]
    model: Any
    _scored: tuple[Tensor, list[str]] | None = None
    _loss_inputs: dict[str, Any] | None = None
    _columns: Sequence[str] = ()

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: str | nn.Module | Callable[..., Sequence[float | None]] | list[Any] | None = None,
        args: GCPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        *arguments: Any,
        answer_extractor: Callable[[str], str | None] = any_answer,
        embedder: Embedder | None = None,
        entailment: Entailment | None = None,
        callback: Callable[[Rollouts], object] | None = None,
        **keywords: Any,
    ) -> None:
        args = args if args is not None else GCPOConfig("gcpo-output")
        if not isinstance(args, GCPOConfig):
            raise TypeError(f"args must be a gcpo.GCPOConfig, got {type(args).__name__}; it takes the same settings.")
        # Refused and loaded before the policy is, which takes minutes if it is large.
        for name, given, function in (("embedder", embedder, "__call__"), ("entailment", entailment, "pairs")):
            if given is not None and not hasattr(given, function):
                raise TypeError(f"{name} is {given!r}: give gcpo.semantics.{name.title()}({given!r}).")
        if not keywords.get("environment_factory"):
            refuse_rewards(args, reward_funcs)
        self.method, self._callback = args.resolved_method(), callback
        embedder, entailment = load_models(args, embedder, entailment)
        super().__init__(model, reward_funcs, args, train_dataset, *arguments, **keywords)  # type: ignore[arg-type]
        self._shares = shares(args, self.accelerator.unwrap_model(self.model), self.ref_model)
        # For the model card.
        self._name = str(args.method) if self.method.papers else "gcpo"  # that is cited for a weight of one's own
        self._paper, self._tag_names = credit(self.method.papers), ["trl", "grpo", "gcpo"]
        scores = Scores(args, self.reward_funcs, self.reward_func_names, self.reward_weights)
        decode = partial(self._tokenizer.decode, skip_special_tokens=True)
        features = answer_extractor, embedder, entailment, self._policy_pass, decode
        self.collector = Collector(args, self.accelerator, self.num_generations, scores, *features)

    # --- at generation, on whole groups ---

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.model.training and (self.method.components or self.args.drop_equal_groups or self._callback):
            self._scored = rewards, gather_object([text_of(completion) for completion in completions])
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self._scored is None:
            for column in self._columns:  # rows of an evaluation have none; without a place, others' would be theirs
                self._logs["extra"][column].extend([torch.nan] * len(inputs) * self.accelerator.num_processes)
            return output
        (per_function, texts), self._scored = self._scored, None
        rollouts = self.collector.rollouts(per_function, texts, output)
        if self._callback:
            self._callback(rollouts)
        base = self.collector.gathered(output["advantages"]).view_as(rollouts.rewards)
        modulation = self._modulate(rollouts, None if self.method.reward else base, stage="advantage")
        shaped = modulation.advantages
        columns = {**modulation.columns, "weight": modulation.weight}
        if self.method.reward:
            columns["method_reward"] = self.method.reward(rollouts)
        columns["no_answer"] = 1 - rollouts.answered.float()
        columns["abs_advantage"] = shaped.abs()
        means = {name: by_response(values, rollouts) for name, values in columns.items()}
        for name, values in means.items():
            self._note(name, values.nanmean())
            self._logs["extra"][name].extend(values.tolist())
        self._columns = list(means)
        self._note_extremes("weight", modulation.weight, rollouts)
        # The ones trained on take the place of TRL's own, of all processes: the log holds one generation.
        self._logs["advantages"].extend((modulation.base.flatten() * means["weight"]).tolist())

        local = self.collector.local(len(inputs))
        advantages = shaped.flatten(0, 1)[local].to(output["advantages"].dtype)
        # Those of tokens are padded to the longest completion of all processes.
        output["advantages"] = advantages[:, : output["completion_mask"].shape[1]] if shaped.ndim == 3 else advantages
        if self.method.drops_equal or self.args.drop_equal_groups:
            self._drop(deviations(rollouts.rewards, rollouts.scorable).eq(0).all(1), output, local)
        if self.method.in_loss:  # rows that TRL shuffles and splits with the others
            output["base_advantages"] = modulation.base.flatten()[local]
            output["task_rewards"] = rollouts.rewards.flatten()[local]
        return output

    def _modulate(self, rollouts: Rollouts, base: Tensor | None, stage: str) -> Modulation:
        """Return the method's weights of this step. A weight that is not finite becomes 1 and is counted: one group
        should not end a run of days. Without any finite weight, the method itself is broken."""
        method, step = self.method, self.state.global_step
        if self.args.alpha_end is not None:
            method = method.moved(self.args.alpha_end, step / max(1, self.state.max_steps - 1))
        method = method.seeded(seeds.of_step(self.args.seed, step))
        scales: Any = {"equalize_mean": self.args.equalize_mean, "scale_rewards": self.scale_rewards}
        modulation = modulate(method, rollouts, base, stages=(stage,), **scales)
        broken = ~modulation.weight.isfinite()
        if broken.all():
            read = ", ".join(sorted(self.method.reads)) or "rewards"
            raise ValueError(f"{self.args.method}: no weight of this step is finite. Look at alpha, and at {read}.")
        self._note("replaced_weights", broken.sum())
        return modulation._replace(weight=torch.where(broken, 1.0, modulation.weight))

    def _drop(self, groups: Tensor, output: dict[str, Any], local: slice) -> None:
        """Take whole groups out of the loss and out of its token count."""
        kept = ~groups.repeat_interleave(self.num_generations)[local].unsqueeze(1)
        output["completion_mask"] = output["completion_mask"] * kept
        if self.args.drop_equal_groups and self.loss_type in ("grpo", "dr_grpo"):  # a mean over all rows
            output["advantages"] = output["advantages"] * (len(groups) / (~groups).sum().clamp(min=1))
        output["num_items_in_batch"] = self.accelerator.gather(loss_mask(output).sum()).sum()
        self._note("dropped_groups", groups.float().mean())

    def _note(self, name: str, number: Tensor) -> None:
        """Log a number of this pass beside TRL's own, of which TRL logs means."""
        self._metrics["train"][f"gcpo/{name}"].append(number.item())

    def _note_extremes(self, name: str, weight: Tensor, rollouts: Rollouts) -> None:
        counted = of_tokens(weight, rollouts)
        if counted.numel():
            self._note(f"{name}_min", counted.min())
            self._note(f"{name}_max", counted.max())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if counts := self._metrics["train"].get(REPLACED):
            counts[:] = [sum(counts)]  # TRL would log a mean over micro-batches and steps
        super().log(logs, start_time)

    def create_model_card(self, *arguments: Any, **keywords: Any) -> None:
        """Write TRL's model card, and in it the method's rule, papers and constants, and what rewards can reach."""
        super().create_model_card(*arguments, **keywords)
        if self.is_world_process_zero():
            path, known = Path(str(self.args.output_dir), "README.md"), self.method.constants()
            own = ("alpha_end", "drop_equal_groups", "equalize_mean", "correctness_reward")
            known |= {n: getattr(self.args, n) for n in own if getattr(self.args, n) is not getattr(GCPOConfig, n)}
            parts = [*known.pop("parts"), known, {"rewards": self.collector.scores.range}]
            given = ({n: v for n, v in part.items() if v is not False and v not in (None, {})} for part in parts)
            lines = ["- " + ", ".join(f"{name} {value}" for name, value in part.items()) for part in given if part]
            text = re.sub(r"\n\s*\n\s*\n", "\n\n", path.read_text(encoding="utf-8")).rstrip()
            below = ["", f"### {self.args.method}", "", self.method.rule, "", *lines, ""]
            path.write_text("\n".join([text, *below]), encoding="utf-8")

    def _policy_pass(self, output: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities (and entropies, if the method reads them) under the policy that sampled, which has
        not moved yet. Log-probabilities that TRL has computed are used."""
        entropy = "entropies" in self.method.reads
        if "old_per_token_logps" in output and not entropy:
            return output["old_per_token_logps"], None
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        images = {key: output[key] for key in output.keys() & PASS}
        length, rows = output["completion_ids"].shape[1], self.args.per_device_train_batch_size
        checkpointing: Any = self.args.gradient_checkpointing_kwargs
        with torch.no_grad(), disable_gradient_checkpointing(self.model, checkpointing):
            logps, entropies, _ = self._get_per_token_logps_and_entropies(
                self.model, ids, attention, length, batch_size=rows, compute_entropy=entropy, **images
            )
        return logps, entropies

    # --- prompts that rows share ---

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        """Return TRL's micro-batch or, where prompts are shared, one whose rows have as few prompts as can be, of the
        same rows for each optimiser step."""
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        # A loss that balances experts compares the rows of a micro-batch too.
        compares = self.args.compares_rows or getattr(self, "aux_loss_enabled", False)
        if self._buffered_inputs is before or compares or not self._shares:
            return inputs
        steps = self.args.steps_per_generation
        of_a_step = math.gcd(steps, self.args.gradient_accumulation_steps)
        self._buffered_inputs = together(self._buffered_inputs, of_a_step)
        return self._buffered_inputs[self._step % steps]

    def _generate_single_turn(self, *arguments: Any, **keywords: Any) -> Any:
        with sharing(self._shares, self.accelerator.unwrap_model(self.model)):
            return super()._generate_single_turn(*arguments, **keywords)

    # --- in the loss, on the rows of one micro-batch ---

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        if not (self.method.in_loss and self.model.training):
            return super()._compute_loss(model, inputs)
        self._loss_inputs = dict(inputs)  # a copy: TRL uses the batch again in later iterations
        self._penalty = torch.zeros((), device=self.accelerator.device)
        try:
            return super()._compute_loss(model, self._loss_inputs) + self._penalty
        finally:
            self._loss_inputs = None

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *rest: Any, **named: Any
    ) -> Any:
        own = model, input_ids, attention_mask, logits_to_keep
        with sharing(self._shares, self.accelerator.unwrap_model(model), width=input_ids.shape[1] - logits_to_keep):
            logps_and_entropies = super()._get_per_token_logps_and_entropies(*own, *rest, **named)
        if self._loss_inputs is not None:
            self._modulate_loss(logps_and_entropies[0], logps_and_entropies[1], self._loss_inputs)
        return logps_and_entropies

    def _modulate_loss(self, logps: Tensor, entropies: Tensor, inputs: dict[str, Any]) -> None:
        """Apply the weights that depend on pi, or on pi / pi_old, to the copy of the batch that TRL's loss will read.

        The rows of this micro-batch in all processes count as one batch, so that what a token is compared with does not
        depend on how many processes there are.
        """
        old, mask = inputs.get("old_per_token_logps", logps.detach()), loss_mask(inputs)
        ratios = (logps.detach() - old).float().clamp(-20, 20).exp()
        rows = (inputs["task_rewards"], inputs["base_advantages"], old.float(), ratios, mask.float())
        rewards, base, *tokens = (self.collector.gathered(part).unsqueeze(0) for part in rows)
        features: dict[str, Any] = dict(zip(("logps", "ratios", "mask"), tokens, strict=True))
        if "entropies" in self.method.reads:
            features["entropies"] = self.collector.gathered(entropies.detach().float()).unsqueeze(0)
        rollouts = Rollouts(rewards, **features)
        local = self.collector.local(len(logps))
        modulation = self._modulate(rollouts, base, stage="loss")
        if any(factor.stage == "loss" for factor in self.method.factors):
            weight = modulation.weight[0, local]
            weight = weight[:, : mask.shape[1]] if weight.ndim == 2 else weight
            advantages = inputs["advantages"]
            ndim = max(weight.ndim, advantages.ndim)
            inputs["advantages"] = expand(advantages, ndim) * expand(weight, ndim).to(advantages.dtype)
            for name, values in modulation.columns.items():
                self._note(name, of_tokens(values, rollouts).mean())
            self._note_extremes("loss_weight", modulation.weight, rollouts)
        if self.method.penalty is not None:
            paid = self.method.penalty.coefficients(rollouts, base)[0, local, : mask.shape[1]]
            count = rollouts.mask.sum().clamp(min=1) / self.accelerator.num_processes
            penalty = (paid * (logps - old).abs()).sum() / count
            self._penalty = penalty / self.current_gradient_accumulation_steps
            self._note("penalty", self.accelerator.gather(penalty.detach()).mean())

    # --- a reference model that moves is part of a checkpoint ---

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.args.sync_ref_model and self.args.should_save:
            # Before TRL's own files, of which the trainer's state comes last: a checkpoint that has it has all.
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.accelerator.unwrap_model(self.ref_model).state_dict(), folder / REFERENCE)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.args.sync_ref_model:
            path = Path(checkpoint) / REFERENCE
            try:
                state = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:  # of files, of zip files, of pickles
                raise OSError(f"{path} cannot be read, and TRL's own checkpoints have none: try another.") from error
            self.accelerator.unwrap_model(self.ref_model).load_state_dict(state)


def by_response(values: Tensor, rollouts: Rollouts) -> Tensor:
    """Return a column of groups, responses or tokens as one number per response: of tokens, their mean."""
    if values.ndim == 3:
        tokens = rollouts.mask.bool()
        values = mean(values, tokens).squeeze(-1).where(tokens.any(-1), values[..., 0])
    return expand(values, 2).expand(rollouts.rewards.shape).flatten()


def of_tokens(values: Tensor, rollouts: Rollouts) -> Tensor:
    """Return the values of groups or responses, or those of the tokens in the loss, without padding."""
    return values[rollouts.mask.bool()] if values.ndim == 3 else values


def text_of(completion: Any) -> str:
    """Return the text of a completion; of a conversation, the assistant's last message that is not empty."""
    if isinstance(completion, str):
        return completion
    said = [message.get("content") for message in completion if message.get("role") in (None, "assistant")]
    return str(next(filter(None, reversed(said)), ""))
