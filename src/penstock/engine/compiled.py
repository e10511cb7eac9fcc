"""Steps compiled by torch.compile: a program for each number of tokens, made while plain code serves.

Blocks are compiled, not the network: they are alike, so one program computes all, and compiling it takes
seconds where a network takes minutes. A program has a fixed number of tokens, 1, 2, 4, ...; a step between
two is filled up. What shares a step has does not matter, because attention over pages is one operator that
finds them by itself (nn/kernels/hidden_pages.py): prompts, drafts and answers in the making use the same
programs, on every device.

A thread compiles one size after the other, on filling alone. Steps look programs up and never compile: what
has none yet is computed plainly. Programs are kept on disk and found again by the next process. On GPUs
steps of decoding are recorded as CUDA graphs besides (decode_graphs.py).

On CPUs a step of C++ operators is one call, which no program is faster than (docs/limits.md).
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
from penstock.engine.config import Compile
from penstock.engine.decode_graphs import DecodeGraphs, cuda_recorder
from penstock.engine.kv_cache import BoundCache, PagedCache
from penstock.models.llama.model import Block, Llama
from penstock.nn import native
from penstock.nn.attention import Attend, Rope
from penstock.nn.kernels.hidden_pages import HiddenPages, pages_in_use
from penstock.nn.kernels.paged_step import PagedStep

log = logging.getLogger(__name__)

_MOST_PROGRAMS = 256
"""Of all engines of a process; torch gives a function up after 8."""

_MOST_TOKENS = 2048
"""Of a program. Larger steps are plain: beside what they compute, what a program saves is small."""

Program = Callable[[Block, Tensor, Rope, HiddenPages], Tensor]


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
    """A `Forward` that is compiled where it can be and plain where it is not yet.

    Args:
        model: as it serves; without adapters and on one rank.
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
        self._is_plain = is_plain
        most = min(max_tokens, _MOST_TOKENS)
        self._sizes = sorted({*sizes_up_to(min(max_sequences, most)), *sizes_up_to(most)})
        self._max_sequences = max_sequences
        self._ready: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._compile_all, name="penstock-compile", daemon=True)
        compiled = torch.compile(_compute_block, backend=backend, dynamic=False, fullgraph=True)
        self._compiling = _with_blocks(model, compiled)
        # the same programs, looked up: what has none is computed plainly, whatever the reason
        self._compiled = _with_blocks(model, torch._dynamo.run(compiled))
        self._hidden_cache = _HiddenCache(
            [HiddenPages(torch.tensor(index), window) for index, window in enumerate(model.config.windows)]
        )
        self._graphs: DecodeGraphs | None = None
        if cache.device.type == "cuda":
            self._graphs = DecodeGraphs(self._compute, cache, max_blocks=max_blocks, record=cuda_recorder())

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
            except Exception as error:  # whatever a compiler may raise: plain code serves on
                log.warning("compile=failed size=%d reason=%r", size, str(error)[:500])
                return
            self._ready.add(size)
        log.info("compile=done programs=%d seconds=%.1f", len(self._sizes), monotonic() - started)

    @torch.inference_mode()
    def _run_alone(self, size: int) -> None:
        """Compute a step of filling alone, which compiles a size's programs and writes to no page."""
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
    """What the network takes for its cache while a step's pages are hidden from it."""

    layers: list[HiddenPages]

    def attend(self, window: int | None) -> Attend:  # noqa: ARG002
        return _attend_nothing


def _attend_nothing(q_bhld: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, scale: float) -> Tensor:  # noqa: ARG001
    raise AssertionError(f"hidden pages attend by themselves, here to {q_bhld.shape}")


class _CompiledBlock(nn.Module):
    """A block, computed by a program."""

    def __init__(self, block: Block, program: Program) -> None:
        super().__init__()
        self._block = block
        self._program = program

    def forward(self, x: Tensor, rope: Rope, _: Attend, cache: HiddenPages) -> Tensor:
        return self._program(self._block, x, rope, cache)


def _compute_block(block: Block, x: Tensor, rope: Rope, pages: HiddenPages) -> Tensor:
    """What is compiled. As in training, nothing in place: the compiler decides what is fused."""
    return Block.forward(block, x, rope, _attend_nothing, pages)


def _with_blocks(model: Llama, program: Program) -> Llama:
    """Return the network with the same parameters whose blocks are computed by a program."""
    twin = copy(model)
    twin._modules = dict(model._modules)
    twin.layers = nn.ModuleList(_CompiledBlock(cast(Block, block), program) for block in model.layers)
    return twin
