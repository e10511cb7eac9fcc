"""A stage of a pipeline that counts the bytes it sends and the seconds it works; else it waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from penstock.core import clock
from penstock.parallel.blocked import BLOCKED


class CountedStage(PipelineStage):
    """Counts from its beginning on. Arguments are torch's."""

    work_s = 0.0
    """In forward and backward passes and reductions of gradients, but what they blocked on other ranks."""
    sent_bytes = 0
    """Hidden states and their gradients: gloo's sends are in no flight recorder."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:  # Any: torch's
        """Work on a micro-batch."""
        with self._at_work():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Work on a micro-batch."""
        with self._at_work():
            return super().backward_one_chunk(*args, **kwargs)

    def perform_reduce_grad(self, *args: Any) -> None:
        """Reduce the gradients of all micro-batches."""
        with self._at_work():
            super().perform_reduce_grad(*args)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends that follow a forward pass; each is asked for once."""
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends that follow a backward pass; each is asked for once."""
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        began, blocked = clock.monotonic(), BLOCKED()
        yield
        self.work_s += clock.monotonic() - began - (BLOCKED() - blocked)

    def _counted(self, sends: list[dist.P2POp]) -> list[dist.P2POp]:
        self.sent_bytes += sum(send.tensor.nbytes for send in sends)
        return sends
