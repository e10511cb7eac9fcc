"""Where samples are: lanes in turn, rotation by epoch, exact arithmetic at 10^14 tokens."""

from itertools import pairwise

import numpy as np
import pytest

from penstock.data.geometry import choose_geometry
from penstock.data.order import Order

SIZES = [10**power for power in range(3, 15)]


def order_of(num_tokens: int, *, length: int = 16, name: str = "c", seed: int = 0) -> Order:
    return Order(num_tokens, choose_geometry(num_tokens, sequence_length=length), name=name, seed=seed)


@pytest.mark.parametrize("num_tokens", SIZES)
def test_consecutive_samples_come_from_all_lanes(num_tokens: int) -> None:
    order = order_of(num_tokens)
    lanes = order.geometry.lanes
    places = order.locate(np.arange(3 * lanes))
    assert places.lane.tolist() == list(range(lanes)) * 3
    assert places.row.tolist() == [row for row in range(3) for _ in range(lanes)]


@pytest.mark.parametrize("num_tokens", [10**12 + 7, 10**14, 10**14 + 12_345_678_901])
@pytest.mark.parametrize("epoch", [0, 3])
def test_the_last_samples_of_an_epoch_of_a_huge_corpus_fill_its_last_pools(
    num_tokens: int, epoch: int
) -> None:
    order = order_of(num_tokens, length=4096)
    lanes, n = order.geometry.lanes, order.geometry.rows_per_pool
    first_pool = (order.num_pools - 1) // lanes * lanes  # of the last group of lanes
    start = first_pool * n
    samples = epoch * order.samples_per_epoch + np.arange(start, order.samples_per_epoch)
    places = order.locate(samples)
    assert set(places.epoch.tolist()) == {epoch}
    found = sorted(zip(places.pool.tolist(), places.row.tolist(), strict=True))
    pools = range(first_pool, order.num_pools)
    assert found == [(pool, row) for pool in pools for row in range(order.rows_in_pool(pool))]
    after = order.locate(samples[-1:] + 1)
    assert (after.epoch[0], after.pool[0], after.row[0]) == (epoch + 1, 0, 0)


@pytest.mark.parametrize("epoch", [0, 1, 9])
def test_pools_of_a_huge_corpus_are_whole_blocks_inside_it(epoch: int) -> None:
    total = 10**14 + 5
    order = order_of(total, length=4096)
    pools = [*range(70), order.num_pools // 2, order.num_pools - 2, order.num_pools - 1]
    ranges = sorted(part for pool in pools for part in order.pool_ranges(epoch, pool))
    assert ranges[0][0] >= 0
    assert ranges[-1][1] <= total
    assert all(stop <= start for (_, stop), (start, _) in pairwise(ranges)), "no token twice"
    size = order.geometry.block_tokens * order.geometry.blocks_per_pool
    assert sum(stop - start for start, stop in order.pool_ranges(epoch, 0)) == size
    rest = total - (order.num_pools - 1) * size
    assert sum(stop - start for start, stop in order.pool_ranges(epoch, order.num_pools - 1)) == rest


def residues(order: Order, epoch: int) -> set[int]:
    """Return where in a block of the first epoch the blocks of this one start, but for the wrapped one."""
    starts = [start for pool in range(order.num_pools) for start, _ in order.pool_ranges(epoch, pool)]
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
        return order_of(10**5, name=name, seed=seed).pool_ranges(0, 0)

    assert of("web", 0) == of("web", 0)
    assert of("web", 0) != of("code", 0)
    assert of("web", 0) != of("web", 1)


def test_places_can_be_chosen_by_index() -> None:
    places = order_of(10**5).locate(np.arange(100))
    chosen = places.take(np.array([7, 3]))
    assert chosen.row.tolist() == [places.row[7], places.row[3]]
    assert chosen.pool.tolist() == [places.pool[7], places.pool[3]]
