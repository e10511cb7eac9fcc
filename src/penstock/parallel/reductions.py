"""Reductions of gradients that go on while the backward pass does, on CPUs, where FSDP2 waits for each.

A rank sends every other the part of the gradients that it keeps, and each adds up what it received: an
all-to-all and a local sum in float32. Gloo's own reduce-scatter is an all-reduce, of twice the bytes. What is
sent may be encoded, since nothing is added up on the way.

FSDP2 reads the result of a reduction as soon as it has begun: it makes the first one of a step the gradient,
as a view, and adds each later one to it. So what was not received yet must not be what it adds. The first
result is left empty and filled when it arrives; of the later ones FSDP2 is given zeros, and what arrives is
added to the first, here. Nothing may read a gradient before the end of `deferred`.

Where shards have copies, the sum over them follows the last micro-batch's reduction, once a step, and is
under way as well. What is waited for depends on bytes alone, not on what has arrived: collectives begin in
the same order on all ranks, always.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.parallel.agreements import Agreements
from penstock.parallel.encoder import Encoders
from penstock.parallel.fsdp_private import DefaultReduceScatter, Unit
from penstock.parallel.operations import Exchanged, begin_exchange, wait_for


@dataclass(slots=True)
class _Arriving:
    """A reduction under way."""

    parts: list[Exchanged]
    to: Tensor
    """[n] Where the sum goes."""
    is_first: bool
    """Whether nothing is there yet."""
    num_bytes: int
    is_last: bool
    """Whether its sum is the step's, which copies have to agree on."""
    encoders: Encoders


class Reductions:
    """The reductions of a model's units, in the order they begin.

    Args:
        copies: ranks that hold the same shards; None: each shard is on one rank.
        num_averaged: ranks over which gradients are averaged.
        window: bytes of whole gradients under way, at most; one larger than that goes alone.
        operations: of one collective.
        can_defer: if not, each reduction is waited for, on a GPU by its stream.
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
        """Whether reductions are waited for later; else each at once."""
        self.is_last = True
        """Whether the reductions that begin now are the last of their step."""

    def begin(
        self, given: Tensor, to: Tensor, group: dist.ProcessGroup, *, is_first: bool, encoders: Encoders
    ) -> None:
        """Begin to reduce `given`, [ranks * n]; this rank's part is put to `to`, [n], or added to it."""
        while self._arriving and self._under_way + given.nbytes > self._window:
            self._receive()
        rows = given.view(group.size(), -1)
        parts = begin_exchange(rows, group, operations=self._operations, encoder=encoders.shards)
        self._arriving.append(_Arriving(parts, to, is_first, given.nbytes, self.is_last, encoders))

    def at_once(self, given: Tensor, to: Tensor, group: dist.ProcessGroup, *, encoders: Encoders) -> None:
        """Reduce over the ranks of a group and, if it is the step's last, their copies; wait for it."""
        is_last, self.is_last = self.is_last, False
        self.begin(given, to, group, is_first=True, encoders=encoders)
        self._flush()
        self.is_last = is_last
        self._agree_at_once(to, encoders)

    def _agree_at_once(self, x: Tensor, encoders: Encoders) -> None:
        """Average over copies what a step has given, if this is its last; else keep it until then."""
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
            x.zero_()  # FSDP2 adds it

    def between(self, gradients: Tensor, to: Tensor | None, *, encoders: Encoders) -> None:
        """Begin to average gradients that each rank holds whole, [n], over their copies.

        Args:
            to: what adds up over the step; it may be `gradients`. None: it is averaged at once, in place.
        """
        self._begin_due()
        gradients.div_(self._num_averaged)
        if to is None:
            self._agree_at_once(gradients, encoders)
            return
        if to is not gradients:
            to.add_(gradients)
            gradients.zero_()  # FSDP2 adds it
        if self.is_last:
            self._due = to, encoders

    def _begin_due(self) -> None:
        """Begin the last sum over copies that was asked for: not sooner, for after the call that asked FSDP2
        adds zeros to the gradient, and what is read and written while it is summed in place may be lost.
        """
        if self._due is not None:
            due, self._due = self._due, None
            self._between.begin(*due)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let reductions that begin inside be waited for at the end; only then are gradients there."""
        self.is_deferring = self._can_defer
        try:
            yield
            self._flush()
        finally:  # after an error nothing is left: it was the gradients of a step that is not taken
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
        """Wait for the oldest, and add it up."""
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
    """What FSDP2 calls to reduce the gradients of one unit: it makes the output of the first reduction of a
    step the gradient, and adds that of later ones to it.
    """

    counts_waits = True
    """For who counts those of FSDP2."""

    def __init__(self, unit: Unit, reductions: Reductions, encoders: Encoders) -> None:
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
        """Reduce the gradients of parameters that each rank holds whole, [n], over their copies."""
        self._reductions.between(output, self._total_of(output), encoders=self._encoders)

    def _total_of(self, output: Tensor) -> Tensor | None:
        """Return where this step's reductions add up; None where each has to be whole by itself."""
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
    """Stands for a reduction that is waited for elsewhere."""

    def wait(self, timeout: object = None) -> bool:  # noqa: ARG002 - as torch calls it
        return True


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
