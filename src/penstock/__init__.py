"""Penstock: train, tune and serve foundation models on ordinary machines joined by Ethernet."""

__version__ = "0.1.0"
