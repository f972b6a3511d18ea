"""The array's script before a SLURM that only pretends: ``python -m pytest workflow/tests``."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "slurm" / "array.sbatch"
GCPO = """echo "$@" >> "$LOG"
case "$*" in *--dry-run*) printf "a: finished\\nb: not run\\n1 of 2 runs would be made\\n";; esac"""
# Each task of the array at once, with the options that a job's script gets.
SBATCH = """for option; do case $option in --array=*) array=${option#--array=};; esac; done
while [ "${1#-}" != "$1" ]; do shift; done
echo "array $array" >> "$LOG"
for task in 1 2; do SLURM_JOB_ID=$task SLURM_ARRAY_TASK_ID=$task "$@"; done"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "bin").mkdir()
    for name, text in {"scontrol": "", "srun": 'shift; "$@"', "sbatch": SBATCH, "gcpo": GCPO}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    own = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "GCPO": "gcpo", "GCPO_OUTPUTS": str(tmp_path / "outputs")}
    return {**{k: v for k, v in os.environ.items() if not k.startswith("SLURM")}, **own, "LOG": str(tmp_path / "log")}


def test_a_grid_is_an_array_with_a_task_for_each_run(environment: dict[str, str]) -> None:
    done = subprocess.run([SCRIPT, "8", "g", "p", "--time=5"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(environment["LOG"]).read_text().splitlines() == [
        "grid g --profile p --dry-run",
        "array 1-2%8",
        "grid g --profile p --index 1",
        "grid g --profile p --index 2",
    ]


def test_what_an_array_cannot_do_is_one_line(environment: dict[str, str]) -> None:
    few = subprocess.run([SCRIPT, "8"], env=environment, capture_output=True, text=True)
    hidden = {**environment, "SLURM_JOB_ID": "1", "GCPO_SEEN": "/absent/jobs/seen"}
    apart = subprocess.run([SCRIPT, "g", "p"], env=hidden, capture_output=True, text=True)
    for done, said in ((few, "expected AT_ONCE GRID PROFILE"), (apart, "does not share /absent")):
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
