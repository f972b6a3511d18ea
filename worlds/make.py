"""Trains embedded worlds and policies of other sizes: ``python worlds/make.py [--policy NAME ...] [--seed N]``.

A seed draws all of a world: texts, weights and the order of training. The policy (Qwen2 architecture) learns tinyqa and
tinymath by supervised learning, first from right answers, then from a corpus that is noisy and misunderstands some
kinds of question, which leaves room to learn; the entailment model learns from generated pairs. They are put where runs
look for them, outputs/world. Training repeats bit for bit on one machine; on another kind of processor it makes another
world, since it magnifies the last bit of a sum: therefore worlds A and B, of seeds 0 and 1, are committed beside this
file, and the policy that thinks, which a replay needs, and two that know nothing.
Two choices make the budget suffice. Initial weights are drawn wider than the library's default (0.08 against 0.02),
which was made for wide models. And the queries and keys of the entailment model start equal, so that equal tokens
attend to one another from the first step, which is where comparing two answers begins.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from pydoc_data.topics import topics  # English text that is at hand with every Python
from typing import Any

import torch
from entailment import entailment_pair
from filelock import FileLock
from policy import Settings, conversations, make_policy, save, tokenizer_of, untrained

from gcpo import io, world

# Policies by name: the default of about 1M parameters, about 0.3M and 3M, another architecture, and one that thinks.
POLICIES = {
    "tiny": Settings(),
    "tiny-0.3m": Settings(hidden=64),
    "tiny-3m": Settings(hidden=208, layers=5),
    "tiny-llama": Settings(architecture="llama"),
    "tiny-think": Settings(think=True),
}

# Bounds of the starting policy on each task: room to learn beyond sharpening, and groups all incorrect or all alike.
BOUNDS = {"accuracy": (0.3, 0.6), "greedy": (0.0, 0.8), "none_right": (0.05, 0.25), "zero_variance": (0.02, 0.2)}


def settings_of(name: str = world.TINY, seed: int = 0) -> Settings:
    """Return the settings of a policy of :data:`POLICIES` in the world of a seed."""
    return replace(POLICIES[name], seed=seed)


@functools.cache
def key(settings: Settings) -> str:
    """Return the hash that names a world: of its settings and of a sample of generated questions and pairs."""
    rng = random.Random(0)
    drawn = [conversations(rng, settings, clean) for clean in (True, False) for _ in range(4)]
    pairs = [entailment_pair(rng) for _ in range(100)]
    return hashlib.sha256(json.dumps([asdict(settings), drawn, pairs]).encode()).hexdigest()[:12]


def make(name: str, seed: int, *, anew: bool = False) -> Path:
    """Return the folder of a policy, and of the entailment model beside the default one: a whole one is left as it is
    unless asked for ``anew``, and other processes wait for the first.

    Raises:
        RuntimeError: a model failed to train, or its quality is outside what the project relies on; or the texts of a
            committed world have become others.
    """
    made = world.folder("policy", name, seed)
    if name in world.POLICIES:
        made = made.parent
        if seed < 2 and (now := key(settings_of(name, seed))) != made.name:
            raise RuntimeError(f"The texts or settings of {name} have changed since the references: {now}, {made.name}")
    made.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(made.with_name(f"{made.name}.lock")):
        if anew or io.broken(made):
            with io.replacing(made) as draft:
                draft.mkdir()
                if name == "scratch":
                    make_untrained(draft, [], layers=2)
                elif name == "untrained":
                    make_untrained(draft, [*topics.values()], layers=1, heads=(2, 1))
                else:
                    make_trained(settings_of(name, seed), draft, name)
                io.seal(draft)
    return made


def make_trained(settings: Settings, draft: Path, name: str = world.TINY) -> None:
    """Make the policy and, of the default world, the entailment model, in a process of its own: two cores make two."""
    start = time.monotonic()
    print(f"Making {name} of seed {settings.seed} (three to six minutes on two cores) ...", flush=True)
    if name == world.TINY:
        with entailment_apart(settings, draft) as entailment:
            quality = {"policy": policy_quality(settings, draft), "entailment": entailment()}
    else:
        quality = {"policy": policy_quality(settings, draft)}
    (draft / "quality.json").write_text(json.dumps(quality, indent=1))
    print(f"Made in {time.monotonic() - start:.0f} s.", flush=True)
    if name == world.TINY:  # other policies have no bounds
        check_quality(quality)


def policy_quality(settings: Settings, draft: Path) -> dict[str, Any]:
    """Make the policy; return its quality."""
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    with torch.random.fork_rng(devices=[]):
        quality = make_policy(settings, draft)
    torch.set_num_threads(threads)
    return quality


@contextlib.contextmanager
def entailment_apart(settings: Settings, draft: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """Make the entailment model in a process that ends with this one; yield a function that waits for its quality.

    Raises:
        RuntimeError: it could not be made.
    """
    script = Path(__file__).with_name("entailment.py")
    command = [sys.executable, str(script), json.dumps(asdict(settings)), str(draft), str(os.getpid())]
    with subprocess.Popen(command) as process:

        def finish() -> dict[str, Any]:
            if process.wait():
                raise RuntimeError("The entailment model could not be made: what its process printed says why.")
            made = draft / "entailment.json"
            quality = json.loads(made.read_text())
            made.unlink()
            return quality

        try:
            yield finish
        except BaseException:
            process.kill()
            raise


def check_quality(quality: dict[str, Any]) -> None:
    """Check :data:`BOUNDS` of the starting policy, and that the entailment model classifies nine of ten pairs of each
    kind correctly.

    Raises:
        RuntimeError: a figure outside its bounds.
    """
    for task, figures in quality["policy"].items():
        for name, (low, high) in BOUNDS.items():
            if not low <= figures[name] <= high:
                raise RuntimeError(
                    f"The starting policy's {name} on {task} is {figures[name]:.3f}, not in [{low}, {high}]."
                )
    for kind, accuracy in quality["entailment"]["kinds"].items():
        if accuracy < 0.9:
            raise RuntimeError(f"The entailment model's held-out accuracy on {kind!r} is {accuracy:.3f} < 0.9.")


def make_untrained(draft: Path, corpus: list[str], **shape: Any) -> None:
    """Save a policy of random weights, 30k parameters; its tokens are merged from bytes as in the corpus, few because
    TRL computes the logits of prompts too."""
    tokens = tokenizer_of(corpus, 1500)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = untrained(tokens, hidden=32, longest=8192, init=0.08, **shape)
    save(model, tokens, draft)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", nargs="+", default=[world.TINY], choices=[*world.POLICIES, *world.UNTRAINED])
    parser.add_argument("--seed", type=int, default=0, help="that draws all of it; runs ask for it by world_seed")
    parser.add_argument("--anew", action="store_true", help="train it in place of what is there")
    given = parser.parse_args()
    for name in given.policy:
        print(make(name, given.seed, anew=given.anew))
