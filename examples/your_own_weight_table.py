"""Table of what one step gains with the weights of your_own_weight.py, from finished runs of its grid.

`PYTHONPATH=examples python examples/your_own_weight_table.py world_a world_b` writes your_own_weight.csv, the table of
docs/own_weight.md. It is a file of its own, because a run's id has the hash of the file that its weights are in.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from gcpo import records
from gcpo.reports import alignment, one_step
from gcpo.reports.report import WORLDS
from gcpo.reports.tables import display_name
from gcpo.reports.verdicts import APART, pooled

GRID = Path(__file__).with_name("your_own_weight.yaml")
OWN = ["your_own_weight:focal", "your_own_weight:difficulty"]
PAIRS = [(name, "grpo") for name in ("rd_only", "gcpo_bot", *OWN, "drop_half")] + [(name, "rd_only") for name in OWN]


def gained(profiles: list[str]) -> pd.DataFrame:
    """Return the difference of each pair of weights in per cent of GRPO's gain, under Adam: the mean over worlds and
    each world, with 95 % intervals, and p of their difference."""
    gains = {}
    for profile in profiles:
        runs = records.find(profile, str(GRID))
        lines = records.gather(runs.assign(run=runs["id"]), "updates", ["run"])
        gains[WORLDS[profile]] = one_step.relative_gains(lines[lines["optimizer"] == "adam"])
    found = {}
    for pair in PAIRS:
        name = " minus ".join(display_name(one.removeprefix("your_own_weight:")) for one in pair)
        found[name] = {world: one_step.lead(own, *pair) for world, own in gains.items()}
    table = pd.DataFrame(
        {name: {w: alignment.as_text(one, 1) for w, one in of.items()} for name, of in found.items()}
    ).T
    table.insert(0, "mean of both", [alignment.as_text(pooled([*of.values()]), 1) for of in found.values()])
    return table.join(alignment.comparisons(found).droplevel("against")[APART]).rename_axis("one step").reset_index()


if __name__ == "__main__":
    gained(sys.argv[1:]).to_csv(GRID.with_suffix(".csv"), index=False)
