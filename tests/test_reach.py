"""Reach of GCPO's weights on real answers: groups made of texts, their numbers, and the committed tables."""

from __future__ import annotations

import itertools
import math
import os

import numpy as np
import pandas as pd
import pytest
import torch

from gcpo import measures
from gcpo.reports import reach, reach_figures
from gcpo.reports.answers import BENCHMARKS, Pool, Question, changed, of_one_text, pool, read
from gcpo.semantics import Embedder

ALPHA_4 = 0.6 / math.log(4)
# Two questions with two wordings each and two near wrong answers; two with one correct answer and none.
ANSWERS = Pool(list("abcdefghij"), [[0, 1], [2, 3], [4], [5]], [[6, 7], [8, 9], [], []])


def test_texts_are_listed_once_without_the_space_around_them() -> None:
    questions = [Question(["a cat", "a cat "], ["a dog"]), Question(["a dog"], [])]
    assert pool(questions) == Pool(["a cat", "a dog"], [[0], [1]], [[1], []])


def test_near_wrong_answers_are_those_to_other_questions_on_the_same_text() -> None:
    found = of_one_text([[["Rome"], ["1920", "in 1920"], ["Rome", "Italy"]], [["Oslo"]]])
    near = [question.near for question in found]
    assert near == [["1920", "in 1920", "Italy"], ["Rome", "Rome", "Italy"], ["1920", "in 1920"], []]


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("so 12 and 12, or \\boxed{12}.", "12", ["so 12 and 12, or \\boxed{13}."]),
        ("\\frac{3}{9}", "\\frac{3}{9}", ["\\frac{3}{0}"]),
        ("x = 5\\pi", "5\\pi", ["x = 6\\pi"]),
        ("it is \\pi", "\\pi", []),
        ("twelve", "12", []),
        ("", "", []),
    ],
)
def test_the_last_digit_of_an_answer_is_raised_where_the_answer_stands_last(
    text: str, answer: str, expected: list[str]
) -> None:
    assert changed(text, answer) == expected


def test_a_group_has_k_correct_answers_and_others_that_are_not_correct() -> None:
    groups = reach.mixtures(ANSWERS, "others", 3)
    assert groups.shape == (4, 4, 3)
    for own, by_count in zip(ANSWERS.right, groups.tolist(), strict=True):
        for count, group in enumerate(by_count):
            assert group[:count] == [*own, *own, *own][:count] and not {*group[count:]} & {*own}
        strangers = [next(i for i, right in enumerate(ANSWERS.right) if text in right) for text in by_count[0]]
        assert len({*strangers}) == 3  # G different questions


def test_questions_without_near_wrong_answers_have_no_groups_with_them() -> None:
    groups = reach.mixtures(ANSWERS, "near", 4)
    assert groups.shape == (2, 5, 4)
    assert sorted(groups[0, 0].tolist()) == [6, 6, 7, 7] and sorted(groups[1, 0].tolist()) == [8, 8, 9, 9]
    assert groups[0, 4].tolist() == [0, 1, 0, 1]


def test_questions_with_an_answer_in_common_are_no_strangers() -> None:
    answers = Pool(list("abcd"), [[0], [0], [1], [2], [3]], [[]] * 5)
    assert 0 not in reach.mixtures(answers, "others", 3)[:2, 0]


def test_measures_and_weights_of_orthogonal_answers_are_those_of_the_formulas() -> None:
    # Four correct copies of one text, replaced one by one by four texts that are orthogonal to it and to one another.
    groups = torch.where(torch.arange(4) < torch.arange(5).unsqueeze(1), 0, torch.arange(1, 5)).unsqueeze(0)
    found = {name: values[0] for name, values in reach.weigh(torch.eye(5), groups).items()}
    for k in range(5):
        squares = k**2 + (4 - k)  # squared length of the sum of four unit vectors
        cd, bot, p = 1 - squares / 16, (1 - math.sqrt(squares) / 4) / 2, k / 4
        entropy = (4 - k) / 4 * math.log(4) - (p * math.log(p) if k else 0)
        expected = {
            "cd": cd,
            "bot": bot,
            "cd_only": 1 - ALPHA_4 * cd**2,
            "bot_only": 1 - ALPHA_4 * bot**2,
            "rd_only": 1 + ALPHA_4 * 4 * p * (1 - p),
            "gcpo_bot": (1 - ALPHA_4 * bot**2) * (1 + ALPHA_4 * 4 * p * (1 - p)),
            "se": 1 - ALPHA_4 * entropy,
        }
        for name, value in expected.items():
            assert found[name][k] == pytest.approx(value, abs=1e-6), (name, k)
    assert found["kle"][0] == pytest.approx(0.4)  # no edge: the entropy of four strangers is log 4


def test_one_answer_repeated_has_no_disagreement_at_all() -> None:
    texts = torch.nn.functional.normalize(torch.randn(3, 7, generator=torch.Generator().manual_seed(0)), dim=1)
    found = reach.weigh(texts, torch.tensor([0, 1, 2]).view(3, 1, 1).expand(3, 17, 16))
    assert (found["cd"] == 0).all() and np.abs(found["bot"]).max() < 1e-12
    assert (found["cd_only"] == 1).all() and (found["bot_only"] == 1).all() and np.abs(found["se"] - 1).max() < 1e-6


def test_large_batches_are_weighed_in_pieces_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings = torch.randn(10, 5, generator=torch.Generator().manual_seed(1))
    groups = reach.mixtures(ANSWERS, "near", 4)
    whole = reach.weigh(embeddings, groups)
    monkeypatch.setattr(reach, "CHUNK", 3)
    for name, values in reach.weigh(embeddings, groups).items():
        np.testing.assert_allclose(values, whole[name], rtol=0, atol=1e-12)


def test_the_search_finds_the_most_dispersed_group_of_a_small_pool() -> None:
    unit = torch.nn.functional.normalize(torch.randn(9, 3, generator=torch.Generator().manual_seed(2)), dim=1)
    cosine = unit @ unit.T
    for pairs in ((1 - cosine).clamp(0, 1), -cosine):
        sums = {group: float(pairs[list(group)][:, list(group)].sum()) for group in itertools.combinations(range(9), 2)}
        assert tuple(sorted(reach.most_dispersed(pairs, 2).tolist())) == max(sums, key=lambda group: sums[group])
        group = reach.most_dispersed(pairs, 5).tolist()
        best = max(float(pairs[list(g)][:, list(g)].sum()) for g in itertools.combinations(range(9), 5))
        assert len({*group}) == 5 and float(pairs[group][:, group].sum()) >= best - 0.5


def test_no_clustering_raises_bot_where_no_cosine_is_negative_and_one_can_where_some_are() -> None:
    generator = torch.Generator().manual_seed(3)
    assert reach.clustered(torch.rand(40, 6, 4, generator=generator, dtype=torch.float64)) <= 1e-12
    # Two answers lean away from four: as one cluster they pull twice as hard.
    lean = torch.tensor([[-0.1, 1.0, 0.0], [-0.1, -1.0, 0.0]] + [[1.0, 0.0, 0.0]] * 4, dtype=torch.float64)
    assert reach.clustered(lean.expand(200, 6, 3)) > 0.1


def test_the_summary_has_the_median_of_all_questions_and_an_interval_around_it() -> None:
    values = np.arange(101.0)
    found = reach.over_questions(values)
    assert (found["q05"], found["q50"], found["q95"], found["questions"]) == (5, 50, 95, 101)
    # The interval of a median by the binomial: ranks 50.5 -+ 1.96 sqrt(101)/2, 40.7 to 60.3.
    assert found["low"] == pytest.approx(40.7, abs=2) and found["high"] == pytest.approx(60.3, abs=2)


def test_the_range_of_a_step_is_that_of_groups_with_an_advantage() -> None:
    weight = np.array([[9.0, 1.0, 1.0, 2.0, 9.0]] * 7)  # with no or only correct answers: never drawn
    found = reach.over_steps(weight, prompts=2, n=20)
    # Two weights of 1, 1, 2 are equal in five cases of nine; else (2 - 1) / 1.5.
    assert found["q05"] == found["q50"] == 0 and found["q95"] == pytest.approx(2 / 3)
    assert reach.over_steps(weight, prompts=40, n=20)["q05"] == pytest.approx(1 / (1 + 1 / 3), abs=0.15)
    assert reach.over_steps(np.ones((3, 5)), prompts=4, n=5)["q95"] == 0


def test_committed_numbers_keep_within_what_the_formulas_allow() -> None:
    found = reach.numbers()
    scores, steps = found["measures"], found["steps"]
    assert {*found["texts"]["benchmark"]} == {*scores["benchmark"]} == {*steps["benchmark"]} == {*BENCHMARKS}
    cd, bot = (scores[scores["measure"] == measure] for measure in ("cd", "bot"))
    assert (cd["q95"] <= 1 - 1 / cd["group_size"]).all() and (bot["q95"] <= 0.5).all()
    assert (scores["low"] <= scores["q50"]).all() and (scores["q50"] <= scores["high"]).all()
    dispersed = scores[scores["wrong"] == "dispersed"].set_index(["benchmark", "group_size", "measure"])["q50"]
    others = scores[(scores["wrong"] == "others") & (scores["right"] == 0)]
    assert (others.set_index(["benchmark", "group_size", "measure"])["q95"] < dispersed).all()
    low, high = 1 - 0.6 / np.log(16) * 0.25, 1.0
    narrow = steps[(steps["method"] == "bot_only") & (steps["group_size"] == 16)]
    assert (narrow["q95"] <= (high - low) / low).all()


@pytest.mark.data
@pytest.mark.skipif("GCPO_DATA_DIR" not in os.environ, reason="needs GCPO_DATA_DIR")
def test_committed_numbers_are_those_of_the_benchmark_s_texts() -> None:
    made = reach.tables("qasper", Embedder("all-MiniLM-L6-v2"), sizes=(8,))
    for name, keys in (("measures", ["wrong", "right", "measure"]), ("steps", ["wrong", "method", "prompts"])):
        committed = reach.numbers()[name].query("benchmark == 'qasper' and group_size == 8")
        columns = [*keys, "q05", "q50", "q95", "low", "high", "questions"]
        both = [table[columns].sort_values(keys).reset_index(drop=True) for table in (committed, made[name])]
        pd.testing.assert_frame_equal(*both, rtol=0, atol=2e-4)


@pytest.mark.data
@pytest.mark.skipif("GCPO_DATA_DIR" not in os.environ, reason="needs GCPO_DATA_DIR")
@pytest.mark.parametrize("name", BENCHMARKS)
def test_real_near_wrong_answers_are_not_correct(name: str) -> None:
    answers = read(name)
    assert all(answers.right) and sum(map(bool, answers.near)) > 0.4 * len(answers.near)
    assert not any({*right} & {*near} for right, near in zip(answers.right, answers.near, strict=True))


def test_without_data_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GCPO_DATA_DIR", raising=False)
    with pytest.raises(FileNotFoundError, match="GCPO_DATA_DIR is not set"):
        read("qasper")


def test_figures_draw_every_row() -> None:
    names, kinds = {"math": "MATH", "qasper": "Qasper"}, {"others": "strangers", "near": "near"}
    rows = [(b, f, -2.0, -1.0, -0.5) for b in names for f in ("CD", "BoT")]
    figure = reach_figures.reached(
        pd.DataFrame(rows, columns=["benchmark", "factor", "allowed", "reached", "median"]), names
    )
    drawn = {tuple(line.get_xdata()) for line in figure.axes[0].lines}
    assert {(0, -2.0), (0, -1.0), (-0.5,)} <= drawn

    table = pd.DataFrame({"benchmark": list(names), "cd": [0.5, 0.75], "bot": [0.1, 0.25], "filled": [True, False]})
    lines = reach_figures.on_the_curves(table, names, 16, 0.6).axes[0].lines
    strength = 0.6 / math.log(16)
    np.testing.assert_allclose(lines[-1].get_xydata(), [[0.75, 1 - strength / 16]])
    x, y = lines[1].get_data()
    at = int(np.argmin(np.abs(x - 0.75)))
    orthogonal = torch.eye(4).unsqueeze(0)  # CD = 3/4
    bot = float(measures.barycentric_transport(orthogonal, torch.arange(4).unsqueeze(0)))
    assert y[at] == pytest.approx(1 - strength * bot**2, abs=1e-3)

    ranges = [(b, kind, "BoT", 0.1, 1.0, 2.0) for b in names for kind in kinds]
    ranges_figure = reach_figures.in_a_step(
        pd.DataFrame(ranges, columns=["benchmark", "wrong", "method", "q05", "q50", "q95"]), names, kinds
    )
    for axis in ranges_figure.axes:
        pairs = [list(line.get_xdata()) for line in axis.lines if len(line.get_xdata()) == 2]
        assert pairs.count([0.1, 2.0]) == len(names)

    curve = pd.DataFrame(
        {"right": [0, 16], "change": [-1.0, 0.0], "low": [-2.0, 0.0], "high": [0.0, 0.0], "factor": "BoT"}
    )
    parts = [curve.assign(benchmark=b, wrong=kind) for b in names for kind in kinds]
    panels = reach_figures.by_correct_answers(pd.concat(parts), names, kinds).axes
    assert len(panels) == 4 and all([-1.0, 0.0] in [list(line.get_ydata()) for line in axis.lines] for axis in panels)
