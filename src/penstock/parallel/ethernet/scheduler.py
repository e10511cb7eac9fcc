"""Communication schedule of sharded training: gathers ahead within a window, reductions in the background.

Five techniques, all exact (docs/explanation/ethernet.md has gains and costs):

    window      the next units are gathered while one computes, within a limit of bytes; those at the end
                of a pass stay, because the next pass begins with them
    behind      gradients are reduced during the backward pass, and waited for at the step's end
    keep        within a budget, units stay gathered through a step's micro-batches and are reduced once
    schedule    each block processes all micro-batches before the next: a gather per direction, one reduction
    hierarchy   replicas of shards are averaged once a step; distant ranks communicate least

On GPUs FSDP2 has streams for all of this and only gets its window, what to keep and when to average replicas.
On CPUs its collectives block, so it gets others. In both cases the order of a rank's collectives follows from
sizes and the number of micro-batches, which are equal on all ranks.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from penstock.parallel.config import EthernetConfig
from penstock.parallel.ethernet import gather_plan
from penstock.parallel.ethernet.async_collectives import PendingCollective, begin_gather
from penstock.parallel.ethernet.breadth_first import take_micro_batches
from penstock.parallel.ethernet.codecs import Encoders
from penstock.parallel.ethernet.gather_plan import Ledger, ahead, staying, window_of
from penstock.parallel.ethernet.reductions import ReduceBehind, Reductions
from penstock.parallel.mesh import Mesh
from penstock.parallel.sharding.fsdp_private import DefaultAllGather, FsdpUnit, units_of

_FLOAT32 = 4
_NONE: frozenset[int] = frozenset()
_REDUCE_INPUTS = 2  # of FSDP2 on GPUs: one is filled while the other is sent


class Ethernet:
    """Communication of one model; the passes of a training step run inside `step`.

    Args:
        stages: sharded models, possibly still on the meta device.
        compute_dtype: dtype of gathered parameters.
        num_nics: number of network cards for collectives.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mesh: Mesh,
        config: EthernetConfig,
        *,
        compute_dtype: torch.dtype,
        num_nics: int = 1,
    ) -> None:
        self._config, self._mesh = config, mesh
        self._copies = mesh.copies_group
        self._stages = [_Stage(model, config, compute_dtype.itemsize) for model in stages]
        self._num_micro_batches = self._index = 0
        self._operations = config.operations or num_nics
        self._reductions: Reductions | None = None
        self.ledger = Ledger()
        """Bytes of gathers in flight, on CPUs."""
        if config.overlap and mesh.data.size() > 1:
            self._overlap()
        if self.is_breadth_first:
            for stage in self._stages:
                take_micro_batches(stage.model, stage.units)

    @property
    def is_breadth_first(self) -> bool:
        """True if a step is one pass over all its micro-batches."""
        return self._config.schedule == "breadth_first"

    @contextmanager
    def step(self, num_micro_batches: int) -> Iterator[None]:
        """Context manager for the passes of a step; at its end gradients are complete, and all is sharded
        again.

        Args:
            num_micro_batches: number of calls of `next_micro_batch`; 1 if breadth first.
        """
        self._num_micro_batches, self._index = num_micro_batches, 0
        budget = self._config.keep_bytes if self._mesh.num_shards > 1 else 0.0
        for stage in self._stages:
            stage.choose(budget, num_micro_batches)
        behind = nullcontext() if self._reductions is None else self._reductions.deferred()
        try:
            with behind:
                yield
        finally:
            for stage in self._stages:
                stage.release()

    def next_micro_batch(self) -> None:
        """Prepare the step's next micro-batch; not needed with a pipeline."""
        is_first, is_last = self._index == 0, self._index == self._num_micro_batches - 1
        assert self._index < self._num_micro_batches, (self._index, self._num_micro_batches)
        self._index += 1
        for stage in self._stages:
            stage.prepare(is_first=is_first, is_last=is_last)
        if self._reductions is not None:
            self._reductions.is_last = is_last
        elif self._config.overlap and self._copies is not None:
            for stage in self._stages:
                stage.root.set_requires_all_reduce(is_last)

    def _overlap(self) -> None:
        """Set up gathers ahead and reductions in the background."""
        on_cpu, has_shards = self._mesh.state.device_type == "cpu", self._mesh.num_shards > 1
        for stage in self._stages:
            if on_cpu and has_shards:
                stage.gather_behind(self._operations, self.ledger)
            elif has_shards:
                stage.root.set_reduce_scatter_max_input_buffers(_REDUCE_INPUTS)
        units = [unit for stage in self._stages for unit in stage.units]
        can_defer = on_cpu and all(unit.is_float32 for unit in units)  # else FSDP2 reads a sum to round it
        if can_defer or self._config.reduce != "float32":
            self._reductions = self._reduce_behind(units, has_shards=has_shards, can_defer=can_defer)

    def _reduce_behind(self, units: Sequence[FsdpUnit], *, has_shards: bool, can_defer: bool) -> Reductions:
        blocks = [_FLOAT32 * unit.num_reduced for unit in units if not unit.is_root]
        reductions = Reductions(
            copies=self._copies,
            num_averaged=self._mesh.data.size(),
            window=window_of(blocks, asked=self._config.window_bytes, usual=1),
            operations=self._operations,
            can_defer=can_defer,
        )
        for unit in units:
            unit.leave_copies_alone()
            encoders = Encoders.of(self._config.reduce, feedback=self._config.feedback)
            reduce = ReduceBehind(unit, reductions, encoders)
            if has_shards:
                unit.module.set_custom_reduce_scatter(reduce)
            else:
                unit.module.set_all_reduce_hook(reduce.whole)
        return reductions


class _Stage:
    """A model with an FSDP root: the whole model, or a pipeline stage."""

    def __init__(self, model: nn.Module, config: EthernetConfig, gathered_bytes: int) -> None:
        self.model, self.root = model, cast(FSDPModule, model)
        self.units = units_of(model)
        """Units in the order of the forward pass, the root first."""
        self._sizes = [_size(unit, gathered_bytes) for unit in self.units]
        pairs = zip(self.units, self._sizes, strict=True)
        blocks = [size.parameters for unit, size in pairs if not unit.is_root]
        self._window = window_of(blocks, asked=config.window_bytes) if config.overlap else None
        self._room = min(self._window or 0, window_of(blocks, asked=0))
        self._backward = sorted(range(len(self.units)), key=lambda i: (not self.units[i].is_root, -i))
        self._stays = [unit.stays_between for unit in self.units]
        self._kept, self._turns = gather_plan.ResidentUnits(), False
        self.release()

    def gather_behind(self, operations: int, ledger: Ledger) -> None:
        """Make gathers asynchronous."""
        for unit in self.units:
            unit.gather_behind()
            unit.module.set_custom_all_gather(GatherBehind(operations=operations, ledger=ledger))

    def choose(self, budget: float, num_micro_batches: int) -> None:
        """Choose what stays unsharded through a step."""
        self._kept = gather_plan.choose(self._sizes, budget=budget, num_micro_batches=num_micro_batches)
        self._turns = self._window is not None

    def release(self) -> None:
        """Keep nothing unsharded, as outside of a step."""
        self._kept, self._turns = gather_plan.ResidentUnits(), False
        self.prepare(is_first=True, is_last=True)

    def prepare(self, *, is_first: bool, is_last: bool) -> None:
        """Set what the passes of the next micro-batch gather ahead and keep."""
        kept, turned = self._kept, self._turned() if self._turns else (_NONE, _NONE)
        for i, unit in enumerate(self.units):
            unit.stay(
                after_forward=i in kept.parameters or i in turned[0],
                after_backward=not is_last and (i in kept.parameters or i in turned[1]),
                reduce=is_last or i not in kept.gradients,
            )
        if self._window is None:
            return
        forward = [*range(len(self.units))]
        there, held = (_NONE, _NONE) if is_first else (turned[1], kept.parameters)
        for unit, later in self._ahead(forward, held, there):
            if unit.is_root:  # it computes little: gathers beside its successor's would delay that one
                later = later[:1]
            unit.module.set_modules_to_forward_prefetch([other.module for other in later])
        held = kept.parameters | {i for i, stays in enumerate(self._stays) if stays}
        for unit, later in self._ahead(self._backward, held, turned[0]):
            unit.module.set_modules_to_backward_prefetch([other.module for other in later])

    def _turned(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the units that stay gathered from the end of a forward and of a backward pass for the next
        pass, which runs in the opposite order: as many as fit the window. The root is always gathered, so it
        stays too.
        """
        sizes = [0 if i in self._kept.parameters else size.parameters for i, size in enumerate(self._sizes)]
        roots = frozenset(i for i, unit in enumerate(self.units) if unit.is_root)
        ends = staying([0 if self._stays[i] else size for i, size in enumerate(sizes)], self._room)
        begins = staying([0 if i in roots else sizes[i] for i in self._backward], self._room)
        return ends, roots | {self._backward[place] for place in begins}

    def _ahead(
        self, order: Sequence[int], held: Collection[int], there: Collection[int]
    ) -> Iterator[tuple[FsdpUnit, list[FsdpUnit]]]:
        """Yield the units in order of use, with the units to gather while each computes."""
        assert self._window is not None
        sizes = [0 if i in held else self._sizes[i].parameters for i in order]
        lists = ahead(sizes, self._window, there={order.index(i) for i in there})
        for i, later in zip(order, lists, strict=True):
            yield self.units[i], [self.units[order[place]] for place in later]


def _size(unit: FsdpUnit, gathered_bytes: int) -> gather_plan.UnitBytes:
    return gather_plan.UnitBytes(
        parameters=gathered_bytes * unit.num_gathered,
        gradients=_FLOAT32 * unit.num_reduced,
        gathers=1 if unit.stays_between or unit.gathers_near else 2,
    )


class GatherBehind(DefaultAllGather):
    """FSDP2's all-gather, split into operations and waited for when the result is needed.

    Args:
        operations: operations per gather.
        ledger: counter of bytes in flight.
    """

    def __init__(self, *, operations: int, ledger: Ledger) -> None:
        self._operations, self._ledger = operations, ledger

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather `input_tensor` of every rank; the result is valid after `wait`."""
        size = output_tensor.nbytes
        self._ledger.begin(size)
        works = begin_gather(output_tensor, input_tensor, group, operations=self._operations)
        in_progress = PendingCollective(works, lambda: self._ledger.end(size))
        if not async_op:
            in_progress.wait()
        return in_progress
