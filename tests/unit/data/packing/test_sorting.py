"""Stable sorting of small integers."""

import numpy as np
import pytest

from penstock.data.packing.best_fit import stable_order


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 63, 64, 65, 1000])
@pytest.mark.parametrize("most", [1, 7, 2**40])
def test_the_order_is_numpys_stable_one(size: int, most: int) -> None:
    values = np.random.default_rng(size).integers(0, most, size)
    assert np.array_equal(stable_order(values), np.argsort(values, kind="stable"))


def test_the_values_are_left_as_they_were() -> None:
    values = np.array([3, 1, 2])
    stable_order(values)
    assert values.tolist() == [3, 1, 2]
