"""Progress: how much work a run is, what a person sees of it in a notebook and without a terminal, and how it ends."""

from __future__ import annotations

import base64
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from record_builders import failed, finished, planned

from gcpo import io
from gcpo.runs import progress, record
from gcpo.runs.progress import Board, Display, State
from gcpo.runs.runner import outcome
from gcpo.runs.train import _last_checkpoint, _Validation
from gcpo.tasks import get_task
from gcpo.tasks.base import Row
from gcpo.tasks.sampling import evaluate, load_policy

pytestmark = pytest.mark.usefixtures("places")

SIZES = {"group_size": 4, "prompts_per_step": 2, "max_steps": 4, "validation_limit": 8, "eval_limit": 16}
SIZES |= {"eval_samples": 2, "save_steps": 4}


def test_the_work_of_a_training_run_is_its_steps_its_looks_and_its_evaluation() -> None:
    plan = planned(**SIZES)
    step, look, end = (1 + 2) * 4 * 2, 8 * (1 + 2), 16 * (1 + 2)
    assert progress.work(plan) == 4 * step + 5 * look + end  # looks at 0, 1, 2, 3 and 4
    assert progress.share(plan, 2, 3) == (2 * step + 3 * look) / progress.work(plan)
    assert progress.share(plan, 4, 5, 0.5) == 1 - end / 2 / progress.work(plan)
    assert progress.share(plan, 4, 5, 1) == 1
    assert progress.work(planned(**{**SIZES, "max_steps": 0})) == end


def test_a_run_of_held_out_questions_has_the_work_of_its_training_before_it(tmp_path: Path) -> None:
    plan = planned("evaluate", **SIZES, at_step=4)
    assert plan.training is not None
    training = progress.work(plan.training)
    assert progress.work(plan) == training + 16 * 3
    assert progress.work(planned("gradients", **SIZES)) == 16 * 4 * progress.GRADIENT
    assert progress.state(plan) == State(0, "training first: starting")
    plan.training.folder.mkdir(parents=True)
    record.Run(plan.training.folder).progress(1, 4, "step", 0.5, reward=0.7)
    assert progress.state(plan).share == pytest.approx(0.5 * training / progress.work(plan))
    assert progress.state(plan).said == "training first: step 1 of 4, reward 0.70"
    plan.folder.mkdir(parents=True)
    record.Run(plan.folder).progress(4, 16, "questions")
    assert progress.state(plan) == State(pytest.approx((training + 12) / progress.work(plan)), "questions 4 of 16", 4)


@pytest.mark.parametrize(("seconds", "said"), [(3.4, "3 s"), (99, "99 s"), (180, "3 min"), (7500, "2 h 5 min")])
def test_a_time_in_words(seconds: float, said: str) -> None:
    assert progress.duration(seconds) == said


def test_the_time_left_shares_out_what_waits_to_the_first_job_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [planned(**SIZES, seed=seed) for seed in range(4)]
    now, shares = [0.0], {plan.id: 0.0 for plan in plans}
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "state", lambda plan: State(shares[plan.id], "x"))
    board = Board(plans, jobs=2)
    said: list[str] = []
    monkeypatch.setattr("builtins.print", lambda *lines, **_: said.extend(lines))

    def look(at: float, running: list[Any], *found: float) -> str:
        now[0] = at
        shares.update(zip((plan.id for plan in running), found, strict=True))
        board.written = at - 2 * progress.EVERY
        said.clear()
        board.look(running)
        return said[-1]

    assert look(0, plans[:2], 0.0, 0.0) == "0 of 4 runs"
    assert look(1, plans[:2], 0.01, 0.01) == "0 of 4 runs"  # where they were found: no work of this process yet
    # 100 s at two jobs made 0.5 and 0.25 of a run; left are 0.5 and 0.75, then two more: 0.5 + 1, and 0.75 + 1 = 1.75.
    assert look(100, plans[:2], 0.51, 0.26) == f"0 of 4 runs, {progress.duration(1.74 * 200 / 0.75)} left"
    board.end(plans[0], "finished")
    # 300 s: the first run's 0.99, 0.74 of the second and 0.3 of the third, found at 0; 0.25, then 0.7; and the last.
    left = f"1 of 4 runs, {progress.duration(1.25 * 300 / 1.73)} left"
    assert look(150, plans[1:3], 0.75, 0.01) == left
    # The state of a run is gone when its folder is, a moment before it has ended: nothing that was done is undone.
    assert look(150, plans[1:3], 0.0, 0.01) == left


def test_a_line_a_minute_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.02)
    display = Display("a-run")
    display.show(State(0.1, "step 1 of 10, reward 0.50", 1, {"reward": 0.5}))
    display.show(State(0.2, "step 2 of 10, reward 0.71", 2, {"reward": 0.71}))
    lines, deadline = [""], time.monotonic() + 60
    while "step 2" not in lines[-1] and time.monotonic() < deadline:
        time.sleep(0.05)
        lines += capfd.readouterr().err.splitlines()
    display.close("finished")
    assert all(line.startswith("a-run: ") for line in lines[1:])
    assert "step 2 of 10, reward 0.71, " in lines[-1] and lines[-1].endswith(" left")
    monkeypatch.setenv(progress.SHOWN, "1")  # a runner shows the runs of its kernels itself
    before = threading.active_count()
    Display("a-run")
    assert threading.active_count() == before


def test_a_notebook_has_one_output_that_becomes_the_curve_and_no_random_number_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs: list[dict[str, str]] = []

    class Handle:
        def update(self, shown: dict[str, str], raw: bool) -> None:
            outputs.append(shown)

    def display(shown: dict[str, str], raw: bool, display_id: bool) -> Handle:
        outputs.append(shown)
        return Handle()

    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(progress, "_in_kernel", lambda: True)
    monkeypatch.setattr(progress, "REDRAWN", 0.0)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    shown = Display("a-run")
    shown.show(State(0.1, "validation at step 0, answer 8 of 16"))
    for step in (1, 2):
        values = {"reward": 0.5 * step, "weight": 1.1}
        shown.show(State(0.1 + 0.2 * step, f"step {step} of 4, reward {0.5 * step:.2f}, weight 1.10", step, values))
    shown.close("finished")
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    texts = [one["text/plain"] for one in outputs]
    assert texts[0] == "a-run: starting" and " 10%|" in texts[1] and texts[1].endswith("answer 8 of 16")
    assert " 50%|█████     | a-run: step 2 of 4, reward 1.00, weight 1.10, " in texts[3] and texts[3].endswith(" left")
    assert texts[-1].startswith("100%|██████████| a-run: finished after ")
    assert ["image/png" in one for one in outputs] == [False, False, True, True, True]
    assert base64.b64decode(outputs[-1]["image/png"]).startswith(b"\x89PNG")


def test_a_run_that_goes_on_counts_what_it_makes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setenv(progress.SHOWN, "1")
    display = Display("a-run")
    now[0] = 30.0  # loading
    display.show(State(0.5, "step 5 of 10"))
    now[0] = 50.0
    display.show(State(0.6, "step 6 of 10"))
    assert display.line() == "a-run: step 6 of 10, 80 s left"  # 0.1 in 20 s, 0.4 left


def test_an_evaluation_says_how_many_answers_there_are(scratch: Path) -> None:
    model, tokens = load_policy(str(scratch))
    rows = [Row(f"q{i}", f"question {i}", ("yes",)) for i in range(3)]
    said: list[tuple[int, int]] = []
    settings = {"n": 2, "temperature": 1.0, "max_new_tokens": 2, "seed": 0}
    evaluate(model, tokens, get_task("tinyqa"), rows, **settings, progress=lambda *state: said.append(state))
    assert said == [(3, 9), (9, 9)]


def test_a_run_ends_with_the_metric_of_its_task_and_its_gain() -> None:
    steps = pd.DataFrame(
        [(step, decoding, f1) for step, f1 in ((0, 0.25), (4, 0.375)) for decoding in ("greedy", "sampled")],
        columns=["step", "decoding", "f1"],
    )
    done = finished(results={"greedy_bleu1": 0.9, "greedy_f1": 0.5, "sampled_f1": 0.456}, tables={"validation": steps})
    assert outcome(done).endswith(": sampled f1 45.6 %, on validation 25.0 to 37.5 (+12.5)")
    assert outcome(done).startswith("finished in ")
    answered = finished("evaluate", {"greedy_f1": 0.5, "avg@2_f1": 0.25, "questions": 16})
    assert outcome(answered).endswith(" s: avg@2 f1 25.0 %")
    measured = finished("gradients", {"queries": 16, "success_rate": 0.5, "pair_spearman": 0.25})
    assert outcome(measured).endswith(" s: success rate 0.5, pair spearman 0.25")
    assert outcome(failed(seed=1)) == "FAILED (RuntimeError: out of luck)"


def test_the_state_of_a_run_is_gone_when_it_has_ended() -> None:
    with record.record(planned()) as run:
        assert progress.read(run.folder) == State(0, "loading")
        run.progress(3, 4, "step", reward=0.5, weight=1.25)
        assert progress.read(run.folder) == State(
            0.75, "step 3 of 4, reward 0.50, weight 1.25", 3, {"reward": 0.5, "weight": 1.25}
        )
        (run.folder / progress.FILE).write_text("{cut")
        assert progress.read(run.folder) is None
    assert run.finished and not (run.folder / progress.FILE).exists()


def test_what_is_named_like_a_checkpoint_and_is_none_is_left_alone(tmp_path: Path) -> None:
    for name in ("checkpoint-2", "checkpoint-x"):
        (tmp_path / name).mkdir()
        io.seal(tmp_path / name)
    (tmp_path / "checkpoint-4").write_text("a file")
    assert _last_checkpoint(tmp_path, 8) == str(tmp_path / "checkpoint-2")


def test_a_resumed_run_keeps_the_names_of_its_validation_questions(tmp_path: Path) -> None:
    looked = SimpleNamespace(folder=tmp_path, steps=[0, 2])
    for step in looked.steps:
        (tmp_path / f"{step:06d}.csv").write_text(f"step,query,f1\n{step},NA,0.5\n{step},007,1.0\n")
    assert _Validation.table(cast(Any, looked))["query"].tolist() == ["NA", "007"] * 2
