"""Files are whole or absent, whatever fails; a folder has one writer."""

import errno
import fcntl
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.core.errors import RunLocked
from penstock.core.files import (
    checksum,
    commit,
    exclusive,
    is_locked,
    locked_at,
    remove_tree,
    temporary_beside,
    write_atomic,
    write_json,
)


@contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """A disk that fails: the kernel refuses to let any file of this process grow beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; skips where this user may not mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("NOT TESTED: a full disk needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("content", "stored"), [("é\n", b"\xc3\xa9\n"), (b"\x00\xff", b"\x00\xff"), ("", b"")]
)
def test_text_and_bytes_are_written_whole(tmp_path: Path, content: str | bytes, stored: bytes) -> None:
    write_atomic(tmp_path / "x", content)
    assert (tmp_path / "x").read_bytes() == stored
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_write_that_fails_half_way_leaves_the_old_content_and_no_debris(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_atomic(path, "old")
    with files_limited_to(1000), pytest.raises(OSError, match="File too large"):
        write_atomic(path, "n" * 5000)
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_full_disk_leaves_the_old_content_and_its_space(small_disk: Path) -> None:
    path = small_disk / "x"
    write_atomic(path, "o" * 4096)
    for _ in range(3):  # debris would fill the disk for what does fit
        with pytest.raises(OSError, match="No space left") as refusal:
            write_atomic(path, "n" * 2**20)
        assert refusal.value.errno == errno.ENOSPC
        write_atomic(path, "o" * 30_000)
    assert path.read_text() == "o" * 30_000
    assert [path.name for path in small_disk.iterdir()] == ["x"]


def test_a_file_in_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "none" / "x", "content")


def test_a_reader_sees_the_old_content_or_the_new_at_every_moment(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_atomic(path, "0" * 100_000)
    writer = multiprocessing.get_context("fork").Process(target=_write_digits, args=(path,))
    writer.start()
    seen = set()
    while writer.is_alive():
        content = path.read_text()
        assert len(content) == 100_000
        assert len(set(content)) == 1
        seen.add(content[0])
    writer.join()
    assert writer.exitcode == 0
    assert len(seen) > 1, "the reader saw it change"


def _write_digits(path: Path) -> None:
    for digit in "123456789" * 10:
        write_atomic(path, digit * 100_000)


def test_a_leftover_of_a_killed_writer_is_written_over(tmp_path: Path) -> None:
    temporary_beside(tmp_path / "x").write_text("half of something longer than what comes")
    write_atomic(tmp_path / "x", "whole")
    assert (tmp_path / "x").read_text() == "whole"


def test_json_keeps_its_keys_order_and_its_letters(tmp_path: Path) -> None:
    value = {"b": "é", "a": [1, None]}
    write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text()
    assert text.endswith("\n")
    assert "é" in text
    assert list(json.loads(text)) == ["b", "a"]


def test_a_folder_is_committed_under_its_final_name(tmp_path: Path) -> None:
    final = tmp_path / "final"
    temporary = temporary_beside(final)
    temporary.mkdir()
    (temporary / "x").write_text("content")
    commit(temporary, final)
    assert (final / "x").read_text() == "content"
    assert not temporary.exists()


def test_a_folder_is_removed_whole_and_again_is_nothing_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    remove_tree(folder)
    assert list(tmp_path.iterdir()) == []
    remove_tree(folder)


def test_removing_a_folder_spares_what_is_being_built_to_replace_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    temporary_beside(folder).mkdir()
    (temporary_beside(folder) / "new").write_text("content")
    remove_tree(folder)
    commit(temporary_beside(folder), folder)
    assert (folder / "new").read_text() == "content"


def test_a_removal_that_was_interrupted_does_not_stop_the_next(tmp_path: Path) -> None:
    folder, left = tmp_path / "folder", tmp_path / ".folder.removed.tmp"
    folder.mkdir()
    left.mkdir()
    (left / "x").write_text("half removed")
    remove_tree(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_checksum_is_of_the_bytes_whatever_their_number(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"")
    assert checksum(path) == "0e5751c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8", "BLAKE2b-256"
    path.write_bytes(bytes(2**20) + b"x")
    long = checksum(path)
    path.write_bytes(bytes(2**20) + b"y")
    assert checksum(path) != long


HOLDER = """
import signal, sys
from pathlib import Path
from penstock.core.files import exclusive
with exclusive(Path(sys.argv[1]), purpose="a test"):
    print("held", flush=True)
    signal.pause()
"""


@contextmanager
def held_by_another(folder: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder
        holder.kill()


def test_a_folder_held_by_another_process_is_refused_with_who_holds_it(tmp_path: Path) -> None:
    with held_by_another(tmp_path / "run") as holder:
        message = rf"run is being written by another process \(a test, pid {holder.pid}\)\. Wait for it"
        with pytest.raises(RunLocked, match=message), exclusive(tmp_path / "run", purpose="mine"):
            pytest.fail("two writers")


def test_a_folder_is_free_again_when_its_holder_was_killed(tmp_path: Path) -> None:
    with held_by_another(tmp_path) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with exclusive(tmp_path, purpose="mine"):
            assert (tmp_path / ".lock").read_text() == f"mine, pid {os.getpid()}\n"


def test_a_folder_is_free_again_when_its_holder_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), exclusive(tmp_path, purpose="one"):
        _ = 1 / 0
    with exclusive(tmp_path, purpose="two"):
        pass


def test_a_writer_waits_for_a_process_that_asks_whether_a_folder_is_locked(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    with (tmp_path / ".lock").open("rb") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)  # as is_locked does, here suspended in the middle
        answered = threading.Event()

        def answer() -> None:
            answered.set()
            fcntl.flock(asking, fcntl.LOCK_UN)

        later = threading.Timer(0.2, answer)
        later.start()
        with exclusive(tmp_path, purpose="mine"):
            assert answered.is_set()
            assert is_locked(tmp_path)
        later.join()
    assert not is_locked(tmp_path)


def test_a_writer_starts_while_others_ask_all_the_time(tmp_path: Path) -> None:
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            is_locked(tmp_path)

    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(ask)
        try:
            for _ in range(50):
                with exclusive(tmp_path, purpose="mine"):
                    assert is_locked(tmp_path)
        finally:
            ended.set()


def test_a_folder_to_be_held_is_made(tmp_path: Path) -> None:
    with exclusive(tmp_path / "a" / "b", purpose="x"):
        assert (tmp_path / "a" / "b").is_dir()


def test_a_folder_that_cannot_be_made_is_the_systems_error_and_not_a_lock(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError), exclusive(tmp_path / "file" / "run", purpose="x"):
        pytest.fail("held nothing")


def test_when_a_folder_was_locked_is_known_without_locking_it(tmp_path: Path) -> None:
    assert locked_at(tmp_path / "absent") == locked_at(tmp_path) == 0
    found = []
    for _ in range(2):
        with exclusive(tmp_path, purpose="test"):
            found.append(locked_at(tmp_path))
        os.utime(tmp_path / ".lock", ns=(1, 1))
    assert found[0] > 1 < found[1]
