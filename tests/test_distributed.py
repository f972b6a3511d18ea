"""Two processes give what one gives: weights, advantages and losses of the same global batches, for every family; with
copies of the policy, and with one that FSDP or DeepSpeed shares out."""

import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DISTRIBUTED, SHARED_OUT, G, assert_close

from gcpo.methods import get_method
from gcpo.tasks.sampling import load_policy

pytestmark = pytest.mark.slow

MINUTES = 8
PROCESSES = 2
SHARDED = {  # as in params/accelerate
    "fsdp": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    },
    "zero3": {
        "DS_ACCELERATOR": "cpu",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    },
}


def tails(folder: Path, size: int = 4000) -> str:
    """The end of everything that the processes and their launcher have written."""
    found = sorted(path for path in folder.rglob("*.log") if path.stat().st_size)
    return "\n".join(f"--- {path.relative_to(folder)}\n{path.read_text(errors='replace')[-size:]}" for path in found)


def launch(scratch: Path, folder: Path, processes: int = PROCESSES, settings: Mapping[str, str] | None = None) -> int:
    """The exit status of one launch, with these variables set; what was written is under ``folder``."""
    folder.mkdir()
    launcher = [
        *("-m", "torch.distributed.run", "--nproc_per_node", str(processes)),
        *("--standalone", "--local-addr", "127.0.0.1"),  # at a port that is free
        *("--redirects", "3", "--log-dir", str(folder / "ranks")),  # stdout and stderr of each process to files
    ]
    worker = [str(Path(__file__).with_name("distributed_worker.py")), str(scratch), str(folder)]
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **loopback, **(settings or {})}
    with (folder / "launcher.log").open("w") as log:
        try:
            return subprocess.run(
                [sys.executable, *(launcher if processes > 1 else []), *worker],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=60 * MINUTES,
            ).returncode
        except subprocess.TimeoutExpired:
            pytest.fail(f"{processes} processes did not end within {MINUTES} minutes\n{tails(folder)}")


@pytest.fixture(scope="module")
def alone(scratch: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone") / "only"
    status = launch(scratch, folder, processes=1)
    assert status == 0, f"the process ended with status {status}\n{tails(folder)}"
    return torch.load(folder / "rank0.pt", weights_only=True)


@pytest.fixture(scope="module")
def together(scratch: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Records of each of two processes; one launch for all cases, as its start takes longer than they do."""
    return of_two(scratch, tmp_path_factory.mktemp("together"))


@pytest.fixture(scope="module", params=SHARDED)
def shared_out(
    request: pytest.FixtureRequest, scratch: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """The same of two processes with a part of the policy each."""
    if request.param == "zero3":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (pip install deepspeed)")
    return of_two(scratch, tmp_path_factory.mktemp(request.param), SHARDED[request.param])


def of_two(scratch: Path, folder: Path, settings: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    status = launch(scratch, folder / "two", settings=settings)
    assert status == 0, f"two processes ended with status {status}\n{tails(folder)}"
    return [torch.load(folder / "two" / f"rank{rank}.pt", weights_only=True) for rank in range(PROCESSES)]


@pytest.mark.parametrize("case", DISTRIBUTED)
def test_two_processes_train_as_one_does(alone: dict[str, Any], together: list[dict[str, Any]], case: str) -> None:
    one, ranks = alone[case], [rank[case] for rank in together]
    for rank in ranks:
        for name, value in one["weights"].items():
            assert_close(rank["weights"][name], value, name)
        assert rank["logged"] == ranks[0]["logged"], "both processes see all groups alike"
    assert len(one["logged"]) == len(ranks[0]["logged"]) > 0
    for step, columns in enumerate(one["logged"]):
        assert columns.keys() == ranks[0]["logged"][step].keys()
        for name, values in columns.items():
            assert_close(ranks[0]["logged"][step][name], values, f"{name}, generation {step}")
        rows = torch.cat([rank["trained"][step] for rank in ranks])
        assert_close(rows, one["trained"][step], f"the advantages trained on, generation {step}")
    for name, values in one["evaluated"].items():
        assert all(math.isnan(value) for value in values[-2 * G :]), "the rows of two prompts have no weight"
        assert_close(ranks[0]["evaluated"][name], values, f"{name}, after an evaluation")
    assert len(one["steps"]) == len(ranks[0]["steps"]) == 3
    for step, entries in enumerate(one["steps"]):
        assert entries.keys() == ranks[0]["steps"][step].keys()
        for name, value in entries.items():
            assert_close(ranks[0]["steps"][step][name], value, f"{name}, step {step}")


@pytest.mark.parametrize("case", DISTRIBUTED)
def test_there_is_something_to_compare(scratch: Path, alone: dict[str, Any], case: str) -> None:
    found, method = alone[case], DISTRIBUTED[case][0]
    start = load_policy(str(scratch))[0].state_dict()
    assert max((value - start[name]).abs().max() for name, value in found["weights"].items()) > 1e-3
    assert all(advantages.abs().max() > 0.1 for advantages in found["trained"])
    logged = [weight for columns in found["logged"] for weight in columns.get("weight", [])]
    applied = [entry.get("gcpo/loss_weight_min", 1) for entry in found["steps"]]
    if get_method(method).factors:
        assert len({round(weight, 4) for weight in logged}) > 1 or min(applied) < 0.999
    if method == "kl_cov":
        assert max(entry["gcpo/penalty"] for entry in found["steps"]) > 1e-3


def test_two_processes_that_share_prompts_train_as_two_that_do_not(together: list[dict[str, Any]]) -> None:
    for rank in together:
        for name, value in rank["gcpo_bot"]["weights"].items():
            assert_close(rank["gcpo_bot, shared prompts"]["weights"][name], value, name)


@pytest.mark.parametrize("case", SHARED_OUT)
def test_a_shared_policy_trains_as_a_whole(alone: dict[str, Any], shared_out: list[dict[str, Any]], case: str) -> None:
    for rank in shared_out:
        assert rank[case]["parts"] and not alone[case]["parts"]
        for name, value in alone[case]["weights"].items():
            assert_close(rank[case]["weights"][name], value, name)
        for step, entries in enumerate(alone[case]["steps"]):
            assert_close(rank[case]["steps"][step]["grad_norm"], entries["grad_norm"], f"gradient norm, step {step}")
