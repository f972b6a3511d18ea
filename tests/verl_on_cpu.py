"""A training in verl on a CPU, in one process: verl's trainer and actor, with completions that were sampled before.

    python verl_on_cpu.py RECORDED SETTINGS...

verl has no platform without an accelerator, and registers its FSDP engine for CUDA and NPU alone. Both registries are
open: this module, which verl imports first where VERL_USE_EXTERNAL_MODULES names it, adds a CPU to the first, and
:func:`actor` to the second. FSDP 1 refuses modules on a CPU; FSDP 2 takes them, over gloo. The servers that sample
completions (vLLM, SGLang) need a GPU, so completions are those that ``RECORDED`` holds, and the queue between the
trainer and its workers is a dictionary. All else is verl's: log-probabilities, advantages, loss, clipping, optimiser.
"""

# ruff: noqa: E731 (an answer in a word is a line)

from __future__ import annotations

import os
import socket
import sys
import types
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def nothing(*_: Any, **__: Any) -> int:
    return 0


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """A CPU as an accelerator of verl: most of what verl asks does nothing there."""

    device_name = vendor_name = "cpu"
    device_module = types.SimpleNamespace(
        **dict.fromkeys("empty_cache synchronize set_device current_device ipc_collect".split(), nothing),
        **dict.fromkeys("max_memory_allocated max_memory_reserved memory_allocated memory_reserved".split(), nothing),
        mem_get_info=lambda *_: (0, 0),
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_name=lambda: "CPU",
    )
    is_available = lambda self: True
    current_device = lambda self: torch.device("cpu")
    device_count = lambda self: 1
    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = nothing
    profiler_start = profiler_stop = cudart = nothing
    get_device_capability = lambda self, index=0: (None, None)
    communication_backend_name = lambda self: "gloo"
    visible_devices_envvar = lambda self: "NO_DEVICES"
    ray_resource_name = lambda self: "CPU"
    ray_noset_envvars = lambda self: []
    is_ipc_supported = lambda self: False

    @contextmanager
    def nvtx_range(self, msg: str) -> Any:
        yield


def actor(policy: str | Path, *overrides: str) -> tuple[Any, Any]:
    """Return verl's actor of a policy, alone in its group, and the configuration that verl's own files resolve to."""
    import verl
    import verl.models.transformers.monkey_patch as patches
    from hydra import compose, initialize_config_dir
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine_workers import ActorRolloutRefWorker

    patches.is_trl_available = lambda: False  # it would import a class that TRL no longer has
    EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")(FSDPEngineWithLMHead)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", list(overrides))
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    worker.init_model()
    return worker, config


class Queue:
    """The fields of each row, as verl's transfer queue keeps them."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str] | None = None) -> Any:
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        known = self.rows[keys[0]]
        fields = known.keys() if select_fields is None else [name for name in select_fields if name in known]
        found = list_of_dict_to_tensordict([{name: self.rows[key][name] for name in fields} for key in keys])
        for name in fields:  # also where all rows have one length
            if isinstance(known[name], torch.Tensor):
                values = [self.rows[key][name] for key in keys]
                found[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        return found

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: Any) -> Any:
        for name, values in fields.items():
            for key, value in zip(keys, values.unbind(), strict=True):
                self.rows.setdefault(key, {})[name] = value.detach().clone()
        return self.batch


class Workers:
    """verl's group of workers, of one actor in this process."""

    def __init__(self, worker: Any, queue: Queue) -> None:
        self.worker, self.queue = worker, queue

    def data(self, batch: Any) -> Any:
        from verl.utils import tensordict_utils as tu

        data = self.queue.kv_batch_get(batch.keys, batch.partition_id)
        tu.assign_non_tensor(data, **batch.extra_info)
        return data

    def compute_log_prob(self, batch: Any) -> Any:
        found = self.worker.compute_log_prob(self.data(batch))
        return self.queue.kv_batch_put(batch.keys, batch.partition_id, found.select("log_probs", "entropy"))

    def update_actor(self, batch: Any) -> Any:
        return self.worker.update_actor(self.data(batch))


def fill(queue: Queue, rows: Mapping[str, torch.Tensor]) -> None:
    """Put a batch's completions into the queue, groups mixed."""
    from transfer_queue import KVBatchMeta

    count = len(rows["rewards"])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    queue.rows, keys = {}, []
    for row in order:
        prompt = rows["prompt_ids"][row][rows["prompt_mask"][row].bool()]
        completion = rows["completion_ids"][row][rows["completion_mask"][row].bool()]
        uid = f"u{int(rows['group'][row])}"
        scores = torch.zeros(len(completion))
        scores[-1] = rows["rewards"][row]
        ids = torch.cat([prompt, completion])
        keys.append(f"{uid}_{len(keys)}_0")
        queue.rows[keys[-1]] = {
            "uid": uid,
            "prompts": prompt,
            "responses": completion,
            "response_mask": torch.ones_like(completion),
            "loss_mask": torch.ones_like(completion),
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(len(ids)),
            "rm_scores": scores,
        }
    queue.batch = KVBatchMeta(keys=keys, tags=[{}] * len(keys), partition_id="train", extra_info={"temperature": 1.0})


def train(recorded: Path, *overrides: str) -> None:
    """Train on the recorded completions; write each step's metrics and weights beside them."""
    import verl.trainer.ppo.v1.trainer_base as base
    from helpers import Vowels, first_letter, letter
    from verl.trainer.ppo.v1 import get_trainer_cls

    from gcpo.engines import verl as engine
    from gcpo.semantics import Embedder, Entailment
    from gcpo.tasks.sampling import load_policy

    given = torch.load(recorded)
    worker, config = actor(given["policy"], f"actor_rollout_ref.model.path={given['policy']}", *overrides)
    engine.Embedder = lambda *_, **__: Embedder(Vowels())
    engine.Entailment = lambda *_, **__: Entailment(first_letter)
    engine.pkgutil = types.SimpleNamespace(resolve_name=lambda _: letter)
    trainer = object.__new__(get_trainer_cls("gcpo_sync"))  # whose base would start servers and workers
    engine.PPOTrainerSync.__init__ = lambda self, config: None
    trainer.__init__(config)
    queue = base.tq = engine.tq = Queue()
    trainer.config, trainer.tokenizer = config, load_policy(given["policy"])[1]
    trainer.actor_rollout_wg = Workers(worker, queue)
    steps = []
    for number, rows in enumerate(given["batches"]):
        fill(queue, rows)
        trainer.global_steps, metrics = number, {}
        for stage in (trainer._compute_old_log_prob, trainer._compute_advantage, trainer._update_actor):
            stage(queue.batch, metrics)
        weights = worker.actor.engine.module.state_dict()
        full = {name: getattr(value, "full_tensor", lambda v=value: v)().clone() for name, value in weights.items()}
        steps.append({"metrics": {name: float(value) for name, value in metrics.items()}, "weights": full})
    torch.save(steps, recorded.with_suffix(".verl"))


if __name__ == "__main__":
    train(Path(sys.argv[1]), *sys.argv[2:])
