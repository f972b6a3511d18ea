"""The real model: what it needs of models and data, and what decides its part of the protocol."""

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from test_benchmarks import hotpot
from test_gradients import VOCABULARY, qwen2
from test_one_pass import close, explicit, gemma, gpt2, llama

from gcpo import one_pass, paths, world
from gcpo.errors import UserError
from gcpo.reports import real
from gcpo.reports.alignment import Alignment
from gcpo.reports.one_step import relative_gains
from gcpo.runs.one_step import DOTS
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan, with_others
from gcpo.runs.profiles import load_profile
from gcpo.runs.train import train
from gcpo.semantics.rules import by_rule
from gcpo.statistics import Draws
from gcpo.tasks import get_task, narrativeqa
from gcpo.trainer.prefix import shared

RNG = np.random.default_rng(0)


# --- models and data --------------------------------------------------------------------------------------------------


def test_without_the_package_one_line_says_both_ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paths, "WORLDS", tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"make real-model .* HuggingFaceTB/SmolLM2-135M-Instruct"):
        world.resolve("smollm2-135m", "policy")


def test_the_passage_is_the_one_most_like_the_question_whatever_the_answer() -> None:
    sentences = [f"Filler number {i} speaks of nothing much at all here." for i in range(60)]
    sentences[40] = "Rosalind hides the silver locket under a stone."
    found = narrativeqa.passage(" ".join(sentences), "Where does Rosalind hide the locket?")
    assert sentences[40] in " ".join(found.split()[: narrativeqa.MAX_SUPPORTING_WORDS])
    assert found.startswith("Filler") and narrativeqa.passage("Short. Text.", "what?") == "Short. Text."


def test_rules_in_place_of_an_entailment_model() -> None:
    pairs = [("The cat.", "cat"), ("the", "a"), ("red cat", "cat sat down")]  # of the second nothing is left
    found = by_rule("token_f1", "all-MiniLM-L6-v2").pairs(*zip(*pairs, strict=True))
    torch.testing.assert_close(found, torch.tensor([[1, 0, 0], [1, 0, 0], [0.4, 0, 0.6]]))
    cosine = by_rule("cosine", "all-MiniLM-L6-v2").pairs(["a cat", "a cat"], ["the cat", "a feline animal"])[:, 0]
    assert 1 > cosine[0] > cosine[1] > 0.3


# --- a warm start -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ten_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HotpotQA with ten questions in each split, and one whose supporting paragraph is too long."""
    (tmp_path / "hotpotqa").mkdir()
    for split in ("train", "validation"):
        rows = [
            hotpot(3 if n else 200) | {"id": f"{n}", "question": f"{split} {n}?", "answer": f"{n}"} for n in range(11)
        ]
        (tmp_path / "hotpotqa" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("GCPO_DATA_DIR", str(tmp_path))


@pytest.mark.usefixtures("ten_rows")
def test_supporting_paragraphs_are_all_there_is_and_whole() -> None:
    rows = get_task("hotpotqa", context="supporting").load("test", limit=None).rows
    assert len(rows) == 10 and all(row.parts["context"] == "three: three three three" for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("ten_rows", "outputs")
def test_a_toy_of_the_real_profile_starts_from_a_warm_start_whose_questions_it_never_sees() -> None:
    values = load_profile("real-toy") | {"warm_steps": 1, "method": "gcpo_cd", "train_limit": 5}
    plan, measured = Plan("train", validate(values)), Plan("gradients", validate({**values, "at_step": 2}))
    assert plan.warm and measured.before == [plan.warm, plan] and with_others([plan])[1:] == [plan.warm]
    assert train(plan.params).manifest["warm_start"]["run"] == plan.warm.id
    seen, ours = ({row.prompt for row in one.load("train", 5).rows} for one in (plan.warm, plan))
    assert len(seen) == len(ours) == 5 and not seen & ours


# --- V(q) of the upper layers -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("make", [qwen2, llama, gemma, gpt2])
def test_layers_below_read_what_rows_begin_with_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass, "gradient_gram", None)
    model, rng = make().double(), torch.Generator().manual_seed(0)
    ids = torch.randint(4, VOCABULARY, (5, 12), generator=rng)
    ids[:, :8] = ids[0, :8]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": torch.zeros_like(ids)}
    batch["completion_mask"][:, 8:] = 1
    lengths: list[torch.Size] = []
    hook = one_pass.gradients.checkpointed(model)[0].register_forward_pre_hook(
        lambda module, given: lengths.append(given[0].shape[:2])
    )
    (gram,) = one_pass.gradient_grams(model, **batch, params="*.1.*", reads=partial(shared, model))
    hook.remove()
    assert ((1, 8 + 5 * 4) in lengths) == (make is not gpt2)  # which draws at random
    assert close(gram, explicit(model, batch, "*.1.*"), 1e-9)
    assert not any("forward" in module.__dict__ for module in model.modules())


# --- what decides -----------------------------------------------------------------------------------------------------


def queries(seed: int, size: int = 40) -> pd.DataFrame:
    rng = np.random.default_rng(7)
    variance = rng.random(size)
    noisy = variance + 0.2 * np.random.default_rng(seed).random(size)
    columns = {"query": [f"q{i}" for i in range(size)], "V": noisy, "cd": variance, "bot": variance, "se": noisy[::-1]}
    more = {"token_entropy": rng.random(size), "zero_variance": False, "clusters": 4, "seed": seed}
    return pd.DataFrame(columns | more)


def test_questions_about_one_document_are_drawn_together() -> None:
    once = queries(0).drop(columns="seed")  # one run
    copies = pd.concat([once.assign(query=once["query"] + f"-{i}", document=once["query"]) for i in range(3)])
    alone, together = (Alignment(table, n=200).draws("se") for table in (once, copies))
    np.testing.assert_allclose(together.draws, alone.draws, atol=1e-12)
    assert Alignment(copies.drop(columns="document"), n=200).draws("se").draws.std() < 0.8 * alone.draws.std()


def test_data_sets_are_drawn_apart() -> None:
    one = Draws(1.0, RNG.normal(1, 1, 10000))
    found = real.pooled([one, one, one, one])
    assert found.estimate == 1 and found.draws.std() == pytest.approx(0.5, rel=0.05)
    sets = [Alignment(pd.concat([queries(0), queries(1)]), n=200) for _ in range(2)]
    for apart, expected in ((False, sets[0].less("cd", "se")), (True, sets[0].less_apart("cd", "se"))):
        assert real.leads(sets, apart)["cd", "se"].estimate == pytest.approx(expected.estimate)


@pytest.mark.parametrize(("f1", "clusters", "expected"), [(0.3, 3, True), (0.05, 3, False), (0.3, 2, False)])
def test_the_gate_opens_where_every_figure_lies_between_its_bounds(f1: float, clusters: int, expected: bool) -> None:
    lines = pd.concat([queries(0), queries(1)]).assign(clusters=clusters)
    answers = pd.DataFrame({"reward": [0.0, 4 * f1]})
    assert real.gate(lines, answers)["passes"].all() == expected
    assert not real.gate(lines.assign(zero_variance=True), answers)["passes"].all()


def test_other_weights_of_a_run_gain_what_their_updates_would() -> None:
    parts, held = RNG.normal(size=(6, 4, 9)), RNG.normal(size=(len(DOTS), 9))
    batches, flat = np.repeat(np.arange(6), 4), parts.reshape(24, 9)
    questions = pd.DataFrame(flat @ held.T, columns=DOTS).assign(batch=batches, cd_only=RNG.uniform(0.5, 1, 24))
    grams = pd.DataFrame((parts @ parts.transpose(0, 2, 1)).reshape(6, 16)).add_prefix("gram_").assign(batch=range(6))
    raised = real.at_strength(real.weights_of(questions, "cd_only"))
    ranges = (raised.max(axis=1) - raised.min(axis=1)) / raised.mean(axis=1)
    assert ranges.median() == pytest.approx(real.STRENGTH)
    moved = {"grpo": parts.sum(1), "cd 40 %": np.einsum("bq,bqp->bp", raised.to_numpy(), parts)}
    found = real.reweighed(questions, grams, {"grpo": raised * 0 + 1, "cd 40 %": raised})
    for name, update in moved.items():
        own = found[found["method"] == name]
        np.testing.assert_allclose(own["square"], (update**2).sum(1))
        np.testing.assert_allclose(own[DOTS], update @ held.T)
    base, gained = ((update @ held.T).mean(1).sum() / np.sqrt((update**2).sum()) for update in moved.values())
    assert relative_gains(found.assign(run="r"), n=50)["cd 40 %", "own"].estimate == pytest.approx(gained / base - 1)
    handed = real.shuffled(raised, 0)
    assert sorted(handed.loc[0]) == sorted(raised.loc[0]) and not handed.equals(raised)
