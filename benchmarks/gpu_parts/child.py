"""Run a command for a bounded time, with all that it starts."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock.core import clock

_LOOK_EVERY_S = 0.1
POISONED = 70
"""Exit code of a process whose GPU does not answer any more."""


def run_child(
    command: Sequence[str],
    *,
    seconds: float,
    log: Path | None,
    environment: Mapping[str, str],
    meanwhile: Callable[[], None] = lambda: None,
) -> str:
    """Run a command; return why it failed, such as `ended with exit code 1`, empty if it did not.

    With a log it gets a process group of its own, which is killed when the time is over, when the command
    ends and leaves processes, and when this function is left by an exception. Without one it stays in the
    caller's group, writes where the caller writes, and is killed alone.

    Args:
        seconds: that it may take.
        log: the file that its output is appended to.
        meanwhile: called about ten times a second.
    """
    with contextlib.nullcontext() if log is None else log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            env=dict(environment),
            start_new_session=log is not None,
        )
    deadline = clock.monotonic() + seconds
    is_late = False
    try:
        while not _has_ended(process.pid) and not is_late:
            meanwhile()
            clock.sleep(_LOOK_EVERY_S)
            is_late = clock.monotonic() > deadline
    finally:
        if log is None:
            os.kill(process.pid, signal.SIGKILL)
        else:
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    if is_late:
        return f"was killed after {seconds:.0f} s"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else ""


def _has_ended(pid: int) -> bool:
    """True if the process ended; it is not reaped, so that the name of its group is not another's yet."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
