"""Which of transformers' causal language models share prompts: a tiny one of each kind, asked and then measured.

A kind that says that it shares is checked without the package's own check: log-probabilities and the gradient of every
weight, of a pass that shares and of TRL's own, in training mode, on prompts of 3, 11 and 20 tokens, padded on the left,
with completions of 1 to 12; and what it samples. A kind that draws numbers at random is tried once more without. It
writes ``docs/models.md``, and ends with 1 where a kind says that it shares, and its numbers are others.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import transformers
import trl
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl.trainer.utils import add_fused_lm_head

from gcpo.runs.profiles import read_yaml
from gcpo.trainer.prefix import obstacle, shared

R = TypeVar("R")
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
LIMIT = 60  # seconds of one kind
LARGEST = 40_000_000  # weights: a kind that stays larger takes too long
NEAR = 1e-4  # of float32's log-probabilities and, over the largest one, gradients; float64 decides about what is above
DRAWN = re.compile(r"^(?!summary|classifier).*(drop|jitter)")  # settings that say how much a model draws at random
WIDTH, LENGTH = 20, 12

TINY: dict[str, Any] = read_yaml(Path(__file__).with_suffix(".yaml"))


class Row(NamedTuple):
    """A kind of model and whether it shares."""

    result: str
    why: str
    kind: str = ""


# --- a tiny model of a kind -------------------------------------------------------------------------------------------


def tiny(kind: str, **changes: Any) -> Any:
    """Return a tiny configuration of a kind; a window that its models have by default is shorter than the prompts."""
    own: dict[str, Any] = next((settings for kinds, settings in TINY["kinds"].items() if kind in kinds.split()), {})
    size, whole = TINY["size"], CONFIG_MAPPING[kind]
    if "text_config" in whole.sub_configs:
        size = {name: size if name == "text_config" else TINY["other"] for name in whole.sub_configs}
    window = {"sliding_window": 6} if getattr(whole(), "sliding_window", None) else {}
    given = {**size, **window, **own, **changes}
    return AutoConfig.for_model(kind, **{name: value for name, value in given.items() if value is not None})


def random_model(config: Any) -> Any:
    """Return a model of random weights, in training mode."""
    with torch.device("meta"):
        count = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count:,} weights with the settings of a tiny model")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    with torch.no_grad():  # or what begins at 0 would hide what it multiplies
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return model


def with_head(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model of random weights with TRL's head."""
    model = random_model(config).to(dtype)
    add_fused_lm_head(model, outputs=("log_probs",))
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Return ids and mask of three completions to each of three prompts, in any order."""
    draw = torch.Generator().manual_seed(1)
    which = torch.arange(3).repeat(3)[torch.randperm(9, generator=draw)]
    lengths, ends = torch.tensor([3, 11, WIDTH]), torch.tensor([1, LENGTH, 2, 7, 4, LENGTH, 9, 3, 5])
    before = torch.arange(WIDTH) >= WIDTH - lengths[which].unsqueeze(1)
    mask = torch.cat([before, torch.arange(LENGTH) < ends.unsqueeze(1)], dim=1).long()
    prompts = torch.randint(3, 61, (3, WIDTH), generator=draw)[which]
    return torch.cat([prompts, torch.randint(3, 61, (9, LENGTH), generator=draw)], dim=1) * mask, mask


def measured(model: Any) -> tuple[Tensor, list[Tensor]]:
    """Return the log-probabilities of completions by TRL's call, and the gradient of each weight."""
    ids, mask = batch()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :WIDTH] = -100
    logps = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs[:, -LENGTH:]
    model.zero_grad()
    (logps * torch.linspace(-1, 1, 9, dtype=logps.dtype).unsqueeze(1)).sum().backward()
    nothing = torch.zeros(())
    return logps.detach(), [nothing if one.grad is None else one.grad.clone() for one in model.parameters()]


def sampled(model: Any) -> Tensor:
    """Return what a model samples."""
    ids, mask = (part[:, :WIDTH] for part in batch())
    torch.manual_seed(2)
    drawn: Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=True)
    return drawn


# --- what becomes of it -----------------------------------------------------------------------------------------------


def examine(kind: str) -> Row:
    """Return what is found of a kind: as it comes, without what it draws at random, and told to be causal."""
    try:
        model = with_head(tiny(kind))
    except Exception as error:
        return Row("not built", said(error))
    try:
        measured(model)
        sampled(model)
    except Exception as error:
        return Row("TRL's own pass fails", said(error))
    try:
        return asked(kind, rates(model.config))
    except Exception as error:
        return Row("WRONG", said(error))


def asked(kind: str, without: dict[str, float]) -> Row:
    """Return whether a kind shares, as it says and as it is measured."""
    why, changes = "", dict[str, Any]()
    for more in ({}, without, {"is_decoder": True}):
        changes |= more
        config = tiny(kind)
        for name, value in changes.items():
            setattr(config.get_text_config(), name, value)
        given = ", ".join(f"{name}={value}" for name, value in changes.items())
        found = obstacle(with_head(config))
        if found is None:
            apart = difference(config)
            return Row("WRONG" if apart else f"shares{' with settings' if given else ''}", apart or given)
        why = why if "is_decoder" in changes else found
    return Row("falls back", why)


def rates(config: Any) -> dict[str, float]:
    """Return the settings of a configuration that make a model draw at random, as zeros."""
    drawn = {name: value for name, value in vars(config.get_text_config()).items() if DRAWN.search(name)}
    return {name: 0.0 for name, value in drawn.items() if isinstance(value, int | float) and value > 0}


def difference(config: Any) -> str:
    """Return how far a pass that shares is from one that does not, where that is no rounding."""
    for dtype in (torch.float32, torch.float64):
        config._experts_implementation = "eager" if dtype == torch.float64 else config._experts_implementation
        model = with_head(config, dtype)
        (logps, gradients), drawn = measured(model), sampled(model)
        with shared(model, WIDTH):
            other, others = measured(model)
        with shared(model):
            drawn_too = sampled(model)
        largest = max(float(gradient.abs().max()) for gradient in gradients)
        pairs = zip(gradients, others, strict=True)
        apart = float((logps - other).abs().max()), max(float((a - b).abs().max()) for a, b in pairs) / max(largest, 1)
        if largest > 0.01 and max(apart) < NEAR and drawn.equal(drawn_too):
            return ""
    samples = "the same" if drawn.equal(drawn_too) else "other"
    return f"log-probabilities {apart[0]:.2g}, gradients {apart[1]:.2g} of {largest:.2g} apart, {samples} samples"


def said(error: Exception) -> str:
    """Return an error's type and words in one short line, without places in memory or on a disk."""
    words = " ".join(str(error).replace("|", "/").split())
    return f"{type(error).__name__}: {words[:97] + '...' if len(words) > 100 else words}"


# --- one process for each ---------------------------------------------------------------------------------------------


def in_processes(
    function: Callable[[str], R], names: Sequence[str], jobs: int, limit: float, lost: Callable[[str, str], R]
) -> Iterator[tuple[str, R]]:
    """Yield names and what a function returns of them, each in a process of its own; ``lost`` of what it died of, where
    it ends without or is not done in time."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(names), dict[Any, Any]()
    while waiting or running:
        while waiting and len(running) < jobs:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(function, waiting[0], sender))
            process.start()
            sender.close()
            running[receiver] = waiting.pop(0), process, time.monotonic() + limit
        done = wait([*running], timeout=1)
        for receiver, (name, process, end) in [*running.items()]:
            if receiver in done or time.monotonic() > end:
                found = _receive(receiver) if receiver in done else None
                process.kill()
                process.join()
                del running[receiver]
                late = "the process ended" if receiver in done else f"not done in {limit:.0f} seconds"
                yield name, lost(name, late) if found is None else found


def _send(function: Callable[[str], Any], name: str, sender: Any) -> None:
    torch.set_num_threads(1)
    sender.send(function(name))


def _receive(receiver: Any) -> Any:
    with contextlib.suppress(EOFError):
        return receiver.recv()
    return None


# --- the page ---------------------------------------------------------------------------------------------------------

RESULTS = {
    "WRONG": "each says that it shares and has other numbers, or fails with this package alone",
    "shares": "as they come",
    "shares with settings": "with those of the last column",
    "falls back": "they are trained with TRL's own pass",
    "TRL's own pass fails": "TRL's GRPOTrainer cannot train them, with this package or without",
    "not built": "not known, as no tiny model of random weights could be made here",
}


def page(rows: Sequence[Row]) -> str:
    """Return the page: how to ask, how many kinds there are of each result, and a line for each kind."""
    counts = Counter(row.result for row in rows)
    versions = {library.__name__: library.__version__.split("+")[0] for library in (transformers, trl, torch)}
    lines = [
        TINY["head"],
        TINY["about"].format(count=len(rows), **versions),
        *(f"- {counts[result]} **{result}**: {meaning}." for result, meaning in RESULTS.items() if counts[result]),
        "\n| kind | for example | result | why, or with what |\n| --- | --- | --- | --- |",
        *(f"| {row.kind} | {TINY['checkpoints'].get(row.kind, '')} | {row.result} | {row.why} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print a line per kind, and write the page where all kinds were tried."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=[*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES])
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rows = []
    for kind, row in in_processes(examine, options.kinds, options.jobs, LIMIT, lambda _, why: Row("WRONG", why)):
        rows.append(row._replace(kind=kind))
        print(f"{kind:28s} {row.result:20s} {row.why}", flush=True)
    order = [*RESULTS]
    rows.sort(key=lambda row: (order.index(row.result), row.why if row.result == "falls back" else "", row.kind))
    if len(rows) == len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        PAGE.write_text(page(rows), encoding="utf-8")
    print(", ".join(f"{count} {result}" for result, count in Counter(row.result for row in rows).items()))
    return 1 if any(row.result == "WRONG" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
