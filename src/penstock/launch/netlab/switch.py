"""A switch that takes its time: a process that reads frames from NICs and writes them, later, to others.

It stands in for a kernel's netem, which many kernels lack. Frames come uncut, up to 64 KiB, with what the
receiving kernel needs to know of that, so that a Python process can pass on a gigabit a second. No frame is
early; late it is by what this process and the kernel's scheduler take.
"""

import multiprocessing
import os
import select
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.core import clock
from penstock.launch.local import die_with
from penstock.launch.netlab.delays import Port
from penstock.launch.netlab.taps import HEADER_BYTES, LARGEST_FRAME
from penstock.launch.netlab.topology import Topology, mac_of, patience_s

_MAC_BYTES = 6
_TO_MANY = 1
"""Bit of the first byte of an address that is not one NIC's."""


@dataclass(frozen=True, slots=True)
class _Cable:
    descriptor: int
    rail: int
    port: Port
    """Where frames to this NIC wait."""


@contextmanager
def switching(topology: Topology, taps: Mapping[tuple[int, int], int]) -> Iterator[None]:
    """Pass frames on in a process until the `with` ends.

    Args:
        taps: of each (host, NIC), from `open_tap`; the caller may close them inside the `with`.
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this, after the ranks
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
    """Wait for a frame, or until one is due; write what is due, take in what has come."""
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
    except OSError:  # the host is gone, or has no room: a frame lost, as on any wire
        return
