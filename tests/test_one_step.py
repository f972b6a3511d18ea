"""One step of every method on the same rollouts: the run, and its statistics over runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from gcpo.reports.one_step import lead, relative_gains, table
from gcpo.runs import one_step as module
from gcpo.runs.gradients import gradient_statistics
from gcpo.runs.one_step import DOTS, FOLDS, Asker, gains, misgraded, one_step
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.policies import starting_policy
from gcpo.runs.profiles import ParameterError
from gcpo.runs.record import read_table
from gcpo.updates import token_coefficients

VALUES = {"compared": ["gcpo_bot", "se", "egpo"], "step_batches": 3, "eval_limit": 20, "prompts_per_step": 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gcpo.paths.OUTPUTS", tmp_path_factory.mktemp("outputs"))
        folder = one_step(validate(VALUES)).folder
        return {name: read_table(folder / f"{name}.csv") for name in ("updates", "questions", "gains")}


# --- the run ----------------------------------------------------------------------------------------------------------


def test_every_method_has_a_line_per_batch_and_optimizer(made: dict[str, pd.DataFrame]) -> None:
    own = made["updates"].query("weights == 'own'")
    methods = own.groupby(["optimizer", "batch"])["method"].agg(lambda each: " ".join(sorted(each)))
    assert methods.tolist() == ["egpo gcpo_bot grpo se"] * (2 * 3)
    assert own.loc[own["method"] == "egpo", "spread"].isna().all()  # it weighs answers
    questions = made["questions"]
    assert len(questions) == 2 * 9 and questions["query"].nunique() == 9
    assert (questions["grpo"] == 1).all() and questions["se"].between(0.4 - 1e-6, 1).all()


def test_an_update_is_the_weighted_sum_of_its_questions_parts(made: dict[str, pd.DataFrame]) -> None:
    own_lines = made["updates"].query("weights == 'own'").set_index(["optimizer", "batch", "method"])
    for place, parts in made["questions"].groupby(["optimizer", "batch"]):
        for name in ("grpo", "gcpo_bot", "se"):
            summed = (parts[DOTS].mul(parts[name], axis=0)).sum()
            own = own_lines.loc[(*place, name), DOTS].astype(float)
            np.testing.assert_allclose(own, summed, rtol=1e-4, atol=1e-4 * np.abs(summed).max())


def test_misgraded_questions_have_rewards_of_another_and_are_the_dispersed_ones_alone() -> None:
    rewards, number = torch.arange(6.0).unsqueeze(1).expand(6, 4), torch.zeros(6)
    for seed in range(300):
        given, wrong = misgraded(rewards, 0.3, seed, torch.tensor([0.0, 5.0, 1.0, 4.0, 2.0, 3.0]))
        assert torch.equal((given != rewards).any(1), wrong) and torch.equal(given, given[:, :1].expand(6, 4))
        number += wrong
    assert number[[0, 2, 4, 5]].tolist() == [0] * 4 and number.sum() / (300 * 6) == pytest.approx(0.3, abs=0.02)
    assert misgraded(torch.rand(4000, 2), 0.3, 0)[1].float().mean() == pytest.approx(0.3, abs=0.03)


def test_noise_changes_rewards_of_some_questions(made: Any, outputs: Path) -> None:
    folder = one_step(validate({**VALUES, "reward_noise": 0.4, "compared": ["se", "rd_only"]})).folder
    noisy, clean = read_table(folder / "questions.csv"), made["questions"]
    assert noisy["se"].equals(clean["se"]) and 0 < noisy["misgraded"].mean() < 1
    assert noisy.loc[~noisy["misgraded"], "reward"].equals(clean.loc[~noisy["misgraded"], "reward"])
    assert (noisy["reward"] != clean["reward"]).any() and "misgraded" not in clean


def test_no_method_gains_more_than_the_weights_of_its_range_could(made: dict[str, pd.DataFrame]) -> None:
    found = made["gains"].set_index(["optimizer", "method", "weights"])["gain"]
    for optimizer in ("sgd", "adam"):
        most = found[optimizer, "oracle", "ceiling"]
        for name in ("gcpo_bot", "se"):
            assert found[optimizer, name, "own"] <= found[optimizer, name, "ceiling"] <= most * (1 + 1e-6)
    assert (found.xs("grpo", level="method") == 0).all()


def test_a_run_that_was_cut_off_ends_as_a_whole_one(made: Any, outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, left = module._batch, iter([True, True, False])

    def cut_off(*arguments: Any) -> Any:
        if not next(left):
            raise KeyboardInterrupt
        return batch(*arguments)

    monkeypatch.setattr(module, "_batch", cut_off)
    with pytest.raises(KeyboardInterrupt):
        one_step(validate(VALUES))
    monkeypatch.setattr(module, "_batch", batch)
    folder = one_step(validate(VALUES)).folder
    pd.testing.assert_frame_equal(read_table(folder / "updates.csv"), made["updates"])


def test_shared_prompts_give_the_same_gradients() -> None:
    found = []
    for shared in (False, True):
        plan = Plan("one_step", validate({**VALUES, "share_prompts": shared}))
        rows = plan.task.load("train", limit=3).rows
        asker = Asker(plan, *starting_policy(plan), rows)
        torch.manual_seed(0)
        sampled, rollouts = asker.rollouts(rows)
        sets = [token_coefficients(asker.methods[name], rollouts) for name in ("grpo", "egpo")]
        assert any(of.any() for of in sets)
        for room in (asker.room, 0.0):  # with layers that are computed again
            asker.room = room
            found.append(torch.stack([vector for i in range(3) for vector in asker.gradients(sampled, i, sets)]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
    torch.testing.assert_close(found[0], found[2], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", [one_step, gradient_statistics])
def test_what_does_not_fit_is_refused_before_a_pass(kind: Any, outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gcpo.runs.evaluate.generate", None)
    with pytest.raises(MemoryError, match=r"^question \S+, .* 1e-05 GB \(memory_limit\)"):
        kind(validate({**VALUES, "memory_limit": 1e-5}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"compared": ["kl_cov"]}, "compared: kl_cov"),
        ({"compared": ["sse"]}, "compared: .*'sse'.*'se'"),
        ({"eval_split": "train"}, "train_split and eval_split .*'train'"),
    ],
)
def test_what_one_step_cannot_show_is_refused_before_it_begins(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Plan("one_step", validate({**VALUES, **values}))


# --- gains over several runs ----------------------------------------------------------------------------------------


def lines(rows: dict[tuple[str, str], list[tuple[list[float], float]]]) -> pd.DataFrame:
    """Lines of updates.csv: by method and kind of weights, the inner products and square of each batch."""
    return pd.DataFrame(
        {"batch": batch, "optimizer": "sgd", "method": method, "weights": kind, "spread": 0.1, "square": square}
        | dict(zip(DOTS, dots, strict=True))
        for (method, kind), batches in rows.items()
        for batch, (dots, square) in enumerate(batches)
    )


EVEN_ONES = [1.0, 0.0] * (FOLDS // 2)
BY_HAND = {
    ("grpo", "own"): [([1.0] * FOLDS, 1.0), ([1.0] * FOLDS, 3.0)],  # 2 / 2
    ("se", "own"): [([2.0] * FOLDS, 4.0), ([0.5] * FOLDS, 0.0)],  # 2.5 / 2
    ("se", "ceiling"): [([3.0] * FOLDS, 2.0), ([0.0] * FOLDS, 2.0)],  # 3 / 2
    ("se", "even"): [(EVEN_ONES, 1.0), ([0.0] * FOLDS, 3.0)],  # counts on the odd folds: 0
    ("se", "odd"): [(EVEN_ONES, 1.0), ([0.0] * FOLDS, 3.0)],  # on the even ones: 1 / 2
}


def test_gains_by_hand() -> None:
    found = gains(lines(BY_HAND)).set_index(["method", "weights"])["gain"]
    assert found.to_dict() == pytest.approx(
        {("grpo", "own"): 0, ("se", "own"): 0.25, ("se", "ceiling"): 0.5, ("se", "even"): -1, ("se", "odd"): -0.5}
    )
    several = relative_gains(pd.concat(lines(BY_HAND).assign(run=run) for run in "ab"), n=200)
    assert several["se", "own"].estimate == pytest.approx(0.25)
    assert several["se", "halves"].estimate == pytest.approx(-0.75)  # (0 + 1/2) / (1 + 1) - 1
    assert several["grpo", "own"].draws == pytest.approx(np.zeros(200))
    assert lead(several, "se", "grpo").estimate == pytest.approx(25)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """A method gains 10 %, in runs, batches and folds that vary: 50 of 60 intervals at the least."""
    rng, held = np.random.default_rng(0), 0
    for trial in range(60):
        runs, fold = [], rng.normal(0, 0.1, FOLDS)
        for run in range(8):
            level = rng.normal(1, 0.1)
            base = level + fold + rng.normal(0, 0.3, (12, FOLDS))
            other = 1.1 * base + rng.normal(0, 0.3, (12, FOLDS))
            rows = {("grpo", "own"): base, ("se", "own"): other}
            runs.append(lines({key: [([*dots], 1.0) for dots in of] for key, of in rows.items()}).assign(run=run))
        _, low, high = relative_gains(pd.concat(runs), n=300, seed=trial)["se", "own"].interval()
        held += low <= 0.1 <= high
    assert held >= 50


def test_a_table_says_gains_in_per_cent_by_group_of_runs() -> None:
    both = pd.concat([lines(BY_HAND).assign(run=run, task="tinyqa") for run in "ab"])
    found = table(both, ["task", "optimizer"], n=100).set_index(["method", "weights"])
    own = found.loc[("se", "own"), ["task", "optimizer", "runs", "gain", "spread"]]
    assert own.tolist() == ["tinyqa", "sgd", 2, pytest.approx(25), pytest.approx(10)]
