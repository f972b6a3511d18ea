"""Runs: their parameters, grids of them, what they do and what they leave behind."""
