"""Sentences of the papers held against their tables: numbers worked out by hand from the printed ones."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers import script

from gcpo.reports.ledger import claims
from gcpo.reports.tables import PRINTED

printed = script("benchmarks/printed.py")


def test_the_committed_tables_are_those_that_the_papers_numbers_give(tmp_path: Path) -> None:
    printed.write(tmp_path)
    for name in ("checks.csv", "gains.csv"):
        assert (tmp_path / name).read_text() == (PRINTED / name).read_text()


def test_numbers_agree_within_one_unit_of_the_last_digit() -> None:
    assert printed.agrees(2.7, 2.68, 1) and printed.agrees(2.7, 2.6, 1)
    assert not printed.agrees(2.4, 2.54, 1) and not printed.agrees(65.97, 64.99, 2)


def test_gains_are_those_worked_out_by_hand() -> None:
    assert printed.gcpo_gains().loc["gcpo_bot", ("narrativeqa", "f1")] == pytest.approx(100 * (73.82 - 67.02) / 67.02)
    assert printed.seed_gains()["computed"].iloc[0] == pytest.approx(100 * 3.4 / 43.3)
    off = printed.seed_averages().loc[("2", "Qwen2.5-Math-base 7B", "Qwen2.5-Math-7B")]
    assert off["average"] == 38.2 and off["mean of five"] == pytest.approx((0.2 + 45.8 + 69.0 + 21.3 + 34.7) / 5)
    gains = printed.cw_gains().loc[("7B", "CW-GRPO over base")]
    assert gains["stated"] == 4.3 and gains["computed"] == pytest.approx(5.28)
    assert printed.egpo_table2().loc["EGPO", "mean of three"] == pytest.approx((76.40 + 37.13 + 81.43) / 3)


def test_a_score_of_one_pass_is_a_whole_number_of_questions() -> None:
    aime = printed.solved()["aime24"]
    assert aime[("base", "Qwen2.5-Math-1.5B")] == pytest.approx(2, abs=0.01)  # 6.67 of 30 questions
    assert printed.one_pass().loc[("base", "Qwen2.5-Math-1.5B"), "aime24"]


def test_each_claim_about_a_table_has_a_check() -> None:
    assert printed.CHECKS.keys() >= {check for claim in claims() if claim.scope == "printed" for check in claim.checks}


@pytest.mark.parametrize(
    ("name", "table", "row", "column", "value", "holds"),
    [
        ("seed-4-3-aime-printed", "seed_gains", "13.4 % on AIME24", "computed", 13.4, True),
        ("cw-3-2-averages-printed", "cw_gains", ("7B", "CW-GRPO over GRPO"), "computed", 2.4, True),
        ("gcpo-4-2-baselines-printed", "gcpo_table1", "gcpo_bot", ("qasper", "bleu"), 11.63, True),
        ("seed-4-2-all-7b-printed", "seed_table3", "Dr.GRPO 7B", "math500", 83.5, False),
    ],
)
def test_a_check_is_decided_by_the_number_that_its_sentence_needs(
    name: str, table: str, row: Any, column: Any, value: float, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, numbers = printed.CHECKS[name]()
    changed: pd.DataFrame = getattr(printed, table)()
    changed.loc[row, column] = value
    monkeypatch.setattr(printed, table, lambda: changed)
    after, others = printed.CHECKS[name]()
    assert others != numbers and bool(before) != bool(after) == holds
