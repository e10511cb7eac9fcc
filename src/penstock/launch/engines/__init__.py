"""Engines: apply what a renderer returned, and answer for the job: its state, its end, its size."""
