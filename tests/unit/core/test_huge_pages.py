"""Reserved memory: zeroes, in huge pages where Linux grants them, freed with the last that refers to it."""

import gc
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from penstock.core import huge_pages
from penstock.core.huge_pages import reserve


@pytest.fixture(autouse=True)
def nothing_shared(monkeypatch):
    monkeypatch.setattr(huge_pages, "_shared", None)


def flags_of(address: int) -> set[str]:
    """Return what the kernel notes of the mapping in which an address lies."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(bound, 16) for bound in words[0].split("-"))
            inside = begin <= address < end
        elif inside and words[0] == "VmFlags:":
            return set(words[1:])
    raise AssertionError(f"no mapping at {address:#x}")


def test_memory_is_zeros_that_can_be_written():
    numbers = np.frombuffer(reserve(100), np.uint8)
    assert not numbers.any()
    numbers[:] = 1


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's notes are Linux's")
@pytest.mark.parametrize("size", [100, 2**23, 2**25])
def test_memory_is_private_for_shared_memory_gets_no_huge_pages(size):
    numbers = np.frombuffer(reserve(size), np.uint8)
    flags = flags_of(numbers.ctypes.data)
    assert "sh" not in flags
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        assert "hg" in flags


def test_pieces_are_zeroes_and_their_own():
    pieces = [reserve(size) for size in (1, 4096, 5000, 0)]
    for number, piece in enumerate(pieces, 1):
        assert bytes(piece) == bytes(len(piece))
        piece[:] = bytes([number]) * len(piece)
    for number, piece in enumerate(pieces, 1):
        assert set(bytes(piece)) == {number}
    assert [len(piece) for piece in pieces] == [1, 4096, 5000, 1]


def test_small_pieces_share_a_map_until_it_is_full():
    first = reserve(1)
    assert reserve(5000).obj is first.obj
    rest = huge_pages._SHARED // 4 - 4096
    others = [reserve(rest) for _ in range(5)]
    assert [one.obj is first.obj for one in others] == [True] * 4 + [False]


def test_a_large_piece_has_a_map_of_its_own():
    assert len(reserve(huge_pages._SHARED)) == huge_pages._SHARED
    assert huge_pages._shared is None


def test_a_map_is_given_back_with_its_last_piece():
    pieces = [reserve(1), reserve(1)]
    map_ = weakref.ref(pieces[0].obj)
    pieces.pop()
    gc.collect()
    assert map_() is not None
    pieces.clear()
    gc.collect()
    assert map_() is None
    assert bytes(reserve(1)) == b"\0"
