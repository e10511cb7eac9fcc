"""What pools are made of: whole blocks, a grid that rotates by epoch, and the way back."""

from itertools import pairwise

import numpy as np
import pytest

from penstock.data.order.permutation import choose_geometry
from penstock.data.order.row_order import Order


def order_of(num_tokens: int, *, length: int = 16, name: str = "c", seed: int = 0) -> Order:
    return Order(num_tokens, choose_geometry(num_tokens, sequence_length=length), name=name, seed=seed)


@pytest.mark.parametrize("epoch", [0, 1, 9])
def test_pools_of_a_huge_corpus_are_whole_blocks_inside_it(epoch: int) -> None:
    total = 10**14 + 5
    order = order_of(total, length=4096)
    pools = [*range(70), order.num_pools // 2, order.num_pools - 2, order.num_pools - 1]
    ranges = sorted(part for pool in pools for part in order.blocks.of_pool(epoch, pool))
    assert ranges[0][0] >= 0
    assert ranges[-1][1] <= total
    assert all(stop <= start for (_, stop), (start, _) in pairwise(ranges)), "no token twice"
    size = order.geometry.block_tokens * order.geometry.blocks_per_pool
    assert sum(stop - start for start, stop in order.blocks.of_pool(epoch, 0)) == size
    rest = total - (order.num_pools - 1) * size
    assert sum(stop - start for start, stop in order.blocks.of_pool(epoch, order.num_pools - 1)) == rest


def residues(order: Order, epoch: int) -> set[int]:
    """Return where in a block of the first epoch the blocks of this one start, but for the wrapped one."""
    starts = [start for pool in range(order.num_pools) for start, _ in order.blocks.of_pool(epoch, pool)]
    size = order.geometry.block_tokens
    counts = np.bincount([start % size for start in starts], minlength=size)
    return set(np.flatnonzero(counts > 2).tolist())


def test_the_grid_of_blocks_is_rotated_from_the_second_epoch_on_by_another_offset_each_time() -> None:
    order = order_of(10**5)
    assert residues(order, 0) == {0}
    later = [residues(order, epoch) for epoch in range(1, 5)]
    assert all(len(found) in (1, 2) for found in later), "one grid, and its part before the wrap"
    assert len({tuple(sorted(found)) for found in later} | {(0,)}) == 5


def test_name_and_seed_key_the_order() -> None:
    def of(name: str, seed: int) -> list[tuple[int, int]]:
        return order_of(10**5, name=name, seed=seed).blocks.of_pool(0, 0)

    assert of("web", 0) == of("web", 0)
    assert of("web", 0) != of("code", 0)
    assert of("web", 0) != of("web", 1)


@pytest.mark.parametrize("num_tokens", [40, 10_007, 2**14])
@pytest.mark.parametrize("epoch", range(4))
def test_the_pools_of_a_range_are_those_of_its_tokens(num_tokens: int, epoch: int) -> None:
    blocks = order_of(num_tokens, length=8).blocks
    each = blocks.pools_at(epoch, np.arange(num_tokens))
    draw = np.random.default_rng(0)
    for _ in range(200):
        start, stop = np.sort(draw.choice(num_tokens + 1, 2, replace=False)).tolist()
        assert blocks.pools_with(epoch, start, stop) == np.unique(each[start:stop]).tolist()
