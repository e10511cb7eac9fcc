"""Which nodes and cards a run should leave out, and the exit code."""

from dataclasses import replace
from itertools import permutations

from penstock.doctor.checks.check import BETWEEN, of_check, red
from penstock.doctor.judge_links import judge_links
from penstock.doctor.link import LinkFault, LinkMeasurement
from penstock.doctor.outliers import hosts_to_leave_out
from penstock.doctor.report import DoctorReport, as_json, as_text


def links_of(num_nodes, *cards):
    return [
        LinkMeasurement(
            source=source, target=target, source_nic=card, target_nic=card, gbit_s=10.0,
            round_trip_s=1e-4, packet_bytes=9000, arriving_bytes=9000,
        )
        for source, target in permutations(range(num_nodes), 2)
        for card in cards
    ]  # fmt: skip


def report_of(links, *findings, hosts=4, num_nodes=4):
    judged = [replace(finding, nodes=(BETWEEN,)) for finding in of_check("links", judge_links([], links))]
    return DoctorReport(
        hosts={node: f"host{node}" for node in range(hosts)},
        num_nodes=num_nodes,
        findings=[*judged, *findings],
        facts={},
        links=links,
        num_local=1,
        seconds=12.5,
    )


def with_fault(links, node, card, **fault):
    hit = [card == link.source_nic and node in (link.source, link.target) for link in links]
    return [replace(link, **fault) if is_hit else link for link, is_hit in zip(links, hit, strict=True)]


def test_a_slow_card_and_one_that_loses_large_packets_are_named_with_their_nodes():
    links = with_fault(links_of(4, "net1", "net2"), 2, "net2", gbit_s=1.0)
    links = with_fault(links, 1, "net1", arriving_bytes=1500, gbit_s=0.0)
    report = report_of(links)
    assert [str(outlier) for outlier in report.outliers] == [
        "node 1 (host1) net1: loses large packets",
        "node 2 (host2) net2: is slow",
    ]
    assert hosts_to_leave_out(report.outliers) == ["host1", "host2"]
    assert report.exit_code == 3
    assert "  node 2 (host2) net2: is slow" in list(as_text(report))
    assert as_json(report)["outliers"][1] == {
        "node": 2, "host": "host2", "card": "net2", "why": "is slow",
    }  # fmt: skip


def test_a_fault_of_every_card_or_of_one_pair_is_nobodys():
    everywhere = [replace(link, arriving_bytes=1400) for link in links_of(4, "net1")]
    pair = [
        replace(link, gbit_s=1.0) if {link.source, link.target} == {0, 1} else link
        for link in links_of(4, "net1")
    ]
    for links in (everywhere, pair):
        report = report_of(links)
        assert report.outliers == []
        assert report.exit_code == 1


def test_a_node_that_is_missing_or_alone_has_a_red_line_is_left_out():
    links = [link for link in links_of(4, "net1") if 3 not in (link.source, link.target)]
    missing = replace(red("Node 3 did not come", remedy="Start it.", check="nodes"), nodes=(BETWEEN,))
    broken = replace(red("One is lost", remedy="Reset it.", check="gpus"), nodes=(1,))
    report = report_of(links, missing, broken, hosts=3)
    assert [str(outlier) for outlier in report.outliers] == [
        "node 1 (host1): gpus: One is lost",
        "node 3 (unknown host): did not report",
    ]
    assert hosts_to_leave_out(report.outliers) == ["host1"]
    assert report.exit_code == 3


def test_what_no_node_explains_is_not_mended_by_leaving_one_out():
    links = with_fault(links_of(4, "net1"), 2, "net1", fault=LinkFault.DEAD, gbit_s=0.0)
    differing = replace(red("torch differs", remedy="Use one.", check="sameness"), nodes=(BETWEEN,))
    assert report_of(links).exit_code == 3
    assert report_of(links, differing).exit_code == 1
    assert report_of(links_of(4, "net1")).exit_code == 0


def test_a_far_link_is_a_yellow_line():
    links = with_fault(links_of(4, "net1"), 2, "net1", round_trip_s=0.02)
    (far,) = [finding for finding in judge_links([], links) if "others have 0.10 ms" in finding.what]
    assert far.what.startswith("net1 of node 2: ")
    assert report_of(links).exit_code == 0
