"""Laws of attention sinks: each CPU kernel equals the softmax with one more key, in any layout."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.nn.kernels import choose
from penstock.nn.kernels.layout import AttentionLayout, visibility_mask
from tests.unit.nn.test_sinks import CPU, one_more_key, with_gradients


@st.composite
def cases(draw):
    """Return a layout, and heads, key-value heads and dimensions."""
    batch, length = draw(st.integers(1, 2)), draw(st.integers(1, 40))
    cuts = draw(st.lists(st.integers(1, batch * length), max_size=6))
    ends = sorted({0, *cuts, *range(length, batch * length + 1, length)})
    window = draw(st.none() | st.integers(1, length + 2))
    packed = torch.tensor(ends, dtype=torch.int32) if draw(st.booleans()) else None
    kv_heads = draw(st.integers(1, 3))
    sizes = kv_heads * draw(st.integers(1, 3)), kv_heads, draw(st.sampled_from([2, 8, 20]))
    return AttentionLayout(batch=batch, seq_len=length, window=window, cu_seqlens=packed), sizes


@pytest.mark.parametrize("name", ["documents", "SDPA with a mask"])
@given(case=cases(), seed=st.integers(0, 2**16), spread=st.sampled_from([0.1, 1.0, 20.0]))
def test_sinks_are_one_more_key_whose_value_is_zero(name, case, seed, spread):
    of, (heads, kv_heads, dim) = case
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(
            of.batch, count, of.seq_len, dim, dtype=torch.float64, generator=generator
        ).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]
    tensors.append((spread * torch.randn(heads, dtype=torch.float64, generator=generator)).requires_grad_())
    make = choose.candidates_of(choose.operation_of(of), has_sinks=True)[name]
    attend = make(of, torch.empty(0, dim, dtype=torch.float64))
    found = with_gradients(lambda q, k, v, s: attend(q, k, v, scale=0.3, sinks=s), tensors)
    mask = visibility_mask(of, device=CPU)
    expected = with_gradients(lambda *t: one_more_key(*t, mask), tensors)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
