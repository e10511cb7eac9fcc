"""Launcher: starts the processes of a run; imports no torch."""
