"""The sampling of `sampling.filters` in Triton kernels, for GPUs; the host never waits.

Greedy rows alone need the first of the largest logits: programs with a part of a row each read the logits
once, and a second launch takes the largest of each row's parts.

For other settings there is one launch. A program has one row and passes over it a few times:

    largest logit | top-k: 3 passes | top-p: 3 passes | total, with min-p only | look up the random number

A filter keeps the likeliest tokens down to a threshold, which a radix select finds: it adds up integer
weights (1 each for top-k) by the upper 11 bits of their logits, then those at the threshold by the next
bits. A bfloat16 logit has 16 bits, so 2 passes do. The additions are integer atomics, exact in any order, so
a program draws the token that `choose_plain` and the C++ operator draw.

Each row has one streaming multiprocessor, so a step takes the same time for any number of rows up to theirs.
Rows without filters, and greedy ones, skip the passes that they do not need. A launch can be recorded in a
CUDA graph: settings and random numbers are read from device memory. Rows whose stride is no multiple of 16
bytes are read two bytes at a time.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from penstock.nn.triton_support import on_device_of

BLOCK = 4096
"""Tokens of a pass that are computed at once."""
STAGES = tl.constexpr(5)
"""Blocks whose reads are in flight."""
_INFINITE, _NEVER = tl.constexpr(0xFF800000), tl.constexpr(0x007FFFFF)  # the keys of inf and -inf
_BINS = 2048
_WARPS, _WARPS_OF_PART = 16, 4
_PROGRAMS, _MAX_PARTS = 1024, 32
"""Parts of rows that fill a GPU, and the most of a row."""


def draw(
    logits: Float[Tensor, "rows vocab"], settings: Float64[Tensor, "rows 5"] | None
) -> Int64[Tensor, "rows"]:
    """Sample a token for each row; -1 where a logit is NaN or the largest is not finite.

    Nothing is copied and the host does not wait, so the call can be captured in a CUDA graph.

    Args:
        logits: float32 or bfloat16, fewer than 2**20 columns.
        settings: from `filters.settings_tensor`, on the device of the logits; None: greedy, the lowest id of
            equals.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    with on_device_of(logits):
        if settings is None:
            _draw_greedy(logits, tokens)
            return tokens
        sums = torch.empty(rows, _BINS, dtype=torch.int64, device=logits.device)
        _draw[(rows,)](
            logits, logits.stride(0), vocab, settings, sums, tokens,
            PASSES=2 if logits.dtype == torch.bfloat16 else 3, BLOCK=BLOCK, BINS=_BINS, num_warps=_WARPS,
        )  # fmt: skip
    return tokens


def _draw_greedy(logits: Tensor, tokens: Tensor) -> None:
    rows, vocab = logits.shape
    num_blocks = triton.cdiv(vocab, BLOCK)
    blocks = triton.cdiv(num_blocks, max(1, min(_MAX_PARTS, _PROGRAMS // rows)))  # of a part
    num_parts = triton.cdiv(num_blocks, blocks)
    found = torch.empty(rows, num_parts, dtype=torch.int64, device=logits.device)
    _largest_of_parts[(rows, num_parts)](
        logits, logits.stride(0), vocab, blocks, found, BLOCK=BLOCK, num_warps=_WARPS_OF_PART
    )
    _largest[(rows,)](found, num_parts, tokens, PARTS=_MAX_PARTS, num_warps=1)


# one program for any number of rows: none is compiled in mid-service
@triton.jit(do_not_specialize=["blocks"])
def _largest_of_parts(logits, stride, vocab, blocks, found, BLOCK: tl.constexpr):
    """found: [rows, parts] int64: the key of a part's largest logit above the complement of its first id."""
    row, part, size = tl.program_id(0).to(tl.int64), tl.program_id(1), blocks * BLOCK
    most, first = _most(
        logits + row * stride, part * size, tl.minimum((part + 1) * size, vocab), vocab, BLOCK
    )
    both = ((most.to(tl.int64) - 2147483648) << 32) + (2147483647 - first)
    tl.store(found + row * tl.num_programs(1) + part, both)


@triton.jit(do_not_specialize=["num_parts"])
def _largest(found, num_parts, tokens, PARTS: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    both = tl.max(tl.load(found + row * num_parts + part, mask=part < num_parts, other=-(2**63)))
    most, token = ((both >> 32) + 2147483648).to(tl.uint32), 2147483647 - (both & 0xFFFFFFFF)
    tl.store(tokens + row, tl.where((most >= _INFINITE) | (most <= _NEVER), -1, token))


@triton.jit
def _most(logits, start, stop, vocab, BLOCK: tl.constexpr):
    """Return the largest key of the ids from `start` to `stop`, and the first id that has it."""
    offsets = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], dtype=tl.uint32)
    first = tl.zeros([BLOCK], dtype=tl.int32)
    for begin in tl.range(start, stop, BLOCK, num_stages=STAGES):
        key = _keys(logits, begin + offsets, vocab)
        first = tl.where(key > largest, begin + offsets, first)
        largest = tl.maximum(key, largest)
    most = tl.max(largest)
    return most, tl.min(tl.where(largest == most, first, vocab)).to(tl.int64)


@triton.jit
def _draw(
    logits, stride, vocab, settings, sums, tokens,
    PASSES: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """settings: [rows, 5] float64. sums: [rows, BINS] int64, any values. PASSES: of a radix select."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    offsets = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], dtype=tl.uint32)
    first = tl.zeros([BLOCK], dtype=tl.int32)
    for begin in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        key = _keys(logits, begin + offsets, vocab)
        first = tl.where(key > largest, begin + offsets, first)
        largest = tl.maximum(key, largest)
    most = tl.max(largest)
    token = tl.min(tl.where(largest == most, first, vocab)).to(tl.int64)
    if (most >= _INFINITE) | (most <= _NEVER):
        token = tl.full([], -1, dtype=tl.int64)
    else:
        settings += row * 5
        scale = tl.load(settings).to(tl.float32)
        top_k, top_p, min_p = tl.load(settings + 1), tl.load(settings + 2), tl.load(settings + 3)
        number = tl.load(settings + 4)
        if scale > 0:
            sums += row * BINS
            peak = _logits_of(most)
            edge = tl.zeros([], dtype=tl.uint32)  # the least key that stays
            kept = tl.zeros([], dtype=tl.int64) + vocab  # of the tokens at the edge the first
            total = tl.zeros([], dtype=tl.int64)
            if top_k < vocab:
                # each group's largest logit is at least the least of them: a bound for k up to the groups
                groups = tl.max(tl.reshape(largest, [128, BLOCK // 128]), 1)
                floor = tl.where(top_k <= 128, tl.min(groups), 0).to(tl.uint32)
                edge, _, _, _ = _select(
                    logits, vocab, sums, peak, scale, floor, 0, top_k, 0.0, False, PASSES, BLOCK, BINS
                )
            if top_p < 1:
                # lighter tokens are together less than what the nucleus may leave out
                light = ((1 - top_p) * 4398046511104.0 / vocab).to(tl.int64)
                edge, above, mass, limit = _select(
                    logits, vocab, sums, peak, scale, edge, light, 0.0, top_p, True, PASSES, BLOCK, BINS
                )
                each = _weights(_logits_of(edge), peak, scale)
                kept = (limit - above + each - 1) // each
                total = above + kept * each
                kept = tl.where(kept * each == mass, vocab, kept)
            least = tl.ceil(min_p * 8796093022208.0).to(tl.int64)
            if (min_p > 0) | (top_p >= 1):
                masses = tl.zeros([BLOCK], dtype=tl.int64)
                seen = tl.zeros([], dtype=tl.int64)
                for begin in tl.range(0, vocab, BLOCK, num_stages=STAGES):
                    weights, equals = _kept(
                        logits, begin + offsets, vocab, peak, scale, edge, kept - seen, least
                    )
                    masses += weights
                    seen += equals
                total = tl.sum(masses)
            left = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
            token = _look_up(logits, vocab, peak, scale, edge, kept, least, left, BLOCK)
    tl.store(tokens + row, token)


@triton.jit
def _keys(logits, ids, vocab):
    """Return uint32 numbers that are the larger, the larger the logits are; NaN is the largest."""
    x = tl.load(logits + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    x = tl.where(x == 0, 0.0, x)  # -0.0 equals 0.0
    bits = x.to(tl.uint32, bitcast=True)
    keys = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(x == x, keys, 0xFFFFFFFF)


@triton.jit
def _logits_of(keys):
    """Return the logits of keys, in float32."""
    return tl.where(keys >> 31 != 0, keys & 0x7FFFFFFF, keys ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _weights(logits, peak, scale):
    """Return 2^(43 - scale * (peak - logits)), truncated to integers, as `filters.weights` does."""
    fixed = (tl.minimum((peak - logits) * scale, 63.0) * 16777216.0).to(tl.uint32)
    part = fixed << 8  # a product's upper 32 bits are those that the shift by 24 leaves
    halved = 19743522 - tl.umulhi(tl.full(part.shape, 2017903, tl.uint32), part)
    halved = 118729907 - tl.umulhi(halved, part)
    halved = 515776670 - tl.umulhi(halved, part)
    halved = 1488514207 - tl.umulhi(halved, part)
    halved = 2147483648 - tl.umulhi(halved, part)
    return (halved.to(tl.int64) << 12) >> (fixed >> 24).to(tl.int64)


@triton.jit
def _select(
    logits, vocab, sums, peak, scale, floor, light, top_k, top_p,
    IS_MASS: tl.constexpr, PASSES: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Return the key at which the likeliest tokens reach a limit, what is above it, what is at it, the limit.

    Tokens with keys from `floor` on count: `top_k` of them, or `top_p` of their weights, of which those up to
    `light` need not be found.
    """
    offsets, bins = tl.arange(0, BLOCK), tl.arange(0, BINS)
    edge, known = tl.zeros([], dtype=tl.uint32), tl.zeros([], dtype=tl.uint32)
    above, mass = tl.zeros([], dtype=tl.int64), tl.zeros([], dtype=tl.int64)
    limit = tl.full([], 0, dtype=tl.int64) + top_k.to(tl.int64) if not IS_MASS else above
    for n in range(PASSES):
        shift = tl.where(n == 0, 21, tl.where(n == 1, 10, 0)).to(tl.uint32)
        tl.store(sums + bins, tl.zeros([BINS], dtype=tl.int64))
        tl.debug_barrier()
        totals = tl.zeros([BLOCK], dtype=tl.int64)
        for begin in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            ids = begin + offsets
            keys = _keys(logits, ids, vocab)
            counts = (ids < vocab) & (keys >= floor) & ((keys & known) == edge)
            masses = tl.full([BLOCK], 1, dtype=tl.int64)
            if IS_MASS:
                masses = _weights(_logits_of(keys), peak, scale)
                totals += tl.where(counts, masses, 0)
                counts = counts & (masses > light)
            where = (BINS - 1) - ((keys >> shift) & (BINS - 1))
            tl.atomic_add(sums + where.to(tl.int32), masses, mask=counts, sem="relaxed")
        if IS_MASS and n == 0:
            total = tl.sum(totals)
            limit = tl.minimum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), total)
        tl.debug_barrier()
        found = tl.load(sums + bins, cache_modifier=".cg")
        tl.debug_barrier()
        passed = above + tl.cumsum(found) < limit
        place = tl.sum(passed.to(tl.int32))
        above += tl.sum(tl.where(passed, found, 0))
        mass = tl.sum(tl.where(bins == place, found, 0))
        digits = tl.where(shift == 0, 1023, BINS - 1).to(tl.uint32)
        edge = edge | ((((BINS - 1) - place).to(tl.uint32) & digits) << shift)
        known = known | (digits << shift)
    if PASSES == 2:  # of negative bfloat16 numbers the lower bits of keys are ones
        edge = tl.where(edge >> 31 != 0, edge, edge | 1023)
    return edge, above, mass, limit


@triton.jit
def _kept(logits, ids, vocab, peak, scale, edge, kept, least):
    """Return the weights of tokens, 0 of those that the filters exclude, and how many tokens are at the edge.

    Of the tokens at the edge the first `kept` stay.
    """
    keys = _keys(logits, ids, vocab)
    weights = _weights(_logits_of(keys), peak, scale)
    at_edge = ((keys == edge) & (ids < vocab)).to(tl.int32)
    equals = tl.sum(at_edge)
    stays = keys >= edge
    if equals > kept:
        stays = (keys > edge) | ((keys == edge) & (tl.cumsum(at_edge) <= kept))
    return tl.where(stays & (weights >= least), weights, 0), equals


@triton.jit
def _look_up(logits, vocab, peak, scale, edge, kept, least, left, BLOCK: tl.constexpr):
    """Return the token whose interval contains `left`; the intervals are laid out in the order of ids."""
    offsets = tl.arange(0, BLOCK)
    begin = 0
    weights, equals = _kept(logits, offsets, vocab, peak, scale, edge, kept, least)
    mass = tl.sum(weights)
    while (left >= mass) & (begin + BLOCK < vocab):
        left -= mass
        kept -= equals
        begin += BLOCK
        weights, equals = _kept(logits, begin + offsets, vocab, peak, scale, edge, kept, least)
        mass = tl.sum(weights)
    return begin + tl.sum((tl.cumsum(weights) <= left).to(tl.int64))
