"""A smoke grid under fire: two runners on one folder, random signals to all that they start, and in the end the files
of an undisturbed grid. Not a part of the test suite (half an hour): ``make test-chaos``.

Each round gives the grid an empty folder; whenever a runner has ended before the grid is finished it is started again.
Rounds follow one another until all signals are spent. What must hold: every run is finished, with the bytes of the
undisturbed grid; no record is damaged or set aside; what was once finished is never written again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from gcpo.io import sha256

TABLES = ("eval.csv", "metrics.csv", "queries.csv")


def start(outputs: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "gcpo", "grid", "smoke", "--profile", "smoke", "--jobs", "1"]
    environment = {**os.environ, "GCPO_OUTPUTS": str(outputs), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def processes(outputs: Path) -> list[psutil.Process]:
    """Runners and kernels that work for a folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("GCPO_OUTPUTS") == str(outputs) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def role(process: psutil.Process) -> str:
    return "runner" if process.ppid() == os.getpid() else "kernel"


def manifests(outputs: Path) -> dict[str, Path]:
    return {path.parent.name: path for path in outputs.glob("smoke/runs/*/manifest.json")}


def results(outputs: Path) -> dict[str, str]:
    return {
        f"{path.parent.name}/{path.name}": sha256(path)
        for name in TABLES
        for path in outputs.glob(f"smoke/runs/*/{name}")
    }


def finished(outputs: Path) -> dict[str, bytes]:
    """The manifests that say finished, as bytes."""
    contents = {name: path.read_bytes() for name, path in manifests(outputs).items()}
    return {name: content for name, content in contents.items() if json.loads(content)["status"] == "finished"}


def storm(outputs: Path, rng: random.Random, signals: int, wanted: int, told: Counter[str]) -> int:
    """One round; returns how many signals were sent."""
    runners = [start(outputs) for _ in range(2)]
    sent, done = 0, finished(outputs)
    while len(done) < wanted:
        pause = time.monotonic() + rng.expovariate(1 / 8)
        while time.monotonic() < pause and len(done) < wanted:
            time.sleep(0.2)
            now = finished(outputs)
            for name, content in done.items():
                assert now.get(name) == content, f"{name} was finished and has been written again"
            done = now
            runners = [start(outputs) if runner.poll() is not None else runner for runner in runners]
        targets = processes(outputs)
        if sent < signals and targets and len(done) < wanted:
            target, kind = rng.choice(targets), rng.choice([signal.SIGKILL, signal.SIGTERM])
            with contextlib.suppress(psutil.Error):
                told[f"{kind.name} to a {role(target)}"] += 1
                target.send_signal(kind)
                sent += 1
    for runner in runners:
        assert runner.wait(timeout=300) in (0, 1, 2, -signal.SIGKILL, 143), runner.returncode
    return sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--signals", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, told, begin = random.Random(options.seed), Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        calm = Path(folder) / "calm"
        assert start(calm).wait() == 0
        expected, wanted = results(calm), len(finished(calm))
        print(f"undisturbed: {wanted} runs, {len(expected)} tables, {time.monotonic() - begin:.0f} s", flush=True)
        sent = rounds = attempts = 0
        while sent < options.signals:
            rounds += 1
            outputs = Path(folder) / f"storm{rounds}"
            sent += storm(outputs, rng, options.signals - sent, wanted, told)
            found = results(outputs)
            other = [name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name)]
            if other or list(outputs.rglob("set-aside-*")):
                kept = shutil.copytree(folder, Path("chaos-failed"), dirs_exist_ok=True)
                sys.exit(f"other results, or a damaged record: {', '.join(other)}; all is kept in {kept.resolve()}")
            attempts += sum(json.loads(content)["attempts"] for content in finished(outputs).values())
            print(f"round {rounds}: {sent} signals so far, same results", flush=True)
            deadline = time.monotonic() + 30
            while processes(outputs):
                assert time.monotonic() < deadline, "a process outlived its runner"
                time.sleep(0.5)
    print(
        f"{sent} signals in {rounds} rounds and {(time.monotonic() - begin) / 60:.0f} min:", dict(sorted(told.items()))
    )
    print(f"{rounds * wanted} runs finished once each, in {attempts} attempts, as the undisturbed grid's")


if __name__ == "__main__":
    main()
