"""Claims about the papers' policies: not tested without runs, and decided by made-up ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from gcpo import paths
from gcpo.reports import real
from gcpo.reports.ledger import claims
from gcpo.runs import record
from gcpo.runs.grids import expand
from gcpo.runs.plan import Plan


@pytest.fixture(autouse=True)
def own_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OUTPUTS", "REFERENCE"):
        monkeypatch.setattr(paths, name, tmp_path / name.lower())
    monkeypatch.setattr(record, "environment", lambda: {"code": "c0de", "commit": "c0ffee", "dirty": False})


def finish(plan: Plan, name: str, table: pd.DataFrame) -> None:
    with record.record(plan) as run:
        run.table(f"{name}.csv", table)


@pytest.mark.parametrize("claim", list(real.CLAIMS))
def test_without_runs_a_claim_is_not_tested_and_says_what_makes_them(claim: str) -> None:
    place, heading, decided = real.CLAIMS[claim]
    verdict = decided(False)
    assert verdict.label == "not tested"
    profile = "paper_seed" if claim.startswith("seed") else "paper"
    assert f"First: python -m gcpo grid {profile}_" in verdict.because
    assert f"--profile {profile}." in verdict.because
    assert place and heading and claim in {one.id for one in claims() if one.scope == "real model"}


# --- alignment on two data sets -------------------------------------------------------------------------------------


def measured(noise: dict[str, dict[str, float]], size: int = 250, sign: float = 1.0) -> None:
    """Gradient statistics of the starting policy: a measure is V and this much noise, on each data set."""
    plans = {plan.params.task: plan for plan in expand("paper_figure1", "paper") if plan.params.seed == 0}
    for task, levels in noise.items():
        rng = np.random.default_rng(len(task))
        v = np.arange(1.0, size + 1) / size
        columns = {name: sign * v + level * rng.normal(size=size) for name, level in levels.items()}
        names = [f"{task}{i}" for i in range(size)]
        table = pd.DataFrame({"query": names, "V": v, "zero_variance": False, **columns})
        finish(plans[task], "queries", table)


def levels(entropies: float, geometry: float) -> dict[str, float]:
    return {"token_entropy": entropies, "se": entropies, "cd": geometry, "bot": geometry}


CLEAR, FAINT = 0.1, 2.0


@pytest.mark.parametrize(
    ("narrativeqa", "qasper", "expected"),
    [
        (levels(CLEAR, CLEAR), levels(FAINT, FAINT), "holds"),
        (levels(FAINT, FAINT), levels(CLEAR, CLEAR), "fails"),
        (levels(FAINT, FAINT), levels(FAINT, FAINT), "inconclusive"),
        (levels(CLEAR, CLEAR), levels(CLEAR, FAINT), "inconclusive"),  # the entropies are as close on both
    ],
)
def test_alignment_on_qasper_is_weaker_where_every_measure_is(
    narrativeqa: dict[str, float], qasper: dict[str, float], expected: str
) -> None:
    measured({"narrativeqa": narrativeqa, "qasper": qasper})
    verdict = real.weaker_on_qasper()
    assert verdict.label == expected
    assert "NarrativeQA minus Qasper" in verdict.because and len(verdict.parts) == 4


def test_a_difference_of_correlations_is_the_difference_of_both() -> None:
    measured({"narrativeqa": levels(0.0, 0.0), "qasper": levels(0.0, 0.0)})
    verdict = real.smaller_advantage_on_qasper()
    assert verdict.label == "inconclusive" and (verdict.estimate, verdict.low, verdict.high) == (0, 0, 0)
    assert len(verdict.parts) == 4


@pytest.mark.parametrize(
    ("narrativeqa", "qasper", "expected"),
    [
        (levels(FAINT, CLEAR), levels(FAINT, FAINT), "holds"),
        (levels(FAINT, FAINT), levels(FAINT, CLEAR), "fails"),
        (levels(CLEAR, CLEAR), levels(FAINT, FAINT), "inconclusive"),  # weaker on Qasper, but no measure leads
    ],
)
def test_the_advantage_of_geometry_is_compared_between_data_sets(
    narrativeqa: dict[str, float], qasper: dict[str, float], expected: str
) -> None:
    measured({"narrativeqa": narrativeqa, "qasper": qasper})
    assert real.smaller_advantage_on_qasper().label == expected


def test_one_data_set_alone_decides_nothing() -> None:
    measured({"qasper": levels(CLEAR, CLEAR)})
    assert real.weaker_on_qasper().label == real.smaller_advantage_on_qasper().label == "not tested"


# --- accuracy -------------------------------------------------------------------------------------------------------


def answers(right: float, decoding: str, size: int = 1000) -> pd.DataFrame:
    """Answers of which this share is right, and as many of the other decoding that are all wrong."""
    accuracy = np.arange(size) < round(right * size)
    other = {"sampled": "greedy", "greedy": "sampled"}[decoding]
    names = [f"q{i}" for i in range(size)]
    own = pd.DataFrame({"query": names, "decoding": decoding, "accuracy": accuracy.astype(float)})
    return pd.concat([own, own.assign(decoding=other, accuracy=0.0)])


def trained(share: Callable[[Plan], float | None]) -> None:
    """Runs of Table 2 and of AIME24, with these shares of right answers; None makes no run."""
    for plan in expand("paper_table2", "paper"):
        right = share(plan)
        if right is not None:
            name = "eval" if plan.kind == "train" else "answers"
            finish(plan, name, answers(right, "sampled"))


def gaining(math: Iterable[float], others: Iterable[float]) -> Callable[[Plan], float | None]:
    """Gains of both methods over GRPO by seed, on MATH-500 and on the two others."""
    by = {"math": [*math], "aime24": [*others], "olympiadbench": [*others]}

    def share(plan: Plan) -> float | None:
        p, start = plan.params, 0.0 in (plan.params.max_steps, plan.params.at_step or None)
        if start or p.method not in (*real.GCPO, "grpo") or p.policy != "Qwen/Qwen2.5-1.5B-Instruct":
            return None
        if plan.kind == "evaluate" and not p.at_step:
            return None
        return 0.3 + 0.01 * p.seed + (by[p.task][p.seed] if p.method in real.GCPO else 0)

    return share


BIG, SMALL = [0.08, 0.09, 0.085, 0.08, 0.09], [0.01, 0.012, 0.011, 0.01, 0.009]


@pytest.mark.parametrize(
    ("math", "others", "expected"),
    [
        (BIG, SMALL, "holds"),
        (SMALL, BIG, "fails"),
        ([-x for x in SMALL], [-x for x in BIG], "fails"),  # it loses less on MATH-500, which is no gain
        ([0.08, -0.06, 0.01, 0.05, -0.04], SMALL, "inconclusive"),
    ],
)
def test_gains_are_limited_where_those_on_math_are_clear_and_larger(
    math: list[float], others: list[float], expected: str
) -> None:
    trained(gaining(math, others))
    verdict = real.limited_gains()
    assert verdict.label == expected and len(verdict.parts) == 6


def test_a_gain_is_of_the_same_seed_and_task() -> None:
    trained(gaining(BIG, SMALL))
    lines = real.limited_gains().parts
    assert any("GCPO-BoT on MATH-500 minus 0: +8.50" in line for line in lines), lines
    assert any("GCPO-CD on MATH-500 minus GCPO-CD on AIME24: +7.46" in line for line in lines), lines


def seven_b(scores: Iterable[float]) -> None:
    """SEED-GRPO 7B as Eq. 6 is printed, on AIME24; its other form is far better."""
    found = [plan for plan in expand("paper_seed_table2", "paper_seed") if plan.kind == "evaluate"]
    found = [plan for plan in found if (plan.params.task, plan.params.policy) == ("aime24", real.SEED_7B["policy"])]
    known = [*scores]
    for plan in found:
        if plan.params.method == "seed_grpo" and plan.params.at_step:
            own = plan.params.method_options == real.LINEAR
            finish(plan, "answers", answers(known[plan.params.seed] if own else 0.9, "greedy"))


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0.47, 0.475, 0.472], "holds"),
        ([0.40, 0.41, 0.405], "fails"),
        ([0.443, 0.447, 0.44], "ruled out"),  # as good as SRPO: an interval below +2.4
        ([0.30, 0.60, 0.50], "inconclusive"),
    ],
)
def test_seed_grpo_is_compared_with_the_printed_number_of_srpo(scores: list[float], expected: str) -> None:
    seven_b(scores)
    verdict = real.beats_srpo()
    assert verdict.label == expected
    assert (verdict.estimate, verdict.effect) == (
        pytest.approx(100 * np.mean(scores) - 44.3),
        pytest.approx(46.7 - 44.3),
    )
