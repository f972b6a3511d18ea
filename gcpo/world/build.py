"""The embedded world: a starting policy and an entailment model, ready-made, or trained from nothing in minutes.

A seed draws all of a world: texts, weights and the order of training. Those of seeds 0 and 1, worlds A and B, are
committed and only copied.
Both models are ordinary Hugging Face models saved in Hub format, so that every line that runs here also runs on
Qwen2.5 and roberta-large-mnli. The policy (Qwen2 architecture) learns tinyqa and tinymath by supervised learning, first
from right answers, then from a corpus that is noisy and misunderstands some kinds of question, which leaves room to
learn; the entailment model learns from generated pairs. Policies of other sizes are made when first asked for.
Two choices make the budget suffice. Initial weights are drawn wider than the library's default (0.08 against 0.02),
which was made for wide models. And the queries and keys of the entailment model start equal, so that equal tokens
attend to one another from the first step, which is where comparing two answers begins.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics  # English text that is at hand with every Python
from typing import Any

import torch
from filelock import FileLock

from gcpo import io, paths
from gcpo.world.entailment import entailment_pair
from gcpo.world.policy import Settings, conversations, make_policy, save, tokenizer_of, untrained

TINY = "tiny"  # the name of both models in parameter files
SCRATCH = "scratch"  # the name of an untrained policy that reads and writes any text, a token for each byte
SEED = int(os.environ.get("GCPO_WORLD_SEED") or 0)  # of the world where none is named, as in notebooks to read
UNTRAINED = "untrained"  # another, of one layer, whose tokens are pieces of English words: for long prompts

# Policies by name: the default of about 1M parameters, about 0.3M and 3M, another architecture, and one that thinks.
POLICIES = {
    TINY: Settings(),
    "tiny-0.3m": Settings(hidden=64),
    "tiny-3m": Settings(hidden=208, layers=5),
    "tiny-llama": Settings(architecture="llama"),
    "tiny-think": Settings(think=True),
}

# Bounds of the starting policy on each task: room to learn beyond sharpening, and groups all incorrect or all alike.
BOUNDS = {"accuracy": (0.3, 0.6), "greedy": (0.0, 0.8), "none_right": (0.05, 0.25), "zero_variance": (0.02, 0.2)}


@dataclass(frozen=True)
class World:
    """The folders of the two models and their measured quality."""

    policy: Path
    entailment: Path
    quality: dict[str, Any]

    def __str__(self) -> str:
        """Say where the models are and how good, a line each."""
        right = [
            f"  policy on {task}: {figures['accuracy']:.0%} of sampled answers right, {figures['greedy']:.0%} of greedy"
            for task, figures in self.quality["policy"].items()
        ]
        share = f"{self.quality['entailment']['accuracy']:.1%} of held-out pairs right"
        return "\n".join([f"Embedded world: {self.policy.parent}", *right, f"  entailment model: {share}"])


def settings_of(name: str = TINY, seed: int = SEED) -> Settings:
    """Return the settings of a policy of :data:`POLICIES` in the world of a seed."""
    return replace(POLICIES[name], seed=seed)


def embedded(name: str, kind: str) -> bool:
    """Return True for the name of an embedded model; ``kind`` is "policy" or "entailment"."""
    return name == TINY or (kind == "policy" and (name in POLICIES or name in (SCRATCH, UNTRAINED)))


def resolve(name: str, kind: str, seed: int = SEED) -> str:
    """Return a model's name as given, or the folder of an embedded one in the world of a seed, made when first asked
    for."""
    if not embedded(name, kind):
        return name
    if name == SCRATCH:
        return str(scratch_policy())
    if name == TINY:
        return str(getattr(bootstrap(settings_of(seed=seed)), kind))
    made = folder(kind, name, seed)
    if name == UNTRAINED:
        build_once(made, lambda draft: _make_untrained(draft, [*topics.values()], layers=1, heads=(2, 1)))
    else:
        build_once(made.parent, lambda draft: _make(settings_of(name, seed), draft, name))
    return str(made)


def folder(kind: str, name: str = TINY, seed: int = SEED) -> Path:
    """Return the folder of an embedded model in the world of a seed, made or not."""
    return paths.WORLDS / (name if name in (SCRATCH, UNTRAINED) else f"{key(settings_of(name, seed))}/{kind}")


@functools.cache
def key(settings: Settings | None = None) -> str:
    """Return the hash that names a world: of its settings and of a sample of generated questions and pairs."""
    settings = settings or settings_of()
    rng = random.Random(0)
    drawn = [conversations(rng, settings, clean) for clean in (True, False) for _ in range(4)]
    pairs = [entailment_pair(rng) for _ in range(100)]
    return hashlib.sha256(json.dumps([asdict(settings), drawn, pairs]).encode()).hexdigest()[:12]


def bootstrap(settings: Settings | None = None, root: Path | None = None, *, from_scratch: bool = False) -> World:
    """Find both models made, else copy the ready-made ones of these settings, else train them.

    A folder that is incomplete, or of which a file is not what was written, is made again. Training repeats bit for
    bit on one machine; on another kind of processor it makes another world, since it magnifies the last bit of a sum.
    ``from_scratch`` trains in place of what is there.

    Raises:
        RuntimeError: a model failed to train, or its quality is outside what the project relies on.
    """
    settings = settings or settings_of()
    made = (root or paths.WORLDS) / key(settings)
    ready = next((at / made.name for at in paths.READY if (at / made.name).exists()), None)
    if from_scratch or ready is None:
        build_once(made, lambda draft: _make(settings, draft), anew=from_scratch)
    else:
        build_once(made, lambda draft: _copy(ready, draft))
    return World(made / "policy", made / "entailment", json.loads((made / "quality.json").read_text()))


def restore_reference(reference: Path) -> World:
    """Copy the reference's world in place of one made here: runs to stand beside the reference's start from it.

    ``reference`` is a profile's folder there.

    Raises:
        FileNotFoundError: the reference has no world of these settings, or not a whole one.
    """
    made = folder("policy").parent
    build_once(made, lambda draft: _copy(reference / "world" / made.name, draft), anew=True)
    return bootstrap()


def _copy(kept: Path, draft: Path) -> None:
    if why := io.broken(kept):
        raise FileNotFoundError(f"{why}: there is no world to take. Train one: python -m gcpo world --from-scratch")
    shutil.copytree(kept, draft, dirs_exist_ok=True)


def build_once(made: Path, make: Callable[[Path], None], *, anew: bool = False) -> None:
    """Make a folder once: a whole, unchanged one is left as it is unless asked for ``anew``, and other processes wait
    for the first."""
    made.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(made.with_suffix(".lock")):
        if (why := io.broken(made)) or anew:
            if why and made.exists():
                print(f"{why}: it is made again.", flush=True)
            with io.replacing(made) as draft:
                draft.mkdir()
                make(draft)
                io.seal(draft)


def _make(settings: Settings, draft: Path, name: str = TINY) -> None:
    """Make the policy and, of the default world, the entailment model, in a process of its own: two cores make two."""
    start = time.monotonic()
    what = "embedded policy and entailment model" if name == TINY else f"embedded policy {name}"
    print(f"Making the {what} in {draft.parent} (three to six minutes on two cores, once) ...", flush=True)
    if name == TINY:
        with entailment_apart(settings, draft) as entailment:
            quality = {"policy": _policy(settings, draft), "entailment": entailment()}
    else:
        quality = {"policy": _policy(settings, draft)}
    (draft / "quality.json").write_text(json.dumps(quality, indent=1))
    print(f"Made in {time.monotonic() - start:.0f} s.", flush=True)
    if name == TINY:  # other policies have no bounds
        check_quality(quality)


def _policy(settings: Settings, draft: Path) -> dict[str, Any]:
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
    code = "import sys; from gcpo.world.entailment import main; main(*sys.argv[1:])"
    command = [sys.executable, "-c", code, json.dumps(asdict(settings)), str(draft), str(os.getpid())]
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


def scratch_policy(root: Path | None = None) -> Path:
    """Return the folder of an untrained policy of 30k parameters with a byte-level tokenizer and a chat template.

    It knows nothing, but takes any text: a real run on a real benchmark can be tried with it in seconds.
    """
    made = (root or paths.WORLDS) / SCRATCH
    build_once(made, lambda draft: _make_untrained(draft, [], layers=2))
    return made


def _make_untrained(draft: Path, corpus: list[str], **shape: Any) -> None:
    """Save a policy of random weights; its tokens are merged from bytes as in the corpus, few because TRL computes the
    logits of prompts too."""
    tokens = tokenizer_of(corpus, 1500)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = untrained(tokens, hidden=32, longest=8192, init=0.08, **shape)
    save(model, tokens, draft)
