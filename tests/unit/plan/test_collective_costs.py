"""Costs of collectives against arithmetic by hand."""

import pytest

from penstock.devices.figures import DEVICES
from penstock.parallel.layout import RankLayout
from penstock.plan.comm import (
    FREE,
    GLOO_SHARE,
    HOP_S,
    LINK_SHARE,
    MESSAGES_SHARE,
    all_reduce,
    group,
    groups_of,
    ring,
    send,
)
from penstock.plan.hardware import Cluster

VELA = Cluster(
    nodes=4, devices_per_node=8, device=DEVICES["A100-80GB"], nics=2, nic_gbit_s=100, latency_us=50
)
NETWORK = 2 * 60e9 / 8


def test_groups_lie_in_nodes_as_ranks_are_counted():
    groups = groups_of(RankLayout(replicate=2, shard=8, tensor=2), VELA)
    assert (groups["tensor"].nodes, groups["tensor"].alike) == (1, 4)
    assert (groups["shard"].nodes, groups["shard"].alike) == (2, 2)
    assert (groups["replicate"].nodes, groups["replicate"].alike) == (2, 8)


def test_a_gather_over_nodes_sends_the_whole_once_through_each_node():
    cost = ring(1e9, group(32, stride=1, devices_per_node=8), VELA)
    assert cost.link == "network"
    assert cost.node_bytes == pytest.approx(1e9 * 31 / 32)
    assert cost.seconds == pytest.approx(1e9 * 31 / 32 / NETWORK + 28 * HOP_S + 4 * 50e-6)


def test_a_gather_in_a_node_uses_no_network():
    cost = ring(1e9, group(8, stride=1, devices_per_node=8), VELA)
    assert (cost.link, cost.node_bytes) == ("node", 0.0)
    assert cost.seconds == pytest.approx(1e9 * 7 / 8 / (LINK_SHARE * 300e9) + 7 * HOP_S)


def test_groups_that_share_a_node_share_its_network():
    alone = ring(1e9, group(32, stride=1, devices_per_node=8), VELA)
    shared = ring(1e9, group(4, stride=8, devices_per_node=8), VELA)
    assert shared.node_bytes == pytest.approx(8e9 * 3 / 4)
    assert shared.seconds > 6 * alone.seconds


def test_few_bytes_over_many_nodes_go_by_tree_and_for_many_it_does_not_matter():
    wide = Cluster(nodes=64, devices_per_node=1, device=DEVICES["A100-80GB"], latency_us=50)
    over = group(64, stride=1, devices_per_node=1)
    small, large = all_reduce(1e3, over, wide), all_reduce(1e9, over, wide)
    assert small.seconds < ring(1e3, over, wide, rounds=2).seconds / 4
    assert large.seconds == pytest.approx(ring(1e9, over, wide, rounds=2).seconds, rel=0.01)


def test_one_rank_alone_sends_nothing():
    alone = group(1, stride=1, devices_per_node=8)
    assert ring(1e9, alone, VELA) == all_reduce(1e9, alone, VELA) == send(1e9, alone, VELA) == FREE


def test_what_a_cpu_copies_into_sockets_takes_its_time():
    host = Cluster(nodes=2, devices_per_node=1, device=DEVICES["CPU"], nic_gbit_s=1, latency_us=0)
    cost = ring(1e8, group(2, stride=1, devices_per_node=1), host)
    assert cost.seconds == pytest.approx(5e7 / (GLOO_SHARE * 0.95e9 / 8) + 5e7 / 0.6e9 + 200e-6)


def test_messages_use_more_of_a_link_where_each_rank_has_a_node():
    host = Cluster(nodes=2, devices_per_node=1, device=DEVICES["CPU"], nic_gbit_s=1, latency_us=0)
    over = group(2, stride=1, devices_per_node=1)
    saved = ring(1e8, over, host).seconds - ring(1e8, over, host, by_messages=True).seconds
    assert saved == pytest.approx(5e7 / (0.95e9 / 8) * (1 / GLOO_SHARE - 1 / MESSAGES_SHARE))
    two = group(4, stride=1, devices_per_node=2)
    hosts = Cluster(nodes=2, devices_per_node=2, device=DEVICES["CPU"], nic_gbit_s=1, latency_us=0)
    assert ring(1e8, two, hosts, by_messages=True) == ring(1e8, two, hosts)
