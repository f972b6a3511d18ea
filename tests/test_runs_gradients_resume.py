"""Whole runs of gradient statistics: what is in their tables, halves, and policies that training has changed."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gcpo import io
from gcpo.reports.alignment import MEASURES, RIVALS
from gcpo.runs import gradients as module
from gcpo.runs.gradients import gradient_statistics
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.profiles import load_profile

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("outputs")]


def params(**changes: Any) -> Any:
    return validate({**load_profile("smoke"), "eval_limit": 12, **changes})


def tables(run: Any) -> dict[str, bytes]:
    return {name: (run.folder / f"{name}.csv").read_bytes() for name in ("queries", "rivals", "pairs")}


def test_the_tables_agree_with_one_another() -> None:
    run = gradient_statistics(params(group_size=6, eval_limit=4))
    queries, pairs = (pd.read_csv(run.folder / f"{name}.csv") for name in ("queries", "pairs"))
    assert set(MEASURES) | {f"{name}_half" for name in MEASURES} <= set(queries)
    assert queries[[*MEASURES, "V", "V_t1", "V_half", *(f"{name}_half" for name in MEASURES)]].notna().all(axis=None)
    np.testing.assert_allclose(queries["V_within"] + queries["V_between"], queries["V"], rtol=1e-6)
    assert (queries["V_t1"] != queries["V"]).any()
    rivals = pd.read_csv(run.folder / "rivals.csv")
    assert rivals["query"].tolist() == queries["query"].tolist() and rivals.notna().all(axis=None)
    assert [*rivals] == ["query", *RIVALS, *(f"{name}_half" for name in RIVALS)]
    assert (pairs.groupby("query").size() == 15).all() and set(pairs["query"]) == set(queries["query"])
    # All 15 pairs of a group are there, so the score function's variance follows from them: Eq. 4 with pi = 1/G.
    halved = pairs["gradient_distance"].pow(2).groupby(pairs["query"]).sum() / 36
    np.testing.assert_allclose(halved[queries["query"]], queries["score_within"] + queries["score_between"], rtol=1e-6)


def test_a_group_too_small_for_halves_has_none() -> None:
    queries = pd.read_csv(gradient_statistics(params(group_size=3, eval_limit=3)).folder / "queries.csv")
    assert queries["V_half"].isna().all() and queries["bot_half"].isna().all() and queries["V"].notna().all()


def test_a_trained_policy_is_made_once_and_a_killed_run_of_it_ends_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = params(policy="scratch", method="egpo", at_step=2, learning_rate=1e-2, max_completion_length=6)

    said: list[int] = []

    def stop(run: Any, done: int, total: int, what: str, *_: Any) -> None:
        if what == "question":
            said.append(done)
            if done > 10:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.Run, "progress", stop)
        patch.setattr("gcpo.runs.train._Recorded.on_log", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            gradient_statistics(values)
    plan = Plan("gradients", values)
    assert [path.name for path in (plan.folder / "parts").iterdir()] == ["000000"]
    assert said == [*range(11), 10, 11]  # the start, each question of the first part, that part, the first of the next
    run = gradient_statistics(values)
    assert run.finished and run.manifest["attempts"] == 2
    kept, trained = tables(run), plan.training
    assert trained is not None and (trained.folder / "manifest.json").exists()
    policy = trained.folder / "policy"
    assert run.manifest["training"] == {"run": trained.id, "policy": io.hashes(policy)}
    shutil.rmtree(run.folder)
    shutil.rmtree(trained.folder)
    again = gradient_statistics(values)
    assert tables(again) == kept and again.manifest["attempts"] == 1
    before = gradient_statistics(params(policy="scratch", max_completion_length=6))
    assert "training" not in before.manifest and tables(before) != kept


def test_with_lora_v_covers_the_adapters_alone_of_the_start_and_after_training() -> None:
    values = {"policy": "scratch", "lora_rank": 2, "eval_limit": 4, "max_completion_length": 6, "method": "egpo"}

    def score(**changes: Any) -> np.ndarray:
        run = gradient_statistics(params(**values, **changes))
        return pd.read_csv(run.folder / "queries.csv")[["score_within", "score_between"]].sum(axis=1).to_numpy()

    start = score()
    assert (start > 0).all()
    # Adapters begin as A x with B = 0, so the gradient by A is 0 and all of it is that by B.
    np.testing.assert_allclose(score(gradient_parameters=["*lora_B*"]), start, rtol=1e-6)
    np.testing.assert_allclose(score(gradient_parameters=["*lora_A*"]), 0)
    trained = Plan("gradients", params(**values, at_step=2)).training
    assert trained is not None
    after = score(at_step=2)
    assert (trained.folder / "policy" / "adapter_model.safetensors").exists() and len(after) == len(start)
