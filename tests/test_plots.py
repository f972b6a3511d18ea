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


def test_save_writes_the_figure_and_its_data_alike_each_time(tmp_path: Path) -> None:
    figure, axes = plt.subplots()
    axes.plot([0, 1])
    for folder in ("a", "b"):
        figures.save(figure, DATA, tmp_path / folder / "deep", "fig1")
    png, csv = (tmp_path / "a" / "deep" / f"fig1.{kind}" for kind in ("png", "csv"))
    assert png.read_bytes() == (tmp_path / "b" / "deep" / "fig1.png").read_bytes()
    pd.testing.assert_frame_equal(pd.read_csv(csv), DATA)


@pytest.mark.parametrize("draw", [figures.points_with_intervals, figures.bars_with_intervals])
def test_intervals_stand_at_their_estimates(draw) -> None:
    axes = draw(DATA, "task", "score", "low", "high", hue="method")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["qa", "maths"]
    intervals = [np.array(lines.get_segments()) for lines in axes.collections]
    np.testing.assert_allclose(intervals[0][:, :, 1], [[0.45, 0.55], [0.3, 0.5]])
    np.testing.assert_allclose(intervals[1][:, :, 1], [[0.65, 0.7], [0.2, 0.4]])
    places = np.array([lines[:, 0, 0] for lines in intervals])
    np.testing.assert_allclose(places.mean(0), [0, 1])  # side by side around the category
    assert (places[0] < places[1]).all()
    if axes.containers:
        np.testing.assert_allclose([bar.get_height() for bar in axes.containers[1]], [0.6, 0.3])
        hatches = {container[0].get_hatch() for container in axes.containers}
        assert len(hatches) == 2
    else:
        np.testing.assert_allclose(axes.lines[1].get_xydata(), np.column_stack([places[1], [0.6, 0.3]]))
        assert axes.lines[0].get_marker() != axes.lines[1].get_marker()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["grpo", "gcpo"]


def test_numeric_x_is_not_moved() -> None:
    data = pd.DataFrame({"alpha": [0.1, 0.6], "y": [1.0, 2.0], "low": [0.0, 1.0], "high": [2.0, 3.0]})
    _, axes = plt.subplots()
    assert figures.points_with_intervals(data, "alpha", "y", "low", "high", ax=axes) is axes
    np.testing.assert_allclose(axes.lines[0].get_xdata(), [0.1, 0.6])
    assert axes.get_xlabel() == "alpha" and axes.get_ylabel() == "y" and axes.get_legend() is None


def test_verdicts_are_shown_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = claims.Verdicts()
    verdict("Eq. 1", "a", np.bool_(True), "Yes.")
    verdict("Eq. 2", "b", False, "No.")
    verdict("Eq. 3", "c", None, "Perhaps.")
    assert verdict.table()["verdict"].to_dict() == {"Eq. 1": "holds", "Eq. 2": "does not hold", "Eq. 3": "cannot tell"}
    assert list(verdict.table()["claim"]) == ["a", "b", "c"]
    assert "Eq. 2" in capsys.readouterr().out
