"""Two processes on the CPU, with a group that lies in both."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_trainer import gcpo_trainer
from gcpo import GCPOTrainer

inherited = GCPOTrainer._generate_and_score_completions

def spy(self, inputs):
    output = inherited(self, inputs)
    logs = {{name: list(values) for name, values in self._logs["extra"].items()}}
    logs |= {{"advantage": list(self._logs["advantages"]), "reward": list(self._logs["rewards"]["reward"])}}
    name = f"rank{{self.accelerator.process_index}}.json"
    Path({folder!r}, name).write_text(json.dumps([output["advantages"].tolist(), logs]))
    return output

GCPOTrainer._generate_and_score_completions = spy
# Three groups of 4 over two processes of 6 rows: the middle group lies in both.
gcpo_trainer(Path({scratch!r}), Path({folder!r}), {method!r}, per_device_train_batch_size=6, max_steps=1).train()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gcpo_bot", "gcpo_shuffled", "kle"])
def test_a_group_in_two_processes_has_one_weight(scratch: Path, tmp_path: Path, method: str) -> None:
    tests = str(Path(__file__).parent)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=tests, scratch=str(scratch), folder=str(tmp_path), method=method))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        str(port),
        str(script),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    (first, logs), (second, other) = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert logs == other, "both processes see all groups alike"
    assert len(logs["weight"]) == 12
    weight, reward = (torch.tensor(logs[name]).view(3, 4) for name in ("weight", "reward"))
    assert (weight == weight[:, :1]).all() and (weight != 1).any()
    base = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(torch.tensor(logs["advantage"]).view(3, 4), base * weight, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.tensor(first + second), torch.tensor(logs["advantage"]))
