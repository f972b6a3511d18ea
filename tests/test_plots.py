"""Figures: what is drawn where, what is saved, and the words of a verdict."""

from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from gcpo.reports import figures

DATA = pd.DataFrame(
    {
        "method": ["grpo", "grpo", "gcpo", "gcpo"],
        "task": ["qa", "maths", "qa", "maths"],
        "score": [0.5, 0.4, 0.6, 0.3],
        "low": [0.45, 0.3, 0.65, 0.2],  # an estimate may lie outside its own percentile interval
        "high": [0.55, 0.5, 0.7, 0.4],
    }
)
GAPS = pd.DataFrame(
    [
        ("qa", "se", 1.0, -1.0, 3.0, [0.5, 1.5], "one"),
        ("qa", "empo", -25.0, -30.0, -20.0, [-24.0, -26.0], "one"),
        ("maths", "se", 0.5, -0.5, 9.0, [0.5], "two"),
        ("qa", "absent", np.nan, np.nan, np.nan, [], "one"),
        ("qa", "no training", -20.0, -21.0, -19.0, [-20.0], "one"),  # is asked for by nobody
    ],
    columns=["task", "label", "difference", "low", "high", "gaps", "kind"],
)
LABELS = {"se": "SE", "empo": "EMPO", "absent": "Absent"}


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


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


@pytest.mark.parametrize("kind", ["points", "joined", "band"])
def test_intervals_stand_at_their_estimates(kind: Any) -> None:
    axes = figures.estimates(DATA, "task", "score", "method", plt.gca(), kind)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["qa", "maths"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["grpo", "gcpo"]
    places = np.array([line.get_xdata() for line in axes.lines])
    np.testing.assert_allclose(places.mean(0), [0, 1])  # side by side around the category, or at it
    assert (places[0] == places[1]).all() if kind == "band" else (places[0] < places[1]).all()
    for line, drawn, (_, rows) in zip(axes.lines, axes.collections, DATA.groupby("method", sort=False), strict=True):
        assert line.get_ydata().tolist() == rows["score"].tolist()
        ends = {(x, y) for end in ("low", "high") for x, y in zip(line.get_xdata(), rows[end], strict=True)}
        assert ends <= {tuple(point) for path in drawn.get_paths() for point in path.vertices}
    first, second = axes.lines
    assert first.get_marker() != second.get_marker()  # apart without colour, too
    assert (first.get_linestyle() != second.get_linestyle()) == (kind != "points")


def test_lines_along_training_are_means_over_seeds_with_a_band_from_the_lowest_to_the_highest() -> None:
    rows = product(("grpo", "se"), (0, 2), (0, 10))
    table = pd.DataFrame([("qa", label, seed, step, 40.0 + step + seed) for label, seed, step in rows])
    table.columns = ["task", "label", "seed", "step", "score"]
    (axis,) = figures.along_training(table, "score", {"se": "SE", "grpo": "GRPO", "kle": "KLE"}, banded=1).axes
    assert [line.get_label() for line in axis.lines] == ["SE", "GRPO"]
    np.testing.assert_allclose(axis.lines[0].get_xydata(), [[0, 41], [10, 51]])
    bands = [np.concatenate([path.vertices[:, 1] for path in band.get_paths()] or [[]]) for band in axis.collections]
    assert (bands[0].min(), bands[0].max(), len(bands[1])) == (40, 52, 0)


# --- comparisons ----------------------------------------------------------------------------------------------------


def test_a_forest_has_intervals_and_an_arrow_for_what_lies_beyond_it() -> None:
    figure = figures.forest(GAPS, LABELS, reach=8)
    left, right = figure.axes
    assert [axis.get_title() for axis in figure.axes] == ["qa", "maths"]
    assert [text.get_text() for text in left.get_yticklabels()] == ["SE", "EMPO"]
    assert left.get_xlim() == (-8, 8)
    np.testing.assert_allclose(left.collections[0].get_segments()[0], [[-1, 0], [3, 0]])
    np.testing.assert_allclose(right.collections[0].get_segments()[0], [[-0.5, 0], [9, 0]])
    arrows = [line for line in left.lines if line.get_marker() == "<"]
    assert [tuple(arrow.get_xydata()[0]) for arrow in arrows] == [(-8, 1)]
    assert [text.get_text() for text in left.texts] == ["-25.0"]
    squares = [line.get_xydata()[0].tolist() for axis in figure.axes for line in axis.lines if line.get_marker() == "s"]
    assert squares == [[1, 0], [0.5, 0]]
    dots = [line for line in left.lines if line.get_marker() == "o"]
    assert dots[0].get_xdata().tolist() == [0.5, 1.5]
