"""Processes that the console starts for what needs the trainer's or the engine's code."""
