"""Day one with a GPU, rehearsed: what is tried, and what counts as bad."""

import re
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from helpers import script

gpu_check = script("benchmarks/gpu_check.py")


def main(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *options])
    return int(gpu_check.main())


def test_without_a_gpu_a_line_says_why(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(monkeypatch) == 2
    assert re.fullmatch(r"gpu_check: torch sees no GPU here\. .*gpu_check.py --rehearse\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("rewards", "good"),
    [
        ([0.6, 0.8, 0.7, 0.9, 0.8, 1.0, 0.9, 1.1], True),
        ([0.1, 0.1, 0.2, 0.1, 0.2, 0.2, 0.2, 0.2], False),  # it answers nothing
        ([0.9, 0.9, 0.9, 0.8, 0.9, 0.9, 0.1, 0.1], False),  # it breaks: 0.8 lower, three deviations are 0.71
        ([0.6, 0.8, float("nan"), 0.9, 0.8, 1.0, 0.9, 1.1], False),
    ],
)
def test_a_curve_begins_where_it_should_and_does_not_fall(rewards: list[float], good: bool) -> None:
    said, found = gpu_check.curve(pd.Series(rewards), 0.4, 1.4)
    assert found is good and "begins between 0.4 and 1.4" in said


@pytest.mark.slow
def test_a_whole_rehearsal(outputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(monkeypatch, "--rehearse") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("good")]
    assert [line[5:].partition(":")[0] for line in lines] == list(gpu_check.STEPS)
