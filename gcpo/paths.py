"""Folders of the project, anchored to the checkout and never to the working directory."""

from __future__ import annotations

import os
from pathlib import Path

_PARENT = Path(__file__).resolve().parents[1]
# An installed copy has no checkout around it and keeps its outputs where it is called.
ROOT = _PARENT if (_PARENT / "pyproject.toml").is_file() else Path.cwd()

# Paths in the environment mean what they mean here, also to processes that work in another folder.
for _name in ("GCPO_OUTPUTS", "GCPO_DATA_DIR", "GCPO_REFERENCE"):
    if os.environ.get(_name):
        os.environ[_name] = str(Path(os.environ[_name]).expanduser().resolve())

NOTEBOOKS = ROOT / "notebooks"
PARAMS = ROOT / "params"
OUTPUTS = Path(os.environ.get("GCPO_OUTPUTS") or ROOT / "outputs")
REFERENCE = Path(os.environ.get("GCPO_REFERENCE") or ROOT / "outputs" / "reference")
WORLDS = ROOT / "outputs" / "world"  # shared by everything that runs from this checkout
VERDICTS = ROOT / "outputs" / "reference" / "verdicts"  # of notebooks that read no runs: the same for every reference
