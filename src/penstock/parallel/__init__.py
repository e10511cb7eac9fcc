"""Parallelism: one model over many devices."""
