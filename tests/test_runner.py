"""The batch runner around the runs: what it starts, leaves to others, says and ends; no run is made."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from filelock import FileLock
from record_builders import failed, finished, planned, write_grid

from gcpo import paths
from gcpo.runs import distributed, record, runner
from gcpo.runs.plan import KINDS

pytestmark = pytest.mark.usefixtures("places")

DDP = str(paths.PARAMS / "accelerate" / "ddp.yaml")  # which the places of a test do not have


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs that are recorded without being made; the ids of those that were started."""
    started: list[str] = []

    def execute(notebook: str, output: Path, parameters: dict[str, Any], shown: bool = False) -> None:
        started.append(output.parent.name)
        finished(next(kind for kind, name in KINDS.items() if name == notebook), **parameters)

    monkeypatch.setattr(runner, "execute", execute)
    monkeypatch.setattr("gcpo.world.resolve", lambda name, *_: name)
    return started


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put this code in the place of notebook 10."""
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)

    def write(code: str) -> None:
        made = nbformat.v4.new_notebook()
        given = "\n".join(f"{name} = None" for name in planned().params.model_dump())
        made.cells = [nbformat.v4.new_code_cell(given, metadata={"tags": ["parameters"]})]
        made.cells.append(nbformat.v4.new_code_cell(code))
        made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(made, tmp_path / "10_train.ipynb")

    return write


def test_a_dry_run_says_what_there_is_and_writes_nothing(executed: list[str], call: Any) -> None:
    write_grid("g", [{"kind": "train", "seed": [0, 1, 2, 3]}])
    finished(seed=0), failed(seed=1)
    (finished(seed=2).folder / "manifest.json").write_text("{}")
    before = sorted(paths.OUTPUTS.rglob("*"))
    lines = call("grid", "g", "--profile", "p", "--dry-run").out.splitlines()
    states = ["finished", "failed", "left out (", "not run"]
    assert lines.pop() == "3 of 4 runs would be made"  # workflow/ reads it, and the lines before it
    for seed, (line, state) in enumerate(zip(lines, states, strict=True)):
        assert line.startswith(f"{planned(seed=seed).id}: {state}")
    assert executed == [] and sorted(paths.OUTPUTS.rglob("*")) == before


def test_a_grid_makes_what_is_not_finished_and_a_number_chooses_one_run(executed: list[str], call: Any) -> None:
    write_grid("g", [{"kind": "train", "seed": [0, 1, 2], "task": ["tinyqa", "tinymath"]}])
    finished(seed=0, task="tinyqa"), failed(seed=1, task="tinyqa")
    command = ["grid", "g", "--profile", "p", "--jobs", "1", "--task", "tinyqa"]
    call(*command, "--index", "2"), call(*command, "--index", "1")  # of which that is finished
    assert executed == [planned(seed=1).id]
    assert "2 of 3 runs are finished already" in call(*command).out and executed[1:] == [planned(seed=2).id]
    assert "--index 4" in call(*command, "--index", "4", status=2).err
    assert "Did you mean 'tinyqa'?" in call(*command[:-1], "tinyQA", status=2).err


def test_the_training_that_runs_look_at_is_made_once_and_first(executed: list[str]) -> None:
    looks = [planned("evaluate", at_step=2), planned("gradients", at_step=2)]
    assert runner.run_grid(looks, jobs=1) == []
    assert executed == [plan.id for plan in (looks[0].training, *looks) if plan]


def test_a_run_that_another_process_makes_is_left_to_it_and_awaited(executed: list[str]) -> None:
    other, own = planned(seed=0), planned(seed=1)
    other.folder.mkdir(parents=True)

    def make_it() -> None:
        with FileLock(other.folder / record.LOCKS[1]):
            held.set()
            while not record.load(own.folder).finished:
                time.sleep(0.05)
            finished(seed=0)

    held = threading.Event()
    thread = threading.Thread(target=make_it, daemon=True)
    thread.start()
    assert held.wait(60) and runner.run(other, wait=False) is None
    assert runner.run_grid([other, own], jobs=1) == []
    thread.join(60)
    assert executed == [own.id]  # the other was neither made twice nor given up
    assert record.load(other.folder).manifest["attempts"] == 1


def test_a_death_outside_the_record_is_written_into_it_and_named_and_the_grid_goes_on(
    executed: list[str], monkeypatch: pytest.MonkeyPatch, call: Any
) -> None:
    makes = runner.execute

    def dies(notebook: str, output: Path, parameters: dict[str, Any], shown: bool = False) -> None:
        if parameters["seed"] == 1:
            return makes(notebook, output, parameters)
        raise RuntimeError("out of luck")

    write_grid("g", [{"kind": "train", "seed": [0, 1]}])
    monkeypatch.setattr(runner, "execute", dies)
    shown, done = call("grid", "g", "--profile", "p", "--jobs", "1", status=1), record.load(planned().folder)
    assert executed == [planned(seed=1).id]
    assert done.fault is None and done.manifest["exit"] == "RuntimeError: out of luck"
    assert done.manifest["exit"] in shown.out and str(done.folder / "notebook.ipynb") in shown.err
    monkeypatch.setattr(runner, "execute", lambda *given: finished() and dies(*given))  # after the run has finished
    assert runner.run(planned()).finished  # type: ignore[union-attr]


def test_a_kernel_that_dies_without_a_word_is_a_run_that_failed(notebook: Callable[[str], None]) -> None:
    notebook("import os; os.kill(os.getpid(), 9)")
    (done,) = runner.run_grid([planned()])
    assert done.fault is None and (done.manifest["status"], done.manifest["exit"]) == ("failed", runner.DIED)


def test_kernels_have_their_share_and_work_where_notebooks_are(
    notebook: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(distributed, "gpu_shares", lambda jobs, _: [[str(7 + job)] for job in range(jobs)])
    names = [distributed.AT_ONCE, "OMP_NUM_THREADS", distributed.VISIBLE]
    notebook(f"import os; open(f'seed{{seed}}', 'w').write(' '.join(os.environ[name] for name in {names}))")
    runner.run_grid([planned(seed=seed) for seed in range(2)], jobs=2)
    assert {(tmp_path / f"seed{seed}").read_text() for seed in range(2)} == {"2 4 7", "2 4 8"}


WAITS = "import os, time; open(os.environ['STARTED'], 'a').write(f'{os.getpid()} '); time.sleep(600)"


def test_the_end_of_a_grid_ends_its_kernels(notebook: Callable[[str], None], tmp_path: Path) -> None:
    started = tmp_path / "started"
    notebook(WAITS)
    code = (
        "import sys; from pathlib import Path; from gcpo import paths; from gcpo.processes import ends_by_sigterm\n"
        "from gcpo.runs import runner; from gcpo.runs.params import validate; from gcpo.runs.plan import Plan\n"
        f"paths.NOTEBOOKS, paths.OUTPUTS = Path({str(tmp_path)!r}), Path({str(tmp_path / 'outputs')!r})\n"
        "if __name__ == '__main__':\n"
        "    with ends_by_sigterm():\n"
        "        runner.run_grid([Plan('train', validate({'seed': seed})) for seed in range(2)], jobs=2)\n"
    )
    (tmp_path / "grid.py").write_text(code)
    command, environment = [sys.executable, str(tmp_path / "grid.py")], {**os.environ, "STARTED": str(started)}
    with subprocess.Popen(command, env=environment) as grid:
        deadline = time.monotonic() + 120
        while not started.exists() or len(pids := started.read_text().split()) < 2:
            assert time.monotonic() < deadline and grid.poll() is None
            time.sleep(0.2)
        grid.terminate()
        grid.wait(60)
    while any(psutil.pid_exists(int(pid)) for pid in pids):
        assert time.monotonic() < deadline, "a kernel outlived its grid"
        time.sleep(0.2)


def test_a_long_temporary_folder_is_not_used_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (long := tmp_path / ("x" * 87)).mkdir()
    monkeypatch.setattr(runner.tempfile, "tempdir", str(long))
    assert len(f"{runner.KernelManager().ip}-5") < 100 and list(long.iterdir()) == []


def test_outputs_that_cannot_be_written_are_one_line(
    executed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(paths, "OUTPUTS", tmp_path / "file" / "outputs")
    (line,) = call("run", "--profile", "p", status=2).err.splitlines()
    assert line.startswith(f"gcpo: {tmp_path / 'file'}") and line.endswith(": Not a directory")


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


# --- GPUs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "named", "processes", "at_once", "shares_of_three"),
    [
        (0, None, 1, 3, [[], [], []]),
        (1, None, 1, 1, [["0"], ["0"], ["0"]]),
        (2, "5,GPU-1f", 1, 2, [["5"], ["GPU-1f"], ["5"]]),
        (5, None, 2, 2, [["0", "1"], ["2", "3"], ["4", "0"]]),
        (1, None, 2, 1, [["0"], ["0"], ["0"]]),
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


def test_a_training_of_one_process_sees_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "H100")
    monkeypatch.setenv(distributed.VISIBLE, "2,3")
    for processes, seen in ((2, "2,3"), (1, "2")):
        with contextlib.suppress(ValueError), record.record(planned(processes=processes, accelerate=DDP)):
            assert os.environ[distributed.VISIBLE] == seen
