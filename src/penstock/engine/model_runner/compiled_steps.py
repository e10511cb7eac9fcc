"""Compiled steps: torch.compile of the blocks, a program for each of some numbers of tokens.

Blocks are compiled, not the network: one program computes all blocks of a kind (torch.compile guards their
modules), and compiling takes seconds where a network takes minutes. The mix of shares in a step does not
matter, because paged attention is one opaque operator that reads it by itself (nn/kernels/paged_opaque.py):
prefill, drafts and decoding use the same programs, on every device. Steps look programs up and never compile:
a size without a program runs uncompiled. Programs are cached on disk for the next process.

On CPUs a program has 1, 2, 4, ... tokens, and smaller steps are padded. A thread compiles one size after the
other, on padding only, while plain steps serve. A step of C++ operators is one call there, which no compiled
program beats (docs/explanation/inference.md).

On GPUs there are two programs: of one token, and of any number of tokens. They are compiled before decode
steps are recorded as CUDA graphs (decode_graphs.py). Layers of 8 and 4 bits choose their kernels by the
number of tokens, so their program of any number is one for each choice.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from penstock.core.clock import monotonic
from penstock.core.env import cache_folder, set_compiled_programs
from penstock.core.errors import ConfigError
from penstock.core.log import EventLog
from penstock.engine.config import Compile
from penstock.engine.model_runner.graph_plan import sizes_up_to
from penstock.engine.model_runner.kv_cache import BoundCache, PagedCache
from penstock.models.decoder.model import Block, Decoder
from penstock.nn import native
from penstock.nn.attention import Attend, Rope
from penstock.nn.kernels.paged_opaque import HiddenPages, pages_in_use
from penstock.nn.kernels.pages import PagedStep

log = EventLog(__name__)

_MAX_PROGRAMS = 256
"""Recompile limit for all engines of a process; torch's default is 8."""

_MAX_TOKENS = 2048
"""Largest number of tokens of a program. Larger steps run uncompiled: a program would save little there."""

_ANY_TOKENS = (512, 48, 8)
"""Tokens of the steps that the program of any number of tokens is compiled with: one for each kernel that
layers of 8 and 4 bits choose (linear/quantized.py). Where none chooses, the first one alone compiles."""

Program = Callable[[Block, Tensor, Rope, HiddenPages | None], Tensor]


def is_wanted(asked: Compile, *, has_graphs: bool, device: torch.device, ranks: int) -> bool:
    """Return True if steps are compiled: `asked` is "on", or "auto" where decode steps are graphs.

    Raises:
        ConfigError: compilation was requested and is impossible.
    """
    if asked != "on":
        return asked == "auto" and has_graphs
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


def program_sizes(*, max_sequences: int, max_tokens: int) -> list[int]:
    """Return the numbers of tokens of programs, for steps of decoding and for steps of all kinds.

    >>> program_sizes(max_sequences=3, max_tokens=20)
    [1, 2, 3, 4, 8, 16, 20]
    """
    most = min(max_tokens, _MAX_TOKENS)
    return sorted({*sizes_up_to(min(max_sequences, most)), *sizes_up_to(most)})


class CompiledSteps:
    """A `Forward` that uses compiled programs where they are ready, and the plain network elsewhere.

    Args:
        model: without adapters, on one rank.
        sizes: numbers of tokens of the programs.
        has_any: True: a program of any number of tokens computes all steps but those of one token per
            sequence.
        is_plain: called in each step; False: an adapter was added, so the compiled programs do not apply.
        backend: name of the torch.compile backend.
    """

    def __init__(
        self,
        model: Decoder,
        cache: PagedCache,
        *,
        sizes: Iterable[int],
        has_any: bool = False,
        is_plain: Callable[[], bool] = lambda: True,
        backend: str = "inductor",
    ) -> None:
        self._model = model
        self._cache = cache
        self._is_plain = is_plain
        self._sizes = sorted(sizes)
        self._ready: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.compile_all, name="penstock-compile", daemon=True)
        compiled = torch.compile(_compute_block, backend=backend, dynamic=False, fullgraph=True)
        self._compiling = _with_blocks(model, compiled)
        # the same programs, looked up only: a size without a program runs uncompiled, for whatever reason
        self._compiled = _with_blocks(model, torch._dynamo.run(compiled))
        self._any: _Any | None = None
        if has_any:
            compiled = torch.compile(_compute_block_of_any, backend=backend, dynamic=True, fullgraph=True)
            self._any = _Any(_with_blocks(model, compiled), _with_blocks(model, torch._dynamo.run(compiled)))
        self._hidden_cache = _HiddenCache(
            [HiddenPages(torch.tensor(index), window) for index, window in enumerate(model.config.windows)]
        )

    @property
    def ready(self) -> frozenset[int]:
        """Numbers of tokens whose programs are ready."""
        return frozenset(self._ready)

    def start(self) -> None:
        """Start compiling in a thread."""
        self._thread.start()

    def wait(self) -> None:
        """Wait until the thread has compiled all sizes."""
        self._thread.join()

    def close(self) -> None:
        """Stop compiling after the current size. Idempotent."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def __call__(self, ids: Tensor, positions: Tensor, cache: BoundCache) -> Tensor:
        """Compute one step."""
        count = ids.shape[1]
        size = next((size for size in self._sizes if size >= count), 0)
        if not self._is_plain():
            return self._model.hidden(ids, position_ids=positions, cache=cache)
        if self._any is not None and self._any.is_ready and (cache.step.num_singles < count or not size):
            return self._computed(self._any.compiled, ids, positions, cache)
        if size not in self._ready:
            return self._model.hidden(ids, position_ids=positions, cache=cache)
        if size > count:
            more = (0, size - count)
            ids, positions = (nn.functional.pad(tensor, more) for tensor in (ids, positions))
        return self._computed(self._compiled, ids, positions, cache)[:, :count]

    def _computed(self, twin: Decoder, ids: Tensor, positions: Tensor, cache: BoundCache) -> Tensor:
        with pages_in_use(cache.layers):
            return twin.hidden(ids, position_ids=positions, cache=self._hidden_cache)

    def compile_all(self) -> None:
        """Compile all programs; logs a failure and leaves the rest uncompiled."""
        started = monotonic()
        log.info("compiling", "Compiling the blocks, once: later starts read the programs")
        set_compiled_programs(cache_folder() / "compiled", given=False)
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_PROGRAMS)
        for size in self._sizes:
            if self._stop.is_set():
                return
            try:
                self._run_alone(self._compiling, size)
            except Exception as error:  # a compiler may raise anything; uncompiled steps still work
                log.warning(
                    "compile_failed",
                    "Steps of {tokens:#token} could not be compiled: {error}",
                    tokens=size,
                    error=str(error)[:500],
                )
                return
            self._ready.add(size)
        if self._any is not None:
            try:
                for size in _ANY_TOKENS:
                    self._run_alone(self._any.compiling, size)
            except Exception as error:
                log.warning(
                    "compile_failed",
                    "Steps of any size could not be compiled: {error}",
                    error=str(error)[:500],
                )
                return
            self._any.is_ready = True
        log.info(
            "compiled",
            "Compiled the blocks in {duration_s:.1f} s",
            duration_s=monotonic() - started,
        )

    @torch.inference_mode()
    def _run_alone(self, twin: Decoder, size: int) -> None:
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
        with pages_in_use(self._cache.bound(*[step] * self._cache.num_groups).layers):
            twin.hidden(filling, position_ids=filling.clone(), cache=self._hidden_cache)


@dataclass(frozen=True, slots=True)
class _HiddenCache:
    """Cache that the network sees while a step's pages are hidden from the compiler."""

    layers: list[HiddenPages]

    def attends(self, windows: Sequence[int | None]) -> list[Attend]:
        return [_attend_nothing] * len(windows)


def _attend_nothing(
    q_bhld: Tensor,
    k_bksd: Tensor,  # noqa: ARG001
    v_bksd: Tensor,  # noqa: ARG001
    *,
    scale: float,  # noqa: ARG001
    sinks: Tensor | None = None,  # noqa: ARG001
) -> Tensor:
    raise AssertionError(f"hidden pages attend by themselves, here to {q_bhld.shape}")


class _CompiledBlock(nn.Module):
    """A block computed by a compiled program."""

    def __init__(self, block: Block, program: Program) -> None:
        super().__init__()
        self._block = block
        self._program = program

    def forward(self, x: Tensor, rope: Rope, _: Attend | None, cache: HiddenPages | None) -> Tensor:
        return self._program(self._block, x, rope, cache)


def _compute_block(block: Block, x: Tensor, rope: Rope, pages: HiddenPages | None) -> Tensor:
    """The compiled function. As in training nothing is in place: the compiler decides what to fuse."""
    return Block.forward(block, x, rope, _attend_nothing, pages)


def _compute_block_of_any(block: Block, x: Tensor, rope: Rope, pages: HiddenPages | None) -> Tensor:
    """The function that is compiled for any number of tokens; programs are kept by function."""
    return Block.forward(block, x, rope, _attend_nothing, pages)


@dataclass(slots=True)
class _Any:
    """Networks whose blocks are computed by the program of any number of tokens."""

    compiling: Decoder
    compiled: Decoder
    is_ready: bool = False


def _with_blocks(model: Decoder, program: Program) -> Decoder:
    """Return a network with the same parameters whose blocks are computed by `program`."""
    twin = copy(model)
    twin._modules = dict(model._modules)
    twin.layers = nn.ModuleList(_CompiledBlock(cast(Block, block), program) for block in model.layers)
    return twin
