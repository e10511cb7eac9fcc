"""What tests of remote corpora share: impatient options, and objects put into a bucket."""

import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from penstock.storage.options import RemoteOptions


def quick_options(cache_folder: Path, **changes: object) -> RemoteOptions:
    values: dict[str, object] = {
        "cache_folder": cache_folder,
        "cache_bytes": 2**30,
        "stall_timeout_s": 10.0,
        "request_timeout_s": 30.0,
        "first_delay_s": 0.01,
        "max_delay_s": 0.05,
        "deadline_s": 100.0,
    }
    return RemoteOptions(**(values | changes))  # type: ignore[arg-type]


def upload(folder: Path, *, s3_url: str, bucket: str, prefix: str) -> str:
    """Put the files of a folder into a bucket of a test server; return their address."""
    import obstore

    made = urllib.request.Request(f"{s3_url}/{bucket}", method="PUT")
    urllib.request.urlopen(made, timeout=60).close()
    store = bucket_store(s3_url, bucket)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            obstore.put(store, f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return f"s3://{bucket}/{prefix}"


def bucket_store(s3_url: str, bucket: str) -> Any:  # Any: loaded where it is needed
    from obstore.store import S3Store

    return S3Store(
        bucket,
        endpoint=s3_url,
        region="us-east-1",
        access_key_id="test-key",
        secret_access_key="test-secret",
        client_options={"allow_http": True},
    )


def lead_to(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the environment, and processes started from here, lead to a server of S3's protocol."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_url)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
