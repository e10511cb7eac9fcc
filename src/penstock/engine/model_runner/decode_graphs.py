"""CUDA graphs of decode steps: from the token ids of a step to the next ones, recorded when an engine opens.

A step of one token per sequence is one graph launch. The graph embeds, computes the blocks and the logits,
and samples. There is a graph for each of a short list of numbers of sequences, with and without sampling;
smaller steps are padded.

    batch, settings -> pinned memory -> one upload -> block tables -> graph -> drawn tokens
                                                                        ^         |
                                                                        +---------+  the ids of the next step

A graph reads and writes the same addresses whenever it is replayed. The weights and the pages never move. All
graphs read one set of tensors, `StepInputs`, made for the largest step and the widest block table, so nothing
is recorded while requests are served. Padding rows are sequences of one token in a block that no sequence
has.

The graphs share one memory pool, and write one set of results, `StepResults`, that lies outside of it: the
logits and hidden states of a step are valid until the next replay. The largest graph is recorded first, and
the others fit into its memory. torch's own graphs (mode="reduce-overhead") belong to the thread that records
them, and would not be recorded again when the pages change, which a compiled program does not see.

A graph that does not fit into memory is left out: its steps use the next larger one, or are launched kernel
by kernel. After another failure those that were recorded stay, and no others are.
"""

import gc
from collections.abc import Callable, Iterable
from math import prod

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from penstock.core.clock import monotonic
from penstock.core.log import EventLog
from penstock.devices import accelerator
from penstock.engine.config import Compile
from penstock.engine.model_runner.batch import StepBatch
from penstock.engine.model_runner.drawn_tokens import DrawnTokens
from penstock.engine.model_runner.graph_plan import RecordedGraphs
from penstock.engine.model_runner.interface import StepOutput
from penstock.engine.model_runner.kv_cache import BoundCache, PagedCache
from penstock.engine.sampling.filters import draw
from penstock.nn.kernels.pages import PagedStep
from penstock.nn.triton_support import has_triton
from penstock.nn.upload import pinned, places_of

log = EventLog(__name__)

Outputs = tuple[Tensor, ...]
Replay = Callable[[], None]
Record = Callable[[Callable[[], None]], Replay]
"""Records the kernels that a function launches; returns a function that launches them again."""

Forward = Callable[[Tensor, Tensor, BoundCache], Tensor]
"""(ids [1, t], positions [1, t], cache) -> normalised hidden states [1, t, hidden], without waiting for the
device."""


def are_wanted(asked: Compile, *, device: torch.device, ranks: int) -> bool:
    """Return True if decode steps are recorded as CUDA graphs.

    Attention must be the kernels in Triton: plain torch gathers all pages of the widest table.
    """
    has_graphs = accelerator.kind_of(device).has_graphs and has_triton(device)
    return asked != "off" and ranks == 1 and has_graphs


class StepInputs:
    """Tensors that the graphs read, written by one upload and one copy of the block tables a step.

    Args:
        max_sequences: rows of the largest step.
        max_blocks: width of the widest block table.
        num_groups: cache groups.
        spare_block: block that no sequence has, for padding rows.
    """

    def __init__(
        self,
        *,
        max_sequences: int,
        max_blocks: int,
        num_groups: int = 1,
        spare_block: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._spare_block, self._spare_slot = spare_block, spare_block * block_size
        row = (max_sequences,)
        rows: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
            "token_ids": (np.int64, row),
            "unread": (np.int64, row),
            "drawn": (np.int64, row),
            "positions": (np.int64, row),
            "slots": (np.int64, (num_groups, max_sequences)),
            "settings": (np.float64, (max_sequences, 5)),
            "lengths": (np.int32, row),
        }
        sizes = [np.dtype(kind).itemsize * prod(shape) for kind, shape in rows.values()]
        starts, self._first_table = places_of(sizes)
        self._rows = dict(zip(rows, zip(starts, sizes, rows.values(), strict=True), strict=True))
        self._uploaded = torch.zeros(
            self._first_table + num_groups * max_sequences * max_blocks * 4, dtype=torch.uint8, device=device
        )
        whole = {name: self._view(self._uploaded, name) for name in rows}
        self.token_ids, self.unread, self.drawn = whole["token_ids"], whole["unread"], whole["drawn"]
        """Known ids, places of the others (`DrawnTokens.ids`), and places of the sampled tokens."""
        self.positions, self.slots = whole["positions"], whole["slots"]
        self.settings, self.lengths = whole["settings"], whole["lengths"]
        self.slots += self._spare_slot
        self.lengths += 1
        self.block_tables = torch.full(
            (num_groups, max_sequences, max_blocks), spare_block, dtype=torch.int32, device=device
        )
        self.query_starts = torch.arange(max_sequences + 1, dtype=torch.int32, device=device)

    def steps(self, size: int) -> list[PagedStep]:
        """Return the sequences of a graph of `size` rows, for each cache group."""
        return [
            PagedStep(
                slots=slots[:size],
                query_starts=self.query_starts[: size + 1],
                lengths=self.lengths[:size],
                block_tables=tables[:size],
                spans=(),  # the host knows no lengths during a replay
                num_singles=size,
            )
            for slots, tables in zip(self.slots, self.block_tables, strict=True)
        ]

    def write(
        self, batch: StepBatch, settings: Float64[Tensor, "t 5"] | None, drawn: DrawnTokens, *, size: int
    ) -> None:
        """Upload a step of at most `size` tokens, one per sequence; `settings` as in `StepRunner.run`.

        Args:
            drawn: has the ids that the host has not read; the sampled tokens become its last ones.
        """
        groups, count, width = batch.block_tables.shape
        end = self._first_table + groups * size * width * 4
        packed = pinned(end, self._uploaded.device)  # torch keeps it until the upload is done
        rows = {name: self._view(packed, name).numpy() for name in self._rows}
        rows["token_ids"][:count], rows["unread"][:count] = drawn.split(batch.token_ids)
        for name in ("positions", "slots", "lengths"):
            rows[name][..., :count] = getattr(batch, name)
        rows["token_ids"][count:size] = rows["unread"][count:size] = rows["positions"][count:size] = 0
        rows["drawn"][:size] = np.arange(size) + drawn.turn()
        rows["slots"][:, count:size] = self._spare_slot
        rows["lengths"][count:size] = 1
        if settings is not None:
            rows["settings"][:count] = settings.numpy()
            rows["settings"][count:size] = (0, 1, 0, 0, 0)  # greedy
        tables = packed[self._first_table :].view(torch.int32).view(groups, size, width).numpy()
        tables[:, :count] = batch.block_tables
        tables[:, count:] = self._spare_block
        self._uploaded[:end].copy_(packed, non_blocking=True)
        there = self._uploaded[self._first_table : end].view(torch.int32).view(groups, size, width)
        self.block_tables[:, :size, :width].copy_(there)

    def _view(self, memory: Tensor, name: str) -> Tensor:
        start, size, (kind, shape) = self._rows[name]
        found = memory[start : start + size].view(torch.from_numpy(np.zeros(0, kind)).dtype)
        return found.view(shape)


class StepResults:
    """Tensors that the graphs write: the first rows are those of the last step.

    Args:
        like: hidden states [t, hidden] and logits [t, vocab] of a step.
    """

    def __init__(self, max_sequences: int, like: Outputs) -> None:
        self._tensors = tuple(tensor.new_empty(max_sequences, tensor.shape[1]) for tensor in like)

    def write(self, found: Outputs) -> None:
        """Write the results of a step."""
        for tensor, rows in zip(self._tensors, found, strict=True):
            tensor[: len(rows)].copy_(rows)

    def rows(self, count: int) -> Outputs:
        """Return hidden states and logits of `count` sequences."""
        return tuple(tensor[:count] for tensor in self._tensors)


class DecodeGraphs:
    """CUDA graphs of decode steps.

    Args:
        forward: the network, plain or compiled.
        project: from hidden states to logits.
        cache: its last block belongs to no sequence.
        drawn: keeps the sampled tokens of at least as many sequences.
        sizes: numbers of sequences that have a graph.
        max_blocks: width of the widest block table.
        record: makes a graph; tests pass another one.
    """

    def __init__(
        self,
        forward: Forward,
        project: Callable[[Float[Tensor, "t hidden"]], Float[Tensor, "t vocab"]],
        cache: PagedCache,
        drawn: DrawnTokens,
        *,
        sizes: Iterable[int],
        max_blocks: int,
        record: Record,
    ) -> None:
        self._forward, self._project, self._cache, self._record = forward, project, cache, record
        self._drawn = drawn
        self._sizes, self._max_blocks = sorted(sizes), max_blocks
        self._graphs: dict[tuple[int, bool], Replay] = {}  # by rows, and whether any row is sampled
        self._results: StepResults | None = None  # made by the first step, which is not recorded
        _, _, num_blocks, _, block_size, _ = cache.pages.shape
        self._inputs = StepInputs(
            max_sequences=self._sizes[-1],
            max_blocks=max_blocks,
            num_groups=cache.num_groups,
            spare_block=num_blocks - 1,
            block_size=block_size,
            device=cache.device,
        )

    @property
    def sizes(self) -> list[int]:
        """Numbers of sequences that have graphs."""
        return sorted({size for size, _ in self._graphs})

    @torch.inference_mode()
    def record_all(self) -> RecordedGraphs:
        """Record a graph of every size, the largest first; log what does not fit into memory."""
        began, free = monotonic(), _free_bytes(self._cache.device)
        for size in reversed(self._sizes):
            found = {}
            try:
                for samples in (True, False):
                    found[size, samples] = self._record(self._computing(size, samples=samples))
            except Exception as error:  # a driver or a kernel may raise anything; plain steps still work
                found.clear()  # what a failed recording holds
                gc.collect()
                if accelerator.is_accelerator(self._cache.device):
                    accelerator.free_cache()
                if not is_out_of_memory(error):
                    log.warning(
                        "graphs_failed",
                        "Steps of {sequences:#sequence} or fewer have no graph: {error}",
                        sequences=size,
                        error=str(error)[:500],
                    )
                    break
                log.warning(
                    "graphs_left_out",
                    "No memory for the graph of {sequences} sequences. Such steps are launched "
                    "kernel by kernel, which is slower. Give the cache less memory (--cache-gib), or "
                    "lower --max-sequences. {error}",
                    sequences=size,
                    error=str(error)[:200],
                )
                continue
            self._graphs |= found
        seconds, taken = monotonic() - began, max(0, free - _free_bytes(self._cache.device))
        log.info(
            "graphs_recorded",
            "Recorded graphs of {sequences} sequences in {duration_s:.1f} s; they take {memory_bytes:bytes}",
            sequences=",".join(map(str, self.sizes)),
            duration_s=seconds,
            memory_bytes=taken,
        )
        return RecordedGraphs(sizes=tuple(self.sizes), seconds=seconds, num_bytes=taken)

    def takes(self, batch: StepBatch, settings: Float64[Tensor, "r 5"] | None) -> bool:
        """Return True if a graph computes a step: one token per sequence, all of them sampled, without
        adapters."""
        count = len(batch.token_ids)
        return (
            batch.num_singles == count == len(batch.logit_rows)
            and (settings is None or len(settings) == count)
            and not len(batch.vector_rows)
            and self._size_for(count) is not None
            and batch.block_tables.shape[2] <= self._max_blocks
            and bool((batch.adapters < 0).all())
        )

    def run(self, batch: StepBatch, settings: Float64[Tensor, "t 5"] | None) -> StepOutput:
        """Compute and sample a step that `takes` accepts."""
        count = len(batch.token_ids)
        size = self._size_for(count)
        assert size is not None, count
        self._inputs.write(batch, settings, self._drawn, size=size)
        self._graphs[size, settings is not None]()
        assert self._results is not None
        hidden, logits = self._results.rows(count)
        return StepOutput(hidden, logits, drawn=self._drawn.read(count))

    def _size_for(self, count: int) -> int | None:
        return next((size for size in self._sizes if size >= count and (size, True) in self._graphs), None)

    def _computing(self, size: int, *, samples: bool) -> Callable[[], None]:
        inputs = self._inputs

        def compute() -> None:
            ids = self._drawn.ids(inputs.token_ids[:size], inputs.unread[:size])
            positions = inputs.positions[:size]
            cache = self._cache.bound(*inputs.steps(size))
            hidden = self._forward(ids[None], positions[None], cache)[0]
            logits = self._project(hidden)
            tokens = draw(logits, inputs.settings[:size] if samples else None)
            self._drawn.table.index_copy_(0, inputs.drawn[:size], tokens)
            if self._results is None:
                self._results = StepResults(self._sizes[-1], (hidden, logits))
            self._results.write((hidden, logits))

        return compute


def cuda_recorder(device: torch.device | None = None) -> Record:
    """Return a function that records CUDA graphs in a memory pool of their own.

    Args:
        device: device that computes; None: the present one. Recorded elsewhere, a graph would be empty.
    """
    pool = torch.cuda.graph_pool_handle()
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(compute: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            current = torch.cuda.current_stream()
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                compute()  # one-time work such as loading libraries must not be recorded
            current.wait_stream(aside)
            with (
                torch.cuda.stream(current),  # torch leaves the stream of a failed recording in place
                torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"),
            ):
                compute()
        return graph.replay

    return record


def is_out_of_memory(error: Exception) -> bool:
    """Return True if an error says that a device's memory is full; recordings report it in the driver's
    words."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def _free_bytes(device: torch.device) -> int:
    return accelerator.free_and_total_bytes(device)[0] if accelerator.is_accelerator(device) else 0
