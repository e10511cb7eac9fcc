"""Join the ranks of a run: process group, device and device mesh, the same for one rank or many."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.core.env import Ranks, num_threads, ranks, rendezvous
from penstock.core.errors import PeerLost
from penstock.parallel.layout import Layout

log = logging.getLogger(__name__)

_PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a run, or some of them that work together, as one of them sees it."""

    ranks: Ranks
    device: torch.device
    group: dist.ProcessGroup | None = None
    """Which ranks; None: all of the run."""

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.ranks.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Return the sums over ranks, in float64; every rank must call it with as many values."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.group)
        sums: list[float] = total.tolist()
        return sums


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of a run on the axes of its layout, as one of them sees it."""

    layout: Layout
    rank: int
    """This rank's index among all."""
    state: DeviceMesh
    """Where parameters lie: axes "replicate", "shard" and "tensor" of this rank's pipeline stage. The
    ranks of the context axis share parameters too, so they are part of "shard"."""
    pipeline: DeviceMesh
    """The ranks that hold the stages of this one's model."""
    context: DeviceMesh
    """The ranks that hold the stretches of this one's rows."""
    island: World
    """The ranks of this one's copy of the model, where copies train by themselves; else all."""

    @property
    def has_islands(self) -> bool:
        """Whether copies of the model train by themselves, and meet now and then."""
        return self.island.group is not None

    @property
    def data(self) -> DeviceMesh:
        """What FSDP works on: "shard", or "replicate" and "shard"."""
        alone = self.layout.replicate == 1 or self.has_islands
        return self.state["shard"] if alone else self.state["replicate", "shard"]

    @property
    def num_shards(self) -> int:
        """Ranks that share the parameters; 1: each holds them whole."""
        return self.layout.shard * self.layout.context

    @property
    def data_rank(self) -> int:
        """Whose rows this rank works on, in [0, layout.num_data)."""
        return self.layout.data_rank(self.rank)

    def stretch(self, length: int) -> slice:
        """Return the part of rows of `length` tokens that this rank holds."""
        part = length // self.layout.context
        index = self.layout.place(self.rank)["context"]
        return slice(index * part, (index + 1) * part)

    @property
    def has_loss(self) -> bool:
        """Whether the loss of this rank's rows is computed here: on the last stage."""
        return self.layout.place(self.rank)["pipeline"] == self.layout.pipeline - 1

    @property
    def copies(self) -> int:
        """Ranks that compute the same loss of the same tokens, each all of it."""
        return self.layout.tensor

    @property
    def num_averaged(self) -> int:
        """Ranks over which gradients are averaged; with islands, in the end."""
        return self.layout.num_data * self.layout.context

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for those that work on the same rows."""
        return self.layout.leads(self.rank)


def make_mesh(world: World, layout: Layout, *, islands: bool = False) -> Mesh:
    """Lay out the ranks of a run; every rank must call it, with the same layout.

    Args:
        islands: the copies of the "replicate" axis train by themselves.
    """
    assert layout.world_size == world.ranks.world_size, (layout, world.ranks)
    degrees = (layout.pipeline, layout.replicate, layout.shard * layout.context, layout.tensor)
    names = ("pipeline", "replicate", "shard", "tensor")
    whole = init_device_mesh(world.device.type, degrees, mesh_dim_names=names)
    rest = layout.world_size // (layout.context * layout.tensor)
    flow = init_device_mesh(
        world.device.type, (rest, layout.context, layout.tensor), mesh_dim_names=("rest", "context", "same")
    )
    return Mesh(
        layout,
        world.ranks.rank,
        whole["replicate", "shard", "tensor"],
        whole["pipeline"],
        flow["context"],
        _island_of(world, layout) if islands else world,
    )


def _island_of(world: World, layout: Layout) -> World:
    """Return the ranks with this one's place on the "replicate" axis."""
    islands: list[list[int]] = [[] for _ in range(layout.replicate)]
    for rank in range(layout.world_size):
        islands[layout.place(rank)["replicate"]].append(rank)
    group, _ = dist.new_subgroups_by_enumeration(islands)  # type: ignore[no-untyped-call]
    mine = islands[layout.place(world.ranks.rank)["replicate"]]
    who = replace(world.ranks, rank=mine.index(world.ranks.rank), world_size=len(mine))
    return World(who, world.device, group)


def is_of_lost_peer(error: BaseException) -> bool:
    """Whether an error is what gloo or NCCL raise when a peer is gone."""
    gone = any(said in str(error) for said in _PEER_GONE)
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and gone)


@contextmanager
def join(*, timeout_s: float = 600.0) -> Iterator[World]:
    """Join the process group; one process alone forms a group of one, so all code is the same.

    Uses NCCL and one GPU a rank where there are GPUs, else gloo with the cores shared evenly. The ranks
    meet where torchrun (MASTER_ADDR) or Penstock's launcher says.

    Args:
        timeout_s: a rank that waits longer for a collective has lost its peers.
    """
    who = ranks()
    if torch.cuda.is_available():
        device = torch.device("cuda", who.local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(num_threads())
    alone = who.world_size == 1
    store = dist.HashStore() if alone else None  # type: ignore[attr-defined]
    where = None if alone else rendezvous()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        where,
        timeout=timedelta(seconds=timeout_s),
        world_size=who.world_size,
        rank=who.rank,
        store=store,
    )
    try:
        yield World(who, device)
    except RuntimeError as error:
        if is_of_lost_peer(error):
            log.debug("lost a peer", exc_info=True)
            raise PeerLost from None
        raise
    finally:
        dist.destroy_process_group()
