"""Folders of the project: of the checkout around the package or, where it is installed, of the package itself."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent if (_PACKAGE.parent / "pyproject.toml").is_file() else None
# An installed copy keeps its outputs where it is called, also those of the kernels that it starts in another folder.
ROOT = _CHECKOUT or Path(os.environ.setdefault("GCPO_ROOT", str(Path.cwd())))
_FILES = _CHECKOUT or _PACKAGE  # a wheel has notebooks, parameter files and the worlds inside the package

# Paths in the environment mean what they mean here, also to processes that work in another folder.
for _name in ("GCPO_OUTPUTS", "GCPO_DATA_DIR", "GCPO_REFERENCE"):
    if os.environ.get(_name):
        os.environ[_name] = str(Path(os.environ[_name]).expanduser().resolve())

NOTEBOOKS = _FILES / "notebooks"
PARAMS = _FILES / "params"
MEASURED = _FILES / "benchmarks" / "results"  # what ``make bench`` has found
OUTPUTS = Path(os.environ.get("GCPO_OUTPUTS") or ROOT / "outputs")
REFERENCE = Path(os.environ.get("GCPO_REFERENCE") or ROOT / "outputs" / "reference")
WORLDS = ROOT / "outputs" / "world"  # shared by everything that runs from this checkout
READY = _FILES / "worlds"  # worlds A and B, which need no training, and what trains others
VERDICTS = ROOT / "outputs" / "reference" / "verdicts"  # of notebooks that read no runs: the same for every reference
