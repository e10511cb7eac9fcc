"""Linear layers with the updates of several adapters: what an adapter makes of a layer's outputs.

The A matrices of all adapters of a layer are stacked by rows, [sum of ranks, inputs], the B matrices by
columns. For a step's tokens x one product A x serves all adapters; entries of other adapters than the token's
are set to zero, and one product with B adds the rest:

    y += ((x A^T) * mine) B^T          mine[token, row of A] = 1 if the row belongs to the token's adapter

So a step makes the same two small products per layer for one adapter or several, no token is moved, and a
step without adapters makes none. The work grows with the ranks of all adapters from the first to the last
that a step uses. Engines with hundreds of adapters gather the matrices per token in special kernels (Punica,
arXiv:2310.18547; S-LoRA, arXiv:2311.03285), which is faster once the ranks add up to the width of the model.

DoRA then scales the outputs, all but the bias, by factors that do not depend on the token:

    y = y * factors + shifts        factors = magnitude / |W + B A| per output, shifts = bias * (1 - factors)

A rank scales its part of a sum before the ranks add it up.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from penstock.engine.model_runner.tensor_parallel import SummedLinear
from penstock.models.decoder.model import Decoder
from penstock.nn.linear.lora import Adapter
from penstock.nn.linear.packed import MergedLinear, PackedLinear
from penstock.nn.linear.quantized import Float8Linear, Int4Linear, Int8Linear
from penstock.nn.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class AdapterUpdate:
    """An adapter's update of a layer's outputs y = W x + bias, to (y + b a x) * factors + shifts."""

    a: Float[Tensor, "r inputs"]
    b: Float[Tensor, "outputs r"]
    """Already multiplied by the adapter's scale."""
    scaling: Float[Tensor, "2 outputs"] | None = None
    """DoRA's factors and shifts, float32; None: LoRA, or not measured yet."""


@dataclass(slots=True)
class Step:
    """Adapters of the current step's tokens; one object that all layers read."""

    mine: Float[Tensor, "t rows"] | None = None
    """1 where a row belongs to the token's adapter, else 0; None: no token has an adapter."""
    rows: slice = field(default_factory=lambda: slice(0))
    """Rows from the first to the last adapter that the step uses."""
    places: Int64[Tensor, "t"] | None = None
    """Place of each token's adapter in `Added.factors`; None: no token has a DoRA adapter."""


@dataclass(frozen=True, slots=True)
class Added:
    """Updates of all adapters for one layer, or for one part of a merged layer."""

    outputs: slice
    a: Float[Tensor, "all_rows inputs"]
    b: Float[Tensor, "outputs all_rows"]
    factors: Float[Tensor, "adapters_plus_1 outputs"] | None
    """DoRA's of each adapter, last those of none: 1. None: no adapter has any."""
    shifts: Float[Tensor, "adapters_plus_1 outputs"] | None
    """Likewise, last 0. None: they are all 0, as the layer has no bias."""


class AdaptedLinear(nn.Module):
    """A linear layer of any kind, plus the adapters' updates of its outputs."""

    def __init__(self, linear: nn.Module, step: Step) -> None:
        super().__init__()
        self.linear = linear
        self.added: dict[str, Added] = {}
        """By the name of the layer, or of its parts if it is merged."""
        self._step = step

    def forward(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Apply the layer."""
        out: Tensor = self.linear(x)
        mine, rows, places = self._step.mine, self._step.rows, self._step.places
        if mine is not None:
            for added in self.added.values():
                low = nn.functional.linear(x, added.a[rows]) * mine
                part = out[..., added.outputs].add_(nn.functional.linear(low, added.b[:, rows]))
                if places is not None and added.factors is not None:
                    part.mul_(added.factors[places])
                    if added.shifts is not None:
                        part.add_(added.shifts[places])
        return out


@dataclass(frozen=True, slots=True)
class Site:
    """Place of a linear layer in a module, and the layers of the plain network that it computes."""

    owner: nn.Module
    attribute: str
    parts: Mapping[str, slice]
    """Name in the plain network -> its outputs."""
    is_shared: bool = False
    """True if each rank has a part of the matrix of every update: of its columns, or of `rows`."""
    rows: slice = field(default_factory=lambda: slice(None))
    """Rows of the updates that this rank's matrix has."""

    @property
    def linear(self) -> nn.Module:
        """The layer, without the wrapper of adapters."""
        layer: nn.Module = getattr(self.owner, self.attribute)
        return layer.linear if isinstance(layer, AdaptedLinear) else layer

    def wrapped(self, step: Step) -> AdaptedLinear:
        """Return the wrapped layer, wrapping it in place unless it is."""
        layer = getattr(self.owner, self.attribute)
        if not isinstance(layer, AdaptedLinear):
            layer = AdaptedLinear(layer, step)
            setattr(self.owner, self.attribute, layer)
        return layer

    def matrix_and_bias(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return the layer's matrix and bias; as in training a rounded matrix is cast to `dtype`, that of
        activations."""
        layer = self.linear
        if isinstance(layer, nn.Linear):
            return layer.weight, layer.bias
        assert isinstance(layer, PackedLinear | Int8Linear | Int4Linear | Float8Linear), type(layer)
        return layer.matrix().to(dtype), layer.bias

    def squared_lengths(
        self, update: AdapterUpdate, matrix: Float[Tensor, "rows inputs"]
    ) -> Float[Tensor, "outputs"]:
        """Return the squared lengths of the rows of W + B A, as far as this rank has W."""
        a, b = update.a.to(matrix.device), update.b.to(matrix.device)
        squares = torch.zeros(len(b), device=matrix.device)
        squares[self.rows] = Adapter(a, b[self.rows], 1.0).squared_lengths(matrix)
        return squares


def neutral_scaling(outputs: int) -> Float[Tensor, "2 outputs"]:
    """Return factors of 1 and shifts of 0."""
    return torch.stack([torch.ones(outputs), torch.zeros(outputs)])


def sites_of(model: Decoder) -> Iterator[Site]:
    """Yield each linear layer of the blocks."""
    for number, block in enumerate(model.layers):
        for of, owner in block.named_children():
            for name, child in owner.named_children():
                path = f"layers.{number}.{of}"
                if isinstance(child, MergedLinear):
                    rows = {part: child.rows(part) for part, _ in child.parts}
                    parts = {f"{path}.{part}": slice(r.start, r.stop) for part, r in rows.items()}
                    yield Site(child, "linear", parts)
                elif isinstance(child, SummedLinear):
                    # inside the sum: A is sliced as the layer's inputs are
                    yield Site(child, "linear", {f"{path}.{name}": slice(None)}, is_shared=True)
                elif not isinstance(child, RMSNorm):
                    yield Site(owner, name, {f"{path}.{name}": slice(None)})
