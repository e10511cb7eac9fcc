"""LoRA adapters for batched requests: each token gets the update of its request's adapter, or none.

The A matrices of all adapters of a layer are stacked by rows, [sum of ranks, inputs], the B matrices by
columns. For a step's tokens x one product A x serves all adapters; entries of other adapters than the token's
are set to zero, and one product with B adds the rest:

    y += ((x A^T) * mine) B^T          mine[token, row of A] = 1 if the row belongs to the token's adapter

So a step makes the same two small products per layer for one adapter or several, no token is moved, and a
step without adapters makes none. The work grows with the ranks of all adapters from the first to the last
that a step uses. Engines with hundreds of adapters gather the matrices per token in special kernels (Punica,
arXiv:2310.18547; S-LoRA, arXiv:2311.03285), which is faster once the ranks add up to the width of the model.

Layers are wrapped when modules first compute a step; steps that the native decoder computes
(native_decoder.py) leave them as they are. Updates of the output matrix are added to the logits after either,
on the rank that has them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from penstock.checkpoint.peft import Lora, read_adapter
from penstock.core.errors import UsageError, nearest
from penstock.engine.model_runner.batch import StepBatch
from penstock.engine.model_runner.tensor_parallel import SummedLinear
from penstock.models.llama.config import LlamaConfig
from penstock.models.llama.model import Llama
from penstock.models.llama.tensor_slices import ALONE, TensorParallelRank
from penstock.nn.linear.adapter_config import OUTPUT_MATRIX
from penstock.nn.linear.packed import MergedLinear
from penstock.nn.norm import RMSNorm


@dataclass(slots=True)
class Step:
    """Adapter mask of the current step; one object that all layers read."""

    mine: Float[Tensor, "t rows"] | None = None
    """1 where a row belongs to the token's adapter, else 0; None: no token has an adapter."""
    rows: slice = field(default_factory=lambda: slice(0))
    """Rows from the first to the last adapter that the step uses."""


@dataclass(frozen=True, slots=True)
class Added:
    """Stacked A and B of all adapters for one layer, or for one part of a merged layer."""

    outputs: slice
    a: Float[Tensor, "all_rows inputs"]
    b: Float[Tensor, "outputs all_rows"]


class AdaptedLinear(nn.Module):
    """A linear layer of any kind, plus the LoRA updates of its outputs."""

    def __init__(self, linear: nn.Module, step: Step) -> None:
        super().__init__()
        self.linear = linear
        self.added: dict[str, Added] = {}
        """By the name of the layer, or of its parts if it is merged."""
        self._step = step

    def forward(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Apply the layer."""
        out: Tensor = self.linear(x)
        mine, rows = self._step.mine, self._step.rows
        if mine is not None:
            for added in self.added.values():
                low = nn.functional.linear(x, added.a[rows]) * mine
                out[..., added.outputs] += nn.functional.linear(low, added.b[:, rows])
        return out


class Adapters:
    """LoRA adapters of an engine, by name; added and removed between steps.

    Args:
        model: this rank's shard; adapted layers are wrapped in place.
        whole: config of the unsharded model.
        base_hash: identity of the model's weights; "": unknown.
    """

    def __init__(
        self, model: Llama, whole: LlamaConfig, *, place: TensorParallelRank = ALONE, base_hash: str = ""
    ) -> None:
        self.indexes: dict[str, int] = {}
        """Adapter name -> index in a batch; indices are never reused."""
        self._model, self._whole, self._place, self._base_hash = model, whole, place, base_hash
        self._loras: dict[int, Mapping[str, Lora]] = {}
        self._of_output: dict[int, Lora] = {}  # on the device of the logits
        self._owners = np.zeros(0, np.int32)  # [all rows] index of each row's adapter
        self._step = Step()
        self._counter = count()
        self._is_current = True  # False: the layers have not been rebuilt since the adapters changed

    def add(self, name: str, folder: Path) -> None:
        """Load an adapter from a folder written by PEFT.

        Raises:
            UsageError: the name is taken or empty.
            ModelError: as in `read_adapter`.
        """
        if not name:  # batches and block hashes use the empty name for the base model
            raise UsageError("The name of an adapter is empty", got=name, fix="Give it a name.")
        if name in self.indexes:
            raise UsageError("An adapter of that name exists", got=name, fix="Remove it first.")
        loras = read_adapter(folder, self._whole, place=self._place, base_hash=self._base_hash)
        self.indexes[name] = next(self._counter)
        self._loras[self.indexes[name]] = loras
        if (lora := loras.get(OUTPUT_MATRIX)) is not None:
            like = self._model.norm.weight
            self._of_output[self.indexes[name]] = Lora(lora.a.to(like), lora.b.to(like))
        self._change()

    def held(self, name: str) -> tuple[int, Mapping[str, Lora]]:
        """Return an adapter's index, and its update of each layer, by layer name in the plain network."""
        index = self.indexes[name]
        return index, self._loras[index]

    def remove(self, name: str) -> int:
        """Remove an adapter; return the index it had.

        Raises:
            UsageError: the name is unknown.
        """
        if name not in self.indexes:
            raise UsageError("Unknown adapter", got=name, fix=nearest(name, list(self.indexes)))
        index = self.indexes.pop(name)
        del self._loras[index]
        self._of_output.pop(index, None)
        self._change()
        return index

    def begin(self, batch: StepBatch) -> None:
        """Set the adapter mask for a batch; not called for steps of the native decoder."""
        if not self._is_current:
            self._rebuild()
        if not self._loras:
            return
        used = np.isin(self._owners, batch.adapters)
        self._step.mine = None
        if not used.any():
            return
        first, last = np.flatnonzero(used)[[0, -1]].tolist()
        self._step.rows = slice(first, last + 1)
        of_token = np.repeat(batch.adapters, np.diff(batch.query_starts))
        mine = of_token[:, None] == self._owners[None, self._step.rows]
        like = self._model.norm.weight
        self._step.mine = torch.from_numpy(mine).to(like.device, like.dtype)

    def add_to_logits(
        self, logits: Float[Tensor, "r vocab"], hidden: Float[Tensor, "t hidden"], batch: StepBatch
    ) -> None:
        """Add the updates of the output matrix to a step's logits, in place.

        Args:
            logits: of `batch.logit_rows`; of no token ids on a rank that does not have them.
            hidden: normalised hidden states, defined for those rows at least.
        """
        if not self._of_output or not logits.shape[1]:
            return
        of_logits = np.repeat(batch.adapters, np.diff(batch.query_starts))[batch.logit_rows]
        for index, lora in self._of_output.items():
            mine = np.flatnonzero(of_logits == index)
            if len(mine):
                tokens, rows = (
                    torch.from_numpy(array).to(logits.device) for array in (batch.logit_rows[mine], mine)
                )
                low = nn.functional.linear(hidden[tokens], lora.a)
                change = nn.functional.linear(low, lora.b) / self._whole.logits_scaling
                logits[rows] += change.to(logits.dtype)

    def _change(self) -> None:
        self._is_current = False
        if self._model.norm.weight.device.type != "cpu":
            self._rebuild()  # now: pages take the free memory of a GPU before the first step

    def _rebuild(self) -> None:
        self._is_current = True
        ranks = {index: len(next(iter(loras.values())).a) for index, loras in self._loras.items()}
        self._owners = np.repeat(np.array([*ranks], np.int32), [*ranks.values()])
        names = {name for loras in self._loras.values() for name in loras}
        for name, layer, outputs in self._layers():
            if name in names:
                layer.added[name] = self._stacked(name, ranks, outputs)
            else:
                layer.added.pop(name, None)
        if not self._loras:  # plain layers again: fewer calls per block
            _unwrap(self._model)

    def _stacked(self, name: str, ranks: Mapping[int, int], outputs: slice) -> Added:
        """Stack the adapters' matrices for one layer; zeros for adapters that do not change it."""
        like, found = self._model.norm.weight, {i: loras.get(name) for i, loras in self._loras.items()}
        some = next(lora for lora in found.values() if lora is not None)
        a = torch.zeros(len(self._owners), some.a.shape[1], dtype=like.dtype, device=like.device)
        b = torch.zeros(some.b.shape[0], len(self._owners), dtype=like.dtype, device=like.device)
        start = 0
        for index, lora in found.items():
            rows, start = slice(start, start + ranks[index]), start + ranks[index]
            if lora is not None:
                a[rows], b[:, rows] = lora.a, lora.b
        return Added(outputs, a, b)

    def _layers(self) -> Iterator[tuple[str, AdaptedLinear, slice]]:
        """Yield each linear layer of the blocks: name in the plain network, wrapped layer, output slice."""
        for number, block in enumerate(self._model.layers):
            for of in ("attention", "mlp"):
                for name, layer, outputs in list(_adapted(block.get_submodule(of), self._step)):
                    yield f"layers.{number}.{of}.{name}", layer, outputs


def _adapted(owner: nn.Module, step: Step) -> Iterator[tuple[str, AdaptedLinear, slice]]:
    """Yield the linear layers of an attention or feed-forward module, wrapping those that are not yet."""
    for name, child in owner.named_children():
        if isinstance(child, MergedLinear):
            layer = child.linear = _wrapped(child.linear, step)
            for part, _ in child.parts:
                rows = child.rows(part)
                yield part, layer, slice(rows.start, rows.stop)
        elif isinstance(child, SummedLinear):
            # inside the sum: A is sliced as the layer's inputs are
            layer = child.linear = _wrapped(child.linear, step)
            yield name, layer, slice(None)
        elif not isinstance(child, RMSNorm):
            layer = _wrapped(child, step)
            setattr(owner, name, layer)
            yield name, layer, slice(None)


def _unwrap(model: nn.Module) -> None:
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, AdaptedLinear):
                setattr(owner, name, child.linear)


def _wrapped(layer: nn.Module, step: Step) -> AdaptedLinear:
    return layer if isinstance(layer, AdaptedLinear) else AdaptedLinear(layer, step)
