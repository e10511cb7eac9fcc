"""Errors of the operating system, each made by the system itself, in words with a remedy."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core.files import write_atomic
from penstock.core.system_errors import in_words


def words_of(work: Callable[[], object]) -> str:
    with pytest.raises(OSError) as failed:  # noqa: PT011 - any
        work()
    return in_words(failed.value)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda at: (at / "file").mkdir(), "{at}/file is a file, and a folder of that name is needed. Name"),
        (
            lambda at: (at / "file" / "a" / "b").mkdir(parents=True),
            "{at}/file is a file, and a folder of that name is needed for {at}/file/a",
        ),
        (
            lambda at: (at / "file" / "a").read_text(),
            "for {at}/file/a. Name another folder, or move the file away.",
        ),
        (lambda at: (at / "folder").mkdir(), "{at}/folder exists already. Name another, or move it away."),
        (
            lambda at: (at / "folder").read_text(),
            "{at}/folder is a folder, and a file is needed there. Name a file.",
        ),
        (lambda at: write_atomic(at / "folder", "x"), "{at}/folder is a folder, and a file is needed there."),
        (
            lambda at: (at / "none").read_text(),
            "{at}/none does not exist. Check the path.",
        ),
        (
            lambda _: Path("none.txt").read_text(),
            f"none.txt does not exist. Check the path; it is relative to {Path.cwd()}.",
        ),
        (
            lambda at: (at / "no" / "ne").read_text(),
            "{at}/no/ne does not exist, nor does its folder {at}/no. Check",
        ),
        (lambda at: (at / "link").read_text(), "{at}/link is a link to {at}/gone, which does not exist."),
        (
            lambda at: (at / "circle").read_text(),
            "{at}/circle. Its links are circular: name the file itself.",
        ),
        (lambda at: (at / ("a" * 300)).write_text(""), "aaa. Choose a shorter name."),
        (
            lambda _: Path("/dev/full").write_text("x"),
            "No space left on device. Free some space (`df -h` shows",
        ),
    ],
)
def test_a_path_that_is_wrong_is_named_with_what_is_wrong_and_what_to_do(
    tmp_path: Path, work: Callable[[Path], object], said: str
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert said.format(at=tmp_path) in words_of(lambda: work(tmp_path))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EROFS, "cannot be written: its file system is read-only. Name a writable path"),
        (errno.EACCES, "permission denied. Name another path, or ask its owner for access"),
        (errno.EPERM, "permission denied. Name another path, or ask its owner for access"),
        (errno.EDQUOT, "Your quota is used up: delete what you no longer need"),
        (errno.EMFILE, "`ulimit -n 65536`"),
        (errno.EIO, "see `dmesg`"),
    ],
)  # which root, or a machine without such a disk, cannot make happen
def test_an_error_that_no_test_can_cause_has_a_remedy(tmp_path: Path, number: int, said: str) -> None:
    error = OSError(number, os.strerror(number), str(tmp_path / ".out.json.tmp"))
    assert said in in_words(error)
    assert str(tmp_path) in in_words(error)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_who_may_not_read_or_write_is_told_which_of_the_two(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "file").chmod(0)
    assert f"{tmp_path}/file may not be read" in words_of((tmp_path / "file").read_text)
    (tmp_path / "file").chmod(0o400)
    assert f"{tmp_path}/file may not be written" in words_of(lambda: (tmp_path / "file").write_text("y"))
    tmp_path.chmod(0o500)
    assert f"Nothing may be written in {tmp_path}" in words_of(lambda: (tmp_path / "new").write_text("y"))
    tmp_path.chmod(0o700)


def test_an_error_without_a_path_keeps_its_words() -> None:
    assert in_words(OSError("odd")) == "odd."
    assert in_words(OSError(errno.EPIPE, "Broken pipe")) == "Broken pipe."
