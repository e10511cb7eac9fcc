"""Count what a rank sends in a step, by mesh axis, from what the collectives of the step were; pure.

Ring and pairwise algorithms, as NCCL and gloo use them for large tensors: a rank of n sends (n - 1) / n of
what it gathers in the end, scatters or exchanges, and twice that of what it reduces for all (Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009). Gloo has no reduce-scatter of its own: FSDP's
is recorded, and counted, as the all-reduce that it is, and `ethernet.overlap` exchanges gradients instead.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that this rank took part in."""

    group: str
    """Name of its process group."""
    kind: str
    """all_gather, all_reduce, reduce_scatter, all_to_all, broadcast, ..."""
    num_bytes: int
    """Of its input on this rank for a gather, else of the larger side, input or output."""


_ROUNDS = {"all_reduce": 2}
"""How often a collective passes its bytes around; once, if it is not listed."""
_NOTHING = frozenset({"barrier", "send", "recv", "coalesced"})
"""Those that send nothing, and what goes from one rank to one other: counted where it is sent, if it is."""


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
    """Return the bytes a rank sent on each axis.

    Args:
        axes: process group -> axis; a group that is not listed is that of all ranks.
        sizes: process group -> its ranks; of all ranks under "".
        messages: process group -> bytes sent in it from rank to rank, beside its collectives.
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
