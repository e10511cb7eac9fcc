"""When a switch that takes its time passes frames on: after the latency, no faster than the rate; pure."""

import math
from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Port:
    """What waits to be sent to one host.

    >>> port = Port(latency_s=1.0, bytes_per_s=10.0, patience_s=1.5)
    >>> [port.add(b"x" * 10, now=now) for now in (0.0, 0.1, 0.1)]  # the third would wait for 1.9 s
    [True, True, False]
    >>> port.next_at, port.take(now=1.5), port.next_at, port.take(now=3.0)
    (2.0, [], 2.0, [b'xxxxxxxxxx', b'xxxxxxxxxx'])
    """

    latency_s: float
    bytes_per_s: float
    patience_s: float
    """How long a frame may wait for those before it; one that would longer is dropped, as switches do."""
    _waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    _free_at: float = 0.0
    """When the last frame will have left."""

    def add(self, frame: bytes, *, now: float) -> bool:
        """Take a frame; return whether there was room."""
        ready = now + self.latency_s
        begins = max(ready, self._free_at)
        if begins - ready > self.patience_s:
            return False
        self._free_at = begins + len(frame) / self.bytes_per_s
        self._waiting.append((self._free_at, frame))
        return True

    @property
    def next_at(self) -> float:
        """When the next frame is due; never, if none waits."""
        return self._waiting[0][0] if self._waiting else math.inf

    def take(self, *, now: float) -> list[bytes]:
        """Return the frames that are due, in order."""
        due = []
        while self._waiting and self._waiting[0][0] <= now:
            due.append(self._waiting.popleft()[1])
        return due
