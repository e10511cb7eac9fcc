"""Collective check: one collective of all nodes as in a run, with its environment variables.

Pairs are measured between addresses chosen by the doctor. In a run gloo chooses: by GLOO_SOCKET_IFNAME, else
the address of the host's name, which may be the loopback. Only a real group tests that.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from penstock.core import clock
from penstock.core.log import EventLog
from penstock.core.units import mib
from penstock.doctor.checks.check import Finding, green, red
from penstock.doctor.link import LinkMeasurement
from penstock.doctor.node_group import NodeGroup

CHECK = "collective"

log = EventLog(__name__)

_SECONDS = 0.5
_SOURCE = re.compile(r"\[/\S+\] ")  # source location in gloo's messages
_MIN_BYTES, _MAX_BYTES = 2**16, 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveResult:
    """Result of the collective on one node."""

    num_bytes: int
    """Bytes that were reduced."""
    seconds: float = 0.0
    error: str = ""


def is_worth_trying(links: Sequence[LinkMeasurement], *, num_nodes: int) -> bool:
    """Return True if every pair of nodes was measured and every link is sound."""
    pairs = {(link.source, link.target) for link in links}
    return num_nodes > 1 and len(pairs) == num_nodes * (num_nodes - 1) and all(link.gbit_s for link in links)


def size_for(links: Sequence[LinkMeasurement]) -> int:
    """Return the bytes to reduce so that the slowest link is busy for a moment."""
    slowest = min(link.gbit_s for link in links)
    return min(_MAX_BYTES, max(_MIN_BYTES, int(slowest * 1e9 / 8 * _SECONDS)))


def reduce_together(party: NodeGroup, *, num_bytes: int, timeout_s: float) -> CollectiveResult:
    """All-reduce some bytes in a group of all members; every member must call it."""
    nodes = [member.node for member in party.members]
    content = torch.ones(num_bytes // 4)
    gloo: Any = ProcessGroupGloo  # torch's stubs lack the inherited methods
    wait = timedelta(seconds=timeout_s)
    try:
        group = gloo(PrefixStore("all", party.store), nodes.index(party.me.node), len(nodes), wait)
        try:
            group.barrier().wait(wait)
            start = clock.monotonic()
            group.allreduce([content]).wait(wait)
            return CollectiveResult(num_bytes=num_bytes, seconds=clock.monotonic() - start)
        finally:
            group.shutdown()
    except RuntimeError as error:
        log.debug("collective_failed", "The collective failed", exc_info=True)
        return CollectiveResult(num_bytes=num_bytes, error=_SOURCE.sub("", str(error).splitlines()[0]))


def judge(outcomes: Mapping[int, CollectiveResult]) -> Iterator[Finding]:
    """Judge whether all nodes completed the collective, and its speed.

    Args:
        outcomes: results by node; empty: not tried, because a link is not sound.
    """
    failed = [node for node, outcome in outcomes.items() if outcome.error]
    if failed:
        yield red(
            f"Every pair is sound, and a collective of all fails, on node {failed[0]} with: "
            f"{outcomes[failed[0]].error}",
            remedy="Set GLOO_SOCKET_IFNAME as advised above; else gloo takes the interface of the host's "
            "name: let /etc/hosts give that an address the others reach.",
        )
    elif outcomes:
        slowest = max(outcomes.values(), key=lambda outcome: outcome.seconds)
        share = 2 * (len(outcomes) - 1) / len(outcomes)  # of the bytes: sent by each node of a ring
        speed = share * slowest.num_bytes * 8 / max(slowest.seconds, 1e-9) / 1e9
        yield green(
            f"{mib(slowest.num_bytes)} added up over {len(outcomes)} in {slowest.seconds:.2f} s: "
            f"{speed:.3g} Gbit/s from each"
        )
