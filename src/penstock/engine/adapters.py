"""LoRA adapters beside one base: each token of a step gets what its request's adapter adds, or nothing.

The matrices A of all adapters of a layer lie below one another, [sum of ranks, inputs], and the B beside one
another. Of a step's tokens x one product A x is made for all adapters at once, what belongs to another
adapter than the token's is set to zero, and one product with B adds the rest:

    y += ((x A^T) * mine) B^T          mine[token, row of A] = 1 where the row is of the token's adapter

So a step makes the same two small products a layer for one adapter or several, no token is moved, and a step
without adapters makes none. The work grows with the ranks of all adapters from the first to the last that a
step uses. Engines that hold hundreds gather the matrices per token in kernels of their own (Punica,
arXiv:2310.18547; S-LoRA, arXiv:2311.03285), which is better once the ranks add up to the width of the model.

Layers are wrapped when modules first compute a step; steps that one operator computes whole (whole_steps.py)
leave them as they are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from penstock.core.errors import UsageError, nearest
from penstock.engine.adapter_file import Lora, read_adapter
from penstock.engine.batch import Batch
from penstock.engine.ranks.tensor_parallel import SummedLinear
from penstock.models.llama.config import LlamaConfig
from penstock.models.llama.model import Llama
from penstock.models.llama.slices import ALONE, Place
from penstock.nn.merged import MergedLinear
from penstock.nn.norm import RMSNorm


@dataclass(slots=True)
class Step:
    """What layers need to know of the tokens under way; one object, which all of them read."""

    mine: Float[Tensor, "t rows"] | None = None
    """1 where a row is of the token's adapter, else 0; None: no token has one."""
    rows: slice = field(default_factory=lambda: slice(0))
    """From the first to the last adapter that the step uses."""


@dataclass(frozen=True, slots=True)
class Added:
    """What all adapters add to one layer, or to one part of a merged one."""

    outputs: slice
    a: Float[Tensor, "all_rows inputs"]
    b: Float[Tensor, "outputs all_rows"]


class AdaptedLinear(nn.Module):
    """A linear layer, of any kind, and what adapters add to its outputs."""

    def __init__(self, linear: nn.Module, step: Step) -> None:
        super().__init__()
        self.linear = linear
        self.added: dict[str, Added] = {}
        """By the layer's name, or that of its parts."""
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
    """The adapters that an engine holds, by name; added and removed between steps.

    Args:
        model: this rank's part; layers that an adapter changes are wrapped in place.
        whole: the model that all ranks are together.
    """

    def __init__(self, model: Llama, whole: LlamaConfig, *, place: Place = ALONE) -> None:
        self.indexes: dict[str, int] = {}
        """Name -> what a batch calls it; no other is called so later."""
        self._model, self._whole, self._place = model, whole, place
        self._loras: dict[int, Mapping[str, Lora]] = {}
        self._owners = np.zeros(0, np.int32)  # [all rows] index of each row's adapter
        self._step = Step()
        self._counter = count()
        self._is_current = True  # whether the layers add what the adapters are now

    def add(self, name: str, folder: Path) -> None:
        """Read an adapter from a folder that PEFT wrote.

        Raises:
            UsageError: there is one of that name, or it is empty.
            ModelError: as in `read_adapter`.
        """
        if not name:  # which batches and hashes of blocks take for the base
            raise UsageError("The name of an adapter is empty", got=name, fix="Give it one.")
        if name in self.indexes:
            raise UsageError("There is an adapter of that name", got=name, fix="Remove it first.")
        loras = read_adapter(folder, self._whole, place=self._place)
        self.indexes[name] = next(self._counter)
        self._loras[self.indexes[name]] = loras
        self._change()

    def held(self, name: str) -> tuple[int, Mapping[str, Lora]]:
        """Return an adapter's index, and what it adds by the layers' names in the plain network."""
        index = self.indexes[name]
        return index, self._loras[index]

    def remove(self, name: str) -> int:
        """Forget an adapter; return the index it had.

        Raises:
            UsageError: there is none of that name.
        """
        if name not in self.indexes:
            raise UsageError(
                "There is no adapter of that name", got=name, fix=nearest(name, list(self.indexes))
            )
        index = self.indexes.pop(name)
        del self._loras[index]
        self._change()
        return index

    def begin(self, batch: Batch) -> None:
        """Tell the layers whose tokens come next; not called for steps that the modules do not compute."""
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

    def _change(self) -> None:
        self._is_current = False
        if self._model.norm.weight.device.type != "cpu":
            self._rebuild()  # now: what is free on a GPU becomes pages before the first step

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
        if not self._loras:  # plain layers again, which blocks compute in fewer calls
            _unwrap(self._model)

    def _stacked(self, name: str, ranks: Mapping[int, int], outputs: slice) -> Added:
        """Put what all adapters add to one layer together; zeros for those that leave it alone."""
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
        """Yield each linear layer of the blocks: its name in the plain network, wrapped, its outputs."""
        for number, block in enumerate(self._model.layers):
            for of in ("attention", "mlp"):
                for name, layer, outputs in list(_adapted(block.get_submodule(of), self._step)):
                    yield f"layers.{number}.{of}.{name}", layer, outputs


def _adapted(owner: nn.Module, step: Step) -> Iterator[tuple[str, AdaptedLinear, slice]]:
    """Yield the linear layers of attention or a feed-forward layer, each wrapped where it is not yet."""
    for name, child in owner.named_children():
        if isinstance(child, MergedLinear):
            layer = child.linear = _wrapped(child.linear, step)
            for part, _ in child.parts:
                rows = child.rows(part)
                yield part, layer, slice(rows.start, rows.stop)
        elif isinstance(child, SummedLinear):
            # inside the sum, for A of such a layer is cut as its inputs are
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
