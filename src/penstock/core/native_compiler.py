"""Compilers as processes: side by side, within a limit, and none outlives the process that started it.

`g++` starts `cc1plus`, which goes on if only `g++` is killed. So each command runs in a process group of its
own, under a guard that reads from us: when this process ends, however it ends, the guard kills the group.
"""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.core import clock, env

Say = Callable[[str], None]
"""Shows a sentence to the user."""

LIMIT_S = 1_200.0
"""Limit of a build on a busy machine."""
_QUIET_S = 3.0
_SAY_EVERY_S = 5.0
_POLL_S = 0.05

_GUARD = """
import os, signal, subprocess, sys, threading
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
def watch():
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
code = child.wait()
sys.stdout.flush()
os._exit(code if code >= 0 else 128 - code)
"""


class CompilerFailed(Exception):
    """A compiler ended with an error; the message is what it printed."""


class TooSlow(Exception):
    """A wait reached its limit."""


def wait_for(done: Callable[[], bool], what: str, say: Say, *, began: float, limit_s: float) -> None:
    """Wait until `done()` is True; say what for, after three seconds and then every five.

    Raises:
        TooSlow: it takes longer than the limit.
    """
    say_at = clock.monotonic() + _QUIET_S
    while not done():
        now = clock.monotonic()
        if now - began > limit_s:
            raise TooSlow(f"{what}: not done after {limit_s:.0f} s")
        if now >= say_at:
            say(f"{what}: {now - began:.0f} s")
            say_at = now + _SAY_EVERY_S
        clock.sleep(_POLL_S)


def run_all(
    commands: Sequence[Sequence[str]], folder: Path, what: str, say: Say, *, began: float, limit_s: float
) -> None:
    """Run compilers, as many at a time as there are cores; all have ended when this returns or raises.

    Args:
        folder: for their temporary files.

    Raises:
        CompilerFailed: one of them failed.
        TooSlow: they take longer than the limit.
    """
    waiting = deque(enumerate(commands))
    running: list[_Guarded] = []

    def done() -> bool:
        running[:] = [one for one in running if not one.has_ended()]
        while waiting and len(running) < env.num_cores():
            number, command = waiting.popleft()
            running.append(_Guarded(command, folder, number))
        return not running

    try:
        wait_for(done, what, say, began=began, limit_s=limit_s)
    finally:
        for one in running:
            one.kill()


class _Guarded:
    """A command in a process group of its own."""

    def __init__(self, command: Sequence[str], folder: Path, number: int) -> None:
        self._output = folder / f"{number}.output"
        with self._output.open("wb") as output:
            self._guard = subprocess.Popen(
                [sys.executable, "-ISc", _GUARD, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(folder)},
            )

    def has_ended(self) -> bool:
        """True if the command has succeeded.

        Raises:
            CompilerFailed: it has failed.
        """
        code = self._guard.poll()
        if code is None:
            return False
        self._close()
        if code:
            text = self._output.read_text(errors="replace").strip()
            raise CompilerFailed(text[:2000] or f"status {code}")
        return True

    def kill(self) -> None:
        """Kill the command and all that it started."""
        if self._guard.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._guard.pid, signal.SIGKILL)
        self._close()

    def _close(self) -> None:
        self._guard.wait()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
