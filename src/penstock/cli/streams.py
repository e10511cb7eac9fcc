"""Standard streams of a command: opened if closed, in UTF-8, and a log whose write errors are ignored.

A service manager may start a command with closed streams. The next opened files would get their numbers, so
that a library's warning could end up in a checkpoint; so they are opened first, on /dev/null. The reader of a
log may exit (`| head`, a closed terminal), and its disk may fill: that must not end the work. The reader of
the output is different: without one there is nothing to do.
"""

import io
import logging
import os
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from penstock.cli.interrupts import EXIT_INTERRUPTED
from penstock.core import env, log
from penstock.core.errors import PenstockError, UsageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from penstock.engine.request import OutputDelta

_STREAMS: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
_STDERR: Final = 2


class _Unread(io.FileIO):
    """A file whose write errors are ignored."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write; on an error pretend that everything was written."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def settle_streams() -> None:
    """Open closed standard streams, and ignore write errors of the log; call once, at the start."""
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)  # for processes that the command starts
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    unread = io.BufferedWriter(_Unread(_STDERR, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(unread, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def write_utf8() -> None:
    """Make both outputs UTF-8 whatever the locale is; unencodable characters are escaped."""
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        # only real streams: a test or notebook may have replaced them
        if isinstance(stream, io.TextIOWrapper) and (stream.encoding, stream.errors) != ("utf-8", errors):
            stream.reconfigure(encoding="utf-8", errors=errors)


def utf8_text(text: str, *, name: str) -> str:
    """Decode text from the system; bytes that the locale could not decode are read as UTF-8.

    Args:
        name: source of the text, for the message.

    Raises:
        UsageError: the bytes are not UTF-8.

    >>> utf8_text("caf\\udcc3\\udca9", name="The line")
    'café'
    """
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate stands for each byte that was not decoded
        try:
            return text.encode(errors="surrogateescape").decode()
        except UnicodeError as error:
            raise _not_utf8(name, error) from None
    return text


def _not_utf8(name: str, error: UnicodeError) -> UsageError:
    where = f" at byte {error.start}" if isinstance(error, UnicodeDecodeError) else ""
    return UsageError(f"{name} is not UTF-8 text{where}", fix="Convert it, with iconv for example.")


def stream_to_stdout(deltas: Iterator["OutputDelta"]) -> str:
    """Print deltas as they come; return the whole text.

    On a terminal, control characters other than newline and tab are shown as U+FFFD: a model can write escape
    sequences that move the cursor or rename the window. A pipe gets the text unchanged.
    """
    whole = []
    is_terminal = sys.stdout.isatty()
    for delta in deltas:
        whole.append(delta.text)
        sys.stdout.write(_harmless(delta.text) if is_terminal else delta.text)
        sys.stdout.flush()
    return "".join(whole)


def _harmless(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


EXIT_FAILED, EXIT_USAGE = 1, 2


def complain(message: str, *, level: int = logging.ERROR) -> None:
    """Print a message on standard error: a paragraph on a terminal, a line elsewhere, an event of a log."""
    if log.is_set_up() or env.log_format() != "text":
        log.print_event(message, level=level)
        return
    said = " ".join(f"penstock: {message}".split())
    if sys.stderr.isatty():
        said = textwrap.fill(said, 100, break_long_words=False, break_on_hyphens=False)
    print(said, file=sys.stderr)


def warn(message: str) -> None:
    """Print a warning, as `complain` prints an error."""
    complain(message, level=logging.WARNING)


def note(message: str) -> None:
    """Print progress, as `complain` prints an error."""
    complain(message, level=logging.INFO)


def explain(error: BaseException) -> tuple[str, int]:
    """Return a message for the user, and the exit code."""
    if isinstance(error, PenstockError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted.", EXIT_INTERRUPTED
    if isinstance(error, OSError):
        from penstock.core.system_errors import in_words  # which a help text does without

        return in_words(error), EXIT_FAILED
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("penstock"):
        from penstock.core.packages import missing

        return str(missing(error.name, "Parts of this command")), EXIT_FAILED
    raise error
