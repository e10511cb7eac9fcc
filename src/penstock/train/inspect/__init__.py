"""Inspection of a run from its folder: audit, replay, offline evaluation."""
