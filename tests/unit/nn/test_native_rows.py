"""The small C++ operators against plain torch in float64, at sizes that fill no whole vector too."""

import pytest
import torch

from penstock.nn import native
from penstock.nn.fused import ACTIVATIONS
from penstock.nn.kernels.pages import page_width, write
from penstock.nn.mlp import activate

pytestmark = pytest.mark.skipif(not native.is_available(), reason="no C++ compiler here")

# Of the result's size: half a unit in the last place of bfloat16 (8 bits) is 2^-9, and of the sums a
# float32 computes in another order some 2^-22.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
SIZES = [1, 15, 16, 50, 768]


def drawn(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normalised(x, weight, shift=0.0):
    return torch.nn.functional.rms_norm(x.double(), weight.shape, shift + weight.double(), 1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", SIZES)
def test_a_norm_is_that_of_torch(size, dtype):
    x, weight = drawn(3, 2, size, dtype=dtype), drawn(size, dtype=dtype, seed=1)
    out = torch.ops.penstock.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out.double(), normalised(x, weight), rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", SIZES)
def test_a_norm_after_a_sum_changes_the_stream_in_place(size, dtype):
    x, delta, weight = (drawn(n, size, dtype=dtype, seed=s) for s, n in enumerate((4, 4, 1)))
    weight = weight[0]
    total = (x.double() + 0.5 * delta.double()).to(dtype)
    out = torch.ops.penstock.add_rms_norm(x, delta, 0.5, weight, 1e-5)
    torch.testing.assert_close(x, total, rtol=TOLERANCE[dtype], atol=1e-6)
    torch.testing.assert_close(out.double(), normalised(x, weight), rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_norm_adds_its_shift_before_a_weight_is_rounded(dtype):
    """Weights of 2^-9: 1 + w is half way between two bfloat16 numbers, and rounds to 1."""
    x, weight = drawn(4, 64, dtype=dtype), torch.full((64,), 2.0**-9, dtype=dtype)
    out = torch.ops.penstock.rms_norm(x, weight, 1e-5, 1.0).double()
    torch.testing.assert_close(out, normalised(x, weight, 1.0).to(dtype).double(), rtol=1e-6, atol=1e-6)
    delta = drawn(4, 64, dtype=dtype, seed=1)
    out = torch.ops.penstock.add_rms_norm(x, delta, 0.5, weight, 1e-5, 1.0).double()
    torch.testing.assert_close(out, normalised(x, weight, 1.0).to(dtype).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("is_gated", [True, False])
def test_a_row_of_an_activation_is_that_of_torch(activation, is_gated, size, dtype):
    rows = 5 * drawn(3, 2, 2 * size, dtype=dtype)
    gate, up = rows.double().chunk(2, dim=-1)
    expected = activate(gate, activation) * up if is_gated else activate(rows.double(), activation)
    out = torch.ops.penstock.activate(rows, ACTIVATIONS.index(activation), is_gated)
    # the tail of GELU, 1 + tanh, cancels in float32
    torch.testing.assert_close(out.double(), expected, rtol=2 * TOLERANCE[dtype], atol=4e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gate_far_from_zero_is_open_or_shut(activation):
    both = torch.tensor([[1e4, -1e4, 100.0, -100.0, 2.0, 2.0, 2.0, 2.0]])
    out = torch.ops.penstock.activate(both, ACTIVATIONS.index(activation), True)
    torch.testing.assert_close(out, torch.tensor([[2e4, 0.0, 200.0, 0.0]]))


def test_a_norm_of_all_heads_is_that_of_the_row():
    heads, kv_heads, dim = 3, 1, 8
    qkv = drawn(4, (heads + 2 * kv_heads) * dim, dtype=torch.float32)
    weights = drawn(heads * dim, dtype=torch.float32, seed=1), drawn(dim, dtype=torch.float32, seed=2)
    keys, values = torch.zeros(2, 1, 1, 4, dim)
    straight = torch.ones(4, dim)
    q = torch.ops.penstock.rotate_and_store(
        qkv, straight, straight - 1, torch.arange(4), keys, values, *weights, 1e-5, 1.0
    )
    expected = normalised(qkv[:, : heads * dim], weights[0], 1.0)
    torch.testing.assert_close(q.flatten(1).double(), expected, rtol=1e-6, atol=1e-6)
    expected = normalised(qkv[:, heads * dim :][:, :dim], weights[1], 1.0)
    torch.testing.assert_close(keys[0, 0].double(), expected, rtol=1e-6, atol=1e-6)


def test_what_fits_no_page_is_refused():
    keys, angles = torch.zeros(3, 2, 4, 8), torch.zeros(1, 8)

    def store(qkv, slot):
        slots = torch.tensor([slot])
        torch.ops.penstock.rotate_and_store(qkv, angles, angles, slots, keys, keys.clone(), None, None, 0.0)

    store(torch.zeros(1, 48), 11)
    with pytest.raises(RuntimeError, match="no slot 12"):
        store(torch.zeros(1, 48), 12)
    with pytest.raises(RuntimeError, match="does not fit"):
        store(torch.zeros(1, 32), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 64, 100])
def test_pages_of_8_bits_are_written_as_plain_torch_rounds_them(head_dim, dtype):
    qkv = drawn(
        5, 6 * head_dim, dtype=dtype
    )  # two heads over two, of which some numbers are equal, and one is zeros
    qkv[1, 2 * head_dim :], qkv[2, -head_dim:] = qkv[0, 2 * head_dim :], 0
    straight = torch.ones(5, head_dim, dtype=dtype)  # cosines: nothing is turned
    slots = torch.tensor([2, 3, 8, 11, 0])
    keys, values = (
        torch.zeros(3, 2, 4, page_width(head_dim, torch.int8), dtype=torch.int8) for _ in range(2)
    )
    torch.ops.penstock.rotate_and_store(qkv, straight, straight - 1, slots, keys, values, None, None, 0.0)
    expected = [torch.zeros_like(pages) for pages in (keys, values)]
    _, k, v = qkv.view(5, 3, 2, head_dim).unbind(1)
    for pages, x in zip(expected, (k, v), strict=True):
        write(pages, slots, x)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


def test_many_rows_are_computed_as_one_alone():
    x, weight = drawn(300, 96, dtype=torch.float32), drawn(96, dtype=torch.float32, seed=1)
    together = torch.ops.penstock.rms_norm(x, weight, 1e-5)
    alone = torch.cat([torch.ops.penstock.rms_norm(row, weight, 1e-5) for row in x.split(1)])
    assert torch.equal(together, alone)


def test_a_row_of_another_size_or_type_is_refused():
    x = drawn(2, 8, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="rows of 8"):
        torch.ops.penstock.rms_norm(x, drawn(7, dtype=torch.float32), 1e-5)
    with pytest.raises(RuntimeError, match="differ in type"):
        torch.ops.penstock.rms_norm(x, drawn(8, dtype=torch.bfloat16), 1e-5)


def a_call(name):
    """Arguments for an operator, all float32."""
    rows, vector = drawn(3, 16, dtype=torch.float32), drawn(16, dtype=torch.float32)
    qkv, q = drawn(3, 32, dtype=torch.float32), drawn(3, 2, 8, dtype=torch.float32)
    angles, slots = drawn(3, 8, dtype=torch.float32), torch.tensor([2, 6, 7])
    pages = [drawn(4, 1, 2, 8, dtype=torch.float32, seed=seed) for seed in (0, 1)]
    starts, lengths = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    table = torch.tensor([[1, 3]], dtype=torch.int32)
    return {
        "rms_norm": (rows, vector, 1e-5),
        "add_rms_norm": (rows, rows.flip(0), 0.5, vector, 1e-5),
        "activate": (rows, 1, True),
        "rotate_and_store": (qkv, angles, angles, slots, *pages, None, None, 0.0),
        "paged_attention": (q, *pages, starts, lengths, table, 0.3, 0),
    }[name]


@pytest.mark.parametrize(
    "name", ["rms_norm", "add_rms_norm", "activate", "rotate_and_store", "paged_attention"]
)
def test_torch_compile_can_rely_on_what_an_operator_says_of_itself(name):
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(getattr(torch.ops.penstock, name).default, a_call(name), test_utils=checks)
