"""A server of somebody else's as a process that ends with the tests that need it."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.core import clock

PATIENCE_S = 60


@contextmanager
def answering(command: list[str], ask: Callable[[], None]) -> Iterator[None]:
    """Run a server, once it answers, until the end of a `with`.

    Args:
        ask: raises OSError while it does not.
    """
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = clock.monotonic() + PATIENCE_S
        while True:
            try:
                ask()
                break
            except OSError:
                assert process.poll() is None, "the server ended"
                assert clock.monotonic() < deadline_s, "the server does not answer"
                clock.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()
