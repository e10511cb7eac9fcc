"""Put together what all nodes said, and judge what only shows in all of it; the report of an examination."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.doctor import collective, devices, processors
from penstock.doctor.finding import BETWEEN, Finding, Level, green, merged, red
from penstock.doctor.link import Link, link_of
from penstock.doctor.network import judge_links
from penstock.doctor.party import Party
from penstock.doctor.sameness import judge_sameness

Facts = Mapping[str, Any]  # Any: each check has its own
"""Check -> what it measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found."""

    hosts: dict[int, str]
    """Node -> name of its machine, those that came."""
    num_nodes: int
    """Machines that were to come."""
    findings: list[Finding]
    facts: Facts
    """Of the first node."""
    links: list[Link]
    num_local: int
    """Processes of the run on each machine."""
    seconds: float


def traits_of(facts: Facts) -> dict[str, str]:
    """Return what should be the same on all nodes."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    if isinstance(seen := facts.get(devices.CHECK), devices.Facts):
        found |= {"torch": seen.torch, "driver": seen.driver or "none"}
        names = [device.name for device in seen.devices]
        found["devices"] = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names))) or "none"
    if isinstance(cores := facts.get(processors.CHECK), processors.Facts):
        found["cores"] = f"{cores.granted} of {cores.model}"
    return found


def put_together(
    party: Party,
    reports: Mapping[int, Any],
    facts: Facts,
    unmeasured: int,
    *,
    num_nodes: int,
    num_local: int,
    seconds: float,
) -> Report:
    """Put together what the nodes said and what follows from all of it."""
    findings = [
        Finding(**{**raw, "level": Level(raw["level"]), "nodes": (node,)})
        for node, report in sorted(reports.items())
        for raw in report["findings"]
    ]
    links = [link_of(raw) for _, report in sorted(reports.items()) for raw in report["links"]]
    silent = [*party.missing, *(m.node for m in party.members if m.node not in reports)]
    between = [_missing(node, party) for node in sorted(silent)]
    between += judge_sameness({node: report["traits"] for node, report in reports.items()})
    between += judge_links(party.members, links)
    outcomes = {node: report["collective"] for node, report in reports.items() if report["collective"]}
    between += collective.judge({node: collective.Outcome(**raw) for node, raw in outcomes.items()})
    if unmeasured:
        between.append(green("links", f"{unmeasured} pairs were not measured, for want of time (--seconds)"))
    return Report(
        hosts={
            member.node: member.host for member in party.members if reports.get(member.node, {}).get("traits")
        },
        findings=merged(findings) + [replace(finding, nodes=(BETWEEN,)) for finding in between],
        facts=facts,
        links=links,
        num_nodes=num_nodes,
        num_local=num_local,
        seconds=seconds,
    )


def _missing(node: int, party: Party) -> Finding:
    came = any(member.node == node for member in party.members)
    if came:
        return red(
            "nodes",
            f"Node {node} came and did not report",
            remedy="See what it said; it may have hung, or been killed.",
        )
    return red(
        "nodes",
        f"Node {node} did not come",
        remedy="Check that it was started, and that it reaches the address of the first (MASTER_ADDR) by the "
        "interface that leads there.",
    )
