"""Trains one method of each family on completions that only the prompt, the step and the place decide, and writes down
what came out. Run by test_distributed.py: alone, in two processes on the same global batches, and in two that share the
weights out (FSDP, ZeRO-3)."""

import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from accelerate.state import DistributedType, PartialState
from helpers import DISTRIBUTED, SHARED_OUT, G, make_trainer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import GRPOTrainer

# Adam would divide rounding errors by themselves.
SGD = {"optim": "sgd", "learning_rate": 0.3, "max_steps": 3}


def sample(trainer: Any, prompt_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
    """In the place of sampling: lower-case letters, and often an end, drawn by prompt, step and place in the batch. In
    the first step the first half of the batch, which is the first process's, ends early."""
    tokens = trainer.processing_class
    letters = tokens("abeiou", add_special_tokens=False)["input_ids"]
    completions = []
    for row, prompt in enumerate(prompt_ids):
        place = trainer.accelerator.process_index * len(prompt_ids) + row
        seed = zlib.crc32(repr((list(prompt), trainer.state.global_step, place)).encode())
        drawn = torch.randint(0, 8, (trainer.max_completion_length,), generator=torch.Generator().manual_seed(seed))
        ids = [[*letters, letters[0], tokens.eos_token_id][number] for number in drawn.tolist()]
        if trainer.state.global_step == 0 and place < len(prompt_ids) * trainer.accelerator.num_processes / 2:
            ids[2] = tokens.eos_token_id
        ends = [place for place, token in enumerate(ids) if token == tokens.eos_token_id]
        completions.append(ids[: ends[0] + 1] if ends else ids)
    return completions, None


def outcome(scratch: Path, folder: Path, method: str, changes: dict[str, Any], processes: int) -> dict[str, Any]:
    """Everything that must not depend on how many processes there are."""
    sizes = {"per_device_eval_batch_size": 2 * G, **changes}
    shares = {name: size // processes for name, size in sizes.items() if name.endswith("batch_size")}
    trainer = make_trainer(scratch, folder, method, **{**SGD, **changes, **shares})
    trainer.remove_callback(transformers.PrinterCallback)  # what a failed run has to say stands at the end
    trained: list[torch.Tensor] = []
    logged: list[dict[str, list[float]]] = []
    inherited = trainer._generate_and_score_completions

    def extra() -> dict[str, list[float]]:
        return {name: list(values) for name, values in sorted(trainer._logs["extra"].items())}

    def spy(inputs: Any) -> dict[str, Any]:
        output = inherited(inputs)
        if not trainer.model.training:
            return output
        logged.append({**extra(), "advantage": list(trainer._logs["advantages"])})
        # Padded to one length: how long the longest completion of a process is depends on its rows.
        advantages = output["advantages"] if output["advantages"].ndim == 2 else output["advantages"].unsqueeze(1)
        masked = advantages * output["completion_mask"]
        trained.append(torch.nn.functional.pad(masked, (0, trainer.max_completion_length - masked.shape[1])))
        return output

    trainer._generate_and_score_completions = spy
    trainer.train()
    parameters = dict(trainer.model.named_parameters())
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    kept = ("loss", "grad_norm")
    trainer.evaluate(trainer.train_dataset.select(range(2)))
    return {
        "evaluated": extra(),
        "weights": {name: whole(value) for name, value in parameters.items()},
        "parts": all(hasattr(value, "full_tensor") or hasattr(value, "ds_id") for value in parameters.values()),
        "logged": logged,
        "trained": trained,
        "steps": [{key: value for key, value in entry.items() if key in kept or "gcpo" in key} for entry in steps],
    }


def whole(value: Any) -> torch.Tensor:
    """A copy of a weight, put together where FSDP or DeepSpeed has shared it out."""
    if hasattr(value, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters(value):
            return value.detach().clone()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def share_out_on_a_cpu() -> None:
    """Let accelerate wrap the model by FSDP 2 over gloo, which it does for GPUs alone; torch's takes any device."""
    inherited = PartialState.__init__

    def among_gpus(self: Any, *arguments: Any, **options: Any) -> None:
        inherited(self, *arguments, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = self._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    PartialState.__init__ = among_gpus


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    scratch, folder = map(Path, sys.argv[1:])
    rank, processes = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", "1"))
    GRPOTrainer._generate_single_turn = sample
    if "ACCELERATE_USE_FSDP" in os.environ:
        share_out_on_a_cpu()
    apart = {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"} & os.environ.keys()
    cases = {}
    for name in SHARED_OUT if apart else DISTRIBUTED:
        unset_hf_deepspeed_config()  # of the case before: it would share out the next one's policy at once
        cases[name] = outcome(scratch, folder / f"run{rank}", *DISTRIBUTED[name], processes)
    torch.save(cases, folder / f"rank{rank}.pt")
    if processes > 1:
        torch.distributed.destroy_process_group()
