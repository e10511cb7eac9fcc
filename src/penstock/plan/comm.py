"""How long collectives take: rings and trees over nodes, with a latency for every message; pure.

A ring over n ranks sends (n - 1) / n of the bytes through every link, and takes n - 1 messages; an all-reduce
is two rounds of it, or, where latency weighs more, two trees over the nodes (Patarasuk and Yuan, JPDC 2009;
Sanders et al., 2009). Where a group has several ranks in a node, a ring enters and leaves each node once, so
the node's NICs carry the bytes once, whatever the number of its ranks; groups that share a node share NICs.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.parallel.layout import Layout
from penstock.plan.constants import GLOO_SHARE, HOP_S, LINK_SHARE, MESSAGES_SHARE
from penstock.plan.hardware import Cluster

Link = Literal["none", "node", "network"]
"""What a collective goes through: the links of one node, or the network."""


class Cost(NamedTuple):
    """One collective."""

    seconds: float
    link: Link
    node_bytes: float
    """That a node sends through its NICs meanwhile, for all groups that use them alike."""
    inside_s: float
    """What it would take through the links of a node: how long it keeps the device's memory busy."""


FREE = Cost(0.0, "none", 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that talk, and how they lie in nodes."""

    ranks: int
    nodes: int
    alike: int
    """Groups of this kind with ranks in the same node, this one included."""


def group(ranks: int, *, stride: int, devices_per_node: int) -> Group:
    """Place a group of ranks that are `stride` apart.

    >>> group(4, stride=2, devices_per_node=4)
    Group(ranks=4, nodes=2, alike=2)
    """
    here = max(1, min(ranks, devices_per_node // stride))
    return Group(ranks, math.ceil(ranks / here), max(1, devices_per_node // here))


def groups_of(layout: Layout, cluster: Cluster) -> dict[str, Group]:
    """Return the groups of a layout: by axis, with `shard` and `context` as one (they share parameters)."""
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
    num_bytes: float, over: Group, cluster: Cluster, *, rounds: int = 1, by_messages: bool = False
) -> Cost:
    """Return the cost of an all-gather or a reduce-scatter, or with two rounds of an all-reduce.

    Args:
        num_bytes: of the whole: what each rank has in the end, or had in the beginning.
        by_messages: ranks write to each other, where each has a node for itself: as much, but on CPUs faster.
    """
    if over.ranks == 1 or not num_bytes:
        return FREE
    moved = rounds * num_bytes * (over.ranks - 1) / over.ranks
    inside, outside = _rates(over, cluster, by_messages=by_messages)
    slow = max(moved / inside if over.ranks > over.nodes else 0.0, moved / outside if over.nodes > 1 else 0.0)
    hops = (over.ranks - over.nodes) * HOP_S + (over.nodes * cluster.latency_s if over.nodes > 1 else 0.0)
    seconds = slow + rounds * hops + _copying(moved, cluster)
    return _cost(seconds, moved, over, cluster)


def all_reduce(num_bytes: float, over: Group, cluster: Cluster) -> Cost:
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


def send(num_bytes: float, over: Group, cluster: Cluster) -> Cost:
    """Return the cost of a message to the neighbour of a group, as all its groups send theirs."""
    if over.ranks == 1:
        return FREE
    if over.nodes == 1:
        return _cost(num_bytes / _rates(over, cluster)[0] + HOP_S, num_bytes, over, cluster)
    seconds = num_bytes / _rates(over, cluster)[1] + cluster.latency_s + _copying(num_bytes, cluster)
    return _cost(seconds, num_bytes, over, cluster)


def _rates(over: Group, cluster: Cluster, *, by_messages: bool = False) -> tuple[float, float]:
    """Return bytes a second inside a node, and out of it for one of the groups alike."""
    gloo = MESSAGES_SHARE if by_messages and over.ranks == over.nodes else GLOO_SHARE
    used = gloo if cluster.device.architecture == "cpu" else 1.0
    inside = LINK_SHARE * cluster.device.link_gb_s * 1e9 or math.inf
    return inside, used * cluster.node_bytes_s / over.alike


def _copying(moved: float, cluster: Cluster) -> float:
    device = cluster.device
    return device.operation_us / 1e6 + (moved / (device.copy_gb_s * 1e9) if device.copy_gb_s else 0.0)


def _cost(seconds: float, moved: float, over: Group, cluster: Cluster) -> Cost:
    inside_s = moved / _rates(over, cluster)[0]
    if over.nodes == 1:
        return Cost(seconds, "node", 0.0, inside_s)
    return Cost(seconds, "network", moved * over.alike, inside_s)
