"""Linear layers with a low-rank adapter, for training: LoRA, rsLoRA and DoRA over a frozen matrix.

    y = W x + scale * B (A x) + bias                                     LoRA, rsLoRA
    y = m / |W + scale * B A| * (W x + scale * B (A x)) + bias           DoRA: m, one number per output

With dropout A sees the inputs that stay; DoRA's factor, less 1, is on the product of W with them, as in PEFT.

|.| are the lengths of rows, which DoRA treats as constants in the backward pass (arXiv:2402.09353, section
4.3). They are computed without the sum of the two matrices, from three products with thin ones:

    |W + s B A|^2 = |W|^2 + 2 s (W A^T) . B + s^2 (B (A A^T)) . B        . multiplies and sums over a row

A starts random and B at zero, so that an adapter changes nothing at first; both keep their names beside the
frozen `weight` of the layer: `layers.0.attention.query.lora_a`.

The frozen product is `multiply`, so a matrix rounded to 8 or 4 bits takes the place of `weight`. Its product
is weight-only, as in the engine: tokens stay as they are, and the backward pass multiplies with the same
rounded numbers. So the layer computes what it does with the adapter merged.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from penstock.nn.linear.adapter_config import AdapterConfig
from penstock.nn.linear.dropout import Dropout
from penstock.nn.linear.quantized import Int4Linear, Int8Linear
from penstock.nn.new_rows import is_new_rows

ADAPTER_PARAMETERS = ("lora_a", "lora_b", "magnitude")
"""Names of an adapter's parameters in its layer."""
_MIN_LENGTH = math.sqrt(torch.finfo(torch.float32).tiny)
"""Of a row, for DoRA to divide by: one of zeros stays one of zeros."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Parameters of one layer's adapter, as far as this rank computes with them."""

    a: Float[Tensor, "rank inputs"]
    b: Float[Tensor, "outputs rank"]
    scale: float
    magnitude: Float[Tensor, "outputs"] | None = None
    """Lengths of the rows (DoRA)."""

    def thin(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... rank"]:
        """Return scale * A x."""
        out: Tensor = functional.linear(x, self.a) * self.scale
        return out

    def low_rank(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Return scale * B A x."""
        out: Tensor = functional.linear(self.thin(x), self.b)
        return out

    def squared_lengths(self, weight: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs"]:
        """Return the squared lengths of the rows of `weight` + scale * B A, in float32.

        They have no graph. Slices of the inputs, each with its part of A, add up to those of the whole.
        """
        w, a, b = weight.detach().float(), self.a.detach().float(), self.b.detach().float()
        own = torch.linalg.vector_norm(w, dim=1).square_()
        mixed = ((w @ a.t()) * b).sum(1)
        squares: Tensor = own + 2 * self.scale * mixed + self.scale**2 * ((b @ (a @ a.t())) * b).sum(1)
        return squares

    def change(self, weight: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs inputs"]:
        """Return the matrix that computes the same as `weight` with this adapter, in float32."""
        merged: Tensor = weight.float() + self.scale * (self.b.float() @ self.a.float())
        if self.magnitude is None:
            return merged
        lengths = torch.linalg.vector_norm(merged, dim=1).clamp_(min=_MIN_LENGTH)
        merged *= (self.magnitude.float() / lengths).unsqueeze(1)
        return merged


def factors(magnitude: Tensor, squared_lengths: Tensor) -> Tensor:
    """Return DoRA's factors on a layer's outputs, [outputs], in the dtype of `magnitude`."""
    lengths = squared_lengths.clamp_(min=_MIN_LENGTH**2).sqrt_()
    return magnitude / lengths.to(magnitude.dtype)


class LoraLinear(nn.Linear):
    """A linear layer with a frozen matrix and an adapter; made from a plain layer by `add_adapter`."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    magnitude: nn.Parameter | None
    scale: float
    dropout: Dropout | None = None
    token_keys: Tensor | None = None
    """Keys of a training step's tokens, [batch, seq] int64, within a block's forward; None: nothing is
    dropped."""
    multiply: Callable[..., Tensor] = staticmethod(functional.linear)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs, [..., outputs]."""
        adapter = Adapter(self.lora_a, self.lora_b, self.scale, self.magnitude)
        if adapter.magnitude is None:
            return self.multiply(x, self.weight, self.bias) + adapter.low_rank(seen(self, x))
        scales = factors(adapter.magnitude, adapter.squared_lengths(matrix_of(self)))
        out = scaled_outputs(self, x, self.weight, adapter, scales)
        return out if self.bias is None else out + self.bias


def seen(layer: nn.Module, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... inputs"]:
    """Return the inputs that a layer's adapter sees: without those that are dropped."""
    dropout: Dropout | None = getattr(layer, "dropout", None)
    return x if dropout is None else dropout(x, cast(Any, layer).token_keys)


def scaled_outputs(
    layer: nn.Linear, x: Tensor, weight: Tensor | None, adapter: Adapter, scales: Float[Tensor, "outputs"]
) -> Float[Tensor, "... outputs"]:
    """Return the outputs of a layer whose rows have learned lengths (DoRA), without its bias."""
    multiply: Callable[..., Tensor] = cast(Any, layer).multiply
    plain, left = multiply(x, weight, None), seen(layer, x)
    if left is x:
        return (plain + adapter.low_rank(x)) * scales
    return plain + multiply(left, weight, None) * (scales - 1) + adapter.low_rank(left) * scales


def matrix_of(layer: nn.Linear) -> Tensor:
    """Return a layer's frozen matrix, from its codes if it is rounded."""
    multiply = getattr(layer, "multiply", None)
    return multiply.matrix() if isinstance(multiply, RoundedProduct) else layer.weight


def adapter_of(layer: nn.Module) -> Adapter | None:
    """Return a layer's adapter; None: it has none."""
    if not hasattr(layer, "lora_a"):
        return None
    of_adapter: Any = layer  # not a class of its own where the matrix is a tensor-parallel one
    return Adapter(of_adapter.lora_a, of_adapter.lora_b, of_adapter.scale, of_adapter.magnitude)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the layers that have an adapter, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and hasattr(module, "lora_a"):
            yield name, module


def is_of_adapter(name: str) -> bool:
    """Return True if a parameter's name is that of an adapter, or of the new rows that it trains.

    >>> is_of_adapter("layers.0.mlp.up.lora_a"), is_of_adapter("layers.0.mlp.up.weight")
    (True, False)
    """
    return name.rpartition(".")[2] in ADAPTER_PARAMETERS or is_new_rows(name)


def add_adapter(layer: nn.Linear, config: AdapterConfig, *, dtype: torch.dtype) -> None:
    """Turn a plain linear layer into one with an adapter, in place; the adapter has no values yet.

    Args:
        dtype: dtype of the adapter's parameters.
    """
    layer.__class__ = LoraLinear
    for name, shape in adapter_shapes(config, layer.out_features, layer.in_features).items():
        empty = torch.empty(shape, dtype=dtype, device=layer.weight.device)
        layer.register_parameter(name, nn.Parameter(empty))
    if not config.has_magnitudes:
        layer.register_parameter("magnitude", None)
    layer.scale = config.scale  # type: ignore[assignment]  # not a module or tensor


def adapter_shapes(config: AdapterConfig, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of an adapter of a layer, by name."""
    shapes: dict[str, tuple[int, ...]] = {"lora_a": (config.rank, inputs), "lora_b": (outputs, config.rank)}
    return {**shapes, "magnitude": (outputs,)} if config.has_magnitudes else shapes


class RoundedProduct:
    """Product with a matrix rounded to 8 or 4 bits, in place of a linear layer's own.

    Args:
        like: the matrix without values: its shape, dtype and slices.
        base: "int8" or "int4".
    """

    layer: Int4Linear | Int8Linear

    def __init__(self, like: Tensor, base: str) -> None:
        self.like, self._base = like, base

    @property
    def is_int4(self) -> bool:
        """True if the matrix is rounded to 4 bits, with a scale per group of inputs; False: to 8, with one
        per output."""
        return self._base == "int4"

    def fill(
        self, weight: Float[Tensor, "outputs inputs"], *, largest: Float[Tensor, "outputs"] | None = None
    ) -> None:
        """Round a matrix, on its device and in the dtype of activations; it is not kept.

        Args:
            largest: largest magnitude of each row, if `weight` has a part of the inputs and is rounded to 8
                bits; None: `weight` has all inputs, or whole groups of them.
        """
        outputs, inputs = weight.shape
        plain = nn.Linear(inputs, outputs, bias=False, device="meta")
        plain.weight = nn.Parameter(weight, requires_grad=False)
        self.layer = Int4Linear(plain) if self.is_int4 else Int8Linear(plain, largest=largest)

    def __call__(self, x: Tensor, weight: None, bias: Tensor | None = None) -> Tensor:
        """Return x Wᵀ + bias."""
        del weight
        out: Tensor = _Rounded.apply(x, self)  # type: ignore[no-untyped-call]
        return out if bias is None else out + bias

    def matrix(self) -> Float[Tensor, "outputs inputs"]:
        """Return the rounded matrix in the dtype of activations."""
        return self.layer.matrix().to(self.like.dtype)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, product: RoundedProduct) -> Tensor:  # Any: torch's context
        ctx.product = product
        out: Tensor = product.layer(x)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.product.layer.gradient(gradients[0]), None


def round_frozen(layer: nn.Linear, base: str) -> None:
    """Replace a layer's frozen matrix, on the meta device, by a rounded one to be filled; in place."""
    layer.multiply = RoundedProduct(layer.weight.detach(), base)  # type: ignore[assignment]
    layer.register_parameter("weight", None)


def rounded_by_block(model: nn.Module) -> Iterator[dict[str, RoundedProduct]]:
    """Yield the rounded products of each block, by the names of the matrices that they round."""
    for number, block in enumerate(model.get_submodule("layers").children()):
        found: dict[str, RoundedProduct] = {
            f"layers.{number}.{name}.weight": layer.multiply
            for name, layer in adapted_layers(block)
            if isinstance(layer.multiply, RoundedProduct)
        }
        if found:
            yield found
