"""Margins of equivalence, as declared before any result: ``params/statistics/margins.yaml``."""

from __future__ import annotations

from pathlib import Path

from gcpo import paths
from gcpo.errors import nearest
from gcpo.runs.params import ParameterError, read_yaml
from gcpo.tasks import check_task, get_task


def margins(path: Path | None = None) -> dict[str, dict[str, float]]:
    """The largest difference that does not matter, in points above 0, by task and metric.

    Raises:
        ParameterError: in one line with file and key: no mapping, an unknown task or metric, or a margin that is no
            number above 0.
    """
    path = path or paths.PARAMS / "statistics" / "margins.yaml"
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ParameterError(
            f"{path}: expected a mapping of tasks to metrics and margins, got {type(values).__name__}."
        )
    for task, of_task in values.items():
        try:
            check_task(str(task))
        except ValueError as error:
            raise ParameterError(f"{path}: {error}") from None
        if not isinstance(of_task, dict):
            raise ParameterError(f"{path}: {task}: expected a mapping of metrics to margins, got {of_task!r}.")
        for metric, margin in of_task.items():
            if metric not in (valid := get_task(task).metrics):
                raise ParameterError(f"{path}: {task}.{metric}: no such metric.{nearest(str(metric), valid)}")
            if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 < margin < float("inf"):
                raise ParameterError(
                    f"{path}: {task}.{metric}: a margin is a number of points above 0, got {margin!r}."
                )
    return values
