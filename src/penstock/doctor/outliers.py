"""Outliers: the nodes and cards that a run should leave out, from the findings and links of a report.

A card is an outlier if its links with several nodes are bad, a node if it did not report or has a red line
that others do not have. A fault between two nodes that neither explains, or of all nodes, is no outlier: to
leave one out would mend nothing. Pure functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.doctor.checks.check import BETWEEN, Finding, Level
from penstock.doctor.judge_links import CHECK, bad_links, culprits, ends_of_links
from penstock.doctor.link import LinkMeasurement

_BY_NODE = ("nodes", CHECK)
"""Checks between nodes whose red lines are explained node by node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """Node that a run should leave out, or a card of one."""

    node: int
    host: str
    """Empty: unknown, because the node did not come."""
    card: str
    """Empty: the node as a whole."""
    why: str

    def __str__(self) -> str:
        host = self.host or "unknown host"
        return f"node {self.node} ({host}){f' {self.card}' if self.card else ''}: {self.why}"


def outliers_of(
    findings: Sequence[Finding], links: Sequence[LinkMeasurement], hosts: dict[int, str], *, num_nodes: int
) -> list[Outlier]:
    """Return the outliers, by node.

    Args:
        hosts: node -> host name, for the nodes that reported.
        num_nodes: number of machines expected.
    """
    if num_nodes < 2:
        return []
    found = [
        Outlier(node=node, host="", card="", why="did not report")
        for node in range(num_nodes)
        if node not in hosts
    ]
    for finding in findings:
        if finding.level is Level.RED and BETWEEN not in finding.nodes and set(finding.nodes) != set(hosts):
            found += [
                Outlier(node=node, host=hosts.get(node, ""), card="", why=f"{finding.check}: {finding.what}")
                for node in finding.nodes
            ]
    everywhere = ends_of_links(links)
    for fault, bad in bad_links(links).items():
        places, _ = culprits(links, bad)
        for place in places:
            others = {end for end in everywhere if end.nic == place.nic}
            if others <= set(places):
                continue  # every node's: a fault of the network
            host = hosts.get(place.node, "")
            found.append(Outlier(node=place.node, host=host, card=place.nic, why=fault))
    return sorted(found, key=lambda outlier: (outlier.node, outlier.card))


def mended_without(
    outliers: Sequence[Outlier], findings: Sequence[Finding], links: Sequence[LinkMeasurement]
) -> bool:
    """Return True if no red line would be left without the nodes of the outliers."""
    left_out = {outlier.node for outlier in outliers}
    for finding in findings:
        if finding.level is not Level.RED:
            continue
        if BETWEEN in finding.nodes:
            if finding.check not in _BY_NODE:
                return False
        elif not set(finding.nodes) <= left_out:
            return False
    bad = set[LinkMeasurement]().union(*bad_links(links).values())
    return all(left_out & {link.source, link.target} for link in bad)


def hosts_to_leave_out(outliers: Sequence[Outlier]) -> list[str]:
    """Return the host names of the outliers, each once.

    >>> hosts_to_leave_out([Outlier(node=2, host="blue", card=card, why="slow") for card in ("a", "b")])
    ['blue']
    """
    return list(dict.fromkeys(outlier.host for outlier in outliers if outlier.host))
