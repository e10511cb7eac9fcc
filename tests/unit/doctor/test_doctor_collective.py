"""When all nodes try a collective together, of how much, and what is said of it."""

from dataclasses import replace
from itertools import permutations

import pytest

from penstock.doctor.checks.check import Level
from penstock.doctor.collective import CollectiveResult, is_worth_trying, judge, size_for
from penstock.doctor.link import LinkMeasurement

LINKS = [
    LinkMeasurement(source=a, target=b, source_nic="eth0", target_nic="eth0", gbit_s=1.0)
    for a, b in permutations(range(3), 2)
]


def test_it_is_tried_only_where_every_pair_was_measured_and_is_sound() -> None:
    assert is_worth_trying(LINKS, num_nodes=3)
    assert not is_worth_trying(LINKS[1:], num_nodes=3)
    assert not is_worth_trying([replace(LINKS[0], gbit_s=0.0), *LINKS[1:]], num_nodes=3)
    assert not is_worth_trying([], num_nodes=1)


@pytest.mark.parametrize(("slowest", "size"), [(1.0, 62_500_000), (1e-6, 2**16), (400.0, 2**26)])
def test_it_keeps_the_slowest_link_at_work_for_a_moment(slowest: float, size: int) -> None:
    links = [replace(LINKS[0], gbit_s=slowest), replace(LINKS[1], gbit_s=500.0)]
    assert size_for(links) == size


def test_one_that_passes_is_told_with_what_each_node_sends() -> None:
    (found,) = judge({node: CollectiveResult(num_bytes=2**26, seconds=0.1 * node) for node in range(4)})
    assert found.level is Level.GREEN
    assert found.what == "64.0 MiB added up over 4 in 0.30 s: 2.68 Gbit/s from each"


def test_one_that_fails_over_sound_links_is_the_choice_of_interface() -> None:
    (found,) = judge(
        {
            0: CollectiveResult(num_bytes=8, seconds=1.0),
            1: CollectiveResult(num_bytes=8, error="Connect timeout"),
        }
    )
    assert found.level is Level.RED
    assert "on node 1 with: Connect timeout" in found.what
    assert "GLOO_SOCKET_IFNAME" in found.remedy


def test_one_that_was_not_tried_is_not_spoken_of() -> None:
    assert list(judge({})) == []
