"""Entropies of right and wrong answers: against scikit-learn, by hand, and under resampling."""

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score, roc_curve

from gcpo.reports import entropies


def answers(seeds: int = 3, questions: int = 40, lift: float = 1.0) -> pd.DataFrame:
    """Four samples per question: the thinking of wrong ones is less certain by ``lift``, their answer is not."""
    rng = np.random.default_rng(0)
    lines = []
    for seed in range(seeds):
        for query in range(questions):
            for _ in range(4):
                right = bool(rng.random() < 0.5)
                thinking, answer = rng.exponential(1 + lift * (not right)), rng.exponential(1)
                lines.append((seed, f"q{query}", right, thinking + answer, thinking, answer))
    return pd.DataFrame(lines, columns=["seed", "query", "right", *entropies.PARTS])


def found_in(table: pd.DataFrame, n: int) -> dict[str, entropies.Quantity]:
    return entropies.quantities(table, table["query"], n=n)


def test_statistics_are_scikit_learn_s_and_differences_of_means() -> None:
    table = answers()
    found = found_in(table, n=20)
    for seed, run in table.groupby("seed"):
        for part in entropies.PARTS:
            assert found[f"auc {part}"].loc[0, seed] == pytest.approx(roc_auc_score(~run["right"], run[part]))
            false, true, _ = roc_curve(~run["right"], run[part], drop_intermediate=False)
            rates = [found[f"tpr {part} {rate}"].loc[0, seed] for rate in entropies.RATES]
            assert rates == pytest.approx(np.interp(entropies.RATES, false, true))
            means = run.groupby("right")[part].mean()
            assert found[f"gap {part}"].loc[0, seed] == pytest.approx(means[False] - means[True])


def test_a_resample_is_the_run_with_its_questions_repeated() -> None:
    run = answers(seeds=1)
    counts = np.random.default_rng(0).multinomial(40, np.full(40, 1 / 40), size=20)[7]
    chosen = [part for (_, part), times in zip(run.groupby("query"), counts, strict=True) for _ in range(times)]
    repeated = pd.concat(chosen)
    found = found_in(run, n=20)["auc nll_thinking"].loc[8, 0]
    assert found == pytest.approx(roc_auc_score(~repeated["right"], repeated["nll_thinking"]))


def test_differences_are_paired_over_the_seeds_of_both() -> None:
    whole, fewer = answers(), answers()[lambda table: table["seed"] < 2]
    gap = found_in(whole, n=5)["gap nll"] - found_in(fewer, n=5)["gap nll"]
    assert gap[2].isna().all() and (gap[[0, 1]] == 0).all(axis=None)
    assert entropies.comparisons({"gap": gap})["n"].tolist() == [2] and entropies.draws(gap).interval() == (0, 0, 0)


def test_a_question_without_an_answer_leaves_resamples_paired() -> None:
    whole = answers()
    fewer = whole[(whole["seed"] > 0) | (whole["query"] != "q0")]
    gap = found_in(whole, n=5)["gap nll"] - entropies.quantities(fewer, whole["query"], n=5)["gap nll"]
    drawn = np.random.default_rng(0).multinomial(40, np.full(40, 1 / 40), size=5)
    assert (gap[[1, 2]] == 0).all(axis=None)
    assert ((gap.loc[1:, 0] == 0) == (drawn[:, 0] == 0)).all()  # apart only where the question was drawn
