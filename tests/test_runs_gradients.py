"""Gradient statistics of a group from inner products, against plain loops over the gradients themselves."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import for_all, seeds
from hypothesis import strategies as st
from record_builders import smoke
from scipy.stats import spearmanr
from test_gradients import advantages_of, qwen2, rollouts

from gcpo import gradients
from gcpo.gradients import gradient_gram, gradient_variance, gram_distances, variance_decomposition
from gcpo.reports.alignment import MEASURES, RIVALS
from gcpo.runs import gradients as module
from gcpo.runs.gradients import gradient_statistics, pair_correlations, pair_table, variance, variances
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan

pytestmark = pytest.mark.usefixtures("one_thread")
sizes = st.integers(2, 9)


def vectors(seed: int, size: int, width: int = 5) -> torch.Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(seed: int, size: int) -> torch.Tensor:
    return torch.randint(3, (size,), generator=torch.Generator().manual_seed(seed))


# --- inner products ---------------------------------------------------------------------------------------------------


def test_equal_rows_and_rows_without_a_completion_have_their_place() -> None:
    model, batch = qwen2(), rollouts()
    batch = {name: values[[0, 1, 0, 2]].clone() for name, values in batch.items()}
    batch["completion_mask"][1] = 0
    gram = gradient_gram(model, **batch)
    assert torch.equal(gram[0], gram[2]) and torch.equal(gram[:, 0], gram[:, 2])
    assert not gram[1].any() and not gram[:, 1].any()
    assert gram_distances(gram)[0, 2] == 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("params", [None, "lm_head.weight"])
def test_the_variance_from_inner_products_is_that_of_eq_20(temperature: float, params: str | None) -> None:
    model, batch, advantages = qwen2(), rollouts(), advantages_of()
    exact = gradient_variance(model, **batch, advantages=advantages, params=params, temperature=temperature)
    gram = gradient_gram(model, **batch, params=params, temperature=temperature)
    found = variances(gram, advantages, labels(0, 6))
    assert found["V"] == pytest.approx(exact.variance, rel=1e-9)
    assert found["mean_squared_norm"] == pytest.approx(exact.mean_squared_norm, rel=1e-9)
    assert variance(gram, advantages) == pytest.approx(exact.variance, rel=1e-9)


def test_a_run_that_shares_prompts_takes_both_temperatures_from_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, advantages = qwen2(), rollouts(), advantages_of()
    ids, attention, completion = batch.values()
    sampled: Any = SimpleNamespace(ids=ids, attention=attention, completion=completion)
    own = {"group_size": 6, "temperature": 0.7}
    plans: Any = [SimpleNamespace(params=validate({**own, "share_prompts": shares})) for shares in (False, True)]
    gram, plain = module._gradients(plans[0], model, sampled, 0, advantages, math.inf)
    monkeypatch.setattr(gradients, "gradient_gram", None)
    for plan, ample in ((plans[1], math.inf), (plans[0], 2e5)):  # less than 6 gradients at a time take
        monkeypatch.setattr(gradients, "AMPLE", ample)
        shared_gram, shared_plain = module._gradients(plan, model, sampled, 0, advantages, math.inf)
        torch.testing.assert_close(shared_gram, gram)
        assert shared_plain == pytest.approx(plain, rel=1e-9)
    assert plain != pytest.approx(variance(gram, advantages), rel=0.1)


@pytest.mark.parametrize(("given", "beside", "bytes_"), [(None, None, 6e9), (None, "3", 2e9), (0.5, "3", 0.5e9)])
def test_gradients_may_take_three_quarters_of_what_is_free_shared_or_what_is_given(
    given: float | None, beside: str | None, bytes_: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_free", lambda device: 8e9)
    monkeypatch.setenv(module.AT_ONCE, beside) if beside else monkeypatch.delenv(module.AT_ONCE, raising=False)
    assert module.limit_of(validate({"memory_limit": given}), qwen2(), None, []) == bytes_


@for_all(seed=seeds, size=sizes)
def test_within_and_between_are_those_of_the_gradients_and_sum_to_the_variance(seed: int, size: int) -> None:
    g, clusters, advantages = vectors(seed, size), labels(seed, size), vectors(seed + 1, size, 1)[:, 0]
    expected = variance_decomposition(advantages.unsqueeze(-1) * g, clusters)
    found = variances(g @ g.T, advantages, clusters)
    assert found["V_within"] == pytest.approx(float(expected[0]), abs=1e-9)
    assert found["V_between"] == pytest.approx(float(expected[1]), abs=1e-9)
    assert found["V_within"] + found["V_between"] == found["V"]
    plain = variance_decomposition(g, clusters)
    assert (found["score_within"], found["score_between"]) == pytest.approx([float(p) for p in plain], abs=1e-9)


# --- pairs ------------------------------------------------------------------------------------------------------------


def test_pairs_are_those_of_a_plain_loop() -> None:
    g, e, a = vectors(0, 6), vectors(1, 6, 4), advantages_of()
    clusters, texts = torch.tensor([0, 0, 1, 1, 2, 0]), list("abcdea")
    table = pair_table(e, g @ g.T, a, clusters, texts)
    assert len(table) == 15
    for row in table.itertuples():
        i, j = row.first, row.second
        assert i < j
        cosine = float(torch.nn.functional.cosine_similarity(e[i], e[j], dim=0))
        assert row.embedding_distance == pytest.approx(1 - cosine, abs=1e-6)
        assert row.gradient_distance == pytest.approx(float((g[i] - g[j]).norm()))
        assert row.advantage_distance == pytest.approx(float((a[i] * g[i] - a[j] * g[j]).norm()))
        assert row.same_cluster == (clusters[i] == clusters[j]) and row.same_text == (texts[i] == texts[j])
    found = pair_correlations(table)
    other = table[~table["same_text"]]
    assert len(other) == 14
    for name, part in {"pair_spearman": table, "pair_spearman_distinct": other}.items():
        expected = spearmanr(part["embedding_distance"], part["gradient_distance"]).statistic
        assert found[name] == pytest.approx(expected)


def test_equal_answers_are_at_distance_0_whatever_they_say() -> None:
    e = torch.nn.functional.normalize(vectors(0, 3, 384).float(), dim=-1)[[0, 0, 1, 1, 2, 2]]
    g = vectors(1, 6)
    table = pair_table(e, g @ g.T, advantages_of(), torch.zeros(6).long(), list("aabbcc"))
    assert (table["embedding_distance"] == 0).sum() == 3


@pytest.mark.parametrize(("size", "spread"), [(2, 1.0), (5, 0.0)])
def test_where_there_is_nothing_to_rank_there_is_no_correlation(size: int, spread: float) -> None:
    e, g = torch.ones(size, 3) + spread * vectors(0, size, 3), vectors(1, size)
    found = pair_correlations(pair_table(e, g @ g.T, torch.ones(size), torch.zeros(size).long(), ["a"] * size))
    assert all(math.isnan(value) for value in found.values())


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("outputs")
def test_the_tables_agree_with_one_another() -> None:
    run = gradient_statistics(smoke(group_size=6, eval_limit=4))
    queries, pairs = (pd.read_csv(run.folder / f"{name}.csv") for name in ("queries", "pairs"))
    assert set(MEASURES) | {f"{name}_half" for name in MEASURES} <= set(queries)
    assert queries[[*MEASURES, "V", "V_t1", "V_half", *(f"{name}_half" for name in MEASURES)]].notna().all(axis=None)
    np.testing.assert_allclose(queries["V_within"] + queries["V_between"], queries["V"], rtol=1e-6)
    assert (queries["V_t1"] != queries["V"]).any()
    assert ((queries["V"] == 0) == queries["zero_variance"]).all() and (queries["V"] >= 0).all()
    rivals = pd.read_csv(run.folder / "rivals.csv")
    assert rivals["query"].tolist() == queries["query"].tolist() and rivals.notna().all(axis=None)
    assert [*rivals] == ["query", *RIVALS, *(f"{name}_half" for name in RIVALS)]
    assert (pairs.groupby("query").size() == 15).all() and set(pairs["query"]) == set(queries["query"])
    # All 15 pairs of a group are there, so the score function's variance follows from them: Eq. 4 with pi = 1/G.
    halved = pairs["gradient_distance"].pow(2).groupby(pairs["query"]).sum() / 36
    np.testing.assert_allclose(halved[queries["query"]], queries["score_within"] + queries["score_between"], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("outputs")
def test_a_group_too_small_for_halves_has_none() -> None:
    queries = pd.read_csv(gradient_statistics(smoke(group_size=3, eval_limit=3)).folder / "queries.csv")
    assert queries["V_half"].isna().all() and queries["bot_half"].isna().all() and queries["V"].notna().all()


@pytest.mark.slow
@pytest.mark.usefixtures("outputs")
def test_with_lora_v_covers_the_adapters_alone_of_the_start_and_after_training() -> None:
    values = {"policy": "scratch", "lora_rank": 2, "eval_limit": 4, "max_completion_length": 6, "method": "egpo"}

    def score(**changes: Any) -> np.ndarray:
        run = gradient_statistics(smoke(**values, **changes))
        return pd.read_csv(run.folder / "queries.csv")[["score_within", "score_between"]].sum(axis=1).to_numpy()

    start = score()
    assert (start > 0).all()
    # Adapters begin as A x with B = 0, so the gradient by A is 0 and all of it is that by B.
    np.testing.assert_allclose(score(gradient_parameters=["*lora_B*"]), start, rtol=1e-6)
    np.testing.assert_allclose(score(gradient_parameters=["*lora_A*"]), 0)
    trained = Plan("gradients", smoke(**values, at_step=2)).training
    assert trained is not None
    after = score(at_step=2)
    assert (trained.folder / "policy" / "adapter_model.safetensors").exists() and len(after) == len(start)
