"""Turn SIGTERM, Ctrl-C and a closed terminal into a flag that long work looks at between steps.

Install it before anything slow is imported: a signal that lands while libraries load must not kill
the process, because it may come from a scheduler that asks only once.
"""

import signal
from types import FrameType

from penstock.core import clock


class StopFlag:
    """Whether somebody asked this process to stop; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.requested_by: str | None = None
        """Name of the signal, or None."""
        self.requested_at = 0.0
        """When the first one came, by the clock of core/clock.py."""

    def install(self) -> "StopFlag":
        """Take over SIGTERM, SIGINT and SIGHUP; main thread only."""
        signal.signal(signal.SIGTERM, self._on_signal)
        for number in (signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # by a launcher that forwards it, by `nohup`
                signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested_by == "SIGINT" and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested_by is None:
            self.requested_at = clock.monotonic()
        self.requested_by = signal.Signals(number).name
