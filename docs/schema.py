"""JSON schema of a parameter file, for editors: ``python docs/schema.py > params/schema.json``."""

from __future__ import annotations

import json
from typing import Any

from gcpo.methods import METHODS
from gcpo.runs.params import WHOLE, Params
from gcpo.tasks import TASKS

NAMES = {"method": [*METHODS], "task": [*TASKS]}  # which editors and shells offer


def schema() -> dict[str, Any]:
    """Return the schema of :class:`gcpo.runs.params.Params`, in which most values may be a mapping from tasks."""
    made = Params.model_json_schema()
    for key, value in made["properties"].items():
        if key not in WHOLE:
            about = {name: value.pop(name) for name in ("description", "default") if name in value}
            for_each_task = {"type": "object", "additionalProperties": value}
            made["properties"][key] = {**about, "anyOf": [value, for_each_task]}
    for key, names in NAMES.items():
        made["properties"][key]["examples"] = names
    return made


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
