"""The answer cloud: sixteen answers to one question at five checkpoints of a training, in HTML with a slider.

It needs no server and no network. ``docs/answer_cloud.py`` makes the answers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from gcpo.reports.explorer import framed
from gcpo.reports.figures import PALETTE

HERE = Path(__file__).parent


def read() -> dict[str, Any]:
    """Return the answers: question, references, samples, texts (each with x, y and whether it is right) and, for each
    checkpoint, its step, how often each text was given, and the measures of the group."""
    return dict(json.loads((HERE / "answers.json").read_text(encoding="utf-8")))


def fragment() -> str:
    """Return the cloud to stand once in a page of HTML."""
    page = (HERE / "cloud.html").read_text(encoding="utf-8")
    return page.replace("ANSWERS", json.dumps(read()).replace("<", "\\u003c"))


def frame() -> str:
    """Return the cloud for the output of a notebook's cell."""
    return framed(fragment(), "The answers to one question along a training", "34rem")


def figure() -> Figure:
    """Return the same as a picture: a panel per checkpoint, a dot per text, as large as it was given often."""
    cloud = read()
    drawn, axes = plt.subplots(1, len(cloud["checkpoints"]), figsize=(10.4, 3.4), sharex=True, sharey=True)
    for axis, point in zip(axes, cloud["checkpoints"], strict=True):
        for text, count in zip(cloud["texts"], point["counts"], strict=True):
            if count:
                look = {"color": PALETTE[0 if text["right"] else 1], "marker": "o" if text["right"] else "X"}
                axis.scatter(text["x"], text["y"], s=22 * count, alpha=0.75, linewidth=0, **look)
        said = "\n".join(f"{name} {value:.2f}" for name, value in point["measures"].items())
        axis.set(title=f"step {point['step']}", xticks=[], yticks=[])
        axis.set_xlabel(said, fontsize=8)
    axes[0].margins(0.2)
    return drawn
