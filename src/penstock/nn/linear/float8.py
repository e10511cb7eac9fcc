"""Linear layers with float8 products, forward and backward.

A product sums over one dim of two matrices. Each matrix is cut into groups along that dim (the whole tensor,
a row, or 32 neighbours of a row for MXFP8), and the numbers of a group are divided by a scale that brings the
largest into the range of the dtype. A layer has three products, which sum over inputs, outputs and tokens:

    out = x Wᵀ        gradient of x = g W        gradient of W = gᵀ x

So each matrix is in two of them. With one scale a matrix is rounded once, and its codes are transposed for
the second product; the codes of x are what is kept for the backward pass. With scales of groups a matrix is
rounded for each of its products.

Scales are powers of two, held as 8-bit exponents (the e8m0 of the OCP Microscaling specification 1.0, rounded
up so that nothing overflows). Division by them is exact, and rounding a rounded number again does not change
it, so weights may be sent in float8 (parallel/apply.py) without further loss. The backward pass reads the
weights as the forward pass rounded them.

On a device without float8 instructions the product is emulated: rounded to 8 bits and back, multiplied in
the dtype of the input. The loss of precision is the same, and no time is saved.
Sources: Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433; Rouhani et al.,
"Microscaling data formats", arXiv:2310.10537.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from penstock.nn.dtensor import local

Groups = int
"""Number of neighbours that share a scale, or WHOLE or ROW."""

WHOLE, ROW = 0, -1
LARGEST_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
"""Of the largest numbers, 448 and 57344: 1.75 x 2**exponent."""
MANTISSA_OF_LARGEST = 0x600000
"""Of 1.75, in float32."""
NATIVE_MULTIPLE = 16
"""Of which each dim has to be a multiple for the instructions."""
_BLOCK = 32  # neighbours that share a scale in the block-scaled instructions


@dataclass(frozen=True, slots=True)
class Recipe:
    """Rounding of the matrices of a layer."""

    groups: Groups
    gradient: torch.dtype
    """Float8 dtype of gradients; weights and activations are float8_e4m3fn."""
    native: tuple[int, int] | None
    """Smallest compute capability of a GPU with the instructions."""

    def pays(self, outputs: int, inputs: int) -> bool:
        """True if a layer gains more by the instructions than its roundings cost.

        The rule is that of torchao 0.18 (`_auto_filter_for_recipe`), found by timing on H100s. It has none
        for blocks: they have the rule of whole tensors.
        """
        if self.groups == ROW:
            return outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)
        return outputs > 1024 or inputs > 4096


RECIPES = {
    "float8_tensorwise": Recipe(WHOLE, torch.float8_e5m2, (8, 9)),
    "float8_rowwise": Recipe(ROW, torch.float8_e4m3fn, (9, 0)),
    "mxfp8": Recipe(_BLOCK, torch.float8_e4m3fn, (10, 0)),
}


@dataclass(frozen=True, slots=True)
class Scaled:
    """A float8 matrix with scales of groups along its rows."""

    codes: Tensor
    """[rows, columns] of a float8 dtype."""
    exponents: Tensor
    """[rows or 1, groups of a row] uint8."""
    scales: Tensor
    """[rows or 1, groups of a row] float32: 2 ** (exponent - 127)."""
    size: int
    """Number of neighbours in a group; the last of a row may be smaller."""

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers in `dtype`; exact if its range suffices."""
        scales, numbers = self.scales.to(dtype), self.codes.to(dtype)
        if scales.shape[1] == 1:
            return numbers * scales
        return _ungrouped(_grouped(numbers, self.size) * scales.unsqueeze(-1), numbers.shape[1])

    def transposed(self) -> "Scaled":
        """Return the transposed matrix, row-major; the matrix has one scale."""
        return Scaled(self.codes.t().contiguous(), self.exponents, self.scales, len(self.codes))


def _grouped(x: Tensor, size: int) -> Tensor:
    """Return [rows, groups, size]; the last group of a row is padded with zeros."""
    missing = -x.shape[1] % size
    return (functional.pad(x, (0, missing)) if missing else x).reshape(x.shape[0], -1, size)


def _ungrouped(x: Tensor, columns: int) -> Tensor:
    return x.reshape(x.shape[0], -1)[:, :columns]


def scaled(x: Float[Tensor, "rows columns"], groups: Groups, dtype: torch.dtype) -> Scaled:
    """Round a matrix to a float8 dtype, with a scale for each group of a row or for the whole matrix."""
    columns = x.shape[1]
    size = min(groups, columns) if groups > 0 else columns
    grouped = _grouped(x.float(), size)
    largest = grouped.abs().amax(-1)
    exponents = _exponents(largest.amax().view(1, 1) if groups == WHOLE else largest, dtype)
    return rounded(x, exponents, size, dtype)


def rounded(
    x: Float[Tensor, "rows columns"],
    exponents: Tensor,
    size: int,
    dtype: torch.dtype,
    scales: Tensor | None = None,
) -> Scaled:
    """Round a matrix to a float8 dtype with the exponents of its groups of `size` numbers.

    Args:
        scales: as in `Scaled`; None: they are computed.
    """
    shares = _grouped(x.float(), size) * power_of_two(254 - exponents).unsqueeze(-1)
    # row-major, also of a transposed matrix: the float8 instructions read nothing else
    codes = _ungrouped(shares, x.shape[1]).to(dtype, memory_format=torch.contiguous_format)
    return Scaled(codes, exponents, power_of_two(exponents) if scales is None else scales, size)


def _exponents(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the exponents of the smallest powers of two that bring numbers into the range of a dtype."""
    bits = largest.view(torch.int32)
    exponents = (bits >> 23) + ((bits & 0x7FFFFF) > MANTISSA_OF_LARGEST) - LARGEST_EXPONENT[dtype]
    return exponents.clamp(1, 253).to(torch.uint8)


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2 ** (exponent - 127) in float32.

    >>> power_of_two(torch.tensor([126, 127, 130], dtype=torch.uint8)).tolist()
    [0.5, 1.0, 8.0]
    """
    return (exponents.int() << 23).view(torch.float32)


def product(
    a: Scaled, b: Scaled, dtype: torch.dtype, *, native: bool, fast: bool = False
) -> Float[Tensor, "m n"]:
    """Return a bᵀ in `dtype`, summed over columns in float32.

    Args:
        native: use the float8 instructions of the device if shapes and `dtype` allow.
        fast: sum as the instructions do, on Hopper with some 14 bits (arXiv:2412.19437, section 3.3.2); else
            their partial sums are added up in float32. Of products of blocks nothing changes.
    """
    if a.exponents.shape[1] == 1:
        return product_of_rows(a.codes, b.codes, a.scales, b.scales, dtype, native=native, fast=fast)
    (m, k), n = a.codes.shape, b.codes.shape[0]
    if not native or dtype != torch.bfloat16 or m % NATIVE_MULTIPLE or n % NATIVE_MULTIPLE or k % _BLOCK:
        return a.values(dtype) @ b.values(dtype).t()
    return _blocked_product(a, b)


def product_of_rows(
    a: Float[Tensor, "m k"],
    b: Float[Tensor, "n k"],
    a_scales: Float[Tensor, "m 1"],
    b_scales: Float[Tensor, "n 1"],
    dtype: torch.dtype,
    *,
    native: bool,
    fast: bool = False,
) -> Float[Tensor, "m n"]:
    """Return a bᵀ in `dtype` of codes whose rows have a scale each, or all rows one: as `product`."""
    (m, k), n = a.shape, b.shape[0]
    if not native or dtype != torch.bfloat16 or any(size % NATIVE_MULTIPLE for size in (m, n, k)):
        return (a.to(dtype) * a_scales.to(dtype)) @ (b.to(dtype) * b_scales.to(dtype)).t()
    return torch._scaled_mm(a, b.t(), a_scales, b_scales.t(), out_dtype=dtype, use_fast_accum=fast)


def _blocked_product(a: Scaled, b: Scaled) -> Tensor:
    """Return a bᵀ in bfloat16 by the block-scaled instructions (blocks of 32), which only such GPUs have."""
    return functional.scaled_mm(
        a.codes,
        b.codes.t(),
        tiled(a.exponents).view(torch.float8_e8m0fnu),
        functional.ScalingType.BlockWise1x32,
        tiled(b.exponents).view(torch.float8_e8m0fnu),
        functional.ScalingType.BlockWise1x32,
        swizzle_a=functional.SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=functional.SwizzleType.SWIZZLE_32_4_4,
        output_dtype=torch.bfloat16,
    )


def tiled(exponents: Tensor) -> Tensor:
    """Return the exponents of blocks in the order in which the instructions read them, flat.

    The order is tiles of 128 rows by 4 blocks, padded with zeros. A tile has the 4 blocks of row 0, of rows
    32, 64 and 96, of row 1, and so on (cuBLAS documentation, "block scaling factors layout").

    Args:
        exponents: [rows, blocks of a row].
    """
    rows, blocks = exponents.shape
    whole = functional.pad(exponents, (0, -blocks % 4, 0, -rows % 128))
    tiles = whole.view(whole.shape[0] // 128, 4, 32, whole.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


class _Linear(torch.autograd.Function):
    """x Wᵀ of [tokens, inputs] and [outputs, inputs]; `found` is as in `Multiply`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        groups: Groups,
        gradient: torch.dtype,
        native: bool,
        *found: Tensor,
    ) -> Tensor:
        e4m3 = torch.float8_e4m3fn
        of_x = scaled(x, groups, e4m3)
        if found:
            exponents, scales = found
            of_weight = rounded(weight, exponents, weight.shape[1], e4m3, scales)
        else:
            of_weight = scaled(weight, groups, e4m3)
        # of the weights no codes: they would stay where FSDP frees the weights
        kept = (of_weight.scales, of_x.codes, of_x.exponents, of_x.scales) if groups == WHOLE else (None, x)
        ctx.save_for_backward(weight, of_weight.exponents, *kept)
        ctx.how = (groups, gradient, native, of_weight.size, x.dtype)  # type: ignore[attr-defined]
        return product(of_x, of_weight, x.dtype, native=native, fast=True)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # Any: torch's context
        weight, exponents, scales, *kept = ctx.saved_tensors
        groups, gradient, native, size, dtype = ctx.how
        e4m3 = torch.float8_e4m3fn
        read = rounded(weight, exponents, size, e4m3, scales)
        g_by_outputs = scaled(g, groups, gradient)
        if groups == WHOLE:
            codes_of_x, exponents_of_x, scales_of_x = kept
            of_x = Scaled(codes_of_x, exponents_of_x, scales_of_x, weight.shape[1])
            by_outputs, x_by_tokens = read.transposed(), of_x.transposed()
            g_by_tokens = g_by_outputs.transposed()
        else:
            by_outputs, x_by_tokens = (
                scaled(read.values(dtype).t(), groups, e4m3),
                scaled(kept[0].t(), groups, e4m3),
            )
            g_by_tokens = scaled(g.t(), groups, gradient)
        x_gradient = product(g_by_outputs, by_outputs, dtype, native=native)
        weight_gradient = product(g_by_tokens, x_by_tokens, dtype, native=native)
        return x_gradient, weight_gradient, *(None for _ in ctx.needs_input_grad[2:])


@dataclass(slots=True)
class Multiply:
    """Float8 product of one linear layer, in place of `functional.linear`."""

    recipe: Recipe
    native: bool
    """Use the float8 instructions of the device."""
    found: tuple[Tensor, ...] | None = None
    """Exponent and scale of the weight, [1, 1] each, within the forward of a block that found those of all
    its weights; None: each call finds them."""

    def __call__(
        self,
        x: Float[Tensor, "... inputs"],
        weight: Float[Tensor, "outputs inputs"],
        bias: Tensor | None = None,
    ) -> Float[Tensor, "... outputs"]:
        """Return x Wᵀ + bias in the dtype of `x`."""
        recipe = self.recipe
        flat: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            x.flatten(0, -2), weight, recipe.groups, recipe.gradient, self.native, *(self.found or ())
        )
        out = flat.view(*x.shape[:-1], weight.shape[0])
        return out if bias is None else out + bias


class Float8TrainingLinear(nn.Linear):
    """A linear layer with a float8 product."""

    multiply: Multiply

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs, [..., outputs] in the dtype of `x`."""
        out: Tensor = self.multiply(x, self.weight, self.bias)
        return out


def find_scales_at_once(blocks: Iterable[nn.Module]) -> None:
    """Make each block find the scales of its weights at once, in place, if each weight has one.

    Alone, a weight takes two kernels for its largest number and its scale. At once, the five weights of a
    block at 1B take six, in place of ten. The blocks' `forward` is replaced.
    """
    for block in blocks:
        layers = [one for one in block.modules() if isinstance(getattr(one, "multiply", None), Multiply)]
        if layers and cast(Any, layers[0]).multiply.recipe.groups == WHOLE:
            block.forward = partial(_with_scales, block.forward, layers)


def _with_scales(
    forward: Callable[..., Any],  # Any: a block's arguments and result
    layers: Sequence[Any],  # Any: linear layers with a Multiply
    *args: Any,
    **options: Any,
) -> Any:
    with torch.no_grad():
        norms = torch._foreach_norm([local(layer.weight) for layer in layers], math.inf)
        exponents = [_exponents(norm.float().view(1, 1), torch.float8_e4m3fn) for norm in norms]
        scales = [power_of_two(exponent) for exponent in exponents]
        if torch.compiler.is_compiling():  # one kernel for all, as in parallel/sharding/compute_dtype.py
            scales = torch.ops.aten._foreach_copy([torch.empty_like(scale) for scale in scales], scales)
    for layer, *found in zip(layers, exponents, scales, strict=True):
        layer.multiply.found = tuple(found)
    try:
        return forward(*args, **options)
    finally:
        for layer in layers:
            layer.multiply.found = None


def has_native(recipe: Recipe, device: Literal["cpu", "cuda"] | str) -> bool:
    """Return True if devices of this type multiply by the recipe without emulation."""
    if recipe.native is None or device != "cuda":
        return False
    return torch.cuda.get_device_capability() >= recipe.native


def may_compile(recipe: Recipe | None, device: Literal["cpu", "cuda"] | str) -> bool:
    """Return False if torch's compiler computes the recipe wrongly on devices of this type.

    On CPUs, in torch 2.13, it has no code for the blocks of MXFP8. With a scale a tensor, a kernel that
    transposes activations in the backward pass reads memory that nothing wrote.
    """
    return recipe is None or device != "cpu" or recipe.groups == ROW
