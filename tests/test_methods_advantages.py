"""The table of methods, and how rows are applied: the shuffled control, a Method of one's own, options."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import for_all, seeds
from hypothesis import strategies as st
from papers import LONGEST, features, sampled

from gcpo.methods import METHODS, Method, advantages, base_advantages, get_method, modulate, permutation, weights
from gcpo.rollouts import MissingFeatureError, Rollouts
from gcpo.weights import FORMS, weight_range

INF = math.inf
EGPOS = [name for name in METHODS if name.startswith("egpo")]

every_method = pytest.mark.parametrize("method", METHODS)


def rollouts_of(seed: int, groups: int, size: int) -> Rollouts:
    return Rollouts(**features(*sampled(seed, groups, size)), max_completion_length=LONGEST)


def factors(row: Method) -> list[Any]:
    return list(row.factors)


# --- the table of methods -------------------------------------------------------------------------------------------

# Where each of the papers' methods acts, and the finest thing that it tells apart.
PLACES = {
    "grpo dr_grpo dapo": ("base", "response"),
    "se seed_grpo kle cd_only bot_only rd_only gcpo_cd gcpo_bot gcpo_shuffled qhawkeye": ("advantage", "group"),
    "gcpo_strong se_shuffled drop_half": ("advantage", "group"),
    "empo care care_agreement": ("reward", "response"),
    "egspo edge_grpo egpo egpo_c1 egpo_c2 egpo_c3 egpo_c4 egpo_c5 egpo_c6": ("advantage", "response"),
    "r2vpo": ("loss", "response"),
    "cw_grpo": ("advantage", "token"),
    "clip_cov kl_cov": ("loss", "token"),
}


PLACE = {name: place for names, place in PLACES.items() for name in names.split()}


def test_where_each_method_acts_and_on_what() -> None:
    assert {name: (METHODS[name].acts, METHODS[name].granularity) for name in PLACE} == PLACE


def those(flag: Callable[[Method], bool]) -> list[str]:
    return [name for name in PLACE if flag(METHODS[name])]


def test_what_methods_need_to_be_told() -> None:
    assert those(lambda row: row.needs_correctness) == ["care", "care_agreement", *EGPOS]
    assert those(lambda row: row.in_loss) == ["r2vpo", "clip_cov", "kl_cov"]
    assert those(lambda row: row.permuted) == ["gcpo_shuffled", "se_shuffled"]
    assert those(lambda row: row.drops_equal) == ["dapo"]
    entailment = ["se", "kle", "bot_only", "gcpo_bot", "gcpo_shuffled", "gcpo_strong", "se_shuffled"]
    assert those(lambda row: row.needs_entailment(full_completion=True)) == entailment
    assert those(lambda row: row.needs_entailment(full_completion=False)) == [*entailment, "empo"]


@pytest.mark.parametrize(
    ("method", "direction"),
    [
        ("grpo", ""),
        ("se", "damps groups whose answers differ"),
        ("seed_grpo", "damps groups whose answers differ"),
        ("rd_only", "boosts groups whose rewards differ"),
        ("qhawkeye", "damps groups whose rewards differ"),
        ("gcpo_bot", "damps groups whose answers differ; boosts groups whose rewards differ"),
        ("edge_grpo", "boosts confident responses"),
        ("egpo", "boosts confident responses"),
        ("egspo", "damps confident responses"),
        ("gcpo_shuffled", "moves weights to other groups"),
        ("drop_half", "drops groups at random"),
    ],
)
def test_directions(method: str, direction: str) -> None:
    assert METHODS[method].direction == direction


def use(method: str, rollouts: Rollouts) -> None:
    """Everything that a method does with rollouts."""
    weights(method, rollouts)
    advantages(method, rollouts)
    if METHODS[method].penalty is not None:
        METHODS[method].penalty.coefficients(rollouts, base_advantages(rollouts.rewards))


@every_method
def test_a_method_reads_what_its_row_says_and_nothing_else_and_names_what_it_misses(method: str) -> None:
    read: list[str] = []
    x, row = features(*sampled(2, 2, 4)), METHODS[method]
    rewards = x.pop("rewards")
    del x["exact_clusters"]  # which would be read for "clusters"
    x = {name: value.nan_to_num() for name, value in x.items()} | {"correctness": rewards / 2}
    lazy = {name: lambda n=name, v=value: (read.append(n), v)[1] for name, value in x.items()}
    use(method, Rollouts(rewards, **lazy))
    assert sorted(read) == sorted(
        row.reads | ({"correctness"} if row.needs_correctness else set())
    )  # each of them once
    for missing in row.reads:
        with pytest.raises(MissingFeatureError, match=f"have no '{missing}'"):
            use(method, Rollouts(rewards, **lazy | {missing: None}))


@every_method
def test_the_product_of_the_factors_is_the_weight_and_each_is_logged_under_its_name(method: str) -> None:
    rollouts, row = rollouts_of(4, 3, 5), METHODS[method]
    found = modulate(row, rollouts)
    shapes = {"group": (3,), "response": (3, 5), "token": rollouts.mask.shape}
    expected = {name: shapes[f.granularity] for f in factors(row) for name in (f.measure, f.weight)}
    assert {name: tuple(value.shape) for name, value in found.columns.items()} == expected
    product = torch.ones_like(found.weight)
    for factor in factors(row):
        own = found.columns[factor.weight]
        product = product * own.view(*own.shape, *[1] * (product.ndim - own.ndim))
    order = permutation(3, 0) if row.permuted else range(3)
    torch.testing.assert_close(found.weight, product[order] ** row.power)
    torch.testing.assert_close(found.advantages, advantages(method, rollouts))


@pytest.mark.parametrize(
    ("name", "nearest"), [("gcpo_bt", "gcpo_bot"), ("GRPO", None), ("rd", "rd_only"), ("se*egpo", None), ("", None)]
)
def test_an_unknown_method_is_an_error_with_the_nearest_name(name: str, nearest: str | None) -> None:
    with pytest.raises(ValueError, match=f"Unknown method '{re.escape(name)}'.*Valid names: .*gcpo_cd") as raised:
        get_method(name)
    assert (f"Did you mean {nearest!r}?" in str(raised.value)) == (nearest is not None)


# --- the shuffled control -------------------------------------------------------------------------------------------


@for_all(10, seed=seeds, groups=st.integers(2, 12))
def test_shuffled_weights_are_gcpo_bots_or_of_one_factor_each_at_another_group(seed: int, groups: int) -> None:
    rollouts, order = rollouts_of(seed, groups, 6), permutation(groups, seed)
    assert sorted(order.tolist()) == list(range(groups))
    assert not order.eq(torch.arange(groups)).any()
    geo, rd = (weights(method, rollouts) for method in ("bot_only", "rd_only"))
    expected = {"geo": geo[order] * rd, "rd": geo * rd[order], "both": (geo * rd)[order]}
    for moved, weight in expected.items():
        assert torch.equal(weights("gcpo_shuffled", rollouts, seed=seed, shuffle=moved), weight), moved
    assert torch.equal(weights("gcpo_shuffled", rollouts, seed=seed), expected["both"])


def test_the_permutation_is_decided_by_its_seed_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    drawn = {tuple(permutation(8, seed).tolist()) for seed in range(50)}
    assert torch.equal(torch.rand(2), expected)  # the global generator was left alone
    assert drawn == {tuple(permutation(8, seed).tolist()) for seed in range(50)}
    assert len(drawn) > 40
    assert {order[0] for order in drawn} == set(range(1, 8))  # any other group may lend its weight


def test_one_group_cannot_be_shuffled() -> None:
    with pytest.raises(ValueError, match=r"at least 2 groups, got 1: put more prompts into the generation batch"):
        weights("gcpo_shuffled", rollouts_of(0, 1, 4))


def together(names: str) -> Method:
    """A method of a user's own, with the factors of several."""
    return Method(paper="", rule="", factors=tuple(f for name in names.split() for f in METHODS[name].factors))


@for_all(10, seed=seeds)
def test_group_response_and_token_weights_are_multiplied_with_one_another(seed: int) -> None:
    rollouts = rollouts_of(seed, 3, 4)
    own = {name: weights(name, rollouts) for name in ("se", "egpo", "cw_grpo", "r2vpo")}
    # EGPO's A = -1 leaves no covariance in an entirely wrong group.
    token = torch.where(rollouts.rewards.le(1).all(1)[:, None, None], 1.0, own["cw_grpo"])
    expected = (own["se"] * own["egpo"] * own["r2vpo"]).unsqueeze(-1) * token
    for order in ("se egpo cw_grpo r2vpo", "cw_grpo r2vpo egpo se"):
        torch.testing.assert_close(modulate(together(order), rollouts).weight, expected)


def test_stages_choose_factors_and_only_the_first_one_reinforces() -> None:
    groups = sampled(4, 2, 4)
    groups[0].rewards = [0.0] * 4
    rollouts, row = Rollouts(**features(*groups)), together("se egpo r2vpo")
    early = modulate(row, rollouts, stages=("advantage",))
    assert set(early.columns) == {"se", "w_se", "entropy", "w_entropy"}
    torch.testing.assert_close(early.weight, weights("se", rollouts) * weights("egpo", rollouts))
    assert early.base[0].eq(-1).all()
    base = torch.full((2, 4), 0.7, dtype=torch.float64)
    late = modulate(row, rollouts, base, stages=("loss",))
    assert set(late.columns) == {"ratio_variance", "w_ratio"}
    torch.testing.assert_close(late.weight, weights("r2vpo", rollouts))
    assert torch.equal(late.base, base)


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "option", "valid"),
    [
        ("se", "clustres", "form alpha_norm estimator clusters"),
        ("rd_only", "clusters", "form alpha_norm alpha_rd"),
        ("cd_only", "estimator", "form alpha_norm alpha_geo"),
        ("bot_only", "estimator", "form alpha_norm alpha_geo clusters"),
        ("gcpo_shuffled", "shufle", "form alpha_norm alpha_geo clusters alpha_rd shuffle"),
        ("gcpo_bot", "shuffle", "form alpha_norm alpha_geo clusters alpha_rd"),
        ("kle", "clusters", "form alpha_norm kernel t"),
        ("qhawkeye", "alpha_rd", "form alpha_norm"),
        ("egpo", "form", "correct wrong renorm all_wrong scope epsilon"),
        ("r2vpo", "lambda", "lambda_"),
        ("clip_cov", "shares", "share band clip"),
        ("kl_cov", "coeff", "share coefficient"),
        ("care", "caps", "coefficient margin cap"),
        ("care_agreement", "margin", "coefficient"),
        ("empo", "form", "clusters"),
        ("dapo", "length", "share"),
        ("grpo", "form", ""),
        ("cw_grpo", "sigma", ""),
    ],
)
def test_an_unknown_option_is_an_error_that_names_the_valid_ones(method: str, option: str, valid: str) -> None:
    for function in (get_method, lambda m, **o: weights(m, rollouts_of(0, 2, 4), **o)):
        with pytest.raises(ValueError, match=f"has no option '{option}'") as raised:
            function(method, **{option: 1})
        _, _, named = str(raised.value).rstrip(".").partition("Valid names: ")
        assert set(named.split(", ")) == set(valid.split(" ")), raised.value


@pytest.mark.parametrize(
    ("method", "option", "value", "message"),
    [
        ("se", "form", "sigmoid", r"form is 'sigmoid', expected one of linear, square, reciprocal, exponential, focal"),
        ("se", "form", None, r"form is None, expected one of linear"),
        ("se", "estimator", "median", r"estimator is 'median', expected one of counts, rao, mc\."),
        ("se", "clusters", "words", r"clusters is 'words', expected one of greedy, bidirectional, exact, math, task\."),
        ("empo", "clusters", "nli", r"clusters is 'nli', expected one of greedy, bidirectional, exact, math, task\."),
        ("gcpo_bot", "alpha_norm", "log", r"alpha_norm is 'log', expected one of log_g, none\."),
        ("gcpo_bot", "alpha_geo", -0.1, r"alpha_geo must be at least 0, got -0\.1\."),
        ("gcpo_shuffled", "alpha_rd", INF, r"alpha_rd must be at least 0, got inf\."),
        ("rd_only", "alpha_rd", "0.6", r"alpha_rd must be at least 0, got '0\.6', which is no number\."),
        ("kle", "kernel", "rbf", r"kernel is 'rbf', expected one of heat, matern"),
        ("kle", "t", -1, r"t is -1, expected a diffusion time of at least 0"),
        ("kle", "t", "0.3", r"t is '0\.3', expected a diffusion time"),
        ("gcpo_shuffled", "shuffle", "cd", r"shuffle is 'cd', expected one of both, geo, rd\."),
        ("gcpo_shuffled", "shuffle", None, r"shuffle is None, expected one of both, geo, rd\."),
        ("edge_grpo", "epsilon", -1e-5, r"epsilon must be at least 0, got -1e-05\."),
        ("egpo", "scope", "prompt", r"scope is 'prompt', expected one of joint, thinking, answer\."),
        ("egpo", "renorm", "both", r"renorm is 'both', expected one of none, before, after\."),
        ("egpo", "all_wrong", "drop", r"all_wrong is 'drop', expected one of none, weighted, locked\."),
        ("egpo", "correct", (2.0, 1.0), r"correct is \(2\.0, 1\.0\), expected \(low, high\) with 0 <= low <= high"),
        ("egpo", "wrong", [-1.0, 1.0], r"wrong is \(-1\.0, 1\.0\), expected \(low, high\)"),
        ("dapo", "share", 0.0, r"share is 0\.0"),  # no room for a penalty, and 0/0 at its end
        ("dapo", "share", 1.1, r"share is 1\.1"),
        *(("r2vpo", "lambda_", value, "lambda_ must be at least 0") for value in (-0.5, INF, math.nan)),
        ("care", "coefficient", -0.5, "coefficient must be at least 0"),
        ("care", "margin", -0.01, "margin must be at least 0"),
        ("care", "cap", 0.0, "cap is 0.0, expected a probability above 0"),
        ("care", "cap", 1.5, "cap is 1.5"),
        ("care_agreement", "coefficient", -0.5, "coefficient must be at least 0"),
        ("clip_cov", "share", -0.1, "share is -0.1, expected a share of the batch's tokens"),
        ("clip_cov", "share", 1.1, "share is 1.1"),
        ("clip_cov", "band", (5.0, 1.0), r"band is \(5.0, 1.0\), expected \(low, high\) with low < high"),
        ("clip_cov", "clip", (0.2, -0.2), "clip must be at least 0"),
        ("kl_cov", "share", 0.0, "share is 0.0"),
        ("kl_cov", "coefficient", -1.0, "coefficient must be at least 0"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_valid_ones(
    method: str, option: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        get_method(method, **{option: value})


def test_options_go_to_every_component_that_has_them() -> None:
    (egpo,) = factors(get_method("egpo", epsilon=0.5, wrong=[0.5, 1]))
    assert (egpo.epsilon, egpo.wrong) == (0.5, (0.5, 1))
    assert (
        get_method("care", margin=0.1).reward.margin == 0.1 and get_method("kl_cov", share=0.25).penalty.share == 0.25
    )
    assert [factor.form for factor in factors(get_method("gcpo_bot", form="exponential"))] == ["exponential"] * 2
    assert factors(METHODS["se"])[0].form == "linear"  # the table stays as it is


def test_equalize_mean_leaves_out_what_is_not_finite() -> None:
    embeddings = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    embeddings[1] = 0  # no length, no direction
    rollouts = Rollouts(torch.zeros(3, 4), embeddings=embeddings, clusters=torch.zeros(3, 4).long())
    weight = modulate(get_method("cd_only"), rollouts, equalize_mean=True).weight
    assert weight[1].isnan().all()
    assert weight[[0, 2]].mean() == pytest.approx(1)
    with pytest.raises(ValueError, match="the weight of group 1 is not finite"):
        weights("cd_only", rollouts, equalize_mean=True)


def test_alpha_geo_and_alpha_rd_are_alpha_where_they_are_not_given() -> None:
    assert get_method("gcpo_bot", alpha_geo=0.3, alpha_rd=0.3) == get_method("gcpo_bot", alpha=0.3)
    assert get_method("gcpo_bot", alpha_geo=0.6) == get_method("gcpo_bot", alpha_rd=None) == METHODS["gcpo_bot"]
    row = get_method("gcpo_cd", alpha=0.2, alpha_rd=0.9)
    assert [factor.alpha for factor in factors(row)] == [0.2, 0.9] and row.alpha is None


def test_options_change_what_is_read() -> None:
    for estimator in ("rao", "mc"):
        assert get_method("se", estimator=estimator).reads == {"clusters", "logps", "mask"}
    assert get_method("seed_grpo", estimator="counts").reads == {"clusters"}
    assert get_method("egpo", scope="answer").reads == {"logps", "mask", "answer_mask"}
    assert not get_method("edge_grpo", wrong=(0, INF)).needs_correctness
    assert get_method("edge_grpo", wrong=(0, 1.0)).needs_correctness
    assert get_method("egpo", correct=(0, 1), wrong=(0, 1)).needs_correctness  # for its entirely wrong groups
    for kind, read in (("greedy", "clusters"), ("bidirectional", "nli")):
        row = get_method("seed_grpo", estimator="counts", clusters=kind)
        assert row.needs_entailment(full_completion=True) and row.reads == {read}
    assert get_method("gcpo_bot", clusters="bidirectional").reads == {"embeddings", "nli"}
    assert get_method("empo", clusters="bidirectional").reads == {"answered", "nli"}
    assert not get_method("se", clusters="exact").needs_entailment(full_completion=False)
    assert get_method("rd_only", form="linear").direction == "damps groups whose rewards differ"


# --- ranges of options ----------------------------------------------------------------------------------------------

OPEN = (0.0, INF)
RENORM = ("none", "before", "after")
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "se": [{"form": form, "estimator": e} for form in FORMS for e in ("counts", "rao", "mc")],
    "gcpo_bot": [
        *({"form": form} for form in FORMS),
        *({"alpha_norm": norm, "alpha_geo": 2.0, "alpha_rd": rd} for norm in ("log_g", "none") for rd in (None, 0.1)),
    ],
    "gcpo_shuffled": [{"shuffle": moved} for moved in ("both", "geo", "rd")],
    "kle": [{"kernel": kernel, "t": t} for kernel in ("heat", "matern") for t in (0.0, 0.05, 3.0)],
    "qhawkeye": [{"form": form, "alpha_norm": norm} for form in FORMS for norm in ("log_g", "none")],
    "egspo": [
        *({"renorm": r, "correct": c} for r in RENORM for c in ((0.5, 1.0), (0.2, 3.0))),
        *({"renorm": r, "correct": OPEN, "wrong": (0.1, INF)} for r in RENORM),
    ],
    "edge_grpo": [
        *({"renorm": r, "correct": (0.5, 2.0), "wrong": (0.5, 2.0)} for r in RENORM),
        *({"renorm": r} for r in RENORM),
        {"correct": (0.5, INF)},
    ],
    "egpo": [{"renorm": r, "correct": c} for r in RENORM for c in ((1.0, 2.0), (0.5, 3.0), (1.0, INF))],
}


@pytest.mark.parametrize("method", OPTIONS)
@for_all(10, seed=seeds, size=st.integers(2, 8))
def test_every_choice_of_options_keeps_its_own_range(method: str, seed: int, size: int) -> None:
    found = features(*sampled(seed, 3, size))
    rollouts = Rollouts(**found | {name: found[name] ** 3 for name in ("logps", "entropies")})
    for options in OPTIONS[method]:
        low, high = weight_range(method, 0.9, size, **options)
        reached = weights(method, rollouts, alpha=0.9, **options)
        assert low - 1e-6 <= reached.min() <= reached.max() <= high + 1e-6, options


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.float64])
def test_base_advantages_of_any_type_are_those_of_its_numbers(dtype: torch.dtype) -> None:
    """600 squared is no number in float16. Rewards 0 and r give (-1, 1) / sqrt 2 for any r that is large."""
    for high in (600, 1000) if dtype != torch.int8 else (100, 120):
        found = base_advantages(torch.tensor([[0, high]], dtype=dtype))
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert found[0].tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-4)


@pytest.mark.parametrize(
    ("rewards", "about"),
    [
        (torch.zeros(2, 3, 4), r"a tensor of shape \(B, G\), got shape \(2, 3, 4\)"),
        (torch.zeros(4), r"got shape \(4,\)"),
        (torch.tensor([[0.0, 1.0], [0.0, math.inf]]), "response 1 of group 1 is inf"),
    ],
)
def test_base_advantages_refuse_what_they_would_get_wrong(rewards: torch.Tensor, about: str) -> None:
    with pytest.raises(ValueError, match=about):
        base_advantages(rewards)
