"""Start the processes of a run; imports no torch."""
