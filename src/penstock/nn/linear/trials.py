"""Products with int8, int4 and float8 matrices as operations with candidates: tests, and what is timed."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from penstock.devices.kernel_choice import Call, Operation
from penstock.nn.linear.float8 import RECIPES, ROW, has_native, scaled
from penstock.nn.linear.quantized import (
    BY_TORCH,
    FEW_TOKENS,
    FLOAT8,
    TINYGEMM,
    TRITON,
    WRITTEN_OUT,
    Float8Linear,
    Int4Linear,
    Int8Linear,
    operation_of,
)
from penstock.nn.triton_support import has_triton

_NEAR = {torch.float32: 2**-14, torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""Of the largest result: roundings of the matrix and the result; float32 is multiplied as three TF32."""
_TRIAL = (96, 320)
"""Outputs and inputs of the tested matrix: no multiples of what a program has."""
Layer = Int8Linear | Int4Linear | Float8Linear
_KINDS: dict[str, tuple[Callable[[nn.Linear], Layer], Sequence[str]]] = {
    "int8": (Int8Linear, (TRITON, WRITTEN_OUT)),
    "int4": (Int4Linear, (TRITON, WRITTEN_OUT, TINYGEMM)),
    "float8": (partial(Float8Linear, is_native=True), (TRITON, BY_TORCH)),
}
"""Format of the matrix -> its layer, and its kernels in the static order."""
Product = tuple[Layer, Tensor]
"""A rounded layer and tokens."""


def product_operations(
    bits: str, *, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> list[Operation[Product]]:
    """Return the products of few tokens and a matrix; none where there is one kernel only.

    Args:
        bits: format of the matrices, `EngineConfig.weights`.
    """
    has_one = bits == FLOAT8 and not has_native(RECIPES["float8_rowwise"], device.type)
    if bits not in _KINDS or not has_triton(device) or dtype not in _NEAR or has_one:
        return []
    made = partial(_product, bits, dtype=dtype, device=device)
    return [
        Operation(
            name=operation_of(bits, most),
            shape=f"{most} tokens, {outputs} x {inputs}, {str(dtype).removeprefix('torch.')}",
            kernels={name: partial(_prepared, name) for name in _KINDS[bits][1]},
            costly={TINYGEMM} & {*_KINDS[bits][1]},  # it takes a second copy of the codes
            trial=partial(made, most, *_TRIAL),
            load=partial(made, most, outputs, inputs),
            exact=_exact,
            near=_NEAR[dtype],
            is_replayed=True,
        )
        for most in (FEW_TOKENS if bits != FLOAT8 else FEW_TOKENS[-1:])
    ]


def _product(
    bits: str, num_tokens: int, outputs: int, inputs: int, *, dtype: torch.dtype, device: torch.device
) -> Product:
    drawn = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    linear = nn.Linear(inputs, outputs, bias=False, device="meta")
    linear.weight = nn.Parameter(drawn(outputs, inputs, dtype=dtype) / 10, requires_grad=False)
    return _KINDS[bits][0](linear), drawn(num_tokens, inputs, dtype=dtype)


def _prepared(name: str, case: Product) -> Call:
    layer, x = case
    kernels = {operation_of(layer.bits, len(x)): name}
    layer.use(kernels)

    @torch.no_grad()
    def call() -> tuple[Tensor]:
        layer.kernels = kernels
        return (layer(x),)

    return call


def _exact(case: Product) -> tuple[Tensor]:
    layer, x = case
    if isinstance(layer, Float8Linear):  # its tokens are rounded too
        x = scaled(x, ROW, torch.float8_e4m3fn).values(torch.float32)
    return (x.double() @ layer.matrix().double().t(),)
