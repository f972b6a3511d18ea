"""Scripts as TRL's documentation has them, turned into ours by two names, on a tiny policy with rewards of 0 and 1."""

import importlib
import json
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from helpers import G, assert_close, first_letter, letter, settings, text_of, vowel_counts
from transformers import TrainerCallback
from trl import GRPOConfig, TrlParser
from trl.rewards import think_format_reward

import gcpo
from gcpo import GCPOConfig, GCPOTrainer
from gcpo.methods import METHODS
from gcpo.semantics import Entailment

Make = Callable[..., GCPOTrainer]

pytestmark = pytest.mark.usefixtures("frozen")
MEANING: dict[str, Any] = {"embedder": vowel_counts, "entailment": Entailment(first_letter)}


def vowels(completions: list[Any], **_: Any) -> list[float]:
    """1 for a text that hashes to a vowel."""
    return [float(letter(text_of(completion)) in ("a", "e")) for completion in completions]


vowels.reward_range = (0.0, 1.0)  # type: ignore[attr-defined]


def questions() -> Dataset:
    return Dataset.from_list([{"prompt": [{"role": "user", "content": f"What is {n}?"}]} for n in range(1, 7)])


# --- the scripts ----------------------------------------------------------------------------------------------------


def quick_start(model: str, folder: Path) -> GCPOTrainer:
    """The first example of TRL's page on GRPO."""
    args = GCPOConfig(**settings(folder))
    return GCPOTrainer(model, vowels, args, train_dataset=questions(), **MEANING)


def sequence_ratios(model: str, folder: Path) -> GCPOTrainer:
    """An example script: settings from a command line, ratios of sequences, an evaluation set and two rewards."""
    lines = [f"--{name}={value}" for name, value in settings(folder).items()]
    lines += ["--importance_sampling_level=sequence", "--steps_per_generation=2", "--per_device_eval_batch_size=4"]
    lines += ["--reward_weights", "1.0", "0.5", "--method=rd_only", "--alpha=0.6"]
    (args,) = TrlParser((GCPOConfig,)).parse_args_and_config(lines)
    return GCPOTrainer(
        model=model,
        args=args,
        reward_funcs=[vowels, think_format_reward],
        train_dataset=questions(),
        eval_dataset=questions(),
        **MEANING,
    )


@dataclass
class ScriptConfig(GCPOConfig):
    """A configuration of the user's own."""

    benchmarks: list[str] = field(default_factory=list)


def own_config_and_callbacks(model: str, folder: Path) -> GCPOTrainer:
    """A recipe: a subclass of the config, read from a file, and callbacks."""
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({**settings(folder), "benchmarks": ["one"], "method": "gcpo_cd"}))
    (args,) = TrlParser((ScriptConfig,)).parse_args_and_config(["--config", str(path)])
    assert args.benchmarks == ["one"]
    return GCPOTrainer(model, vowels, args, questions(), callbacks=[TrainerCallback()], **MEANING)


@pytest.mark.parametrize("script", [quick_start, sequence_ratios, own_config_and_callbacks])
def test_a_script_of_trls_trains_by_two_names_with_the_formulas_rd(script: Make, scratch: Path, tmp_path: Path) -> None:
    """RD = 4 p (1 - p) for rewards of 0 and 1, of p right ones among an even number."""
    trainer = script(str(scratch), tmp_path)
    assert trainer.collector.scores.range == ((0, 1.5) if script is sequence_ratios else (0, 1))
    assert trainer.train().global_step == trainer.args.max_steps
    rewards = torch.tensor([list(column) for column in trainer._logs["rewards"].values()])
    summed = (rewards * trainer.reward_weights.unsqueeze(1)).nansum(0).view(-1, G)
    assert set(summed.flatten().tolist()) == {0, 1}
    share = summed.mean(1)
    found = torch.tensor(list(trainer._logs["extra"]["rd"])).view(-1, G)
    assert_close(found[:, 0], 4 * share * (1 - share) / trainer.collector.scores.range[1])
    assert found.max() > 0.5


# --- the model card -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "title", "arxiv", "key"),
    [
        ("grpo", "DeepSeekMath: Pushing the Limits", "2402.03300", "shao2024deepseekmath"),
        ("gcpo_bot", "Why Semantic Entropy Fails", "2605.21801", "zhang2026gcpo"),
        ("egpo", "Know What You Know", None, "egpo"),  # which is not on arXiv
    ],
)
def test_cards_credit_papers(make: Make, tmp_path: Path, method: str, title: str, arxiv: str | None, key: str) -> None:
    make(method, alpha=0.37 if method == "gcpo_bot" else None).create_model_card(model_name="mine")
    card = (tmp_path / "README.md").read_text()
    sentence = r"trained with (\S+?)(, a method .* \[(.*)\]\(https://huggingface.co/papers/(.*)\))?\.\n"
    introduced = re.search(sentence, card)
    assert introduced and introduced[1] == method and introduced[4] == arxiv
    assert introduced[3] is None or introduced[3].startswith(title)
    assert f"{{{key}," in card and title in card and METHODS[method].rule in card and "- gcpo\n" in card
    assert ("DeepSeekMath" in card) == (method == "grpo") and f"version = {{{gcpo.__version__}}}" in card
    assert "- rewards (0.0, 2.0)" in card and "\n\n\n" not in card and ("0.37" in card) == (method == "gcpo_bot")


def test_a_card_says_settings_that_were_used(make: Make, tmp_path: Path) -> None:
    make("rd_only", alpha_end=0.0, drop_equal_groups=True).create_model_card(model_name="mine")
    card = (tmp_path / "README.md").read_text()
    assert "alpha_end 0.0, drop_equal_groups True\n" in card and not re.search("drops_|equalize_|correctness_", card)
    make(lambda r: 1 + r.rewards.mean(1), correctness_reward="reward").create_model_card(model_name="mine")
    card = (tmp_path / "README.md").read_text()
    assert "Cite gcpo as" in card and "correctness_reward reward" in card and "\n- \n" not in card


def test_every_method_has_papers() -> None:
    assert all(row.papers for row in METHODS.values())


# --- arguments, names and the terminal ------------------------------------------------------------------------------


def test_without_its_extra_the_trainer_says_which_and_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(gcpo, "trainer")
    monkeypatch.setitem(sys.modules, "gcpo.trainer", None)
    with pytest.raises(ImportError, match=r'GCPOConfig needs the extra trl .*in a checkout, pip install "\.\[trl\]"$'):
        gcpo.__getattr__("GCPOConfig")


def test_a_trl_that_was_not_tried_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "__version__", "1.17.0.dev0")
    with pytest.warns(UserWarning, match=r"^TRL 1.17.0.dev0 is newer than 1.16, the newest that gcpo was tried with"):
        importlib.reload(gcpo.trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for tried in ("1.16.3", "1.10.0"):
            monkeypatch.setattr(trl, "__version__", tried)
            importlib.reload(gcpo.trainer)


@pytest.mark.parametrize("name", ["embedder", "entailment"])
def test_the_name_of_a_model_is_no_model(tmp_path: Path, name: str) -> None:
    args = GCPOConfig(**settings(tmp_path), method="gcpo_bot")
    with pytest.raises(TypeError, match=rf"^{name} is 'x': .*{name.title()}\('x'\)"):  # before the policy is loaded
        GCPOTrainer("no/policy", vowels, args, questions(), **{name: "x"})
    with pytest.raises(TypeError, match="GCPOConfig, got GRPOConfig"):
        GCPOTrainer("no/policy", vowels, GRPOConfig(**settings(tmp_path)), questions())
