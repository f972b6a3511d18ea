"""Processor time of a whole run by this code over the same run by another checkout of this project.

Start-up, training and evaluation of a run of the laptop profile, made by `gcpo grid`; this code shares prompts. The
runs alternate, with a seed for each round, and the time is that of all processes that a grid starts. `python
benchmarks/whole.py CHECKOUT` needs the packages of both; each code has a world of its own, and the checkout's must be
made (`gcpo world`). It writes `benchmarks/results/whole.csv`, and ends with 1 where a limit is missed. `make bench` has
no other checkout, and leaves it out.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
from timing import ratio, report

from gcpo import paths

LIMITS = {"tinyqa": 0.5, "tinymath": 0.67}
HERE = paths.PARAMS.parent


def seconds(root: Path, run: dict[str, object]) -> float:
    """Make a run by the code of a checkout, and return its processor seconds."""
    grid = root / "params" / "grids" / "whole.yaml"
    grid.write_text("- kind: train\n" + "".join(f"  {key}: [{value}]\n" for key, value in run.items()))
    runs, spent = root / "outputs" / "laptop" / "runs", {}
    before = {*runs.glob("*")}
    source = root / "src" if (root / "src").exists() else root
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "gcpo", "grid", "whole", "--profile", "laptop", "--jobs", "1"]
    try:
        with subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.DEVNULL) as grid_runner:
            runner = psutil.Process(grid_runner.pid)
            while grid_runner.poll() is None:
                with contextlib.suppress(psutil.Error):
                    for process in (runner, *runner.children(recursive=True)):
                        with contextlib.suppress(psutil.Error):
                            spent[process.pid] = sum(process.cpu_times()[:2])
                time.sleep(0.2)
        made = {*runs.glob("*")} - before
        if grid_runner.returncode or len(made) != 1:
            sys.exit(f"{root}: no run was made: {' '.join(command)}")
        shutil.rmtree(made.pop())
    finally:
        grid.unlink()
    return sum(spent.values())


def main() -> int:
    """Print and write a line per task and method: the ratio over rounds, with its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=options.checkout, capture_output=True, text=True, check=True
    ).stdout.strip()
    lines = []
    for task, method in itertools.product(LIMITS, ("grpo", "gcpo_bot")):
        times: dict[str, list[float]] = {"this": [], commit: []}
        for seed in range(900, 900 + options.rounds):
            run = {"task": task, "method": method, "seed": seed}
            times[commit].append(seconds(options.checkout.resolve(), run))
            times["this"].append(seconds(HERE, {**run, "share_prompts": "true"}))
        lines.append(ratio("this", commit, times, LIMITS[task])._replace(case=f"{task} {method}"))
    return 1 if report("whole", lines) else 0


if __name__ == "__main__":
    sys.exit(main())
