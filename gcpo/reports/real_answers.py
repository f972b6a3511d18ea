"""How far GCPO's weights can move on real answers: the committed tables, which benchmarks/real_answers.py makes."""

from __future__ import annotations

import pandas as pd

from gcpo import paths
from gcpo.weights import alpha_g, weight_range

FOLDER = paths.MEASURED.parents[1] / "outputs" / "reference" / "real_answers"  # numbers alone: no text of a benchmark
ALPHA = 0.6  # GCPO, App. E.3
NAMES = ("texts", "measures", "steps")


def real_answers() -> dict[str, pd.DataFrame]:
    """Return the tables by name: texts, measures and steps, as ``tables`` of ``benchmarks/real_answers.py`` says."""
    return {name: pd.read_csv(FOLDER / f"{name}.csv") for name in NAMES}


def real_answer_range(group_size: int = 16, prompts: int = 8) -> dict[str, float]:
    """Return in per cent the most that BoT and CD take off a weight, on the most dispersed correct answers, and that RD
    adds (bot, cd, rd); and the medians of the range of their weights in a step (bot_step, cd_step, rd_step)."""
    known = real_answers()
    most = known["measures"].query("group_size == @group_size and wrong == 'dispersed'")
    found = most.groupby("measure")["q50"].max()
    steps = known["steps"].query("group_size == @group_size and prompts == @prompts").groupby("method")["q50"].max()
    off = {name: 100 * alpha_g(ALPHA, group_size) * found[name] ** 2 for name in ("bot", "cd")}
    in_a_step = {f"{name}_step": 100 * steps[f"{name}_only"] for name in ("bot", "cd", "rd")}
    return off | {"rd": 100 * (weight_range("rd_only", None, group_size)[1] - 1)} | in_a_step
