"""Corpora of an S3 server and a web server through the loader: the same batches, no byte more than needed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.integration.remote.faulty import FaultyServer, Reply, Request
from tests.integration.remote.setting import upload

from penstock.core.errors import ConfigError, CorpusError
from penstock.data import Loader, open_corpus
from penstock.storage.base import storage_of
from penstock.storage.block_checksums import write_block_checksums
from penstock.testing.corpora import numbered_corpus

# 32 pools of 16 blocks of 16 rows of 256 tokens: 8 lanes, so that 8 ranks have one each.
LENGTH, BATCH, NUM_TOKENS = 256, 64, 32 * 16 * 16 * 256
LENGTHS = np.random.default_rng(0).integers(0, 800, 8_000)
LENGTHS = LENGTHS[np.cumsum(LENGTHS) <= NUM_TOKENS].tolist()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 2 million tokens in four shards, 8 MB."""
    folder = tmp_path_factory.mktemp("far") / "corpus"
    lengths = [*LENGTHS, NUM_TOKENS - sum(LENGTHS)]
    return numbered_corpus(folder, lengths, documents_per_shard=-(-len(lengths) // 4))


@pytest.fixture(scope="session")
def address(folder: Path, s3_process: str) -> str:
    return upload(folder, s3_url=s3_process, bucket="corpora", prefix="some/web")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PENSTOCK_CACHE_BYTES", "1GiB")
    return tmp_path / "cache"


def loader(place: str | Path, *, rank: int = 0, world_size: int = 1, **changes: object) -> Loader:
    return Loader(
        {"web": str(place)},
        sequence_length=LENGTH,
        global_batch_size=BATCH,
        rank=rank,
        world_size=world_size,
        deliver="numpy",
        **({"epochs": {"web": 1}, "num_workers": 0} | changes),
    )


def epoch(made: Loader) -> Iterator[dict[str, np.ndarray]]:
    return (made.batch_at(step) for step in range(NUM_TOKENS // LENGTH // BATCH))


@pytest.mark.usefixtures("s3")
def test_a_corpus_in_a_bucket_is_the_one_on_disk(address: str, folder: Path) -> None:
    far, near = loader(address), loader(folder)
    assert far.corpora["web"].fingerprint == near.corpora["web"].fingerprint
    for ours, theirs in zip(epoch(far), epoch(near), strict=True):
        assert (ours["input_ids"] == theirs["input_ids"]).all()
        assert (ours["labels"] == theirs["labels"]).all()


def test_a_corpus_on_a_web_server_is_the_one_on_disk(web: FaultyServer, folder: Path) -> None:
    web.origin = folder
    write_block_checksums(folder, [path.name for path in sorted(folder.glob("*.arrow"))])
    try:
        far = open_corpus(web.url).tokens(0, NUM_TOKENS)
    finally:
        (folder / "blocks.checksums").unlink()
    assert (far == np.arange(1, NUM_TOKENS + 1)).all()


def test_opening_reads_the_manifest_and_the_first_batch_the_blocks_it_needs(
    s3: FaultyServer, address: str, folder: Path
) -> None:
    made = loader(address, world_size=8)
    asked = {request.path.rpartition("/")[2] for request in s3.traffic.requests}
    assert asked == {"manifest.json", "blocks.checksums"}  # the second is not there
    assert s3.traffic.body_bytes == (folder / "manifest.json").stat().st_size
    made.batch_at(0)
    # One lane of eight: its pool is a 32nd of the corpus, and the lane's next pool may be on its way.
    total = sum(path.stat().st_size for path in folder.glob("*.arrow"))
    assert s3.traffic.body_bytes < 0.25 * total


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_ranks_of_one_machine_fetch_the_corpus_once(s3: FaultyServer, address: str, ranks: int) -> None:
    served = 0
    for rank in range(ranks):
        served += sum(
            batch["input_ids"].size for batch in epoch(loader(address, rank=rank, world_size=ranks))
        )
    assert served == NUM_TOKENS
    assert s3.traffic.body_bytes < 1.05 * 4 * NUM_TOKENS


def test_an_epoch_survives_a_store_that_fails_every_tenth_request(
    s3: FaultyServer, address: str, folder: Path
) -> None:
    faults = ["reset", Reply(500, b"an accident"), "truncate", Reply(503, b"SlowDown")]

    def fault(request: Request) -> object:
        return faults[request.index // 10 % 4] if request.index % 10 == 9 and not request.attempt else None

    s3.fault = fault
    sums = [int(batch["input_ids"].sum()) for batch in epoch(loader(address, world_size=4))]
    s3.fault = lambda _request: None
    assert sums == [int(batch["input_ids"].sum()) for batch in epoch(loader(folder, world_size=4))]


@pytest.mark.usefixtures("s3")
def test_a_loader_with_threads_leaves_none_behind(address: str) -> None:
    batches = iter(loader(address, num_workers=2))
    next(batches)
    batches.close()


@pytest.mark.usefixtures("s3")
def test_a_bucket_without_the_corpus_is_an_error_that_names_it(address: str) -> None:
    with pytest.raises(CorpusError, match="some/nothing"):
        open_corpus(address.replace("web", "nothing"))


def test_a_corpus_that_is_forbidden_is_an_error_with_the_remedy(web: FaultyServer, folder: Path) -> None:
    web.origin = folder
    web.fault = lambda _request: Reply(403, b"")
    with pytest.raises(CorpusError, match="Check the rights"):
        open_corpus(web.url)


def test_a_name_in_a_manifest_cannot_lead_elsewhere(web: FaultyServer, folder: Path) -> None:
    manifest = (folder / "manifest.json").read_text()
    (web.origin / "manifest.json").write_text(manifest.replace("shard-00000", "../shard-00000"))
    with pytest.raises(CorpusError, match="names a shard outside the corpus"):
        open_corpus(web.url).tokens(0, 1)


def test_plain_http_to_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="Plain http"):
        open_corpus("http://192.0.2.1/corpus")


@pytest.mark.usefixtures("s3")
def test_a_bucket_is_listed_and_a_web_server_is_asked_for_its_manifest(
    web: FaultyServer, address: str, folder: Path
) -> None:
    web.origin = folder
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    assert storage_of(address).sizes() == sizes
    assert storage_of(web.url).sizes() == sizes


def test_the_tokenizer_is_fetched_when_it_is_asked_for(web: FaultyServer, folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text()) | {"tokenizer": "0" * 64}
    (web.origin / "manifest.json").write_text(json.dumps(manifest))
    (web.origin / "tokenizer.json").write_text("a tokenizer")
    corpus = open_corpus(web.url)
    assert not web.traffic.of("tokenizer.json")
    assert corpus.tokenizer_path is not None
    assert corpus.tokenizer_path.read_text() == "a tokenizer"


def test_the_client_is_loaded_when_an_address_is_opened_and_not_before() -> None:
    code = "import sys, penstock.data, penstock.storage.remote; sys.exit('obstore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
