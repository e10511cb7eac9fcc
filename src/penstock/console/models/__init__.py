"""Checkpoints of runs, opened on request: to answer, and to score rows."""
