"""Sums and gathers among the ranks of an engine, in a process group of their own.

The group is no part of torch.distributed's global state: an engine must be able to live in a process that
trains, or beside another engine. Its ranks are of one machine, meet in a private file, and exchange numbers
through shared memory (board.py), over loopback where that cannot be (gloo), or between GPUs (NCCL).
"""

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engine.ranks.board import SharedBoard
from penstock.models.llama.slices import Place

log = logging.getLogger(__name__)

TIMEOUT_S = 60.0
"""A rank that waits longer for another gives up. They do the same work at the same time, so what takes longer
is a rank that hangs."""


class RankGroup:
    """The ranks that share each layer of a model, as one of them sees it; for one thread."""

    def __init__(self, place: Place, device: torch.device) -> None:
        self.place = place
        self._device = device
        self._timeout = timedelta(seconds=TIMEOUT_S)
        self._group: Any = None  # Any: torch has no types for it
        self.board: SharedBoard | None = None
        """What CPU ranks share, once they have met; None: there is none."""

    def join(self, meeting: Path) -> None:
        """Meet the other ranks.

        Args:
            meeting: a file that is not there yet, in a folder that only this user may enter.
        """
        store = dist.FileStore(str(meeting), self.place.ranks)  # type: ignore[attr-defined]
        store.set_timeout(self._timeout)
        join = _nccl if self._device.type == "cuda" else _gloo
        self._group = join(store, self.place, self._timeout)
        if self._device.type == "cpu":
            self.board = SharedBoard.meet(store, self.place, timeout_s=self._timeout.total_seconds())

    def sum(self, x: Tensor) -> Tensor:
        """Return the elementwise sum over the ranks, in place where `x` is contiguous."""
        x = x.contiguous()
        if self.board is not None and self.board.takes(x):
            self.board.sum(x)
        else:
            self._group.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return what the ranks have, of equal shapes, in their order; nothing on others than the first."""
        if self.board is not None:
            return self.board.gather(x)
        parts = [torch.empty_like(x) for _ in range(self.place.ranks)] if self.place.rank == 0 else []
        self._group.gather([parts] if parts else [], [x.contiguous()], _TO_FIRST).wait()
        return parts

    def close(self) -> None:
        """Leave; a wait that is under way fails, here and on the other ranks. Once more does nothing."""
        group, self._group = self._group, None
        if self.board is not None:
            self.board.close()
        if group is not None:
            try:
                group.abort()
            except RuntimeError:  # it has failed already
                log.debug("leaving the ranks", exc_info=True)


_TO_FIRST = dist.GatherOptions()
_TO_FIRST.rootRank = 0


def _gloo(store: Any, place: Place, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, place.rank, place.ranks, options)


def _nccl(store: Any, place: Place, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, place.rank, place.ranks, options)
