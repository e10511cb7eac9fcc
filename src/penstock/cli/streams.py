"""The standard streams of a command: open, in UTF-8, and a log that nobody may read without the work ending.

A service manager may start a command with streams closed. What is opened next gets their numbers, so that a
library's warning would land in a checkpoint; so they are opened first, on nothing. Whoever reads a log may
leave (`| head`, a terminal that is closed), and its disk may fill: that is no reason to give up the work
that it is about. The reader of the output is another matter: without one there is nothing to do.
"""

import io
import os
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STREAMS: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
_STDERR: Final = 2


class _Unread(io.FileIO):
    """A file whose writes may fail unnoticed."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write what can be written; say that all was."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def settle_streams() -> None:
    """Open the standard streams that are closed, and keep errors of the log to itself; once, at the start."""
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # of the lowest free number
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)  # or whom the command starts is without it again
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    unread = io.BufferedWriter(_Unread(_STDERR, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(unread, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def write_utf8() -> None:
    """Let both outputs carry any character, whatever the locale says; what is no character is escaped."""
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        # only a stream of the system: a test or notebook may have put its own in place
        if isinstance(stream, io.TextIOWrapper) and (stream.encoding, stream.errors) != ("utf-8", errors):
            stream.reconfigure(encoding="utf-8", errors=errors)
