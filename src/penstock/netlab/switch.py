"""Emulated switch with latency: a process that forwards frames between NICs after a delay.

It replaces the kernel's netem, which many kernels lack. Frames are unsegmented, up to 64 KiB, with the header
that the receiving kernel needs, so that a Python process can forward a gigabit per second. No frame is early;
delays beyond the latency come from this process and the kernel's scheduler. `Port` decides when a frame
leaves: after the latency, no faster than the rate; it is pure.
"""

import math
import multiprocessing
import os
import select
import signal
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.core import clock
from penstock.launch.local import die_with
from penstock.netlab.namespaces import HEADER_BYTES, LARGEST_FRAME
from penstock.netlab.topology import Topology, mac_of, patience_s

_MAC_BYTES = 6
_TO_MANY = 1
"""Multicast bit in the first byte of a MAC address."""


@dataclass(slots=True)
class Port:
    """Queue of frames to one host.

    >>> port = Port(latency_s=1.0, bytes_per_s=10.0, patience_s=1.5)
    >>> [port.add(b"x" * 10, now=now) for now in (0.0, 0.1, 0.1)]  # the third would wait for 1.9 s
    [True, True, False]
    >>> port.next_at, port.take(now=1.5), port.next_at, port.take(now=3.0)
    (2.0, [], 2.0, [b'xxxxxxxxxx', b'xxxxxxxxxx'])
    """

    latency_s: float
    bytes_per_s: float
    patience_s: float
    """Maximum wait of a frame for those before it; beyond it, the frame is dropped, as in real switches."""
    _waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    _free_at: float = 0.0
    """Time at which the last queued frame will have been sent."""

    def add(self, frame: bytes, *, now: float) -> bool:
        """Queue a frame; return False if it is dropped."""
        ready = now + self.latency_s
        begins = max(ready, self._free_at)
        if begins - ready > self.patience_s:
            return False
        self._free_at = begins + len(frame) / self.bytes_per_s
        self._waiting.append((self._free_at, frame))
        return True

    @property
    def next_at(self) -> float:
        """Time at which the next frame is due; inf if the queue is empty."""
        return self._waiting[0][0] if self._waiting else math.inf

    def take(self, *, now: float) -> list[bytes]:
        """Return the frames that are due, in order."""
        due = []
        while self._waiting and self._waiting[0][0] <= now:
            due.append(self._waiting.popleft()[1])
        return due


@dataclass(frozen=True, slots=True)
class _Cable:
    descriptor: int
    rail: int
    port: Port
    """Queue of frames to this NIC."""


@contextmanager
def switching(topology: Topology, taps: Mapping[tuple[int, int], int]) -> Iterator[None]:
    """Forward frames in a process until the `with` block ends.

    Args:
        taps: descriptor of each (host, NIC), from `open_tap`; the caller may close them inside the block.
    """
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_serve, args=(topology, taps, os.getpid()), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()
        process.close()


def _serve(topology: Topology, taps: Mapping[tuple[int, int], int], parent: int) -> None:
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops this process after the ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    cables = {}
    for (host, nic), descriptor in taps.items():
        link = topology.link_of(host, nic)
        if link.cable == "whole":
            rate, latency_s = link.bits_per_s, topology.latency_s
            port = Port(latency_s=latency_s, bytes_per_s=rate / 8, patience_s=patience_s(rate))
            address = bytes.fromhex(mac_of(host, nic).replace(":", ""))
            cables[address] = _Cable(descriptor, nic, port)
    while True:
        _turn(cables)


def _turn(cables: Mapping[bytes, _Cable]) -> None:
    """Wait until a frame arrives or is due; send those that are due, queue those that arrived."""
    due_at = min((cable.port.next_at for cable in cables.values()), default=float("inf"))
    patience = None if due_at == float("inf") else max(0.0, due_at - clock.monotonic())
    come, _, _ = select.select([cable.descriptor for cable in cables.values()], [], [], patience)
    now = clock.monotonic()
    for cable in cables.values():
        for frame in cable.port.take(now=now):
            _write(cable.descriptor, frame)
        if cable.descriptor in come:
            frame = os.read(cable.descriptor, LARGEST_FRAME)
            for to in _receivers(frame, cable, cables):
                to.port.add(frame, now=now)


def _receivers(frame: bytes, source: _Cable, cables: Mapping[bytes, _Cable]) -> list[_Cable]:
    address = frame[HEADER_BYTES : HEADER_BYTES + _MAC_BYTES]
    if address[0] & _TO_MANY:
        return [cable for cable in cables.values() if cable.rail == source.rail and cable is not source]
    to = cables.get(address)
    return [to] if to is not None and to.rail == source.rail else []


def _write(descriptor: int, frame: bytes) -> None:
    try:
        os.write(descriptor, frame)
    except OSError:  # the host is gone or has no room: the frame is lost, as on a wire
        return
