"""The embedded world: its tokenizer, its determinism, and the quality that every result relies on."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from gcpo import io, paths, world
from gcpo.cli import main
from gcpo.semantics import Entailment
from gcpo.tasks import tinymath, tinyqa
from gcpo.tasks.sampling import load_policy
from gcpo.world.build import check_quality
from gcpo.world.entailment import KINDS, LABELS, _pairs, entailment_pair, make_entailment
from gcpo.world.policy import SEP, make_policy, tokenizer, untrained

bootstrapping = importlib.import_module("gcpo.world.build")  # the module: the package gives the function

SMALL = world.Settings(corpus=60, policy_steps=2, qa_batch=2, math_batch=2, entailment_steps=2, quality_queries=1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draft = tmp_path_factory.mktemp("small")
    make_policy(SMALL, draft)
    make_entailment(SMALL, draft)
    return draft


TEXTS = [
    "<|user|>Ada keeps a black cat . Ada keeps what ?<|end|><|assistant|>",
    "<think> adding five gives twelve </think> \\boxed{12}",
    "naïve façade, 3.14 ≠ π — and\nnew lines",
]


@pytest.mark.parametrize("text", TEXTS)
def test_saved_tokenizer_gives_the_same_ids_when_loaded_by_auto_tokenizer(small: Path, text: str) -> None:
    made, loaded = tokenizer(SMALL), AutoTokenizer.from_pretrained(small / "policy")
    assert made(text).input_ids == loaded(text).input_ids
    assert loaded.decode(loaded(text).input_ids) == text
    assert (made.eos_token_id, made.pad_token_id) == (loaded.eos_token_id, loaded.pad_token_id)


def test_numbers_and_attributes_are_single_tokens(small: Path) -> None:
    tokens = tokenizer(world.Settings(corpus=800))
    words = [*tinymath.NUMBERS, *(word for r in tinyqa.RELATIONS.values() for word, _ in r.first)]
    assert [w for w in words if len(tokens(f" {w}").input_ids) != 1] == []


def test_chat_template_and_entailment_pairs_survive_saving(small: Path) -> None:
    tokens = AutoTokenizer.from_pretrained(small / "policy")
    chat = tokens.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|user|>Hi<|end|><|assistant|>"
    pair = AutoTokenizer.from_pretrained(small / "entailment")("a cat", "a dog")
    assert sorted(set(pair["token_type_ids"])) == [0, 1]
    assert pair["input_ids"].count(tokens.convert_tokens_to_ids(SEP)) == 3
    first = AutoTokenizer.from_pretrained(small / "entailment")("cat dog", "dog cat")["input_ids"][1:-1]
    middle = first.index(tokens.convert_tokens_to_ids(SEP))
    assert first[:middle] != first[middle + 1 :] and sorted(first[:middle]) == sorted(first[middle + 1 :])


def test_repeating_the_bootstrap_gives_the_same_weights_bit_for_bit(small: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)  # whatever the state of the generator was before
    make_policy(SMALL, tmp_path)
    make_entailment(SMALL, tmp_path)
    for part in ("policy", "entailment"):
        weights = [(folder / part / "model.safetensors").read_bytes() for folder in (small, tmp_path)]
        assert weights[0] == weights[1]


def test_the_name_of_a_world_depends_on_its_settings() -> None:
    assert world.key(SMALL) == world.key(SMALL)
    assert world.key(SMALL) != world.key(dataclasses.replace(SMALL, seed=1))


def good() -> dict[str, Any]:
    """Quality in the middle of what is promised."""
    figures = {"accuracy": 0.45, "greedy": 0.6, "none_right": 0.1, "zero_variance": 0.1}
    kinds = dict.fromkeys(KINDS, 0.95)
    return {
        "policy": {"tinyqa": dict(figures), "tinymath": dict(figures)},
        "entailment": {"accuracy": 0.994, "kinds": kinds},
    }


@pytest.mark.parametrize(
    ("part", "of", "figure", "value", "message"),
    [
        ("policy", "tinyqa", "accuracy", 0.29, "accuracy on tinyqa is 0.290, not in [0.3, 0.6]"),
        ("policy", "tinymath", "accuracy", 0.61, "accuracy on tinymath is 0.610"),
        ("policy", "tinymath", "greedy", 0.81, "greedy on tinymath is 0.810, not in [0.0, 0.8]"),
        ("policy", "tinyqa", "none_right", 0.04, "none_right on tinyqa is 0.040, not in [0.05, 0.25]"),
        ("policy", "tinyqa", "none_right", 0.26, "none_right on tinyqa is 0.260"),
        ("policy", "tinyqa", "zero_variance", 0.01, "zero_variance on tinyqa is 0.010, not in [0.02, 0.2]"),
        ("policy", "tinymath", "zero_variance", 0.21, "zero_variance on tinymath is 0.210"),
        *(("entailment", "kinds", kind, 0.89, f"accuracy on '{kind}' is 0.890 < 0.9") for kind in KINDS),
    ],
)
def test_quality_outside_its_bounds_is_an_error(part: str, of: str, figure: str, value: float, message: str) -> None:
    quality = good()
    check_quality(quality)
    quality[part][of][figure] = value
    with pytest.raises(RuntimeError, match=re.escape(message)):
        check_quality(quality)


def test_entailment_pairs_are_labelled_by_meaning() -> None:
    rng = random.Random(0)
    pairs = [entailment_pair(rng) for _ in range(3000)]
    assert {label for label, _ in KINDS.values()} == set(LABELS)
    assert {kind for *_, kind in pairs} == set(KINDS)
    worked = [(p, h, kind) for p, h, kind in pairs if "boxed" in p]
    for premise, hypothesis, kind in worked:
        result = [text.split("{")[1] for text in (premise, hypothesis)]
        used = [re.sub("adding|taking|times", lambda word: SIGNS[word[0]], text) for text in (premise, hypothesis)]
        same_steps = re.findall(r"[-+*]", used[0]) == re.findall(r"[-+*]", used[1])
        assert kind == ("other result" if result[0] != result[1] else "same steps" if same_steps else "other steps")
    assert {kind for *_, kind in worked} == {"same steps", "other steps", "other result"}
    assert not [p for p in pairs if p[0] == p[1] and KINDS[p[2]][0] != "entailment"]
    held_out = {(p, h) for p, h, _ in _pairs(rng, 200, held_out=True)}
    assert not held_out & {(p, h) for p, h, _ in _pairs(rng, 2000, held_out=False)}


SIGNS = {"adding": "+", "taking": "-", "times": "*"}


def test_scratch_policy_takes_any_text(scratch: Path) -> None:
    model, tokens = load_policy(str(scratch))
    text = "Wer hat's gesagt? — 東京 ✓"
    assert tokens.decode(tokens(text).input_ids) == text
    assert len(tokens) < 300 and sum(p.numel() for p in model.parameters()) < 100_000


# --- folders that are kept ------------------------------------------------------------------------------------------


@pytest.fixture
def making(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Names of what was made, in order, by stand-ins for the minutes of training."""
    made: list[str] = []

    def stand_in(kind: str, settings: world.Settings, draft: Path) -> dict[str, Any]:
        made.append(kind)
        (draft / kind).mkdir()
        (draft / kind / "model.safetensors").write_text(f"{kind} of {settings}")
        return good()[kind]

    @contextlib.contextmanager
    def apart(settings: world.Settings, draft: Path) -> Iterator[Callable[[], Any]]:
        yield lambda: stand_in("entailment", settings, draft)

    monkeypatch.setattr(paths, "OUTPUTS", tmp_path / "outputs")
    monkeypatch.setattr(paths, "READY", ())
    monkeypatch.setattr(bootstrapping, "make_policy", lambda *given: stand_in("policy", *given))
    monkeypatch.setattr(bootstrapping, "entailment_apart", apart)
    return made


def test_a_world_is_made_once_and_found_in_its_folder(making: list[str], tmp_path: Path) -> None:
    first, again = world.bootstrap(SMALL, tmp_path), world.bootstrap(SMALL, tmp_path)
    assert first == again and making == ["policy", "entailment"]
    assert first.policy == tmp_path / world.key(SMALL) / "policy" and first.quality == good()


def weights(made: world.World) -> str:
    return (made.policy / "model.safetensors").read_text()


def test_a_ready_made_world_is_copied_and_trained_only_on_request(
    making: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = world.bootstrap(SMALL, tmp_path / "ready")
    (ready.policy / "model.safetensors").write_text("ready-made")
    io.seal(ready.policy.parent)
    monkeypatch.setattr(paths, "READY", (tmp_path / "ready",))
    making.clear()
    copied = world.bootstrap(SMALL, tmp_path / "here")
    assert making == [] and weights(copied) == "ready-made" and io.broken(copied.policy.parent) is None
    (copied.policy / "model.safetensors").write_text("edited")
    assert weights(world.bootstrap(SMALL, tmp_path / "here")) == "ready-made" and making == []
    assert weights(world.bootstrap(SMALL, tmp_path / "here", from_scratch=True)) != "ready-made"
    assert making == ["policy", "entailment"]
    assert weights(world.bootstrap(SMALL, tmp_path / "here")) != "ready-made"  # which stays
    world.bootstrap(dataclasses.replace(SMALL, seed=1), tmp_path / "here")  # of which there is no ready-made one
    assert len(making) == 4
    (ready.policy / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is missing: .* gcpo world --from-scratch"):
        world.bootstrap(SMALL, tmp_path / "elsewhere")


@pytest.mark.parametrize(("seed", "ready"), enumerate(paths.READY))
def test_both_worlds_are_ready_made(seed: int, ready: Path) -> None:
    made = ready / world.key(world.settings_of(seed=seed))
    assert io.broken(made) is None
    check_quality(json.loads((made / "quality.json").read_text()))


def test_a_seed_draws_another_world_in_another_folder(
    making: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "WORLDS", tmp_path)
    for kind, name in (("policy", "tiny"), ("entailment", "tiny"), ("policy", "tiny-llama")):
        places = {world.resolve(name, kind, seed) for seed in (0, 1)}
        assert places == {str(world.folder(kind, name, seed)) for seed in (0, 1)} and len(places) == 2
        for seed in (0, 1):
            assert f"seed={seed}," in Path(world.resolve(name, kind, seed), "model.safetensors").read_text()
    assert making == ["policy", "entailment"] * 2 + ["policy"] * 2
    assert world.resolve("scratch", "policy", 1) == world.resolve("scratch", "policy")


def test_the_command_puts_a_world_in_place_and_says_how_runs_ask_for_it(
    making: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paths, "WORLDS", tmp_path)
    assert main(["world", "--seed", "1"]) == 0
    said = capsys.readouterr().out
    assert str(tmp_path / world.key(world.Settings(seed=1))) in said
    assert said.splitlines()[-1].startswith("Runs start from it with -p world_seed 1")
    assert main(["world", "--reference", "--seed", "1"]) == 2
    assert "leave --from-scratch and --seed out" in capsys.readouterr().err


def test_a_world_says_in_a_line_each_how_good_its_models_are(making: list[str], tmp_path: Path) -> None:
    assert str(world.bootstrap(SMALL, tmp_path)).splitlines() == [
        f"Embedded world: {tmp_path / world.key(SMALL)}",
        "  policy on tinyqa: 45% of sampled answers right, 60% of greedy",
        "  policy on tinymath: 45% of sampled answers right, 60% of greedy",
        "  entailment model: 99.4% of held-out pairs right",
    ]


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "half made": (lambda folder: shutil.rmtree(folder / "entailment"), "model.safetensors is missing"),
    "weights edited": (
        lambda folder: (folder / "policy" / "model.safetensors").write_text("another policy"),
        "policy/model.safetensors is not what was written",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_world_that_is_not_whole_is_made_again(
    fault: str, making: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = world.bootstrap(SMALL, tmp_path)
    wanted = io.hashes(made.policy.parent)
    damage, message = FAULTS[fault]
    damage(made.policy.parent)
    capsys.readouterr()
    assert world.bootstrap(SMALL, tmp_path) == made
    assert io.hashes(made.policy.parent) == wanted and len(making) == 4
    assert message in capsys.readouterr().out.splitlines()[0]


def test_a_world_cut_short_leaves_nothing_that_looks_whole(
    making: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(settings: world.Settings, draft: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bootstrapping, "make_policy", killed)
        with pytest.raises(KeyboardInterrupt):
            world.bootstrap(SMALL, tmp_path)
    assert not (tmp_path / world.key(SMALL)).exists()
    assert world.bootstrap(SMALL, tmp_path).entailment.exists()


def test_where_an_embedded_model_will_be_is_known_before_it_is_made(
    making: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "WORLDS", tmp_path)
    assert not world.folder("policy").exists()
    made = world.bootstrap()
    assert (made.policy, made.entailment) == (world.folder("policy"), world.folder("entailment"))
    assert world.folder("policy", world.SCRATCH) == world.scratch_policy()


def test_a_policy_of_another_size_is_made_when_first_asked_for(
    making: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "WORLDS", tmp_path)
    names = [name for name in world.POLICIES if name != world.TINY]
    assert len({world.folder("policy", name) for name in world.POLICIES}) == len(world.POLICIES)
    for name in names:
        assert world.embedded(name, "policy") and not world.embedded(name, "entailment")
        assert world.resolve(name, "policy") == world.resolve(name, "policy") == str(world.folder("policy", name))
    assert making == ["policy"] * len(names)


def test_an_entailment_model_that_cannot_be_made_is_an_error_and_ends_with_the_bootstrap(tmp_path: Path) -> None:
    broken = dataclasses.replace(SMALL, entailment_hidden=-1)
    with (
        bootstrapping.entailment_apart(broken, tmp_path) as finish,
        pytest.raises(RuntimeError, match="what its process"),
    ):
        finish()
    endless = dataclasses.replace(SMALL, entailment_steps=10**6)
    with pytest.raises(KeyboardInterrupt), bootstrapping.entailment_apart(endless, tmp_path):
        raise KeyboardInterrupt  # which the process does not outlive: leaving the block waits for it


@pytest.mark.parametrize(("name", "millions"), [("tiny-0.3m", 0.3), ("tiny", 1), ("tiny-3m", 3), ("tiny-llama", 1)])
def test_policies_have_the_size_of_their_name(name: str, millions: float) -> None:
    settings = dataclasses.replace(world.POLICIES[name], corpus=800)
    shape = {field: getattr(settings, field) for field in ("architecture", "hidden", "layers", "init")}
    model = untrained(tokenizer(settings), longest=512, **shape)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.2)
    assert model.config.model_type == ("llama" if "llama" in name else "qwen2")


@pytest.mark.slow
def test_bootstrapped_models_keep_their_promises() -> None:
    made = world.bootstrap()
    check_quality(made.quality)
    entails = Entailment(str(made.entailment))
    pairs = entails.pairwise(["a black cat", "a cat that is black", "a grey cat", "a hotel nurse"])
    assert pairs[0, 1].argmax() == 0 and pairs[1, 0].argmax() == 0  # paraphrases entail one another
    assert pairs[0, 2].argmax() == 2  # a near miss contradicts
    assert pairs[0, 3].argmax() == 1  # another relation is neutral
    adding, doubling, wrong = (f"{steps} . So \\boxed{{{n}}}" for steps, n in SOLUTIONS)
    solved = entails.pairwise(
        [adding, "adding two gives four , adding three gives seven . So \\boxed{7}", doubling, wrong]
    )
    assert [solved[0, other].argmax().item() for other in (1, 2, 3)] == [0, 1, 2]


SOLUTIONS = (
    ("two + two = four . four + three = seven", 7),
    ("two * two = four . four + three = seven", 7),
    ("two + two = four . four - three = one", 1),
)
