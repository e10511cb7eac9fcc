"""Ctrl-C before and after a command's own work: the process exits at once, with one line.

A `KeyboardInterrupt` while modules load, or while the interpreter shuts down, prints a traceback of whatever
Python was doing. No exception is needed there: no work has started, or it is done. In between, the command's
own handler is active, or Python's.

`_signal` is the built-in part of `signal`: `signal` itself loads `enum` and `collections` first, some 5 ms in
which Ctrl-C would still print a traceback. Python's own start-up before this module, some 10 ms, cannot be
covered.
"""

import _signal as signal  # type: ignore[import-not-found]
import os

EXIT_INTERRUPTED = 130


def leave_on_interrupt() -> None:
    """Exit at Ctrl-C from here on, unless it is ignored, as under `nohup`; main thread only."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)


def raise_on_interrupt() -> None:
    """Raise KeyboardInterrupt again, after `leave_on_interrupt`."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(_number: int, _frame: object) -> None:
    os.write(2, b"penstock: Interrupted.\n")
    os._exit(EXIT_INTERRUPTED)
