"""How far GCPO's weights can move on real answers: the committed tables, which benchmarks/real_answers.py makes."""

import pandas as pd

from gcpo import paths

FOLDER = paths.MEASURED.parents[1] / "outputs" / "reference" / "real_answers"  # numbers alone: no text of a benchmark
ALPHA = 0.6  # GCPO, App. E.3
NAMES = ("texts", "measures", "steps")
REACH = FOLDER / "reach.csv"  # what they come to: how far weights can move, in per cent


def real_answers() -> dict[str, pd.DataFrame]:
    """Return the tables by name: texts, measures and steps, as ``tables`` of ``benchmarks/real_answers.py`` says."""
    return {name: pd.read_csv(FOLDER / f"{name}.csv") for name in NAMES}
