"""Products with matrices of 8 and 4 bits in Triton against the numbers that codes stand for, in float64."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from penstock.nn.linear import quantized_triton
from penstock.nn.linear.quantized import Int4Linear, Int8Linear
from penstock.nn.linear.rounding import GROUP, to_halves, to_int4, to_int8

NEAR = {torch.float32: 2**-14, torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""Of the largest result; float32 is multiplied as three products of TF32."""
SHAPES = {
    torch.bfloat16: [
        *((1, 40, 96), (5, 33, 320), (9, 129, 32), (16, 640, 4096), (17, 257, 1056), (64, 640, 4096)),
        *((33, 8200, 224), (64, 16400, 352)),
    ],
    torch.float16: [(3, 129, 640), (20, 70, 352)],
    torch.float32: [(7, 70, 352), (40, 70, 160)],
}
"""Tokens, outputs, inputs: no multiples of what a program has; each type and size is compiled."""


def drawn(dtype, device, is_tiny):
    """Yield the matrix and the tokens of each shape."""
    for num_tokens, outputs, inputs in SHAPES[dtype]:
        if is_tiny:  # Triton's interpreter multiplies the bits of bfloat16
            outputs, inputs = min(outputs, 70), min(inputs, 320)
        weight = torch.randn(outputs, inputs, device=device) / 10
        x = torch.randn(num_tokens, inputs, device=device)
        yield weight, x.to(torch.float16 if is_tiny and dtype == torch.bfloat16 else dtype)


def assert_near(found, expected, dtype):
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < NEAR[dtype], f"{tuple(found.shape)}: {error:.2g} of the largest"


@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_a_product_of_int8_is_that_of_its_numbers(dtype, device, is_tiny):
    for weight, x in drawn(dtype, device, is_tiny):
        codes, scales = to_int8(weight)
        expected = x.double() @ (codes.double() * scales.double()[:, None]).T
        assert_near(quantized_triton.linear_int8(x, codes, scales), expected, dtype)


@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_a_product_of_int4_is_that_of_its_numbers(dtype, device, is_tiny):
    for weight, x in drawn(dtype, device, is_tiny):
        codes, scales = to_int4(weight)
        numbers = (codes.double() - 8) * scales.double().repeat_interleave(GROUP, 1)
        assert_near(quantized_triton.linear_int4(x, to_halves(codes), scales), x.double() @ numbers.T, dtype)
        written = quantized_triton.written_out_int4(
            to_halves(codes), scales, inputs=x.shape[1], dtype=x.dtype
        )
        assert torch.equal(written, numbers.to(x.dtype))


@pytest.mark.parametrize(("kind", "lost"), [(Int8Linear, 0.02), (Int4Linear, 0.15)], ids=["int8", "int4"])
def test_a_layer_of_few_and_of_many_tokens_is_near_the_one_it_was_made_of(kind, lost, device):
    """`lost`: what rounding evenly spread numbers to 8 and 4 bits costs, of a result's norm, or more."""
    layer = nn.Linear(256, 96, device=device, dtype=torch.bfloat16)
    rounded = kind(layer)
    for num_tokens in (1, 64, 65, 300):
        x = torch.randn(num_tokens, 256, device=device, dtype=torch.bfloat16)
        expected = x.double() @ layer.weight.double().T + layer.bias.double()
        error = (rounded(x).double() - expected).norm() / expected.norm()
        assert error < lost, f"{num_tokens} tokens: {error:.2g} of its norm"
