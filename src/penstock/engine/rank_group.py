"""Sums and gathers among the ranks of an engine, in a process group of their own.

The group is no part of torch.distributed's global state: an engine must be able to live in a process that
trains, or beside another engine. Its ranks are of one machine, meet in a private file, and talk over loopback
(gloo) or between GPUs (NCCL).
"""

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.models.llama.slices import Place

log = logging.getLogger(__name__)


class RankGroup:
    """The ranks that share each layer of a model; joined when constructed, by all of them.

    Args:
        meeting: a file in a folder that only this user may enter.
        timeout_s: a rank that waits longer for another gives up.
    """

    def __init__(self, place: Place, meeting: Path, *, device: torch.device, timeout_s: float) -> None:
        self.place = place
        store = dist.FileStore(str(meeting), place.ranks)  # type: ignore[attr-defined]
        join = _nccl if device.type == "cuda" else _gloo
        self._group: Any = join(store, place, timedelta(seconds=timeout_s))  # Any: torch has no types for it
        self._to_first = dist.GatherOptions()
        self._to_first.rootRank = 0

    def sum(self, x: Tensor) -> Tensor:
        """Return the elementwise sum over the ranks, in place where `x` is contiguous."""
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return what the ranks have, of equal shapes, in their order; nothing on others than the first."""
        first = self.place.rank == 0
        parts = [torch.empty_like(x) for _ in range(self.place.ranks)] if first else []
        self._group.gather([parts] if first else [], [x.contiguous()], self._to_first).wait()
        return parts

    def close(self) -> None:
        """Leave; a wait that is under way fails, here and on the other ranks."""
        if self._group is not None:
            try:
                self._group.abort()
            except RuntimeError:  # it has failed already
                log.debug("leaving the ranks", exc_info=True)
        self._group = None


def _gloo(store: Any, place: Place, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, place.rank, place.ranks, options)


def _nccl(store: Any, place: Place, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, place.rank, place.ranks, options)
