"""The cache on disk: fetched once, shared, bounded, and whole whatever happens to its users."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.integration.remote.faulty import FaultyServer, Reply
from tests.integration.remote.setting import quick_options

from penstock.core import clock, env
from penstock.core.errors import CorpusError
from penstock.storage import page_fetcher
from penstock.storage.base import storage_of
from penstock.storage.cache import cache_of
from penstock.storage.cache_region import PAGE_BYTES, Region
from penstock.storage.options import RemoteOptions
from penstock.storage.remote import RemoteStorage

CONTENT = np.random.default_rng(0).bytes(6_000_001)

READER = """
    import faulthandler, random, sys
    from pathlib import Path
    from penstock.storage.base import storage_of
    from penstock.storage.options import RemoteOptions

    faulthandler.dump_traceback_later(180, exit=True)  # one that hangs says where, and ends
    url, cache, seed, limit, rounds = sys.argv[1:6]
    content = Path(sys.argv[6]).read_bytes()
    options = RemoteOptions(cache_folder=Path(cache), cache_bytes=int(limit))
    blob = storage_of(url, options).open("object")
    choose = random.Random(int(seed))
    print("ready", flush=True)
    for _ in range(int(rounds)):
        start = choose.randrange(len(content))
        stop = min(len(content), start + choose.randrange(300_000))
        assert blob.read(start, stop) == content[start:stop]
"""


@pytest.fixture
def web(web: FaultyServer) -> FaultyServer:
    (web.origin / "object").write_bytes(CONTENT)
    return web


def reader(web: FaultyServer, cache: Path, *, seed: int, rounds: int, limit: int = 2**30) -> subprocess.Popen:
    arguments = [web.url, str(cache), str(seed), str(limit), str(rounds), str(web.origin / "object")]
    command = [sys.executable, "-c", textwrap.dedent(READER), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> None:
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def test_an_array_is_fetched_where_it_is_sliced_and_once(web: FaultyServer, options: RemoteOptions) -> None:
    blob = storage_of(web.url, options).open("object")
    array = blob.array("<u2", offset=7, count=2_999_997)
    expected = np.frombuffer(CONTENT[7:], "<u2")[:2_999_997]
    assert len(array) == 2_999_997
    assert web.traffic.body_bytes == 0
    assert (array[1_000_000:1_000_100] == expected[1_000_000:1_000_100]).all()
    assert web.traffic.body_bytes == options.read_around_bytes  # an aligned window
    for _ in range(2):
        assert (array[:] == expected).all()
        assert array[10:10].tolist() == array[20:10].tolist() == []
        assert array[-5:].tolist() == expected[-5:].tolist()
    # The window around the first read is not fetched again, but for the page that both ends share.
    assert len(CONTENT) <= web.traffic.body_bytes + 7 <= len(CONTENT) + PAGE_BYTES
    with pytest.raises(IndexError):
        array[::2]
    with pytest.raises(ValueError, match="read-only"):
        array[0:1][0] = 1


def test_a_slice_inside_a_region_is_not_copied(web: FaultyServer, options: RemoteOptions) -> None:
    array = storage_of(web.url, options).open("object").array(np.uint8, offset=0, count=len(CONTENT))
    assert np.shares_memory(array[100:200], array[150:160])
    assert not np.shares_memory(array[2**20 - 10 : 2**20 + 10], array[2**20 - 10 : 2**20 + 10])


def test_spans_of_several_arrays_are_the_bytes_that_lie_there(
    web: FaultyServer, options: RemoteOptions
) -> None:
    blob = storage_of(web.url, options).open("object")
    places = {1: ("<u2", 7, 2_000_000), 5: ("<u4", 16, 1_400_000)}
    near = {
        name: np.frombuffer(CONTENT, dtype, offset=at, count=count)
        for name, (dtype, at, count) in places.items()
    }
    far = {name: blob.array(dtype, offset=at, count=count) for name, (dtype, at, count) in places.items()}
    choose = random.Random(0)
    starts = [(choose.choice([1, 5]), choose.randrange(1_390_000)) for _ in range(400)]
    spans = [(name, start, start + choose.choice([0, 1, 700, 9_000])) for name, start in starts]
    expected = [near[name][start:stop].tobytes() for name, start, stop in spans]
    for _ in range(2):  # fetched, and then from whole regions
        assert [view.tobytes() for view in far[1].views(far, spans)] == expected
        blob.read(0, len(CONTENT))


def test_reading_past_the_end_is_an_error(web: FaultyServer, options: RemoteOptions) -> None:
    blob = storage_of(web.url, options).open("object")
    with pytest.raises(CorpusError, match="has 6000001 bytes, but bytes 0 to 6000002 are needed"):
        blob.read(0, 6_000_002)
    with pytest.raises(CorpusError, match="but bytes 8 to 6000008 are needed"):
        blob.array("<u4", offset=8, count=1_500_000)


def test_a_whole_object_is_a_local_file(web: FaultyServer, options: RemoteOptions) -> None:
    blob = storage_of(web.url, options).open("object")
    path = blob.path()
    assert path.read_bytes() == CONTENT
    requests = len(web.traffic.requests)
    assert blob.path() == path
    assert len(web.traffic.requests) == requests
    assert not list(options.cache_folder.rglob("*.tmp"))


def test_threads_that_want_the_same_bytes_fetch_them_once(web: FaultyServer, options: RemoteOptions) -> None:
    blob = storage_of(web.url, options).open("object")
    web.traffic.clear()
    web.delay_s = 0.05
    wrong: list[int] = []

    def read(start: int) -> None:
        if blob.read(start, start + 500_000) != CONTENT[start : start + 500_000]:
            wrong.append(start)

    threads = [threading.Thread(target=read, args=(start,)) for start in range(0, 4_000_000, 250_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert web.traffic.body_bytes <= 4_250_000 + 2 * options.read_around_bytes


def test_what_is_fetched_ahead_is_exact_bounded_and_not_fetched_again(
    web: FaultyServer, tmp_path: Path
) -> None:
    options = quick_options(tmp_path / "cache", max_in_flight=3)
    blob = storage_of(web.url, options).open("object")
    web.traffic.clear()
    web.delay_s = 0.02
    ranges = [(start, start + 3 * PAGE_BYTES) for start in range(PAGE_BYTES, 3_000_000, 50 * PAGE_BYTES)]
    for start, stop in ranges:
        blob.fetch_ahead(start, stop)
    total = sum(stop - start for start, stop in ranges)
    while web.traffic.body_bytes < total or web.traffic.in_flight:
        clock.sleep(0.001)
    for start, stop in ranges:
        assert blob.read(start, stop) == CONTENT[start:stop]
    assert web.traffic.body_bytes == total
    assert web.traffic.most_in_flight <= 3


def test_processes_share_one_cache_and_fetch_each_page_about_once(web: FaultyServer, tmp_path: Path) -> None:
    web.delay_s = 0.01
    readers = [reader(web, tmp_path / "cache", seed=seed, rounds=60) for seed in range(3)]
    for process in readers:
        finish(process)
    # A claim is a hint: who is interrupted between the look and the claim fetches a page again, on a busy
    # machine more than once. Readers that know nothing of each other fetch nearly three times the content.
    assert web.traffic.body_bytes < 1.5 * len(CONTENT)


@pytest.mark.timeout(60)  # it waited for ever
def test_what_another_process_brings_between_two_looks_is_not_waited_for(
    web: FaultyServer, options: RemoteOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = storage_of(web.url, options).open("object")
    other = RemoteStorage(web.url, quick_options(options.cache_folder, cache_bytes=2**29)).open("object")
    look, at_first = page_fetcher._missing, iter([True])

    def interrupted(held: dict[int, Region], pages: range) -> list[int]:
        found = look(held, pages)
        if next(at_first, False):
            assert other.read(0, 10) == CONTENT[:10]
        return found

    monkeypatch.setattr(page_fetcher, "_missing", interrupted)
    assert blob.read(0, 10) == CONTENT[:10]


def test_a_cache_serves_the_next_process_without_a_request_for_bytes(
    web: FaultyServer, options: RemoteOptions
) -> None:
    storage_of(web.url, options).open("object").read(0, len(CONTENT))
    web.traffic.clear()
    finish(reader(web, options.cache_folder, seed=1, rounds=20))
    assert web.traffic.body_bytes == 0


def test_readers_killed_at_random_moments_leave_a_cache_that_serves_only_the_truth(
    web: FaultyServer, tmp_path: Path
) -> None:
    cache, choose = tmp_path / "cache", random.Random(0)
    web.delay_s = 0.002
    for seed in range(5):
        process = reader(web, cache, seed=seed, rounds=10_000)
        assert process.stdout is not None
        process.stdout.readline()
        clock.sleep(choose.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    blob = storage_of(web.url, quick_options(cache)).open("object")
    assert blob.read(0, len(CONTENT)) == CONTENT


def test_a_claim_of_a_dead_process_holds_no_one_up(web: FaultyServer, options: RemoteOptions) -> None:
    web.fault = lambda request: "stall" if request.method == "GET" else None
    process = reader(web, options.cache_folder, seed=0, rounds=1)
    while not any(request.method == "GET" for request in web.traffic.of("object")):
        clock.sleep(0.01)
    process.kill()
    process.communicate()
    web.fault = lambda _request: None
    blob = storage_of(web.url, replace(options, stall_timeout_s=60.0)).open("object")
    began = clock.monotonic()
    assert blob.read(0, len(CONTENT)) == CONTENT
    assert clock.monotonic() - began < 20  # against a wait without end, not a measure of speed


def test_a_live_claim_is_waited_for(web: FaultyServer, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    web.delay_s = 0.5
    process = reader(web, cache, seed=0, rounds=1)
    while not any(request.method == "GET" for request in web.traffic.of("object")):
        clock.sleep(0.01)
    claimed = web.traffic.of("object")[-1].range
    assert claimed is not None
    start, stop = map(int, claimed.removeprefix("bytes=").split("-"))
    blob = storage_of(web.url, quick_options(cache)).open("object")
    web.traffic.clear()
    assert blob.read(start, stop) == CONTENT[start:stop]
    assert not [request for request in web.traffic.requests if request.range == claimed]
    finish(process)


def test_damaged_pages_are_fetched_again_after_a_boot(
    web: FaultyServer,
    options: RemoteOptions,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage_of(web.url, options).open("object").read(0, len(CONTENT))
    files = sorted(path for path in options.cache_folder.rglob("*") if path.is_file())
    assert len(files) == 6
    with files[0].open("r+b") as file:  # a bit on disk
        file.seek(PAGE_BYTES + 5_000)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    with files[1].open("r+b") as file:  # a file cut short
        file.truncate(10_000)
    files[2].write_bytes(b"something else altogether" * 10)
    files[3].unlink()
    web.traffic.clear()
    monkeypatch.setattr(env, "boot_id", lambda: "the next one")
    again = RemoteStorage(web.url, quick_options(options.cache_folder, cache_bytes=2**29)).open("object")
    assert again.read(0, len(CONTENT)) == CONTENT
    assert "in the cache is damaged" in caplog.text
    assert web.traffic.body_bytes == 3 * 2**20 + PAGE_BYTES


def test_the_disk_it_takes_is_bounded(web: FaultyServer, tmp_path: Path) -> None:
    limit, cache = 3 * 2**20, tmp_path / "cache"
    options = quick_options(cache, cache_bytes=limit)
    blob = storage_of(web.url, options).open("object")
    array = blob.array(np.uint8, offset=0, count=len(CONTENT))
    held = []
    for start in range(0, len(CONTENT), 100_000):
        held.append((start, array[start : start + 100_000]))
        assert disk_bytes(cache) <= limit
    for start, view in held:  # what is in use stays readable, evicted or not
        assert view.tobytes() == CONTENT[start : start + 100_000]


def test_what_was_evicted_takes_no_disk_when_no_one_holds_it(web: FaultyServer, tmp_path: Path) -> None:
    options = quick_options(tmp_path / "cache", cache_bytes=3 * 2**20)
    blob = storage_of(web.url, options).open("object")
    array = blob.array(np.uint8, offset=0, count=len(CONTENT))
    for start in range(0, len(CONTENT), 50_000):
        array.views({0: array}, [(0, start, min(start + 50_000, len(CONTENT)))])
    cache_of(options).sweep()
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert not [line for line in maps if str(tmp_path) in line and "(deleted)" in line]


def test_processes_together_keep_the_bound(web: FaultyServer, tmp_path: Path) -> None:
    limit, cache = 4 * 2**20, tmp_path / "cache"
    readers = [reader(web, cache, seed=seed, rounds=40, limit=limit) for seed in range(3)]
    most = 0
    while any(process.poll() is None for process in readers):
        try:
            most = max(most, disk_bytes(cache))
        except FileNotFoundError:  # evicted while it was counted
            continue
        clock.sleep(0.002)
    for process in readers:
        finish(process)
    assert 0 < most <= limit


def test_what_is_needed_soonest_is_kept(web: FaultyServer, tmp_path: Path) -> None:
    options = quick_options(tmp_path / "cache", cache_bytes=4 * 2**20)
    storage = storage_of(web.url, options)
    blob = storage.open("object")
    array = blob.array(np.uint8, offset=0, count=len(CONTENT))
    array.next_use = lambda starts, _stops: starts.astype(float)  # the start of the object is needed first
    for start in range(0, len(CONTENT), 100_000):
        array[start : start + 100_000]
    cache_of(options).sweep()
    kept = sorted(path.name for path in options.cache_folder.rglob("*") if path.is_file())
    assert kept[:3] == ["00000000", "00000001", "00000002"]


def test_temporary_files_of_dead_processes_are_removed(web: FaultyServer, options: RemoteOptions) -> None:
    blob = storage_of(web.url, options).open("object")
    blob.read(0, 10)
    folder = next(path for path in options.cache_folder.rglob("*") if path.is_file()).parent
    dead, alive = folder / ".whole-object.999999-1.tmp", folder / f".whole-object.{os.getpid()}-1.tmp"
    of_nfs = folder / ".nfs00000000deleted0001"  # what was deleted while it was mapped
    for path in (dead, alive, of_nfs):
        path.write_bytes(b"half")
    cache_of(options).sweep()
    assert not dead.exists()
    assert alive.exists()
    assert of_nfs.exists()


def test_a_cache_that_cannot_be_written_is_an_error_with_the_remedy(
    web: FaultyServer, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    blob = storage_of(web.url, quick_options(tmp_path / "file")).open("object")
    with pytest.raises(CorpusError, match=r"cannot be written: .* set PENSTOCK_CACHE to another folder"):
        blob.read(0, 10)


def test_a_failed_fetch_leaves_no_claim(web: FaultyServer, options: RemoteOptions) -> None:
    blob = storage_of(web.url, options).open("object")
    web.fault = lambda _request: Reply(404, b"gone")
    with pytest.raises(CorpusError):
        blob.read(0, 10)
    web.fault = lambda _request: None
    finish(reader(web, options.cache_folder, seed=0, rounds=5))
