"""The benchmarks' arithmetic: ratios round by round, quartiles, limits, tables, and the pairs of the greedy rule."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
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


def test_a_report_counts_limits_that_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(timing, "RESULTS", tmp_path)
    found = [timing.Line("fast", "", 0.25, 0.125, 0.5, "s", 1.0), timing.Line("slow", "fast", 2.0, 1.0, 3.0, limit=1.5)]
    assert timing.report("part", found) == 1
    with (tmp_path / "part.csv").open() as file:
        first, second = csv.DictReader(file)
    assert (first["figure"], first["limit"], first["missed"]) == ("0.25", "1.0", "False")
    assert (second["over"], second["figure"], second["missed"]) == ("fast", "2", "True")
    assert first["hardware"] and "torch" in first["packages"]
    fast, slow, why = capsys.readouterr().out.splitlines()
    assert fast.endswith("limit 1.0") and slow.endswith("limit 1.5 MISSED") and "not explained" in why


@pytest.mark.slow
def test_the_papers_scale_is_rehearsed_on_a_cpu() -> None:
    command = [sys.executable, "paper_scale.py", "--rehearse"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for case in ("TRL, step", "cw_grpo, shared, step", "2 answers to 1 prompt, shared", "V(q), adapters, one pass"):
        assert f"case='{case}'" in done.stdout
    refused = subprocess.run(command[:-1], cwd=FOLDER, capture_output=True, text=True)
    assert refused.returncode == 1 and "torch sees no GPU here" in refused.stderr


def test_every_miss_that_is_committed_is_explained() -> None:
    known = read_yaml(FOLDER / "results" / "misses.yaml")
    missed = {}
    for path in (FOLDER / "results").glob("*.csv"):
        with path.open() as file:
            if cases := {row["case"] for row in csv.DictReader(file) if row.get("missed") == "True"}:
                missed[path.stem] = cases
    assert {part: set(why) for part, why in known.items()} == missed
    assert all(sentence.endswith(".") for why in known.values() for sentence in why.values())


def test_the_greedy_rule_reads_pairs_of_new_texts_with_first_members() -> None:
    parts = script("benchmarks/parts.py")
    # b is compared with a; c with a and b, and joins a; d with a and b. Repeats and missing texts with none.
    assert parts._read_by_greedy(["a", "b", "a", "c", None, "d"], [0, 1, 0, 0, 2, 3]) == 5
