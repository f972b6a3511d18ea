"""The example without the package, against the trainer's own advantages and the package's clusters."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from helpers import G, by_group, for_all, generate, script, seeds, table
from torch import Tensor

from gcpo import paths
from gcpo.reports.tables import reported
from gcpo.rollouts import Rollouts
from gcpo.semantics import Entailment, cluster_texts

example = script("examples/gcpo_in_one_file.py")
# Ties, equal rewards (no spread at all), and one above the others.
GROUPS = [((0, 2, 2, 0), (1, 1, 1, 1), (0, 0, 0, 0.7)), ((2, 2, 2, 0.3), (0, 0.5, 1, 2), (0.1, 0.1, 0.1, 0.1))]


def test_the_example_does_without_the_package() -> None:
    assert not re.findall(r"(?m)^\s*(?:from|import) gcpo\b", Path(example.__file__).read_text())


@pytest.mark.parametrize("geometry", ["bot", "cd"])
@pytest.mark.parametrize("rewards", GROUPS)
def test_its_advantages_are_those_that_the_trainer_hands_to_the_loss(make: Any, rewards: Any, geometry: str) -> None:
    seen: list[Rollouts] = []
    trainer = make(f"gcpo_{geometry}", reward_funcs=table(*rewards), callback=seen.append)
    trained_on = by_group(generate(trainer)["advantages"])
    (rollouts,) = seen
    assert len({tuple(row) for row in rollouts.clusters.tolist()}) > 1, "groups of one kind only"
    groups = zip(rollouts.rewards, rollouts.embeddings, rollouts.clusters.tolist(), strict=True)
    own = torch.stack([example.advantages(*group, geometry) for group in groups])
    torch.testing.assert_close(own, trained_on, rtol=1e-5, atol=1e-6)
    flat = torch.tensor([len(set(group)) == 1 for group in rewards])
    assert own[flat].eq(0).all() and own[~flat].ne(0).any(1).all()


@for_all(seed=seeds)
def test_its_clusters_are_those_of_the_package(seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    texts = [str(int(n)) for n in torch.randint(6, (2 * G,), generator=chance)]
    entailed = torch.rand((6, 6), generator=chance)

    def outcomes(pairs: Sequence[tuple[str, str]]) -> Tensor:
        found = torch.stack([entailed[int(premise), int(hypothesis)] for premise, hypothesis in pairs])
        return torch.stack([found, (1 - found) / 2, (1 - found) / 2], dim=1)

    own = example.clusters(texts, lambda *pair: float(outcomes([pair])[0, 0]))
    assert own == cluster_texts(texts, Entailment(outcomes), example.THRESHOLD).tolist()


@pytest.mark.slow
def test_one_step_makes_the_answers_with_high_advantages_likelier(capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    *questions, last = capsys.readouterr().out.splitlines()
    assert len(questions) == len(example.QUESTIONS)
    before, after = (float(word.rstrip(",")) for word in last.split() if word[0] in "+-")
    assert before == pytest.approx(0, abs=1e-3) and after > before + 0.01


@pytest.mark.slow
def test_covariances_of_tokens_end_in_the_papers_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    covariances = script("examples/covariances.py")
    monkeypatch.setattr(paths, "OUTPUTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["covariances.py", "--profile", "smoke", "--steps", "3"])
    covariances.main()
    folder = tmp_path / "smoke" / "covariances"
    each, made = pd.read_parquet(folder / "covariances.parquet"), pd.read_csv(folder / "table_1.csv")
    assert {*each["step"]} == {1, 2, 3} and (folder / "figure_3.png").exists()
    assert [f"{q:.2f}%" for q in made["percentile"]] == list(dict.fromkeys(reported("cw_grpo_table1")["label"]))
    assert made.iloc[-1, 1:].tolist() == pytest.approx([each["c"][each["c"] > 0].min(), each["c"][each["c"] < 0].max()])
    assert made["positive"].is_monotonic_decreasing and made["negative"].is_monotonic_increasing
