"""A region file: pages are there or not, whole or not at all, and found out if they are neither."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.storage.cache_region import PAGE_BYTES, REGION_BYTES, Region
from tests.examples import examples

CONTENT = np.random.default_rng(0).bytes(REGION_BYTES)
SHORT = 3 * PAGE_BYTES + 100
BOOTS = st.sampled_from([None, "one"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "key" / "00000000"


def fill(region: Region, first: int, past: int) -> None:
    with region.writing(first, past) as write:
        write(memoryview(CONTENT)[first * PAGE_BYTES : min(past * PAGE_BYTES, region.size)])


def test_pages_are_missing_until_they_are_written(path: Path) -> None:
    region = Region(path, SHORT)
    assert region.verify(range(4)) == [0, 1, 2, 3]
    fill(region, 1, 4)
    assert region.verify(range(4)) == [0]
    assert region.ready(PAGE_BYTES, SHORT)
    assert not region.ready(PAGE_BYTES - 1, PAGE_BYTES + 1)
    assert region.data[PAGE_BYTES:].tobytes() == CONTENT[PAGE_BYTES:SHORT]


def test_what_one_opening_writes_another_reads(path: Path) -> None:
    one, other = Region(path, SHORT), Region(path, SHORT)
    fill(one, 0, 4)
    assert other.verify(range(4)) == []
    assert other.data.tobytes() == CONTENT[:SHORT]
    assert not other.data.flags.writeable


@examples(40)
@given(where=st.integers(0, PAGE_BYTES + SHORT - 1), bit=st.integers(0, 7), cut=st.booleans(), boot=BOOTS)
def test_no_damage_is_served_after_a_boot(
    tmp_path_factory: pytest.TempPathFactory, where: int, bit: int, cut: bool, boot: str | None
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "key" / "00000000"
    fill(Region(path, SHORT, boot=boot), 0, 4)
    content = bytearray(path.read_bytes())
    content[where] ^= 1 << bit
    path.write_bytes(content[:where] if cut else content)
    region = Region(path, SHORT, boot="next")
    missing = region.verify(range(4))
    for page in range(4):
        if page not in missing:
            part = slice(page * PAGE_BYTES, min((page + 1) * PAGE_BYTES, SHORT))
            assert region.data[part].tobytes() == CONTENT[part]


@pytest.mark.parametrize("boot", ["one", None])
def test_a_page_is_checked_once_in_a_boot_and_where_no_boot_is_known_by_each_opening(
    path: Path, boot: str | None
) -> None:
    fill(Region(path, SHORT, boot="before"), 0, 4)
    assert Region(path, SHORT, boot=boot).verify(range(4)) == []
    with path.open("r+b") as file:  # what no one looks at again in this boot
        file.seek(PAGE_BYTES)
        file.write(bytes(10))
    assert Region(path, SHORT, boot=boot).verify(range(4)) == ([0] if boot is None else [])
    assert Region(path, SHORT, boot="after").verify(range(4)) == [0]


def test_checks_of_an_evicted_file_are_not_noted_in_the_one_that_took_its_place(path: Path) -> None:
    fill(Region(path, SHORT, boot="before"), 0, 4)
    region = Region(path, SHORT, boot="one")
    path.unlink()
    Region(path, SHORT, boot="one")
    assert region.verify(range(4)) == []
    assert Region(path, SHORT, boot="one").verify(range(4)) == [0, 1, 2, 3]


def test_another_file_in_its_place_is_replaced(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"x" * (PAGE_BYTES + SHORT))
    region = Region(path, SHORT)
    assert region.verify(range(4)) == [0, 1, 2, 3]
    fill(region, 0, 4)
    assert Region(path, SHORT).verify(range(4)) == []


def test_a_region_that_is_evicted_lives_on_for_who_holds_it(path: Path) -> None:
    region = Region(path, SHORT)
    with region.writing(0, 4) as write:
        path.unlink()  # between the claim and the write
        write(memoryview(CONTENT)[:SHORT])
    assert region.is_evicted()
    assert region.data.tobytes() == CONTENT[:SHORT]
    with pytest.raises(FileNotFoundError), region.writing(0, 1):
        pass
    assert Region(path, SHORT).verify(range(4)) == [0, 1, 2, 3]
    assert region.is_evicted()  # another file of the same name is not this one


def test_a_claim_that_comes_to_nothing_is_taken_back(path: Path) -> None:
    region = Region(path, SHORT)
    fill(region, 0, 1)

    def fail() -> None:
        with region.writing(0, 4):
            raise ValueError("nothing came")

    with pytest.raises(ValueError, match="nothing came"):
        fail()
    assert Region(path, SHORT).verify(range(4)) == [1, 2, 3]  # and the page that was there still is
    assert not any(region.claimed_by_another(page) for page in range(4))


def test_a_claim_of_another_process_is_seen_while_it_lives(path: Path) -> None:
    region = Region(path, SHORT)
    with region.writing(0, 4):
        assert not region.claimed_by_another(0)  # its own
        assert in_child(lambda: Region(path, SHORT).claimed_by_another(0))
    assert not in_child(lambda: Region(path, SHORT).claimed_by_another(0))


def test_no_descriptor_is_kept(path: Path) -> None:
    regions = [Region(path.with_name(f"{index:08x}"), SHORT) for index in range(50)]
    assert not [
        link
        for link in map(os.readlink, (entry.path for entry in os.scandir("/proc/self/fd")))
        if str(path.parent) in link
    ]
    assert len(regions) == 50


def in_child(ask: Callable[[], bool]) -> bool:
    child = os.fork()
    if not child:
        os._exit(int(ask()))
    return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
