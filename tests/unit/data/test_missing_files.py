"""A file that is missing, renamed or emptied is never passed over: nothing is served with other tokens."""

import shutil
from pathlib import Path

import pytest

from tests.missing_files import Folder, cases, documents_of, files_of, served, spoil

EACH = pytest.mark.parametrize(
    ("folder", "how"), [pytest.param(*case, id=f"{case[0].name}-{case[1]}") for case in cases()]
)


@EACH
def test_a_folder_that_was_opened_before_is_refused_by_the_name_of_its_lost_file(
    folder: Folder, how: str, tmp_path: Path
) -> None:
    (whole := tmp_path / "whole").mkdir()
    folder.write(whole)
    expected = documents_of(folder.spec(whole))
    for name in files_of(whole):
        damaged = shutil.copytree(whole, tmp_path / "damaged")
        spoil(damaged / name, how)
        found, message = served(folder.spec(damaged))
        assert found == expected or (found is None and Path(name).name in message), name
        shutil.rmtree(damaged)


@EACH
def test_a_folder_never_opened_is_refused_by_the_name_of_a_file_that_its_index_tells(
    folder: Folder, how: str, tmp_path: Path
) -> None:
    (whole := tmp_path / "whole").mkdir()
    folder.write(whole)
    names, expected = files_of(whole), documents_of(folder.spec(shutil.copytree(whole, tmp_path / "opened")))
    for name in names:
        damaged = shutil.copytree(whole, tmp_path / "damaged")
        spoil(damaged / name, how)
        found, message = served(folder.spec(damaged))
        if folder.is_indexed:
            stem = Path(name).name.split(".")[0]
            assert found == expected or (found is None and stem in message), name
        shutil.rmtree(damaged)
