"""The GPUs that a run sees, and the start of several processes that train one run (``gcpo.runs.train``), one per GPU,
on this machine or on all nodes of a SLURM job; accelerate knows how they share the policy."""

from __future__ import annotations

import json
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
SHARED = "plans and outputs lie on a disk that all nodes share: GCPO_OUTPUTS names the folder"
LOG = "training.json"  # results of the processes, written last
OUTPUT = "processes.log"  # output of the processes
_ERROR = re.compile(r"(\[rank\d+\]: )?([\w.]*(Error|Exception|Interrupt)\b.*)")


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
    refuses.

    Raises:
        ValueError: this process sees several and uses CUDA already, which has looked.
    """
    gpus = visible_gpus()
    if len(gpus) > 1:
        if torch.cuda.is_initialized():
            raise ValueError(
                f"processes: 1, and this Python sees {len(gpus)} GPUs and uses CUDA already, so that TRL would refuse "
                f"to train: start it again with {VISIBLE}={gpus[0]}"
            )
        os.environ[VISIBLE] = gpus[0]


def peak_memory(folder: Path | None = None) -> float:
    """Return the GB (10^9 bytes) that tensors of this process have held of its GPU at most, since ``forget_peak``; or
    that one of the processes which trained the run of ``folder`` has."""
    own = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_initialized() else 0.0
    log = folder / LOG if folder else None
    theirs = json.loads(log.read_text(encoding="utf-8")) if log and log.exists() else {}
    return max(own, float(theirs.get("peak_gpu_memory_gb", 0.0)))


def forget_peak() -> None:
    """Let :func:`peak_memory` begin anew: one process may make several runs."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def launch(plan: Plan, folder: Path) -> None:
    """Train a run, whose manifest is in ``folder``, by several processes that end with this one.

    Raises:
        ValueError: this machine cannot run so many, or not as its configuration of accelerate says.
        ChildProcessError: one of them failed; with the first error that they printed.
    """
    params, gpus, nodes = plan.params, torch.cuda.device_count(), int(os.environ.get(NODES, "1"))
    each, unequal = divmod(params.processes, nodes)
    if unequal:
        raise ValueError(
            f"processes: {params.processes}, and the {nodes} nodes of this SLURM job cannot share them out"
        )
    if gpus and gpus < each:
        raise ValueError(f"processes: {each}, and this machine has {gpus} GPUs")
    # accelerate would make copies there, and not say so.
    if not gpus and plan.accelerate_config.get("distributed_type") != COPIES:
        raise ValueError(f"accelerate: {params.accelerate} shares a policy out over GPUs, and this machine has none")
    config = ["--config_file", str(accelerate_file(params.accelerate)), "--num_processes", str(params.processes)]
    command = [sys.executable, "-m", __name__, str(folder), *config, *_meeting(nodes)]
    if nodes > 1:
        command = ["srun", "--overlap", "--mpi=none", f"--nodes={nodes}", f"--ntasks={nodes}", *command]
    # Without GPUs accelerate starts several processes of one machine only if its own option for that is not given.
    environment = os.environ if gpus else {**os.environ, "ACCELERATE_USE_CPU": "true"}
    output, pipe = folder / OUTPUT, subprocess.PIPE
    print(f"{params.processes} processes train; how far they are is in {output}", flush=True)
    with (
        output.open("w") as printed,
        # Its standard input ends with this process, however that ends, and on every node: `main` waits for it.
        subprocess.Popen(command, stdin=pipe, stdout=printed, stderr=subprocess.STDOUT, env=environment) as started,
    ):
        try:
            started.wait()
        except BaseException:
            if nodes == 1:
                started.kill()  # srun would leave its tasks behind
            raise
    if started.returncode and not (folder / LOG).exists():
        lines = map(_ERROR.match, output.read_text(encoding="utf-8", errors="replace").splitlines())
        errors = [match[2] for match in lines if match]
        raise ChildProcessError(
            f"{params.processes} processes ({params.accelerate}) ended with status {started.returncode}: "
            f"{errors[0] if errors else 'without a word'}; all that they printed is in {output}"
        )


def _meeting(nodes: int) -> list[str]:
    """Return where the processes meet, as options of accelerate: on the first node of the SLURM job, at a port that is
    free here, where the job's script runs."""
    if nodes == 1:
        return ["--main_process_port", "0"]
    found = subprocess.run(
        ["scontrol", "-o", "show", "node", os.environ["SLURM_JOB_NODELIST"]], capture_output=True, text=True
    )
    if not (address := re.search(r"NodeAddr=(\S+)", found.stdout)):
        raise ChildProcessError(f"SLURM does not say where its nodes are: {found.stderr.strip()} (scontrol show node)")
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    where = ["--main_process_ip", address[1], "--main_process_port", str(port)]
    return ["--num_machines", str(nodes), *where]


def main(folder: Path, *given: str) -> None:
    """Run accelerate's own command in a process that ends when its standard input does: with the one that asks for it.

    On several nodes ``srun`` starts one on each."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()
    if not (folder / "manifest.json").exists():
        sys.exit(f"OSError: {folder} is not on {os.uname().nodename}: {SHARED}")
    rank = ["--machine_rank", os.environ["SLURM_NODEID"]] if "--num_machines" in given else []
    launch_command(launch_command_parser().parse_args([*given, *rank, "--module", "gcpo.runs.train", str(folder)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
