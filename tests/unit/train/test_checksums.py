"""Checksums of rows: of their tokens, one by one, however they lie in memory."""

import zlib

import numpy as np

from penstock.data.types import checksums


def test_a_checksum_is_the_crc_32_of_a_rows_64_bit_tokens() -> None:
    tokens = np.array([[1, 2, 3], [4, 5, 6]])
    expected = [zlib.crc32(np.array(row, dtype="<i8").tobytes()) for row in tokens.tolist()]
    assert checksums(tokens) == expected


def test_one_changed_token_changes_its_rows_checksum_and_no_other() -> None:
    tokens = np.arange(60).reshape(5, 12)
    before = checksums(tokens)
    tokens[3, 7] += 1
    after = checksums(tokens)
    assert [a != b for a, b in zip(before, after, strict=True)] == [False, False, False, True, False]


def test_a_checksum_does_not_depend_on_how_a_row_lies_in_memory() -> None:
    tokens = np.arange(60).reshape(5, 12)
    assert checksums(np.asfortranarray(tokens)) == checksums(tokens)
