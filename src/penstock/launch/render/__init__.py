"""Renderers: a `RunSpec` to the files and commands of one engine, as pure functions."""
