"""One collective of all nodes, as a run would make it: with the variables in force, once every pair is sound.

Pairs are measured between addresses that the doctor names. A run lets gloo choose: by GLOO_SOCKET_IFNAME,
else by what the host's name resolves to, which may be the loopback. Only a real group shows that.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from penstock.core import clock
from penstock.core.units import mib
from penstock.doctor.finding import Finding, green, red
from penstock.doctor.link import Link
from penstock.doctor.party import Party

CHECK = "collective"

log = logging.getLogger(__name__)

_SECONDS = 0.5
_SOURCE = re.compile(r"\[/\S+\] ")  # where in gloo it was raised
_LEAST_BYTES, _MOST_BYTES = 2**16, 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One node's part in the collective."""

    num_bytes: int
    """That were reduced."""
    seconds: float = 0.0
    error: str = ""


def is_worth_trying(links: Sequence[Link], *, num_nodes: int) -> bool:
    """Whether every pair of nodes was measured, and every link is sound."""
    pairs = {(link.source, link.target) for link in links}
    return num_nodes > 1 and len(pairs) == num_nodes * (num_nodes - 1) and all(link.gbit_s for link in links)


def size_for(links: Sequence[Link]) -> int:
    """Return how many bytes to reduce, so that the slowest link is at work for a moment."""
    slowest = min(link.gbit_s for link in links)
    return min(_MOST_BYTES, max(_LEAST_BYTES, int(slowest * 1e9 / 8 * _SECONDS)))


def reduce_together(party: Party, *, num_bytes: int, timeout_s: float) -> Outcome:
    """Make a group of all members and add up some bytes; every member must call it."""
    nodes = [member.node for member in party.members]
    content = torch.ones(num_bytes // 4)
    gloo: Any = ProcessGroupGloo  # torch's stubs lack what it inherits
    wait = timedelta(seconds=timeout_s)
    try:
        group = gloo(PrefixStore("all", party.store), nodes.index(party.me.node), len(nodes), wait)
        try:
            group.barrier().wait(wait)
            start = clock.monotonic()
            group.allreduce([content]).wait(wait)
            return Outcome(num_bytes=num_bytes, seconds=clock.monotonic() - start)
        finally:
            group.shutdown()
    except RuntimeError as error:
        log.debug("collective failed", exc_info=True)
        return Outcome(num_bytes=num_bytes, error=_SOURCE.sub("", str(error).splitlines()[0]))


def judge(outcomes: Mapping[int, Outcome]) -> Iterator[Finding]:
    """Say whether all nodes came through it, and how fast.

    Args:
        outcomes: by node; empty: it was not tried, because a link is not sound.
    """
    failed = [node for node, outcome in outcomes.items() if outcome.error]
    if failed:
        yield red(
            CHECK,
            f"Every pair is sound, and a collective of all fails, on node {failed[0]} with: "
            f"{outcomes[failed[0]].error}",
            remedy="Set GLOO_SOCKET_IFNAME as advised above; else gloo takes the interface of the host's "
            "name: let /etc/hosts give that an address the others reach.",
        )
    elif outcomes:
        slowest = max(outcomes.values(), key=lambda outcome: outcome.seconds)
        share = 2 * (len(outcomes) - 1) / len(outcomes)  # of the bytes, that a ring sends from each
        speed = share * slowest.num_bytes * 8 / max(slowest.seconds, 1e-9) / 1e9
        yield green(
            CHECK,
            f"{mib(slowest.num_bytes)} added up over {len(outcomes)} in {slowest.seconds:.2f} s: "
            f"{speed:.3g} Gbit/s from each",
        )
