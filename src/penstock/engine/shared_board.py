"""Sums and gathers of an engine's ranks through memory that they share; where the C++ operators compute.

The board is a memory file of the first rank, which the others open through /proc, so that nothing of it is
left on any disk. What lies in it and who waits how: nn/native/exchange.cpp.

A rank that waits long looks who is still there: each holds a lock on a byte of the file, and the kernel lets
go of it when a process ends, however it ends.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Callable
from typing import Protocol, Self

import torch
from torch import Tensor

from penstock.core.clock import monotonic
from penstock.models.llama.slices import Place
from penstock.nn import native

_LINE_BYTES = 64
_SLOT_BYTES = 2**20
"""What is exchanged at once; what is larger goes piece by piece. Memory is taken when it is first written."""

_SLICE_S = 0.1
"""A rank that has waited so long looks who is there."""

_MET, _ENDED = 1, -1

_LOCK = "hhqqi4x"
"""struct flock of 64-bit Linux: type, whence, start, length, process."""


class Store(Protocol):
    """Where the ranks meet."""

    def set(self, key: str, value: str) -> None:
        """Say something to all."""
        ...

    def get(self, key: str) -> bytes:
        """Wait until it is said."""
        ...


class SharedBoard:
    """Memory of all ranks, as one of them sees it; for one thread, `close` excepted.

    Args:
        file: open, of `bytes_for(place.ranks)` zeros; closed by this.
        timeout_s: a rank that waits longer for another gives up.
    """

    def __init__(self, file: int, place: Place, *, timeout_s: float) -> None:
        self._file = file
        self._place = place
        self._timeout_s = timeout_s
        self._number = 0
        memory = mmap.mmap(file, _bytes_for(place.ranks))  # alive as long as the tensors
        lines = (place.ranks + 1) * _LINE_BYTES
        self._lines = torch.frombuffer(memory, dtype=torch.int32, count=lines // 4).view(place.ranks + 1, -1)
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=mmap.PAGESIZE)
        self._slots = slots.view(place.ranks, 2, _SLOT_BYTES)

    @classmethod
    def meet(cls, store: Store, place: Place, *, timeout_s: float) -> Self | None:
        """Return the board of ranks that meet; None, on all, where one of them cannot share memory."""
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
        _all_say(
            store, place, "is there", "yes"
        )  # before anyone takes a rank that is late for one that is gone
        return board

    def takes(self, x: Tensor) -> bool:
        """Whether it can add numbers of this type."""
        return x.dtype in (torch.float32, torch.bfloat16)

    def sum(self, x: Tensor) -> None:
        """Add the other ranks' numbers to contiguous ones, in place, in the order of ranks.

        Raises:
            RuntimeError: a rank is gone, or does not answer; the wording is gloo's.
        """
        for piece in _pieces(x):
            self._exchange(torch.ops.penstock.sum_of_ranks, piece)

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return what the ranks have, on the first; nothing on others. Errors as in `sum`."""
        is_first = self._place.rank == 0
        found = []
        for piece in _pieces(x.contiguous()):
            found.append(piece.new_empty(self._place.ranks if is_first else 0, len(piece)))
            self._exchange(torch.ops.penstock.gather_of_ranks, piece, found[-1])
        return [part.view(x.shape) for part in torch.cat(found, dim=1)] if is_first else []

    def close(self) -> None:
        """End a wait that is under way, on all ranks, and any later one. Once more does nothing."""
        file, self._file = self._file, -1
        if file >= 0:
            torch.ops.penstock.end_exchanges(self._lines)
            os.close(file)

    def _exchange(self, attempt: Callable[..., int], *numbers: Tensor) -> None:
        self._number += 1
        arguments = *numbers, self._lines, self._slots, self._place.rank, self._number, _SLICE_S
        until = monotonic() + self._timeout_s
        while (met := attempt(*arguments)) != _MET:
            if met == _ENDED:
                raise RuntimeError("The ranks' board was closed: Connection closed by peer")
            if gone := [rank for rank in range(self._place.ranks) if self._is_gone(rank)]:
                raise RuntimeError(f"Rank {gone[0]} is gone: Connection closed by peer")
            if monotonic() > until:
                raise RuntimeError(f"Timed out after {self._timeout_s:g} s of waiting for another rank")

    def _is_gone(self, rank: int) -> bool:
        if rank == self._place.rank:
            return False
        asked = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        try:
            answer = fcntl.fcntl(self._file, fcntl.F_GETLK, asked)
        except (OSError, ValueError):  # closed by another thread meanwhile, which the next attempt is told
            return False
        return bool(struct.unpack(_LOCK, answer)[0] == fcntl.F_UNLCK)


def _bytes_for(ranks: int) -> int:
    lines = (ranks + 1) * _LINE_BYTES
    assert lines <= mmap.PAGESIZE, ranks
    return mmap.PAGESIZE + ranks * 2 * _SLOT_BYTES


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x.view(-1), _SLOT_BYTES // x.itemsize)


def _all_say(store: Store, place: Place, what: str, answer: str) -> bool:
    """Tell all ranks; whether all say yes."""
    store.set(f"{what}/{place.rank}", answer)
    return all(store.get(f"{what}/{rank}") == b"yes" for rank in range(place.ranks))
