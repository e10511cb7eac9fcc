"""Logging of the command line: one line per event on standard error.

A file gets `key=value` lines, for programs. A terminal gets sentences: a record's `extra={"told": ...}`, or
its message if that is a sentence already.
"""

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Handler for the present `sys.stderr`, which a live progress bar may replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The present standard error."""
        return sys.stderr


class _Lines(logging.Formatter):
    """Formatter for a terminal (sentences) or a file (`key=value`)."""

    def __init__(self) -> None:
        super().__init__("%(levelname).1s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        if not sys.stderr.isatty():
            return super().format(record)
        said = str(getattr(record, "told", None) or record.getMessage())
        said = said[:1].upper() + said[1:]
        end = "" if said.endswith((".", "?", "!", ":")) else "."
        kind = "" if record.levelno < logging.WARNING else f"{record.levelname.capitalize()}: "
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{kind}{said}{end}{trace}"


class _ForPeople(_CurrentStderr):
    """Handler that prints a record's sentence (`extra={"told": ...}`) or message, each once."""

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
    """Print warnings as sentences to standard error, for commands that keep no log."""
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
    """Send Penstock's log to standard error; rank 0 logs everything, other ranks only warnings."""
    logger = logging.getLogger("penstock")
    logger.handlers.clear()
    handler = _CurrentStderr()
    handler.setFormatter(_Lines())
    logger.addHandler(handler)
    logger.propagate = False
    quiet = logging.WARNING if rank else logging.INFO
    logger.setLevel(logging.DEBUG if verbose else quiet)
