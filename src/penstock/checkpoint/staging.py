"""Staging memory of checkpoints: a host buffer that a rank's share is copied to.

An accelerator copies at the speed of its bus into page-locked memory only, and the operating system takes
seconds to make and lock gigabytes of pages. So a thread does that after the first step, before the first
save, in pieces of at most 16 MiB. While the driver locks a piece it launches nothing: for 1 GiB that is some
50 ms, in which a device runs out of work; for 16 MiB it is less than a launch may be late. The pieces lie one
after another, so the share is written to its file as one range of bytes. torch's own pinned tensors would be
one request, rounded up to a power of two.
"""

import mmap
from collections.abc import Sequence
from threading import Thread

import torch
from torch import Tensor

from penstock.core.errors import CheckpointError
from penstock.core.log import EventLog
from penstock.core.units import mib
from penstock.devices import accelerator

log = EventLog(__name__)

PIECE_BYTES = 2**24
"""Most bytes that are page-locked by one request; a multiple of a page."""


class StagingBuffer:
    """Reusable host buffer for copies; `release` it at the end."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._device = accelerator.CPU
        self._locked: list[Tensor] = []
        self._thread: Thread | None = None
        self._is_wanted = True

    def reserve(self, num_bytes: int, device: torch.device) -> None:
        """Have a thread make and page-lock memory for copies of this size from a device; do not wait.

        Raises:
            CheckpointError: the host refuses that much memory.
        """
        if num_bytes <= len(self._buffer):
            return
        self.release()
        # shared memory: after a fork, private pages that are locked would be others than those written to
        try:
            memory = mmap.mmap(-1, num_bytes)
        except OSError as error:
            raise CheckpointError(
                f"The host refuses memory for a copy of this rank's share of a checkpoint ({error.strerror})",
                got=mib(num_bytes),
                fix="Give the machine or container more memory, or train on more ranks.",
            ) from None
        self._buffer, self._device = torch.frombuffer(memory, dtype=torch.uint8), device
        self._is_wanted = True
        if accelerator.is_accelerator(device):
            self._thread = Thread(target=self._lock, args=(device,), name="staging", daemon=True)
            self._thread.start()

    def copy(self, tensors: Sequence[Tensor]) -> memoryview:
        """Copy tensors one after another, without gaps; return the bytes.

        The copy is complete when this returns, and valid until the next call.

        Args:
            tensors: in descending element size, so that each is aligned; of the CPU or one accelerator.

        Raises:
            CheckpointError: as `reserve`.
        """
        needed = sum(tensor.nbytes for tensor in tensors)
        away = {tensor.device for tensor in tensors if accelerator.is_accelerator(tensor.device)}
        if needed:
            self.reserve(needed, next(iter(away), accelerator.CPU))
        self._join()
        start = 0
        for tensor in tensors:
            self._copy(tensor, start)
            start += tensor.nbytes
        for device in away:
            accelerator.wait_for_stream(device)  # the next step overwrites the copied tensors
        return self._buffer[:needed].numpy().data

    def release(self) -> None:
        """Give the memory back; at most a piece is waited for."""
        self._is_wanted = False
        self._join()
        try:
            for piece in self._locked:
                accelerator.unlock_pages(piece, self._device)
        finally:  # a device that failed before refuses
            self._locked, self._buffer = [], torch.empty(0, dtype=torch.uint8)

    def _copy(self, tensor: Tensor, start: int) -> None:
        stop = start + tensor.nbytes
        if start // PIECE_BYTES == (stop - 1) // PIECE_BYTES:
            room = self._buffer[start:stop]
            room.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            return
        # one copy must not cross the border of pieces, which are locked apart
        source = tensor.contiguous().view(-1).view(torch.uint8)
        for room in self._pieces(start, stop):
            part, source = source[: len(room)], source[len(room) :]
            room.copy_(part, non_blocking=True)

    def _pieces(self, start: int, stop: int) -> list[Tensor]:
        """Return a range of the buffer, cut at the borders of its pieces."""
        borders = range(start // PIECE_BYTES * PIECE_BYTES, stop, PIECE_BYTES)
        return [self._buffer[max(start, at) : min(stop, at + PIECE_BYTES)] for at in borders]

    def _lock(self, device: torch.device) -> None:
        """Make the pages and lock them: the body of the thread."""
        try:
            accelerator.use(device)  # a thread begins with the first one
            for piece in self._pieces(0, len(self._buffer)):
                if not self._is_wanted:
                    return
                piece[:: mmap.PAGESIZE].zero_()  # makes the pages without holding the driver up
                if accelerator.lock_pages(piece, device):
                    self._locked.append(piece)
        except RuntimeError as error:
            log.warning(
                "memory_unlocked",
                "{size_bytes:bytes} of host memory cannot be page-locked, so copies of checkpoints "
                "are slower: {error}",
                size_bytes=len(self._buffer),
                error=error,
            )

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
