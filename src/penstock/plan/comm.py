"""Time of collectives: rings and trees over nodes, with a latency per message. Pure functions.

A ring over n ranks sends (n - 1) / n of the bytes through every link, in n - 1 messages; an all-reduce is two
rounds of it or, if latency dominates, two trees over the nodes (Patarasuk and Yuan, JPDC 2009; Sanders et
al., 2009). If a group has several ranks in a node, a ring enters and leaves each node once, so the node's
NICs carry the bytes once, whatever the number of its ranks; groups that share a node share its NICs.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from penstock.parallel.layout import RankLayout
from penstock.plan.hardware import Cluster

Link = Literal["none", "node", "network"]
"""Link of a collective: the links inside one node, or the network."""


class Cost(NamedTuple):
    """Cost of one collective."""

    seconds: float
    link: Link
    node_bytes: float
    """Bytes that a node sends through its NICs meanwhile, for all groups that share them."""
    inside_s: float
    """Seconds it would take on the links inside a node: how long it uses the device's memory bandwidth."""


FREE = Cost(0.0, "none", 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class GroupTopology:
    """Group of communicating ranks, and its distribution over nodes."""

    ranks: int
    nodes: int
    alike: int
    """Number of groups of this kind with ranks in the same node, this one included."""


def group(ranks: int, *, stride: int, devices_per_node: int) -> GroupTopology:
    """Return the topology of a group of ranks that are `stride` apart.

    >>> group(4, stride=2, devices_per_node=4)
    GroupTopology(ranks=4, nodes=2, alike=2)
    """
    here = max(1, min(ranks, devices_per_node // stride))
    return GroupTopology(ranks, math.ceil(ranks / here), max(1, devices_per_node // here))


def groups_of(layout: RankLayout, cluster: Cluster) -> dict[str, GroupTopology]:
    """Return the groups of a layout by axis, with `shard` and `context` as one (they share parameters)."""
    per_node = cluster.devices_per_node
    sharded = layout.shard * layout.context
    strides = {
        "tensor": (layout.tensor, 1),
        "context": (layout.context, layout.tensor),
        "shard": (sharded, layout.tensor),
        "replicate": (layout.replicate, layout.tensor * sharded),
        "pipeline": (layout.pipeline, layout.tensor * sharded * layout.replicate),
    }
    return {axis: group(n, stride=s, devices_per_node=per_node) for axis, (n, s) in strides.items()}


def ring(
    num_bytes: float, over: GroupTopology, cluster: Cluster, *, rounds: int = 1, by_messages: bool = False
) -> Cost:
    """Return the cost of an all-gather or a reduce-scatter, or with two rounds of an all-reduce.

    Args:
        num_bytes: bytes of the whole tensor: each rank has it at the end, or had it at the beginning.
        by_messages: point-to-point messages, if each rank has a node to itself: equal bytes, but faster on
            CPUs.
    """
    if over.ranks == 1 or not num_bytes:
        return FREE
    moved = rounds * num_bytes * (over.ranks - 1) / over.ranks
    inside, outside = _rates(over, cluster, by_messages=by_messages)
    slow = max(moved / inside if over.ranks > over.nodes else 0.0, moved / outside if over.nodes > 1 else 0.0)
    hops = (over.ranks - over.nodes) * HOP_S + (over.nodes * cluster.latency_s if over.nodes > 1 else 0.0)
    seconds = slow + rounds * hops + _copying(moved, cluster)
    return _cost(seconds, moved, over, cluster)


def all_reduce(num_bytes: float, over: GroupTopology, cluster: Cluster) -> Cost:
    """Return the cost of an all-reduce: the faster of a ring and two trees."""
    by_ring = ring(num_bytes, over, cluster, rounds=2)
    if by_ring.link != "network":
        return by_ring
    moved = 2 * num_bytes
    inside, outside = _rates(over, cluster)
    depth = 2 * math.ceil(math.log2(over.nodes)) * cluster.latency_s + 2 * over.ranks / over.nodes * HOP_S
    slow = max(moved / outside, moved / inside if over.ranks > over.nodes else 0.0)
    by_tree = _cost(slow + depth + _copying(moved, cluster), moved, over, cluster)
    return min(by_ring, by_tree)


def send(num_bytes: float, over: GroupTopology, cluster: Cluster) -> Cost:
    """Return the cost of a message to a neighbour in the group while all groups send theirs."""
    if over.ranks == 1:
        return FREE
    if over.nodes == 1:
        return _cost(num_bytes / _rates(over, cluster)[0] + HOP_S, num_bytes, over, cluster)
    seconds = num_bytes / _rates(over, cluster)[1] + cluster.latency_s + _copying(num_bytes, cluster)
    return _cost(seconds, num_bytes, over, cluster)


def _rates(over: GroupTopology, cluster: Cluster, *, by_messages: bool = False) -> tuple[float, float]:
    """Return bytes per second inside a node, and between nodes for one of the groups that share NICs."""
    gloo = MESSAGES_SHARE if by_messages and over.ranks == over.nodes else GLOO_SHARE
    used = gloo if cluster.device.architecture == "cpu" else 1.0
    inside = LINK_SHARE * cluster.device.link_gb_s * 1e9 or math.inf
    return inside, used * cluster.node_bytes_s / over.alike


def _copying(moved: float, cluster: Cluster) -> float:
    device = cluster.device
    return device.operation_us / 1e6 + (moved / (device.copy_gb_s * 1e9) if device.copy_gb_s else 0.0)


def _cost(seconds: float, moved: float, over: GroupTopology, cluster: Cluster) -> Cost:
    inside_s = moved / _rates(over, cluster)[0]
    if over.nodes == 1:
        return Cost(seconds, "node", 0.0, inside_s)
    return Cost(seconds, "network", moved * over.alike, inside_s)


LINK_SHARE: Final = 0.8
"""Share of NVLink's or PCIe's speed that collectives reach (nccl-tests: 230 to 240 of 300 GB/s on A100,
360 of 450 on H100)."""
GLOO_SHARE: Final = 0.87
"""Share of TCP's speed that gloo reaches, whose ranks send and receive in rounds; *fitted*, as a CPU's
`copy_gb_s`, to three steps of stock FSDP2 on emulated networks (`benchmarks/data/netlab_naive.json`)."""
MESSAGES_SHARE: Final = 0.96
"""Share of TCP's speed that gloo's messages reach with all receives posted first: 1.04 times the wire's time,
measured at 500 Mbit/s (docs/explanation/emulated-networks.md)."""
HOP_S: Final = 2e-6
"""Latency of a message between devices of a node: a ring of 8 A100 takes some 25 us for a few bytes."""
