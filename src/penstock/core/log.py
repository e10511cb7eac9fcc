"""Log on standard error, one line per event: a sentence with a time stamp, or the same event as keys.

    log = EventLog(__name__)
    log.info("saved", "Saved step {step:,} in {write_s:.1f} s", step=7, write_s=0.2)

    2026-11-28T19:20:00Z Saved step 7 in 0.2 s.
    time=2026-11-28T19:20:00Z level=info logger=penstock.somewhere event=saved step=7 write_s=0.2 ...

A terminal gets the sentence without the time. Keys are the names of the sentence, so no format says
more than another. A name ends with its unit (`_s`, `_bytes`).
"""

import json
import logging
import re
import shlex
import string
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from penstock.core import env, units
from penstock.core.errors import UsageError, nearest


class _Words(string.Formatter):
    """Formatter of sentences: formats of units, `#noun` for a count, `shell` for a word of a command."""

    _FORMATS: Final[Mapping[str, Callable[[Any], str]]] = {
        "bytes": units.mib,
        "duration": units.duration,
        "si": units.si,
        "flops": units.flops,
        "shell": lambda word: shlex.quote(str(word)),
        "sentence": lambda said: f"{str(said)[:1].upper()}{str(said)[1:]}",
    }

    def format_field(self, value: Any, format_spec: str) -> str:  # Any: what a sentence names
        """Return a value as text."""
        if format_spec.startswith("#"):
            return units.plural(value, format_spec[1:])
        in_unit = self._FORMATS.get(format_spec)
        return str(format(value, format_spec)) if in_unit is None else in_unit(value)


class Event:
    """Message of a log record: a sentence, and the values in it by name.

    Args:
        name: name of the kind of event, for programs: `saved`.
        sentence: what a person reads, with fields of `str.format` that name the values. There are also the
            formats `bytes`, `duration`, `si` and `flops`; `#step`, which writes "1 step" or "2 steps";
            `shell`, which quotes for a shell; and `sentence`, which begins with a capital letter.
        values: plain values, paths and errors by name; others are written as their text.

    >>> str(Event("saved", "Saved step {step:,}", step=1200))
    'Saved step 1,200'
    """

    __slots__ = ("name", "sentence", "values")

    def __init__(self, name: str, sentence: str, /, **values: object) -> None:
        self.name, self.sentence, self.values = name, sentence, values

    def __str__(self) -> str:
        return _Words().vformat(self.sentence, (), self.values)


class EventLog:
    """Log of a module, whose messages are events; arguments of its methods as for `Event`.

    Args:
        name: name of the logger in Python's logging, `__name__` of the module.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def log(self, level: int, name: str, sentence: str, /, *, exc_info: Any = None, **values: object) -> None:
        """Log an event.

        Args:
            exc_info: an exception whose traceback is logged too; True: the one that is handled.
        """
        self._logger.log(level, Event(name, sentence, **values), exc_info=exc_info, stacklevel=2)

    def debug(self, name: str, sentence: str, /, *, exc_info: Any = None, **values: object) -> None:
        """Log an event that matters for finding a fault."""
        self._logger.debug(Event(name, sentence, **values), exc_info=exc_info, stacklevel=2)

    def info(self, name: str, sentence: str, /, *, exc_info: Any = None, **values: object) -> None:
        """Log an event."""
        self._logger.info(Event(name, sentence, **values), exc_info=exc_info, stacklevel=2)

    def warning(self, name: str, sentence: str, /, *, exc_info: Any = None, **values: object) -> None:
        """Log an event that a user should look at."""
        self._logger.warning(Event(name, sentence, **values), exc_info=exc_info, stacklevel=2)

    def error(self, name: str, sentence: str, /, *, exc_info: Any = None, **values: object) -> None:
        """Log a failure."""
        self._logger.error(Event(name, sentence, **values), exc_info=exc_info, stacklevel=2)

    def exception(self, name: str, sentence: str, /, **values: object) -> None:
        """Log a failure with the traceback of the exception that is handled."""
        self._logger.exception(Event(name, sentence, **values), stacklevel=2)


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Handler for the present `sys.stderr`, which a live progress bar may replace."""

    def __init__(self, *, once: bool = False) -> None:
        """Create the handler.

        Args:
            once: write each sentence once.
        """
        logging.Handler.__init__(self)
        self._once, self._shown = once, set[str]()

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The present standard error."""
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of a record."""
        if self._once and (said := record.getMessage()) in self._shown:
            return
        if self._once:
            self._shown.add(said)
        super().emit(record)


class _Text(logging.Formatter):
    """Formatter for people: a sentence; off a terminal with a time stamp, and on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, and below it the traceback if it has one."""
        said = record.getMessage()
        # Names and paths keep their letters: a field, a key, or what an error's text begins with.
        is_text_of_error = record.levelno >= logging.WARNING
        begin = record.msg.sentence if isinstance(record.msg, Event) else "" if is_text_of_error else said
        if begin.partition(" ")[0].rstrip(":,").isalpha():
            said = said[:1].upper() + said[1:]
        end = "" if said.endswith((".", "?", "!", ":")) or _ends_in_words_to_copy(said) else "."
        kind = "" if record.levelno < logging.WARNING else f"{record.levelname.capitalize()}: "
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        line = f"{kind}{said}{end}"
        return f"{line if sys.stderr.isatty() else f'{_time_of(record)} {_on_one_line(line)}'}{trace}"


def _ends_in_words_to_copy(said: str) -> bool:
    """Return True if a sentence ends in a path, a setting or an option with its value.

    >>> _ends_in_words_to_copy("Saved: runs/a"), _ends_in_words_to_copy("Try --out FOLDER")
    (True, True)
    >>> _ends_in_words_to_copy("Saved step 7 at 3 tokens/s")
    False
    """
    *_, before, last = ["", *said.split()[-2:]] if said.split() else ["", ""]
    is_path = "/" in last and not last.endswith(("/s", ")"))
    return is_path or "=" in last or last.startswith("--") or before.startswith("--")


class _Keys(logging.Formatter):
    """Formatter for programs: a record's keys, on one line.

    Args:
        line: writes keys and values as a line.
    """

    def __init__(self, line: Callable[[Mapping[str, Any]], str]) -> None:
        super().__init__()
        self._line = line

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record; a traceback is one of its keys."""
        message = record.msg
        found: dict[str, Any] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if isinstance(message, Event):
            found["event"] = message.name
            found |= {name: _plain(value) for name, value in message.values.items()}
        found["message"] = _on_one_line(record.getMessage())
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return self._line(found)


def _time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _on_one_line(text: str) -> str:
    """Join the lines of a text.

    >>> _on_one_line("What to do next:\\n  draw it\\n  export it.")
    'What to do next: draw it; export it.'
    """
    joined = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        joined += ("" if not joined else " " if joined.endswith((":", ".")) else "; ") + line
    return joined


def _plain(value: object) -> Any:  # Any: what JSON can write
    """Return a value as JSON can write it; a text for what it has no form for."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return value if isinstance(value, float) and abs(value) < float("inf") else str(value)


def _json(found: Mapping[str, Any]) -> str:
    return json.dumps(found, ensure_ascii=False)


_BARE = re.compile(r'[^\s="\x00-\x1f\x7f]+')


def _logfmt(found: Mapping[str, Any]) -> str:
    """Write `key=value` pairs; a value is in quotes if it has spaces, quotes or equals signs.

    >>> _logfmt({"step": 7, "path": "my runs/a", "best": None})
    'step=7 path="my runs/a" best=null'
    """
    pairs = []
    for name, value in found.items():
        text = (
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        )
        pairs.append(f"{name}={text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)}")
    return " ".join(pairs)


FORMATS: Final[Mapping[str, Callable[[], logging.Formatter]]] = {
    "text": _Text,
    "logfmt": lambda: _Keys(_logfmt),
    "json": lambda: _Keys(_json),
}
"""Formats of the log, of `--log-format`."""


def choose_format(name: str) -> None:
    """Set the format of the logs of this process and of those that it starts.

    Raises:
        UsageError: it is none of FORMATS.
    """
    _check_format(name, "--log-format")
    env.set_log_format(name)


def check_format_of_environment() -> None:
    """Raise UsageError if the environment names a format of the logs that there is not."""
    _check_format(env.log_format(), env.LOG_FORMAT)


def _check_format(name: str, of: str) -> None:
    if name not in FORMATS:
        raise UsageError(f"{of} is text, logfmt or json", got=name, fix=nearest(name, list(FORMATS)))


def _add_handler(*, once: bool = False) -> logging.Handler:
    logger, handler = logging.getLogger("penstock"), _CurrentStderr(once=once)
    handler.setFormatter(FORMATS.get(env.log_format(), _Text)())
    logger.addHandler(handler)
    logger.propagate = False
    return handler


@contextmanager
def warnings_once() -> Generator[None]:
    """Log warnings, each sentence once, for commands whose output is on standard output."""
    logger = logging.getLogger("penstock")
    before = logger.propagate
    handler = _add_handler(once=True)
    handler.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def set_up(*, verbose: bool = False, rank: int = 0) -> None:
    """Send Penstock's log to standard error; rank 0 logs everything, other ranks only warnings."""
    logger = logging.getLogger("penstock")
    logger.handlers.clear()
    _add_handler()
    quiet = logging.WARNING if rank else logging.INFO
    logger.setLevel(logging.DEBUG if verbose else quiet)


def is_set_up() -> bool:
    """Return True if this process logs to standard error."""
    return bool(logging.getLogger("penstock").handlers)


def print_event(message: object, *, level: int = logging.INFO, source: str = "penstock") -> None:
    """Write one event in the chosen format, of a command that keeps no log."""
    formatter = FORMATS.get(env.log_format(), _Text)()
    record = logging.LogRecord(source, level, "", 0, message, None, None)
    sys.stderr.write(f"{formatter.format(record)}\n")
    sys.stderr.flush()
