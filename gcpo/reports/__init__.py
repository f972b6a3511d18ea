"""Reports: finished runs as tables, figures and verdicts."""
