"""Packing rules at their edges (that every token is placed once is a property test)."""

from itertools import pairwise

import numpy as np
import pytest

from penstock.core.errors import UsageError
from penstock.data.packing import PACKERS, PADDING_RULES
from penstock.data.types import Pieces


def packed(rule: str, lengths: list[int], *, length: int) -> list[list[tuple[int, int, int]]]:
    """Pack; return the (fragment, offset, length) of each row's pieces."""
    rows = -(-sum(lengths) // length)
    pieces: Pieces = PACKERS[rule](np.array(lengths), num_rows=rows, sequence_length=length)
    columns = (pieces.fragment.tolist(), pieces.offset.tolist(), pieces.length.tolist())
    table = list(zip(*columns, strict=True))
    starts = [0, *pieces.row_ends.tolist()]
    return [table[first:past] for first, past in pairwise(starts)]


def times_split(rows: list[list[tuple[int, int, int]]]) -> int:
    pieces = [piece for row in rows for piece in row]
    return len(pieces) - len({fragment for fragment, _, _ in pieces})


RULES = pytest.mark.parametrize("rule", [rule for rule in PACKERS if rule not in PADDING_RULES])


@RULES
def test_documents_of_exactly_one_row_are_not_split(rule: str) -> None:
    rows = packed(rule, [8, 8, 8], length=8)
    assert sorted(rows) == [[(0, 0, 8)], [(1, 0, 8)], [(2, 0, 8)]]


@RULES
def test_a_single_token_is_a_short_last_row(rule: str) -> None:
    assert packed(rule, [1], length=8) == [[(0, 0, 1)]]


@RULES
def test_documents_of_one_token_fill_rows(rule: str) -> None:
    rows = packed(rule, [1] * 20, length=8)
    assert sorted(map(len, rows)) == [4, 8, 8]
    assert len(rows[-1]) == 4


@RULES
def test_one_document_longer_than_many_rows_is_cut_at_their_length(rule: str) -> None:
    assert packed(rule, [20], length=8) == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 4)]]


@RULES
def test_only_the_last_row_is_short_when_all_documents_are_longer_than_a_row(rule: str) -> None:
    rows = packed(rule, [13, 11, 9, 17], length=8)
    assert [sum(length for _, _, length in row) for row in rows] == [8] * 6 + [2]


def test_best_fit_keeps_documents_whole_where_they_fit_together() -> None:
    rows = packed("best_fit", [6, 4, 7, 3, 9, 1], length=10)
    assert times_split(rows) == 0
    assert {tuple(sorted(fragment for fragment, _, _ in row)) for row in rows} == {(0, 1), (2, 3), (4, 5)}
    assert times_split(packed("concat", [6, 4, 7, 9, 3, 1], length=10)) == 1


def test_best_fit_cuts_full_rows_off_long_documents_and_places_the_rest_whole() -> None:
    rows = packed("best_fit", [23, 7], length=10)
    assert rows == [[(0, 0, 10)], [(0, 10, 10)], [(1, 0, 7), (0, 20, 3)]]


def test_best_fit_places_the_longest_first_into_the_tightest_room() -> None:
    rows = packed("best_fit", [2, 5, 8, 5], length=10)
    assert sorted(rows) == [[(1, 0, 5), (3, 0, 5)], [(2, 0, 8), (0, 0, 2)]]


def test_best_fit_splits_only_what_fits_nowhere_and_fills_the_largest_gap_first() -> None:
    rows = packed("best_fit", [7, 7, 6], length=10)  # 20 tokens in two rows: one document must be cut
    assert times_split(rows) == 1
    assert [sum(length for _, _, length in row) for row in rows] == [10, 10]
    assert {piece[0] for row in rows for piece in row if piece[2] not in (6, 7)} == {2}


def test_best_fit_leaves_the_shortfall_to_the_last_row() -> None:
    rows = packed("best_fit", [5, 5, 3], length=10)
    assert [sum(length for _, _, length in row) for row in rows] == [10, 3]


@pytest.mark.parametrize("length", [5, 30, 4096])
@pytest.mark.parametrize("more", [0, 1])
def test_best_fit_is_best_fit_decreasing_by_definition(length: int, more: int) -> None:
    rng = np.random.default_rng(length)
    for mean in (0.1, 0.3, 0.6, 1.5):
        lengths = rng.integers(1, 2 + int(2 * mean * length), 300).tolist()
        lengths[0] += (more - sum(lengths)) % length  # `more` tokens too many: the last row is short
        rows = packed("best_fit", lengths, length=length)
        placed = [(fragment, row) for row, pieces in enumerate(rows) for fragment, *_ in pieces]
        for fragment, expected in by_definition(lengths, length=length).items():
            assert ((fragment, expected) in placed) == (expected is not None)


def by_definition(lengths: list[int], *, length: int) -> dict[int, int | None]:
    """Return the row of every remainder that fits somewhere whole, the longest first, and None for others."""
    full = sum(n // length for n in lengths)
    rooms = [length] * (-(-sum(lengths) // length) - full)
    if rooms:
        rooms[-1] -= -sum(lengths) % length
    found: dict[int, int | None] = {}
    for fragment in sorted(range(len(lengths)), key=lambda i: -(lengths[i] % length)):
        rest = lengths[fragment] % length
        fitting = [(room, row) for row, room in enumerate(rooms) if room >= rest > 0]
        if fitting:
            row = min(fitting)[1]
            rooms[row] -= rest
            found[fragment] = full + row
        elif rest:
            found[fragment] = None
    return found


def test_concat_keeps_the_given_order() -> None:
    rows = packed("concat", [3, 4, 5], length=8)
    assert rows == [[(0, 0, 3), (1, 0, 4), (2, 0, 1)], [(2, 1, 4)]]


def test_an_unknown_rule_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        UsageError, match=r"Unknown packing rule \(got 'best-fit'\)\. Did you mean 'best_fit'"
    ):
        PACKERS["best-fit"]
