"""Hosts joined by a slow network, emulated on one Linux machine; imports no torch."""

from penstock.launch.netlab.hosts import Hosts, emulated, lab, why_not
from penstock.launch.netlab.topology import Link, Topology

__all__ = ["Hosts", "Link", "Topology", "emulated", "lab", "why_not"]
