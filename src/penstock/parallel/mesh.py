"""Process group, device and device mesh of a run, the same code for one rank or many."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from jaxtyping import Float64
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.core.env import Ranks, num_threads, ranks
from penstock.core.errors import PeerLost, PenstockError
from penstock.core.log import EventLog
from penstock.devices import accelerator
from penstock.parallel.layout import RankLayout
from penstock.parallel.rendezvous import first_line, meet, open_store

log = EventLog(__name__)

_PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "connectFullMesh failed",
)


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a run, or a group of them, as one rank sees them."""

    ranks: Ranks
    device: torch.device
    group: dist.ProcessGroup | None = None
    """Process group; None: all ranks of the run."""

    @property
    def is_first(self) -> bool:
        """True for rank 0."""
        return self.ranks.rank == 0

    @property
    def is_alone(self) -> bool:
        """True if there is no other rank, so that nothing is exchanged."""
        return self.ranks.world_size == 1

    def sum(self, *values: float) -> list[float]:
        """Return the sums over the ranks, in float64; every rank must call it with equally many values."""
        sums: list[float] = self.add_up(torch.tensor(values, dtype=torch.float64)).tolist()
        return sums

    def add_up(self, values: Float64[Tensor, "n"]) -> Float64[Tensor, "n"]:
        """Return the sums over the ranks without waiting for them, on the device; every rank must call it.

        A rank alone gets its own values back, on the device that they are on.
        """
        if self.is_alone:
            return values
        total = values.to(self.device, copy=True)
        dist.all_reduce(total, group=self.group)
        return total

    def most(self, value: float) -> float:
        """Return the largest value over the ranks; every rank must call it."""
        if self.is_alone:
            return float(value)
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found.item()


@dataclass(frozen=True, slots=True)
class Mesh:
    """Device mesh of a run with its layout, as one rank sees it."""

    layout: RankLayout
    rank: int
    """Global rank."""
    state: DeviceMesh
    """Mesh of the parameters: axes "replicate", "shard" and "tensor" of this rank's pipeline stage. The
    context axis shares parameters too, so it is part of "shard"."""
    pipeline: DeviceMesh
    """Ranks with the stages of this rank's model."""
    context: DeviceMesh
    """Ranks with the sequence slices of this rank's rows."""
    island: World
    """Ranks of this rank's island; all ranks if there are no islands."""
    keeps_frozen_whole: bool = False
    """True if every rank holds all frozen parameters, and what is learned is small: nothing is sharded."""

    @property
    def has_islands(self) -> bool:
        """True if replicas train independently as islands."""
        return self.island.group is not None

    @property
    def data(self) -> DeviceMesh:
        """FSDP's mesh: "shard", or replicas ("replicate"; within an island, "copies") and "shard"."""
        copies = _COPIES if _COPIES in (self.state.mesh_dim_names or ()) else "replicate"
        alone = self.state[copies].size() == 1 or (self.has_islands and copies == "replicate")
        return self.state["shard"] if alone else self.state[copies, "shard"]

    @property
    def copies_group(self) -> dist.ProcessGroup | None:
        """Ranks with the same shards as this one, between which gradients are averaged; None: no others."""
        return None if self.data.ndim == 1 else self.data.get_group(0)

    @property
    def num_shards(self) -> int:
        """Number of ranks that share the parameters; 1: not sharded."""
        return 1 if self.keeps_frozen_whole else self.layout.shard * self.layout.context

    @property
    def data_rank(self) -> int:
        """Data-parallel rank, in [0, layout.num_data)."""
        return self.layout.data_rank(self.rank)

    def sequence_slice(self, length: int) -> slice:
        """Return this rank's sequence slice of rows of `length` tokens."""
        part = length // self.layout.context
        index = self.layout.place(self.rank)["context"]
        return slice(index * part, (index + 1) * part)

    @property
    def has_loss(self) -> bool:
        """True if this rank computes the loss of its rows: on the last stage."""
        return self.layout.place(self.rank)["pipeline"] == self.layout.pipeline - 1

    @property
    def copies(self) -> int:
        """Number of ranks that each compute the full loss of the same tokens."""
        return self.layout.tensor

    @property
    def num_averaged(self) -> int:
        """Number of ranks over which gradients are averaged, islands included."""
        return self.layout.num_data * self.layout.context

    @property
    def leads(self) -> bool:
        """True if this rank is the first of those that work on the same rows."""
        return self.layout.leads(self.rank)


_COPIES: Final = "copies"


def make_mesh(
    world: World, layout: RankLayout, *, islands: bool = False, keeps_frozen_whole: bool = False
) -> Mesh:
    """Build the mesh of a run; every rank must call it, with the same layout.

    Args:
        islands: True: the replicas of the "replicate" axis train independently.
        keeps_frozen_whole: True: ranks of the shard and context axes are replicas of what is learned.
    """
    assert layout.world_size == world.ranks.world_size, (layout, world.ranks)
    degrees: tuple[int, ...] = (
        layout.pipeline,
        layout.replicate,
        layout.shard * layout.context,
        layout.tensor,
    )
    names: tuple[str, ...] = ("pipeline", "replicate", "shard", "tensor")
    if keeps_frozen_whole:
        pipeline, replicate, near, tensor = degrees
        degrees = (pipeline, replicate * near, 1, tensor)
        if islands:
            names = ("pipeline", "replicate", _COPIES, "shard", "tensor")
            degrees = (pipeline, replicate, near, 1, tensor)
    whole = init_device_mesh(world.device.type, degrees, mesh_dim_names=names)
    rest = layout.world_size // (layout.context * layout.tensor)
    flow = init_device_mesh(
        world.device.type, (rest, layout.context, layout.tensor), mesh_dim_names=("rest", "context", "same")
    )
    return Mesh(
        layout,
        world.ranks.rank,
        whole[names[1:]],
        whole["pipeline"],
        flow["context"],
        _island_of(world, layout) if islands else world,
        keeps_frozen_whole,
    )


def _island_of(world: World, layout: RankLayout) -> World:
    """Return the ranks with this rank's coordinate on the "replicate" axis."""
    islands: list[list[int]] = [[] for _ in range(layout.replicate)]
    for rank in range(layout.world_size):
        islands[layout.place(rank)["replicate"]].append(rank)
    group, _ = dist.new_subgroups_by_enumeration(islands)  # type: ignore[no-untyped-call]
    mine = islands[layout.place(world.ranks.rank)["replicate"]]
    who = replace(world.ranks, rank=mine.index(world.ranks.rank), world_size=len(mine))
    return World(who, world.device, group)


def is_of_lost_peer(error: BaseException) -> bool:
    """True if gloo or NCCL raised this error because a peer is gone."""
    gone = any(said in str(error) for said in _PEER_GONE)
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and gone)


@contextmanager
def join(*, timeout_s: float = 600.0) -> Iterator[World]:
    """Context manager: join the process group; a single process is a group of one.

    Uses one accelerator per rank with its own backend (NCCL on GPUs), if there are any; otherwise gloo, with
    the cores divided evenly. The rendezvous is that of torchrun (MASTER_ADDR) or Penstock's launcher.

    Args:
        timeout_s: a rank that waits longer for a collective has lost its peers.

    Raises:
        UsageError: more processes on this machine than accelerators.
        PenstockError: the rendezvous failed.
        PeerLost: a rank is gone.
    """
    who = ranks()
    device = accelerator.choose(who.local_rank)
    accelerator.use(device)
    if not accelerator.is_accelerator(device):
        torch.set_num_threads(num_threads())
    _start_group(who, device, timeout_s=timeout_s)
    try:
        dist.all_reduce(torch.zeros(1))  # a rank that leaves before all are connected would fail the others
        yield World(who, device)
    except RuntimeError as error:
        if is_of_lost_peer(error):
            log.debug("peer_lost", "Lost a peer", exc_info=True)
            raise PeerLost(first_line(error)) from None
        raise
    finally:
        dist.destroy_process_group()


def _start_group(who: Ranks, device: torch.device, *, timeout_s: float) -> None:
    store = meet(open_store(who, timeout_s=timeout_s), who, timeout_s=timeout_s)
    try:
        dist.init_process_group(
            accelerator.backend_of(device),
            timeout=timedelta(seconds=timeout_s),
            world_size=who.world_size,
            rank=who.rank,
            store=store,
        )
    except (RuntimeError, ValueError) as error:
        log.debug("group_failed", "The group did not start", exc_info=True)
        raise PenstockError(
            f"Rank {who.rank} of {who.world_size} could not connect to the others",
            got=first_line(error),
            fix="Run `penstock doctor` on the same machines; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, "
            "if set, must name the interface that connects them.",
        ) from None


def broadcast(world: World, value: Any) -> Any:  # Any: JSON values
    """Broadcast rank 0's value to every rank; every rank must call it.

    Args:
        value: read on rank 0 only.
    """
    content = json.dumps(value).encode() if world.is_first else b""
    (size,) = world.sum(len(content))
    if not world.is_first:
        content = bytes(int(size))
    sent = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(world.device)
    dist.broadcast(sent, src=0)
    return json.loads(sent.cpu().numpy().tobytes())


def gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:  # Any: JSON values
    """Return the value of every rank, by rank; every rank of the group must call it.

    torch's own `all_gather_object` unpickles what the peers send, which can run code. This is JSON, in
    tensors of the CPU, for which every group has gloo.

    Args:
        group: None: all ranks.
    """
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([len(content)])
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    sent = content.new_zeros(int(max(sizes)))
    sent[: len(content)] = content
    found = [torch.empty_like(sent) for _ in sizes]
    dist.all_gather(found, sent, group=group)
    return [json.loads(row[:n].numpy().tobytes()) for row, n in zip(found, sizes, strict=True)]
