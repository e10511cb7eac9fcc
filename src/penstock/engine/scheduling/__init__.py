"""Whose turn it is: sequences, the blocks they hold, and what the next step computes; integers only."""
