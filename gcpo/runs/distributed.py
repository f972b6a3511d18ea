"""The GPUs that a run sees, and the start of several processes that train one run (``gcpo.runs.train``), one per GPU,
on this machine or on all nodes of a SLURM job; accelerate knows how they share the policy."""

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from gcpo.runs.plan import COPIES, Plan
from gcpo.runs.profiles import accelerate_file

VISIBLE = "CUDA_VISIBLE_DEVICES"  # read when a process first uses CUDA, and not again
AT_ONCE = "GCPO_RUNS_AT_ONCE"  # in the environment of kernels: how many runs share this machine's memory, or a GPU's
NODES = "SLURM_JOB_NUM_NODES"
LOG = "training.json"  # results of the processes, written last
OUTPUT = "processes.log"  # output of the processes


def visible_gpus() -> list[str]:
    """Return the GPUs that this process sees, named as for ``CUDA_VISIBLE_DEVICES``. Counting them starts no CUDA."""
    count, named = torch.cuda.device_count(), os.environ.get(VISIBLE)
    return [name.strip() for name in named.split(",")][:count] if named else [str(i) for i in range(count)]


def gpus_needed(plan: Plan) -> int:
    """Return the number of GPUs that a run uses, with the training that it makes first."""
    training = plan if plan.kind == "train" else plan.training
    return training.params.processes if training else 1


def runs_at_once(plans: Sequence[Plan]) -> int:
    """Return the number of runs that this machine has room for: GPUs for each, or else a core for each of at most 4."""
    if gpus := visible_gpus():
        return max(1, len(gpus) // max(map(gpus_needed, plans)))
    return max(1, min(os.cpu_count() or 1, 4))


def gpu_shares(jobs: int, plans: Sequence[Plan]) -> list[list[str]]:
    """Return the GPUs of each of ``jobs`` at a time; more jobs than there are GPUs for share them in turn."""
    gpus = visible_gpus()
    each = min(len(gpus), max(map(gpus_needed, plans)))
    return [[gpus[(job * each + i) % len(gpus)] for i in range(each)] for job in range(jobs)]


def take_one_gpu() -> None:
    """Let this process see one GPU, the first that it is given: transformers would spread a policy over all, which TRL
    refuses."""
    if len(gpus := visible_gpus()) > 1:
        os.environ[VISIBLE] = gpus[0]


def peak_memory() -> float:
    """Return the GB (10^9 bytes) that tensors of this process have held of its GPU at most, since ``forget_peak``."""
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_initialized() else 0.0


def forget_peak() -> None:
    """Let :func:`peak_memory` begin anew: one process may make several runs."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def launch(plan: Plan, folder: Path) -> None:
    """Train a run, whose manifest is in ``folder``, by several processes that end with this one.

    Raises:
        ValueError: the nodes cannot share the processes out, or no GPU can share the policy out.
        ChildProcessError: one of them failed; with the first error that they printed.
    """
    params, gpus, nodes = plan.params, torch.cuda.device_count(), int(os.environ.get(NODES, "1"))
    if params.processes % nodes:  # accelerate would start fewer, and not say so
        raise ValueError(f"processes: {params.processes}: the {nodes} nodes of this SLURM job cannot share them out")
    if not gpus and plan.accelerate_config.get("distributed_type") != COPIES:  # accelerate would make copies, likewise
        raise ValueError(f"accelerate: {params.accelerate} shares a policy out over GPUs, and this machine has none")
    config = ["--config_file", str(accelerate_file(params.accelerate)), "--num_processes", str(params.processes)]
    command = [sys.executable, "-m", __name__, str(folder), *config, "--main_process_port"]
    if nodes == 1:
        command += ["0"]
    else:  # they meet on the first node, where this process runs, at a port that is free here
        with socket.create_server(("", 0)) as free:
            command += [str(free.getsockname()[1]), "--main_process_ip", socket.gethostname()]
        command = ["srun", "--overlap", "--mpi=none", f"--nodes={nodes}", f"--ntasks={nodes}", *command]
        command += ["--num_machines", str(nodes)]
    # Without GPUs accelerate starts several processes of one machine only if its own option for that is not given.
    environment = os.environ if gpus else {**os.environ, "ACCELERATE_USE_CPU": "true"}
    output = folder / OUTPUT
    print(f"{params.processes} processes train; how far they are is in {output}", flush=True)
    # Their standard input ends with this process, however that ends, and on every node: `main` waits for it.
    with output.open("w") as printed:
        pipe, both = subprocess.PIPE, subprocess.STDOUT
        status = subprocess.Popen(command, env=environment, stdin=pipe, stdout=printed, stderr=both).wait()
    if status and not (folder / LOG).exists():
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
        error = next(filter(re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception|Interrupt)\b").match, lines), "no word")
        raise ChildProcessError(f"{params.processes} processes ({params.accelerate}) ended: {error}; see {output}")


def main(folder: str, *given: str) -> None:
    """Run accelerate's own command in a process that ends when its standard input does: with the one that asks for it.

    On several nodes ``srun`` starts one on each."""
    from accelerate.commands.launch import launch_command, launch_command_parser  # slow, and unused by most runs

    threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()
    rank = ["--machine_rank", os.environ["SLURM_NODEID"]] if "--num_machines" in given else []
    launch_command(launch_command_parser().parse_args([*given, *rank, "--module", "gcpo.runs.train", folder]))


if __name__ == "__main__":
    main(*sys.argv[1:])
