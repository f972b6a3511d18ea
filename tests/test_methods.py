"""Every method: the formula of its paper, and what all of them keep: ranges, invariances, edge cases."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import papers
import pytest
import torch
from helpers import DEVICES, for_all, seeds
from hypothesis import strategies as st
from papers import LONGEST, TOKENS, features, sampled
from torch import Tensor

from gcpo.methods import METHODS, advantages, base_advantages, expand, modulate, weights
from gcpo.rollouts import Rollouts

NAN, INF = math.nan, math.inf
Features = dict[str, Tensor]

READ_TOKENS = [name for name, row in METHODS.items() if "mask" in row.reads]
# A mean over tokens is made of each response by itself.
RESPONSES = [name for name, row in METHODS.items() if row.factors and row.granularity == "response"]
MEAN_OF_TOKENS = ["seed_grpo", *RESPONSES]
# Which of its candidates Clip-Cov drops hangs on their places by the very draw; which ones there are does not.
ALL_CANDIDATES: dict[str, dict[str, Any]] = {"clip_cov": {"share": 1.0}}

every_method = pytest.mark.parametrize("method", METHODS)
both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def features_of(seed: int, groups: int, size: int, shortest: int = 1) -> Features:
    return features(*sampled(seed, groups, size, shortest))


def cast(x: Features, dtype: torch.dtype, device: str = "cpu") -> Features:
    return {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in x.items()}


def rollouts_of(x: Features) -> Rollouts:
    return Rollouts(**x, max_completion_length=LONGEST)


def outcome(method: str, x: Features, **options: Any) -> Features:
    """All that a method makes of rollouts: weights, advantages, and which tokens pay in the loss."""
    rollouts = rollouts_of(x)
    found = {"weights": weights(method, rollouts, **options), "advantages": advantages(method, rollouts, **options)}
    penalty = METHODS[method].penalty
    if penalty is not None and not tied(rollouts):
        found["paid"] = penalty.coefficients(rollouts, base_advantages(rollouts.rewards))
    return found


def tied(rollouts: Rollouts) -> bool:
    """Whether several tokens have the largest covariance, so that KL-Cov's choice hangs on their places."""
    counted = rollouts.mask.bool() & rollouts.scorable.unsqueeze(-1)
    first = modulate(METHODS["clip_cov"], rollouts).columns["cov"][counted].sort(descending=True).values[:2]
    return bool(len(first) == 2 and first[0] - first[1] < 1e-6)


def responses(x: Features, chosen: Tensor) -> Features:
    """Some responses of each group, in the order given."""
    picked = {name: value[:, chosen] for name, value in x.items()}
    return picked | {"nli": picked["nli"][:, :, chosen]}


def assert_close(found: Features, expected: Features, rounding: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, atol=rounding, rtol=rounding)


# --- the papers -----------------------------------------------------------------------------------------------------


def padded(rows: list[Any], like: Tensor, missing: float) -> Tensor:
    """Nested lists as a tensor; lists of tokens are filled up."""
    if like.ndim == 3:
        rows = [[[*tokens, *[missing] * (like.shape[2] - len(tokens))] for tokens in group] for group in rows]
    return torch.tensor(rows, dtype=torch.float64)


def test_every_method_has_its_papers_formula() -> None:
    assert set(papers.METHODS) == set(METHODS)


CASES = {name: (name, ALL_CANDIDATES.get(name, {}), rule) for name, rule in papers.METHODS.items()} | papers.OPTIONS


@pytest.mark.parametrize("case", CASES)
@for_all(20, seed=seeds, size=st.integers(2, 6))
def test_weights_and_advantages_are_those_of_the_paper(case: str, seed: int, size: int) -> None:
    method, options, rule = CASES[case]
    groups = sampled(seed, 2, size, int(method in MEAN_OF_TOKENS))
    for alpha in (None, 2.5):  # which reaches the clip at 0 of the linear forms; methods without alpha do not read it
        found, paper = outcome(method, features(*groups), alpha=alpha, **options), rule(groups, alpha)
        weight, ndim = padded(paper.weights, found["weights"], 1.0), found["advantages"].ndim
        base = padded(paper.base, found["advantages"] if weight.ndim == 2 else weight[..., 0], 0.0)
        expected = {"weights": weight, "advantages": expand(base, ndim) * expand(weight, ndim)}
        if "paid" in found:
            expected["paid"] = padded(paper.paid, found["paid"], 0.0)
        assert_close(found, expected)


# --- base advantages ------------------------------------------------------------------------------------------------


@both_types
def test_eq1_epsilon_counts_where_rewards_hardly_differ(dtype: torch.dtype) -> None:
    found = base_advantages(torch.tensor([[0, 1e-4]], dtype=dtype))
    half = 0.5e-4 / (math.sqrt(2) * 0.5e-4 + 1e-4)
    assert found[0].tolist() == pytest.approx([-half, half], rel=1e-5)
    assert found.dtype == dtype


@for_all(20, seed=seeds, size=st.integers(2, 6))
def test_eq1_by_the_deviation_of_the_batch_or_by_none_at_all(seed: int, size: int) -> None:
    groups = sampled(seed, 3, size)
    everything = [r for g in groups for r in g.rewards]
    expected = torch.tensor([[*papers.grpo(g.rewards, everything), 0] for g in groups], dtype=torch.float64)
    unscorable = torch.full((3, 1), NAN, dtype=torch.float64)
    rollouts = Rollouts(torch.cat([features(*groups)["rewards"], unscorable], 1))
    torch.testing.assert_close(advantages("grpo", rollouts, scale_rewards="batch"), expected)
    assert torch.equal(advantages("grpo", rollouts, scale_rewards="none"), advantages("dr_grpo", rollouts))
    assert torch.equal(advantages("dr_grpo", rollouts, scale_rewards="group"), advantages("grpo", rollouts))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.float64])
def test_base_advantages_of_any_type_are_those_of_its_numbers(dtype: torch.dtype) -> None:
    """600 squared is no number in float16. Rewards 0 and r give (-1, 1) / sqrt 2 for any r that is large."""
    for high in (600, 1000) if dtype != torch.int8 else (100, 120):
        found = base_advantages(torch.tensor([[0, high]], dtype=dtype))
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert found[0].tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-4)


@pytest.mark.parametrize(
    ("rewards", "scale", "about"),
    [
        (torch.zeros(2, 3, 4), "group", r"\(B, G\).*\(2, 3, 4\)"),
        (torch.tensor([[0.0, 1.0], [0.0, INF]]), "group", "response 1 of group 1"),
        *((torch.zeros(2, 4), scale, r"scale_rewards.*group.*batch.*none") for scale in ("groups", False, "std")),
    ],
)
def test_base_advantages_refuse_what_they_would_get_wrong(rewards: Tensor, scale: Any, about: str) -> None:
    with pytest.raises(ValueError, match=about):
        base_advantages(rewards, scale)


# --- what every method keeps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@every_method
def test_devices_and_precisions_agree(method: str, device: str) -> None:
    x = features_of(1, 3, 6)
    exact, single = outcome(method, x), outcome(method, cast(x, torch.float32, device))
    assert {value.device.type for value in single.values()} == {device}
    assert {value.dtype for value in single.values()} == {torch.float32}
    assert_close(cast(single, torch.float64), exact, 2e-5)


@every_method
@for_all(10, seed=seeds)
def test_equalize_mean_gives_a_mean_of_1_over_what_is_trained_on(method: str, seed: int) -> None:
    x = features_of(seed, 3, 4)
    x["rewards"][0, 0] = NAN
    rollouts = rollouts_of(x)
    own, equal = (weights(method, rollouts, alpha=0.9, seed=seed, equalize_mean=e) for e in (False, True))
    counted = rollouts.scorable if own.ndim == 2 else rollouts.scorable.unsqueeze(-1) & rollouts.mask
    assert equal[counted].mean().item() == pytest.approx(1)
    torch.testing.assert_close(equal * own[counted].mean(), own)  # methods keep where they push
    trained = advantages(method, rollouts, alpha=0.9, seed=seed, equalize_mean=True)
    torch.testing.assert_close(trained * own[counted].mean(), advantages(method, rollouts, alpha=0.9, seed=seed))


# --- rewards that are equal, or not there ---------------------------------------------------------------------------


@every_method
@both_types
def test_a_single_response_has_weight_1_and_advantage_0(method: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        rollouts = rollouts_of(cast(features_of(seed, 3, 1), dtype))
        assert weights(method, rollouts).eq(1).all()
        assert advantages(method, rollouts).eq(0).all()


# What makes a rule for rewards give all of a group the same.
ALIKE = {
    "empo": {"clusters": 0, "answered": 1},
    "care": {"ref_logps": -0.7, "answer_mask": 1},
    "care_agreement": {"embeddings": 0.3},
}


def alike(method: str, x: Features) -> Features:
    return x | {name: torch.full_like(x[name], value) for name, value in ALIKE.get(method, {}).items()}


@every_method
@both_types
def test_equal_rewards_give_an_advantage_of_exactly_0(method: str, dtype: torch.dtype) -> None:
    for value, size in itertools.product((0.1, 0.7, 1 / 3, 1e-8, 1e6, -0.3), (2, 7, 16)):
        x = cast(alike(method, features_of(size, 3, size)), dtype)
        x["rewards"] = torch.full((3, size), value, dtype=dtype)
        x["rewards"][1, 0] = x["rewards"][2, 1:] = NAN  # they are equal where they exist
        x["correctness"] = torch.ones(3, size, dtype=dtype)  # a wrong group is EGPO's own
        assert advantages(method, rollouts_of(x)).eq(0).all(), (value, size)


@every_method
@for_all(10, seed=seeds, size=st.integers(2, 6), fill=st.sampled_from([NAN, INF, -INF, 1e30]))
def test_what_an_unscorable_response_says_does_not_matter(method: str, seed: int, size: int, fill: float) -> None:
    x = features_of(seed, 2, size, shortest=0)
    x["correctness"] = x["rewards"] / 2
    gone = torch.zeros(2, size, dtype=torch.bool)
    gone[0, seed % size] = gone[1, seed % 2] = True
    x["rewards"][gone] = NAN
    expected = outcome(method, x)
    assert expected["advantages"][gone].eq(0).all()
    for name, value in x.items():
        if name != "rewards":
            value[gone] = fill if value.is_floating_point() else value[~gone][0] if "clusters" in name else ~value[gone]
    x["nli"].transpose(1, 2)[gone] = fill
    assert_close(outcome(method, x), expected, 0)
    x["correctness"][gone] = 1.0
    assert_close(outcome(method, x), expected, 0)


@every_method
@for_all(10, seed=seeds, size=st.integers(3, 8))
def test_an_unscorable_response_enters_no_statistic(method: str, seed: int, size: int) -> None:
    x, options = features_of(seed, 2, size, shortest=0), ALL_CANDIDATES.get(method, {})
    kept = torch.arange(size) != seed % size
    expected = outcome(method, responses(x, kept), alpha=0.6, **options)
    x["rewards"][:, ~kept] = NAN
    # alpha is divided by log G, and G stays the size of the group.
    alpha = 0.6 if method == "qhawkeye" else 0.6 * math.log(size) / math.log(size - 1)
    found = outcome(method, x, alpha=alpha, **options)
    assert_close({name: value[:, kept] for name, value in found.items()}, expected)
    assert found["advantages"][:, ~kept].eq(0).all()
    if METHODS[method].granularity != "group":
        assert found["weights"][:, ~kept].eq(1).all()


@every_method
def test_a_group_without_rewards_has_weight_1_and_advantage_0(method: str) -> None:
    x = features_of(5, 3, 4) | {"rewards": torch.full((3, 4), NAN, dtype=torch.float64)}
    for name, value in outcome(method, x).items():
        assert value.eq(1 if name == "weights" else 0).all(), name


# --- tokens that are not there --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", READ_TOKENS)
@for_all(10, seed=seeds, fill=st.sampled_from([INF, -INF, 0.5]))
def test_what_stands_where_no_token_is_does_not_matter(method: str, seed: int, fill: float) -> None:
    """It is NaN to begin with."""
    x = features_of(seed, 2, 4, shortest=0)
    expected = outcome(method, x)
    for name in TOKENS:
        x[name][~x["mask"]] = fill
    for kind in (torch.bool, torch.int64, torch.float64):
        assert_close(outcome(method, x | {name: x[name].to(kind) for name in ("mask", "answer_mask")}), expected, 0)


@pytest.mark.parametrize("method", READ_TOKENS)
def test_an_empty_or_masked_completion_has_weight_1(method: str) -> None:
    """A truncated one that TRL masks looks the same."""
    x = features_of(0, 2, 4)
    x["mask"][0, 1] = x["mask"][1] = False
    found = outcome(method, x)
    assert all(value.isfinite().all() for value in found.values())
    assert found["weights"][1].eq(1).all()
    if METHODS[method].granularity != "group":
        assert found["weights"][0, 1].eq(1).all()
    assert "paid" not in found or found["paid"][~x["mask"]].eq(0).all()


@pytest.mark.parametrize("method", MEAN_OF_TOKENS)
@for_all(10, seed=seeds, size=st.integers(3, 8))
def test_an_empty_completion_enters_no_mean_over_tokens(method: str, seed: int, size: int) -> None:
    x, row = features_of(seed, 2, size), METHODS[method]
    kept = torch.arange(size) != seed % size
    x["mask"][:, ~kept] = False
    x["rewards"][:, ~kept] = 0.0  # a wrong one: a group is entirely wrong with it or without
    found, expected = (modulate(row, rollouts_of(some)) for some in (x, responses(x, kept)))
    if row.granularity == "group":  # whose strength is alpha / log G
        torch.testing.assert_close(found.columns["se"], expected.columns["se"])
    else:
        torch.testing.assert_close(found.weight[:, kept], expected.weight)


@pytest.mark.parametrize("method", READ_TOKENS)
def test_a_batch_without_any_token_is_not_modulated(method: str) -> None:
    x = features_of(1, 2, 4)
    found = outcome(method, x | {name: x[name][..., :0] for name in (*TOKENS, "mask")})
    assert found["weights"].eq(1).all()
    assert "paid" not in found or found["paid"].eq(0).all()


# --- weights that are not finite ------------------------------------------------------------------------------------

BREAKING: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "gcpo_bot": ("embeddings", lambda x: x[1, 2].zero_()),  # no direction
    "gcpo_shuffled": ("embeddings", lambda x: x[1, 2].zero_()),  # the group whose features are broken, not its heir
    "edge_grpo": ("entropies", lambda x: x[1, 2].fill_(1e-320)),  # mean H / H overflows
    "r2vpo": ("ratios", lambda x: x[1, 2].fill_(INF)),
    "cw_grpo": ("logps", lambda x: x[1, 2].fill_(-INF)),
}


@pytest.mark.parametrize("method", BREAKING)
def test_a_weight_that_is_not_finite_is_an_error_that_names_method_and_group(method: str) -> None:
    feature, spoil = BREAKING[method]
    x = features_of(7, 3, 4)
    spoil(x[feature])
    for function, seed in itertools.product((weights, advantages), range(3)):
        for options in [{}] + [{"shuffle": moved} for moved in ("geo", "rd") if method == "gcpo_shuffled"]:
            with pytest.raises(ValueError, match=rf"{method}: the weight of group 1 is not finite.*{feature}"):
                function(method, rollouts_of(x), seed=seed, **options)


def test_equalize_mean_leaves_out_what_is_not_finite() -> None:
    x = features_of(0, 3, 4)
    x["embeddings"][1] = 0  # no length, no direction
    weight = modulate(METHODS["cd_only"], rollouts_of(x), equalize_mean=True).weight
    assert weight[1].isnan().all()
    assert weight[[0, 2]].mean() == pytest.approx(1)
    with pytest.raises(ValueError, match="the weight of group 1 is not finite"):
        weights("cd_only", rollouts_of(x), equalize_mean=True)
