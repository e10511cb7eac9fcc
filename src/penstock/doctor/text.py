"""Print a report: a line each, the remedy under it, the machine before what lies between machines."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from penstock.core.units import duration, plural
from penstock.doctor.finding import BETWEEN, Finding, Level, worst
from penstock.doctor.report import Report

_WIDTH = 12


def as_text(report: Report) -> Iterator[str]:
    """Yield the lines of a report; findings that all nodes share come first, once."""
    everyone = tuple(sorted(report.hosts))
    groups: dict[tuple[int, ...], list[Finding]] = {}
    for finding in report.findings:
        groups.setdefault(finding.nodes, []).append(finding)
    for nodes in sorted(groups, key=lambda nodes: (nodes == (BETWEEN,), nodes != everyone, nodes)):
        yield _title(nodes, report)
        for finding in groups[nodes]:
            yield from _lines(finding)
        yield ""
    yield summary(report)


def summary(report: Report) -> str:
    """Return the last line: how many of what, and how long it took."""
    levels = [finding.level for finding in report.findings]
    counts = ", ".join(f"{levels.count(level)} {level}" for level in Level)
    return f"{plural(len(report.hosts), 'node')}: {counts}, in {duration(report.seconds)}"


def as_json(report: Report) -> dict[str, Any]:  # Any: what JSON can write
    """Return the report as plain values; `nodes` [] of a finding: it lies between nodes."""
    return {
        "level": worst(report.findings),
        "seconds": round(report.seconds, 3),
        "nodes": [{"node": node, "host": host} for node, host in sorted(report.hosts.items())],
        "findings": [_finding(finding) for finding in report.findings],
        "links": [asdict(link) for link in report.links],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    nodes: Sequence[int] = [] if finding.nodes == (BETWEEN,) else finding.nodes
    return {**asdict(finding), "nodes": list(nodes)}


def _title(nodes: tuple[int, ...], report: Report) -> str:
    if nodes == (BETWEEN,):
        return "between nodes" if report.num_nodes > 1 else "between processes"
    if len(nodes) > 1 and nodes == tuple(sorted(report.hosts)):
        return "all nodes"
    return ", ".join(f"node {node} ({report.hosts.get(node, 'unknown')})" for node in nodes)


def _lines(finding: Finding) -> Iterator[str]:
    yield f"  {finding.level:<7} {finding.check:<{_WIDTH}}  {finding.what}"
    if finding.remedy:
        yield f"{'':<{_WIDTH + 12}}-> {finding.remedy}"
