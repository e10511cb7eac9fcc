"""A folder that others write to while it is listed."""

import threading
from pathlib import Path

from penstock.storage.base import LocalStorage


def test_what_others_rename_while_a_folder_is_listed_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "kept.bin").write_bytes(b"abc")
    done = threading.Event()

    def write_again_and_again() -> None:
        while not done.is_set():
            half = tmp_path / "half.tmp"
            half.write_bytes(b"ab")
            half.rename(tmp_path / "whole.bin")

    other = threading.Thread(target=write_again_and_again)
    other.start()
    try:
        for _ in range(1000):
            assert LocalStorage(tmp_path).sizes()["kept.bin"] == 3
    finally:
        done.set()
        other.join()
