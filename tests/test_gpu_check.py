"""Day one with a GPU, rehearsed: what is tried, and what counts as bad."""

import re
import sys
from pathlib import Path

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


@pytest.mark.slow
def test_a_whole_rehearsal(outputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(monkeypatch, "--rehearse") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("good")]
    assert [line[5:].partition(":")[0] for line in lines] == list(gpu_check.STEPS)
