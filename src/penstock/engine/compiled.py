"""Steps compiled by torch.compile: a program for each size of step, made while plain code serves.

A program has fixed shapes: 1, 2, 4, ... tokens, as many shares as fit into both these and the engine, and
a table of blocks as wide as the context. A step between two sizes is filled up with tokens that write to
a block of no sequence, and with shares of one of them each, or of none once they have run out. A thread
compiles one size after the other, on filling alone; as soon as a program has run, steps of its size use
it, so no request waits for the compiler. Programs are kept on disk and found again by the next process.

On CPUs prompts, drafts and answers in the making share programs, because the operators take shares of any
length; they also do what the compiler would fuse, and copies of the pages cost more (docs/limits.md). On
GPUs a program is a CUDA graph of decoding alone, and a step with any longer share stays plain (that has
never run: see docs/limits.md).
"""

import logging
import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from penstock.core.clock import monotonic
from penstock.core.env import cache_folder, set_compiled_programs
from penstock.core.errors import ConfigError
from penstock.engine.config import Compile
from penstock.engine.kv_cache import BoundCache, PagedCache
from penstock.models.llama.model import Llama
from penstock.nn import native
from penstock.nn.kernels.paged import PagedStep

log = logging.getLogger(__name__)

_MOST_PROGRAMS = 64


def is_wanted(asked: Compile, *, device: torch.device, ranks: int) -> bool:
    """Decide whether steps are compiled: where it was asked for; "auto" will be where it was measured to pay.

    Raises:
        ConfigError: it was asked for and cannot be.
    """
    if asked != "on":
        return False
    if ranks > 1:
        raise ConfigError(
            "compile=on is for one process", got=f"tensor_parallel={ranks}", fix="Leave compile out."
        )
    if device.type == "cpu" and not native.is_available():
        raise ConfigError(
            "compile=on needs the C++ operators on a CPU",
            got="no compiler",
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
    """A `Forward` that is compiled where it can be and plain where it is not yet.

    Args:
        model: as it serves; without adapters and on one rank.
        cache: its last block belongs to no sequence.
        max_sequences: shares of a step, at most.
        max_tokens: of a step.
        max_blocks: of a sequence's table.
        is_plain: asked in each step: whether the network is as it was compiled, with no adapter added since.
        backend: torch's name of what turns graphs into programs.
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
        self._max_blocks = max_blocks
        self._is_plain = is_plain
        self._max_sequences = max_sequences
        self._takes_prompts = cache.device.type == "cpu"
        self._sizes = sizes_up_to(max_sequences)
        if self._takes_prompts:
            self._sizes = sorted({*self._sizes, *sizes_up_to(max_tokens)})
        self._ready: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._compile_all, name="penstock-compile", daemon=True)
        graphs = backend == "inductor" and cache.device.type == "cuda"
        if graphs:  # the pages stay where they are: a graph may write to them
            torch._dynamo.mark_static_address(cache.pages)
        self._program = torch.compile(
            self._compute, backend=backend, dynamic=False, mode="reduce-overhead" if graphs else None
        )

    @property
    def ready(self) -> frozenset[int]:
        """Numbers of tokens whose programs are in use."""
        return frozenset(self._ready)

    def start(self) -> None:
        """Begin to compile, beside the caller."""
        self._thread.start()

    def wait(self) -> None:
        """Return when all there will be is compiled."""
        self._thread.join()

    def close(self) -> None:
        """Compile no further size; waits for the one in the making. Once more does nothing."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def __call__(self, ids: Tensor, positions: Tensor, cache: BoundCache) -> Tensor:
        """Compute one step."""
        step, count = cache.step, ids.shape[1]
        size = next((size for size in self._sizes if size >= count), 0)
        is_taken = self._takes_prompts or step.num_singles == count
        if not is_taken or size not in self._ready or not self._is_plain():
            return self._model.hidden(ids, position_ids=positions, cache=cache)
        hidden: Tensor = self._program(*self._filled(size, ids, positions, step))
        return hidden[:, :count]

    def _filled(self, size: int, ids: Tensor, positions: Tensor, step: PagedStep) -> tuple[Tensor, ...]:
        """Return a step's integers in a program's shapes, as tensors of their own."""
        count, num_shares = ids.shape[1], len(step.lengths)
        more = min(size, self._max_sequences) - num_shares
        last_block, block_size = self._last_block()
        ends = torch.arange(count + 1, count + more + 1, dtype=torch.int32, device=ids.device)
        tables = functional.pad(step.block_tables, (0, self._max_blocks - step.block_tables.shape[1]))
        return (
            functional.pad(ids, (0, size - count)),
            functional.pad(positions, (0, size - count)),
            functional.pad(step.slots, (0, size - count), value=last_block * block_size),
            torch.cat([step.query_starts, ends.clamp_(max=size)]),
            functional.pad(step.lengths, (0, more), value=1),
            functional.pad(tables, (0, 0, 0, more), value=last_block),
        )

    def _last_block(self) -> tuple[int, int]:
        """Return its number, and the positions of a block."""
        return self._cache.pages.shape[2] - 1, self._cache.pages.shape[4]

    def _compute(self, ids: Tensor, positions: Tensor, *integers: Tensor) -> Tensor:
        slots, query_starts, lengths, block_tables = integers
        step = PagedStep(
            slots=slots,
            query_starts=query_starts,
            lengths=lengths,
            block_tables=block_tables,
            spans=(),  # plain attention that needs them refuses, and is not compiled
            num_singles=len(lengths),
        )
        return self._model.hidden(ids, position_ids=positions, cache=self._cache.bound(step))

    def _compile_all(self) -> None:
        started = monotonic()
        set_compiled_programs(cache_folder() / "compiled", given=False)
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_PROGRAMS)
        for size in self._sizes:
            if self._stop.is_set():
                return
            try:
                self._run_alone(size)
            except Exception as error:  # whatever a compiler may raise: plain code serves on
                log.warning("compile=failed size=%d reason=%r", size, str(error)[:500])
                return
            self._ready.add(size)
        log.info("compile=done programs=%d seconds=%.1f", len(self._sizes), monotonic() - started)

    @torch.inference_mode()
    def _run_alone(self, size: int) -> None:
        """Run a size's program on filling alone, which compiles it; twice, as CUDA graphs are recorded."""
        none = torch.zeros(0, dtype=torch.int32, device=self._cache.device)
        step = PagedStep(
            slots=none.long(),
            query_starts=none.new_zeros(1),
            lengths=none,
            block_tables=none.view(0, 1),
            spans=(),
            num_singles=0,
        )
        for _ in range(2):
            self._program(*self._filled(size, none.long()[None], none.long()[None], step))
