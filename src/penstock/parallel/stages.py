"""Which blocks the stages of a pipeline have, and how many micro-batches are under way in them; no torch."""


def blocks_of(stage: int, *, stages: int, num_blocks: int) -> range:
    """Return the blocks of a stage: even shares, the earlier stages one less where it does not divide.

    >>> [list(blocks_of(stage, stages=2, num_blocks=5)) for stage in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    return range(stage * num_blocks // stages, (stage + 1) * num_blocks // stages)


def under_way(rank: int, *, ranks: int, per_rank: int) -> float:
    """Return for how many micro-batches a rank of a pipeline keeps the activations of its blocks, at most.

    One forward, one backward in turn: the first rank has begun as many as there are ranks when the first
    comes back, the last rank one. Interleaved, it is counted in stages of a rank, so it may be a fraction.

    >>> [under_way(rank, ranks=4, per_rank=1) for rank in range(4)]
    [4.0, 3.0, 2.0, 1.0]
    >>> [under_way(rank, ranks=4, per_rank=2) for rank in range(4)]
    [5.5, 4.5, 3.5, 2.5]
    """
    later = ranks - 1 - rank
    return later + 1.0 if per_rank == 1 else ((per_rank - 1) * ranks + 2 * later + 1) / per_rank
