"""A file of a bucket that is missing, renamed or emptied is never passed over, in any format.

Each folder loses one file in one way, and check_missing_files.py loses it in the others; of local folders
tests/unit/data/test_missing_files.py loses every file in each way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from tests.integration.remote.setting import bucket_store, upload
from tests.missing_files import FOLDERS, Folder, documents_of, files_of, served

HOWS = ("deleted", "renamed", "emptied")
CASES = [(number, HOWS[number % len(HOWS)]) for number in range(len(FOLDERS))]
"""A folder by its number, and how it loses a file: one way after the other."""


def name_of(case: tuple[int, str]) -> str:
    number, how = case
    return f"{FOLDERS[number].name}-{how}"


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize(("number", "how"), [pytest.param(*case, id=name_of(case)) for case in CASES])
def test_a_bucket_without_one_of_its_files_is_refused_by_name(
    number: int, how: str, s3_process: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose(number, how, s3_process, tmp_path, monkeypatch)


def lose(number: int, how: str, s3_process: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a folder into a bucket, lose a file of it, and read it with a cache and without."""
    folder: Folder = FOLDERS[number]
    (whole := tmp_path / "whole").mkdir()
    folder.write(whole)
    names = files_of(whole)
    bucket = f"missing-{number}-{how}"
    opened = folder.spec(upload(whole, s3_url=s3_process, bucket=bucket, prefix="opened"))
    store = bucket_store(s3_process, bucket)
    name = {"deleted": names[len(names) // 2], "renamed": names[0], "emptied": names[-1]}[how]
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    expected = documents_of(opened)
    with spoilt(store, f"opened/{name}", how):
        found, message = served(opened)
        if names == [name] and how == "deleted":  # then there is no such folder
            assert "opened does not exist" in message
        else:
            assert found == expected or (found is None and Path(name).name in message)
        monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "empty"))
        found, message = served(opened)
        if folder.is_indexed:
            stem = Path(name).name.split(".")[0]
            assert found == expected or (found is None and stem in message)


@contextmanager
def spoilt(store: Any, name: str, how: str) -> Iterator[None]:  # Any: see bucket_store
    """Context manager: an object is deleted, renamed or emptied, and then is as it was."""
    import obstore

    content = obstore.get(store, name).bytes()
    moved = str(PurePosixPath(name).with_name(f"moved-{PurePosixPath(name).name}"))
    if how == "emptied":
        obstore.put(store, name, b"")
    else:
        obstore.delete(store, name)
    if how == "renamed":
        obstore.put(store, moved, content)
    yield
    obstore.delete(store, moved)
    obstore.put(store, name, content)
