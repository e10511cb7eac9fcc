"""Logging for the command line: one line per event on standard error."""

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is now: a live progress bar takes it over."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Where to write."""
        return sys.stderr


class _ForPeople(_CurrentStderr):
    """Shows what a record tells people (`extra={"told": ...}`), else its message; each thing once."""

    def __init__(self) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        said = str(getattr(record, "told", None) or record.getMessage())
        if said not in self._shown:
            self._shown.add(said)
            self.stream.write(f"penstock: {said}\n")


@contextmanager
def for_people() -> Generator[None]:
    """Send warnings to standard error in the words of a command that keeps no log."""
    logger, handler = logging.getLogger("penstock"), _ForPeople()
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


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
