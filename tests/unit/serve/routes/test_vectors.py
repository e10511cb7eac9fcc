"""Vectors that are cut."""

import pytest

from penstock.serve.errors import ApiError
from penstock.serve.routes.embeddings import shortened

VECTOR = (0.6, 0.0, 0.8)


@pytest.mark.parametrize("lengths", [(1, 2), None], ids=["these", "any"])
def test_a_cut_vector_has_length_one_again(lengths):
    assert shortened(VECTOR, 2, lengths=lengths) == [1.0, 0.0]
    assert shortened((0.0, 0.0, 1.0), 2, lengths=lengths) == [0.0, 0.0]  # nothing is left to stretch


@pytest.mark.parametrize("length", [None, 3])
def test_a_whole_vector_is_as_it_was(length):
    assert shortened(VECTOR, length, lengths=()) == list(VECTOR)


@pytest.mark.parametrize(
    ("length", "lengths", "said"),
    [(4, None, "have 3 dim"), (2, (), "has no is_matryoshka"), (2, (8, 1), "embeddings of 1, 8 dimensions")],
)
def test_a_cut_that_means_nothing_is_refused(length, lengths, said):
    with pytest.raises(ApiError, match=said) as refused:
        shortened(VECTOR, length, lengths=lengths)
    assert (refused.value.status, refused.value.param) == (400, "dimensions")
