"""What is said of links that were measured: who is at fault."""

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.doctor.checks.check import Finding, Level
from penstock.doctor.judge_links import Endpoint, culprits, judge_links, second_opinions, slow_crossings
from penstock.doctor.link import LinkFault, LinkMeasurement, better
from penstock.doctor.node_group import End, Member, rounds


def links_of(num_nodes: int, *nics: str) -> list[LinkMeasurement]:
    """Every direction between nodes, all sound."""
    return [
        LinkMeasurement(
            source=source,
            target=target,
            source_nic=nic,
            target_nic=nic,
            gbit_s=10.0,
            round_trip_s=1e-4,
            packet_bytes=1500,
            arriving_bytes=1500,
        )
        for source, target in permutations(range(num_nodes), 2)
        for nic in nics
    ]


def members_of(num_nodes: int, *nics: str, odd: dict[tuple[int, str], int] | None = None) -> list[Member]:
    ends = [
        tuple(
            End(
                name=nic,
                address=f"10.0.{i}.{n}",
                network=f"10.0.{i}.0/24",
                mtu=(odd or {}).get((n, nic), 1500),
            )
            for i, nic in enumerate(nics)
        )
        for n in range(num_nodes)
    ]
    return [Member(node=n, host=f"host{n}", ends=theirs) for n, theirs in enumerate(ends)]


def changed(
    links: list[LinkMeasurement], which: Callable[[LinkMeasurement], bool], **over: object
) -> list[LinkMeasurement]:
    return [replace(link, **over) if which(link) else link for link in links]


def touches(link: LinkMeasurement, node: int, nic: str) -> bool:
    return nic == link.source_nic and node in (link.source, link.target)


def reds(links: list[LinkMeasurement], num_nodes: int) -> list[Finding]:
    members = members_of(num_nodes, "eth0", "eth1")
    return [finding for finding in judge_links(members, links) if finding.level is not Level.GREEN]


def test_sound_links_are_summed_up_and_nothing_is_said_against_them() -> None:
    found = list(judge_links(members_of(3, "eth0"), links_of(3, "eth0")))
    assert {finding.level for finding in found} == {Level.GREEN}
    assert found[0].what == "eth0: 10 Gbit/s to 10 Gbit/s one way, round trip 0.10 ms, 6 directions"


@given(nodes=st.integers(3, 7), culprit=st.integers(0, 6), nic=st.sampled_from(["eth0", "eth1"]))
def test_an_interface_whose_links_are_all_bad_is_the_one_that_is_named(
    nodes: int, culprit: int, nic: str
) -> None:
    culprit %= nodes
    links = links_of(nodes, "eth0", "eth1")
    bad = {link for link in links if touches(link, culprit, nic)}
    assert culprits(links, bad) == ([Endpoint(culprit, nic)], [])


@given(nodes=st.integers(3, 6), data=st.data())
def test_every_bad_link_is_explained_by_an_interface_or_a_pair(nodes: int, data: st.DataObject) -> None:
    links = links_of(nodes, "eth0")
    bad = set(data.draw(st.lists(st.sampled_from(links), max_size=8)))
    places, pairs = culprits(links, bad)
    for link in bad:
        ends = {Endpoint(link.source, link.source_nic), Endpoint(link.target, link.target_nic)}
        assert ends & set(places) or tuple(sorted(ends)) in pairs
    assert bool(bad) == bool(places or pairs)


def test_a_dead_interface_is_named_once() -> None:
    links = changed(
        links_of(4, "eth0", "eth1"), lambda link: touches(link, 2, "eth1"), fault=LinkFault.DEAD, gbit_s=0.0
    )
    assert [finding.what for finding in reds(links, 4)] == ["Nothing passes to or from eth1 of node 2"]


def test_one_dead_link_among_several_is_named_as_a_pair() -> None:
    links = changed(
        links_of(4, "eth0"),
        lambda link: {link.source, link.target} == {1, 3},
        fault=LinkFault.DEAD,
        gbit_s=0.0,
    )
    assert [finding.what for finding in reds(links, 4)] == [
        "Nothing passes between eth0 of node 1 and eth0 of node 3"
    ]


def test_with_two_nodes_the_pair_is_named_since_either_may_be_at_fault() -> None:
    links = changed(links_of(2, "eth0", "eth1"), lambda link: link.source_nic == "eth1", gbit_s=1.0)
    (found,) = reds(links, 2)
    assert found.what.startswith("eth1 of node 0 and eth1 of node 1: 1 Gbit/s")
    assert "fastest link has 10 Gbit/s" in found.what


@pytest.mark.parametrize(
    ("share", "level"), [(0.2, Level.RED), (0.49, Level.RED), (0.6, Level.YELLOW), (0.8, None)]
)
def test_an_interface_that_sends_slowly_is_named_by_how_much(share: float, level: Level | None) -> None:
    slow = changed(
        links_of(3, "eth0"), lambda link: (link.source, link.source_nic) == (1, "eth0"), gbit_s=10 * share
    )
    found = reds(slow, 3)
    assert [finding.level for finding in found] == ([level] if level else [])
    assert all("eth0 of node 1:" in finding.what and finding.remedy for finding in found)


def test_links_within_one_machine_are_not_called_slow() -> None:
    links = changed(links_of(3, "lo"), lambda link: link.source == 1, gbit_s=0.1)
    assert not [f for f in judge_links(members_of(3, "lo"), links) if f.level is not Level.GREEN]


def test_packets_that_get_lost_are_named_with_the_size_that_arrives() -> None:
    links = changed(links_of(3, "eth0"), lambda link: touches(link, 1, "eth0"), arriving_bytes=1400)
    (found,) = reds(links, 3)
    assert found.what.startswith("Packets of 1,500 bytes get lost at eth0 of node 1, those of up to 1,400")


def test_a_fault_of_all_is_said_once() -> None:
    links = changed(links_of(3, "eth0"), lambda _: True, arriving_bytes=1400)
    (found,) = reds(links, 3)
    assert "eth0 of every node" in found.what


def test_transfers_that_hang_are_told_from_dead_links() -> None:
    links = changed(
        links_of(3, "eth0"),
        lambda link: touches(link, 1, "eth0"),
        fault=LinkFault.STALLS,
        arriving_bytes=0,
        gbit_s=0.0,
    )
    (found,) = reds(links, 3)
    assert found.what == "Small messages pass at eth0 of node 1, and transfers hang"


def test_packets_of_which_nothing_is_known_are_not_called_lost() -> None:
    assert reds(changed(links_of(3, "eth0"), lambda _: True, arriving_bytes=0), 3) == []


@pytest.mark.parametrize(
    ("ahead_s", "level"), [(0.0, Level.GREEN), (0.3, Level.YELLOW), (-90.0, Level.RED), (0.09, Level.GREEN)]
)
def test_clocks_are_held_against_that_of_the_lowest_node(ahead_s: float, level: Level) -> None:
    links = links_of(3, "eth0")
    links = changed(links, lambda link: link.target == 2, clock_ahead_s=ahead_s)
    links = changed(links, lambda link: link.source == 2, clock_ahead_s=-ahead_s)
    (found,) = [f for f in judge_links(members_of(3, "eth0"), links) if f.check == "clocks"]
    assert found.level is level
    assert level is Level.GREEN or "The clock of node 2 is" in found.what


def test_a_clock_is_not_blamed_for_a_slow_round_trip() -> None:
    links = changed(links_of(2, "eth0"), lambda link: link.target == 1, clock_ahead_s=0.5, round_trip_s=1.0)
    assert not [f for f in judge_links(members_of(2, "eth0"), links) if f.check == "clocks" and f.remedy]


def test_another_mtu_is_named_even_if_tcp_copes() -> None:
    found = list(judge_links(members_of(3, "eth0", "eth1", odd={(2, "eth1"): 1400}), []))
    assert [finding.what for finding in found] == [
        "eth1 of node 2 has an MTU of 1,400, where others have 1,500: TCP copes, RDMA and datagrams do not"
    ]
    assert found[0].remedy == "On node 2: ip link set eth1 mtu 1500"


def test_a_node_that_lacks_an_interface_is_told_of() -> None:
    members = members_of(3, "eth0", "eth1")
    members[1] = replace(members[1], ends=members[1].ends[1:])
    (found,) = judge_links(members, [])
    assert "2 on node 0, 1 on node 1, 2 on node 2" in found.what


def test_slow_links_are_measured_again() -> None:
    links = changed(links_of(3, "eth0"), lambda link: (link.source, link.target) == (2, 0), gbit_s=1.0)
    assert slow_crossings(links) == [(Endpoint(0, "eth0"), Endpoint(2, "eth0"))]
    assert slow_crossings([]) == []


def test_of_two_measurements_the_better_counts_and_a_fault_is_the_worst() -> None:
    first, *_ = links_of(2, "eth0")
    fast, stalled = replace(first, gbit_s=12.0), replace(first, gbit_s=20.0, fault=LinkFault.STALLS)
    assert better(first, fast) == better(fast, first) == better(stalled, fast) == fast


@pytest.mark.parametrize(
    ("share", "level"), [(0.0, None), (0.001, None), (0.005, Level.YELLOW), (0.05, Level.RED)]
)
def test_an_interface_that_loses_packets_is_named_with_their_share(share: float, level: Level | None) -> None:
    links = changed(links_of(3, "eth0"), lambda link: link.source == 1, lost_share=share)
    found = [finding for finding in judge_links(members_of(3, "eth0"), links) if "get lost" in finding.what]
    assert [finding.level for finding in found] == ([] if level is None else [level])
    assert all(finding.what.startswith("eth0 of node 1: ") for finding in found)


def asked_after(num_nodes: int, dead: int, measured: set[frozenset[int]]) -> tuple[list[Endpoint], int]:
    """Return the culprits once second opinions were heard, and how many were."""
    members = members_of(num_nodes, "eth0", "eth1")

    def seen(pairs: set[frozenset[int]]) -> list[LinkMeasurement]:
        links = [link for link in links_of(num_nodes, "eth0", "eth1") if {link.source, link.target} in pairs]
        return changed(links, lambda link: touches(link, dead, "eth0"), fault=LinkFault.DEAD, gbit_s=0.0)

    asked = second_opinions(members, seen(measured))
    links = seen(measured | {frozenset((one.node, other.node)) for one, other in asked})
    places, _ = culprits(links, {link for link in links if link.fault is LinkFault.DEAD})
    return places, len(asked)


@given(st.integers(3, 9), st.data())
def test_a_dead_interface_has_a_name_though_the_time_was_over_after_one_turn(
    nodes: int, data: st.DataObject
) -> None:
    dead = data.draw(st.integers(0, nodes - 1))
    turn = data.draw(st.sampled_from(rounds(nodes)))
    measured = {frozenset(pair) for pair in turn}
    places, asked = asked_after(nodes, dead, measured)
    if any(dead in pair for pair in turn):
        assert places == [Endpoint(dead, "eth0")]
        assert asked <= 2


def test_sound_links_and_two_nodes_ask_for_no_second_opinion() -> None:
    assert second_opinions(members_of(3, "eth0"), links_of(3, "eth0")) == []
    dead = changed(links_of(2, "eth0"), lambda _: True, fault=LinkFault.DEAD, gbit_s=0.0)
    assert second_opinions(members_of(2, "eth0"), dead) == []


def test_a_fault_of_all_asks_for_few_second_opinions() -> None:
    pairs = rounds(64)[0]
    links = [link for link in links_of(64, "eth0") if tuple(sorted((link.source, link.target))) in pairs]
    dead = changed(links, lambda _: True, fault=LinkFault.DEAD, gbit_s=0.0)
    assert len(second_opinions(members_of(64, "eth0"), dead)) == 4
