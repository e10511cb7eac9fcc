"""Attention over pages in Triton, in 16 bits and over pages of 8, against what is written out in float64."""

import pytest
import torch
from tests.paged_cases import a_few_sinks, a_layer, a_step, written_out

pytest.importorskip("triton")

from penstock.nn.kernels import paged_triton

# query heads, heads of keys and values, head dim
ALONE, THREES, WIDE, PAIRS = (5, 5, 40), (9, 3, 64), (20, 1, 128), (6, 3, 96)
SHARES = [(1, 1), (1, 77), (1, 256), (1, 513), (1, 2050), (19, 19), (70, 131), (5, 400)]
"""Tokens and length of each share of one step: answers, whole prompts, and what follows a prefix."""
NEAR = {torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""Of values about 1: two roundings to 11 and 8 bits."""
CASES = [  # not all of them crossed: a kernel is compiled for each
    (torch.bfloat16, None, ALONE, None),
    (torch.bfloat16, None, THREES, 45),
    (torch.bfloat16, None, WIDE, None),
    (torch.bfloat16, None, PAIRS, 300),
    (torch.bfloat16, torch.int8, ALONE, 45),
    (torch.bfloat16, torch.int8, THREES, None),
    (torch.bfloat16, torch.int8, WIDE, 300),
    (torch.bfloat16, torch.int8, PAIRS, None),
    (torch.float16, None, WIDE, 45),
    (torch.float16, torch.int8, THREES, None),
]


def words_of(case):
    dtype, pages, heads, window = case
    kept = "pages of 8 bits" if pages else "16 bits"
    seen = f"window of {window}" if window else "all"
    return f"{str(dtype).removeprefix('torch.')}, {kept}, {heads[0]} heads of {heads[1]}, {seen}"


def attended(shares, heads, window, *, dtype, pages, block_size, device, has_sinks=False, softcap=None):
    """Return what the kernels find and what is exact, [t, h, d]."""
    step, num_blocks = a_step(shares, block_size=block_size, device=device)
    num_heads, num_kv, dim = heads
    sizes = {"heads": num_heads, "kv_heads": num_kv, "block_size": block_size, "head_dim": dim}
    layer, q, k, v = a_layer(step, num_blocks, **sizes, dtype=dtype, pages=pages)
    keys, values = layer.append(k, v)
    q_thd = q[0].transpose(0, 1).contiguous()
    sinks = a_few_sinks(num_heads).to(device, dtype) if has_sinks else None
    of = {"window": window, "scale": dim**-0.5, "sinks": sinks, "softcap": softcap}
    found = paged_triton.paged_attention(q_thd, keys, values, step, **of)
    return found.double(), written_out(q, layer, shares, **of)[0].transpose(0, 1)


@pytest.mark.parametrize("case", CASES, ids=words_of)
def test_every_share_is_attended_as_in_float64(case, device, is_tiny):
    dtype, pages, heads, window = case
    shares = SHARES
    if is_tiny:  # Triton's interpreter multiplies the bits of bfloat16
        dtype, shares = torch.float16, [(1, 1), (1, 77), (9, 9), (5, 60)]
    found, exact = attended(shares, heads, window, dtype=dtype, pages=pages, block_size=16, device=device)
    torch.testing.assert_close(found, exact, rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("pages", [None, torch.int8], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("window", [None, 128], ids=["all", "window of 128"])
def test_sinks_are_scores_without_values(window, pages, device, is_tiny):
    shares = [(1, 1), (1, 77), (9, 60)] if is_tiny else SHARES
    dtype = torch.float16 if is_tiny else torch.bfloat16  # as above
    of = {"dtype": dtype, "pages": pages, "block_size": 16, "device": device, "has_sinks": True}
    found, exact = attended(shares, (20, 4, 128), window, **of)
    torch.testing.assert_close(found, exact, rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("pages", [None, torch.int8], ids=["16 bits", "8 bits"])
def test_scores_have_a_softcap(pages, device, is_tiny):
    shares = [(1, 1), (1, 77), (9, 60)] if is_tiny else SHARES
    dtype = torch.float16 if is_tiny else torch.bfloat16  # as above
    of = {"dtype": dtype, "pages": pages, "block_size": 16, "device": device, "softcap": 0.7}
    found, exact = attended(shares, (20, 4, 128), 45, **of)
    torch.testing.assert_close(found, exact, rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("pages", [None, torch.int8], ids=["16 bits", "8 bits"])
def test_blocks_of_8_positions_and_sequences_of_many_parts(pages, device, is_tiny):
    shares = [(1, 60), (1, 33)] if is_tiny else [(1, 5001), (1, 4096), (1, 2), (3, 3001)]
    dtype = torch.float16 if is_tiny else torch.bfloat16  # as above
    found, exact = attended(shares, (6, 2, 64), None, dtype=dtype, pages=pages, block_size=8, device=device)
    torch.testing.assert_close(found, exact, rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("pages", [None, torch.int8], ids=["16 bits", "8 bits"])
def test_every_byte_of_a_code_is_the_number_that_it_stands_for(pages, device, is_tiny):
    """Values of all codes, each alone in a context of one key, whose weight is 1."""
    dtype = torch.float16 if is_tiny else torch.bfloat16
    step, num_blocks = a_step([(1, 1)] * 2, block_size=16, device=device)
    sizes = {"heads": 1, "kv_heads": 1, "block_size": 16, "head_dim": 128}
    layer, q, k, _ = a_layer(step, num_blocks, **sizes, dtype=dtype, pages=pages)
    v = torch.arange(-127, 129, device=device).clamp(max=127).view(1, 1, 2, 128).to(dtype)
    keys, values = layer.append(k, v)
    found = paged_triton.paged_attention(
        q[0].transpose(0, 1).contiguous(), keys, values, step, window=None, scale=0.1
    )
    assert found.flatten().equal(v.flatten())
