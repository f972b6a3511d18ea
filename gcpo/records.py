"""The records of runs, as users read them."""

from gcpo.reports.records import coverage, faults, find, gather, runs, source

__all__ = ["coverage", "faults", "find", "gather", "runs", "source"]
