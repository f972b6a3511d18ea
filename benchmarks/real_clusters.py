"""The real model's Figure 1 with another rule for one meaning: outputs/reference/real_answers/figure1_cosine.csv.

``python benchmarks/real_clusters.py`` makes it from the committed answers, in some minutes on one core, or with
``--here`` from this machine's runs. Two answers are of one meaning where the cosine of their embeddings is 0.8 or more,
as PROTOCOL.md names it beforehand. The file has numbers alone: a question's SE of counts, BoT and number of clusters in
each draw of answers.
"""

import argparse

import pandas as pd
import torch

from gcpo import measures, records
from gcpo.reports.real_answers import FOLDER
from gcpo.runs.grids import expand
from gcpo.runs.plan import Plan
from gcpo.runs.policies import rollouts_of

RULES = {"token_f1": 0.5, "cosine": 0.8}  # the runs' own, which has to give what they recorded, and the variation
TOLERANCE = 1e-5  # single precision, and batches of other lengths for the embedding model


def clustered(plan: Plan, answers: pd.DataFrame, rule: str) -> pd.DataFrame:
    """Return se, bot and clusters of each question under a rule for one meaning.

    Args:
        plan: the run that the answers are of.
        answers: lines of its ``answers.csv``.
        rule: of :data:`RULES`.
    """
    settings = {"entailment": rule, "entailment_threshold": RULES[rule]}
    rollouts = rollouts_of(Plan("gradients", plan.params.model_copy(update=settings)))
    rows = []
    for query, part in answers.sort_values(["query", "sample"]).groupby("query", sort=False):
        made = rollouts(torch.tensor([part["reward"].tolist()]), [part["text"].fillna("").tolist()])
        se = measures.semantic_entropy(made.clusters).item()
        bot = measures.barycentric_transport(made.embeddings, made.clusters).item()
        rows.append((query, se, bot, len(made.clusters[0].unique())))
    return pd.DataFrame(rows, columns=["query", "se", "bot", "clusters"])


def main() -> None:
    """Check the runs' own rule on every run, and write the other rule's numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--here", action="store_true", help="of this machine's runs, and not of the reference")
    asked = parser.parse_args()
    plans = {plan.id: plan for plan in expand("real_figure1", "real")}
    runs = records.find("real", "real_figure1", not asked.here)
    tables = []
    for _, run in runs[runs["kind"] == "gradients"].iterrows():
        one = runs[runs["id"] == run["id"]]
        answers, recorded = records.gather(one, "answers", []), records.gather(one, "queries", []).set_index("query")
        again = clustered(plans[run["id"]], answers, "token_f1").set_index("query")
        worst = (again - recorded.loc[again.index, again.columns]).abs().max()
        if worst.max() > TOLERANCE:
            raise SystemExit(f"{run['id']}: the runs' own rule gives other numbers than they recorded:\n{worst}")
        print(f"{run['id']}: the runs' own rule gives what they recorded, to {worst.max():.1e}", flush=True)
        found = clustered(plans[run["id"]], answers, "cosine")
        tables.append(found.assign(**run[["task", "seed", "warm_steps", "at_step"]]))
    pd.concat(tables).to_csv(FOLDER / "figure1_cosine.csv", index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
