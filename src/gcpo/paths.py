"""Where things are: anchored to the checkout, never to the working directory."""

from __future__ import annotations

import os
from pathlib import Path

_PARENT = Path(__file__).resolve().parents[2]
# An installed copy has no checkout around it and keeps its outputs where it is called.
ROOT = _PARENT if (_PARENT / "pyproject.toml").is_file() else Path.cwd()

NOTEBOOKS = ROOT / "notebooks"
PARAMS = ROOT / "params"
OUTPUTS = Path(os.environ.get("GCPO_OUTPUTS") or ROOT / "outputs")
REFERENCE = ROOT / "outputs" / "reference"
WORLDS = ROOT / "outputs" / "world"  # shared by everything that runs from this checkout
