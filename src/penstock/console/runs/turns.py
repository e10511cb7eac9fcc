"""Turns: a lock whose waiters come one after the other, each for a bounded time.

A thread that parses a long file takes a turn for each piece. With a plain lock it would often get the next
turn too, before those that wait have woken up.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from threading import TIMEOUT_MAX, Lock

from penstock.core import clock
from penstock.core.errors import PenstockError


class RunBusy(PenstockError):
    """Another thread reads this run."""


class Turns:
    """A lock that is given in the order in which it was asked for; not re-entrant.

    Args:
        wait_s: seconds to wait for it.
    """

    def __init__(self, *, wait_s: float = 10.0) -> None:
        self.wait_s = wait_s
        self._turn, self._next = Lock(), Lock()

    @contextmanager
    def turn(self, *, is_patient: bool = False) -> Iterator[None]:
        """Context manager: hold the lock.

        Args:
            is_patient: wait for however long it takes.

        Raises:
            RunBusy: it was not free in time.
        """
        end = math.inf if is_patient else clock.monotonic() + self.wait_s
        self._wait(self._next, end)
        try:
            self._wait(self._turn, end)
        finally:
            self._next.release()
        try:
            yield
        finally:
            self._turn.release()

    @staticmethod
    def _wait(lock: Lock, end: float) -> None:
        left = max(0.0, end - clock.monotonic())
        if not lock.acquire(timeout=TIMEOUT_MAX if math.isinf(left) else left):
            raise RunBusy("Another request is reading this run", fix="Try again in a few seconds.")
