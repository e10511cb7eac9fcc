"""The keyed bijection: shapes and types (that it is a bijection is a property test)."""

import numpy as np
import pytest

from penstock.data.order.permutation import Permutation


def test_one_element_maps_to_itself_and_none_to_none() -> None:
    assert Permutation(1, key=5)(np.array([0])).tolist() == [0]
    assert Permutation(0, key=5)(np.array([], dtype=np.int64)).tolist() == []


def test_the_shape_stays_the_type_is_int64_and_the_indices_are_left_alone() -> None:
    indices = np.arange(12).reshape(3, 4)
    images = Permutation(12, key=5)(indices)
    assert images.shape == (3, 4)
    assert images.dtype == np.int64
    assert indices.tolist() == np.arange(12).reshape(3, 4).tolist()


def test_an_image_does_not_depend_on_what_else_is_asked_for() -> None:
    permutation = Permutation(1000, key=5)
    whole = permutation(np.arange(1000))
    assert [int(permutation(np.array([i]))[0]) for i in range(0, 1000, 37)] == whole[::37].tolist()


@pytest.mark.parametrize("n", [10, 4096])
def test_keys_that_differ_in_one_bit_give_other_permutations(n: int) -> None:
    orders = {tuple(Permutation(n, key=2**bit)(np.arange(n)).tolist()) for bit in range(64)}
    assert len(orders) == 64
