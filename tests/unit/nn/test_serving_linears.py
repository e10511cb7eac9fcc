"""Linear layers of serving against plain ones: packed, and of 8 and 4 bits, with operators and without."""

from functools import partial

import pytest
import torch
from torch import nn

from penstock.nn.linear import packed as packed_layers
from penstock.nn.linear import quantized
from penstock.nn.linear.packed import PackedLinear, can_multiply, from_panels, packed, to_panels
from penstock.nn.linear.quantized import Float8Linear, Int4Linear, Int8Linear, multiplies_integers
from penstock.nn.linear.rounding import to_int4, to_int8

LIKE = torch.zeros(())
SIZES = [(64, 96), (33, 7 * 32), (200, 64), (1, 32)]
"""Outputs and inputs: whole and partial panels."""
NUM_TOKENS = [1, 2, 13, 14, 15, 70]
"""One tile, several, and uneven ones."""
INTEGERS = pytest.mark.skipif(not multiplies_integers(), reason="this CPU does not multiply integers")


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


def matrix_of_codes(make, weight):
    """Return the numbers that the codes of a matrix stand for, in float64."""
    if make is Int8Linear:
        codes, scales = to_int8(weight)
        return codes.double() * scales.double()[:, None]
    missing = -weight.shape[1] % 32
    codes, scales = to_int4(nn.functional.pad(weight, (0, missing)))
    numbers = (codes.double() - 8) * scales.double().repeat_interleave(32, 1)
    return numbers[:, : weight.shape[1]]


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


@pytest.mark.usefixtures("cells")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("size", SIZES)
def test_packed_layer_computes_what_the_layer_does(size, num_tokens, dtype, tolerance, bias):
    plain = layer(*size, dtype=dtype, bias=bias)
    x = torch.randn(num_tokens, size[1], dtype=dtype)
    exact = nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
    torch.testing.assert_close(PackedLinear(plain)(x).double(), exact, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.usefixtures("cells")
@pytest.mark.parametrize("size", [(40, 4), (33, 60), (72, 64), (1, 100), (96, 196), (520, 1060), (40, 2084)])
def test_any_number_of_tokens_and_odd_sizes(size):
    """1 to 600 tokens, by whole and partial panels, groups, blocks, parts and runs."""
    x = torch.randn(600, size[1])
    half = x.bfloat16()
    halved, plain = layer(*size, dtype=torch.bfloat16, bias=True), layer(*size)
    by_halves, of_halves = (
        PackedLinear(halved),
        half.double() @ halved.weight.double().t() + halved.bias.double(),
    )
    by_codes = {make: make(plain) for make in (Int8Linear, Int4Linear)}
    of_codes = {make: matrix_of_codes(make, plain.weight).t() for make in by_codes}
    by_floats, of_floats = PackedLinear(plain), x.double() @ plain.weight.double().t()
    for num in (*range(1, 30), 96, 97, 100, 264, 300, 600):
        torch.testing.assert_close(by_floats(x[:num]).double(), of_floats[:num], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(by_halves(half[:num]).double(), of_halves[:num], rtol=2**-8, atol=2**-7)
        for make, made in by_codes.items():
            exact = x[:num].double() @ of_codes[make]
            torch.testing.assert_close(made(x[:num]).double(), exact, rtol=1e-5, atol=1e-5)
            exact = half[:num].double() @ of_codes[make]
            torch.testing.assert_close(made(half[:num]).double(), exact, rtol=2**-8, atol=2**-7)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("make", [packed, Int8Linear, Int4Linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leading_dims_are_kept_and_views_are_read_right(make, dtype):
    made, x = make(layer(40, 64, dtype=dtype)), torch.randn(3, 2, 128, dtype=dtype)[..., ::2]
    assert made(x).shape == (3, 2, 40)
    torch.testing.assert_close(made(x), made(x.contiguous()), rtol=0, atol=0)
    assert made(x[:0]).shape == (0, 2, 40)


WAYS = [
    PackedLinear,
    Int8Linear,
    Int4Linear,
    *(pytest.param(partial(make, rounds=True), marks=INTEGERS) for make in (Int8Linear, Int4Linear)),
]


@pytest.mark.usefixtures("cells")
@pytest.mark.parametrize("make", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(72, 96), (72, 300), (520, 1060)])
def test_a_tokens_result_does_not_depend_on_its_neighbours(make, dtype, size):
    made, x = make(layer(*size, dtype=dtype, bias=True)), torch.randn(300, size[1], dtype=dtype)
    together = made(x)
    for num in (1, 2, 3, 5, 7, 14, 29, 97):
        assert torch.equal(made(x[:num]), together[:num])
        assert torch.equal(made(x[-num:]), together[-num:])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("size", [*SIZES, (40, 44), (33, 30)])
@pytest.mark.parametrize("make", [Int8Linear, Int4Linear])
def test_codes_are_multiplied_with_exact_tokens(make, size, num_tokens):
    """The last two have a short last group, and inputs that fill no unit of four."""
    plain = layer(*size, bias=True)
    made, x = make(plain), torch.randn(num_tokens, size[1])
    matrix = matrix_of_codes(make, plain.weight)
    torch.testing.assert_close(made.matrix().double(), matrix, rtol=1e-6, atol=0)
    exact = x.double() @ matrix.t() + plain.bias
    torch.testing.assert_close(made(x).double(), exact, rtol=1e-5, atol=1e-5)
    gradient = torch.randn(num_tokens, size[0])
    torch.testing.assert_close(
        made.gradient(gradient).double(), gradient.double() @ matrix, rtol=1e-5, atol=1e-5
    )


@INTEGERS
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("size", SIZES)
def test_rounded_tokens_are_multiplied_exactly(size, num_tokens):
    plain = layer(*size)
    x = torch.randn(num_tokens, size[1])
    (w_codes, w_scales), (x_codes, x_scales) = to_int8(plain.weight), to_int8(x)
    sums = (x_codes.long() @ w_codes.long().t()).float()
    out = Int8Linear(plain, rounds=True)(x)
    assert torch.equal(out, sums * w_scales * x_scales[:, None])
    exact = x_codes.double() @ matrix_of_codes(Int4Linear, plain.weight).t() * x_scales[:, None]
    torch.testing.assert_close(Int4Linear(plain, rounds=True)(x).double(), exact, rtol=1e-5, atol=1e-6)


@INTEGERS
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_sums_of_the_largest_codes_do_not_overflow(num_tokens):
    """Rows of +-127, and tokens of 127, which are 255 where they are shifted: 16 bits would not do."""
    plain = layer(3, 256)
    plain.weight[:] = torch.tensor([1.0, -1.0, 0.0])[:, None]
    plain.weight[2] = torch.tensor([1.0, -1.0]).repeat(128)
    x = torch.ones(num_tokens, 256)
    expected = torch.tensor([256.0, -256.0, 0.0]).expand(num_tokens, 3)
    torch.testing.assert_close(Int8Linear(plain, rounds=True)(x), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(Int8Linear(plain, rounds=True)(-x), -expected, rtol=1e-6, atol=0)
    plain.weight[:] = -1  # of int4 the code of largest magnitude is -8
    torch.testing.assert_close(
        Int4Linear(plain, rounds=True)(x), torch.full_like(expected, -256.0), rtol=1e-6, atol=0
    )


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("make", WAYS[1:])
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
