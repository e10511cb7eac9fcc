"""Sums and gathers of an engine's ranks through memory that they share; where the C++ operators compute.

The board is a memory file of the first rank, which the others open through /proc, so that nothing of it is
left on any disk. What lies in it and who waits how: nn/native/exchange.h.

Each rank holds a lock on a byte of the file, and the kernel lets go of it when a process ends, however it
ends: so a rank that waits long sees who is still there.
"""

import fcntl
import mmap
import os
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from penstock.models.llama.slices import Place
from penstock.nn import native

_LINE_BYTES = 64

SLOT_BYTES = 2**26
"""What is exchanged at once; what is larger goes piece by piece. Memory is taken when it is first written."""


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
        file: open, of `_bytes_for(place.ranks)` zeros; closed by this.
        timeout_s: a rank that waits longer for another gives up.
    """

    def __init__(self, file: int, place: Place, *, timeout_s: float) -> None:
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
        """As the C++ operators know it."""

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
            self.native_board.sum(piece)

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return what the ranks have, on the first; nothing on others. Errors as in `sum`."""
        is_first = self._place.rank == 0
        found = []
        for piece in _pieces(x.contiguous()):
            found.append(piece.new_empty(self._place.ranks if is_first else 0, len(piece)))
            self.native_board.gather(piece, found[-1])
        return [part.view(x.shape) for part in torch.cat(found, dim=1)] if is_first else []

    def close(self) -> None:
        """End a wait that is under way, on all ranks, and any later one. Once more does nothing."""
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


def _all_say(store: Store, place: Place, what: str, answer: str) -> bool:
    """Tell all ranks; whether all say yes."""
    store.set(f"{what}/{place.rank}", answer)
    return all(store.get(f"{what}/{rank}") == b"yes" for rank in range(place.ranks))
