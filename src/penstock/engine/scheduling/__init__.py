"""Scheduling: sequences, their KV blocks, and what the next step computes; integers only."""
