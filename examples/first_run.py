"""`make try`: one training with GCPO-BoT on this machine, and first_run.png, which draws it among the committed runs.

The run is `python -m gcpo run --profile laptop`: 64 steps of a small policy on short answers, with seed 1. Its scores
on validation questions are drawn over those of the committed runs of GRPO and GCPO-BoT, ten seeds each.
"""

import subprocess
import sys
from typing import Any

import matplotlib.pyplot as plt

from gcpo import paths, records
from gcpo.reports.figures import LINES, PALETTE, set_style

SHOWN = {"grpo": "GRPO", "gcpo_bot": "GCPO-BoT"}
SEED = 1
OUT = paths.OUTPUTS / "laptop" / "first_run.png"


def scores(reference: bool) -> Any:
    """Return the mean F1 of sampled answers (per cent) by label, seed and step."""
    found = records.find("laptop", "table1", reference=reference, any_code=True)
    found = found[(found["task"] == "tinyqa") & found["label"].isin(SHOWN)]
    rows = records.gather(found, "validation", ["label", "seed"]).query("decoding == 'sampled'")
    return 100 * rows.groupby(["label", "seed", "step"])["f1"].mean().unstack()


def main() -> None:
    """Make the run unless it is there, draw it, and compare its last score with the committed run of the same seed."""
    command = f"gcpo run --profile laptop -p method gcpo_bot -p seed {SEED}"
    subprocess.run([sys.executable, "-m", *command.split()], check=True)
    ours, theirs = scores(reference=False).loc["gcpo_bot", SEED], scores(reference=True)
    set_style()
    _, axis = plt.subplots(figsize=(6.8, 4))
    for number, (label, name) in enumerate(SHOWN.items()):
        look: Any = {"color": PALETTE[number], "linestyle": LINES[number]}
        axis.plot(theirs.loc[label].T, **look, linewidth=1, alpha=0.5)
        axis.plot([], [], **look, label=f"{name}: {len(theirs.loc[label])} committed runs")
    axis.plot(theirs.loc["grpo", SEED], color=PALETTE[0], linewidth=2.2, label=f"GRPO: committed run, seed {SEED}")
    axis.plot(ours, color="black", marker="o", linewidth=2.2, linestyle="-", label=f"GCPO-BoT: your run, seed {SEED}")
    axis.set(xlabel="step of training", ylabel="F1 of validation answers, %", xticks=ours.index)
    axis.legend(loc="lower right")
    plt.savefig(OUT, bbox_inches="tight")
    print(f"F1 after {ours.index[-1]} steps: {ours.iloc[-1]:.1f} % here, ", end="")
    print(f"{theirs.loc['gcpo_bot', SEED].iloc[-1]:.1f} % in the committed run of this seed\nfigure: {OUT}")


if __name__ == "__main__":
    main()
