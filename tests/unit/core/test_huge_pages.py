"""Large memory is of a kind that Linux grants huge pages."""

import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.core.huge_pages import reserve


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
def test_large_memory_is_private_for_shared_memory_gets_no_huge_pages():
    numbers = np.frombuffer(reserve(2**23), np.uint8)
    flags = flags_of(numbers.ctypes.data)
    assert "sh" not in flags
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        assert "hg" in flags
