"""Linear layers of serving against plain ones: packed, and of 8 and 4 bits, with operators and without."""

import pytest
import torch
from torch import nn

from penstock.nn.linear import packed as packed_layers
from penstock.nn.linear import quantized
from penstock.nn.linear.packed import PackedLinear, can_multiply, from_panels, packed, to_panels
from penstock.nn.linear.quantized import Float8Linear, Int4Linear, Int8Linear, rounds_tokens
from penstock.nn.linear.rounding import to_int4, to_int8

LIKE = torch.zeros(())
SIZES = [(64, 96), (33, 7 * 32), (200, 64), (1, 32)]
"""Outputs and inputs: whole and partial panels."""
NUM_TOKENS = [1, 2, 13, 14, 15, 70]
"""One tile, several, and uneven ones."""


@pytest.fixture(params=["native", "plain"])
def way(request, monkeypatch):
    """Compute by the operators, or as on a machine that cannot have them."""
    if request.param == "plain":
        monkeypatch.setattr(quantized, "can_multiply", lambda *_: False)
        monkeypatch.setattr(packed_layers, "can_multiply", lambda *_: False)
    elif not can_multiply(LIKE):
        pytest.skip("this machine has no such operators")
    return request.param


def layer(outputs, inputs, *, dtype=torch.float32, bias=False):
    torch.manual_seed(outputs + inputs)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)


def assert_product_of_codes(out, x, weight):
    """Whole sums to the bit where tokens are rounded too, else what float32 sums allow."""
    w_codes, w_scales = to_int8(weight)
    if rounds_tokens():
        x_codes, x_scales = to_int8(x)
        sums = (x_codes.long() @ w_codes.long().t()).float()
        assert torch.equal(out, sums * w_scales * x_scales[:, None])
        return
    exact = x.double() @ w_codes.double().t() * w_scales
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("outputs", [1, 32, 77, 4096 + 40])
def test_panels_hold_the_matrix(dtype, outputs):
    matrix = torch.randint(-100, 100, (outputs, 8)).to(dtype)
    panels = to_panels(matrix)
    assert panels.is_contiguous()
    assert panels[0, 0, :, 0].tolist()[: min(outputs, 32)] == matrix[:32, 0].tolist()
    assert torch.equal(from_panels(panels, outputs), matrix)


@pytest.mark.skipif(not can_multiply(LIKE), reason="this machine has no such operators")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [1, 32, 77])
def test_operator_packs_as_plain_torch_does(dtype, outputs):
    plain = layer(outputs, 48, dtype=dtype)
    assert torch.equal(PackedLinear(plain).panels, to_panels(plain.weight))


@pytest.mark.skipif(not can_multiply(LIKE), reason="this machine has no such operators")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("size", SIZES)
def test_packed_layer_computes_what_the_layer_does(size, num_tokens, dtype, tolerance, bias):
    plain = layer(*size, dtype=dtype, bias=bias)
    x = torch.randn(num_tokens, size[1], dtype=dtype)
    exact = nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
    torch.testing.assert_close(PackedLinear(plain)(x).double(), exact, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.skipif(not can_multiply(LIKE), reason="this machine has no such operators")
@pytest.mark.parametrize("size", [(40, 4), (33, 60), (72, 64), (1, 100), (96, 196)])
def test_any_number_of_tokens_and_odd_sizes(size):
    """1 to 70 tokens, by whole and partial panels."""
    pair, byte = layer(*size, dtype=torch.bfloat16, bias=True), layer(*size)
    by_pairs, by_bytes = PackedLinear(pair), Int8Linear(byte)
    x = torch.randn(70, size[1])
    half = x.bfloat16()
    of_pairs = half.double() @ pair.weight.double().t() + pair.bias.double()
    for num in range(1, 71):
        torch.testing.assert_close(by_pairs(half[:num]).double(), of_pairs[:num], rtol=2**-8, atol=2**-7)
        assert_product_of_codes(by_bytes(x[:num]), x[:num], byte.weight)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("make", [packed, Int8Linear, Int4Linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leading_dims_are_kept_and_views_are_read_right(make, dtype):
    made, x = make(layer(40, 64, dtype=dtype)), torch.randn(3, 2, 128, dtype=dtype)[..., ::2]
    assert made(x).shape == (3, 2, 40)
    torch.testing.assert_close(made(x), made(x.contiguous()), rtol=0, atol=0)
    assert made(x[:0]).shape == (0, 2, 40)


@pytest.mark.parametrize("make", [PackedLinear, Int8Linear, Int4Linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_result_does_not_depend_on_its_neighbours(make, dtype):
    if not can_multiply(LIKE):
        pytest.skip("this machine has no such operators")
    made, x = make(layer(72, 96, dtype=dtype, bias=True)), torch.randn(40, 96, dtype=dtype)
    together = made(x)
    for num in (1, 3, 14, 29):
        assert torch.equal(made(x[:num]), together[:num])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("size", SIZES)
def test_int8_layer_multiplies_the_rounded_numbers_exactly(size, num_tokens):
    plain = layer(*size)
    x = torch.randn(num_tokens, size[1])
    assert_product_of_codes(Int8Linear(plain)(x), x, plain.weight)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("size", SIZES)
def test_int4_layer_multiplies_the_rounded_numbers(size, num_tokens):
    plain = layer(*size, bias=True)
    x = torch.randn(num_tokens, size[1])
    codes, scales = to_int4(plain.weight)
    matrix = (codes.double() - 8) * scales.double().repeat_interleave(32, 1)
    made = Int4Linear(plain)
    torch.testing.assert_close(made.matrix().double(), matrix, rtol=0, atol=0)
    x_codes, x_scales = to_int8(x) if rounds_tokens() else (x, torch.ones(num_tokens))
    exact = x_codes.double() @ matrix.t() * x_scales[:, None] + plain.bias
    torch.testing.assert_close(made(x).double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("make", [Int8Linear, Int4Linear])
def test_zeros_and_a_large_outlier_are_no_trouble(make):
    plain = layer(40, 64)
    plain.weight[3] = 0
    plain.weight[5, 7] = 1e4
    made, x = make(plain), torch.randn(4, 64)
    x[1] = 0
    out = made(x)
    assert out.isfinite().all()
    assert out[1].eq(0).all()
    assert out[:, 3].eq(0).all()
    torch.testing.assert_close(out[:, 5], plain(x)[:, 5], rtol=0.05, atol=300)


@pytest.mark.parametrize(("make", "bits"), [(Int8Linear, 8), (Int4Linear, 4)])
def test_error_is_that_of_rounding(make, bits):
    """A uniform error of half a step of the largest of a group gives about these signal-to-noise ratios."""
    plain, x = layer(256, 512), torch.randn(64, 512)
    error = (make(plain)(x) - plain(x)).square().mean() / plain(x).square().mean()
    assert error.sqrt() < {8: 0.012, 4: 0.09}[bits]


def test_float8_layer_is_close():
    plain, x = layer(32, 64, bias=True), torch.randn(5, 64)
    made = Float8Linear(plain, is_native=False)
    assert (made(x) - plain(x)).abs().mean() < 0.05 * plain(x).abs().mean()


def test_layers_are_packed_where_there_are_operators(way):
    for dtype in (torch.float32, torch.bfloat16):
        kind = PackedLinear if way == "native" else nn.Linear
        assert type(packed(layer(40, 64, dtype=dtype))) is kind


def test_what_cannot_be_packed_stays():
    for odd in (layer(8, 5, dtype=torch.bfloat16), layer(8, 8, dtype=torch.float16)):
        assert packed(odd) is odd
