"""Model runner of one process: a forward pass over the tokens of all shares, logits where needed."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from penstock.engine.model_runner.batch import StepBatch
from penstock.engine.model_runner.collectives import RankGroup
from penstock.engine.model_runner.compiled_steps import CompiledSteps
from penstock.engine.model_runner.decode_graphs import DecodeGraphs, Forward, Record, cuda_recorder
from penstock.engine.model_runner.drawn_tokens import DrawnTokens
from penstock.engine.model_runner.graph_plan import RecordedGraphs, sizes_up_to
from penstock.engine.model_runner.interface import StepOutput
from penstock.engine.model_runner.kv_cache import BoundCache, PagedCache
from penstock.engine.model_runner.lora import Adapters
from penstock.engine.model_runner.native_decoder import NativeDecoder, open_native_decoder
from penstock.engine.model_runner.tensor_parallel import GatheredLogits
from penstock.engine.sampling.filters import sample
from penstock.models.decoder.model import Decoder
from penstock.nn.kernels.pages import PagedStep
from penstock.nn.upload import uploaded


class Runner:
    """The network and its KV cache in this process.

    Args:
        adapters: of single requests; may be empty.
        group: the tensor-parallel group, joined; None: one rank.
        forward: computes the hidden states; None: the network itself.
    """

    def __init__(
        self,
        model: Decoder,
        cache: PagedCache,
        adapters: Adapters,
        *,
        group: RankGroup | None = None,
        forward: Forward | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self._adapters = adapters
        self._group = group
        self._project = model.uncapped_logits if group is None else GatheredLogits(model, group)
        self.forward: Forward = forward or self._plain
        self._compiled: CompiledSteps | None = None
        self._graphs: DecodeGraphs | None = None
        self.recorded: RecordedGraphs | None = None
        """Time and memory of `record`; None: there are no graphs."""
        self._drawn: DrawnTokens | None = None
        self._recorded_rows: Tensor | None = None  # of adapters' new tokens: graphs read them where they lie
        self._is_plain = forward is None
        self._native: NativeDecoder | None = None
        self._is_settled = False  # True once it is known whether the native decoder applies
        self._new_adapters: list[str] = []  # that the native decoder does not hold yet

    @property
    def adapters(self) -> Mapping[str, int]:
        """Adapter name -> index in `StepBatch.adapters`."""
        return self._adapters.indexes

    @property
    def num_new_tokens(self) -> Mapping[str, int]:
        """Adapter name -> tokens that it adds to the vocabulary."""
        return self._adapters.num_new_tokens

    def sample(self, max_sequences: int) -> DrawnTokens:
        """Sample in steps from now on, where `run` is asked to: the next step reads the tokens on the
        device."""
        self._drawn = DrawnTokens(max_sequences, self.cache.device)
        return self._drawn

    @torch.inference_mode()
    def run(
        self, batch: StepBatch, settings: Float64[Tensor, "r 5"] | None = None, *, samples: bool = False
    ) -> StepOutput:
        """Compute one step; the keys and values of its tokens are in the cache afterwards.

        Arguments as in `StepRunner.run`. CUDA graphs always sample; steps with tokens that adapters added
        never do, because their rows of the embedding are looked up on the host.
        """
        if self._graphs is not None and self._graphs.takes(batch, settings):
            return self._graphs.run(batch, settings)
        places = None
        if self._drawn is not None:
            batch, places = self._drawn.resolved(batch)
        hidden, logits = self._computed(self._adapters.placed(batch), places)
        logits = self._adapters.adapted_logits(logits, hidden, batch)
        if self._drawn is None or not samples or self._adapters.have_new_tokens(batch):
            return StepOutput(hidden, logits)
        return StepOutput(hidden, logits, drawn=self._drawn.keep(sample(logits, settings)))

    def _computed(self, batch: StepBatch, places: np.ndarray | None) -> tuple[Tensor, Tensor]:
        """Return hidden states and uncapped logits; `places` as in `DrawnTokens.ids`, None: all are known."""
        whole = self._native_now()
        if whole is not None and whole.takes(batch):
            return whole.run(batch)
        arrays = batch.slots, batch.query_starts, batch.lengths, batch.block_tables
        more = () if places is None else (places,)
        ids, positions, rows, *paged = uploaded(
            (batch.token_ids, batch.positions, batch.logit_rows, *arrays, *more), self.cache.device
        )
        if places is not None and self._drawn is not None:
            ids = self._drawn.ids(ids, paged.pop())
        steps = PagedStep.from_uploaded(paged, query_starts=batch.query_starts, lengths=batch.lengths)
        self._adapters.begin(batch)
        hidden = self.forward(ids[None], positions[None], self.cache.bound(*steps))[0]
        return hidden, self._project(hidden[rows])

    def add_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter; raises as `Adapters.add` and `Adapters.measure` do, and then it is not added."""
        self._adapters.add(name, folder)
        if self._group is None:  # several ranks measure together, in the next step
            try:
                self._adapters.measure()
            except BaseException:
                self._adapters.remove(name)
                raise
        self._new_adapters.append(name)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter; raises as `Adapters.remove` does."""
        index = self._adapters.remove(name)
        if name in self._new_adapters:
            self._new_adapters.remove(name)
        elif self._native is not None:
            self._native.release(index)

    def on_lost(self, call: Callable[[], None]) -> None:
        """Do nothing: a runner in this process cannot be lost."""

    def check(self) -> None:
        """Do nothing: the next step can always be computed."""

    def compile(
        self, sizes: Iterable[int], *, has_any: bool = False, backend: str = "inductor"
    ) -> CompiledSteps:
        """Compute steps by compiled programs from now on; the caller compiles them.

        Arguments as in `CompiledSteps`.
        """
        self.close()
        self._compiled = CompiledSteps(
            self.model,
            self.cache,
            sizes=sizes,
            has_any=has_any,
            is_plain=lambda: not self._adapters.indexes,
            backend=backend,
        )
        self.forward = self._compiled
        self._is_plain, self._is_settled = False, False
        return self._compiled

    def record(self, *, max_sequences: int, max_blocks: int, record: Record | None = None) -> list[int]:
        """Record decode steps as CUDA graphs; returns the numbers of sequences that have one.

        Arguments as in `DecodeGraphs`; `record` None: CUDA's.
        """
        self._graphs = None  # its memory is free before others are recorded
        drawn = self._drawn
        if drawn is None or drawn.most < max_sequences:
            drawn = self.sample(max_sequences)
        self._recorded_rows = self._adapters.new_rows
        graphs = DecodeGraphs(
            self.forward,
            self.model.logits,
            self.cache,
            drawn,
            sizes=sizes_up_to(max_sequences),
            max_blocks=max_blocks,
            record=record or cuda_recorder(self.cache.device),
        )
        self.recorded = graphs.record_all()
        self._graphs = graphs
        return graphs.sizes

    def close(self) -> None:
        """Stop the compiler after its current program."""
        if self._compiled is not None:
            self._compiled.close()

    def _native_now(self) -> NativeDecoder | None:
        """Return the native decoder, with all adapters; None if it does not apply."""
        if not self._is_settled:
            self._native = (
                open_native_decoder(self.model, self.cache, self._group) if self._is_plain else None
            )
            self._is_settled = True
            self._new_adapters = list(self._adapters.indexes)
        if self._native is not None and self._new_adapters:
            self._adapters.measure()
            for name in self._new_adapters:
                self._native.hold(*self._adapters.held(name))
            self._new_adapters.clear()
        if self._native is not None:
            self._native.extend(self._adapters.new_rows)
        return self._native

    def _plain(self, ids: Tensor, positions: Tensor, cache: BoundCache) -> Tensor:
        return self.model.hidden(ids, position_ids=positions, cache=cache)
