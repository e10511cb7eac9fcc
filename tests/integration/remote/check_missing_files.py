"""The ways in which a bucket loses a file that test_missing_files.py leaves out: `make soak PART=buckets`."""

from pathlib import Path

import pytest
from tests.integration.remote.test_missing_files import CASES, FOLDERS, HOWS, lose, name_of

REST = [case for number in range(len(FOLDERS)) for how in HOWS if (case := (number, how)) not in CASES]


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize(("number", "how"), [pytest.param(*case, id=name_of(case)) for case in REST])
def test_a_bucket_without_one_of_its_files_is_refused_by_name(
    number: int, how: str, s3_process: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose(number, how, s3_process, tmp_path, monkeypatch)
