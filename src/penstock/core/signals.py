"""Stop signals as a flag that a run checks between steps, and as an end of what comes before the first one.

Install the flag before slow imports: a signal during an import must not be lost, because a scheduler may send
it only once.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from penstock.core import clock

STOPPED_EARLY = "Stopped on request before the first step. Run the same command to continue."
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
        self._end: Callable[[str], None] | None = None

    def install(self, end: Callable[[str], None] | None = None) -> "StopFlag":
        """Handle SIGTERM, SIGINT and SIGHUP; main thread only.

        Args:
            end: ends the process at a signal, whose name it gets, until `starting` is entered; None: nothing
                does.
        """
        self._end = end
        signal.signal(signal.SIGTERM, self._on_signal)
        for number in (signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup`, or a launcher that forwards it
                signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)  # a launcher held them until here
        return self

    @contextmanager
    def starting(
        self, end: Callable[[str], None], *, patience_s: float = 0.0
    ) -> Iterator[Callable[[], None]]:
        """Context manager: a stop before `begin`, which this yields, ends the process; main thread only.

        A handler runs only between two steps of the interpreter, and torch may fill memory for minutes in one
        call. So a thread waits for the signal itself.

        Args:
            end: ends the process; called in that thread with the name of the signal.
            patience_s: seconds in which the start may still reach `begin`: then the flag is looked at.
        """
        self._end = None
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        has_begun = threading.Event()

        def wait_for_stop() -> None:
            while number := os.read(reader, 1):
                name = signal_name(number[0])
                if number[0] in _STOPS and not has_begun.wait(patience_s):
                    end(name)

        waiting = threading.Thread(target=wait_for_stop, name="stop-while-starting", daemon=True)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        waiting.start()
        if self.requested_by is not None:  # before this
            os.write(writer, bytes([signal.Signals[self.requested_by]]))

        def begin() -> None:
            if not has_begun.is_set():
                has_begun.set()
                signal.set_wakeup_fd(before)
                os.close(writer)
                waiting.join()
                os.close(reader)

        try:
            yield begin
        finally:
            begin()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested_by == "SIGINT" and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested_by is None:
            self.requested_at = clock.monotonic()
        self.requested_by = signal_name(number)
        if self._end is not None:
            self._end(self.requested_by)
