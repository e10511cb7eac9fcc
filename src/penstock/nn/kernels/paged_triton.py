"""Paged attention in Triton, for GPUs: reads keys and values from the pages without gathering them.

A program attends with a tile of rows, the query heads of one key-value head times a few tokens of a share. It
goes over the keys in tiles with a running softmax (FlashAttention-2, arXiv:2307.08691, algorithm 1, in powers
of two). Single tokens have long contexts and few rows, so their keys are split too: a program takes `SPLIT`
keys, more of very long contexts, and a second kernel combines the parts. The start of a part depends on the
sequence alone, so no result depends on the rest of the step.

Nothing is read on the host: the device searches the share of each tile. A launch depends on the numbers of
tokens and shares and on the width of the tables, so it can be recorded in a CUDA graph. The compiled code
depends on the model alone.

They are tested in Triton's interpreter and compiled for GPU types without running; tests/gpu runs them.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from penstock.nn.kernels.pages import PagedStep, dim_of

SPLIT = 256
"""Keys of a single token's context that one program attends to."""
_MAX_PARTS = 64
"""Parts of a single token's context; longer contexts have parts of several SPLIT keys.

A CUDA graph launches the parts of the widest block table for every token, and most of them end at once."""

_PARTS_AT_ONCE = 16
"""Parts that are combined at once."""

TILE, TILE_OF_CODES, _TILE_OF_PROMPTS = (32, 7, 4), (64, 5, 2), (64, 3, 4)
"""Keys of a tile of a single token's context, stages of its loop, and warps; of a prompt.

The block table comes first and keys and values after it, so 5 stages read 2 tiles ahead, 7 read 3, and 3 read
one, after the products of the tile before. For heads of 128 in 16 bits."""

_LOW_BYTES = """
    lop3.b32 above, {source}, 0x007f007f, 0x43004300, 0xEA;
    lop3.b32 base, {source}, 0x00800080, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, base, minus, above;"""
_EVEN = tl.constexpr(
    "{ .reg .b32 above, base, minus; mov.b32 minus, 0xBF80BF80;" + _LOW_BYTES.format(source="$1") + "}"
)
_ODD = tl.constexpr(
    "{ .reg .b32 above, base, minus, high; mov.b32 minus, 0xBF80BF80; shr.u32 high, $1, 8;"
    + _LOW_BYTES.format(source="high")
    + "}"
)
"""Low, and high, bytes of two int16 numbers as bfloat16: in 3 and 4 instructions, and without a conversion,
of which a GPU does few at a time. In bfloat16, 0x4300 is 128, and its 7 bits of fraction count ones. So 7
bits of a byte make a number of 128 to 255, of which 128 are taken off, or 256 (0x4380) if it is negative."""

_LOG2_E = 1.4426950408889634
_LOG2_OF_E = tl.constexpr(_LOG2_E)  # kernels read no other global
_MIN_TILE = 16  # smallest side of the matrix instructions


def store(
    k_bkld: Float[Tensor, "1 k t d"],
    v_bkld: Float[Tensor, "1 k t d"],
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> None:
    """Write each token's key and value to its slot, in one launch.

    Args:
        k_bkld, v_bkld: with neighbouring elements in d; other strides may be any.
        keys, values: [blocks, k, block_size, d] of the same dtype, contiguous.
        slots: [t] int64, as in `PagedStep`.
    """
    _, kv_heads, num_tokens, head_dim = k_bkld.shape
    if num_tokens:
        _store[(num_tokens, kv_heads)](
            k_bkld, v_bkld, keys, values, slots,
            k_bkld.stride(1), k_bkld.stride(2), v_bkld.stride(1), v_bkld.stride(2),
            KV_HEADS=kv_heads, BLOCK_SIZE=keys.shape[2],
            D=head_dim, D_PADDED=triton.next_power_of_2(head_dim),
        )  # fmt: skip


def paged_attention(
    q_thd: Float[Tensor, "t h d"],
    keys: Tensor,
    values: Tensor,
    step: PagedStep,
    *,
    window: int | None,
    scale: float,
    sinks: Float[Tensor, "h"] | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "t h d"]:
    """Attend with each share's tokens over its own pages.

    Args:
        q_thd: contiguous, float32, bfloat16 or float16; the pages are of that type or int8.
        keys, values: [blocks, k, block_size, d or row of pages.py], contiguous.
        window: a query sees itself and the `window - 1` positions before it; None: all.
        sinks: as in sinks.py: the running softmax of each query starts with them.
    """
    out = torch.empty_like(q_thd)
    kv_heads, group = keys.shape[1], q_thd.shape[1] // keys.shape[1]
    sizes = {**_sizes(q_thd, keys, window=window), "SOFTCAP": softcap or 0.0}
    factor = scale * _LOG2_E if softcap is None else 2 * scale * _LOG2_E / softcap
    is_coded = keys.dtype == torch.int8
    # codes are read in pairs, and scales as float32 numbers of the same memory
    views = (torch.int16, torch.float32) if is_coded else (keys.dtype, keys.dtype)
    pages = [tensor.view(dtype) for dtype in views for tensor in (keys, values)]
    num_singles, num_shares = step.num_singles, len(step.lengths)
    has_sinks, of_heads = sinks is not None, q_thd if sinks is None else sinks
    if num_singles:
        parts = min(_MAX_PARTS, triton.cdiv(step.block_tables.shape[1] * keys.shape[2], SPLIT))
        weights = q_thd.new_empty(num_singles, q_thd.shape[1], parts, dtype=torch.float32)
        sums = q_thd.new_empty(*weights.shape, q_thd.shape[2], dtype=torch.float32)
        _attend[(num_singles, kv_heads, parts)](
            q_thd, *pages, sums, weights,
            step.query_starts, step.lengths, step.block_tables,
            num_singles, step.block_tables.stride(0), factor, of_heads,
            TOKENS=1, ROWS=max(_MIN_TILE, triton.next_power_of_2(group)), SPLIT=SPLIT, **sizes,
            HAS_SINKS=has_sinks, **_tile(q_thd, TILE_OF_CODES if is_coded else TILE),
        )  # fmt: skip
        _add_up[(num_singles, q_thd.shape[1])](
            sums, weights, out, step.lengths, parts, of_heads,
            WINDOW=sizes["WINDOW"], D=sizes["D"], D_PADDED=triton.next_power_of_2(sizes["D"]),
            SPLIT=SPLIT, PARTS=_PARTS_AT_ONCE, HAS_SINKS=has_sinks,
        )  # fmt: skip
    if num_shares > num_singles:
        rows = max(128 // q_thd.element_size(), triton.next_power_of_2(group))
        tokens = rows // group
        # one more tile for each share, whose last tile may not be full
        tiles = (len(q_thd) - num_singles) // tokens + num_shares - num_singles
        _attend[(tiles, kv_heads, 1)](
            q_thd, *pages, out, out,
            step.query_starts[num_singles:], step.lengths[num_singles:], step.block_tables[num_singles:],
            num_shares - num_singles, step.block_tables.stride(0),
            factor, of_heads, TOKENS=tokens, ROWS=rows, SPLIT=0, HAS_SINKS=has_sinks, **sizes,
            **_tile(q_thd, _TILE_OF_PROMPTS),
        )  # fmt: skip
    return out


def _sizes(q_thd: Tensor, keys: Tensor, *, window: int | None) -> dict[str, int]:
    """Return the compile-time constants that both launches share."""
    _, kv_heads, block_size, width = keys.shape
    head_dim = dim_of(keys)
    is_coded = keys.dtype == torch.int8
    of_tile = head_dim // 2 if is_coded else head_dim
    return {
        "WINDOW": window or 0,
        "GROUP": q_thd.shape[1] // kv_heads,
        "KV_HEADS": kv_heads,
        "BLOCK_SIZE": block_size,
        "D": head_dim,
        "PAGE": block_size * width,
        "CODED": is_coded,
        "D_PADDED": max(_MIN_TILE, triton.next_power_of_2(of_tile)),
    }


def _tile(q_thd: Tensor, tile: tuple[int, int, int]) -> dict[str, int]:
    """Return a tile's constants for these heads: wide ones, and float32, leave registers for fewer keys."""
    keys, stages, warps = tile
    width = triton.next_power_of_2(q_thd.shape[2]) * q_thd.element_size()
    return {"KEYS": max(_MIN_TILE, min(keys, keys * 256 // width)), "num_stages": stages, "num_warps": warps}


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _store(
    k, v, keys, values, slots, k_head, k_token, v_head, v_token,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
):  # fmt: skip
    """Write the key and value of one token and one key-value head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    line = ((slot // BLOCK_SIZE) * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    d = tl.arange(0, D_PADDED)
    is_d = d < D
    k_d = tl.load(k + token * k_token + head * k_head + d, mask=is_d)
    v_d = tl.load(v + token * v_token + head * v_head + d, mask=is_d)
    tl.store(keys + line * D + d, k_d, mask=is_d)
    tl.store(values + line * D + d, v_d, mask=is_d)


# arguments that change from step to step must not be compile-time constants
@triton.jit(
    do_not_specialize=["num_shares", "table_stride", "scale"],
    do_not_specialize_on_alignment=["starts", "lengths", "tables"],
)
def _attend(  # noqa: C901 - branches on constants are no branches
    q, keys, values, key_scales, value_scales, sums, weights, starts, lengths, tables,
    num_shares, table_stride, scale, sinks,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, KEYS: tl.constexpr, CODED: tl.constexpr,
    HAS_SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend with TOKENS tokens of one share, for the query heads of one key-value head.

    SPLIT > 0: shares are single tokens, and `sums` and `weights` receive the parts. SPLIT = 0: `sums` is the
    result.

    Codes are read as pairs of int16, which lie in shared memory as the matrix instructions take numbers of
    16 bits. Numbers of even and of odd places are products of their own.

    SOFTCAP > 0: scores are capped by it, and `scale` makes powers of two of twice what the tanh is of.
    """
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if SPLIT > 0:
        share = tile
        begin = 0
    else:
        share, begin = _place(starts, num_shares, tile, TOKENS)
    first = tl.load(starts + share)
    count = tl.load(starts + share + 1) - first
    length = tl.load(lengths + share)

    since = 0
    if WINDOW > 0:
        since = tl.maximum(0, length - count + begin + 1 - WINDOW)
    until = tl.minimum(length, length - count + begin + TOKENS)
    if SPLIT > 0:
        size = _part_size(length, tl.num_programs(2), SPLIT)
        since = tl.maximum(since, part * size)
        until = tl.minimum(until, part * size + size)
    if begin >= count or since >= until:
        return

    row = tl.arange(0, ROWS)
    token = begin + row // GROUP
    is_row = (row < TOKENS * GROUP) & (token < count)
    position = length - count + token
    at = (first + token).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    numbers: tl.constexpr = 2 if CODED else 1  # of an element of `keys` and `values`
    d = tl.arange(0, D_PADDED)
    is_d = d < D // numbers
    is_q = is_row[:, None] & is_d[None, :]
    q_md = tl.load(q + at[:, None] * D + numbers * d[None, :], mask=is_q, other=0.0)
    if CODED:
        odd_q_md = tl.load(q + at[:, None] * D + numbers * d[None, :] + 1, mask=is_q, other=0.0)
        odd_sum_md = tl.zeros([ROWS, D_PADDED], dtype=tl.float32)

    highest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    if HAS_SINKS and SPLIT == 0:
        highest = _sink_of(sinks, kv_head * GROUP + row % GROUP)
        total += 1.0
    sum_md = tl.zeros([ROWS, D_PADDED], dtype=tl.float32)
    for here in range(since // KEYS * KEYS, until, KEYS):
        key = here + tl.arange(0, KEYS)
        is_key = (key >= since) & (key < until)
        block = tl.load(tables + share * table_stride + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        page = block * KV_HEADS + kv_head
        # Triton 3.6 takes a run of offsets, which starts at a multiple of 16, for multiples of 16 each
        offset = tl.multiple_of(key % BLOCK_SIZE, 1)
        place = page * (PAGE // numbers) + offset * (D // numbers)
        is_nd = is_key[:, None]  # a value that is not a number would stay one, whatever its weight
        if D // numbers < D_PADDED:
            is_nd &= is_d[None, :]
            k_nd = tl.load(keys + place[:, None] + d[None, :], mask=is_d[None, :], other=0)
        else:
            k_nd = tl.load(keys + place[:, None] + d[None, :])
        v_nd = tl.load(values + place[:, None] + d[None, :], mask=is_nd, other=0)
        seen = is_key[None, :]  # all that a single token sees
        if SPLIT == 0:
            seen &= key[None, :] <= position[:, None]
            if WINDOW > 0:
                seen &= key[None, :] > position[:, None] - WINDOW
        if CODED:
            scores = tl.dot(q_md, _even(k_nd, q_md.dtype).T, input_precision="tf32x3")
            scores = tl.dot(odd_q_md, _odd(k_nd, q_md.dtype).T, scores, input_precision="tf32x3")
            at_scale = page * (PAGE // 4) + BLOCK_SIZE * D // 4 + offset
            scores *= tl.load(key_scales + at_scale)[None, :] * scale
        else:
            scores = tl.dot(q_md, k_nd.to(q_md.dtype).T, input_precision="tf32x3") * scale
        if SOFTCAP > 0:  # tanh x = 1 - 2 / (e^2x + 1), in powers of two as other scores
            scores = (1 - 2 / (tl.exp2(scores) + 1)) * (SOFTCAP * 1.4426950408889634)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = higher
        if SPLIT == 0:
            base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key yet
        weight = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weight, 1)
        sum_md *= shrink[:, None]
        if CODED:
            weight *= tl.load(value_scales + at_scale, mask=is_key, other=0.0)[None, :]
            weight = weight.to(q_md.dtype)
            odd_sum_md *= shrink[:, None]
            sum_md = tl.dot(weight, _even(v_nd, q_md.dtype), sum_md, input_precision="tf32x3")
            odd_sum_md = tl.dot(weight, _odd(v_nd, q_md.dtype), odd_sum_md, input_precision="tf32x3")
        else:
            sum_md = tl.dot(weight.to(q_md.dtype), v_nd.to(q_md.dtype), sum_md, input_precision="tf32x3")
        highest = higher

    total = tl.where(is_row, total, 1.0)
    if SPLIT > 0:
        at = at * tl.num_programs(2) + part
        tl.store(weights + at, highest + tl.log2(total), mask=is_row)
    if CODED:
        sum_md = tl.interleave(sum_md, odd_sum_md)
    result = (sum_md / total[:, None]).to(sums.dtype.element_ty)
    column = tl.arange(0, numbers * D_PADDED)
    tl.store(sums + at[:, None] * D + column[None, :], result, mask=is_row[:, None] & (column < D)[None, :])


@triton.jit
def _sink_of(sinks, head):
    """Return the sinks of heads, as scores in powers of two."""
    return tl.load(sinks + head).to(tl.float32) * _LOG2_OF_E


@triton.jit
def _even(pairs, dtype: tl.constexpr):
    """Return the codes in the low bytes of int16 numbers."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_EVEN, "=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=2)
    return ((pairs << 8) >> 8).to(dtype)


@triton.jit
def _odd(pairs, dtype: tl.constexpr):
    """Return the codes in the high bytes of int16 numbers."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_ODD, "=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=2)
    return (pairs >> 8).to(dtype)


@triton.jit
def _part_size(length, num_parts, SPLIT: tl.constexpr):
    """Return the keys of each part of a context: SPLIT, or a multiple of it. It depends on the length alone,
    because there are fewer parts than SPLIT would make only where there are _MAX_PARTS."""
    return tl.cdiv(tl.cdiv(length, num_parts), SPLIT) * SPLIT


@triton.jit
def _place(starts, num_shares, tile, TOKENS: tl.constexpr):
    """Return the share of a tile, and the tile's first token in that share.

    The tiles of share i start at (tokens before it) // TOKENS + i, which leaves enough for all its tokens.
    """
    before = tl.load(starts)
    share, above = 0, num_shares - 1
    while share < above:
        middle = (share + above + 1) // 2
        if (tl.load(starts + middle) - before) // TOKENS + middle <= tile:
            share = middle
        else:
            above = middle - 1
    return share, (tile - (tl.load(starts + share) - before) // TOKENS - share) * TOKENS


@triton.jit(do_not_specialize=["num_parts"])
def _add_up(
    sums, weights, out, lengths, num_parts, sinks,
    WINDOW: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one head of one single token, each weighted by the sum of its own softmax, and
    its sink.

    PARTS of them are read at once: one after the other waits for the memory as often.
    """
    at = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    length = tl.load(lengths + tl.program_id(0))
    since = 0
    if WINDOW > 0:
        since = tl.maximum(0, length - WINDOW)
    d = tl.arange(0, D_PADDED)
    highest = float("-inf")
    total = 0.0
    if HAS_SINKS:
        highest = _sink_of(sinks, tl.program_id(1))
        total = 1.0
    sum_d = tl.zeros([D_PADDED], dtype=tl.float32)
    size = _part_size(length, num_parts, SPLIT)
    for begin in range(since // size, tl.cdiv(length, size), PARTS):
        part = begin + tl.arange(0, PARTS)
        is_part = part < tl.cdiv(length, size)
        weight = tl.load(weights + at * num_parts + part, mask=is_part, other=float("-inf"))
        of_part = sums + (at * num_parts + part)[:, None] * D + d[None, :]
        part_pd = tl.load(of_part, mask=is_part[:, None] & (d < D)[None, :], other=0.0)
        higher = tl.maximum(highest, tl.max(weight, 0))
        shrink, grown = tl.exp2(highest - higher), tl.exp2(weight - higher)
        sum_d = sum_d * shrink + tl.sum(part_pd * grown[:, None], 0)
        total = total * shrink + tl.sum(grown, 0)
        highest = higher
    tl.store(out + at * D + d, (sum_d / total).to(out.dtype.element_ty), mask=d < D)
