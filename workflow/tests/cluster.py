"""The smoke grid through a SLURM of two nodes on this machine, by an array and by Snakemake, and one run on both nodes:
the tables of ``gcpo grid``. Not a part of the test suite: ``make test-cluster``. All daemons and jobs end with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
GCPO = f"{sys.executable} -m gcpo"
SMALL = ["--cpus-per-task=1", "--mem=1500", "--gres=none", "--time=50"]
TWO = "run --profile smoke -p processes 2 -p max_steps 4".split()


def check(held: bool, said: str, seen: object = "") -> None:
    """Say what holds; the first that does not ends the program."""
    sys.exit(f"FAILED: {said}\n{seen}") if not held else print(said, flush=True)


def shell(outputs: Path, *words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a command whose runs go into a folder of their own."""
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT), "GCPO": GCPO}
    environment = {**os.environ, **quiet, "GCPO_OUTPUTS": str(outputs)}
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, **settings)


def until_no_job_is_left(seconds: float = 3000) -> None:
    deadline = time.monotonic() + seconds
    while shell(ROOT, "squeue", "-h").stdout:
        check(time.monotonic() < deadline, "the jobs end")
        time.sleep(1)


def tables(outputs: Path) -> dict[str, Any]:
    """SHA-256 of every table, and the results, of every finished run."""
    found = {path.parent.name: json.loads(path.read_text()) for path in outputs.glob("*/runs/*/manifest.json")}
    return {name: (m["files"], m["results"]) for name, m in found.items() if m["status"] == "finished"}


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[None]:
    os.environ |= {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": f"{folder}/bin:{os.environ['PATH']}:/usr/sbin"}
    try:
        started = shell(ROOT, str(HERE / "start.sh"), str(folder))
        check(started.returncode == 0, "a SLURM of two nodes answers", started.stderr)
        yield
    finally:
        shell(ROOT, str(HERE / "stop.sh"), str(folder))


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which stops the cluster too
    with (
        tempfile.TemporaryDirectory(prefix="cluster-", dir="/tmp", ignore_cleanup_errors=True) as name,
        cluster(Path(name) / "slurm"),
    ):
        alone, array, snakemake, one, two = (Path(name) / part for part in "alone array snakemake one two".split())
        done = shell(alone, *GCPO.split(), "grid", "smoke", "--jobs", "2")
        check(done.returncode == 0, "the smoke grid by gcpo grid", done.stderr[-3000:])
        done = shell(array, "workflow/slurm/array.sbatch", "2", "smoke", "smoke", *SMALL)
        check("Submitted" in done.stdout, done.stdout.strip(), done.stderr)
        until_no_job_is_left()
        check(tables(array) == tables(alone), "by an array each run has the same tables", tables(array))
        sizes = ["--default-resources", "runtime=10", "mem_mb=1500", "--set-threads", "run=1", "--latency-wait", "5"]
        words = ["-s", "workflow/Snakefile", "--workflow-profile", "workflow/profiles/slurm", *sizes, "--", "runs"]
        done = shell(snakemake, sys.executable, "-m", "snakemake", *words)
        check(done.returncode == 0, "the smoke grid by Snakemake", done.stderr[-3000:])
        check(tables(snakemake) == tables(alone), "by Snakemake each run has the same tables", tables(snakemake))
        done = shell(one, *GCPO.split(), *TWO)
        check(len(tables(one)) == 1, "a run of two processes on one machine", done.stdout + done.stderr)
        script = f"#!/bin/bash\nexec {GCPO} {' '.join(TWO)}\n"
        shell(two, "sbatch", "--nodes=2", "--mem=3000", f"--output={name}/two.log", input=script)
        until_no_job_is_left()
        check(tables(one) == tables(two), "on two nodes, with the same tables", (Path(name) / "two.log").read_text())


if __name__ == "__main__":
    main()
