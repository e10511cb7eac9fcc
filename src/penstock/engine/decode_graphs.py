"""Steps of decoding recorded as CUDA graphs: one launch for all kernels of a step; none ever ran on a GPU.

A graph reads and writes the same addresses whenever it is replayed. The pages never move; a step's integers
are copied into tensors of the graph's own, one set for each number of answers and width of tables, which are
powers of two. Spare rows write to a block that no sequence has. A graph is recorded when a step of its size
first comes; that takes about as long as the step, because what it launches was compiled before.

The graphs share one pool of memory, so a step's result is copied out before the next one is replayed.
torch's own graphs (mode="reduce-overhead") belong to the thread that records them, and would not be
recorded anew when pages are others that a program does not see.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.kv_cache import BoundCache, PagedCache
from penstock.nn.kernels.paged_step import PagedStep

Replay = Callable[[], Tensor]
Record = Callable[[Callable[[], Tensor]], Replay]
"""Notes what a function launches; returns what launches the same again."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A graph and the tensors that it reads."""

    ids: Tensor
    positions: Tensor
    step: PagedStep
    replay: Replay

    def fill(self, ids: Tensor, positions: Tensor, step: PagedStep, *, spare: tuple[int, int]) -> None:
        """Write a step's integers; spare rows are answers of one token at that block and slot."""
        count, width = step.block_tables.shape
        for tensor, given in (
            (self.ids[:, :count], ids),
            (self.positions[:, :count], positions),
            (self.step.slots[:count], step.slots),
            (self.step.lengths[:count], step.lengths),
            (self.step.block_tables[:count, :width], step.block_tables),
        ):
            tensor.copy_(given)
        self.step.block_tables[count:, 0], self.step.slots[count:] = spare
        self.step.lengths[count:] = 1


class DecodeGraphs:
    """Graphs of steps in which each answer has one token, recorded as they are needed.

    Args:
        compute: (ids [1, t], positions [1, t], cache) -> [1, t, hidden]; waits for nothing on the host.
        cache: its last block belongs to no sequence.
        max_blocks: of a sequence's table.
        record: makes a graph; another one in tests.
    """

    def __init__(
        self,
        compute: Callable[[Tensor, Tensor, BoundCache], Tensor],
        cache: PagedCache,
        *,
        max_blocks: int,
        record: Record,
    ) -> None:
        self._compute = compute
        self._cache = cache
        self._max_blocks = max_blocks
        self._record = record
        self._graphs: dict[tuple[int, int], _Recorded] = {}

    def __call__(self, ids: Tensor, positions: Tensor, step: PagedStep, *, size: int) -> Tensor:
        """Compute a step of at most `size` tokens by the graph of that size."""
        count, width = step.block_tables.shape
        width = min(self._max_blocks, 1 << (width - 1).bit_length())
        graph = self._graphs.get((size, width)) or self._recorded(size, width)
        _, _, num_blocks, _, block_size, _ = self._cache.pages.shape
        graph.fill(ids, positions, step, spare=(num_blocks - 1, (num_blocks - 1) * block_size))
        return graph.replay()[:, :count].clone()

    def _recorded(self, size: int, width: int) -> _Recorded:
        def integers(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._cache.device)

        ids, positions = (integers(1, size, dtype=torch.int64) for _ in range(2))
        spare = self._cache.pages.shape[2] - 1
        step = PagedStep(
            slots=integers(size, dtype=torch.int64) + spare * self._cache.pages.shape[4],
            query_starts=torch.arange(size + 1, dtype=torch.int32, device=self._cache.device),
            lengths=integers(size, dtype=torch.int32) + 1,
            block_tables=integers(size, width, dtype=torch.int32) + spare,
            spans=(),  # the host knows no lengths when a graph is replayed
            num_singles=size,
        )
        cache = self._cache.bound(step)
        replay = self._record(lambda: self._compute(ids, positions, cache))
        self._graphs[size, width] = graph = _Recorded(ids, positions, step, replay)
        return graph


def cuda_recorder() -> Record:
    """Return what records CUDA graphs in a pool of memory of their own."""
    pool = torch.cuda.graph_pool_handle()

    def record(compute: Callable[[], Tensor]) -> Replay:
        aside, current = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            compute()  # what is done once, such as opening libraries, must not be recorded
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            out = compute()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    return record
