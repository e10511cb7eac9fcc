"""What was measured between two nodes, in one direction, over one interface of each."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Fault(StrEnum):
    """How a link failed."""

    NONE = ""
    DEAD = "dead"
    """Not even small messages pass."""
    STALLS = "stalls"
    """Small messages pass, and a transfer does not end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two nodes."""

    source: int
    target: int
    source_nic: str
    target_nic: str
    fault: Fault = Fault.NONE
    gbit_s: float = 0.0
    """Of a transfer from source to target; 0: not measured, as it would have hung."""
    round_trip_s: float = 0.0
    """The shortest of some small messages there and back; 0: not measured."""
    clock_ahead_s: float = 0.0
    """The target's clock minus the source's, true to half a round trip."""
    packet_bytes: int = 0
    """The largest packet that both interfaces allow."""
    arriving_bytes: int = 0
    """The largest packet that arrived; 0: not known, since none did, or the network has IPv6 only."""

    @property
    def loses_packets(self) -> bool:
        """Whether packets that both interfaces allow are lost on the way, and smaller ones are not."""
        return 0 < self.arriving_bytes < self.packet_bytes


def better(first: Link, second: Link) -> Link:
    """Return the better of two measurements of one link."""
    return max(first, second, key=lambda link: (link.fault is Fault.NONE, link.gbit_s))


def link_of(raw: dict[str, Any]) -> Link:  # Any: what JSON holds
    """Build a link from its fields in JSON."""
    return Link(**{**raw, "fault": Fault(raw["fault"])})
