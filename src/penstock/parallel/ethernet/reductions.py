"""Gradient reductions that overlap the backward pass, over shards and over replicas.

A rank sends every other rank the part of the gradients that the other owns, and sums up what it receives: an
all-to-all and a local sum in float32. Gloo's own reduce-scatter is an all-reduce, with twice the bytes. The
messages may be compressed, because nothing is summed on the way.

FSDP2 reads the result of a reduction as soon as it has started: the first result of a step becomes the
gradient, as a view, and each later one is added to it. So FSDP2 must not add unreceived values. The first
result is left empty and filled when it arrives; for later ones FSDP2 gets zeros, and what arrives is added to
the first one here. Gradients are valid only at the end of `deferred`.

With replicas of shards, the sum over them follows the last micro-batch's reduction, once per step, also in
the background. Waits depend on bytes only, not on what has arrived, so that collectives always start in the
same order on all ranks.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.parallel.ethernet.async_collectives import PendingExchange, begin_exchange, begin_sum, wait_for
from penstock.parallel.ethernet.codecs import Encoders
from penstock.parallel.ethernet.compressed_all_reduce import MeanExchange
from penstock.parallel.sharding.fsdp_private import DefaultReduceScatter, FsdpUnit


@dataclass(slots=True)
class _Arriving:
    """A reduction in flight."""

    parts: list[PendingExchange]
    to: Tensor
    """[n] Destination of the sum."""
    is_first: bool
    """True if the destination is still empty."""
    num_bytes: int
    is_last: bool
    """True if its sum is the step's, to be averaged over replicas."""
    encoders: Encoders


class Reductions:
    """Reductions of a model's units, in the order in which they start.

    Args:
        copies: ranks with the same shards; None: no replicas.
        num_averaged: ranks over which gradients are averaged.
        window: maximum bytes of unsharded gradients in flight; a larger one goes alone.
        operations: operations per collective.
        can_defer: False: each reduction is waited for, on a GPU by its stream.
    """

    def __init__(
        self,
        *,
        copies: dist.ProcessGroup | None,
        num_averaged: int,
        window: float,
        operations: int,
        can_defer: bool = True,
    ) -> None:
        self._num_averaged, self._window, self._operations = num_averaged, window, operations
        self._can_defer = can_defer
        self._arriving: deque[_Arriving] = deque()
        self._between = Agreements(copies, operations=operations)
        self._partial: dict[Encoders, Tensor] = {}
        self._due: tuple[Tensor, Encoders] | None = None
        self.is_deferring = False
        """True if reductions are waited for later, False if at once."""
        self.is_last = True
        """True if the reductions that start now are the last of their step."""

    def begin(
        self, given: Tensor, to: Tensor, group: dist.ProcessGroup, *, is_first: bool, encoders: Encoders
    ) -> None:
        """Start reducing `given`, [ranks * n]; this rank's part is written or added to `to`, [n]."""
        while self._arriving and self._under_way + given.nbytes > self._window:
            self._receive()
        rows = given.view(group.size(), -1)
        parts = begin_exchange(rows, group, operations=self._operations, encoder=encoders.shards)
        self._arriving.append(_Arriving(parts, to, is_first, given.nbytes, self.is_last, encoders))

    def at_once(self, given: Tensor, to: Tensor, group: dist.ProcessGroup, *, encoders: Encoders) -> None:
        """Reduce over the ranks of a group and, if it is the step's last, over replicas; wait for it."""
        is_last, self.is_last = self.is_last, False
        self.begin(given, to, group, is_first=True, encoders=encoders)
        self._flush()
        self.is_last = is_last
        self._agree_at_once(to, encoders)

    def _agree_at_once(self, x: Tensor, encoders: Encoders) -> None:
        """Average a step's gradient over replicas if it is the last; otherwise keep it until then."""
        if self._between.copies is None:
            return
        earlier = self._partial.pop(encoders, None)
        if earlier is not None:
            x.add_(earlier)
        if self.is_last:
            self._between.begin(x, encoders)
            self._flush()
        else:
            self._partial[encoders] = x.clone()
            x.zero_()  # FSDP2 adds it to the gradient

    def between(self, gradients: Tensor, to: Tensor | None, *, encoders: Encoders) -> None:
        """Start averaging unsharded gradients, [n], over replicas.

        Args:
            to: accumulated gradient of the step, may be `gradients`; None: average at once, in place.
        """
        self._begin_due()
        gradients.div_(self._num_averaged)
        if to is None:
            self._agree_at_once(gradients, encoders)
            return
        if to is not gradients:
            to.add_(gradients)
            gradients.zero_()  # FSDP2 adds it to the gradient
        if self.is_last:
            self._due = to, encoders

    def _begin_due(self) -> None:
        """Start the last requested sum over replicas. Not earlier: after the request FSDP2 adds zeros to the
        gradient, and values that are read and written during an in-place sum may be lost.
        """
        if self._due is not None:
            due, self._due = self._due, None
            self._between.begin(*due)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Context manager: reductions started inside are waited for at its end; gradients are valid after
        it."""
        self.is_deferring = self._can_defer
        try:
            yield
            self._flush()
        finally:  # after an error everything is dropped: the step is not taken
            self.is_deferring, self.is_last = False, True
            self._arriving.clear()
            self._partial.clear()
            self._due = None
            self._between.forget()

    def _flush(self) -> None:
        while self._arriving:
            self._receive()
        self._begin_due()
        self._between.finish()

    @property
    def _under_way(self) -> int:
        return sum(arriving.num_bytes for arriving in self._arriving)

    def _receive(self) -> None:
        """Wait for the oldest reduction, and sum it up."""
        oldest = self._arriving.popleft()
        wait_for(part.work for part in oldest.parts)
        for part in oldest.parts:
            to, received = oldest.to[part.where], part.numbers(oldest.encoders.codec)
            if oldest.is_first:
                torch.sum(received, 0, out=to)
                to.div_(self._num_averaged)
            else:
                to.add_(received.sum(0).div_(self._num_averaged))
        if oldest.is_last:
            self._between.begin(oldest.to, oldest.encoders)


class ReduceBehind(DefaultReduceScatter):
    """Reduce-scatter of one FSDP2 unit: FSDP2 makes the output of the first reduction of a step the gradient,
    and adds that of later ones to it.
    """

    counts_waits = True
    """Marks that waits are counted here, not by fsdp_waits.py."""

    def __init__(self, unit: FsdpUnit, reductions: Reductions, encoders: Encoders) -> None:
        self._unit, self._reductions, self._encoders = unit, reductions, encoders
        self._total: Tensor | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,  # noqa: ARG002 - always the average
        async_op: bool = False,  # noqa: ARG002 - always
    ) -> dist.Work:
        """Reduce `input_tensor`, [ranks * n], to `output_tensor`, [n]."""
        total = self._total_of(output_tensor)
        if total is None:
            self._reductions.at_once(input_tensor, output_tensor, group, encoders=self._encoders)
        else:
            is_first = total is output_tensor
            if not is_first:
                output_tensor.zero_()
            self._reductions.begin(input_tensor, total, group, is_first=is_first, encoders=self._encoders)
        return _Begun()

    def whole(self, output: Tensor) -> None:
        """Reduce the gradients of unsharded parameters, [n], over replicas."""
        self._reductions.between(output, self._total_of(output), encoders=self._encoders)

    def _total_of(self, output: Tensor) -> Tensor | None:
        """Return the accumulator of this step's reductions; None: each reduction must be complete by
        itself."""
        so_far = self._unit.gradient
        if not self._reductions.is_deferring:
            return None
        if so_far is None:
            self._total = output
        elif self._total is None or not _share_memory(so_far, self._total):
            return None
        assert self._total.shape == output.shape, (self._total.shape, output.shape)
        return self._total


class _Begun(dist.Work):
    """Placeholder for a reduction that is waited for elsewhere."""

    def wait(self, timeout: object = None) -> bool:  # noqa: ARG002 - as torch calls it
        return True


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class Agreements:
    """Sums over replicas in flight.

    Args:
        copies: ranks with the same shards; None: no replicas, nothing to do.
        operations: operations per float32 sum.
    """

    def __init__(self, copies: dist.ProcessGroup | None, *, operations: int) -> None:
        self.copies, self._operations = copies, operations
        self._sums: list[dist.Work] = []
        self._exchanges: list[tuple[Tensor, MeanExchange]] = []

    def begin(self, x: Tensor, encoders: Encoders) -> None:
        """Start summing `x`, [n], in place, with the codec of its unit."""
        if self.copies is None:
            return
        if encoders.codec == "float32":
            self._sums += begin_sum(x, self.copies, operations=self._operations)
            return
        both = (encoders.copies, encoders.mean)
        self._exchanges.append((x, MeanExchange(x, self.copies, encoders.codec, encoders=both)))

    def finish(self) -> None:
        """Wait for all sums."""
        wait_for(self._sums)
        for _, exchange in self._exchanges:
            exchange.turn()
        for x, exchange in self._exchanges:
            assert self.copies is not None
            x.copy_(exchange.result()).mul_(self.copies.size())
        self.forget()

    def forget(self) -> None:
        """Drop the sums in flight: nobody will read them."""
        self._sums.clear()
        self._exchanges.clear()
