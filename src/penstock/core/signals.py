"""Stop signals as a flag that a run checks between steps.

Install the flag before slow imports: a signal during an import must not kill the process, because a scheduler
may send it only once.
"""

import signal
from types import FrameType

from penstock.core import clock

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def signal_name(number: int) -> str:
    """Return the name of a signal; of real-time signals, most of which have none, the number.

    >>> signal_name(9), signal_name(40)
    ('SIGKILL', 'signal 40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class StopFlag:
    """Flag set by a stop signal; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.requested_by: str | None = None
        """Name of the signal; None: no signal yet."""
        self.requested_at = 0.0
        """Time of the first signal, by `clock.monotonic`."""

    def install(self) -> "StopFlag":
        """Handle SIGTERM, SIGINT and SIGHUP; main thread only."""
        signal.signal(signal.SIGTERM, self._on_signal)
        for number in (signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup`, or a launcher that forwards it
                signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)  # a launcher held them until here
        return self

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested_by == "SIGINT" and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested_by is None:
            self.requested_at = clock.monotonic()
        self.requested_by = signal_name(number)
