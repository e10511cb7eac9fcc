"""Packing rule `best_fit`: split as few documents as possible, without padding.

Fragments longer than L give full rows and a remainder. Remainders are placed by best-fit decreasing: longest
first, each into the row where it leaves the least room. Those that fit nowhere are split to fill the
remaining gaps; because a pool holds exactly num_rows * L tokens, every row is full. Best-fit packing of
language-model data: Ding et al., "Fewer truncations improve language modeling" (ICML 2024); theirs pads, this
one does not.

Cost: about 0.1 us per fragment, at any sequence length. Lengths descend, so rows form two stacks, those with
too little room for the present length and those with enough, each with the next candidate on top. The row
that received the last fragment usually takes the next one too, without a move or a search.
"""

from bisect import insort

import numpy as np

from penstock.core.arrays import Int64
from penstock.data.types import Pieces


def pack(lengths: Int64, *, num_rows: int, sequence_length: int) -> Pieces:
    """Place fragments into rows; only the last row may be short.

    Args:
        lengths: [n] int64 fragment lengths, each at least 1.
        num_rows: ceil(sum of lengths / sequence_length).
    """
    long = np.flatnonzero(lengths >= sequence_length)
    full = lengths[long] // sequence_length  # rows that a fragment fills by itself
    base = np.zeros_like(lengths)  # offset of its remainder
    base[long] = full * sequence_length
    remainders = lengths - base
    num_full = int(full.sum())
    rooms = np.full(num_rows - num_full, sequence_length)
    rooms[-1:] -= num_rows * sequence_length - int(lengths.sum())

    order = stable_order(sequence_length - remainders)[: np.count_nonzero(remainders)]
    descending = remainders[order]
    placed = _best_fit(descending, rooms)
    fits = placed >= 0
    whole, left = order[fits], order[~fits]
    split, split_offset, split_length, gap = _fill(
        rooms, placed[fits], whole_lengths=descending[fits], left_lengths=descending[~fits]
    )
    fragment = np.concatenate((whole, left[split]))
    offset = base[fragment]
    offset[len(whole) :] += split_offset
    length = np.concatenate((descending[fits], split_length))
    row = np.concatenate((placed[fits], gap))

    by_row = stable_order(row)
    full_ends = np.arange(1, num_full + 1)
    ends = num_full + np.cumsum(np.bincount(row, minlength=len(rooms)))
    return Pieces(
        np.concatenate((np.repeat(long, full), fragment[by_row])),
        np.concatenate((_counts_within(full) * sequence_length, offset[by_row])),
        np.concatenate((np.full(num_full, sequence_length), length[by_row])),
        np.concatenate((full_ends, ends)),
    )


def _best_fit(lengths: Int64, rooms: Int64) -> Int64:
    """Return the bin of each length, -1 if it fits in none; lengths descend.

    A bin is one integer: its room in the upper bits, its number in the lower. `tight` holds bins with too
    little room for the present length, ascending; `fitting` those with enough, descending: the last element
    is next.
    """
    bits, alone = len(rooms).bit_length(), _alone(lengths, rooms)
    left = rooms.copy()
    left[:alone] -= lengths[:alone]
    tight = [-1, *np.sort(left << bits | np.arange(len(left))).tolist()]  # -1: sentinel below any length
    fitting: list[int] = []
    placed = []
    needed = (lengths[alone:] << bits).tolist()
    least, most = needed[-1] if needed else 0, tight[-1]
    room = -1  # room of the bin that received the last length; it is on neither stack
    for length in needed:
        if most >= length:  # tight bins that now have enough room move to `fitting`, the tightest first
            if room >= least:
                insort(tight, room)
            while tight[-1] >= length:
                fitting.append(tight.pop())
            most, room = tight[-1], fitting.pop()
        elif room < length:
            if room >= least:  # a bin with less room takes nothing any more
                insort(tight, room)
                most = tight[-1]
            room = fitting.pop() if fitting else -1
        placed.append(room)
        room -= length
    bins = np.fromiter(placed, np.int64, len(placed))
    return np.concatenate((np.arange(alone), np.where(bins < 0, -1, bins & (1 << bits) - 1)))


def _alone(lengths: Int64, rooms: Int64) -> int:
    """Return the number of lengths over half a row: each takes an empty row, since no two share one.
    0 if a row is short, because one of them might fit it better.
    """
    if not len(rooms) or rooms[-1] != rooms[0]:
        return 0
    return min(int(np.count_nonzero(lengths > rooms[0] // 2)), len(rooms))


def _fill(
    rooms: Int64, placed: Int64, *, whole_lengths: Int64, left_lengths: Int64
) -> tuple[Int64, Int64, Int64, Int64]:
    """Split the unplaced lengths to fill the gaps, largest first, which needs the fewest splits.

    Returns:
        arrays as of `overlay`, for the unplaced lengths and the rows.
    """
    gaps = rooms - np.bincount(placed, weights=whole_lengths, minlength=len(rooms)).astype(np.int64)
    bins = np.flatnonzero(gaps)
    bins = bins[np.argsort(-gaps[bins], kind="stable")]
    split, offset, length, gap = overlay(left_lengths, gaps[bins])
    return split, offset, length, bins[gap]


def _counts_within(repeats: Int64) -> Int64:
    """Return 0, 1, ..., r-1 for each r of `repeats`, concatenated."""
    ends = np.cumsum(repeats)
    return np.arange(repeats.sum()) - np.repeat(ends - repeats, repeats)


def overlay(sources: Int64, targets: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Distribute sources over targets in order, cutting a source wherever a target is full.

    Args:
        sources: [s] int64 lengths, each at least 1.
        targets: [t] int64 capacities, each at least 1, with a sum no less than the sources'.

    Returns:
        Four arrays [p], one entry per piece: source index, offset in the source, length, target index.


    >>> [a.tolist() for a in overlay(np.array([5, 2]), np.array([3, 4]))]
    [[0, 0, 1], [0, 3, 0], [3, 2, 2], [0, 1, 1]]
    """
    source_ends, target_ends = np.cumsum(sources), np.cumsum(targets)
    total = source_ends[-1] if len(source_ends) else 0
    cuts = np.concatenate((source_ends, target_ends))
    cuts.sort(kind="stable")  # two sorted runs: a merge
    starts = np.concatenate((np.zeros(1, dtype=np.int64), cuts[:-1]))
    real = (cuts > starts) & (cuts <= total)  # drop duplicate cuts and cuts beyond the end
    cuts, starts = cuts[real], starts[real]
    source = np.searchsorted(source_ends, starts, side="right")
    target = np.searchsorted(target_ends, starts, side="right")
    return source, starts - (source_ends - sources)[source], cuts - starts, target


def stable_order(values: Int64) -> Int64:
    """Return the stable argsort of integers [n] from 0 to 2^63 / 2n.

    Sorts distinct keys, each a value above its index: numpy sorts integers with vector instructions, but not
    in a stable argsort of wide ones.


    >>> stable_order(np.array([5, 3, 5, 3])).tolist()
    [1, 3, 0, 2]
    """
    bits = len(values).bit_length()
    keys = values << bits
    keys |= np.arange(len(values))
    keys.sort()
    keys &= (1 << bits) - 1
    return keys
