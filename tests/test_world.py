"""The embedded world: how it is found and copied, and how it is made: determinism, promised quality."""

import importlib
import json
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gcpo import io, paths, world
from gcpo.errors import UserError
from gcpo.tasks.sampling import load_policy

sys.path.append(str(paths.READY))  # where worlds/make.py finds the files beside it
make, policies, entailments = map(importlib.import_module, ("make", "policy", "entailment"))

# --- found and copied -----------------------------------------------------------------------------------------------


@pytest.fixture
def committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of committed worlds with stand-ins for the models of world A, and of the policy that reads bytes."""
    ready = tmp_path / "worlds"
    for place in (f"{world.key(seed=0)}/policy", f"{world.key(seed=0)}/entailment", "scratch"):
        (ready / place).mkdir(parents=True)
        (ready / place / "model.safetensors").write_text(f"committed {place}")
    (ready / world.key(seed=0) / "quality.json").write_text("{}")
    io.seal(ready / world.key(seed=0)), io.seal(ready / "scratch")
    monkeypatch.setattr(paths, "READY", ready)
    monkeypatch.setattr(paths, "WORLDS", tmp_path / "here")
    return ready


def test_embedded_models_are_found_by_name_and_copied_when_first_asked_for(committed: Path) -> None:
    assert world.embedded("scratch", "policy") and not world.embedded("scratch", "entailment")
    assert world.resolve("a/b", "policy") == "a/b"
    for name, kind in (("tiny", "policy"), ("tiny", "entailment"), ("scratch", "policy")):
        where = world.folder(kind, name, 0)
        shutil.rmtree(paths.WORLDS, ignore_errors=True)
        assert world.resolve(name, kind, 0) == str(where)
        assert (where / "model.safetensors").read_text().startswith("committed")
    assert world.folder("policy", "scratch", 7) == world.folder("policy", "scratch", 0)
    others = {world.folder("policy", name, seed) for name in world.POLICIES for seed in (0, 1, 2)}
    assert len(others) == 3 * len(world.POLICIES)


def test_what_was_trained_here_stays_unless_the_committed_world_is_asked_for(committed: Path) -> None:
    made = world.bootstrap(0)
    assert made.policy == world.folder("policy", seed=0) and io.broken(made.policy.parent) is None
    (made.policy / "model.safetensors").write_text("trained here")
    io.seal(made.policy.parent)
    assert (world.bootstrap(0).policy / "model.safetensors").read_text() == "trained here"
    assert (world.bootstrap(0, anew=True).policy / "model.safetensors").read_text().startswith("committed")


@pytest.mark.parametrize("fault", ["missing", "edited"])
def test_a_world_that_is_not_whole_is_copied_again(committed: Path, fault: str, capsys: Any) -> None:
    weights = world.bootstrap(0).entailment / "model.safetensors"
    weights.unlink() if fault == "missing" else weights.write_text("another")
    assert io.broken(world.bootstrap(0).entailment.parent) is None
    assert str(weights) in capsys.readouterr().out


@pytest.mark.parametrize(("name", "seed"), [("tiny", 2), ("tiny-llama", 0)])
def test_a_model_that_is_not_here_is_an_error_that_says_how_to_train_it(committed: Path, name: str, seed: int) -> None:
    with pytest.raises(UserError, match=re.escape(f"make.py --policy {name} --seed {seed}")):
        world.resolve(name, "policy", seed)


def test_the_command_copies_a_world_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    monkeypatch.setattr(paths, "WORLDS", tmp_path)
    said = call("world", "--seed", "1").out
    assert f"{tmp_path / world.key(seed=1)}\n" in said and "world_seed 1" in said
    assert call("world", "--seed", "2", status=2).err.count("\n") == 1


@pytest.mark.parametrize("seed", [0, 1])
def test_both_worlds_are_committed_as_good_as_promised_and_as_their_settings_are_today(seed: int) -> None:
    made = paths.READY / world.key(seed=seed)
    assert io.broken(made) is None
    make.check_quality(json.loads((made / "quality.json").read_text()))
    assert {name: keys[seed] for name, keys in world.POLICIES.items()} == {
        name: make.key(make.settings_of(name, seed)) for name in make.POLICIES
    }


# --- made -----------------------------------------------------------------------------------------------------------

SMALL = policies.Settings(corpus=60, policy_steps=2, qa_batch=2, math_batch=2, entailment_steps=2, quality_queries=1)


def test_training_repeats_bit_for_bit_whatever_was_drawn_before(tmp_path: Path) -> None:
    both = tmp_path / "one", tmp_path / "other"
    for seed, draft in enumerate(both):
        torch.manual_seed(seed)
        policies.make_policy(SMALL, draft)
        entailments.make_entailment(SMALL, draft)
    for part in ("policy", "entailment"):
        weights = [(folder / part / "model.safetensors").read_bytes() for folder in both]
        assert weights[0] == weights[1]


@pytest.mark.parametrize("name", world.UNTRAINED)
def test_untrained_policies_are_made_as_committed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "WORLDS", tmp_path)
    made = make.make(name, 0)
    assert (tmp_path / name) == made and io.broken(made) is None
    if name == "scratch":  # the other's tokens are of texts that come with this Python
        assert io.hashes(made) == io.hashes(paths.READY / name)
    _, tokens = load_policy(str(paths.READY / name))
    text = "Wer hat's gesagt? — 東京 ✓"
    assert tokens.decode(tokens(text).input_ids) == text


SIGNS = {"adding": "+", "taking": "-", "times": "*"}


def test_entailment_pairs_are_labelled_by_meaning() -> None:
    rng = random.Random(0)
    pairs = [entailments.entailment_pair(rng) for _ in range(3000)]
    assert {kind for *_, kind in pairs} == set(entailments.KINDS)
    for premise, hypothesis, kind in ((p, h, kind) for p, h, kind in pairs if "boxed" in p):
        result = [text.split("{")[1] for text in (premise, hypothesis)]
        used = [re.sub("adding|taking|times", lambda word: SIGNS[word[0]], text) for text in (premise, hypothesis)]
        same_steps = re.findall(r"[-+*]", used[0]) == re.findall(r"[-+*]", used[1])
        assert kind == ("other result" if result[0] != result[1] else "same steps" if same_steps else "other steps")
    assert not [p for p in pairs if p[0] == p[1] and entailments.KINDS[p[2]][0] != "entailment"]
    held_out, others = (entailments._pairs(rng, size, held_out=held) for size, held in ((200, True), (2000, False)))
    assert not {pair[:2] for pair in held_out} & {pair[:2] for pair in others}
