"""CW-GRPO's Figure 3 and Table 1: covariances of all tokens in 50 steps of GRPO, by the trainer's callback.

`python examples/covariances.py` takes the laptop's policy and mathematics (a minute of one core), and

    python examples/covariances.py --profile paper_cw

the paper's model and data, on one GPU: half of one of its trainings. Both write covariances.parquet (step and c of
each token), table_1.csv and figure_3.png to outputs/PROFILE/covariances. `--steps 2 --toy` tries either at toy size.
"""

from __future__ import annotations

import argparse
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from gcpo import paths
from gcpo.methods import get_method, modulate
from gcpo.reports.figures import PALETTE, set_style
from gcpo.rollouts import Rollouts
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.policies import quiet, starting_policy
from gcpo.runs.profiles import TOY, load_profile
from gcpo.runs.train import build_trainer

PERCENTILES = (0.01, 1, 20, 40, 100)  # of the paper's Table 1


def kept(rollouts: Rollouts) -> np.ndarray:
    """Return c of every token (CW-GRPO, section 2.3): log-probability times advantage, each less its group's mean."""
    covariance = modulate(get_method("cw_grpo"), rollouts).columns["cov"]
    return covariance[rollouts.mask.bool()].double().cpu().numpy()


def train(plan: Plan, folder: Any) -> pd.DataFrame:
    """Return step and c of every token that a training reads."""
    quiet()
    model, tokens = starting_policy(plan)
    rows = plan.load(plan.params.train_split, plan.params.train_limit, seed=plan.params.seed).rows
    seen: list[np.ndarray] = []
    trainer = build_trainer(plan, model, tokens, rows, folder / "run", callback=lambda batch: seen.append(kept(batch)))
    trainer.train()
    return pd.concat(pd.DataFrame({"step": step, "c": c}) for step, c in enumerate(seen, start=1))


def table(c: pd.Series) -> pd.DataFrame:
    """Return the value that the first so many per cent of the positive, and of the negative, covariances reach."""
    sides = {"positive": c[c > 0], "negative": c[c < 0]}
    high = {side: [values.abs().quantile(1 - q / 100) for q in PERCENTILES] for side, values in sides.items()}
    return pd.DataFrame(
        {"percentile": PERCENTILES, "positive": high["positive"], "negative": -np.array(high["negative"])}
    )


def main() -> None:
    """Train, and write the covariances, the table and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="laptop")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--toy", action="store_true")
    asked = parser.parse_args()
    ours = {"task": "tinymath"} if asked.profile == "laptop" else {"processes": 1}
    values = load_profile(asked.profile + TOY * asked.toy)
    plan = Plan("train", validate({**values, **ours, "method": "grpo", "max_steps": asked.steps}))
    folder = paths.OUTPUTS / plan.params.profile / "covariances"
    folder.mkdir(parents=True, exist_ok=True)
    found = train(plan, folder)
    found.to_parquet(folder / "covariances.parquet")
    made = table(found["c"])
    made.to_csv(folder / "table_1.csv", index=False)
    print(made.round(2).to_string(index=False))
    set_style()
    _, axis = plt.subplots(figsize=(5.6, 3.4))
    for number, (side, sign) in enumerate({"positive": 1, "negative": -1}.items()):
        c = sign * found["c"].to_numpy()
        share = np.sort(c[c > 0])[::-1].cumsum()
        axis.plot(np.linspace(0, 100, len(share)), 100 * share / share[-1:], color=PALETTE[number], label=side)
    axis.set(xlabel="tokens of this sign, largest |c| first (%)", ylabel="share of the sum of c (%)")
    axis.legend()
    plt.savefig(folder / "figure_3.png", bbox_inches="tight")
    print(f"{len(found)} tokens of {found['step'].nunique()} steps: {folder}")


if __name__ == "__main__":
    main()
