"""The decode step compiled by torch.compile: a program for each size of batch, made while plain code serves.

A program has fixed shapes: 1, 2, 4, ... tokens, one of each sequence, and a table of blocks as wide as the
context. A step between two sizes repeats its last token, which writes the same numbers to the same place. A
thread compiles one size after the other, on numbers of its own in a block that no sequence has; as soon as a
program has run, steps of its size use it, so no request waits for the compiler. Programs are kept on disk and
found again by the next process. Steps with any longer share, that is with prompts, stay plain.

On CPUs the operators do what the compiler would fuse, and little is gained; on GPUs a program is a CUDA graph
(that has never run: see docs/limits.md).
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
    """Decide whether decoding is compiled: where it was asked for, or on a GPU.

    Raises:
        ConfigError: it was asked for and cannot be.
    """
    if asked == "off" or (asked == "auto" and (device.type == "cpu" or ranks > 1)):
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
    """Return the batch sizes that have programs.

    >>> sizes_up_to(48)
    [1, 2, 4, 8, 16, 32, 48]
    """
    return [*(1 << n for n in range((most - 1).bit_length())), most]


class CompiledDecode:
    """A `Forward` that is compiled where it can be and plain where it is not yet.

    Args:
        model: as it serves; without adapters and on one rank.
        cache: its last block belongs to no sequence.
        max_sequences: tokens of the largest program.
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
        max_blocks: int,
        is_plain: Callable[[], bool] = lambda: True,
        backend: str = "inductor",
    ) -> None:
        self._model = model
        self._cache = cache
        self._max_blocks = max_blocks
        self._is_plain = is_plain
        self._sizes = sizes_up_to(max_sequences)
        self._ready: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._compile_all, name="penstock-compile", daemon=True)
        graphs = backend == "inductor" and cache.device.type == "cuda"
        if graphs:  # the pages stay where they are: a graph may write to them
            torch._dynamo.mark_static_address(cache.pages)
        self._program = torch.compile(
            self._decode, backend=backend, dynamic=False, mode="reduce-overhead" if graphs else None
        )

    @property
    def ready(self) -> frozenset[int]:
        """Batch sizes whose programs are in use."""
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
        if step.num_singles != count or size not in self._ready or not self._is_plain():
            return self._model.hidden(ids, position_ids=positions, cache=cache)
        more = size - count
        hidden: Tensor = self._program(
            _repeated(ids, more),
            _repeated(positions, more),
            _repeated(step.slots, more),
            _repeated(step.lengths, more),
            functional.pad(
                _repeated(step.block_tables.t(), more),
                (0, 0, 0, self._max_blocks - step.block_tables.shape[1]),
            ).t(),
        )
        return hidden[:, :count]

    def _decode(
        self, ids: Tensor, positions: Tensor, slots: Tensor, lengths: Tensor, tables: Tensor
    ) -> Tensor:
        step = PagedStep(
            slots=slots,
            query_starts=torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device),
            lengths=lengths,
            block_tables=tables.contiguous(),
            spans=(),  # of longer shares, of which there are none
            num_singles=len(slots),
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
        """Run one size's program on zeros, which compiles it; twice, as CUDA graphs are recorded."""
        pages, device = self._cache.pages, self._cache.device
        last_block, block_size = pages.shape[2] - 1, pages.shape[4]
        for _ in range(2):
            zeros = torch.zeros(1, size, dtype=torch.long, device=device)
            self._program(
                zeros,
                zeros.clone(),
                torch.full((size,), last_block * block_size, device=device),
                torch.ones(size, dtype=torch.int32, device=device),
                torch.full((self._max_blocks, size), last_block, dtype=torch.int32, device=device).t(),
            )


def _repeated(x: Tensor, more: int) -> Tensor:
    """Return `x` with its last column as often again; a tensor of its own even where `more` is 0."""
    return torch.cat([x, x[..., -1:].expand(*x.shape[:-1], more)], dim=-1)
