"""Round robins over lanes of unequal length: forwards, backwards, and how many rows each has given."""

import numpy as np
import pytest

from penstock.data.order.round_robin import RoundRobin

SIZES = [[1], [3, 3], [2, 3], [3, 2], [0, 4, 1], [5, 0, 0, 2], [0, 0], []]


def played(sizes: list[int]) -> list[tuple[int, int]]:
    """Return (lane, row) in turn, by hand."""
    rounds = range(max(sizes, default=0))
    return [(lane, row) for row in rounds for lane, size in enumerate(sizes) if row < size]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_lanes_take_turns_and_fall_out_when_they_end(sizes: list[int]) -> None:
    turns = RoundRobin(sizes)
    lanes, rows = turns.locate(np.arange(sum(sizes)))
    assert list(zip(lanes.tolist(), rows.tolist(), strict=True)) == played(sizes)
    assert turns.num_samples == sum(sizes)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_sample_at_a_place_is_the_inverse(sizes: list[int]) -> None:
    turns = RoundRobin(sizes)
    assert [turns.sample_of(lane, row) for lane, row in played(sizes)] == list(range(sum(sizes)))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_taken_are_those_of_the_samples_before(sizes: list[int]) -> None:
    for samples in range(sum(sizes) + 2):
        given = [lane for lane, _ in played(sizes)[:samples]]
        assert RoundRobin(sizes).taken(samples) == [given.count(lane) for lane in range(len(sizes))]
