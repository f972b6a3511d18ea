"""GCPO's weights on real answers: the study of benchmarks/real_answers.py, and its committed tables."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import script

study = script("benchmarks/real_answers.py")
ALPHA_4 = 0.6 / math.log(4)


def test_near_wrong_answers_are_those_to_other_questions_on_the_same_text() -> None:
    found = study.of_one_text([[["Rome"], ["1920", "in 1920"], ["Rome", "Italy"]], [["Oslo"]]])
    near = [question.near for question in found]
    assert near == [["1920", "in 1920", "Italy"], ["Rome", "Rome", "Italy"], ["1920", "in 1920"], []]
    assert study.changed("so 12 and 12, or \\boxed{12}.", "12") == ["so 12 and 12, or \\boxed{13}."]
    assert study.changed("\\frac{3}{9}", "\\frac{3}{9}") == ["\\frac{3}{0}"] and study.changed("twelve", "12") == []


def test_measures_and_weights_of_orthogonal_answers_are_those_of_the_formulas() -> None:
    # Four correct copies of one text, replaced one by one by four texts that are orthogonal to it and to one another.
    groups = torch.where(torch.arange(4) < torch.arange(5).unsqueeze(1), 0, torch.arange(1, 5)).unsqueeze(0)
    found = {name: values[0] for name, values in study.weigh(torch.eye(5), groups).items()}
    for k in range(5):
        squares = k**2 + (4 - k)  # squared length of the sum of four unit vectors
        cd, bot, p = 1 - squares / 16, (1 - math.sqrt(squares) / 4) / 2, k / 4
        expected = {
            "cd": cd,
            "bot": bot,
            "cd_only": 1 - ALPHA_4 * cd**2,
            "gcpo_bot": (1 - ALPHA_4 * bot**2) * (1 + ALPHA_4 * 4 * p * (1 - p)),
        }
        for name, value in expected.items():
            assert found[name][k] == pytest.approx(value, abs=1e-6), (name, k)
    assert found["kle"][0] == pytest.approx(0.4)  # no edge: the entropy of four strangers is log 4


def test_the_range_of_a_step_is_that_of_groups_with_an_advantage() -> None:
    weight = np.array([[9.0, 1.0, 1.0, 2.0, 9.0]] * 7)  # with no or only correct answers: never drawn
    found = study.over_steps(weight, prompts=2, n=20)
    # Two weights of 1, 1, 2 are equal in five cases of nine; else (2 - 1) / 1.5.
    assert found["q05"] == found["q50"] == 0 and found["q95"] == pytest.approx(2 / 3)
    assert study.over_steps(weight, prompts=40, n=20)["q05"] == pytest.approx(1 / (1 + 1 / 3), abs=0.15)
    assert study.over_steps(np.ones((3, 5)), prompts=4, n=5)["q95"] == 0


def test_how_far_weights_reach_is_that_of_the_committed_tables() -> None:
    assert study.reach(study.real_answers()).iloc[0].to_dict() == pytest.approx(
        pd.read_csv(study.REACH).iloc[0].to_dict()
    )
