"""Imports of every kind of run, made once by the server that kernels are forked from.

No import may start a Python thread: a lock that it held would stay held in every fork.
"""

from pathlib import Path

import matplotlib.pyplot  # noqa: F401
import seaborn  # noqa: F401
import sentence_transformers  # noqa: F401

from gcpo.runs import evaluate, gradients, one_step, record, train  # noqa: F401

record.code_hash(Path(record.__file__).parents[1])  # of the files as they were imported, for every run's record
