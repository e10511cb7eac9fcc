"""Attention over pages in any order against a softmax written out in float64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from penstock.nn import native
from penstock.nn.kernels import paged
from penstock.nn.kernels.layout import AttentionLayout
from penstock.nn.kernels.paged import LayerPages, Paged
from penstock.nn.kernels.pages import from_pages, read, to_pages, write
from penstock.nn.linear.rounding import to_int8
from tests.examples import examples
from tests.paged_cases import a_few_sinks, a_layer, a_step, written_out

WAYS = [
    "plain",
    pytest.param("operator", marks=pytest.mark.skipif(not native.is_available(), reason="no C++ here")),
]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(paged, "_has_operator", lambda *_: False)
    return request.param


def attended(pages, q, k, v, *, scale, window=None, **options):
    layout = AttentionLayout(batch=1, seq_len=q.shape[2], window=window)
    attend = Paged(pages.step, layout.window)
    return attend(q, *pages.append(k, v), scale=scale, **options)


SHARES = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 40)).map(lambda s: (s[0], s[0] + s[1])),
    min_size=1,
    max_size=5,
).map(lambda shares: sorted(shares, key=lambda s: s[0] > 1))


def options_of(name, heads, softcap):
    """Return what layers of some families have besides a scale; none has both."""
    options = {"sinks": {"sinks": a_few_sinks(heads)}, "softcap": {"softcap": softcap}}
    return options.get(name, {})


@given(
    shares=SHARES,
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (9, 3), (10, 5), (4, 1)]),
    block_size=st.sampled_from([1, 4, 16]),
    head=st.sampled_from([(2, None), (16, None), (40, None), (4, torch.int8), (40, torch.int8)]),
    window=st.sampled_from([None, 1, 5, 30]),
    other=st.sampled_from(["sinks", "softcap", None]),
    softcap=st.sampled_from([0.5, 50.0]),
)
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("way")
def test_any_layout_is_attended_as_written_out(shares, heads, block_size, head, window, other, softcap):
    step, num_blocks = a_step(shares, block_size=block_size)
    sizes = {"heads": heads[0], "kv_heads": heads[1], "block_size": block_size, "head_dim": head[0]}
    pages, *qkv = a_layer(step, num_blocks, **sizes, pages=head[1])
    of = {"scale": 0.3, "window": window, **options_of(other, heads[0], softcap)}
    out = attended(pages, *qkv, **of)
    expected = written_out(qkv[0], pages, shares, **of)
    # float32 against float64, and sums of at most 49 products of numbers about 1
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_step_writes_its_keys_and_values_to_their_slots_and_nothing_else():
    step, num_blocks = a_step([(1, 7), (3, 5)], block_size=4)
    pages, _, k, v = a_layer(step, num_blocks, heads=2, kv_heads=2, block_size=4, head_dim=2)
    before = pages.keys.clone()
    pages.append(k, v)
    flat = {int(slot): index for index, slot in enumerate(step.slots)}
    for slot in range(num_blocks * 4):
        block, offset = divmod(slot, 4)
        expected = k[0, :, flat[slot]] if slot in flat else before[block, :, offset]
        assert torch.equal(pages.keys[block, :, offset], expected)
        if slot in flat:
            assert torch.equal(pages.values[block, :, offset], v[0, :, flat[slot]])


@pytest.mark.usefixtures("way", "cells")
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(
    ("kept", "dtype", "dim"),
    [
        (torch.float32, torch.float32, 8),
        (torch.int8, torch.float32, 8),
        (torch.int8, torch.bfloat16, 64),
    ],
)
def test_a_neighbour_changes_no_bit(window, kept, dtype, dim):
    mine, options = (1, 21), {"heads": 4, "kv_heads": 2, "block_size": 4, "head_dim": dim, "pages": kept}
    options["dtype"] = dtype
    alone, num_blocks = a_step([mine], block_size=4)
    pages, q, k, v = a_layer(alone, num_blocks, **options)
    expected = attended(pages, q, k, v, scale=0.5, window=window)
    beside, num_blocks = a_step([mine, (1, 90), (7, 64)], block_size=4, seed=5)
    more, q2, k2, v2 = a_layer(beside, num_blocks, seed=5, **options)
    more.keys[beside.block_tables[0, :6].long()] = pages.keys[alone.block_tables[0, :6].long()]
    more.values[beside.block_tables[0, :6].long()] = pages.values[alone.block_tables[0, :6].long()]
    for theirs, own in ((q2, q), (k2, k), (v2, v)):
        theirs[:, :, :1] = own
    assert torch.equal(attended(more, q2, k2, v2, scale=0.5, window=window)[:, :, :1], expected)


LONG = [(1, 700), (1, 256), (1, 257), (1, 3), (130, 600), (60, 60)]  # parts of 256 keys, tiles of 48 rows


@pytest.mark.usefixtures("way", "cells")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)])
@pytest.mark.parametrize("kept", [None, torch.int8])
@pytest.mark.parametrize("sinks", [None, "with sinks"])
def test_long_sequences_of_both_types(heads, window, dtype, kept, sinks):
    step, num_blocks = a_step(LONG, block_size=16)
    shape = {"heads": heads[0], "kv_heads": heads[1], "block_size": 16, "head_dim": 64}
    pages, *qkv = a_layer(step, num_blocks, dtype=dtype, pages=kept, **shape)
    of = {"scale": 0.125, "window": window, "sinks": sinks and a_few_sinks(heads[0]).to(dtype)}
    out = attended(pages, *qkv, **of)
    expected = written_out(qkv[0], pages, LONG, **of)
    # values about 1 and averages of them: weights and result are rounded to 8 bits in bfloat16
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("group", "dim"), [(2, 128), (3, 192), (1, 512)])
def test_codes_are_multiplied_as_bytes_whatever_the_size_of_heads(group, dim):
    step, num_blocks = a_step(LONG, block_size=16)
    shape = {"heads": 2 * group, "kv_heads": 2, "block_size": 16, "head_dim": dim}
    pages, *qkv = a_layer(step, num_blocks, dtype=torch.bfloat16, pages=torch.int8, **shape)
    out = attended(pages, *qkv, scale=dim**-0.5, window=None)
    expected = written_out(qkv[0], pages, LONG, scale=dim**-0.5, window=None)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(not native.is_available(), reason="no C++ here")
def test_what_is_past_a_sequence_is_never_read():
    step, num_blocks = a_step([(1, 5), (5, 9)], block_size=4)
    pages, *qkv = a_layer(step, num_blocks, heads=8, kv_heads=2, block_size=4, head_dim=16)
    first = attended(pages, *qkv, scale=0.5)
    for share, length in enumerate([5, 9]):
        last = int(step.block_tables[share, length // 4])
        pages.keys[last, :, length % 4 :] = torch.nan
        pages.values[last, :, length % 4 :] = torch.nan
    assert torch.equal(attended(pages, *qkv, scale=0.5), first)


@pytest.mark.skipif(not native.is_available(), reason="no C++ here")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.tensor([99], dtype=torch.int32)}, "share 0 of length 99"),
        ({"block_tables": torch.tensor([[70, 0]], dtype=torch.int32)}, "no block 70"),
        ({"query_starts": torch.tensor([0, 2], dtype=torch.int32)}, "shares of 2 tokens"),
        ({"lengths": torch.tensor([5])}, "int32"),
    ],
)
def test_indexes_that_lie_outside_are_refused(change, message):
    step, num_blocks = a_step([(1, 5)], block_size=4)
    pages, *qkv = a_layer(step, num_blocks, heads=2, kv_heads=1, block_size=4, head_dim=16)
    pages = LayerPages(pages.keys, pages.values, replace(step, **change))
    with pytest.raises(RuntimeError, match=message):
        attended(pages, *qkv, scale=0.5)


@given(
    block_size=st.sampled_from([1, 2, 8, 16]),
    head_dim=st.sampled_from([4, 20, 64]),
    slots=st.lists(st.integers(0, 31), unique=True, max_size=9),
)
@examples(20)
def test_a_page_of_8_bits_is_the_codes_of_all_positions_and_then_their_scales(block_size, head_dim, slots):
    num_blocks, at = 32 // block_size, torch.tensor(slots, dtype=torch.long)
    pages = torch.zeros(num_blocks, 2, block_size, head_dim + 4, dtype=torch.int8)
    x = torch.randn(len(slots), 2, head_dim)
    write(pages, at, x)
    codes, scales = to_int8(x)
    for i, slot in enumerate(slots):
        for head in range(2):
            page, offset = pages[slot // block_size, head].flatten(), slot % block_size
            assert page[offset * head_dim : (offset + 1) * head_dim].equal(codes[i, head])
            at_scale = block_size * head_dim + 4 * offset
            assert page[at_scale : at_scale + 4].clone().view(torch.float32) == scales[i, head]
    assert pages.count_nonzero() <= len(slots) * 2 * (head_dim + 4)  # and nothing else is written
    assert read(pages, at, torch.float32).equal(codes * scales[..., None])
    whole = from_pages(pages, torch.float32).transpose(1, 2).flatten(0, 1)
    assert whole[at].equal(codes * scales[..., None])
    assert to_pages(from_pages(pages, torch.float32), torch.int8).shape == pages.shape
