"""Observability: metric names, meters, sinks and reports of a run."""
