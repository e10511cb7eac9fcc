"""Who computes which sample."""

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.data.assign import check_divisible, share


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_the_ranks_shares_are_equal_and_together_the_step(world_size: int) -> None:
    corpora, lanes = np.array([0, 1] * 6), np.array([3, 1, 2, 0] * 3)
    shares = [share(corpora, lanes, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert {len(mine) for mine in shares} == {12 // world_size}
    assert sorted(np.concatenate(shares).tolist()) == list(range(12))


def test_a_rank_keeps_its_lanes_from_step_to_step() -> None:
    """As many samples of each lane in a step as lanes are dealt: nobody opens another's pools."""
    lanes_seen: list[set[int]] = [set() for _ in range(4)]
    for step in range(50):
        samples = np.arange(step * 32, (step + 1) * 32)
        lanes = samples % 16
        for rank in range(4):
            mine = share(np.zeros(32, dtype=np.int64), lanes, rank=rank, world_size=4)
            lanes_seen[rank] |= set(lanes[mine].tolist())
    assert lanes_seen == [{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}]


def test_samples_of_one_lane_stay_in_order() -> None:
    mine = share(np.zeros(6, dtype=np.int64), np.array([1, 0, 1, 0, 1, 0]), rank=0, world_size=1)
    assert mine.tolist() == [1, 3, 5, 0, 2, 4]


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
