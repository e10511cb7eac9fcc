"""Logging for the command line: one line per event on standard error."""

import logging
import sys
from typing import TextIO


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is now: a live progress bar takes it over."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Where to write."""
        return sys.stderr


def set_up(*, verbose: bool = False, rank: int = 0) -> None:
    """Send Penstock's log to standard error; rank 0 speaks for all, any rank may warn."""
    logger = logging.getLogger("penstock")
    logger.handlers.clear()
    handler = _CurrentStderr()
    handler.setFormatter(logging.Formatter("%(levelname).1s %(name)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    quiet = logging.WARNING if rank else logging.INFO
    logger.setLevel(logging.DEBUG if verbose else quiet)
