"""Network lab: hosts joined by a slow network, emulated on one Linux machine; imports no torch."""

from penstock.netlab.hosts import Hosts, emulated, lab, why_not
from penstock.netlab.topology import Link, Topology

__all__ = ["Hosts", "Link", "Topology", "emulated", "lab", "why_not"]
