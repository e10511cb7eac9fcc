"""The store of decoded data: bounded, safe for threads, gone with the process."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from penstock.core.errors import CorpusError
from penstock.data.formats.decoded import Decoded


class Made:
    """Writes ten bytes and counts how often."""

    def __init__(self) -> None:
        self.times: list[int] = []

    def get(self, held: Decoded, key: int) -> bytes:
        return held.get(key, lambda file: self.write(file, key), lambda content: content.tobytes())

    def write(self, file: BinaryIO, key: int) -> None:
        self.times.append(key)
        file.write(bytes([key]) * 10)


def test_what_is_held_is_not_made_again_until_the_longest_unused_had_to_go(tmp_path: Path) -> None:
    held, made = Decoded(tmp_path, max_bytes=30), Made()
    for key in (1, 2, 3, 1, 4, 1, 3, 2):
        assert made.get(held, key) == bytes([key]) * 10
    assert made.times == [1, 2, 3, 4, 2]


def test_one_thing_larger_than_the_bound_is_held_alone(tmp_path: Path) -> None:
    held, made = Decoded(tmp_path, max_bytes=5), Made()
    for key in (1, 1, 2, 2, 1):
        made.get(held, key)
    assert made.times == [1, 2, 1]


def test_no_file_has_a_name_and_none_stays_open(tmp_path: Path) -> None:
    held, made = Decoded(tmp_path), Made()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for key in range(50):
        made.get(held, key)
    assert list(tmp_path.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_threads_that_ask_for_the_same_make_it_once(tmp_path: Path) -> None:
    held, made = Decoded(tmp_path), Made()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: made.get(held, n % 5), range(400)))
    assert found == [bytes([n % 5]) * 10 for n in range(400)]
    assert sorted(made.times) == [0, 1, 2, 3, 4]


def test_nothing_written_is_nothing_held(tmp_path: Path) -> None:
    held = Decoded(tmp_path)
    assert held.get("k", lambda _: None, lambda content: len(content)) == 0


def test_a_thing_that_cannot_be_made_is_tried_again_and_leaves_nothing(tmp_path: Path) -> None:
    held, made = Decoded(tmp_path), Made()

    def damaged(file: BinaryIO) -> None:
        file.write(b"half")
        raise CorpusError("damaged")

    with pytest.raises(CorpusError, match="damaged"):
        held.get(7, damaged, bytes)
    assert list(tmp_path.iterdir()) == []
    assert made.get(held, 7) == bytes([7]) * 10


def test_no_place_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    held = Decoded(tmp_path / "file" / "below")
    with pytest.raises(CorpusError, match=r"no disk space for decoded data.*PENSTOCK_CACHE"):
        Made().get(held, 1)


def test_a_forked_child_reads_though_a_thread_of_its_parent_was_at_work(tmp_path: Path) -> None:
    held, made = Decoded(tmp_path), Made()
    held._lock.acquire()  # as a thread has it that the child does not have
    held.free_locks()
    assert made.get(held, 1) == bytes([1]) * 10
