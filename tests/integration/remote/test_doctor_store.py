"""What `penstock doctor --store` does to an object store: little, and nothing stays."""

from pathlib import Path

import pytest
from tests.integration.remote.setting import lead_to, upload

from penstock.core.errors import PenstockError, UsageError
from penstock.doctor.checks import object_store
from penstock.doctor.checks.check import CheckOptions, Level
from penstock.storage.base import storage_of
from penstock.storage.options import RemoteOptions


@pytest.fixture
def bucket(s3_process: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket; the environment leads to its server."""
    lead_to(s3_process, monkeypatch)
    monkeypatch.setattr(object_store, "_OBJECT_BYTES", 2**16)
    monkeypatch.setattr(object_store, "_MAX_OBJECTS", 4)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine").write_text("of the user")
    return upload(tmp_path / "here", s3_url=s3_process, bucket="doctor", prefix=tmp_path.name)


def test_a_store_is_written_and_read_and_left_as_it_was(bucket: str, tmp_path: Path) -> None:
    facts = object_store.measure(CheckOptions(folder=tmp_path, store=bucket))
    assert facts is not None
    assert min(facts.written_bytes_s, facts.read_bytes_s, facts.first_byte_s) > 0
    assert next(object_store.judge(facts)).level is Level.GREEN
    left = storage_of(bucket, RemoteOptions(cache_folder=tmp_path / "cache")).sizes()
    assert left == {"mine": len("of the user")}


@pytest.mark.usefixtures("bucket")
def test_a_bucket_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match=r"s3://no-such-bucket/x: .*"):
        object_store.measure(CheckOptions(folder=tmp_path, store="s3://no-such-bucket/x"))


def test_a_web_server_is_not_written_to(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--store must be an object store that can be written .* s3://"):
        object_store.measure(CheckOptions(folder=tmp_path, store="https://example.org/x"))
