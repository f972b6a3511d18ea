"""The records of runs, as users read them."""

from gcpo.reports.records import coverage, find, gather, publish, runs

__all__ = ["coverage", "find", "gather", "publish", "runs"]
