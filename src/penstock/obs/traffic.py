"""Traffic of a step: bytes a rank sends, by mesh axis, computed from the step's collectives. Pure functions.

For ring and pairwise algorithms, as NCCL and gloo use them for large tensors: a rank of n sends (n - 1) / n
of what it gathers, scatters or exchanges in total, and twice that for an all-reduce (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms", JPDC 2009). Gloo has no reduce-scatter of its own: FSDP's is
recorded, and counted, as the all-reduce that it is, and `ethernet.overlap` exchanges gradients instead.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Collective:
    """Collective that this rank took part in."""

    group: str
    """Name of its process group."""
    kind: str
    """all_gather, all_reduce, reduce_scatter, all_to_all, broadcast, ..."""
    num_bytes: int
    """Bytes of its input on this rank for a gather, else of the larger of input and output."""


_ROUNDS = {"all_reduce": 2}
"""Times that a collective passes its bytes around; 1 if it is not listed."""
_NOTHING = frozenset({"barrier", "send", "recv", "coalesced"})
"""Collectives that send nothing, or are counted as messages from rank to rank."""


def sent_bytes(collective: Collective, *, num_ranks: int) -> int:
    """Return the bytes that a rank sends for a collective, on average over its group.

    >>> sent_bytes(Collective("0", "all_gather", 1000), num_ranks=4)
    3000
    >>> sent_bytes(Collective("0", "all_reduce", 4000), num_ranks=4)
    6000
    """
    if collective.kind in _NOTHING:
        return 0
    if collective.kind == "all_gather":
        return collective.num_bytes * (num_ranks - 1)
    return _ROUNDS.get(collective.kind, 1) * collective.num_bytes * (num_ranks - 1) // num_ranks


def by_axis(
    collectives: Iterable[Collective],
    *,
    axes: Mapping[str, str],
    sizes: Mapping[str, int],
    messages: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Return the bytes that a rank sent on each axis.

    Args:
        axes: process group -> axis; other groups count as the group of all ranks.
        sizes: process group -> its number of ranks; "" -> the number of all ranks.
        messages: process group -> bytes sent in it from rank to rank, besides its collectives.
    """
    found: dict[str, int] = {}
    for group, number in (messages or {}).items():
        axis = axes.get(group, "all")
        found[axis] = found.get(axis, 0) + number
    for collective in collectives:
        axis = axes.get(collective.group, "all")
        size = sizes.get(collective.group, sizes[""])
        found[axis] = found.get(axis, 0) + sent_bytes(collective, num_ranks=size)
    return {axis: number for axis, number in found.items() if number}
