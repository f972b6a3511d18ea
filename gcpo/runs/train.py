"""One training run: starting policy, method and task in; records of training and held-out evaluation out."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
import transformers
from accelerate import PartialState
from datasets import Dataset
from transformers.trainer_utils import get_last_checkpoint

from gcpo import io, world
from gcpo.processes import exit_with_parent
from gcpo.rewards import keeps_format
from gcpo.runs.distributed import LOG, launch, peak_memory
from gcpo.runs.params import WRITTEN, Params, validate
from gcpo.runs.plan import Plan, quarters
from gcpo.runs.policies import cut_by, judge, lora, models, quiet, starting_policy, trained_policy
from gcpo.runs.profiles import read_yaml
from gcpo.runs.record import Run, claim, placeless, read_table, record
from gcpo.runs.warm_start import made_first
from gcpo.semantics.rules import RULES
from gcpo.tasks.base import Row, Task, check_disjoint
from gcpo.tasks.sampling import check_lengths, ends, evaluate
from gcpo.trainer import GCPOConfig, GCPOTrainer
from gcpo.trainer.prefix import sharing
from gcpo.trainer.trainer import REPLACED, text_of

# Columns of TRL's log that depend on the clock and not on the run.
_TIMES = "step_time|runtime|per_second|total_flos|epoch|num_tokens"


def train(params: Params) -> Run:
    """Train and evaluate one run, or return it if it is finished; an interrupted run goes on from its checkpoint.

    Writes to the run's folder: ``metrics.csv`` (one line per step), ``eval.csv`` (one line per held-out question and
    decoding), ``validation.csv`` (likewise, at each of five steps along the way), ``completions/*.parquet`` (every
    sampled completion with its measures and weights), ``policy/`` and ``manifest.json`` with the results.

    Raises:
        OSError: a model cannot be loaded; the manifest says so.
    """
    plan = Plan("train", params)
    with claim(plan) as run:
        done = run if run.finished else _train(plan)
        for folder in (done.folder / "validation", *done.folder.glob("checkpoint-*/")):
            shutil.rmtree(folder, ignore_errors=True)  # useless once the record says finished
        for name in ("README.md", LOG):  # TRL's model card, written with each checkpoint; and what processes gave back
            (done.folder / name).unlink(missing_ok=True)
    return done


def _train(plan: Plan) -> Run:
    params, started = plan.params, made_first(plan)
    with record(plan) as run:
        run.manifest |= started
        quiet()
        if why := refused(plan):  # before a policy is loaded
            raise ValueError(why)
        train_rows, eval_rows, along = _questions(plan, run)
        model, tokens = starting_policy(plan)
        check_lengths(model, tokens, [*train_rows, *eval_rows, *along], params.max_completion_length)
        run.manifest["models"] = models(params, model)
        validation = _Validation(plan, run, tokens, along) if along else None
        if params.max_steps:
            if params.processes == 1:
                trainer = build_trainer(plan, model, tokens, train_rows, run.folder)
                run.manifest["trl"] = placeless(trainer.args.to_dict())
                fit(plan, trainer, run, validation)
                run.manifest["cut"] = cut_by(trainer.collector.embedder, trainer.collector.entailment)
                model, log = trainer.accelerator.unwrap_model(trainer.model), trainer.state.log_history
            else:
                if validation:
                    validation.look(0, model)
                del model  # whose memory the processes need
                torch.cuda.empty_cache()
                log = _fit_in_processes(plan, run, validation)
                model, tokens = trained_policy(plan, run.folder / "policy")
            run.table("metrics.csv", step_metrics(log))
            # Read the whole log: with a logging_steps above 1, the last steps stand in its summary, which is no step.
            run.manifest["replaced_weights"] = int(sum(entry.get(REPLACED, 0) for entry in log))
        if validation:
            run.table("validation.csv", validation.table())
        scores = _evaluate(plan, model, tokens, eval_rows, partial(run.progress, what="evaluation, answers"))
        run.table("eval.csv", scores)
        run.manifest["results"] = summary(scores, plan.task)
    return run


def _questions(plan: Plan, run: Run) -> tuple[Sequence[Row], Sequence[Row], Sequence[Row]]:
    """Return the questions to train on, to test on and to look at along the way; the manifest says where from.

    Held-out questions do not depend on the run's seed: methods and seeds are compared on the same ones.
    """
    params = plan.params
    splits = {"train": plan.load(params.train_split, params.train_limit, seed=params.seed)}
    if (found := len(splits["train"].rows)) < (wanted := params.prompts_per_step):
        which = f"{params.task}/{params.train_split}: {found} questions (train_limit: {params.train_limit})"
        raise ValueError(f"{which} are fewer than the {wanted} of a step (prompts_per_step)")
    splits["eval"] = plan.load(params.eval_split, params.eval_limit)
    if params.max_steps and params.validation_limit:
        splits["validation"] = plan.load(params.validation_split, params.validation_limit)
    splits = check_disjoint(splits, skip=params.skip_malformed)
    run.manifest["data"] = {name: split.source for name, split in splits.items()}
    return splits["train"].rows, splits["eval"].rows, splits["validation"].rows if "validation" in splits else ()


def fit(plan: Plan, trainer: GCPOTrainer, run: Run, along: transformers.TrainerCallback | None) -> None:
    """Train from the newest checkpoint that is whole, and save the policy in the run's folder.

    Called by each of the processes that train together, with the same folder. ``along`` sees every step.
    """
    trainer.add_callback(_Recorded(run))
    if along:
        trainer.add_callback(along)
    with trainer.accelerator.main_process_first():  # the main process removes incomplete checkpoints
        checkpoint = _last_checkpoint(run.folder, trainer.args.max_steps)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(str(run.folder / "policy"))


def _fit_in_processes(plan: Plan, run: Run, validation: _Validation | None) -> list[dict[str, Any]]:
    """Return TRL's log of a training by several processes (:func:`work`), which save policies for this one to ask."""
    if not (run.folder / LOG).exists():
        launch(plan, run.folder)
    made = json.loads((run.folder / LOG).read_text(encoding="utf-8"))
    run.manifest |= {"trl": made["trl"], "peak_gpu_memory_gb": made["peak_gpu_memory_gb"]}
    if validation:
        for step in validation.steps[1:]:
            last = step == plan.params.max_steps
            model, _ = trained_policy(plan, run.folder / "policy" if last else validation.folder / f"{step:06d}")
            validation.look(step, model)
    return list(made["log"])


def weights_arithmetic(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Let a policy compute in the type of its weights, as one that was never trained does, and not in training's
    bfloat16: scores before and after training, and of ``gcpo evaluate``, would else differ by it."""
    plain = model.__dict__.get("_original_forward")  # accelerate's name
    return patch.object(model, "forward", plain) if plain is not None else contextlib.nullcontext()


def _evaluate(plan: Plan, model: Any, tokens: Any, rows: Sequence[Row], progress: Callable[..., None]) -> pd.DataFrame:
    params = plan.params
    how: dict[str, Any] = {"n": params.eval_samples, "temperature": params.temperature, "seed": params.seed}
    with weights_arithmetic(model), sharing(params.share_prompts, model):
        longest = params.max_completion_length
        return evaluate(model, tokens, plan.task, rows, max_new_tokens=longest, progress=progress, **how)


class _Recorded(transformers.TrainerCallback):
    """Shows each step with its reward and mean weight, and seals each checkpoint, so that one that was cut short is
    told from a whole one."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        PartialState().wait_for_everyone()  # each process has files in it
        if state.is_world_process_zero:
            io.seal(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "reward" in logs and state.is_world_process_zero:
            values = {name.removeprefix("gcpo/"): logs[name] for name in ("reward", "gcpo/weight") if name in logs}
            self.run.progress(state.global_step, state.max_steps, "steps", **values)


class _Validation(transformers.TrainerCallback):
    """Scores on the validation split along the way (:func:`quarters`), each in a file of its own until the end, so that
    a run which goes on from a checkpoint has those before it."""

    def __init__(self, plan: Plan, run: Run, tokens: Any, rows: Sequence[Row]) -> None:
        self.plan, self.run, self.tokens, self.rows = plan, run, tokens, rows
        self.steps = quarters(plan.params.max_steps)
        self.folder = run.folder / "validation"

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step in self.steps:
            self.look(state.global_step, model)

    on_train_begin = on_step_end

    def look(self, step: int, model: Any) -> None:
        """Ask the policy of a step, unless that was done."""
        path = self.folder / f"{step:06d}.csv"
        asked = partial(self.run.progress, what=f"validation at step {step}, answers")
        if not path.exists():
            with io.replacing(path) as draft:
                scores = _evaluate(self.plan, model, self.tokens, self.rows, asked)
                scores.insert(0, "step", step)
                scores.to_csv(draft, index=False)

    def table(self) -> pd.DataFrame:
        """Return the scores of all steps."""
        return pd.concat([read_table(self.folder / f"{step:06d}.csv") for step in self.steps], ignore_index=True)


def configure(plan: Plan, folder: Path, entailment: str) -> GCPOConfig:
    """Return TRL's config of a run; what decides its result is in ``plan.trainer``, the rest says what is written.

    Raises:
        ValueError: TRL, or transformers, has no such combination of settings.
    """
    params, task = plan.params, plan.task
    same = ("method", "method_options", "alpha", "equalize_mean", "entailment_threshold", "report_to")
    return GCPOConfig(
        output_dir=str(folder),
        run_name=folder.name,
        resolved=plan.method,
        **{name: getattr(params, name) for name in same},
        # Of two rewards each function says what it reaches, and one which answers are right.
        reward_range=None if params.format_reward else list(task.reward_range),
        reward_weights=[1.0, params.format_weight] if params.format_reward else None,
        correctness_reward=task_reward(task).__name__ if params.format_reward else None,
        chat_template_kwargs=params.chat_template_kwargs or None,
        embedding_model=params.embedder,
        entailment_model=entailment,
        use_full_completion_for_clustering=task.full_completion,
        share_prompts=None if params.share_prompts else False,
        # On a CPU, where use_cpu is not set, bfloat16 is refused.
        **{**WRITTEN, "use_cpu": not torch.cuda.is_available(), **plan.trainer},
    )


def refused(plan: Plan) -> str:
    """Return what TRL says against the settings of a training run, "" if nothing."""
    if plan.kind != "train" or not plan.params.max_steps:
        return ""
    rows = plan.trainer["per_device_train_batch_size"] * plan.params.processes
    as_one = Plan("train", plan.params.model_copy(update={"processes": 1, "micro_batch": rows}))
    try:
        configure(as_one, plan.folder, plan.params.entailment)
    except (ValueError, TypeError, ImportError) as error:
        return " ".join(str(error).split())
    return ""


def build_trainer(
    plan: Plan, model: Any, tokens: Any, rows: Sequence[Row], folder: Path, callback: Any = None
) -> GCPOTrainer:
    """Return the GCPOTrainer of a run."""
    params, task = plan.params, plan.task
    # The bootstrap is not needed, and not made, for a method that never reads it.
    entails, by_rule = plan.method.needs_entailment(task.full_completion), params.entailment in RULES
    entailment = world.resolve(params.entailment, "entailment", params.world_seed) if entails else params.entailment
    args = configure(plan, folder, entailment)
    if args.use_vllm:  # which reads the Hub's own configuration, not this policy's
        own: Any = args.generation_kwargs or {}
        args.generation_kwargs = {"stop_token_ids": ends(model, tokens), **own}
    if commit := models(params, model)["policy_revision"]:
        args.model_init_kwargs = {"revision": commit}  # TRL loads the reference anew, by the policy's name
    dataset = Dataset.from_list([{"prompt": row.messages, "references": list(row.references)} for row in rows])
    trainer = GCPOTrainer(
        model,
        [task_reward(task), *([format_reward(task, params.format_reward)] if params.format_reward else [])],
        args,
        answer_extractor=task.extract,
        entailment=judge(params) if entails and (params.entailment_error or by_rule) else None,  # else it is loaded
        train_dataset=dataset,
        processing_class=tokens,
        peft_config=lora(params) if params.lora_rank else None,
        callback=callback,
    )
    trainer.remove_callback(transformers.PrinterCallback)  # metrics.csv has it all
    return trainer


def task_reward(task: Task) -> Callable[..., list[float]]:
    """Return TRL's reward function of a task."""

    def reward(completions: list[Any], references: list[list[str]], **_: Any) -> list[float]:
        return [task.reward(text, wanted) for text, wanted in zip(map(text_of, completions), references, strict=True)]

    return _named(reward, f"{task.name}_{task.reward_metric}", task)


def format_reward(task: Task, tags: str) -> Callable[..., list[float]]:
    """Return TRL's reward function of the tags that completions are to have: a task's highest reward, or its lowest."""

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [task.reward_range[keeps_format(text, tags)] for text in map(text_of, completions)]

    return _named(reward, f"format_{tags}", task)


def _named(reward: Any, name: str, task: Task) -> Callable[..., list[float]]:
    reward.__name__, reward.reward_range = name, task.reward_range
    return reward


def _last_checkpoint(folder: Path, max_steps: int) -> str | None:
    """Return the newest checkpoint that is whole; one that is not, cut short by a kill or a full disk, is removed.

    That of the last step goes too: the trainer would take one step more from it.
    """
    while path := get_last_checkpoint(folder):
        if not path.endswith(f"checkpoint-{max_steps}"):
            if (why := io.broken(Path(path))) is None:
                return path
            print(f"{why}: going on from before it", flush=True)
        shutil.rmtree(path)
    return None


def step_metrics(log_history: list[dict[str, Any]]) -> pd.DataFrame:
    """Return one line per step of TRL's log, without what depends on the clock."""
    table = pd.DataFrame([entry for entry in log_history if "loss" in entry])
    return table.set_index("step").filter(regex=f"^(?!.*({_TIMES}))").sort_index(axis="columns").reset_index()


def summary(scores: pd.DataFrame, task: Task) -> dict[str, float]:
    """Return means over the held-out questions: ``greedy_f1``, ``sampled_accuracy`` and so on, each in [0, 1]."""
    means = scores.groupby("decoding")[[*task.metrics, "answered"]].mean().to_dict("index")
    return {f"{decoding}_{metric}": mean for decoding, line in means.items() for metric, mean in line.items()}


class _Policies(transformers.TrainerCallback):
    """Saves the policy where validation will look at it; all processes together, since each may have a part of it."""

    def __init__(self, trainer: Any, folder: Path, steps: list[int]) -> None:
        self.trainer, self.folder, self.steps = trainer, folder, steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in self.steps:
            self.trainer.save_model(str(self.folder / f"{state.global_step:06d}"))


def generate_together(model: torch.nn.Module) -> None:
    """Tell a policy that FSDP shares out to generate until all processes are done: each layer's weights are gathered
    from all of them, and one that ended early would leave the others waiting. transformers sees it of the models that
    it shards itself alone; accelerate shards this one."""
    for module in model.modules():
        if isinstance(module, transformers.GenerationMixin):
            setattr(module, "_is_fsdp_managed_module", True)  # noqa: B010 (an attribute that its class does not declare)


def work(folder: Path) -> None:
    """Train the run whose manifest is in ``folder``, as one of several processes that accelerate has started.

    Records, validation and evaluation are left to the process that waits, which finds in the folder the policy, those
    along the way, and TRL's log.
    """
    quiet()
    PartialState()  # gives this process its GPU, before anything is put on one
    run = Run(folder)
    plan = Plan("train", validate(read_yaml(folder / "params.yaml"), str(folder)))
    rows, *_ = _questions(plan, run)
    trainer = build_trainer(plan, *starting_policy(plan), rows, folder)
    if trainer.is_fsdp_enabled:
        generate_together(trainer.model)
    steps = quarters(plan.params.max_steps)[1:-1] if plan.params.validation_limit else []
    fit(plan, trainer, run, _Policies(trainer, folder / "validation", steps))
    trainer.accelerator.wait_for_everyone()  # after which all that is left to do is to end
    peaks = trainer.accelerator.gather(torch.tensor([peak_memory()], device=trainer.accelerator.device))
    if trainer.is_world_process_zero():
        made = {"trl": placeless(trainer.args.to_dict()), "log": trainer.state.log_history}
        io.write(folder / LOG, json.dumps({**made, "peak_gpu_memory_gb": peaks.max().item()}, default=str))
    trainer.accelerator.end_training()


if __name__ == "__main__":
    exit_with_parent(os.getppid())
    work(Path(sys.argv[1]))
