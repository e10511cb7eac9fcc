"""Products of few tokens with matrices of 8 and 4 bits on GPUs, as operators no compiler looks into."""

import torch
from torch import Tensor

from penstock.nn.triton_here import has_triton, on_device_of

MAX_TOKENS = 64
"""Beyond, a matrix is read so often that its numbers are written out once."""


def is_for(x: Tensor) -> bool:
    """Whether the operators compute a product with x [..., inputs]."""
    return has_triton(x.device) and x.numel() <= MAX_TOKENS * x.shape[-1]


def _few_int8(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    from penstock.nn.low_bit_triton import linear_int8  # takes a second, and CPUs do without

    with on_device_of(x):
        return linear_int8(x.flatten(0, -2), codes, scales).view(*x.shape[:-1], len(codes))


def _few_int4(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    from penstock.nn.low_bit_triton import linear_int4

    with on_device_of(x):
        return linear_int4(x.flatten(0, -2), codes, scales).view(*x.shape[:-1], len(codes))


def _shape(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:  # noqa: ARG001
    return x.new_empty(*x.shape[:-1], len(codes))


for _name, _product in (("few_int8", _few_int8), ("few_int4", _few_int4)):
    torch.library.define(f"penstock::{_name}", "(Tensor x, Tensor codes, Tensor scales) -> Tensor")
    torch.library.impl(f"penstock::{_name}", "CompositeExplicitAutograd", _product)
    torch.library.register_fake(f"penstock::{_name}", _shape)
