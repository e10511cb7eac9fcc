"""Servers for these tests: a web server of a folder, and the S3 server of moto in a process of its own."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from tests.integration.remote.faulty import FaultyServer, serving
from tests.integration.remote.processes import answering
from tests.integration.remote.setting import quick_options
from tests.ports import free_port

from penstock.storage.options import RemoteOptions


@pytest.fixture
def web(tmp_path: Path) -> Iterator[FaultyServer]:
    """A web server of the folder `web` of the test."""
    folder = tmp_path / "web"
    folder.mkdir()
    with serving(folder) as server:
        yield server


@pytest.fixture
def options(tmp_path: Path) -> RemoteOptions:
    """A cache of the test's own, and the patience of a test."""
    return quick_options(tmp_path / "cache")


@pytest.fixture(scope="session")
def s3_process() -> Iterator[str]:
    """The address of an S3 server that ends with the session."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with answering(command, lambda: urlopen(f"{url}/moto-api/", timeout=5).close()):
        yield url


@pytest.fixture
def s3(s3_process: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """A server before the S3 server that counts and spoils requests; the environment leads to it."""
    with serving(s3_process) as server:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
        yield server
