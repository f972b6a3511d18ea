"""Grids through a real SLURM of two nodes on this machine, by Snakemake and by an array of workers. Not a part of the
test suite: ``make test-cluster`` has runs that only wait, under fire; ``--real`` makes the smoke grid in three ways,
and one run on two nodes.

Each check says what holds in a line; the first that does not ends the program. All daemons and jobs end with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
GCPO = f"{sys.executable} -m gcpo"
STUB = f"{sys.executable} {HERE / 'stub.py'}"
GRID = """
- {kind: train, task: [tinyqa], method: [grpo, se], seed: [0, 1]}
- {kind: evaluate, task: [tinyqa], method: [grpo], seed: [0, 1], at_step: [max_steps]}
"""
RUNS, SMALL = 6, ["--cpus-per-task=1", "--mem=1500", "--gres=none"]
BEGAN = time.monotonic()


def say(held: str) -> None:
    print(f"[{time.monotonic() - BEGAN:5.0f} s] {held}", flush=True)


def check(held: bool, said: str, seen: object = "") -> None:
    if not held:
        sys.exit(f"FAILED: {said}\n{seen}")
    say(said)


def until(true: Callable[[], Any], said: str, seconds: float = 400) -> Any:
    """Wait until something holds, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        if time.monotonic() > deadline:
            sys.exit(f"FAILED, after {seconds} s: {said}")
        time.sleep(0.5)
    return found


def shell(*words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, **settings)


def squeue(*more: str) -> list[str]:
    """Ids of jobs that wait or run."""
    return shell("squeue", "-h", "-o", "%A", "-t", "PD,R,CG", *more).stdout.split()


class Outputs:
    """Runs in a folder of their own, made by a grid of stubs, or a real one."""

    def __init__(self, folder: Path, grid: str, gcpo: str) -> None:
        folder.mkdir()
        self.folder, self.grid, self.gcpo, self.log = folder, grid, gcpo, folder / "log"
        self.log.touch()
        quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
        self.environment = {**os.environ, **quiet, "GCPO_OUTPUTS": str(folder), "STUB_LOG": str(self.log), "GCPO": gcpo}

    def started(self, said: str = "start") -> list[str]:
        """Ids of runs in the order they began in (or ended: "end")."""
        return [line.split()[2] for line in self.log.read_text().splitlines() if line.split()[1] == said]

    def at_work(self) -> list[str]:
        """Ids of jobs in the middle of a run."""
        lines = [line.split() for line in self.log.read_text().splitlines()]
        ended = {name for _, said, name, _ in lines if said == "end"}
        begun = {job for _, said, name, job in lines if said == "start" and name not in ended}
        return [job for job in squeue("-t", "R") if job in begun]

    def finished(self) -> dict[str, dict[str, Any]]:
        """Manifests of the finished runs."""
        found = {path.parent.name: json.loads(path.read_text()) for path in self.folder.glob("*/runs/*/manifest.json")}
        return {name: manifest for name, manifest in found.items() if manifest["status"] == "finished"}

    def snakemake(self, profile: str, *more: str) -> subprocess.Popen[str]:
        given = ["-s", "workflow/Snakefile", "--workflow-profile", f"workflow/profiles/{profile}"]
        given += ["--config", f"grid={self.grid}", f"gcpo={self.gcpo}", *more]
        words = [sys.executable, "-m", "snakemake", "--directory", str(ROOT), *given]
        with (self.folder / "snakemake.log").open("a") as log:
            return subprocess.Popen(words, cwd=ROOT, env=self.environment, stdout=log, stderr=log, text=True)

    def to_slurm(self, *target: str) -> subprocess.Popen[str]:
        sizes = ["--default-resources", "runtime=10", "mem_mb=1500", "--set-threads", "run=1", "--latency-wait", "5"]
        return self.snakemake("slurm", *sizes, "--", *target)

    def said(self) -> str:
        return (self.folder / "snakemake.log").read_text()

    def nothing_to_do(self) -> bool:
        before = len(self.said())
        return self.snakemake("local", "-n", "--", "runs").wait() == 0 and "Nothing to be done" in self.said()[before:]

    def array(self, workers: int, *more: str, **settings: Any) -> subprocess.CompletedProcess[str]:
        words = ["workflow/slurm/array.sbatch", str(workers), self.grid, "smoke", *SMALL, *more]
        return shell(*words, cwd=ROOT, **{"env": self.environment, **settings})

    def check_once(self) -> None:
        """Check that each run is finished, and was never made by two at a time or after it was finished."""
        check(len(self.finished()) == RUNS, f"{RUNS} of {RUNS} runs are finished", list(self.finished()))
        check(set(Counter(self.started("end")).values()) == {1}, "each run ended once", self.log.read_text())
        check(not self.started("twice"), "no run was made by two jobs at a time", self.log.read_text())


def snakemake_under_fire(outputs: Outputs) -> None:
    made = outputs.to_slurm("runs")
    until(outputs.started, "a run begins")
    shell("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    check(bool(squeue("-t", "PD")), "n2 is drained while jobs wait")
    until(lambda: len(outputs.finished()) > 1, "runs end on the other node")
    job = until(outputs.at_work, "a job is in the middle of its run")[0]
    shell("scancel", job)
    say(f"job {job} is cancelled")
    shell("scontrol", "update", "nodename=n2", "state=resume")
    until(lambda: len(squeue("-t", "R")) > 1, "both nodes work again")
    made.send_signal(signal.SIGKILL)
    made.wait()
    alive = squeue("-t", "R")
    check(bool(alive), "Snakemake is killed, and its jobs go on", shell("squeue").stdout)
    check(outputs.to_slurm("runs").wait() != 0 and "--unlock" in outputs.said(), "the next one says: --unlock")
    check(outputs.snakemake("slurm", "--unlock").wait() == 0, "snakemake --unlock")
    last = outputs.to_slurm("runs").wait()
    until(lambda: not squeue(), "no job is left")
    if last or len(outputs.finished()) < RUNS:
        check(outputs.to_slurm("runs").wait() == 0, "started once more, for what others made meanwhile", outputs.said())
    outputs.check_once()
    check(outputs.nothing_to_do(), "snakemake -n has nothing to do", outputs.said()[-2000:])
    for name in shell("git", "ls-files", cwd=ROOT).stdout.split():
        (ROOT / name).touch()
    check(outputs.nothing_to_do(), "nor when each file of the checkout has a new date", outputs.said()[-2000:])


def two_jobs_on_one_run(outputs: Outputs) -> None:
    planned = shell(*outputs.gcpo.split(), "grid", outputs.grid, "--dry-run", "--json", env=outputs.environment)
    (plan := outputs.folder / "plan.json").write_text(planned.stdout.splitlines()[0])
    script = f"#!/bin/bash\nexec srun {outputs.gcpo} run --plan {plan}\n"
    settings = {"input": script, "env": {**outputs.environment, "STUB_SECONDS": "20"}}
    for number in (1, 2):
        shell("sbatch", "--mem=1500", f"--output={outputs.folder}/job{number}.log", **settings)
    until(lambda: not squeue(), "both have ended")
    logs = [(outputs.folder / f"job{number}.log").read_text() for number in (1, 2)]
    said = [line for log in logs for line in log.splitlines() if "another process makes it" in line]
    states = shell("scontrol", "show", "job", "-o").stdout.splitlines()[-2:]
    check(len(said) == 1 and len(outputs.started()) == 1, f"of two jobs one leaves: {said[0] if said else ''}", logs)
    check(all("ExitCode=0:0" in state for state in states), "with status 0", states)


def array_under_fire(outputs: Outputs) -> None:
    lost = outputs.array(1, env={**outputs.environment, "SLURM_CONF": "/absent"})
    check(lost.returncode == 2 and lost.stderr.count("\n") == 1, f"without a SLURM: {lost.stderr.strip()}", lost)
    # SLURM tells of the limit one to two minutes after the start: before one worker has made all of these runs.
    outputs.environment["STUB_SECONDS"] = "25"
    sent = outputs.array(2, "--time=3", "--signal=B:USR1@60")
    check("Submitted" in sent.stdout, sent.stdout.strip().replace("\n", "; "), sent)
    job = until(outputs.at_work, "a worker is in the middle of a run")[0]
    names = dict(line.split() for line in shell("squeue", "-h", "-o", "%A %i").stdout.splitlines())
    shell("scancel", names[job])  # by the name of the task: the id of one is the id of the whole array
    until(lambda: job not in squeue(), "the task ends", 60)
    check(len(squeue()) == 1, f"task {names[job]} is cancelled, and not queued again", squeue())

    def ended() -> bool:
        for job in squeue("-t", "PD"):  # SLURM waits two minutes before it starts a job again
            shell("scontrol", "update", f"JobId={job}", "StartTime=now")
        return not squeue()

    until(ended, "the array ends", 900)
    logs = [path.read_text() for path in outputs.folder.glob("jobs/slurm-*.log")]
    if len(outputs.finished()) < RUNS:
        outputs.array(2, "--time=10")
        until(lambda: not squeue(), "an array for what the cancelled task had", 900)
    again = [log for log in logs if "ended by SIGTERM" in log and log.count("making ") > 1]
    check(bool(again), "a task at its limit ends by SIGTERM, and its next start goes on", logs)
    outputs.check_once()
    seen = next(outputs.folder.glob("jobs/seen-*"))
    hidden = {**outputs.environment, "GCPO_SEEN": "/absent/jobs/seen", "SLURM_JOB_ID": "1"}
    alone = shell("workflow/slurm/array.sbatch", outputs.grid, "smoke", cwd=ROOT, env=hidden)
    check(seen.exists() and alone.returncode == 2, f"outputs of its own: {alone.stderr.strip()}", alone)


def tables(outputs: Outputs) -> dict[str, Any]:
    """SHA-256 of every table, and the results, of every finished run."""
    return {name: (manifest["files"], manifest["results"]) for name, manifest in outputs.finished().items()}


def three_ways(folder: Path) -> None:
    alone, by_snakemake, by_array = (Outputs(folder / name, "smoke", GCPO) for name in ("alone", "snakemake", "array"))
    check(by_snakemake.to_slurm("runs").wait() == 0, "the smoke grid by Snakemake", by_snakemake.said()[-3000:])
    sent = by_array.array(2, "--time=50")  # the partition has jobs of an hour at most
    check("Submitted" in sent.stdout, sent.stdout.strip().replace("\n", "; "), sent)
    until(lambda: not squeue(), "the smoke grid by an array", 3000)
    made = shell(*GCPO.split(), "grid", "smoke", "--jobs", "2", cwd=ROOT, env=alone.environment)
    check(made.returncode == 0, f"the smoke grid by gcpo grid: {len(tables(alone))} runs", made.stderr[-3000:])
    for outputs in (by_snakemake, by_array):
        check(
            tables(outputs) == tables(alone), f"by {outputs.folder.name}: each run has the same tables", tables(outputs)
        )


def one_run_on_two_nodes(folder: Path) -> None:
    words = "run --profile smoke -p processes 2 -p max_steps 4".split()
    one, two = (Outputs(folder / name, "smoke", GCPO) for name in ("one_machine", "two_nodes"))
    done = shell(*GCPO.split(), *words, cwd=ROOT, env=one.environment)
    check(len(one.finished()) == 1, "a run of two processes on one machine", done.stdout + done.stderr)
    script = f"#!/bin/bash\nexec {GCPO} {' '.join(words)}\n"
    log = f"--output={two.folder}/job.log"
    shell("sbatch", "--nodes=2", "--mem=3000", log, input=script, cwd=ROOT, env=two.environment)
    until(lambda: not squeue(), "the job ends", 1200)
    said = (two.folder / "job.log").read_text() + "".join(
        p.read_text() for p in two.folder.glob("*/runs/*/processes.log")
    )
    check(len(two.finished()) == 1, "the same run on two nodes of SLURM", said[-5000:])
    check(tables(one) == tables(two), "with the same losses, and every other table", (tables(one), tables(two)))


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[None]:
    os.environ |= {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": f"{folder}/bin:{os.environ['PATH']}:/usr/sbin"}
    try:
        started = shell(str(HERE / "start.sh"), str(folder))
        check(started.returncode == 0, "a SLURM of two nodes answers", started.stderr)
        yield
    finally:
        shell(str(HERE / "stop.sh"), str(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true", help="the smoke grid, in the place of runs that only wait")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which stops the cluster too
    with (
        tempfile.TemporaryDirectory(prefix="cluster-", dir="/tmp", ignore_cleanup_errors=True) as name,
        cluster(Path(name) / "slurm"),
    ):
        folder = Path(name)
        (folder / "grid.yaml").write_text(GRID)
        if given.real:
            one_run_on_two_nodes(folder)
            three_ways(folder)
            return
        two_jobs_on_one_run(Outputs(folder / "two", f"{folder}/grid.yaml", STUB))
        snakemake_under_fire(Outputs(folder / "snakemake", f"{folder}/grid.yaml", STUB))
        array_under_fire(Outputs(folder / "array", f"{folder}/grid.yaml", STUB))


if __name__ == "__main__":
    main()
