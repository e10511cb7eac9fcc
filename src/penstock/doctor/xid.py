"""Xid errors: events of NVIDIA's driver, received through NVML while a process listens.

Meaning of the numbers: NVIDIA's catalogue of Xid errors. Those of a program that fails (13, 31, 43, 45) say
nothing about the card.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from threading import Event, Lock, Thread
from typing import Any, NamedTuple, Self

from penstock.doctor.checks.check import Finding, red, yellow

log = logging.getLogger(__name__)

CHECK = "xid"
_WAIT_MS = 1000
_BAD: dict[int, str] = {
    48: "an ECC error that cannot be corrected",
    62: "a halt of its power management",
    64: "a row of memory that could not be replaced",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    92: "many corrected ECC errors",
    95: "an ECC error that was not contained",
    119: "its system processor does not answer",
    120: "an error of its system processor",
    140: "an ECC error that was not recovered",
    143: "it could not be started",
}
_NOTED: dict[int, str] = {
    63: "a row of memory is replaced at the next reset",
    94: "an ECC error that ended one job",
}
_RESET = "Drain the node and reset the GPU or restart the machine; if it comes again, have the card replaced."


class Xid(NamedTuple):
    """Error of a GPU."""

    bus: str
    """PCI address; "": of which GPU is not known."""
    number: int


def judge(seen: Mapping[Xid, int]) -> Iterator[Finding]:
    """Yield a finding for each kind of error that is about the card.

    >>> [finding.what for finding in judge({Xid("0000:3b:00.0", 79): 1, Xid("0000:3b:00.0", 31): 9})]
    ['The GPU at 0000:3b:00.0 had Xid 79: it has fallen off the bus']
    """
    for (bus, number), count in sorted(seen.items()):
        times = f", {count} times" if count > 1 else ""
        who = f"The GPU at {bus}" if bus else "A GPU"
        if number in _BAD:
            yield red(CHECK, f"{who} had Xid {number}{times}: {_BAD[number]}", remedy=_RESET)
        elif number in _NOTED:
            yield yellow(CHECK, f"{who} had Xid {number}{times}: {_NOTED[number]}", remedy=_RESET)


class XidListener:
    """Counts Xid errors in a thread while it is open; use as a context manager.

    Without NVML, or without a GPU, it counts nothing.
    """

    def __init__(self) -> None:
        self._seen: Counter[Xid] = Counter()
        self._lock, self._stop = Lock(), Event()
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        try:
            import pynvml as nvml

            nvml.nvmlInit()
        except Exception as error:  # the package, the library or the driver is not there
            log.info("xid errors are not listened for: %s", error)
            return self
        self._thread = Thread(target=self._listen, args=(nvml,), name="xid", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)

    def seen(self) -> dict[Xid, int]:
        """Return how often each error came."""
        with self._lock:
            return dict(self._seen)

    def _listen(self, nvml: Any) -> None:  # Any: a module without types
        try:
            events = nvml.nvmlEventSetCreate()
            for index in range(nvml.nvmlDeviceGetCount()):
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, events)
            while not self._stop.is_set():
                try:
                    event = nvml.nvmlEventSetWait_v2(events, _WAIT_MS)
                except nvml.NVMLError_Timeout:
                    continue
                bus = nvml.nvmlDeviceGetPciInfo(event.device).busId
                name = (bus.decode() if isinstance(bus, bytes) else bus).lower()[-12:]
                with self._lock:
                    self._seen[Xid(name, int(event.eventData))] += 1
        except nvml.NVMLError as error:
            log.warning("xid errors are no longer listened for: %s", error)
