"""Day one with a GPU: all that a grid asks of it is tried once and measured, within an hour, or rehearsed on a CPU.

Each thing has a bound that is stated with what was found::

    python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py --rehearse  # the same on a CPU with tiny models, in minutes

It ends with 1 where something must be mended before a grid is started.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.multiprocessing

from gcpo import world
from gcpo.errors import UserError
from gcpo.gradients import gradient_gram
from gcpo.one_pass import gradient_grams
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.policies import quiet, starting_policy
from gcpo.runs.profiles import load_profile, over
from gcpo.runs.record import read_table
from gcpo.runs.train import train
from gcpo.semantics import Entailment
from gcpo.tasks.sampling import generate, texts, token_statistics
from gcpo.trainer.prefix import sharing

NO_GPU = (
    "torch sees no GPU here. Run this on the machine that has one, with a torch for its CUDA, or try the same on this "
    "CPU: python benchmarks/gpu_check.py --rehearse"
)
ROUNDING = 1e-3  # nats: of two float32 passes over one token
BFLOAT16 = 0.05  # nats: mean of a token's difference between bfloat16 and float32
JUDGED = 0.05  # probability: mean difference of the entailment model in bfloat16

# Mean rewards of the first quarter of the steps on GSM8K, where a right answer is worth 2. Chosen: this policy, sampled
# at 0.9, is right a fifth to seven tenths of the time, and steps as small as these do not take that away.
CURVE = (0.4, 1.4)
REAL = {"task": "gsm8k", "max_steps": 60, "save_steps": 60, "eval_limit": 64, "eval_samples": 1}
# The same on two cores in a minute: the embedded policy, right about half of the time on sums.
REHEARSED_CURVE = (0.2, 1.8)
REHEARSED = {
    **{"task": "tinymath", "policy": "tiny", "entailment": "tiny", "dtype": "float32", "lora_rank": 0},
    **{"group_size": 4, "micro_batch": 0, "max_steps": 4, "save_steps": 4, "max_completion_length": 40},
    **{"train_limit": 20, "validation_limit": 0, "eval_limit": 4, "eval_samples": 1, "grpo": {"bf16": False}},
}


class Found(NamedTuple):
    """One thing that was tried: what was found, with its bound, and whether it is good."""

    what: str
    said: str
    good: bool

    def __str__(self) -> str:
        return f"{'good' if self.good else 'BAD '} {self.what}: {self.said}"


def tried(rehearse: bool) -> Iterator[Found]:
    """Yield what was found, one thing after the other; a failure is one of them.

    Raises:
        UserError: there is no GPU, and no rehearsal was asked for.
    """
    if not (torch.cuda.is_available() or rehearse):
        raise UserError(NO_GPU)
    quiet()
    bench = Bench(rehearse)
    for what, tries in STEPS.items():
        started = time.perf_counter()
        try:
            said, good = tries(bench)
        except Exception as error:  # whatever it is: the others are tried too
            said, good = f"{type(error).__name__}: {' '.join(str(error).split())}", False
        yield Found(what, f"{said} [{time.perf_counter() - started:.0f} s]", good)


@dataclass
class Bench:
    """The policy and its questions."""

    rehearse: bool

    @cached_property
    def plan(self) -> Plan:
        """The short training run."""
        own = {"profile": "day-one-rehearsed", **REHEARSED} if self.rehearse else {"profile": "day-one", **REAL}
        return Plan("train", validate(over(load_profile("single_gpu"), own), "benchmarks/gpu_check.py"))

    @cached_property
    def policy(self) -> tuple[Any, Any]:
        """Its policy in float32, and the tokenizer."""
        model, tokens = starting_policy(self.plan)
        return model.float(), tokens

    @cached_property
    def prompts(self) -> list[Any]:
        """Eight of its questions."""
        return [row.messages for row in self.plan.load("test", 8).rows]

    @cached_property
    def sampled(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Four answers to each, by transformers."""
        torch.manual_seed(0)
        longest = self.plan.params.max_completion_length
        return generate(*self.policy, self.prompts, n=4, temperature=1.0, max_new_tokens=longest)

    def seconds(self, work: Callable[[], Any], repeats: int = 3) -> float:
        """Return the seconds that work takes, after one time that counts not."""
        work()
        self._wait()
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        self._wait()
        return (time.perf_counter() - started) / repeats

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def device(bench: Bench) -> tuple[str, bool]:
    """Name the GPU and what it computes with."""
    if bench.rehearse:
        return f"a CPU, in the place of a GPU (torch {torch.__version__})", True
    known = torch.cuda.get_device_properties(0)
    rounds = torch.cuda.is_bf16_supported()
    said = f"{torch.cuda.device_count()} x {known.name}, {known.total_memory / 1e9:.0f} GB"
    with_what = f"torch {torch.__version__}, CUDA {torch.version.cuda}, bfloat16 {'yes' if rounds else 'no'}"
    return f"{said}; {with_what}", rounds


def passes(bench: Bench) -> tuple[str, bool]:
    """Compare passes in float32 with a CPU's, of shared prompts with plain ones, and in bfloat16 with both."""
    model, (ids, attention, completion) = bench.policy[0], [values[:8] for values in bench.sampled]
    start = int(completion.any(0).float().argmax())

    def logps(policy: Any, place: Any, width: int = 0) -> torch.Tensor:
        with sharing(bool(width), policy, width=width):
            found, _, mask = token_statistics(policy, ids.to(place), attention.to(place), completion.to(place), 1.0)
        return found[mask.bool()]

    own = logps(model, model.device)
    rounded = logps(copy.deepcopy(model).bfloat16(), model.device)
    found = {
        "a CPU": (float((own - logps(copy.deepcopy(model).cpu(), "cpu")).abs().max()), ROUNDING),
        "shared prompts": (float((own - logps(model, model.device, start)).abs().max()), ROUNDING),
        "bfloat16 (mean)": (float((own - rounded).abs().mean()), BFLOAT16),
    }
    said = ", ".join(f"{name} {value:.1e} (at most {bound:g})" for name, (value, bound) in found.items())
    return f"log-probabilities differ from float32 here by: {said}", all(v <= b for v, b in found.values())


def gradients(bench: Bench) -> tuple[str, bool]:
    """Compare gradients of a group that one pass gives with those of a pass for each answer."""
    model = bench.policy[0]
    group = tuple(values[:4] for values in bench.sampled)
    plain = gradient_gram(model, *group, params="*layers.0.*")
    (shared,) = gradient_grams(model, *group, params="*layers.0.*")
    worst = float((plain - shared).abs().max() / plain.abs().max())
    return f"inner products by one pass differ by {worst:.1e} of the largest (at most {ROUNDING:g})", worst <= ROUNDING


def speeds(bench: Bench) -> tuple[str, bool]:
    """Measure the passes of training, and a step of generation by transformers, in bfloat16."""
    model, tokens = copy.deepcopy(bench.policy[0]).bfloat16(), bench.policy[1]
    rows, length = (2, 64) if bench.rehearse else (8, 512)
    ids = torch.randint(len(tokens), (rows, length), device=model.device)
    for parameter in model.parameters():
        parameter.requires_grad_(True)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    trained = rows * length / bench.seconds(step)
    model.zero_grad()
    longest, columns = 8 if bench.rehearse else 64, []

    def answers() -> None:
        made = generate(model, tokens, bench.prompts, n=4, temperature=1.0, max_new_tokens=longest)
        columns.append(int(made[2].any(0).sum()))  # a step each, until the last answer ends

    taken = bench.seconds(answers, 1)
    said = f"a pass of training with its gradient reads {trained:.0f} tokens a second"
    return f"{said}, a step of generation takes {1000 * taken / columns[-1]:.0f} ms", True


def judges(bench: Bench) -> tuple[str, bool]:
    """Compare the entailment model as runs have it with itself in float32, and measure it."""
    tokens = bench.policy[1]
    name = world.resolve(bench.plan.params.entailment, "entailment")
    answers = texts(tokens, bench.sampled[0], bench.sampled[2])[:32]
    own, exact = Entailment(name), Entailment(name, batch_size=16)
    started = time.perf_counter()
    found = own.pairwise(answers)
    taken = time.perf_counter() - started
    expected, threshold = exact.pairwise(answers), bench.plan.params.entailment_threshold
    away = float((found - expected).abs().mean())
    crossed = float(((found[..., 0] >= threshold) != (expected[..., 0] >= threshold)).float().mean())
    said = f"{own.misses / taken:.0f} pairs a second; probabilities are {away:.1e} off float32's (at most {JUDGED:g})"
    return f"{said}, and {100 * crossed:.1f} % of pairs are on the other side of {threshold:g}", away <= JUDGED


def several(bench: Bench) -> tuple[str, bool]:
    """Sum over all GPUs, or two processes of a rehearsal."""
    count = 2 if bench.rehearse else torch.cuda.device_count()
    if count < 2:
        return "one GPU: nothing to try", True
    with tempfile.TemporaryDirectory() as folder:
        speed = summed(count, Path(folder), 10**4 if bench.rehearse else 2**26)
    return f"{count} processes sum {speed:.2g} GB a second ({'gloo' if bench.rehearse else 'NCCL'})", True


def summed(processes: int, folder: Path, numbers: int, repeats: int = 10) -> float:
    """Return the GB per second of each process that a sum of so many float32 numbers moves.

    Raises:
        RuntimeError: a process failed, or its sum is wrong.
    """
    torch.multiprocessing.spawn(_work, (processes, str(folder), numbers, repeats), processes)
    return 4 * numbers * repeats / float((folder / "seconds").read_text()) / 1e9


def _work(rank: int, processes: int, folder: str, numbers: int, repeats: int) -> None:
    cuda = torch.cuda.device_count() >= processes
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    meet, backend = f"file://{folder}/meet", "nccl" if cuda else "gloo"
    torch.distributed.init_process_group(backend, init_method=meet, rank=rank, world_size=processes)
    values = torch.full((numbers,), float(rank + 1), device=device)
    torch.distributed.all_reduce(values)
    expected = processes * (processes + 1) / 2
    if not (values == expected).all():
        raise RuntimeError(f"a sum over {processes} processes is {values[0].item()}, not {expected}")
    started = time.perf_counter()
    for _ in range(repeats):
        torch.distributed.all_reduce(values)
    if cuda:
        torch.cuda.synchronize(device)
    if rank == 0:
        Path(folder, "seconds").write_text(str(time.perf_counter() - started))
    torch.distributed.destroy_process_group()


def training(bench: Bench) -> tuple[str, bool]:
    """Train shortly, and compare the curve of rewards with what is expected."""
    shutil.rmtree(bench.plan.folder, ignore_errors=True)  # it is to be made now
    run = train(bench.plan.params)
    rewards = read_table(run.folder / "metrics.csv")["reward"]
    return curve(rewards, *(REHEARSED_CURVE if bench.rehearse else CURVE))


def curve(rewards: pd.Series[float], low: float, high: float) -> tuple[str, bool]:
    """Say whether rewards begin where they should, and end no lower than noise would have it."""
    quarter = max(1, len(rewards) // 4)
    first, last = rewards[:quarter].mean(), rewards[-quarter:].mean()
    fallen = 3 * rewards.std() / quarter**0.5
    quarters = " ".join(f"{part.mean():.2f}" for part in np.array_split(rewards.to_numpy(), 4))
    good = bool(low <= first <= high and last >= first - fallen and rewards.notna().all())
    bounds = f"expected: begins between {low:g} and {high:g}, ends no lower than {first - fallen:.2f}"
    return f"rewards of {len(rewards)} steps by quarters: {quarters} ({bounds})", good


STEPS: dict[str, Callable[[Bench], tuple[str, bool]]] = {
    "device": device,
    "passes": passes,
    "gradients": gradients,
    "speeds": speeds,
    "judges": judges,
    "several GPUs": several,
    "a short run": training,
}


def main() -> int:
    """Try all of it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, small")
    bad = 0
    try:
        for found in tried(parser.parse_args().rehearse):
            print(found, flush=True)
            bad += not found.good
    except UserError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    print(f"{bad} of these must be mended before a grid is started" if bad else "all of it works")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
