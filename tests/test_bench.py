"""The benchmarks' arithmetic: ratios round by round, quartiles, limits, tables, and the pairs of the greedy rule."""

from pathlib import Path

import pandas as pd
from helpers import script

from gcpo.runs.profiles import read_yaml

FOLDER = Path(__file__).parents[1] / "benchmarks"
timing = script("benchmarks/timing.py")


def test_a_ratio_is_the_median_over_rounds_with_the_values_a_quarter_from_its_ends() -> None:
    times = {"own": [1.0, 6.0, 2.0, 8.0, 10.0], "other": [2.0, 2.0, 2.0, 2.0, 2.0]}
    found = timing.ratio("own", "other", times, limit=2.9)
    # 0.5, 3, 1, 4, 5 in order: 0.5, 1, 3, 4, 5
    assert (found.figure, found.low, found.high, found.rounds) == (3.0, 1.0, 4.0, 5)
    assert found.missed and not found._replace(limit=3.0).missed and not found._replace(limit=None).missed


def test_every_miss_that_is_committed_is_explained() -> None:
    known = read_yaml(FOLDER / "results" / "misses.yaml")
    tables = {path.stem: pd.read_csv(path, dtype=str) for path in (FOLDER / "results").glob("*.csv")}
    missed = {part: {*of.query("missed == 'True'")["case"]} for part, of in tables.items() if "missed" in of}
    assert {part: set(why) for part, why in known.items()} == {part: cases for part, cases in missed.items() if cases}
    assert all(sentence.endswith(".") for why in known.values() for sentence in why.values())


def test_the_greedy_rule_reads_pairs_of_new_texts_with_first_members() -> None:
    parts = script("benchmarks/parts.py")
    # b is compared with a; c with a and b, and joins a; d with a and b. Repeats and missing texts with none.
    assert parts._read_by_greedy(["a", "b", "a", "c", None, "d"], [0, 1, 0, 0, 2, 3]) == 5
