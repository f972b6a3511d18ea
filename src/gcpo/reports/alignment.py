"""How measures of uncertainty align with the gradient variance V(q) (GCPO, App. D)."""

from __future__ import annotations

import pandas as pd

from gcpo import statistics

# Column -> what figures call it. The paper's four measures come first.
MEASURES = {
    "token_entropy": "Entropy",
    "se": "SE",
    "cd": "CD",
    "bot": "BoT",
    "se_rao": "SE (Rao)",
    "se_mc": "SE (MC)",
    "kle": "KLE",
    "predictive_entropy": "Predictive entropy",
    "self_consistency": "1 - consistency",
    "rd": "RD",
}


def selected(queries: pd.DataFrame, *, drop_top: float = 0.0, keep_zero: bool = True) -> pd.DataFrame:
    """The queries an analysis is about.

    Args:
        queries: a table of gradient statistics, a line per query.
        drop_top: share of the queries with the largest V to leave out; the paper leaves out 2 % (App. D.1: 20 of 1000).
        keep_zero: keep the queries whose rewards have no variance (V = 0, tied at the lowest rank).
    """
    kept = queries if keep_zero else queries[~queries["zero_variance"]]
    return kept.sort_values("V", kind="stable").head(len(kept) - round(drop_top * len(kept)))


def alignment(queries: pd.DataFrame, names: list[str], n: int = 10000, seed: int = 0) -> pd.DataFrame:
    """How each measure aligns with V (GCPO Eq. 21-23, App. D.4-D.7), a row per measure.

    Columns: spearman with low and high (95 % bootstrap over queries), auc and precision at the top 10 %, and mae
    (squared gradient units) and heldout_spearman of a 5-fold linear prediction.
    """
    rows = {}
    for name in names:
        u, v = queries[name].to_numpy(), queries["V"].to_numpy()
        rho, low, high = statistics.spearman_interval(u, v, n, seed)
        mae, heldout = statistics.heldout_prediction(u, v, seed=seed)
        rows[MEASURES[name]] = {
            "spearman": rho,
            "low": low,
            "high": high,
            "auc": statistics.top_auc(u, v),
            "precision": statistics.precision_at_top(u, v),
            "mae": mae,
            "heldout_spearman": heldout,
        }
    return pd.DataFrame(rows).T.rename_axis("measure").reset_index()


def advantage_of(queries: pd.DataFrame, best: str, others: list[str], n: int = 10000, seed: int = 0) -> pd.DataFrame:
    """Spearman of ``best`` with V minus that of each other measure, by paired bootstrap (GCPO App. D.6)."""
    v = queries["V"].to_numpy()
    rows = [
        (MEASURES[name], *statistics.paired_bootstrap(queries[best].to_numpy(), queries[name].to_numpy(), v, n, seed))
        for name in others
    ]
    return pd.DataFrame(rows, columns=["measure", "difference", "low", "high"])
