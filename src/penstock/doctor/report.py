"""Doctor's report: findings of each node and of all together, as text and JSON."""

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.core.units import duration, plural
from penstock.doctor import collective, consistency, judge_links
from penstock.doctor.checks import devices, gpus, processors
from penstock.doctor.checks.check import BETWEEN, Finding, Level, merged, of_check, red, worst, yellow
from penstock.doctor.link import LinkMeasurement, link_of
from penstock.doctor.node_group import NodeGroup
from penstock.doctor.outliers import Outlier, mended_without, outliers_of
from penstock.launch.preflight import EXIT_OUTLIERS

Facts = Mapping[str, Any]  # Any: each check has its own
"""Check -> its facts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """Findings and measurements of all nodes."""

    hosts: dict[int, str]
    """Node -> host name, for the nodes that came."""
    num_nodes: int
    """Number of machines expected."""
    findings: list[Finding]
    facts: Facts
    """Facts of the first node."""
    links: list[LinkMeasurement]
    num_local: int
    """Processes of the run on each machine."""
    seconds: float

    def __post_init__(self) -> None:
        """Raise ValueError for a finding that does not name its check."""
        if nameless := [finding.what for finding in self.findings if not finding.check]:
            raise ValueError(f"A finding of the report names no check: {nameless[0]}")

    @property
    def outliers(self) -> list[Outlier]:
        """Nodes and cards that a run should leave out."""
        return outliers_of(self.findings, self.links, self.hosts, num_nodes=self.num_nodes)

    @property
    def exit_code(self) -> int:
        """0: nothing red. 1: something is. 3: all of it is mended by leaving the outliers out."""
        if worst(self.findings) is not Level.RED:
            return 0
        outliers = self.outliers
        is_mended = outliers and mended_without(outliers, self.findings, self.links)
        return EXIT_OUTLIERS if is_mended else 1


def traits_of(facts: Facts) -> dict[str, str]:
    """Return the traits that should be equal on all nodes."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    if isinstance(seen := facts.get(devices.CHECK), devices.DeviceFacts):
        found |= {"torch": seen.torch, "driver": seen.driver or "none"}
        names = [device.name for device in seen.devices]
        found["devices"] = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names))) or "none"
    if isinstance(cores := facts.get(processors.CHECK), processors.CpuFacts):
        found["cores"] = f"{cores.granted} of {cores.model}"
    return found


def put_together(
    party: NodeGroup,
    reports: Mapping[int, Any],
    facts: Facts,
    unmeasured: int,
    *,
    num_nodes: int,
    num_local: int,
    seconds: float,
) -> DoctorReport:
    """Combine the reports of the nodes with the findings that follow from all of them."""
    findings = [
        Finding(**{**raw, "level": Level(raw["level"]), "nodes": (node,)})
        for node, report in sorted(reports.items())
        for raw in report["findings"]
    ]
    links = [link_of(raw) for _, report in sorted(reports.items()) for raw in report["links"]]
    silent = [*party.missing, *(m.node for m in party.members if m.node not in reports)]
    traits = {node: report["traits"] for node, report in reports.items()}
    outcomes = {
        node: collective.CollectiveResult(**report["collective"])
        for node, report in reports.items()
        if report["collective"]
    }
    between = of_check("nodes", (_missing(node, party) for node in sorted(silent)))
    between += of_check(consistency.CHECK, consistency.judge_sameness(traits))
    between += of_check(judge_links.CHECK, judge_links.judge_links(party.members, links))
    between += of_check(collective.CHECK, collective.judge(outcomes))
    if unmeasured:
        what = f"{plural(unmeasured, 'pair')} of nodes were not measured, because the time ran out"
        remedy = "Nothing is known of these links. Give more time: --seconds."
        between.append(yellow(what, remedy=remedy, check=judge_links.CHECK))
    return DoctorReport(
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


def _missing(node: int, party: NodeGroup) -> Finding:
    came = any(member.node == node for member in party.members)
    if came:
        return red(
            f"Node {node} came but did not report",
            remedy="See its output; it may have hung, or been killed.",
        )
    return red(
        f"Node {node} did not come",
        remedy="Check that it was started, and that it reaches the address of the first (MASTER_ADDR) by the "
        "interface that leads there.",
    )


_WIDTH = 12


def as_text(report: DoctorReport) -> Iterator[str]:
    """Yield the lines of a report; findings common to all nodes first, once."""
    everyone = tuple(sorted(report.hosts))
    groups: dict[tuple[int, ...], list[Finding]] = {}
    for finding in report.findings:
        groups.setdefault(finding.nodes, []).append(finding)
    for nodes in sorted(groups, key=lambda nodes: (nodes == (BETWEEN,), nodes != everyone, nodes)):
        yield _title(nodes, report)
        for finding in groups[nodes]:
            yield from _lines(finding)
        yield ""
    if outliers := report.outliers:
        yield "to leave out"
        yield from (f"  {outlier}" for outlier in outliers)
        yield ""
    yield summary(report)


def summary(report: DoctorReport) -> str:
    """Return the last line: number of findings by level, and duration."""
    levels = [finding.level for finding in report.findings]
    counts = ", ".join(f"{levels.count(level)} {level}" for level in Level)
    return f"{plural(len(report.hosts), 'node')}: {counts}, in {duration(report.seconds)}"


def as_json(report: DoctorReport) -> dict[str, Any]:  # Any: what JSON can write
    """Return the report as JSON values; a finding with `nodes` [] is about the network between nodes.

    `gpus` are those of the first node.
    """
    return {
        "level": worst(report.findings),
        "seconds": round(report.seconds, 3),
        "nodes": [{"node": node, "host": host} for node, host in sorted(report.hosts.items())],
        "findings": [_finding(finding) for finding in report.findings],
        "links": [asdict(link) for link in report.links],
        "outliers": [asdict(outlier) for outlier in report.outliers],
        "gpus": [asdict(gpu) for gpu in seen.gpus] if (seen := report.facts.get(gpus.CHECK)) else [],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    nodes: Sequence[int] = [] if finding.nodes == (BETWEEN,) else finding.nodes
    return {**asdict(finding), "nodes": list(nodes)}


def _title(nodes: tuple[int, ...], report: DoctorReport) -> str:
    if nodes == (BETWEEN,):
        return "between nodes" if report.num_nodes > 1 else "between processes"
    if len(nodes) > 1 and nodes == tuple(sorted(report.hosts)):
        return "all nodes"
    return ", ".join(f"node {node} ({report.hosts.get(node, 'unknown')})" for node in nodes)


def _lines(finding: Finding) -> Iterator[str]:
    yield f"  {finding.level:<7} {finding.check:<{_WIDTH}}  {finding.what}"
    if finding.remedy:
        yield f"{'':<{_WIDTH + 12}}-> {finding.remedy}"
