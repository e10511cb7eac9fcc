"""One row of lengths laid over another."""

import numpy as np
import pytest

from penstock.data.packing.best_fit import overlay


@pytest.mark.parametrize(
    ("sources", "targets", "pieces"),
    [
        ([], [3], []),
        ([3], [3], [(0, 0, 3, 0)]),
        ([1, 1, 1], [3], [(0, 0, 1, 0), (1, 0, 1, 0), (2, 0, 1, 0)]),
        ([7], [3, 3, 3], [(0, 0, 3, 0), (0, 3, 3, 1), (0, 6, 1, 2)]),
        ([3, 3], [3, 3], [(0, 0, 3, 0), (1, 0, 3, 1)]),
        ([2, 3], [4, 4], [(0, 0, 2, 0), (1, 0, 2, 0), (1, 2, 1, 1)]),
        ([2], [1, 1, 5], [(0, 0, 1, 0), (0, 1, 1, 1)]),
    ],
)
def test_sources_are_poured_in_order_and_cut_where_a_target_is_full(
    sources: list[int], targets: list[int], pieces: list[tuple[int, int, int, int]]
) -> None:
    found = overlay(np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64))
    assert list(zip(*(column.tolist() for column in found), strict=True)) == pieces
