"""Starting the processes of one training run, one per GPU; accelerate knows how they share the policy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from gcpo.processes import exit_with_parent
from gcpo.runs.params import sharing
from gcpo.runs.plan import COPIES, Plan

LOG = "training.json"  # what the processes give back, written last
OUTPUT = "processes.log"  # what they print
_SAID = re.compile(r"(\[rank\d+\]: )?([\w.]*(Error|Exception|Interrupt)\b.*)")


def launch(plan: Plan, folder: Path) -> None:
    """Train a run, whose manifest is in ``folder``, by several processes, and wait for them; they end with this one.

    Raises:
        ValueError: this machine cannot run so many, or not as its configuration of accelerate says.
        ChildProcessError: one of them failed; with the first error that they printed.
    """
    params = plan.params
    config, gpus = sharing(params.accelerate), torch.cuda.device_count()
    if gpus and gpus < params.processes:
        raise ValueError(f"processes: {params.processes}, and this machine has {gpus} GPUs")
    # accelerate would make copies there, and not say so.
    if not gpus and plan.sharing.get("distributed_type") != COPIES:
        raise ValueError(f"accelerate: {params.accelerate} shares a policy out over GPUs, and this machine has none")
    command = [sys.executable, "-m", __name__, str(os.getpid()), str(params.processes), str(config), str(folder)]
    # Without GPUs accelerate starts several processes of one machine only if its own option for that is not given.
    environment = os.environ if gpus else {**os.environ, "ACCELERATE_USE_CPU": "true"}
    output = folder / OUTPUT
    with output.open("w") as printed:
        done = subprocess.run(command, stdout=printed, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode and not (folder / LOG).exists():
        found = map(_SAID.match, output.read_text(encoding="utf-8", errors="replace").splitlines())
        errors = [match[2] for match in found if match]
        raise ChildProcessError(
            f"{params.processes} processes ({params.accelerate}) ended with status {done.returncode}: "
            f"{errors[0] if errors else 'without a word'}; all that they printed is in {output}"
        )


def main(parent: int, processes: str, config: str, folder: str) -> None:
    """Start them: what accelerate's own command does, in a process that ends with the one that asked for it."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    exit_with_parent(parent)
    given = ["--config_file", config, "--num_processes", processes, "--main_process_port", "0"]
    launch_command(launch_command_parser().parse_args([*given, "--module", "gcpo.runs.worker", folder]))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
