"""The small C++ operators against plain torch in float64, at sizes that fill no whole vector too."""

import pytest
import torch

from penstock.nn import native
from penstock.nn.kernels.pages import page_width, write

pytestmark = pytest.mark.skipif(not native.is_available(), reason="no C++ compiler here")

# Of the result's size: half a unit in the last place of bfloat16 (8 bits) is 2^-9, and of the sums a
# float32 computes in another order some 2^-22.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
SIZES = [1, 15, 16, 50, 768]


def drawn(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normalised(x, weight):
    return torch.nn.functional.rms_norm(x.double(), weight.shape, weight.double(), 1e-5)


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
@pytest.mark.parametrize("size", SIZES)
def test_a_gated_row_is_that_of_torch(size, dtype):
    both = 20 * drawn(3, 2, 2 * size, dtype=dtype)
    gate, up = both.double().chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    out = torch.ops.penstock.silu_and_multiply(both)
    torch.testing.assert_close(out.double(), expected, rtol=2 * TOLERANCE[dtype], atol=1e-6)


def test_a_gate_far_from_zero_is_open_or_shut():
    both = torch.tensor([[1e4, -1e4, 100.0, -100.0, 2.0, 2.0, 2.0, 2.0]])
    out = torch.ops.penstock.silu_and_multiply(both)
    torch.testing.assert_close(out, torch.tensor([[2e4, 0.0, 200.0, 0.0]]))


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
        "silu_and_multiply": (rows,),
        "rotate_and_store": (qkv, angles, angles, slots, *pages, None, None, 0.0),
        "paged_attention": (q, *pages, starts, lengths, table, 0.3, 0),
    }[name]


@pytest.mark.parametrize(
    "name", ["rms_norm", "add_rms_norm", "silu_and_multiply", "rotate_and_store", "paged_attention"]
)
def test_torch_compile_can_rely_on_what_an_operator_says_of_itself(name):
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(getattr(torch.ops.penstock, name).default, a_call(name), test_utils=checks)
