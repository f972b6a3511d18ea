"""Margins of equivalence, as declared before any result: ``params/statistics/margins.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from gcpo import paths
from gcpo.errors import nearest
from gcpo.runs.profiles import ParameterError, read_yaml
from gcpo.tasks import check_task, get_task

Margin = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]


def margins(path: Path | None = None) -> dict[str, dict[str, float]]:
    """Return the largest difference that does not matter, in points above 0, by task and metric.

    Raises:
        ParameterError: in one line with file, key and value: no mapping, an unknown task or metric, or a margin that is
            no number above 0.
    """
    path = path or paths.PARAMS / "statistics" / "margins.yaml"
    values = read_yaml(path)
    try:
        declared = TypeAdapter(dict[str, dict[str, Margin]]).validate_python(values)
        for task, metric in ((task, metric) for task, of_task in declared.items() for metric in of_task):
            check_task(task)
            if metric not in (valid := get_task(task).metrics):
                raise ValueError(f"{task}.{metric}: no such metric.{nearest(metric, valid)}")
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "margins"
        raise ParameterError(f"{path}: {key}: {first['msg']}, got {first['input']!r}.") from None
    except ValueError as error:
        raise ParameterError(f"{path}: {error}") from None
    return declared
