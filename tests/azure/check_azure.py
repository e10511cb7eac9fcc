"""Corpora and checkpoints in a container of Azure's, as Azurite, Microsoft's own stand-in for it, holds them.

`make soak PART=azure` runs this. No other command collects it: the server comes from npm and takes 365 MB.
"""

import base64
import hashlib
import hmac
import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from penstock.checkpoint.storage import open_place
from penstock.core.errors import CorpusError
from penstock.data import Loader, open_corpus
from penstock.testing.corpora import numbered_corpus

ROOT = Path(__file__).parent.parent.parent
SERVER = ROOT / ".azurite" / "node_modules" / ".bin" / "azurite-blob"
ACCOUNT, KEY = "penstock", base64.b64encode(b"a key of these tests alone").decode()
CONTAINER = "corpora"


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that ends with the tests, with one container."""
    assert SERVER.exists(), "install it: make .azurite"
    command = [
        str(SERVER), "--silent", "--disableTelemetry", "--skipApiVersionCheck",
        "--inMemoryPersistence", "--blobPort", "0",
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        cwd=tmp_path_factory.mktemp("azurite"),
        env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    try:
        told = (re.search(r"listens on (\S+)", line) for line in process.stdout)
        url = next((f"{found[1]}/{ACCOUNT}" for found in told if found), "")
        assert url, "the server ended"
        put(f"{url}/{CONTAINER}?restype=container", b"", {})
        yield url
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


@pytest.fixture
def container(azure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The container, with the environment that leads Azure's clients to it."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azure)
    monkeypatch.setenv("PENSTOCK_ALLOW_HTTP", "1")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return f"{azure}/{CONTAINER}"


def put(url: str, body: bytes, headers: dict[str, str]) -> None:
    """Send a request that is signed as the store asks ("Authorize with Shared Key" in its reference)."""
    parts = urlsplit(url)
    own = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02", **headers}
    signed = [
        "PUT", "", "", str(len(body) or ""), "", "application/octet-stream", "", "", "", "", "", "",
        *(f"{name}:{value}" for name, value in sorted(own.items())),
        f"/{ACCOUNT}{parts.path}", *filter(None, [parts.query.replace("=", ":")]),
    ]  # fmt: skip
    digest = hmac.digest(base64.b64decode(KEY), "\n".join(signed).encode(), hashlib.sha256)
    own |= {
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
        "Content-Type": "application/octet-stream",
    }
    urllib.request.urlopen(urllib.request.Request(url, body, own, method="PUT"), timeout=30).close()


def upload(folder: Path, *, container: str, prefix: str) -> str:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            put(f"{container}/{prefix}/{name}", path.read_bytes(), {"x-ms-blob-type": "BlockBlob"})
    return f"az://{CONTAINER}/{prefix}"


def test_an_epoch_from_azure_is_the_one_from_disk(container: str, tmp_path: Path) -> None:
    folder = numbered_corpus(tmp_path / "c", [1 + (7 * i) % 90 for i in range(400)], documents_per_shard=100)
    address = upload(folder, container=container, prefix="some/web")
    make = {"sequence_length": 64, "global_batch_size": 16, "num_workers": 0, "deliver": "numpy"}
    far, near = (Loader({"web": str(place)}, **make) for place in (address, folder))
    assert far.corpora["web"].fingerprint == near.corpora["web"].fingerprint
    for step in range(-(-near.samples_per_epoch["web"] // 16)):
        assert np.array_equal(far.batch_at(step)["input_ids"], near.batch_at(step)["input_ids"])
    assert any(path.is_file() for path in (tmp_path / "cache").rglob("*")), "it was read through the cache"


def test_files_of_another_tool_are_listed_and_read_in_azure(container: str) -> None:
    files = ROOT / "tests" / "data" / "datatrove" / "uint16"
    far, near = open_corpus(upload(files, container=container, prefix="ds")), open_corpus(files)
    assert far.manifest.num_documents == near.manifest.num_documents
    assert np.array_equal(far.tokens(0, far.num_tokens), near.tokens(0, near.num_tokens))


@pytest.mark.usefixtures("container")
def test_what_is_not_in_azure_is_named() -> None:
    with pytest.raises(CorpusError, match=f"az://{CONTAINER}/nothing"):
        open_corpus(f"az://{CONTAINER}/nothing")


def test_a_shard_that_is_missing_is_named(container: str, tmp_path: Path) -> None:
    folder = numbered_corpus(tmp_path / "c", [20] * 8, documents_per_shard=4)
    (folder / "shard-00001.arrow").unlink()
    corpus = open_corpus(upload(folder, container=container, prefix="cut"))
    with pytest.raises(CorpusError, match=f"az://{CONTAINER}/cut/shard-00001.arrow cannot be read"):
        corpus.tokens(0, corpus.num_tokens)


@pytest.mark.usefixtures("container")
def test_a_checkpoint_is_there_when_its_index_is_and_reads_back() -> None:
    place, content = open_place(f"az://{CONTAINER}/runs/one"), bytearray(range(256)) * 100_000
    place.write("step-00000002", "weights", [memoryview(content[:999]), memoryview(content[999:])])
    assert place.names() == []
    place.commit("step-00000002", b'{"files": {"weights": {}}}')
    assert place.names() == ["step-00000002"]
    assert place.size("step-00000002", "weights") == len(content)
    assert place.read("step-00000002", "weights", 900, 1100) == content[900:1100]
    place.remove("step-00000002")
    assert place.names() == place.leftovers() == []
