"""Linear layers for serving in int8, int4 and float8, made from a trained layer without data.

int8: each output has a scale. int4: 32 inputs of an output share a scale, the last ones of an output if they
are fewer; of several scales the one with the least squared error is used.
Both are weight-only: tokens stay as they are, codes are widened inside the product, sums are float32. With
`rounds`, which `activations="int8"` of an engine chooses, tokens are rounded to 8 bits too, each with its own
scale (Dettmers et al., "LLM.int8()", NeurIPS 2022, without its outliers), for CPUs that multiply integers.
Sums of integers are exact, so the C++ operator and plain PyTorch give the same numbers, for any batch.
float8: for GPUs with such instructions, scales per output and per token (nn/linear/float8.py).
torchao is not used: its layers bring no kernel that a CPU without AMX runs faster.
"""

from collections.abc import Mapping
from functools import cache
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from penstock.core import env
from penstock.nn import native
from penstock.nn.linear.adapter_config import GROUP
from penstock.nn.linear.float8 import (
    LARGEST_EXPONENT,
    MANTISSA_OF_LARGEST,
    NATIVE_MULTIPLE,
    ROW,
    product_of_rows,
    scaled,
)
from penstock.nn.linear.packed import PANEL, can_multiply, empty_panels, from_panels, in_huge_pages, to_panels
from penstock.nn.linear.rounding import _by_chunks, _to_halves, from_halves, to_int8
from penstock.nn.triton_support import has_triton, on_device_of


@cache
def multiplies_integers() -> bool:
    """Return True if this CPU has products of bytes, so that rounded tokens gain time (VNNI)."""
    if native.is_available():
        return bool(torch.ops.penstock.multiplies_integers())
    return bool({"avx512_vnni", "avx_vnni"} & set(env.cpu_features().split()))


FEW_TOKENS = (1, 16, 64)
"""Numbers of tokens up to which products have a kernel each; with more tokens the matrix is written out."""
TRITON, WRITTEN_OUT, TINYGEMM = "Triton", "written out", "tinygemm"
"""Kernels on GPUs: those of quantized_triton.py; a plain product with the matrix expanded to the tokens'
dtype; torch's `_weight_int4pack_mm`, which reads a second copy of the codes, in an order of its own."""
FLOAT8, BY_TORCH = "float8", "torch"
"""Operation of float8 products; its kernels round the tokens: TRITON (float8_triton.py), or ten of torch."""


class _Quantized(nn.Module):
    """Base of the layers here: sizes, and a bias in the dtype of the activations."""

    bias: Tensor | None
    bits = ""
    kernels: Mapping[str, str]
    """`operation_of` -> name of its kernel on GPUs; those that are missing: Triton's."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.kernels = {}
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach(), persistent=False)

    def use(self, kernels: Mapping[str, str]) -> Self:
        """Compute by these kernels from now on; return the layer."""
        self.kernels = kernels
        return self

    def kernel_for(self, x: Float[Tensor, "... inputs"]) -> str:
        """Return the kernel of a product with `x` on a GPU."""
        num_tokens = x.numel() // x.shape[-1]
        if not has_triton(x.device) or num_tokens > FEW_TOKENS[-1]:
            return WRITTEN_OUT
        return self.kernels.get(operation_of(self.bits, num_tokens), TRITON)

    def _with_bias(self, out: Tensor) -> Tensor:
        return out if self.bias is None else out + self.bias


def operation_of(bits: str, num_tokens: int) -> str:
    """Return the operation of a product of a few tokens.

    >>> operation_of("int8", 5), operation_of("float8", 5)
    ('int8.16', 'float8')
    """
    if bits == FLOAT8:
        return FLOAT8
    return f"{bits}.{min(most for most in FEW_TOKENS if most >= num_tokens)}"


class Int8Linear(_Quantized):
    """A linear layer with an int8 matrix.

    Args:
        rounds: round tokens to 8 bits too, on CPUs; the C++ operator does so where `multiplies_integers`.
        largest: [outputs] largest magnitude of each row, if `linear` has a part of the inputs: its codes and
            scales are then those of the whole matrix. None: `linear` has all inputs.
    """

    bits = "int8"
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    """Of the C++ operator that rounds tokens: 128 times the sum of each output's codes."""

    def __init__(self, linear: nn.Linear, *, rounds: bool = False, largest: Tensor | None = None) -> None:
        super().__init__(linear)
        self.rounds = rounds
        weight = linear.weight.detach()
        self.is_native = can_multiply(weight) and self.in_features % 4 == 0
        self.is_native &= multiplies_integers() or not rounds
        if self.is_native:
            codes = empty_panels(self.out_features, self.in_features, torch.int8)
            scales, offsets = (
                torch.zeros(len(codes) * PANEL),
                torch.zeros(len(codes) * PANEL, dtype=torch.int32),
            )
            if largest is None:
                torch.ops.penstock.pack_int8(weight.contiguous(), codes, scales, offsets)
            else:
                whole, scales[: self.out_features] = to_int8(weight, largest)
                codes.copy_(to_panels(whole))
                offsets[: self.out_features] = 128 * whole.sum(1, dtype=torch.int32)
            self.register_buffer("offsets", offsets if rounds else None, persistent=False)
        elif largest is None:
            codes, scales = _by_chunks(weight, to_int8)
        else:
            codes, scales = to_int8(weight, largest)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def matrix(self) -> Float[Tensor, "outputs inputs"]:
        """Return the matrix in float32, from codes and scales."""
        codes = from_panels(self.codes, self.out_features) if self.is_native else self.codes
        return codes.float() * self.scales[: self.out_features].unsqueeze(1)

    def forward(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Return the layer's outputs, [..., outputs]; a token's result does not depend on other tokens."""
        if self.is_native:
            out: Tensor = torch.ops.penstock.linear(
                x, self.codes, self.scales, self.offsets, self.bias, self.out_features
            )
            return out
        if self.kernel_for(x) == TRITON:
            return self._with_bias(torch.ops.penstock.few_int8(x, self.codes, self.scales))
        if not self.rounds:
            exact = x if x.device.type != "cpu" else x.float()
            sums = functional.linear(exact, torch.ops.penstock.cast_for(self.codes, exact)) * self.scales
            return self._with_bias(sums.to(x.dtype))
        tokens, factors = to_int8(x.flatten(0, -2))
        sums = torch._int_mm(tokens, self.codes.t()).float() * self.scales * factors.unsqueeze(-1)
        return self._with_bias(sums.to(x.dtype).view(*x.shape[:-1], self.out_features))

    def gradient(self, g: Float[Tensor, "... outputs"]) -> Float[Tensor, "... inputs"]:
        """Return the gradient of tokens from that of outputs: by the matrix of the forward pass, exactly."""
        codes = from_panels(self.codes, self.out_features) if self.is_native else self.codes
        matrix: Tensor = torch.ops.penstock.cast_for(codes, g)
        return (g * self.scales[: self.out_features]).to(g.dtype) @ matrix


class Int4Linear(_Quantized):
    """A linear layer with a 4-bit matrix.

    Args:
        rounds: round tokens to 8 bits too, on CPUs; the C++ operator does so where `multiplies_integers`.
    """

    bits = "int4"
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    """Of the C++ operator that rounds tokens: one 0."""
    tinygemm: tuple[Tensor, Tensor] | None = None
    """Codes and scales as `_weight_int4pack_mm` reads them; None: it is not used."""

    def __init__(self, linear: nn.Linear, *, rounds: bool = False) -> None:
        super().__init__(linear)
        self.rounds = rounds
        weight = linear.weight.detach()
        self._missing = -self.in_features % GROUP  # of the last group
        self.is_native = can_multiply(weight) and self.in_features % 4 == 0
        self.is_native &= multiplies_integers() or not rounds
        if self.is_native:  # two codes a byte: a panel's outputs 0 to 15 in the lower halves, 16 to 31 above
            units, groups = self.in_features // 4, -(-self.in_features // GROUP)
            codes = in_huge_pages((-(-self.out_features // PANEL), units, 2 * PANEL), torch.uint8)
            scales = weight.new_zeros(len(codes), groups, PANEL, dtype=torch.bfloat16)
            torch.ops.penstock.pack_int4(weight.contiguous(), codes, scales)
            offsets = torch.zeros(1, dtype=torch.int32) if rounds else None
            self.register_buffer("offsets", offsets, persistent=False)
        else:
            codes, scales = _by_chunks(functional.pad(weight, (0, self._missing)), _to_halves)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def matrix(self) -> Float[Tensor, "outputs inputs"]:
        """Return the matrix in float32, from codes and scales."""
        codes, scales = self.codes, self.scales.float()
        if self.is_native:
            panels = torch.stack([codes & 15, codes >> 4], 2).view(*codes.shape[:2], PANEL, 4)
            whole = from_panels(panels, self.out_features)
            scales = scales.transpose(1, 2).flatten(0, 1)[: self.out_features]
        else:
            whole = from_halves(codes)
        return _values(whole, scales)[:, : self.in_features]

    def matrix_for(self, like: Tensor) -> Float[Tensor, "outputs inputs"]:
        """Return the matrix in the dtype of `like`, the other factor of a product."""
        if self.is_native:
            return self.matrix().to(like.dtype)
        out: Tensor = torch.ops.penstock.written_out_int4(self.codes, self.scales, like, self.in_features)
        return out

    def forward(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Return the layer's outputs, [..., outputs]; a token's result does not depend on other tokens."""
        if self.is_native:
            out: Tensor = torch.ops.penstock.linear(
                x, self.codes, self.scales, self.offsets, self.bias, self.out_features
            )
            return out
        if (kernel := self.kernel_for(x)) != WRITTEN_OUT:
            whole = functional.pad(x, (0, self._missing)) if self._missing else x
            if kernel == TINYGEMM:
                return self._with_bias(self._by_tinygemm(whole))
            return self._with_bias(torch.ops.penstock.few_int4(whole, self.codes, self.scales))
        if x.device.type != "cpu":
            return self._with_bias(functional.linear(x, self.matrix_for(x)))
        if not self.rounds:
            exact = x.float()
            return self._with_bias(functional.linear(exact, self.matrix_for(exact)).to(x.dtype))
        tokens, factors = to_int8(x.flatten(0, -2))
        sums = functional.linear(tokens.float(), self.matrix()) * factors.unsqueeze(-1)
        return self._with_bias(sums.to(x.dtype).view(*x.shape[:-1], self.out_features))

    def use(self, kernels: Mapping[str, str]) -> Self:
        """Compute by these kernels from now on; return the layer. Tinygemm gets its copy of the codes.

        Raises:
            RuntimeError: torch has no such product for these sizes or this device.
        """
        is_needed = any(kernels.get(operation_of(self.bits, most)) == TINYGEMM for most in FEW_TOKENS)
        if is_needed and not self.is_native:
            codes, zeros = from_halves(self.codes), torch.zeros_like(self.scales)
            inner = next(size for size in (8, 4, 2) if codes.shape[1] % (16 * size) == 0)
            packed = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], inner)
            scales = torch.stack([self.scales, zeros], 2).transpose(0, 1).contiguous()
            self.tinygemm = packed, scales
        return super().use(kernels)

    def _by_tinygemm(self, x: Tensor) -> Tensor:
        assert self.tinygemm is not None
        out: Tensor = torch.ops.aten._weight_int4pack_mm(
            x.flatten(0, -2), self.tinygemm[0], GROUP, self.tinygemm[1]
        )
        return out.view(*x.shape[:-1], self.out_features)

    def gradient(self, g: Float[Tensor, "... outputs"]) -> Float[Tensor, "... inputs"]:
        """Return the gradient of tokens from that of outputs, by the matrix of the forward pass.

        On CPUs that is float32, exactly; on GPUs it has the dtype of activations.
        """
        exact = g.float() if g.device.type == "cpu" else g
        return (exact @ self.matrix_for(exact)).to(g.dtype)


class Float8Linear(_Quantized):
    """A linear layer with float8 matrix and tokens, and a scale per output and per token."""

    bits = "float8"
    codes: Tensor
    scales: Tensor
    """[outputs, 1] float32."""

    def __init__(self, linear: nn.Linear, *, is_native: bool) -> None:
        super().__init__(linear)
        self.is_native = is_native
        matrix = scaled(linear.weight.detach(), ROW, torch.float8_e4m3fn)
        self.register_buffer("codes", matrix.codes, persistent=False)
        self.register_buffer("scales", matrix.scales, persistent=False)

    def matrix(self) -> Float[Tensor, "outputs inputs"]:
        """Return the matrix in float32, from codes and scales."""
        return self.codes.float() * self.scales

    def forward(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Return the layer's outputs, [..., outputs] in the dtype of `x`.

        On GPUs that is two kernels: tokens are rounded and padded, and multiplied. In compiled code torch
        rounds, since the compiler fuses that with what computes the tokens.
        """
        tokens = x.flatten(0, -2)
        multiple = NATIVE_MULTIPLE if self.is_native else 1
        first = TRITON if has_triton(x.device) else BY_TORCH
        if self.kernels.get(FLOAT8, first) == TRITON and not torch.compiler.is_compiling():
            codes, scales = torch.ops.penstock.round_rows(tokens, multiple)
        else:
            missing = -len(tokens) % multiple
            padded = functional.pad(tokens, (0, 0, 0, missing)) if missing else tokens
            left = scaled(padded, ROW, torch.float8_e4m3fn)
            codes, scales = left.codes, left.scales
        out = product_of_rows(
            codes, self.codes, scales, self.scales, x.dtype, native=self.is_native, fast=True
        )
        return self._with_bias(out[: len(tokens)].view(*x.shape[:-1], self.out_features))


def _round_rows(x: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    from penstock.nn.linear.float8_triton import rounded_rows

    with on_device_of(x):
        return rounded_rows(
            x,
            multiple,
            largest_exponent=LARGEST_EXPONENT[torch.float8_e4m3fn],
            mantissa=MANTISSA_OF_LARGEST,
        )


def _rounded_shape(x: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    rows = (len(x) + multiple - 1) // multiple * multiple
    codes = x.new_empty((rows, x.shape[1]), dtype=torch.float8_e4m3fn)
    return codes, x.new_empty((rows, 1), dtype=torch.float32)


def _few_int8(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    from penstock.nn.linear.quantized_triton import linear_int8  # takes a second that CPUs do not spend

    with on_device_of(x):
        return linear_int8(x.flatten(0, -2), codes, scales).view(*x.shape[:-1], len(codes))


def _few_int4(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    from penstock.nn.linear.quantized_triton import linear_int4

    with on_device_of(x):
        return linear_int4(x.flatten(0, -2), codes, scales).view(*x.shape[:-1], len(codes))


def _cast_for(codes: Tensor, like: Tensor) -> Tensor:
    return codes.to(like.dtype)


def _cast_shape(codes: Tensor, like: Tensor) -> Tensor:
    return torch.empty_like(codes, dtype=like.dtype)


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 numbers of codes of 4 bits and the scales of their groups."""
    each = scales.repeat_interleave(GROUP, dim=1)[:, : codes.shape[1]]
    return (codes.float() - 8) * each


def _written_out_int4(codes: Tensor, scales: Tensor, like: Tensor, inputs: int) -> Tensor:
    if not has_triton(codes.device):
        return _values(from_halves(codes), scales.float())[:, :inputs].to(like.dtype)
    from penstock.nn.linear.quantized_triton import written_out_int4

    with on_device_of(codes):
        return written_out_int4(codes, scales, inputs=inputs, dtype=like.dtype)


def _shape(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:  # noqa: ARG001
    return x.new_empty(*x.shape[:-1], len(codes))


def _shape_of_matrix(codes: Tensor, scales: Tensor, like: Tensor, inputs: int) -> Tensor:  # noqa: ARG001
    return codes.new_empty(len(codes), inputs, dtype=like.dtype)


torch.library.define("penstock::round_rows", "(Tensor x, int multiple) -> (Tensor, Tensor)")
torch.library.impl("penstock::round_rows", "CompositeExplicitAutograd", _round_rows)
torch.library.register_fake("penstock::round_rows", _rounded_shape)

# A compiler that sees the forward and the backward pass write out one matrix keeps it in between: the size of
# the model in bfloat16. These two are given the other factor of a product, so it sees two matrices.
torch.library.define("penstock::cast_for", "(Tensor codes, Tensor like) -> Tensor")
torch.library.impl("penstock::cast_for", "CompositeExplicitAutograd", _cast_for)
torch.library.register_fake("penstock::cast_for", _cast_shape)

torch.library.define(
    "penstock::written_out_int4", "(Tensor codes, Tensor scales, Tensor like, int inputs) -> Tensor"
)
torch.library.impl("penstock::written_out_int4", "CompositeExplicitAutograd", _written_out_int4)
torch.library.register_fake("penstock::written_out_int4", _shape_of_matrix)

for _name, _product in (("few_int8", _few_int8), ("few_int4", _few_int4)):
    torch.library.define(f"penstock::{_name}", "(Tensor x, Tensor codes, Tensor scales) -> Tensor")
    torch.library.impl(f"penstock::{_name}", "CompositeExplicitAutograd", _product)
    torch.library.register_fake(f"penstock::{_name}", _shape)
