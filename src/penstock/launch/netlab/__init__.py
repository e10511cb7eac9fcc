"""Hosts joined by a slow network, emulated on one Linux machine; imports no torch."""

from penstock.launch.netlab.hosts import Hosts, lab, why_not
from penstock.launch.netlab.topology import Link

__all__ = ["Hosts", "Link", "lab", "why_not"]
