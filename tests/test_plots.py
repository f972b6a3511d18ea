"""Figures: what is drawn where, what is saved, and the words of a verdict."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from gcpo.reports import claims, figures

DATA = pd.DataFrame(
    {
        "method": ["grpo", "grpo", "gcpo", "gcpo"],
        "task": ["qa", "maths", "qa", "maths"],
        "score": [0.5, 0.4, 0.6, 0.3],
        "low": [0.45, 0.3, 0.65, 0.2],  # an estimate may lie outside its own percentile interval
        "high": [0.55, 0.5, 0.7, 0.4],
    }
)


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def test_series_differ_in_more_than_colour() -> None:
    figures.set_style()
    styles = plt.rcParams["axes.prop_cycle"].by_key()
    assert len({str(line) for line in styles["linestyle"]}) == len(styles["color"]) == 7
    assert len(set(figures.MARKERS)) == len(set(figures.HATCHES)) == 7
    assert plt.rcParams["svg.hashsalt"] and plt.rcParams["figure.dpi"] <= 120


def test_a_method_s_modulation_is_drawn_beside_its_gain_and_the_paper_s() -> None:
    strength = pd.DataFrame(
        {"task": ["qa", "maths"], "label": "gcpo", "lowest": 0.9, "smallest": [0.95, 0.97], "largest": [1.1, 1.15]}
    ).assign(highest=1.2)
    gains = pd.DataFrame(
        {
            "task": ["qa", "qa", "qa", "maths"],
            "label": ["gcpo", "empo", "no training", "gcpo"],  # the last but one is asked for by nobody
            "difference": [1.0, -30.0, -20.0, np.nan],
            "low": [0.5, -31.0, -21.0, np.nan],
            "high": [1.5, -29.0, -19.0, np.nan],
            "gaps": [[0.9, 1.1], [-30.0], [-20.0], []],
            "paper": [6.8, np.nan, np.nan, np.nan],
        }
    )
    figure = figures.modulation(strength, gains, {"gcpo": "GCPO", "empo": "EMPO"}, reach=8)
    weights, qa, maths = figure.axes
    assert [text.get_text() for text in weights.get_yticklabels()] == ["GCPO", "EMPO"]
    ends = sorted(float(x) for line in weights.collections for x in line.get_segments()[0][:, 0])
    assert ends == [0.9, 0.95, 0.97, 1.1, 1.15, 1.2]  # what is allowed, and what was logged on each task
    grey, first, second = (line.get_segments()[0][0, 1] for line in weights.collections)
    assert first != second and (first + second) / 2 == pytest.approx(grey)
    assert [text.get_text() for text in weights.texts] == ["changes rewards"]
    (paper,) = [line.get_xdata().tolist() for line in qa.lines if line.get_marker() == "D"]
    assert paper[0] == 6.8 and np.isnan(paper[1])
    assert [text.get_text() for text in qa.texts] == ["-30.0"] and not maths.texts  # beyond the edge: an arrow


def test_a_figure_of_runs_is_saved_alike_with_its_data_and_its_source_below_all_that_it_draws(tmp_path: Path) -> None:
    figure, axes = plt.subplots(layout="constrained")
    axes.plot([0, 1])
    figure.supxlabel("the lowest line")
    for folder in (tmp_path, tmp_path / "again" / "deep"):
        figures.save(figure, DATA, folder, "plain")
    assert (tmp_path / "plain.png").read_bytes() == (tmp_path / "again" / "deep" / "plain.png").read_bytes()
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "plain.csv"), DATA)
    figures.save(figure, DATA, tmp_path, "signed", "reference of profile p")
    said = figure.texts[-1]  # also where nothing is written
    figures.save(shown := plt.figure(), DATA, None, "shown", "reference of profile p")
    assert shown.texts[0].get_text() == said.get_text() == "records: reference of profile p"
    assert said.get_window_extent().y1 < figure.bbox.y0
    plain, signed = (plt.imread(tmp_path / f"{name}.png") for name in ("plain", "signed"))
    assert len(signed) > len(plain) and (signed[len(plain) :] < 1).any(), "the line is outside the picture"
    assert pd.read_csv(tmp_path / "signed.csv")["records"].tolist() == ["reference of profile p"] * len(DATA)


def test_intervals_stand_at_their_estimates() -> None:
    axes = figures.points_with_intervals(DATA, "task", "score", "low", "high", hue="method")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["qa", "maths"]
    intervals = [np.array(lines.get_segments()) for lines in axes.collections]
    np.testing.assert_allclose(intervals[0][:, :, 1], [[0.45, 0.55], [0.3, 0.5]])
    np.testing.assert_allclose(intervals[1][:, :, 1], [[0.65, 0.7], [0.2, 0.4]])
    places = np.array([lines[:, 0, 0] for lines in intervals])
    np.testing.assert_allclose(places.mean(0), [0, 1])  # side by side around the category
    assert (places[0] < places[1]).all()
    np.testing.assert_allclose(axes.lines[1].get_xydata(), np.column_stack([places[1], [0.6, 0.3]]))
    assert axes.lines[0].get_marker() != axes.lines[1].get_marker()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["grpo", "gcpo"]


def test_numeric_x_is_not_moved() -> None:
    data = pd.DataFrame({"alpha": [0.1, 0.6], "y": [1.0, 2.0], "low": [0.0, 1.0], "high": [2.0, 3.0]})
    _, axes = plt.subplots()
    assert figures.points_with_intervals(data, "alpha", "y", "low", "high", ax=axes) is axes
    np.testing.assert_allclose(axes.lines[0].get_xdata(), [0.1, 0.6])
    assert axes.get_xlabel() == "alpha" and axes.get_ylabel() == "y" and axes.get_legend() is None


def test_trends_are_lines_with_bands_at_shared_places() -> None:
    axes = figures.lines_with_bands(DATA, "task", "score", "low", "high", hue="method")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["qa", "maths"]
    for line, scores in zip(axes.lines, ([0.5, 0.4], [0.6, 0.3]), strict=True):
        np.testing.assert_allclose(line.get_xydata(), np.column_stack([[0, 1], scores]))
    corners = [set(map(tuple, band.get_paths()[0].vertices.round(2))) for band in axes.collections]
    assert corners[0] == {(0, 0.45), (0, 0.55), (1, 0.3), (1, 0.5)}
    assert corners[1] == {(0, 0.65), (0, 0.7), (1, 0.2), (1, 0.4)}
    assert axes.lines[0].get_linestyle() != axes.lines[1].get_linestyle()  # apart without colour, too
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["grpo", "gcpo"]


def test_verdicts_are_shown_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = claims.Verdicts("01_a")
    verdict("one", "Eq. 1", "a", np.bool_(True), "Yes.")
    verdict("two", "Eq. 2", "b", False, "No.")
    verdict("three", "Eq. 3", "c", None, "Perhaps.")
    assert verdict.table()["verdict"].to_dict() == {"Eq. 1": "holds", "Eq. 2": "fails", "Eq. 3": "inconclusive"}
    assert list(verdict.table()["claim"]) == ["a", "b", "c"]
    assert "Eq. 2" in capsys.readouterr().out
    assert list(verdict.table()) == ["claim", "verdict"]


def test_verdicts_can_be_kept_in_silence_and_shown_later(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = claims.Verdicts("01_a")
    verdict.add("one", "Eq. 1", "a", True, "Yes.", task="tinyqa")
    assert capsys.readouterr().out == "" and verdict.table()["verdict"].to_dict() == {"Eq. 1, tinyqa": "holds"}
    verdict.show("one")
    assert "Holds: a (Eq. 1, tinyqa). Yes." in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"01_a has no verdict 'two'\. Valid names: one\."):
        verdict.show("two")


def test_a_verdict_is_shown_on_the_task_asked_for_and_all_stand_in_a_table_by_task(
    capsys: pytest.CaptureFixture[str],
) -> None:
    verdict = claims.Verdicts("01_a")
    for task, decided in (("tinyqa", True), ("tinymath", False)):
        verdict.add("one", "Eq. 1", "a", decided, task=task)
    verdict.add("two", "Eq. 2", "b", None)
    verdict.show("one", "tinymath")
    shown = capsys.readouterr().out
    assert "Fails: a (Eq. 1, tinymath)" in shown and "tinyqa" not in shown
    table = verdict.by_task()
    assert table.loc[("a", "Eq. 1")].to_dict() == {"tinyqa": "holds", "tinymath": "fails", "verdict": ""}
    assert table.loc[("b", "Eq. 2")].to_dict() == {"tinyqa": "", "tinymath": "", "verdict": "inconclusive"}


def test_verdicts_are_written_as_records_where_they_are_asked_for(tmp_path: Path) -> None:
    for name, records in (("01_a", None), ("21_b", "runs of p")):
        verdict = claims.Verdicts(name, records)
        found = claims.Verdict("holds", "By 1.", 1.23456789, n=3, level=0.95, parts=("x", "y"))
        verdict("one", "Eq. 1", "a", found, "More.")
        verdict("two", "Eq. 2", "b", claims.Verdict("holds", "By hand.", 0.5, effect=2.0))  # no comparison decided it
        for folder in (None, tmp_path / ("reports" if records else "read")):
            pd.testing.assert_frame_equal(verdict.write(folder), verdict.table())
    paths_of = [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*.csv"))]
    assert paths_of == ["read/01.csv", "reports/verdicts_21.csv"]
    row, other = pd.read_csv(tmp_path / "reports" / "verdicts_21.csv").to_dict("records")
    assert [other[name] for name in ("difference", "paper_effect", "seeds")] == [0.5, 2.0, 0]
    assert np.isnan([other[name] for name in ("estimate", "effect", "n", "level")]).all()
    given = {"id": "one", "label": "holds", "because": "By 1. More.", "place": "Eq. 1", "heading": "a", "n": 3}
    given |= {"parts": "x\ny", "difference": 1.23457, "notebook": "21_b", "records": "runs of p"}
    assert {key: row[key] for key in given} == given


# --- comparisons ----------------------------------------------------------------------------------------------------

GAPS = pd.DataFrame(
    {
        "task": ["qa", "qa", "maths", "qa"],
        "label": ["se", "empo", "se", "absent"],
        "difference": [1.0, -25.0, 0.5, np.nan],
        "low": [-1.0, -30.0, -0.5, np.nan],
        "high": [3.0, -20.0, 9.0, np.nan],
        "gaps": [[0.5, 1.5], [-24.0, -26.0], [0.5], []],
        "kind": ["one", "one", "two", "one"],
    }
)


def test_a_forest_has_intervals_and_an_arrow_for_what_lies_beyond_it() -> None:
    figure = figures.forest(GAPS, {"se": "SE", "empo": "EMPO", "absent": "Absent"}, reach=8)
    left, right = figure.axes
    assert [axis.get_title() for axis in figure.axes] == ["qa", "maths"]
    assert [text.get_text() for text in left.get_yticklabels()] == ["SE", "EMPO"]
    assert left.get_xlim() == (-8, 8)
    np.testing.assert_allclose(left.collections[0].get_segments()[0], [[-1, 0], [3, 0]])
    np.testing.assert_allclose(right.collections[0].get_segments()[0], [[-0.5, 0], [8, 0]])  # cut at the edge
    arrows = [line for line in left.lines if line.get_marker() == "<"]
    assert [tuple(arrow.get_xydata()[0]) for arrow in arrows] == [(-8, 1)]
    assert [text.get_text() for text in left.texts] == ["-25.0"]
    squares = [line.get_xydata()[0].tolist() for axis in figure.axes for line in axis.lines if line.get_marker() == "s"]
    assert squares == [[1, 0], [0.5, 0]]
    dots = [line for line in left.lines if line.get_marker() == "o"]
    assert dots[0].get_xdata().tolist() == [0.5, 1.5]


def test_a_forest_may_have_panels_one_below_the_other_and_none_at_all() -> None:
    figure = figures.forest(GAPS, {"se": "SE", "empo": "EMPO"}, reach=8, rows="kind")
    shown = [axis.get_title() for axis in figure.axes if axis.axison]
    assert shown == ["qa, one", "maths, two"]  # the two others are empty
    figures.forest(GAPS.iloc[3:], {"absent": "Absent"}, reach=8)
    figures.forest(GAPS.iloc[:0], {}, reach=8)


ALONG = pd.DataFrame(
    [
        {"task": "qa", "label": label, "seed": seed, "step": step, "decoding": decoding, "score": 40.0 + step + seed}
        for label in ("grpo", "se")
        for seed in (0, 2)
        for step in (0, 10)
        for decoding in ("greedy", "sampled")
    ]
)
NAMES = {"grpo": "GRPO", "se": "SE", "kle": "KLE"}


def test_validation_curves_have_a_band_of_the_first_label_only() -> None:
    figure = figures.validation_curves(ALONG, NAMES)
    assert [axis.get_title() for axis in figure.axes] == ["qa, sampled", "qa, greedy"]
    top = figure.axes[0]
    assert len(top.collections) == 1
    np.testing.assert_allclose(top.lines[0].get_xydata(), [[0, 41], [10, 51]])
    vertices = top.collections[0].get_paths()[0].vertices
    assert (vertices[:, 1].min(), vertices[:, 1].max()) == (40, 52)


def test_entropy_curves_have_a_band_of_every_label() -> None:
    figure = figures.entropy_curves(ALONG.assign(value=ALONG["score"] / 10), NAMES)
    (axis,) = figure.axes
    assert axis.get_title() == "qa" and len(axis.collections) == 3
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["GRPO", "SE", "KLE"]
    np.testing.assert_allclose(axis.lines[1].get_xydata(), [[0, 4.1], [10, 5.1]])


def test_differences_over_a_setting_have_a_place_per_value_and_a_legend_outside() -> None:
    table = pd.DataFrame(
        {
            "task": ["qa", "qa", "qa", "math"],
            "method": ["cd", "bot", "cd", "cd"],
            "α": ["0.2", "0.2", "0.6", "0.2"],
            "difference": [1.0, 2.0, -1.0, 0.5],
            "low": [0.5, 1.0, -2.0, 0.0],
            "high": [1.5, 3.0, 0.0, 1.0],
        }
    )
    figure = figures.over_settings(table, "α", "method")
    first = figure.axes[0]
    assert [axis.get_title() for axis in figure.axes] == ["qa", "math"]
    assert [label.get_text() for label in first.get_xticklabels()] == ["0.2", "0.6"]
    drawn = {line.get_label(): list(line.get_ydata()) for line in first.lines}
    assert drawn["cd"] == [1, -1] and drawn["bot"] == [2]
    assert first.get_legend() is None and len(figure.legends[0].get_texts()) == 2


def test_the_sweep_has_a_line_per_batch_size_and_the_profiles_rate() -> None:
    table = pd.DataFrame(
        {
            "task": "qa",
            "prompts_per_step": [4, 4, 8, 8],
            "learning_rate": [1e-4, 2e-4] * 2,
            **{f"{d}{end}": [50.0, 60.0, 52.0, 61.0] for d in ("sampled", "greedy") for end in ("", "_std")},
            "start_sampled": 40.0,
            "start_greedy": 45.0,
        }
    )
    figure = figures.sweep_curves(table, {"qa": 2e-4})
    sampled, greedy = figure.axes
    assert sampled.get_title() == "qa, sampled" and sampled.get_xscale() == "log"
    assert len(sampled.containers) == 2
    verticals = [line for line in sampled.lines if list(line.get_xdata()) == [2e-4, 2e-4]]
    assert len(verticals) == 1
    assert [line for line in greedy.lines if list(line.get_ydata()) == [45, 45]]
    assert [tick.get_text() for tick in greedy.get_xticklabels()] == ["1e-4", "2e-4"]
