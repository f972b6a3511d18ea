"""Cases that do not occur: by ranges of weights, by runs that are one, and by entropies that are constant."""

from __future__ import annotations

import pandas as pd
import pytest
from record_builders import scored

from gcpo.reports import occurrence


def logged(label: str, method: str, *steps: tuple[float, float, float]) -> pd.DataFrame:
    """Weights of a method as (least, mean, most) of each step."""
    columns = ["gcpo/weight_min", "gcpo/weight", "gcpo/weight_max"]
    return pd.DataFrame([*steps], columns=columns).assign(label=label, method=method)


def test_the_range_of_a_weight_is_the_median_over_steps_of_its_range_over_its_mean() -> None:
    damped = logged("se x=1", "se", (0.4, 0.8, 1.0), (0.9, 1.0, 1.0), (0.7, 0.8, 0.9))  # 0.75, 0.1 and 0.25
    in_loss = logged("r2vpo", "r2vpo", (1, 1, 1)).assign(**{"gcpo/loss_weight_min": 0.9, "gcpo/loss_weight_max": 1.0})
    metrics = pd.concat([damped, in_loss, logged("care", "care", (1, 1, 1)), logged("grpo", "grpo", (1, 1, 1))])
    assert occurrence.ranges(metrics) == pytest.approx({"se x=1": 0.25, "r2vpo": 0.1})


def test_methods_whose_weights_cannot_act_are_not_told_apart() -> None:
    still, moving = (0.996, 1.0, 1.0), (0.98, 1.0, 1.0)  # ranges of 0.4 % and 2 %
    weights = {"bot_only": still, "cd_only": moving, "gcpo_bot": moving, "rd_only": moving}
    base = logged("grpo", "grpo", (1, 1, 1)), logged("empo", "empo", (1, 1, 1))
    metrics = pd.concat([*base, *(logged(name, name, steps) for name, steps in weights.items())])
    scores = scored({name: [0.5, 0.6, 0.7] for name in [*weights, "grpo", "empo"]})
    pairs = [("bot_only", "grpo"), ("cd_only", "grpo"), ("gcpo_bot", "rd_only"), ("bot_only", "empo")]
    apart = scores.assign(f1=scores["f1"] + 0.001 * pd.factorize(scores["label"])[0])  # no two are one
    by = {("gcpo_bot", "rd_only"): "bot_only"}
    found = occurrence.cannot_differ(pairs, metrics, apart, "f1", by)
    assert [*found] == [("bot_only", "grpo"), ("gcpo_bot", "rd_only")]  # EMPO acts on rewards, whatever the weights
    assert found["bot_only", "grpo"].startswith("its weight ranges over 0.40 % within a step")


@pytest.mark.parametrize(("differing", "one"), [(2, True), (3, False)])
def test_methods_of_which_half_of_the_runs_answer_alike_are_one(differing: int, one: bool) -> None:
    base = [0.5, 0.51, 0.52, 0.53]
    other = [score + 0.1 * (seed < differing) for seed, score in enumerate(base)]
    scores = scored({"grpo": base, "care": other})
    metrics = pd.concat([logged("grpo", "grpo", (1, 1, 1)), logged("care", "care", (1, 1, 1))])
    found = occurrence.cannot_differ([("care", "grpo")], metrics, scores, "f1")
    assert found == ({("care", "grpo"): "2 of 4 seeds answer every question alike"} if one else {})


@pytest.mark.parametrize(("above", "constant"), [(1, True), (2, False)])
def test_an_entropy_is_constant_where_95_percent_of_the_answers_have_next_to_none(above: int, constant: bool) -> None:
    entropy = pd.Series([0.001] * (20 - above) + [0.5] * above)  # 95 and 90 % below 0.01
    said = occurrence.constant(entropy, "the answer")
    assert (said is not None) == constant
    assert not constant or said == (
        "The entropy of the answer is below 0.01 nats in 95.0 % of the answers: there is none to go by."
    )
