"""Who computes which sample."""

import numpy as np
import pytest

from penstock.core.checks import check_divisible
from penstock.core.errors import ConfigError
from penstock.data.reader import deal, homes_of, in_micro_batches, is_home

NO_COSTS = np.zeros(32, dtype=np.int64)


def test_a_rank_keeps_its_lanes_from_step_to_step() -> None:
    lanes_seen: list[set[int]] = [set() for _ in range(4)]
    one_corpus, num_lanes = np.zeros(32, dtype=np.int64), np.full(32, 16)
    for step in range(50):
        lanes = np.arange(step * 32, (step + 1) * 32) % 16
        homes = homes_of(one_corpus, lanes, num_lanes, world_size=4)
        ranks = deal(one_corpus, homes, NO_COSTS, world_size=4)
        for rank in range(4):
            lanes_seen[rank] |= set(lanes[ranks == rank].tolist())
    assert lanes_seen == [{rank, rank + 4, rank + 8, rank + 12} for rank in range(4)]


def test_ranks_that_share_a_lane_are_all_at_home_in_it() -> None:
    lanes, num_lanes = np.arange(64) % 8, np.full(64, 8)
    one_corpus = np.zeros(64, dtype=np.int64)
    homes = homes_of(one_corpus, lanes, num_lanes, world_size=32)
    assert np.bincount(homes).tolist() == [2] * 32
    for rank in range(32):
        at_home = is_home(one_corpus, lanes, num_lanes, rank=rank, world_size=32)
        assert set(lanes[at_home].tolist()) == {rank % 8}


def test_corpora_of_one_lane_each_have_their_homes_on_different_ranks() -> None:
    corpora = np.arange(12)
    homes = homes_of(corpora, np.zeros(12, dtype=np.int64), np.ones(12, dtype=np.int64), world_size=4)
    assert np.bincount(homes).tolist() == [3] * 4


def test_short_and_long_rows_are_spread_evenly() -> None:
    """Cut into runs sorted by corpus, two of these four ranks would have all the work."""
    corpora, costs = np.repeat([0, 1], 16), np.repeat([1, 100], 16)
    ranks = deal(corpora, np.arange(32) // 8, costs, world_size=4)
    assert np.bincount(ranks, weights=costs).tolist() == [404] * 4


def test_rows_at_home_stay_where_the_busiest_rank_is_within_the_limit() -> None:
    homes, costs = np.arange(32) % 4, np.full(32, 100)
    costs[5] = 155  # 855 on one rank where the mean is 814
    assert (deal(NO_COSTS, homes, costs, world_size=4) == homes).all()
    costs[5] = 400
    assert (deal(NO_COSTS, homes, costs, world_size=4) == homes).all(), "no other row would be better off"


def test_one_swap_is_made_where_one_is_enough() -> None:
    homes, costs = np.repeat(np.arange(4), 8), np.full(32, 100)
    costs[0:3] = 150
    ranks = deal(NO_COSTS, homes, costs, world_size=4)
    assert np.bincount(ranks, weights=costs).max() <= 1.08 * costs.sum() / 4
    assert (ranks != homes).sum() == 2


def test_costs_beyond_32_bits_are_added_exactly() -> None:
    costs = np.array([2**52 + 1, 2**52, 2**52 + 1, 2**52] * 8)
    ranks = deal(NO_COSTS, np.arange(32) % 4, costs, world_size=4)
    assert sorted(sum(costs[ranks == rank].tolist()) for rank in range(4))[-1] * 4 <= 1.08 * sum(
        costs.tolist()
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 12])
def test_costly_rows_come_in_the_first_micro_batches(rows: int) -> None:
    costs = np.random.default_rng(0).permutation(12)
    order = in_micro_batches(np.zeros(12, dtype=np.int64), costs, rows=rows)
    loads = costs[order].reshape(-1, rows).sum(axis=1).tolist()
    assert loads == sorted(loads, reverse=True)


def test_a_micro_batch_that_does_not_divide_the_rows_is_cut_to_one_that_does() -> None:
    corpora, nothing = np.repeat([0, 1], 6), np.zeros(12, dtype=np.int64)
    by_eight = in_micro_batches(corpora, nothing, rows=8)
    assert by_eight.tolist() == in_micro_batches(corpora, nothing, rows=4).tolist()


@pytest.mark.parametrize(
    ("batch", "ranks", "choices"), [(10, 4, "8 or 12"), (3, 4, "of 4, or"), (4097, 8, "4096 or 4104")]
)
def test_a_batch_that_does_not_divide_is_refused_with_sizes_that_do(
    batch: int, ranks: int, choices: str
) -> None:
    message = f"A global batch of {batch} sequences does not divide over {ranks} ranks.*{choices}"
    with pytest.raises(ConfigError, match=message):
        check_divisible(batch, world_size=ranks)


@pytest.mark.parametrize("ranks", [0, -2])
def test_no_ranks_are_refused(ranks: int) -> None:
    with pytest.raises(ConfigError, match=rf"number of ranks must be at least 1 \(got {ranks}\)"):
        check_divisible(12, world_size=ranks)
