"""The embedded world: a starting policy and an entailment model, made from nothing in a few minutes.

Both are ordinary Hugging Face models saved in Hub format, so that every line that runs here also runs on Qwen2.5 and
roberta-large-mnli. The policy (Qwen2 architecture) learns tinyqa and tinymath by supervised learning, first from right
answers, then from a noisy corpus, which leaves room to learn; the entailment model learns from generated pairs.
Two choices make the budget suffice. Initial weights are drawn wider than the library's default (0.08 against 0.02),
which was made for wide models. And the queries and keys of the entailment model start equal, so that equal tokens
attend to one another from the first step, which is where comparing two answers begins.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from gcpo import paths
from gcpo.world.entailment import entailment_pair, make_entailment
from gcpo.world.policy import Settings, conversations, make_policy, policy_config, save, tokenizer_of

TINY = "tiny"  # the name of both models in parameter files
SCRATCH = "scratch"  # the name of an untrained policy that reads and writes any text


@dataclass(frozen=True)
class World:
    """The folders of the two models and their measured quality."""

    policy: Path
    entailment: Path
    quality: dict[str, Any]


def resolve(name: str, kind: str) -> str:
    """A model's name as given, or the folder of an embedded one: "tiny", or "scratch" for a policy.

    ``kind`` is "policy" or "entailment".
    """
    if name == SCRATCH and kind == "policy":
        return str(scratch_policy())
    return str(getattr(bootstrap(), kind)) if name == TINY else name


@functools.cache
def key(settings: Settings | None = None) -> str:
    """The hash that names a world: of its settings and of a sample of what the generators draw."""
    settings = settings or Settings()
    rng = random.Random(0)
    drawn = [conversations(rng, settings, clean) for clean in (True, False) for _ in range(4)]
    pairs = [entailment_pair(rng) for _ in range(100)]
    return hashlib.sha256(json.dumps([asdict(settings), drawn, pairs]).encode()).hexdigest()[:12]


@functools.cache
def bootstrap(settings: Settings | None = None, root: Path | None = None) -> World:
    """Make both models, or find them made; repeats on one machine agree bit for bit.

    Raises:
        RuntimeError: a model failed to train, or its quality is outside what the project relies on.
    """
    settings = settings or Settings()
    folder = (root or paths.WORLDS) / key(settings)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "quality.json").exists():
            _make(settings, folder)
    quality = json.loads((folder / "quality.json").read_text())
    return World(folder / "policy", folder / "entailment", quality)


def _make(settings: Settings, folder: Path) -> None:
    draft = folder.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    start = time.monotonic()
    print(f"Making the embedded policy and entailment model in {folder} (a few minutes, once) ...", flush=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    with torch.random.fork_rng(devices=[]):
        quality = {"policy": make_policy(settings, draft), "entailment": make_entailment(settings, draft)}
    torch.set_num_threads(threads)
    check_quality(quality)
    (draft / "quality.json").write_text(json.dumps(quality, indent=1))
    draft.rename(folder)
    print(f"Made in {time.monotonic() - start:.0f} s: {json.dumps(quality)}", flush=True)


def check_quality(quality: dict[str, Any]) -> None:
    """The figures every later result relies on: room to learn in both tasks, and a trustworthy entailment model.

    Raises:
        RuntimeError: a figure outside its bounds.
    """
    for task, figures in quality["policy"].items():
        if not 0.3 <= figures["accuracy"] <= 0.6:
            raise RuntimeError(
                f"The starting policy's accuracy on {task} is {figures['accuracy']:.3f}, not in [0.3, 0.6]."
            )
        if figures["zero_variance"] >= 0.5:
            raise RuntimeError(f"{figures['zero_variance']:.0%} of the groups on {task} have no reward variance.")
    if quality["entailment"]["accuracy"] < 0.9:
        raise RuntimeError(
            f"The entailment model's held-out accuracy is {quality['entailment']['accuracy']:.3f} < 0.9."
        )


@functools.cache
def scratch_policy(root: Path | None = None) -> Path:
    """The folder of an untrained policy of 30k parameters with a byte-level tokenizer and a chat template.

    It knows nothing, but takes any text: a real run on a real benchmark can be tried with it in seconds.
    """
    from transformers import Qwen2ForCausalLM

    folder = (root or paths.WORLDS) / SCRATCH
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "config.json").exists():
            tokens = tokenizer_of([])
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = Qwen2ForCausalLM(policy_config(tokens, hidden=32, layers=2, longest=8192, init=0.08))
            save(model, tokens, folder)
    return folder
