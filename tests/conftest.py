"""Fixtures: an untrained byte-level policy and trainers of it, scripted completions, and fewer threads."""

import gc
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# The same examples every time, so that a run of the tests is decided by the code and not by luck.
# `pytest --hypothesis-profile default` draws new ones: do that after changing a formula.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fixed")

os.environ.pop("GCPO_WORLD_SEED", None)  # another world is for notebooks: what is tested here starts from the usual one
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not os.environ.get("GCPO_TEST_GPU"):  # for `pytest -m gpu`; the others compare with what a CPU computes
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: threads would only wait for one another
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Outputs, reference, profiles and grids of the test's own; what a manifest says of the machine is left out."""
    from record_builders import write_profile

    from gcpo import paths
    from gcpo.runs import record

    for name in ("OUTPUTS", "REFERENCE", "PARAMS"):
        monkeypatch.setattr(paths, name, tmp_path / name.lower())
    monkeypatch.setattr(record, "environment", lambda: {"code": "c0de", "commit": "c0ffee", "dirty": False})
    (tmp_path / "params" / "grids").mkdir(parents=True)
    write_profile("p", {})
    return tmp_path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Calls the command line, which ends with this status, and returns what it printed: ``call("run", status=2)``."""
    from gcpo.cli import main

    def call(*words: str, status: int = 0) -> Any:
        assert main([*words]) == status
        return capsys.readouterr()

    return call


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Outputs of the test's own, here and in processes that it starts; made when first written to."""
    from gcpo import paths

    monkeypatch.setattr(paths, "OUTPUTS", tmp_path / "outputs")
    monkeypatch.setenv("GCPO_OUTPUTS", str(tmp_path / "outputs"))
    return tmp_path / "outputs"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes records, or lines as they are, to a file of a data folder that is in use."""
    monkeypatch.setenv("GCPO_DATA_DIR", str(tmp_path))

    def to(*lines: Any, file: str = "narrativeqa/test") -> Path:
        path = tmp_path / f"{file}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
        return path

    return to


@pytest.fixture(scope="session")
def scratch() -> Path:
    """The folder of the untrained byte-level policy."""
    from gcpo import paths

    return paths.READY / "scratch"


@pytest.fixture
def make(scratch: Path, tmp_path: Path) -> Callable[..., Any]:
    """Makes a GCPOTrainer of a method: ``make("egpo", scale_rewards="batch")``."""
    from helpers import make_trainer

    return partial(make_trainer, scratch, tmp_path)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sees what TRL was given and gave."""
    from helpers import Spy

    return Spy(monkeypatch)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts texts in the place of samples; one that is as long as allowed has no end-of-sequence token."""
    import trl
    from helpers import TEXTS

    def script(texts: Sequence[str] = TEXTS) -> None:
        def sample(trainer: Any, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
            assert len(prompt_ids) == len(texts)
            tokens = trainer.processing_class
            ids = [[*tokens(text, add_special_tokens=False)["input_ids"], tokens.eos_token_id] for text in texts]
            return [row[: trainer.max_completion_length] for row in ids], None

        monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", sample)

    return script


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """TRL collects garbage after every training: what has been imported need not be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Sums in one order, and no threads that wait for one another over models as small as these."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
