"""Where samples are: lanes in turn, exact arithmetic at 10^14 tokens."""

import numpy as np
import pytest

from penstock.data.order.permutation import choose_geometry
from penstock.data.order.row_order import Order

SIZES = [10**power for power in range(3, 15)]


def order_of(num_tokens: int, *, length: int = 16, name: str = "c", seed: int = 0) -> Order:
    return Order(num_tokens, choose_geometry(num_tokens, sequence_length=length), name=name, seed=seed)


@pytest.mark.parametrize("num_tokens", SIZES)
def test_consecutive_samples_come_from_all_lanes(num_tokens: int) -> None:
    order = order_of(num_tokens)
    lanes = order.geometry.lanes
    addresses = order.locate(np.arange(3 * lanes))
    assert addresses.lane.tolist() == list(range(lanes)) * 3
    assert addresses.row.tolist() == [row for row in range(3) for _ in range(lanes)]


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
    addresses = order.locate(samples)
    assert set(addresses.epoch.tolist()) == {epoch}
    found = sorted(zip(addresses.pool.tolist(), addresses.row.tolist(), strict=True))
    pools = range(first_pool, order.num_pools)
    assert found == [(pool, row) for pool in pools for row in range(order.rows_in_pool(pool))]
    after = order.locate(samples[-1:] + 1)
    assert (after.epoch[0], after.pool[0], after.row[0]) == (epoch + 1, 0, 0)


def test_addresses_can_be_chosen_by_index() -> None:
    addresses = order_of(10**5).locate(np.arange(100))
    chosen = addresses.take(np.array([7, 3]))
    assert chosen.row.tolist() == [addresses.row[7], addresses.row[3]]
    assert chosen.pool.tolist() == [addresses.pool[7], addresses.pool[3]]
