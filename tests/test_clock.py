"""The time of a run by phase."""

from __future__ import annotations

import pytest
import trl
from record_builders import planned

from gcpo.runs import clock, record


def test_a_phase_within_another_counts_for_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0, 7.0, 10.0, 10.5, 20.0, 24.0])
    monkeypatch.setattr(clock, "_now", lambda: next(times))
    watch = clock.Clock()
    with watch.phase("outer"):  # from 0 to 10.5
        with watch.phase("inner"):  # from 1 to 3
            pass
        with watch.phase("inner"):  # from 7 to 10
            pass
    with pytest.raises(RuntimeError), watch.phase("outer"):  # from 20 to 24
        raise RuntimeError
    assert watch.seconds == {"inner": 5.0, "outer": 5.5 + 4.0}


def test_the_methods_that_are_timed_are_the_trainer_s_own() -> None:
    assert all(callable(getattr(trl.GRPOTrainer, name)) for name in clock.TRAINER)


def test_the_time_of_a_method_is_that_of_its_phase() -> None:
    class Trainer:
        def _generate(self, prompts: list[str]) -> list[str]:
            return [*prompts, "more"]

        _calculate_rewards = _generate_and_score_completions = _compute_loss = _generate

    trainer, watch = Trainer(), clock.Clock()
    watch.watch(trainer)
    assert trainer._generate(["a"]) == ["a", "more"] == trainer._compute_loss(prompts=["a"])
    assert set(watch.seconds) == {"generate", "loss"}


@pytest.mark.usefixtures("places")
def test_phases_add_up_over_attempts() -> None:
    def attempt() -> None:
        with record.record(planned()) as run:
            run.clock.seconds = {"generate": 2.0, "loss": 1.0}
            raise RuntimeError

    with pytest.raises(RuntimeError):
        attempt()
    with record.record(planned()) as run:
        run.clock.seconds = {"generate": 3.5, "evaluate": 4.0}
    assert run.manifest["phases"] == {"generate": 5.5, "loss": 1.0, "evaluate": 4.0}
    assert run.manifest["cpu_seconds"] >= 0
