"""A file of a bucket that is missing, renamed or emptied is never passed over, in any format."""

import shutil
from pathlib import Path

import pytest
from tests.integration.remote.setting import empty, upload
from tests.missing_files import FOLDERS, Folder, documents_of, files_of, served, spoil


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("how", ["deleted", "renamed", "emptied"])
@pytest.mark.parametrize("number", [pytest.param(n, id=folder.name) for n, folder in enumerate(FOLDERS)])
def test_a_bucket_without_one_of_its_files_is_refused_by_name(
    number: int, how: str, s3_process: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder: Folder = FOLDERS[number]
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    (whole := tmp_path / "whole").mkdir()
    folder.write(whole)
    names = files_of(whole)
    for name in {names[0], names[len(names) // 2], names[-1]}:
        damaged = shutil.copytree(whole, tmp_path / "damaged")
        spoil(damaged / name, how)
        bucket = f"missing-{number}-{how}-{names.index(name)}"
        fresh = folder.spec(upload(damaged, s3_url=s3_process, bucket=bucket, prefix="never"))
        opened = folder.spec(upload(whole, s3_url=s3_process, bucket=bucket, prefix="opened"))
        expected = documents_of(opened)
        empty(s3_url=s3_process, bucket=bucket, prefix="opened")
        upload(damaged, s3_url=s3_process, bucket=bucket, prefix="opened")
        found, message = served(opened)
        if names == [name] and how == "deleted":  # then there is no such folder
            assert "opened does not exist" in message
        else:
            assert found == expected or (found is None and Path(name).name in message), name
        found, message = served(fresh)
        if folder.is_indexed:
            stem = Path(name).name.split(".")[0]
            assert found == expected or (found is None and stem in message), name
        shutil.rmtree(damaged)
