"""The batch runner around the runs: what it starts, leaves to others, says and cleans up; no notebook is executed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from filelock import FileLock
from record_builders import failed, finished, planned, publish, write_grid

from gcpo import paths
from gcpo.cli import main
from gcpo.runs import distributed, record, runner
from gcpo.runs.plan import KINDS

pytestmark = pytest.mark.usefixtures("places")

DDP = str(paths.PARAMS / "accelerate" / "ddp.yaml")  # which the places of a test do not have


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Runs that are recorded without being made; the ids of those that were started, in a file."""
    log = tmp_path / "started"
    log.write_text("")

    def execute(notebook: str, output: Path, parameters: dict[str, Any], threads: int | None = None) -> None:
        with log.open("a") as file:
            file.write(f"{output.parent.name}\n")
        finished(next(kind for kind, name in KINDS.items() if name == notebook), **parameters)

    @contextlib.contextmanager
    def workers(shares: list[list[str]]) -> Iterator[ThreadPoolExecutor]:
        with ThreadPoolExecutor(len(shares)) as pool:  # a process of its own would know nothing of these patches
            yield pool

    monkeypatch.setattr(runner, "execute", execute)
    monkeypatch.setattr(runner, "_workers", workers)
    monkeypatch.setattr("gcpo.world.resolve", lambda name, *_: name)
    return log


def test_a_dry_run_says_what_there_is_and_writes_nothing(executed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_grid("g", [{"kind": "train", "seed": [0, 1, 2, 3]}])
    finished(seed=0), failed(seed=1)
    run = finished(seed=2)
    (run.folder / "manifest.json").write_text("{}")
    before = sorted(paths.OUTPUTS.rglob("*"))
    assert main(["grid", "g", "--profile", "p", "--dry-run"]) == 0
    ids = [planned(seed=seed).id for seed in range(4)]
    assert capsys.readouterr().out.splitlines() == [
        f"{ids[0]}: finished",
        f"{ids[1]}: failed",
        f"{ids[2]}: left out (made by an older version of gcpo: move it away and run it again)",
        f"{ids[3]}: not run",
        "3 of 4 runs would be made",
    ]
    assert executed.read_text() == ""
    assert sorted(paths.OUTPUTS.rglob("*")) == before


def test_only_failed_runs_are_made_again_when_asked(executed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_grid("g", [{"kind": "train", "seed": [0, 1, 2]}])
    finished(seed=0), failed(seed=1)
    assert main(["grid", "g", "--profile", "p", "--only-failed", "--jobs", "1"]) == 0
    assert executed.read_text().split() == [planned(seed=1).id]
    assert main(["grid", "g", "--profile", "p", "--only-failed", "--jobs", "1"]) == 0
    assert main(["grid", "g", "--profile", "p", "--jobs", "1"]) == 0
    assert executed.read_text().split() == [planned(seed=1).id, planned(seed=2).id]
    assert "2 of 3 runs are finished already" in capsys.readouterr().out


def test_a_reference_grows_by_the_runs_that_it_lacks_a_task_at_a_time(executed: Path, capsys: Any) -> None:
    write_grid("g", [{"kind": "train", "seed": [0, 1], "task": ["tinyqa", "tinymath"]}])
    finished(seed=0, task="tinyqa")
    publish()
    shutil.rmtree(paths.OUTPUTS)
    command = ["grid", "g", "--profile", "p", "--jobs", "1"]
    assert main([*command, "--beyond-reference", "--task", "tinyqa"]) == 0
    assert executed.read_text().split() == [planned(seed=1, task="tinyqa").id]
    assert main([*command, "--task", "tinyQA"]) == 2
    assert "--task tinyQA: no run of the grid is on it. Did you mean 'tinyqa'?" in capsys.readouterr().err


def test_a_run_that_another_process_makes_is_left_to_it_and_awaited(executed: Path, capsys: Any) -> None:
    other, own = planned(seed=0), planned(seed=1)
    with record.claim(other):
        assert runner.run(other, wait=False) is None

    def make_it() -> None:
        with record.claim(other):
            claimed.set()
            while not record.load(own.folder).finished:
                time.sleep(0.05)
            time.sleep(0.5)
            finished(seed=0)

    claimed = threading.Event()
    thread = threading.Thread(target=make_it, daemon=True)
    thread.start()
    assert claimed.wait(60)
    assert runner.run_grid([other, own], jobs=1) == []
    thread.join(60)
    assert executed.read_text().split() == [own.id]  # the other was neither made twice nor given up
    assert record.load(other.folder).manifest["attempts"] == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"[1/2] {own.id}: finished") and lines[2].startswith(f"[2/2] {other.id}: finished")
    assert lines[1] == "waiting for 1 runs that another process makes"


def test_a_death_outside_the_record_is_written_into_it(executed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: Any) -> None:
        raise RuntimeError("Kernel died")

    monkeypatch.setattr(runner, "execute", dies)
    done = runner.run(planned())
    assert done is not None and done.fault is None
    assert (done.manifest["status"], done.manifest["exit"]) == ("failed", "RuntimeError: Kernel died")
    finished()
    assert runner.run(planned()).finished  # type: ignore[union-attr]


@pytest.mark.parametrize("warm", [False, True])
def test_a_kernel_that_dies_is_started_once_more_and_by_a_grid_only_with_other_room(
    warm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, notebook = tmp_path / "started", nbformat.v4.new_notebook()
    given = "\n".join(f"{name} = None" for name in planned().params.model_dump())
    dies = f"import os; open({str(log)!r}, 'a').write('x'); os.kill(os.getpid(), 9)"
    notebook.cells = [
        nbformat.v4.new_code_cell(given, metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(dies),
    ]
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "10_train.ipynb")
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(runner, "_warm", warm)
    monkeypatch.setattr(runner.kernels, "IMPORTED", "json")
    monkeypatch.setenv(runner.kernels.BESIDE, "2")
    starts, plan = [], planned()
    for beside, memory_limit in (("2", None), ("2", None), ("1", None), ("1", None), ("1", 0.5), (None, 0.5)):
        monkeypatch.setenv(runner.kernels.BESIDE, beside) if beside else monkeypatch.delenv(runner.kernels.BESIDE)
        plan = planned(memory_limit=memory_limit)
        done = runner.run(plan)
        assert done is not None and done.fault is None and done.manifest["status"] == "failed"
        assert done.manifest["exit"] == runner.DIED and "memory_limit" in runner.DIED
        starts.append(len(log.read_text()))
    assert starts == [2, 2, 4, 4, 6, 8]
    monkeypatch.setenv(runner.kernels.BESIDE, "1")
    killed = json.loads((plan.folder / "manifest.json").read_text())
    with contextlib.suppress(KeyboardInterrupt), record.record(plan):  # a run that its runner cannot tell of
        raise KeyboardInterrupt
    assert runner.run(plan).manifest["died"] == [0.5, "1"] != killed["died"]  # type: ignore[union-attr]


@pytest.fixture
def short() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own are too long for sockets
        yield Path(folder)


def test_what_dead_kernels_left_is_removed_and_what_live_ones_use_is_not(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    live = runner.IPCKernelManager()
    assert Path(live._folder.name).parent == short
    dead, others, results = short / "gcpo-dead", short / "gcpo-of-somebody-else", short / "gcpo-results"
    for folder in (dead, others, results):
        folder.mkdir()
    for name in ("alive", "table.csv"):  # a user's own
        (results / name).write_text("")
    (dead / "alive").write_text("")
    (dead / "kernel-1").write_text("")
    runner.sweep()
    assert (
        not dead.exists()
        and others.exists()
        and (results / "table.csv").exists()
        and Path(live._folder.name, "alive").exists()
    )
    with FileLock(others / "alive"):
        runner.sweep()
        assert others.exists()


def test_a_long_temporary_folder_is_not_used_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 87)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    manager = runner.IPCKernelManager()
    assert len(f"{manager.ip}-5") < 100 and list(long.iterdir()) == []


@pytest.mark.parametrize("command", ["run", "grid g"])
def test_outputs_that_cannot_be_written_are_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "g.yaml").write_text("- {kind: train, seed: [0, 1, 2], policy: [scratch], entailment: [none]}\n")
    environment = {**os.environ, "GCPO_OUTPUTS": str(tmp_path / "file" / "outputs")}
    words = command.replace(" g", f" {tmp_path / 'g.yaml'}").split()
    done = subprocess.run([sys.executable, "-m", "gcpo", *words], env=environment, capture_output=True, text=True)
    first, second = (done.stdout + done.stderr).splitlines()
    assert done.returncode == 2 and first == f"gcpo {words[0]}: loading (seconds)"
    assert second.startswith(f"gcpo: {tmp_path / 'file'}") and second.endswith(": Not a directory")


def test_paths_mean_what_they_mean_where_the_command_is_given(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    code = (
        "import os; from gcpo import paths; from gcpo.runs.params import validate;"
        "print(paths.OUTPUTS, os.environ['GCPO_OUTPUTS'], os.environ['GCPO_DATA_DIR'],"
        " *(validate({'policy': name}).policy for name in ('./other', 'model', 'lab/model', 'tiny', '../up', '~/m')))"
    )
    environment = {**os.environ, "GCPO_OUTPUTS": "here", "GCPO_DATA_DIR": "../data"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    here, up, home = tmp_path.resolve(), tmp_path.resolve().parent, Path.home()
    expected = [here / "here", here / "here", up / "data", here / "other", here / "model", "lab/model", "tiny"]
    assert done.stdout.split() == [str(path) for path in [*expected, up / "up", home / "m"]], done.stderr


def test_a_grid_of_which_nothing_is_left_says_so_without_what_runs_need(tmp_path: Path) -> None:
    grid = tmp_path / "g.yaml"
    grid.write_text("- {kind: train, seed: [0, 1]}\n")
    from gcpo.runs.grids import expand

    for plan in expand(str(grid), "p"):
        finished(seed=plan.params.seed)
    environment = {**os.environ, "GCPO_OUTPUTS": str(paths.OUTPUTS)}
    profile = str(paths.PARAMS / "p.yaml")
    slow = ["gcpo.runs.runner", "transformers", "trl", "papermill", "sentence_transformers", "datasets"]
    script = f"""
import sys
from gcpo.cli import main
status = main(["grid", {str(grid)!r}, "--profile", {profile!r}])
print(status, [name for name in {slow} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout == "2 of 2 runs are finished already\n0 []\n", done.stderr


def test_cores_are_shared_out_unless_the_environment_says_how_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [runner.share(jobs) for jobs in (1, 3, 9)] == [8, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert runner.share(1) is None


# --- GPUs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "named", "processes", "at_once", "shares_of_three"),
    [
        (0, None, 1, 3, [[], [], []]),
        (1, None, 1, 1, [["0"], ["0"], ["0"]]),
        (2, "5,GPU-1f", 1, 2, [["5"], ["GPU-1f"], ["5"]]),
        (5, None, 2, 2, [["0", "1"], ["2", "3"], ["4", "0"]]),
        (1, None, 2, 1, [["0"], ["0"], ["0"]]),  # refused when it is started, with both numbers
    ],
)
def test_each_run_of_a_grid_has_gpus_of_its_own(
    here: int, named: str | None, processes: int, at_once: int, shares_of_three: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.device_count", lambda: here)
    monkeypatch.delenv(distributed.VISIBLE, raising=False)
    if named:
        monkeypatch.setenv(distributed.VISIBLE, named)
    plans = [planned(), planned(seed=1, processes=processes, accelerate=DDP)]
    assert distributed.runs_at_once(plans) == at_once
    assert distributed.gpu_shares(3, plans) == shares_of_three


def test_a_kernel_sees_as_many_of_its_worker_s_gpus_as_its_run_has_processes(
    executed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_gpus", ["2", "3"])
    monkeypatch.setenv(distributed.VISIBLE, "0,1,2,3")  # as it was before
    for changes, seen in (({"processes": 2, "accelerate": DDP}, "2,3"), ({}, "2")):
        runner.run(planned(**changes))
        assert os.environ[distributed.VISIBLE] == seen


def test_a_worker_process_takes_a_share_of_the_gpus() -> None:
    with runner._workers([["1"]]) as pool:
        assert pool.submit(eval, "__import__('gcpo.runs.runner').runs.runner._gpus").result() == ["1"]


def test_a_training_of_one_process_sees_one_gpu_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv(distributed.VISIBLE, "2,3")
    with record.record(planned(processes=2, accelerate=DDP)):
        assert os.environ[distributed.VISIBLE] == "2,3"
    with monkeypatch.context() as late:
        late.setattr("torch.cuda.is_initialized", lambda: True)
        with (
            pytest.raises(ValueError, match=r"sees 2 GPUs and uses CUDA .* again with CUDA_VISIBLE_DEVICES=2"),
            record.record(planned()),
        ):
            pass
    with record.record(planned()):
        assert os.environ[distributed.VISIBLE] == "2"


# --- warm kernels -----------------------------------------------------------------------------------------------------


def _computes(answer: Any) -> None:
    """Multiply in two threads, and say who is here."""
    import torch

    torch.set_num_threads(2)
    product = torch.full((600, 600), 2.0) @ torch.full((600, 600), 3.0)
    answer.send((os.getppid(), "trl" in sys.modules, product.unique().tolist(), torch.get_num_threads()))


def test_kernels_are_forks_of_a_server_that_has_imported_all_and_has_no_thread_that_could_hold_a_lock() -> None:
    script = """
import multiprocessing, os, sys
from pathlib import Path
from multiprocessing import forkserver
from test_runner import _computes
from gcpo.runs import kernels
os.environ["OMP_NUM_THREADS"] = "2"
kernels.serve(), kernels.serve()
assert os.environ["OMP_NUM_THREADS"] == "2"
server = forkserver._forkserver._forkserver_pid
receive, answer = multiprocessing.Pipe(False)
for _ in range(2):
    kernel = kernels.WarmKernel(target=_computes, args=(answer,))
    kernel.start()
    parent, warm, product, threads = receive.recv()
    assert kernel.wait() == kernel.poll() == 0
    names = [Path(f"/proc/{server}/task/{task}/comm").read_text() for task in os.listdir(f"/proc/{server}/task")]
    # The one of an allocator, which steps aside for every fork, is no thread of Python or of arithmetic.
    print(parent == server, warm, product, threads, [name for name in names if not name.startswith("jemalloc")])
"""
    tests = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(runner.__file__).parents[2]), tests])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == 2 * "True True [3600.0] 2 ['python\\n']\n", done.stderr


@pytest.mark.parametrize("killed", ["worker", "server", "kernel"])
def test_a_warm_kernel_answers_and_ends_with_its_worker_and_with_its_server(killed: str) -> None:
    script = """
import asyncio, os, sys
from multiprocessing import forkserver
from gcpo.runs import kernels, runner

async def main():
    manager = runner.IPCKernelManager()
    await manager.start_kernel(cwd="/", env={**os.environ, "ASKED": "yes"})
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready()
    show = lambda message: print(message["content"].get("text", ""), end="")
    await client.execute_interactive("import os; print(os.environ['ASKED'], os.getcwd())", output_hook=show)
    print(manager.provisioner.pid, forkserver._forkserver._forkserver_pid, flush=True)
    while await manager.is_alive():
        await asyncio.sleep(0.1)
    print(manager.provisioner.process.poll(), flush=True)

kernels.IMPORTED, runner._warm = "json", True  # nothing heavy
asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(runner.__file__).parents[2])}
    worker = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
    with worker:
        assert worker.stdout and worker.stdout.readline() == "yes /\n"
        kernel, server = map(psutil.Process, map(int, worker.stdout.readline().split()))
        {"worker": worker, "server": server, "kernel": kernel}[killed].send_signal(signal.SIGKILL)
        said = worker.stdout.read().split()  # to its end, which is that of all three: they share it
        assert said == {"worker": [], "server": ["255"], "kernel": ["-9"]}[killed]
    _, alive = psutil.wait_procs([kernel, server], timeout=60)
    assert not alive
