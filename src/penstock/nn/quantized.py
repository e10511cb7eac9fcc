"""Linear layers for serving with matrices of 8 and 4 bits, made from a trained layer without data.

int8: each output has a scale, and tokens are rounded to 8 bits as they come, each with its own scale
(Dettmers et al., "LLM.int8()", NeurIPS 2022, without its outliers). The sums are of integers and exact, so
the C++ operator and plain PyTorch give the same numbers, whatever the batch.
int4: 32 inputs of an output share a scale; of several scales the one with the least squared error is
taken. Tokens are rounded to 8 bits as above.
float8: for GPUs with such instructions, scales per output and per token (nn/float8.py).
torchao is not used: its layers bring no kernel that a CPU without AMX runs faster (ADR 0028).
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor, nn
from torch.nn import functional

from penstock.nn import low_bit_gpu
from penstock.nn.float8 import ROW, Scaled, product, scaled
from penstock.nn.packed import PANEL, can_multiply, empty_panels, from_panels

GROUP = 32
"""Inputs that share a scale in a matrix of 4 bits."""
_CHUNK_ROWS = 4096
_LEAST = 1e-30
"""The scale of zeros is not zero."""
_SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of the scale that just holds the largest number; a smaller one cuts it and is finer for the rest."""


def to_int8(
    rows: Float[Tensor, "rows columns"],
) -> tuple[Int8[Tensor, "rows columns"], Float[Tensor, "rows"]]:
    """Round each row to whole numbers from -127 to 127 times a scale.

    >>> codes, scales = to_int8(torch.tensor([[0.5, -1.0]]))
    >>> codes.tolist(), round(float(scales), 5)
    ([[64, -127]], 0.00787)
    """
    numbers = rows.float()
    largest = numbers.abs().amax(-1).clamp_(min=_LEAST)
    return (numbers * (127.0 / largest).unsqueeze(-1)).round_().to(torch.int8), largest / 127.0


def to_int4(
    rows: Float[Tensor, "rows columns"],
) -> tuple[UInt8[Tensor, "rows columns"], Float[Tensor, "rows groups"]]:
    """Round groups of a row to numbers from -8 to 7, stored as 0 to 15, times a bfloat16 scale.

    The number of largest magnitude becomes -8, so a scale may be negative.
    """
    groups = rows.float().view(len(rows), -1, GROUP)
    top, bottom = groups.amax(2, keepdim=True), groups.amin(2, keepdim=True)
    extreme = torch.where(-bottom > top, bottom, top)
    extreme = torch.where(extreme.abs() < _LEAST, _LEAST, extreme)
    best_codes, best_scales, least = groups, extreme, torch.full_like(extreme, torch.inf)
    for share in _SHRUNK:
        scales = (extreme * (share / -8.0)).bfloat16().float()
        codes = (groups / scales).round_().clamp_(-8.0, 7.0)
        error = (codes * scales).sub_(groups).square_().sum(2, keepdim=True)
        is_better = error < least
        best_codes = torch.where(is_better, codes, best_codes)
        best_scales, least = torch.where(is_better, scales, best_scales), torch.minimum(error, least)
    return (best_codes + 8).to(torch.uint8).flatten(1), best_scales.squeeze(2).bfloat16()


def _to_halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = to_int4(rows)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


def _by_chunks(matrix: Tensor, rounded: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Round rows, some thousands at a time: in float32 a whole matrix may be larger than the model."""
    codes, scales = zip(*(rounded(rows) for rows in torch.split(matrix, _CHUNK_ROWS)), strict=True)
    return torch.cat(codes), torch.cat(scales)


class _Quantized(nn.Module):
    """What the layers here share: sizes, and a bias in the type of the activations."""

    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach(), persistent=False)

    def _with_bias(self, out: Tensor) -> Tensor:
        return out if self.bias is None else out + self.bias


class Int8Linear(_Quantized):
    """A linear layer whose matrix and tokens have 8 bits; on GPUs the matrix alone."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor
    """For the C++ operator: 128 times the sum of each output's codes."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach()
        self.is_native = can_multiply(8, weight) and self.in_features % 4 == 0
        if self.is_native:
            codes = empty_panels(self.out_features, self.in_features, torch.int8)
            scales, offsets = (
                torch.zeros(len(codes) * PANEL),
                torch.zeros(len(codes) * PANEL, dtype=torch.int32),
            )
            torch.ops.penstock.pack_int8(weight.contiguous(), codes, scales, offsets)
            self.register_buffer("offsets", offsets, persistent=False)
        else:
            codes, scales = _by_chunks(weight, to_int8)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Apply the layer; a token's result does not depend on the others."""
        if self.is_native:
            out: Tensor = torch.ops.penstock.linear_int8(
                x, self.codes, self.scales, self.offsets, self.bias, self.out_features
            )
            return out
        if low_bit_gpu.is_for(x):
            return self._with_bias(torch.ops.penstock.few_int8(x, self.codes, self.scales))
        if x.device.type != "cpu":
            return self._with_bias(functional.linear(x, self.codes.to(x.dtype)) * self.scales.to(x.dtype))
        tokens, factors = to_int8(x.flatten(0, -2))
        sums = torch._int_mm(tokens, self.codes.t()).float() * self.scales * factors.unsqueeze(-1)
        return self._with_bias(sums.to(x.dtype).view(*x.shape[:-1], self.out_features))


class Int4Linear(_Quantized):
    """A linear layer whose matrix has 4 bits and whose tokens have 8; on GPUs the matrix alone is rounded."""

    codes: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach()
        self.is_native = can_multiply(4, weight)
        if self.is_native:  # two codes a byte: a panel's outputs 0 to 15 in the lower halves, 16 to 31 above
            codes = empty_panels(self.out_features, self.in_features // 2, torch.uint8)
            codes = codes.view(len(codes), -1, 2 * PANEL)
            scales = weight.new_zeros(len(codes), self.in_features // GROUP, PANEL, dtype=torch.bfloat16)
            torch.ops.penstock.pack_int4(weight.contiguous(), codes, scales)
        else:
            codes, scales = _by_chunks(weight, _to_halves)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def matrix(self) -> Float[Tensor, "outputs inputs"]:
        """Return the matrix that codes and scales stand for, in float32."""
        codes, scales = self.codes, self.scales.float()
        if self.is_native:
            panels = torch.stack([codes & 15, codes >> 4], 2).view(*codes.shape[:2], PANEL, 4)
            whole = from_panels(panels, self.out_features)
            scales = scales.transpose(1, 2).flatten(0, 1)[: self.out_features]
        else:
            whole = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
        return (whole.float() - 8) * scales.repeat_interleave(GROUP, dim=1)

    def forward(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Apply the layer; a token's result does not depend on the others."""
        if self.is_native:
            out: Tensor = torch.ops.penstock.linear_int4(
                x, self.codes, self.scales, self.bias, self.out_features
            )
            return out
        if low_bit_gpu.is_for(x):
            return self._with_bias(torch.ops.penstock.few_int4(x, self.codes, self.scales))
        if x.device.type != "cpu":
            return self._with_bias(functional.linear(x, self.matrix().to(x.dtype)))
        tokens, factors = to_int8(x.flatten(0, -2))
        sums = functional.linear(tokens.float(), self.matrix()) * factors.unsqueeze(-1)
        return self._with_bias(sums.to(x.dtype).view(*x.shape[:-1], self.out_features))


class Float8Linear(_Quantized):
    """A linear layer whose matrix and tokens are float8, with a scale per output and per token."""

    codes: Tensor
    exponents: Tensor

    def __init__(self, linear: nn.Linear, *, is_native: bool) -> None:
        super().__init__(linear)
        self.is_native = is_native
        matrix = scaled(linear.weight.detach(), ROW, torch.float8_e4m3fn)
        self.register_buffer("codes", matrix.codes, persistent=False)
        self.register_buffer("exponents", matrix.exponents, persistent=False)

    def forward(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Apply the layer."""
        tokens = x.flatten(0, -2)
        missing = -len(tokens) % 16 if self.is_native else 0  # the instructions take 16 tokens at a time
        left = scaled(functional.pad(tokens, (0, 0, 0, missing)), ROW, torch.float8_e4m3fn)
        right = Scaled(self.codes, self.exponents, self.in_features)
        out = product(left, right, x.dtype, native=self.is_native)[: len(tokens)]
        return self._with_bias(out.view(*x.shape[:-1], self.out_features))
