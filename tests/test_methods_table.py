"""The table of methods, options, strengths and forms, the shuffled control, and the ranges that weights reach."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import for_all, seeds
from hypothesis import strategies as st
from papers import LONGEST, features, sampled

from gcpo.methods.apply import METHODS, Method, advantages, base_advantages, get_method, modulate, permutation, weights
from gcpo.rollouts import MissingFeatureError, Rollouts
from gcpo.weights import FORMS, alpha_g, boost, damp, damp_square, exponential, focal, reciprocal, weight_range

INF = math.inf
EGPOS = [name for name in METHODS if name.startswith("egpo")]
GROUP_WEIGHTS = [name for name, row in METHODS.items() if row.alpha is not None]

every_method = pytest.mark.parametrize("method", METHODS)


def rollouts_of(seed: int, groups: int, size: int) -> Rollouts:
    return Rollouts(**features(*sampled(seed, groups, size)), max_completion_length=LONGEST)


# --- the table ------------------------------------------------------------------------------------------------------


@every_method
def test_a_method_reads_what_its_row_says_and_nothing_else_and_names_what_it_misses(method: str) -> None:
    read: list[str] = []
    x, row = features(*sampled(2, 2, 4)), METHODS[method]
    rewards = x.pop("rewards")
    del x["exact_clusters"]  # which would be read for "clusters"
    x = {name: value.nan_to_num() for name, value in x.items()} | {"correctness": rewards / 2}
    lazy = {name: lambda n=name, v=value: (read.append(n), v)[1] for name, value in x.items()}

    def use(rollouts: Rollouts) -> None:
        weights(method, rollouts)
        advantages(method, rollouts)
        if row.penalty is not None:
            row.penalty.coefficients(rollouts, base_advantages(rollouts.rewards))

    use(Rollouts(rewards, **lazy))
    assert sorted(read) == sorted({*row.reads, *["correctness"] * row.needs_correctness})  # each of them once
    for missing in row.reads:
        with pytest.raises(MissingFeatureError, match=f"'{missing}'"):
            use(Rollouts(rewards, **lazy | {missing: None}))


@every_method
def test_the_product_of_the_factors_is_the_weight_and_each_is_logged_under_its_name(method: str) -> None:
    rollouts, row = rollouts_of(4, 3, 5), METHODS[method]
    found = modulate(row, rollouts)
    shapes = {"group": (3,), "response": (3, 5), "token": rollouts.mask.shape}
    expected = {name: shapes[f.granularity] for f in row.factors for name in (f.measure, f.weight)}
    assert {name: tuple(value.shape) for name, value in found.columns.items()} == expected
    product = torch.ones_like(found.weight)
    for factor in row.factors:
        own = found.columns[factor.weight]
        product = product * own.view(*own.shape, *[1] * (product.ndim - own.ndim))
    order = permutation(3, 0) if row.permuted else range(3)
    torch.testing.assert_close(found.weight, product[order] ** row.power)
    torch.testing.assert_close(found.advantages, advantages(method, rollouts))


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
    before = torch.get_rng_state()
    drawn = {tuple(permutation(8, seed).tolist()) for seed in range(50)}
    assert torch.equal(torch.get_rng_state(), before)  # the global generator was left alone
    assert drawn == {tuple(permutation(8, seed).tolist()) for seed in range(50)}
    assert len(drawn) > 40
    assert {order[0] for order in drawn} == set(range(1, 8))  # any other group may lend its weight
    with pytest.raises(ValueError, match=r"at least 2 groups, got 1"):
        weights("gcpo_shuffled", rollouts_of(0, 1, 4))


# --- names and options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("gcpo_bt", "gcpo_bot"), ("GRPO", "grpo"), ("rd", "rd_only"), ("ucas", "se"), ("", ""), (["se"], "se")],
)
def test_an_unknown_method_is_an_error_with_the_nearest_name(name: Any, nearest: str) -> None:
    with pytest.raises(ValueError, match=r"Unknown method .*Valid names: .*gcpo_cd") as raised:
        get_method(name)
    assert repr(name) in str(raised.value) and nearest in str(raised.value)


@pytest.mark.parametrize(
    ("method", "option", "valid"),
    [
        ("se", "clustres", "form alpha_norm estimator clusters"),
        ("gcpo_shuffled", "shufle", "form alpha_norm alpha_geo clusters alpha_rd shuffle"),
        ("grpo", "form", ""),
    ],
)
def test_an_unknown_option_is_an_error_that_names_the_valid_ones(method: str, option: str, valid: str) -> None:
    with pytest.raises(ValueError, match=f"{method} has no option '{option}'") as raised:
        get_method(method, **{option: 1})
    _, _, named = str(raised.value).rstrip(".").partition("Valid names: ")
    assert set(named.split(", ")) == set(valid.split(" ")), raised.value


@pytest.mark.parametrize(
    ("method", "option", "values", "named"),
    [
        ("se", "form", ["sigmoid", None], "linear, square, reciprocal, exponential, focal"),
        ("empo", "clusters", ["nli"], "greedy, bidirectional, exact, math, task"),
        ("gcpo_shuffled", "alpha_rd", [-0.1, INF, "0.6", math.nan], "at least 0"),
        ("kle", "t", ["0.3", math.nan], "at least 0"),
        ("gcpo_shuffled", "shuffle", ["cd", None], "both, geo, rd"),
        ("gcpo_strong", "power", [-1], "at least 0"),
        ("egpo", "correct", [(2.0, 1.0)], "low <= high"),
        ("egpo", "wrong", [[-1.0, 1.0]], "0 <= low"),
        ("dapo", "share", [0.0, 1.1], "above 0 and at most 1"),
        ("clip_cov", "band", [(5.0, 1.0)], "low < high"),
        ("clip_cov", "clip", [(0.2, -0.2)], "at least 0"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_it_and_the_valid_ones(
    method: str, option: str, values: list[Any], named: str
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=option) as raised:
            get_method(method, **{option: value})
        said = str(raised.value)
        assert named in said and str(value[1] if option == "clip" else value).strip("[]()") in said, said


@every_method
def test_every_constant_that_is_a_number_is_not_negative(method: str) -> None:
    for one in METHODS[method].components:
        for option in one.OPTIONS:
            if isinstance(getattr(one, option, None), float):
                with pytest.raises(ValueError, match=f"^{option} (must be at least 0|is -0.1, expected a share)"):
                    get_method(method, **{option: -0.1})


def test_options_and_alphas_go_to_every_component_that_has_them() -> None:
    (egpo,) = get_method("egpo", epsilon=0.5, wrong=[0.5, 1]).factors
    assert (egpo.epsilon, egpo.wrong) == (0.5, (0.5, 1))
    assert get_method("care", margin=0.1).reward.margin == 0.1
    assert get_method("kl_cov", share=0.25).penalty.share == 0.25
    assert [factor.form for factor in get_method("gcpo_bot", form="exponential").factors] == ["exponential"] * 2
    assert METHODS["se"].factors[0].form == "linear"  # the table stays as it is
    assert get_method("gcpo_bot", alpha_geo=0.3, alpha_rd=0.3) == get_method("gcpo_bot", alpha=0.3)
    assert get_method("gcpo_bot", alpha_geo=0.6) == get_method("gcpo_bot", alpha_rd=None) == METHODS["gcpo_bot"]
    row = get_method("gcpo_cd", alpha_geo=0.2, alpha_rd=0.9)
    assert [factor.alpha for factor in row.factors] == [0.2, 0.9] and row.alpha is None


def test_options_change_what_is_read() -> None:
    for estimator in ("rao", "mc"):
        assert get_method("se", estimator=estimator).reads == {"clusters", "logps", "mask"}
    for estimator in ("counts", "mean"):
        assert get_method("seed_grpo", estimator=estimator).reads == {"clusters"}
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


# --- strengths and forms --------------------------------------------------------------------------------------------


def test_alpha_g_of_the_papers() -> None:
    assert alpha_g(0.6, 16) == pytest.approx(0.21640, abs=5e-6)
    assert alpha_g(0.6, 1) == 0  # a single response is not modulated
    assert alpha_g(0.0417, 8) == pytest.approx(0.02, abs=1e-4)  # the 0.02 of SEED-GRPO's paper, at its own group size
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"group_size.*{size}"):
            alpha_g(0.6, size)


@pytest.mark.parametrize(
    ("name", "form", "expected"),  # of the scores -1, 0, 1, 2, 4, 8 at the strength 1/4
    [
        ("linear", damp, [1, 1, 0.75, 0.5, 0, 0]),  # SEED-GRPO Eq. 6
        ("square", damp_square, [0.75, 1, 0.75, 0, 0, 0]),  # GCPO Eq. 8
        ("boost", boost, [0.75, 1, 1.25, 1.5, 2, 3]),  # GCPO Eq. 11
        ("reciprocal", reciprocal, [1 / 0.75, 1, 0.8, 1 / 1.5, 0.5, 1 / 3]),  # SEED-GRPO's code
        ("exponential", exponential, [math.exp(-x / 4) for x in (-1, 0, 1, 2, 4, 8)]),  # SEED-GRPO section 4.3
        ("focal", focal, [1, 1, 0.5625, 0.25, 0, 0]),  # the linear form squared, which does not rise again
    ],
)
def test_forms_by_hand(name: str, form: Callable[..., torch.Tensor], expected: list[float]) -> None:
    scores = torch.tensor([-1, 0, 1, 2, 4, 8], dtype=torch.float64)
    assert FORMS[name] is form and form(scores, 0.25).tolist() == pytest.approx(expected, abs=1e-15)


# --- ranges ---------------------------------------------------------------------------------------------------------

AT_G_16 = {
    "cd_only": (0.80981, 1),  # 1 - 0.21640 (15/16)^2
    "bot_only": (0.94590, 1),  # 1 - 0.21640/4
    "rd_only": (1, 1.21640),
    "gcpo_cd": (0.80981, 1.21640),
    "gcpo_bot": (0.94590, 1.21640),
    "gcpo_shuffled": (0.94590, 1.21640),
    "gcpo_strong": (0.94590**16, 1.21640**16),
    "drop_half": (0, 1),
    **dict.fromkeys(("se", "kle", "se_shuffled"), (0.4, 1)),
    "seed_grpo": (0.95997, 1),  # 1/1.0417
    "qhawkeye": (0.8, 1),
    "egspo": (0.5, 1),
    "edge_grpo": (0.0625, INF),  # H is at most 16 times the mean
    **dict.fromkeys(EGPOS, (0.8, 2)),
    "egpo_c5": (0.41558, 2.28571),  # 0.8 among fifteen of 2 has the mean 30.8/16, and 2 among fifteen of 0.8, 14/16
    "r2vpo": (0, 1),
    "cw_grpo": (0, INF),
    "clip_cov": (0, 1),
}


@every_method
def test_size_of_the_effects_at_g_16_and_the_methods_own_alpha(method: str) -> None:
    if method in AT_G_16 or not METHODS[method].factors:
        assert weight_range(method, None, 16) == pytest.approx(AT_G_16.get(method, (1, 1)), rel=1e-3, abs=1e-5)
    assert weight_range(method, None, 1) == weight_range(method, 0.6, 1) == (1, 1)
    if method in GROUP_WEIGHTS:
        (low, high), (lower, higher) = (weight_range(method, alpha, 16) for alpha in (0.6, 1.2))
        assert weight_range(method, 0.0, 16) == (1, 1)
        assert lower <= low <= 1 <= high <= higher and higher - lower > high - low
    else:
        assert weight_range(method, 0.0, 16) == weight_range(method, 7.0, 16) == weight_range(method, None, 16)


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("se", {"form": "square"}, (0, 1)),  # 0.6 log 16 is above 1
        ("se", {"form": "boost"}, (1, 1.6)),
        ("gcpo_bot", {"alpha_norm": "none"}, (1 - 0.6 / 4, 1.6)),
        ("seed_grpo", {"form": "linear", "estimator": "counts", "alpha_norm": "none"}, (1 - 0.0417 * math.log(16), 1)),
        ("seed_grpo", {"estimator": "mc"}, (0, 1)),  # the Monte-Carlo entropy has no upper end
        ("seed_grpo", {"estimator": "mc", "form": "boost"}, (1, INF)),
        ("edge_grpo", {"epsilon": 1e-5}, (0, INF)),  # H may be below epsilon
        ("edge_grpo", {"renorm": "after"}, (0, 16)),  # all of the mean
        ("edge_grpo", {"correct": (0, 0.01), "wrong": (0, 0.01)}, (0.01, 0.01)),  # 1/16 is above both ends
    ],
)
def test_ranges_of_options_at_g_16(method: str, options: dict[str, Any], expected: tuple[float, float]) -> None:
    assert weight_range(method, None, 16, **options) == pytest.approx(expected, abs=1e-5)
    if options.get("estimator") == "mc":
        assert weight_range(method, 0.0, 16, **options) == (1, 1)


RENORM = ("none", "before", "after")
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "se": [{"form": form, "estimator": e} for form in FORMS for e in ("counts", "mean", "rao", "mc")],
    "gcpo_bot": [
        *({"form": form} for form in FORMS),
        *({"alpha_norm": norm, "alpha_geo": 2.0, "alpha_rd": rd} for norm in ("log_g", "none") for rd in (None, 0.1)),
    ],
    "gcpo_shuffled": [{"shuffle": moved} for moved in ("both", "geo", "rd")],
    "kle": [{"kernel": kernel, "t": t} for kernel in ("heat", "matern") for t in (0.0, 0.05, 3.0)],
    "egspo": [{"renorm": r, "correct": c} for r in RENORM for c in ((0.5, 1.0), (0.2, 3.0))],
    "edge_grpo": [{"renorm": r, "wrong": w} for r in RENORM for w in ((0.0, INF), (0.5, 2.0))],
    "egpo": [{"renorm": r, "correct": c} for r in RENORM for c in ((1.0, 2.0), (0.5, 3.0), (1.0, INF))],
}


@every_method
@for_all(10, seed=seeds, size=st.integers(1, 8), alpha=st.sampled_from([None, 0.0, 0.9, 3.0]))
def test_weights_keep_to_the_range_of_their_method_and_options(
    method: str, seed: int, size: int, alpha: float | None
) -> None:
    found = features(*sampled(seed, 3, size))
    rollouts = Rollouts(**found | {name: found[name] ** 3 for name in ("logps", "entropies")})
    for options in ({}, *OPTIONS.get(method, ())):
        low, high = weight_range(method, alpha, size, **options)
        reached = weights(method, rollouts, alpha=alpha, seed=seed, **options)
        assert low - 1e-6 <= reached.min() <= reached.max() <= high + 1e-6, options
