"""SIGINT and SIGTERM as an exception, so that children are killed and what was done is filed."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """The process was asked to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def raise_on_signals() -> None:
    """Have the main thread raise `Stopped` from now on."""
    for number in _SIGNALS:
        signal.signal(number, _raise)


@contextmanager
def not_stopped() -> Iterator[None]:
    """Ignore the signals for a moment."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _raise(number: int, _: object) -> None:
    raise Stopped(number)
