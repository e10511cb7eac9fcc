"""Functions of whole matrices on sharded ones: each matrix is brought to one rank, load-balanced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.parallel.slices import sharded_axes

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Block = tuple[slice, ...]
"""Position of a rank's shard in the whole matrix."""


@dataclass(frozen=True, slots=True)
class Holders:
    """Ranks that together hold one copy of a parameter."""

    group: dist.ProcessGroup
    """Process group of these ranks."""
    ranks: list[int]
    """Their ranks in the group."""
    coordinates: list[tuple[int, ...]]
    """Their coordinates on the mesh."""

    @property
    def me(self) -> int:
        """Index of this rank among them."""
        return self.ranks.index(self.group.rank())


def map_whole(
    function: Callable[[Tensor], Tensor],
    shards: Sequence[Tensor],
    parameters: Sequence[Tensor],
    *,
    cost: Callable[[torch.Size], float],
) -> list[Tensor]:
    """Apply a function to whole matrices; return this rank's shards of the results.

    Args:
        function: of one matrix; keeps shape and dtype.
        shards: this rank's shard of each matrix, all of one dtype.
        parameters: sharded as the matrices are. Every rank passes the same ones in the same order.
        cost: work for a shape; matrices are assigned to ranks so that the work is balanced.
    """
    results: list[Tensor | None] = [None] * len(shards)
    together: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}
    for i, parameter in enumerate(parameters):
        axes = sharded_axes(parameter)
        if axes:
            together.setdefault((cast("DTensor", parameter).device_mesh, axes), []).append(i)
        else:
            results[i] = function(shards[i])
    for (mesh, axes), members in together.items():
        holders = _holders(mesh, axes)
        some = [cast("DTensor", parameters[i]) for i in members]
        owners = deal([cost(one.shape) for one in some], num_owners=len(holders.ranks))
        found = _over_ranks(function, [shards[i] for i in members], some, owners=owners, holders=holders)
        for i, result in zip(members, found, strict=True):
            results[i] = result
    return cast(list[Tensor], results)


def _over_ranks(
    function: Callable[[Tensor], Tensor],
    shards: list[Tensor],
    parameters: "list[DTensor]",
    *,
    owners: list[int],
    holders: Holders,
) -> list[Tensor]:
    everyone = range(len(holders.ranks))
    order = sorted(range(len(shards)), key=lambda i: owners[i])  # order of the exchange: by owner
    mine = [i for i in order if owners[i] == holders.me]
    blocks = {i: _blocks(parameters[i], holders) for i in mine}
    sent = [sum(shards[i].numel() for i in order if owners[i] == to) for to in everyone]
    received = [sum(_numel(blocks[i][source]) for i in mine) for source in everyone]
    here = _exchange(torch.cat([shards[i].flatten() for i in order]), sent, received, holders)
    wholes = {i: here.new_empty(parameters[i].shape) for i in mine}
    places = [wholes[i][blocks[i][source]] for source in everyone for i in mine]
    for place, piece in zip(places, torch.split(here, [p.numel() for p in places]), strict=True):
        place.copy_(piece.view(place.shape))
    done = {i: function(whole) for i, whole in wholes.items()}
    pieces = [done[i][blocks[i][to]].flatten() for to in everyone for i in mine]
    back = _exchange(torch.cat([here.new_empty(0), *pieces]), received, sent, holders)
    parts = torch.split(back, [shards[i].numel() for i in order])
    results = {i: part.view(shards[i].shape) for i, part in zip(order, parts, strict=True)}
    return [results[i] for i in range(len(shards))]


def _exchange(values: Tensor, sent: list[int], received: list[int], holders: Holders) -> Tensor:
    """Send each holder its part of `values`; return what the holders sent, concatenated."""
    result = values.new_empty(sum(received))
    outgoing, incoming = [0] * holders.group.size(), [0] * holders.group.size()
    for rank, out, into in zip(holders.ranks, sent, received, strict=True):
        outgoing[rank], incoming[rank] = out * values.element_size(), into * values.element_size()
    dist.all_to_all_single(  # as bytes: gloo does not exchange bfloat16
        result.view(torch.uint8), values.view(torch.uint8), incoming, outgoing, group=holders.group
    )
    return result


def _blocks(parameter: "DTensor", holders: Holders) -> list[Block]:
    """Return the position of each holder's shard."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    blocks = []
    for coordinate in holders.coordinates:
        sizes, offsets = _compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh.shape, list(coordinate), parameter.placements
        )
        blocks.append(tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True)))
    return blocks


def _numel(block: Block) -> int:
    rows, columns = (one.stop - one.start for one in block)
    return int(rows * columns)


def _holders(mesh: DeviceMesh, axes: tuple[int, ...]) -> Holders:
    """Return the ranks that share one copy with this rank, in the order of the mesh."""
    here = mesh.get_coordinate()
    assert here is not None, "this rank is not on the mesh"
    lines = [range(mesh.size(axis)) if axis in axes else [here[axis]] for axis in range(mesh.ndim)]
    coordinates = sorted(product(*lines), key=lambda at: int(mesh.mesh[at]))
    everyone = tuple(int(mesh.mesh[at]) for at in coordinates)
    group = mesh.get_group(axes[0]) if len(axes) == 1 else _group_of(everyone, dist.group.WORLD)
    return Holders(group, [dist.get_group_rank(group, rank) for rank in everyone], coordinates)


@cache
def _group_of(ranks: tuple[int, ...], world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Create the process group of some ranks, once; only these ranks call it.

    A flattened mesh would have it, but torch then also gathers with it, and joins unevenly nested shards in
    the wrong order (torch 2.13).
    """
    del world  # cache key: another world has other groups
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), group
    return group


def deal(costs: Sequence[float], *, num_owners: int) -> list[int]:
    """Return the owner of each item: largest cost first, each to the least loaded owner.

    The largest load is at most 4/3 of the optimum (Graham, SIAM J. Appl. Math. 1969).

    >>> deal([5, 1, 4, 2], num_owners=2)
    [0, 0, 1, 1]
    """
    totals, owners = [0.0] * num_owners, [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = totals.index(min(totals))
        owners[item] = owner
        totals[owner] += costs[item]
    return owners
