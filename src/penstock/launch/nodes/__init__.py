"""Nodes of a run: their checks, processes and supervision."""
