"""Compiled steps: torch.compile per number of tokens, and CUDA graphs for decoding.

Blocks are compiled, not the network: they are alike, so one program computes all of them, and compiling takes
seconds where a network takes minutes. A program has a fixed number of tokens, 1, 2, 4, ...; smaller steps are
padded. The mix of shares in a step does not matter, because paged attention is one opaque operator that reads
it by itself (nn/kernels/paged_opaque.py): prefill, drafts and decoding use the same programs, on every
device.

A thread compiles one size after the other, on padding only. Steps look programs up and never compile: a size
without a program runs uncompiled. Programs are cached on disk for the next process. On GPUs, decode steps are
also recorded as CUDA graphs.

On CPUs a step of C++ operators is one call, which no compiled program beats (docs/limits.md).

A graph reads and writes the same addresses whenever it is replayed. The pages never move; a step's integers
are copied into tensors of the graph, one set for each number of sequences and block table width, both powers
of two. Spare rows write to a block that no sequence has. A graph is recorded when a step of its size first
comes; that takes about as long as the step, because its kernels were compiled before.

The graphs share one memory pool, so a step's result is copied out before the next replay. torch's own graphs
(mode="reduce-overhead") belong to the thread that records them, and would not be recorded again when the
pages change, which a compiled program does not see.
"""

import logging
import threading
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from penstock.core.clock import monotonic
from penstock.core.env import cache_folder, set_compiled_programs
from penstock.core.errors import ConfigError
from penstock.devices import accelerator
from penstock.engine.config import Compile
from penstock.engine.model_runner.kv_cache import BoundCache, PagedCache
from penstock.models.llama.model import Block, Llama
from penstock.nn import native
from penstock.nn.attention import Attend, Rope
from penstock.nn.kernels.paged_opaque import HiddenPages, pages_in_use
from penstock.nn.kernels.pages import PagedStep

log = logging.getLogger(__name__)

_MOST_PROGRAMS = 256
"""Recompile limit for all engines of a process; torch's default is 8."""

_MOST_TOKENS = 2048
"""Largest number of tokens of a program. Larger steps run uncompiled: a program would save little there."""

Program = Callable[[Block, Tensor, Rope, HiddenPages], Tensor]


def is_wanted(asked: Compile, *, device: torch.device, ranks: int) -> bool:
    """Return True if steps are compiled: `asked` is "on"; "auto" will mean where it was measured to pay.

    Raises:
        ConfigError: compilation was requested and is impossible.
    """
    if asked != "on":
        return False
    if ranks > 1:
        raise ConfigError(
            "compile=on supports one process only", got=f"tensor_parallel={ranks}", fix="Leave compile out."
        )
    if device.type == "cpu" and not native.is_available():
        raise ConfigError(
            "compile=on needs a C++ compiler on a CPU",
            got="none that works",
            fix="Install g++, or leave it out.",
        )
    return True


def sizes_up_to(most: int) -> list[int]:
    """Return the powers of two below `most`, and it.

    >>> sizes_up_to(48)
    [1, 2, 4, 8, 16, 32, 48]
    """
    return [*(1 << n for n in range((most - 1).bit_length())), most]


class CompiledSteps:
    """A `Forward` that uses compiled programs where they are ready, and the plain network elsewhere.

    Args:
        model: without adapters, on one rank.
        max_sequences: maximum shares of a step.
        max_tokens: maximum tokens of a step.
        max_blocks: maximum width of a block table.
        is_plain: called in each step; False: an adapter was added, so the compiled programs do not apply.
        backend: name of the torch.compile backend.
    """

    def __init__(
        self,
        model: Llama,
        cache: PagedCache,
        *,
        max_sequences: int,
        max_tokens: int,
        max_blocks: int,
        is_plain: Callable[[], bool] = lambda: True,
        backend: str = "inductor",
    ) -> None:
        self._model = model
        self._cache = cache
        self._is_plain = is_plain
        most = min(max_tokens, _MOST_TOKENS)
        self._sizes = sorted({*sizes_up_to(min(max_sequences, most)), *sizes_up_to(most)})
        self._max_sequences = max_sequences
        self._ready: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._compile_all, name="penstock-compile", daemon=True)
        compiled = torch.compile(_compute_block, backend=backend, dynamic=False, fullgraph=True)
        self._compiling = _with_blocks(model, compiled)
        # the same programs, looked up only: a size without a program runs uncompiled, for whatever reason
        self._compiled = _with_blocks(model, torch._dynamo.run(compiled))
        self._hidden_cache = _HiddenCache(
            [HiddenPages(torch.tensor(index), window) for index, window in enumerate(model.config.windows)]
        )
        self._graphs: DecodeGraphs | None = None
        if accelerator.kind_of(cache.device).has_graphs:
            self._graphs = DecodeGraphs(self._compute, cache, max_blocks=max_blocks, record=cuda_recorder())

    @property
    def ready(self) -> frozenset[int]:
        """Numbers of tokens whose programs are ready."""
        return frozenset(self._ready)

    def start(self) -> None:
        """Start compiling in a thread."""
        self._thread.start()

    def wait(self) -> None:
        """Wait until all sizes are compiled."""
        self._thread.join()

    def close(self) -> None:
        """Stop compiling after the current size. Idempotent."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def __call__(self, ids: Tensor, positions: Tensor, cache: BoundCache) -> Tensor:
        """Compute one step."""
        step, count = cache.step, ids.shape[1]
        size = next((size for size in self._sizes if size >= count), 0)
        if size not in self._ready or not self._is_plain():
            return self._model.hidden(ids, position_ids=positions, cache=cache)
        is_decoding = step.num_singles == count <= self._max_sequences
        if self._graphs is not None and is_decoding and not self._thread.is_alive():
            return self._graphs(ids, positions, step, size=size)
        more = (0, size - count)
        ids, positions = (nn.functional.pad(tensor, more) for tensor in (ids, positions))
        return self._compute(ids, positions, cache)[:, :count]

    def _compute(self, ids: Tensor, positions: Tensor, cache: BoundCache) -> Tensor:
        with pages_in_use(cache.layers):
            return self._compiled.hidden(ids, position_ids=positions, cache=self._hidden_cache)

    def _compile_all(self) -> None:
        started = monotonic()
        set_compiled_programs(cache_folder() / "compiled", given=False)
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_PROGRAMS)
        for size in self._sizes:
            if self._stop.is_set():
                return
            try:
                self._run_alone(size)
            except Exception as error:  # a compiler may raise anything; uncompiled steps still work
                log.warning("compile=failed size=%d reason=%r", size, str(error)[:500])
                return
            self._ready.add(size)
        log.info("compile=done programs=%d seconds=%.1f", len(self._sizes), monotonic() - started)

    @torch.inference_mode()
    def _run_alone(self, size: int) -> None:
        """Compute a step of padding only: compiles the programs of a size and writes to no page."""
        none = torch.zeros(0, dtype=torch.int32, device=self._cache.device)
        step = PagedStep(
            slots=none.long(),
            query_starts=none.new_zeros(1),
            lengths=none,
            block_tables=none.view(0, 1),
            spans=(),
            num_singles=0,
        )
        filling = torch.zeros(1, size, dtype=torch.int64, device=self._cache.device)
        with pages_in_use(self._cache.bound(step).layers):
            self._compiling.hidden(filling, position_ids=filling.clone(), cache=self._hidden_cache)


@dataclass(frozen=True, slots=True)
class _HiddenCache:
    """Cache that the network sees while a step's pages are hidden from the compiler."""

    layers: list[HiddenPages]

    def attend(self, window: int | None) -> Attend:  # noqa: ARG002
        return _attend_nothing


def _attend_nothing(q_bhld: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, scale: float) -> Tensor:  # noqa: ARG001
    raise AssertionError(f"hidden pages attend by themselves, here to {q_bhld.shape}")


class _CompiledBlock(nn.Module):
    """A block computed by a compiled program."""

    def __init__(self, block: Block, program: Program) -> None:
        super().__init__()
        self._block = block
        self._program = program

    def forward(self, x: Tensor, rope: Rope, _: Attend, cache: HiddenPages) -> Tensor:
        return self._program(self._block, x, rope, cache)


def _compute_block(block: Block, x: Tensor, rope: Rope, pages: HiddenPages) -> Tensor:
    """The compiled function. As in training nothing is in place: the compiler decides what to fuse."""
    return Block.forward(block, x, rope, _attend_nothing, pages)


def _with_blocks(model: Llama, program: Program) -> Llama:
    """Return a network with the same parameters whose blocks are computed by `program`."""
    twin = copy(model)
    twin._modules = dict(model._modules)
    twin.layers = nn.ModuleList(_CompiledBlock(cast(Block, block), program) for block in model.layers)
    return twin


Replay = Callable[[], Tensor]
Record = Callable[[Callable[[], Tensor]], Replay]
"""Records the kernels that a function launches; returns a function that launches them again."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A CUDA graph and the tensors that it reads."""

    ids: Tensor
    positions: Tensor
    step: PagedStep
    replay: Replay

    def fill(self, ids: Tensor, positions: Tensor, step: PagedStep, *, spare: tuple[int, int]) -> None:
        """Copy a step's integers into the graph; spare rows are sequences of one token at block and slot
        `spare`."""
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
    """CUDA graphs of decode steps (one token per sequence), recorded on first use.

    Args:
        compute: (ids [1, t], positions [1, t], cache) -> [1, t, hidden]; does not synchronise with the
            host.
        cache: its last block belongs to no sequence.
        max_blocks: maximum width of a block table.
        record: makes a graph; tests pass another one.
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
        """Compute a step of at most `size` tokens with the graph of that size."""
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
            spans=(),  # the host knows no lengths during a replay
            num_singles=size,
        )
        cache = self._cache.bound(step)
        replay = self._record(lambda: self._compute(ids, positions, cache))
        self._graphs[size, width] = graph = _Recorded(ids, positions, step, replay)
        return graph


def cuda_recorder() -> Record:
    """Return a function that records CUDA graphs in a memory pool of their own."""
    pool = torch.cuda.graph_pool_handle()

    def record(compute: Callable[[], Tensor]) -> Replay:
        aside, current = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            compute()  # one-time work such as loading libraries must not be recorded
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            out = compute()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    return record
