"""What is known of the future is used: pools come ahead of their rows, and once a rank."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.integration.remote.faulty import FaultyServer
from tests.launched import wait_until

from penstock.core import clock
from penstock.core.files import checksum
from penstock.data import Loader
from penstock.data.corpus.manifest import Manifest, ShardEntry, save_manifest
from penstock.data.formats.arrow import write_shard
from penstock.data.lookahead import Lookahead

# 32 pools of 16 blocks of 16 rows: 8 lanes. A block is 64 KiB of uint16 tokens: 16 pages, and 17 are touched.
LENGTH, NUM_TOKENS, SHARDS = 2048, 32 * 16 * 16 * 2048, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("far")
    entries = []
    for index in range(SHARDS):
        path = folder / f"{index}.arrow"
        tokens = (np.arange(NUM_TOKENS // SHARDS) * 31 % 60_000).astype(np.uint16)
        write_shard(path, tokens, np.arange(0, len(tokens) + 1, 512))
        entry = {"tokens": len(tokens), "documents": len(tokens) // 512, "bytes": path.stat().st_size}
        entries.append(ShardEntry(name=path.name, checksum=checksum(path), **entry))
    save_manifest(folder, Manifest(format="arrow", dtype="uint16", vocab_size=60_000, shards=tuple(entries)))
    return folder


@pytest.fixture
def address(web: FaultyServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PENSTOCK_CACHE_BYTES", "1GiB")
    web.origin = folder
    return web.url


def loader(address: str, *, rank: int = 0, world_size: int = 1, **changes: object) -> Loader:
    return Loader(
        {"web": address},
        sequence_length=LENGTH,
        global_batch_size=64,
        rank=rank,
        world_size=world_size,
        deliver="numpy",
        num_workers=0,
        **({"epochs": {"web": 1}} | changes),
    )


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_ranks_with_caches_of_their_own_fetch_little_more_than_they_serve(
    web: FaultyServer, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    served = 0
    for rank in range(ranks):
        monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / str(rank)))
        made = loader(address, rank=rank, world_size=ranks)
        served += sum(made.batch_at(step)["input_ids"].size for step in range(NUM_TOKENS // LENGTH // 64))
    assert served == NUM_TOKENS
    # 17 pages for 16 at each block, and every rank reads the whole index.
    assert web.traffic.body_bytes < 1.2 * 2 * NUM_TOKENS


def test_ranks_that_swap_rows_fetch_their_documents_and_not_their_pools(
    web: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows cost as much as their documents are long, so some leave the rank of their lane."""
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(6.3, 1.2, 2 * NUM_TOKENS // 1000)).astype(
        np.int64
    )
    ends = np.cumsum(lengths)
    offsets = np.concatenate(([0], ends[ends < NUM_TOKENS // 2], [NUM_TOKENS // 2]))
    (tmp_path / "far").mkdir()
    path = tmp_path / "far" / "0.arrow"
    write_shard(path, (np.arange(NUM_TOKENS // 2) % 60_000).astype(np.uint16), offsets)
    entry = {"tokens": NUM_TOKENS // 2, "documents": len(offsets) - 1, "bytes": path.stat().st_size}
    shards = (ShardEntry(name=path.name, checksum=checksum(path), **entry),)
    save_manifest(
        tmp_path / "far", Manifest(format="arrow", dtype="uint16", vocab_size=60_000, shards=shards)
    )
    web.origin = tmp_path / "far"
    monkeypatch.setenv("PENSTOCK_CACHE_BYTES", "1GiB")
    served = 0
    for rank in range(4):
        monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / str(rank)))
        made = loader(web.url, rank=rank, world_size=4)
        served += sum(made.batch_at(step)["input_ids"].size for step in range(NUM_TOKENS // LENGTH // 128))
    assert served == NUM_TOKENS // 2
    assert web.traffic.body_bytes < 1.28 * NUM_TOKENS  # 1.2 times what they fetch who swap nothing


def test_the_next_pool_of_a_lane_is_there_before_its_first_row(web: FaultyServer, address: str) -> None:
    made = loader(address, rank=3, world_size=8)
    steps = made.num_samples // 64
    for step in range(steps // 8 * 5):  # to the middle of a lane's third pool
        made.batch_at(step)
    while web.traffic.in_flight:
        clock.sleep(0.001)
    fetched = web.traffic.body_bytes
    # Four pools a lane in an epoch: two and a half are read, so three are here; the fourth is not.
    pool_bytes = 2 * NUM_TOKENS / 32
    assert 3 * pool_bytes < fetched < 3.6 * pool_bytes


def test_a_cache_smaller_than_what_is_in_use_serves_the_truth(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_BYTES", "8MiB")
    far, near = loader(address), loader(str(folder))
    for step in range(10):
        assert (far.batch_at(step)["input_ids"] == near.batch_at(step)["input_ids"]).all()
    files = (tmp_path / "cache").rglob

    def disk_bytes() -> int:
        found = 0
        for path in files("*"):
            with suppress(FileNotFoundError):  # evicted meanwhile
                found += path.stat().st_blocks * 512 if path.is_file() else 0
        return found

    assert disk_bytes() <= 2 * 8 * 2**20, "no more than what threads write at this moment is beyond it"
    # pools are still fetched ahead, and pages that threads write now are swept after that
    wait_until(lambda: disk_bytes() <= 8 * 2**20, "the cache is below its limit")


def test_nothing_is_planned_for_pools_that_are_here(
    web: FaultyServer, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = loader(address, epochs={"web": 2})
    steps = NUM_TOKENS // LENGTH // 64
    for step in range(steps):
        made.batch_at(step)
    monkeypatch.delattr(Lookahead, "_begin")
    web.traffic.clear()
    for step in range(steps, 2 * steps):
        made.batch_at(step)
    assert not web.traffic.requests


def test_boundaries_of_a_pool_are_read_side_by_side(web: FaultyServer, address: str) -> None:
    web.delay_s = 0.05
    loader(address, world_size=8).batch_at(0)
    assert web.traffic.most_in_flight > 1
