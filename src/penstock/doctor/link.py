"""Link measurement: one direction between two nodes, over one interface of each."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class LinkFault(StrEnum):
    """Fault of a link."""

    NONE = ""
    DEAD = "dead"
    """Not even small messages pass."""
    STALLS = "stalls"
    """Small messages pass, but a transfer does not finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasurement:
    """Measured direction between two nodes."""

    source: int
    target: int
    source_nic: str
    target_nic: str
    fault: LinkFault = LinkFault.NONE
    gbit_s: float = 0.0
    """Speed of a transfer from source to target; 0: not measured, because it would have hung."""
    round_trip_s: float = 0.0
    """Shortest round trip of some small messages; 0: not measured."""
    clock_ahead_s: float = 0.0
    """The target's clock minus the source's, accurate to half a round trip."""
    lost_share: float = 0.0
    """Share of packets that had to be sent again, in bursts that no queue can overflow."""
    packet_bytes: int = 0
    """Largest packet that both interfaces allow."""
    arriving_bytes: int = 0
    """Largest packet that arrived; 0: unknown, because none did or the network has only IPv6."""

    @property
    def loses_packets(self) -> bool:
        """True if the link loses packets of a size that both interfaces allow, but not smaller ones."""
        return 0 < self.arriving_bytes < self.packet_bytes


def better(first: LinkMeasurement, second: LinkMeasurement) -> LinkMeasurement:
    """Return the better of two measurements of one link."""
    return max(first, second, key=lambda link: (link.fault is LinkFault.NONE, link.gbit_s))


def link_of(raw: dict[str, Any]) -> LinkMeasurement:  # Any: what JSON holds
    """Return a link from its JSON fields."""
    return LinkMeasurement(**{**raw, "fault": LinkFault(raw["fault"])})
