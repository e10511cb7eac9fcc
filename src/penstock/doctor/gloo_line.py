"""Small messages and transfers between two nodes over one interface, by a gloo group of two.

What is timed is what training over gloo gets: its connections, its copies, one stream. No wait is endless.
"""

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from penstock.core import clock

_PINGS = 20
_FIRST_BYTES, _MOST_BYTES, _GROWTH = 2**18, 2**26, 4
_LONG_ENOUGH_S = 0.2
_TRIES = 3


class GlooLine:
    """A group of two over one interface of each; the other node must make one at the same time.

    Args:
        index: 0 on one node, 1 on the other.
        address: that of this node's interface.
    """

    def __init__(self, store: Store, *, index: int, address: str, timeout_s: float) -> None:
        self._wait = timedelta(seconds=timeout_s)
        gloo: Any = ProcessGroupGloo  # torch's stubs know neither its options nor what it inherits
        options = gloo._Options()
        options._timeout = self._wait
        options._devices = [gloo.create_device(hostname=address)]
        self._group = gloo(store, index, 2, options)
        self._peer = 1 - index

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor.

        Raises:
            RuntimeError: it does not go within the limit.
        """
        self._group.send([tensor], self._peer, 0).wait(self._wait)

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill a tensor with what the other sends, and return it; raises as `send`."""
        self._group.recv([tensor], self._peer, 0).wait(self._wait)
        return tensor

    def close(self) -> None:
        """End the group."""
        self._group.shutdown()


def ping(line: GlooLine) -> tuple[float, float]:
    """Return the shortest round trip, and how far the other's clock was ahead in it, as NTP reckons it."""
    best, ahead = float("inf"), 0.0
    there, back = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for _ in range(_PINGS):
        sent, start = clock.unix_seconds(), clock.monotonic()
        line.send(there)
        theirs = float(line.receive(back))
        took = clock.monotonic() - start
        if took < best:
            best, ahead = took, theirs - (sent + took / 2)
    return best, ahead


def answer(line: GlooLine) -> None:
    """Answer what `ping` sends with the time."""
    there = torch.zeros(1, dtype=torch.float64)
    for _ in range(_PINGS):
        line.receive(there)
        line.send(torch.tensor([clock.unix_seconds()], dtype=torch.float64))


def transfer(line: GlooLine) -> float:
    """Send more and more, until it takes long enough; return Gbit/s of the best at that size.

    What took long is sent again: a busy machine, or others' traffic, is not taken for a slow link.
    """
    size, best_s, tries = _FIRST_BYTES, float("inf"), 0
    while True:
        best_s, tries = min(best_s, _timed(line, size)), tries + 1
        if best_s > _LONG_ENOUGH_S or size >= _MOST_BYTES:
            if tries == _TRIES:
                line.send(torch.tensor([0]))
                return size * 8 / best_s / 1e9
        else:
            size, best_s, tries = size * _GROWTH, float("inf"), 0


def take(line: GlooLine) -> None:
    """Receive what `transfer` sends."""
    while size := int(line.receive(torch.zeros(1, dtype=torch.int64))):
        line.receive(torch.zeros(size, dtype=torch.uint8))
        line.send(torch.ones(1, dtype=torch.int64))


def _timed(line: GlooLine, size: int) -> float:
    """Send so many bytes; return the seconds until the other said that they had come."""
    content = torch.zeros(size, dtype=torch.uint8)
    line.send(torch.tensor([size]))
    start = clock.monotonic()
    line.send(content)
    line.receive(torch.zeros(1, dtype=torch.int64))
    return clock.monotonic() - start
