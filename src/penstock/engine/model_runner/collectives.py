"""Collectives between the ranks of an engine: a process group, or shared memory on one machine.

The shared memory is a memory file of the first rank, which the others open through /proc, so that nothing is
left on disk. Its layout and how ranks wait are described in nn/native/exchange.h.

Each rank holds a lock on one byte of the file. The kernel releases the lock when the process ends for any
reason, so a rank that waits long can see which ranks are alive.

The group is not part of torch.distributed's global state, because an engine may share a process with training
or with another engine. Its ranks are on one machine, rendezvous through a private file, and exchange tensors
through shared memory, over loopback where that is impossible (gloo), or between GPUs (NCCL).
"""

import fcntl
import mmap
import os
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.core.errors import UsageError
from penstock.core.log import EventLog
from penstock.devices import accelerator
from penstock.models.decoder.tensor_slices import TensorParallelRank
from penstock.nn import native

_LINE_BYTES = 64

SLOT_BYTES = 2**26
"""Bytes exchanged at once; larger tensors are split. Memory is allocated when first written."""


class RankStore(Protocol):
    """Key-value store for the rendezvous."""

    def set(self, key: str, value: str) -> None:
        """Publish a value."""
        ...

    def get(self, key: str) -> bytes:
        """Return a value; waits until it is published."""
        ...


class SharedBoard:
    """Shared memory of all ranks, as one rank sees it. For one thread, except `close`.

    Args:
        file: descriptor of a file with `_bytes_for(place.ranks)` zero bytes; closed by this object.
        timeout_s: how long to wait for another rank before failing.
    """

    def __init__(self, file: int, place: TensorParallelRank, *, timeout_s: float) -> None:
        self._file = file
        self._place = place
        memory = mmap.mmap(file, _bytes_for(place.ranks))  # alive as long as the tensors
        lines = (place.ranks + 1) * _LINE_BYTES
        self.native_board: Any = torch.classes.penstock.Board(  # Any: torch has no types for these
            torch.frombuffer(memory, dtype=torch.int32, count=lines // 4).view(place.ranks + 1, -1),
            torch.frombuffer(memory, dtype=torch.uint8, offset=mmap.PAGESIZE).view(
                place.ranks, 2, SLOT_BYTES
            ),
            place.rank,
            file,
            timeout_s,
        )
        """The board as the C++ operators take it."""

    @classmethod
    def meet(cls, store: RankStore, place: TensorParallelRank, *, timeout_s: float) -> Self | None:
        """Return the board once all ranks have joined; None on all ranks if one cannot share memory."""
        can = hasattr(os, "memfd_create") and native.is_available()
        if not _all_say(store, place, "shares", "yes" if can else "no"):
            return None
        if place.rank == 0:
            file = os.memfd_create("penstock-ranks")
            os.ftruncate(file, _bytes_for(place.ranks))
            store.set("board", f"/proc/{os.getpid()}/fd/{file}")
        else:
            file = os.open(store.get("board"), os.O_RDWR | os.O_CLOEXEC)
        board = cls(file, place, timeout_s=timeout_s)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place.rank)
        _all_say(store, place, "is there", "yes")  # before any rank could take a late rank for a dead one
        return board

    def takes(self, x: Tensor) -> bool:
        """True if tensors of this dtype can be summed (float32, bfloat16)."""
        return x.dtype in (torch.float32, torch.bfloat16)

    def sum(self, x: Tensor) -> None:
        """Add the other ranks' values to a contiguous tensor, in place, in rank order.

        Raises:
            RuntimeError: a rank is dead or does not answer; worded as gloo does.
        """
        for piece in _pieces(x):
            self.native_board.sum(piece)

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return all ranks' tensors on the first rank, an empty list on others. Raises as `sum` does."""
        is_first = self._place.rank == 0
        found = []
        for piece in _pieces(x.contiguous()):
            found.append(piece.new_empty(self._place.ranks if is_first else 0, len(piece)))
            self.native_board.gather(piece, found[-1])
        return [part.view(x.shape) for part in torch.cat(found, dim=1)] if is_first else []

    def close(self) -> None:
        """Abort a wait in progress on all ranks, and any later one. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            self.native_board.end()
            os.close(file)


def _bytes_for(ranks: int) -> int:
    lines = (ranks + 1) * _LINE_BYTES
    assert lines <= mmap.PAGESIZE, ranks
    return mmap.PAGESIZE + ranks * 2 * SLOT_BYTES


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x.view(-1), SLOT_BYTES // x.itemsize)


def _all_say(store: RankStore, place: TensorParallelRank, what: str, answer: str) -> bool:
    """Publish this rank's answer; return True if all ranks answer "yes"."""
    store.set(f"{what}/{place.rank}", answer)
    return all(store.get(f"{what}/{rank}") == b"yes" for rank in range(place.ranks))


log = EventLog(__name__)

TIMEOUT_S = 60.0
"""Seconds that a rank waits for another; longer means a hang: ranks do the same work at the same time."""


class RankGroup:
    """Tensor-parallel process group of an engine, as one rank sees it; for one thread."""

    def __init__(self, place: TensorParallelRank, device: torch.device) -> None:
        self.place = place
        self._device = device
        self._timeout = timedelta(seconds=TIMEOUT_S)
        self._group: Any = None  # Any: torch has no types for it
        self.board: SharedBoard | None = None
        """Shared memory of CPU ranks after `join`; None: not available."""

    def join(self, meeting: Path) -> None:
        """Join the other ranks.

        Args:
            meeting: path of a file that does not exist yet, in a folder that only this user may enter.
        """
        store = dist.FileStore(str(meeting), self.place.ranks)  # type: ignore[attr-defined]
        store.set_timeout(self._timeout)
        backend = accelerator.kind_of(self._device).backend
        if backend not in _JOINS:
            fix = "Serve with one rank (tensor_parallel=1)."
            raise UsageError("Tensor parallelism is not supported here", got=self._device.type, fix=fix)
        self._group = _JOINS[backend](store, self.place, self._timeout)
        if self._device.type == "cpu":
            self.board = SharedBoard.meet(store, self.place, timeout_s=self._timeout.total_seconds())

    def sum(self, x: Tensor) -> Tensor:
        """Return the elementwise sum over the ranks; in place if `x` is contiguous."""
        x = x.contiguous()
        if self.board is not None and self.board.takes(x):
            self.board.sum(x)
        else:
            self._group.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return all ranks' tensors (equal shapes) on the first rank, an empty list on others."""
        if self.board is not None:
            return self.board.gather(x)
        parts = [torch.empty_like(x) for _ in range(self.place.ranks)] if self.place.rank == 0 else []
        self._group.gather([parts] if parts else [], [x.contiguous()], _TO_FIRST).wait()
        return parts

    def close(self) -> None:
        """Leave the group; waits in progress fail here and on the other ranks. Idempotent."""
        group, self._group = self._group, None
        if self.board is not None:
            self.board.close()
        if group is not None:
            try:
                group.abort()
            except RuntimeError:  # it has already failed
                log.debug("ranks_left", "The ranks could not be left in order", exc_info=True)


_TO_FIRST = dist.GatherOptions()
_TO_FIRST.rootRank = 0


def _gloo(store: Any, place: TensorParallelRank, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, place.rank, place.ranks, options)


def _nccl(store: Any, place: TensorParallelRank, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, place.rank, place.ranks, options)


_JOINS = {"gloo": _gloo, "nccl": _nccl}
