"""Runs of several processes: recorded as those of one, killed and resumed, and refused where they cannot be made."""

import itertools
import socket
import time
import types
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from test_runs import RECORDS, in_process, kill_when
from transformers import AutoModelForCausalLM
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.integrations import deepspeed

from gcpo import paths
from gcpo.runs import distributed
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.profiles import load_profile, names_in
from gcpo.runs.train import generate_together, train
from gcpo.trainer.collect import unsharded

LONGER = {**load_profile("smoke"), "processes": 2, "max_steps": 6, "save_steps": 2}


def planned(**values: Any) -> Plan:
    return Plan("train", validate({"processes": 2, **values}))


@pytest.mark.slow
def test_several_processes_leave_a_record_like_one_and_go_on_after_a_kill(outputs: Path) -> None:
    plan = planned(**LONGER)
    kill_when(in_process(LONGER), (plan.folder / "checkpoint-4" / "SHA256SUMS").exists)
    killed = time.monotonic()
    while any(str(plan.folder) in " ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < killed + 20, "processes go on without the one that has asked for them"
        time.sleep(0.2)
    resumed = train(plan.params)
    assert resumed.finished and resumed.manifest["attempts"] == 2
    names = {path.name for path in plan.folder.iterdir() if path.name[0] != "."}
    assert names == {*RECORDS, "manifest.json", "params.yaml", "policy", "completions", distributed.OUTPUT}
    assert resumed.manifest["trl"]["per_device_train_batch_size"] == 4  # of 8 completions
    along = pd.read_csv(plan.folder / "validation.csv")
    assert sorted(set(along["step"])) == [0, 2, 3, 4, 6]  # a quarter of 6 is 1.5
    assert len(pd.read_csv(plan.folder / "metrics.csv")) == 6
    completions = [len(pd.read_parquet(path)) for path in (plan.folder / "completions").iterdir()]
    assert completions == [8] * 6  # of both processes


@pytest.mark.slow
def test_a_process_that_fails_is_an_error_with_its_first_words(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "params.yaml").write_text("seed: x\n")
    with pytest.raises(
        ChildProcessError, match=r"2 processes \(ddp\) ended: .*ParameterError: .*seed: .*processes\.log"
    ):
        distributed.launch(planned(), tmp_path)


def test_what_accelerate_would_do_in_silence_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed.torch.cuda, "device_count", lambda: 0)
    for name in ("zero3", "fsdp"):  # without GPUs it would make copies
        with pytest.raises(ValueError, match=f"accelerate: {name} shares a policy out over GPUs"):
            distributed.launch(planned(accelerate=name), tmp_path)
    monkeypatch.setenv(distributed.NODES, "3")  # it would start fewer
    with pytest.raises(ValueError, match="processes: 2: the 3 nodes of this SLURM job cannot share them out"):
        distributed.launch(planned(), tmp_path)


def test_processes_start_on_every_node_and_meet_on_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(distributed.subprocess, "Popen", lambda command, **_: started.append(command) or nothing)
    nothing = types.SimpleNamespace(wait=lambda: 0)
    monkeypatch.setenv(distributed.NODES, "2")
    distributed.launch(planned(), tmp_path)
    (words,) = started
    assert words[0] == "srun" and {"--nodes=2", "--ntasks=2"} < set(words)
    given = dict(itertools.pairwise(words))
    assert (given["--num_machines"], given["--num_processes"]) == ("2", "2")
    assert given["--main_process_ip"] == socket.gethostname() and 1024 <= int(given["--main_process_port"]) < 65536


@pytest.mark.parametrize("name", names_in(paths.PARAMS / "accelerate"))
def test_accelerate_reads_every_configuration(name: str) -> None:
    config = load_config_from_file(str(paths.PARAMS / "accelerate" / f"{name}.yaml"))  # refuses keys it does not know
    assert config.distributed_type == {"ddp": "MULTI_GPU", "zero3": "DEEPSPEED", "fsdp": "FSDP"}[name]
    assert config.num_processes == -1  # not said: the parameter `processes` does


def test_models_that_judge_are_not_shared_out() -> None:
    """DeepSpeed's stage 3 gathers what it trains; transformers asks this global whether to share a model out."""

    class Config:
        def is_zero3(self) -> bool:
            return True

    config = Config()
    deepspeed.set_hf_deepspeed_config(config)
    try:
        with unsharded():
            assert not deepspeed.is_deepspeed_zero3_enabled()
        assert deepspeed.is_deepspeed_zero3_enabled()
    finally:
        deepspeed.unset_hf_deepspeed_config()


def test_a_policy_that_is_shared_out_generates_until_all_processes_are_done(scratch: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(scratch)
    wrapped = torch.nn.ModuleDict({"adapted": model})  # as adapters do
    assert not is_fsdp_managed_module(model)
    generate_together(wrapped)
    assert is_fsdp_managed_module(model)  # what transformers' generate asks
