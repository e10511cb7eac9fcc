"""Data preparation: raw text to token shards; streaming, on all cores, resumable after a kill at any time."""

from penstock.data.prepare.inputs import DEFAULT_SUFFIXES, PLAIN_SUFFIXES, Selection
from penstock.data.prepare.plan import PrepareConfig, Progress
from penstock.data.prepare.run import Summary, prepare

__all__ = [
    "DEFAULT_SUFFIXES",
    "PLAIN_SUFFIXES",
    "PrepareConfig",
    "Progress",
    "Selection",
    "Summary",
    "prepare",
]
