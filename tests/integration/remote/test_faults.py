"""What stores and networks do wrong: survived where it passes, named where it does not."""

import gc
import itertools
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.integration.remote.faulty import Fault, FaultyServer, Reply, Request
from tests.integration.remote.setting import quick_options

from penstock.core import clock
from penstock.core.errors import CorpusChanged, CorpusError
from penstock.storage.base import storage_of
from penstock.storage.block_checksums import FILE as CHECKSUMS
from penstock.storage.block_checksums import write_block_checksums
from penstock.storage.options import RemoteOptions

CONTENT = np.random.default_rng(0).bytes(1_500_000)


@pytest.fixture
def web(web: FaultyServer) -> FaultyServer:
    (web.origin / "object").write_bytes(CONTENT)
    return web


def first_times(count: int, fault: Fault):
    """A fault at the first attempts of every request."""
    return lambda request: fault if request.attempt < count else None


@pytest.mark.parametrize(
    "fault",
    [
        "reset",
        "truncate",
        "stall",
        "short",
        Reply(500, b"an accident"),
        Reply(503, b"slow down"),
        Reply(408, b"too late"),
    ],
    ids=lambda fault: fault if isinstance(fault, str) else str(fault.status),
)
def test_a_fault_that_passes_is_survived(web: FaultyServer, options: RemoteOptions, fault: Fault) -> None:
    web.fault = first_times(1 if fault == "stall" else 2, fault)
    blob = storage_of(web.url, replace(options, stall_timeout_s=0.3)).open("object")
    assert blob.read(1_000, 1_400_000) == CONTENT[1_000:1_400_000]


def test_every_request_fails_at_random_and_every_byte_arrives(web: FaultyServer, tmp_path: Path) -> None:
    kinds = itertools.cycle(["reset", None, "truncate", Reply(500), None, "short", Reply(429), None])
    web.fault = lambda _request: next(kinds)
    storage = storage_of(web.url, quick_options(tmp_path / "cache", max_request_bytes=2**16))
    blob = storage.open("object")
    for start in range(0, len(CONTENT), 100_000):
        assert blob.read(start, start + 90_000) == CONTENT[start : start + 90_000]


def test_a_server_that_says_when_to_come_back_is_left_alone_until_then(
    web: FaultyServer, options: RemoteOptions
) -> None:
    opened = storage_of(web.url, options).open("object")
    began: list[float] = []

    def busy(_request: Request) -> Fault:
        began.append(clock.monotonic())
        return Reply(429, b"busy", {"Retry-After": "1"}) if began[-1] - began[0] < 0.9 else None

    web.traffic.clear()
    web.fault = busy
    assert opened.read(0, 100) == CONTENT[:100]
    methods = [request.method for request in web.traffic.of("object")]
    assert methods == ["GET", "HEAD", "GET"]  # its own waits would be 0.05 s at most: a score of requests


def test_wrong_bytes_are_found_by_the_corpus_checksums_and_fetched_again(
    web: FaultyServer, options: RemoteOptions
) -> None:
    write_block_checksums(web.origin, ["object"])
    web.fault = lambda request: "flip" if request.path == "/object" and request.attempt < 2 else None
    blob = storage_of(web.url, options).open("object")
    assert blob.read(0, len(CONTENT)) == CONTENT
    assert blob.read(5, 10) == CONTENT[5:10]


def test_bytes_that_stay_wrong_are_an_error_that_names_the_object(
    web: FaultyServer, options: RemoteOptions
) -> None:
    write_block_checksums(web.origin, ["object"])
    web.fault = lambda request: "flip" if request.path == "/object" else None
    blob = storage_of(web.url, options).open("object")
    with pytest.raises(CorpusError, match=r"/object cannot be read after 4 attempts.*have wrong check"):
        blob.read(0, 100)


def test_checksums_of_another_upload_are_refused(web: FaultyServer, options: RemoteOptions) -> None:
    write_block_checksums(web.origin, ["object"])
    (web.origin / "object").write_bytes(CONTENT[:-1])
    with pytest.raises(CorpusError, match=r"object has 1499999 bytes, .*blocks.checksums says 1500000"):
        storage_of(web.url, options).open("object")


def test_damaged_checksums_are_an_error(web: FaultyServer, options: RemoteOptions) -> None:
    (web.origin / CHECKSUMS).write_bytes(b"PNSTKCK1 and nothing more")
    with pytest.raises(CorpusError, match=r"blocks.checksums is damaged"):
        storage_of(web.url, options).open("object")


@pytest.mark.parametrize(
    ("status", "advice"),
    [(404, "Check the address"), (403, "Check the rights"), (401, "Check the rights"), (400, "Check the ad")],
)
def test_what_will_not_pass_is_said_at_once_with_the_object_and_the_way_out(
    web: FaultyServer, options: RemoteOptions, status: int, advice: str
) -> None:
    web.fault = lambda _request: Reply(status, b"no")
    with pytest.raises(
        CorpusError, match=rf"/object cannot be read after 1 attempt: .*\b{status}\b.*{advice}"
    ):
        storage_of(web.url, options).open("object")
    assert len(web.traffic.requests) == 1


def test_a_server_that_never_recovers_is_an_error_at_the_deadline(web: FaultyServer, tmp_path: Path) -> None:
    web.fault = lambda _request: Reply(500, b"broken")
    options = quick_options(tmp_path / "cache", deadline_s=0.2)
    expected = rf"{web.url}/object cannot be read after \d+ attempts in 0 s: .*500.*Check the network"
    with pytest.raises(CorpusError, match=expected):
        storage_of(web.url, options).open("object")


def test_no_server_at_all_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    options = quick_options(tmp_path / "cache", deadline_s=0.2)
    with pytest.raises(CorpusError, match=r"cannot be read after .* attempts"):
        storage_of("http://127.0.0.1:9/corpus", options).open("object")


def test_a_server_without_ranges_is_named(web: FaultyServer, options: RemoteOptions) -> None:
    blob = storage_of(web.url, options).open("object")
    web.fault = lambda _request: Reply(200, CONTENT)
    with pytest.raises(CorpusError, match="must answer range requests"):
        blob.read(0, 100)


@pytest.mark.parametrize("etags", [True, False])
def test_an_object_that_is_replaced_while_it_is_read_is_noticed(
    web: FaultyServer, options: RemoteOptions, etags: bool
) -> None:
    web.etags = etags
    blob = storage_of(web.url, options).open("object")
    blob.read(0, 100)
    longer = CONTENT if etags else CONTENT + b"more"  # without ETags only a change of size shows
    (web.origin / "object").write_bytes(longer[::-1])
    with pytest.raises(CorpusChanged, match="/object was replaced while it was being read"):
        blob.read(1_000_000, 1_000_100)


def test_an_object_that_was_replaced_between_two_runs_is_not_served_from_the_cache(
    web: FaultyServer, options: RemoteOptions
) -> None:
    assert storage_of(web.url, options).open("object").read(0, 100) == CONTENT[:100]
    (web.origin / "object").write_bytes(CONTENT[::-1])
    assert storage_of(web.url, options).open("object").read(0, 100) == CONTENT[::-1][:100]


def test_content_without_identity_is_not_shared_between_openings(
    web: FaultyServer, options: RemoteOptions
) -> None:
    web.etags = False
    for content in (CONTENT, CONTENT[::-1]) * 20:
        gc.collect()  # so that an opening gets the address of an earlier one
        (web.origin / "object").write_bytes(content)
        assert storage_of(web.url, options).open("object").read(0, 100) == content[:100]


def test_a_failure_ahead_of_use_is_told_when_the_bytes_are_read(
    web: FaultyServer, options: RemoteOptions
) -> None:
    blob = storage_of(web.url, options).open("object")
    web.fault = lambda _request: Reply(404, b"gone")
    blob.fetch_ahead(0, 1_000_000)
    with pytest.raises(CorpusError, match="cannot be read"):
        blob.read(0, 100)
    web.fault = lambda _request: None
    assert blob.read(0, 100) == CONTENT[:100]


def test_neither_signatures_nor_keys_reach_the_log_or_the_error(
    web: FaultyServer, options: RemoteOptions, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    moved = Reply(302, b"", {"Location": "http://127.0.0.1:9/object?X-Amz-Signature=secret"})
    web.fault = lambda _request: moved
    with pytest.raises(CorpusError) as caught:
        storage_of(web.url, quick_options(options.cache_folder, deadline_s=0.1)).open("object")
    assert "secret" not in str(caught.value) + caplog.text


def test_a_forked_process_is_told_to_be_started_otherwise(web: FaultyServer, options: RemoteOptions) -> None:
    blob = storage_of(web.url, options).open("object")
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        try:
            blob.read(0, 100)
        except CorpusError as error:
            os.write(sending, str(error).encode())
        finally:
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as told:
        message = told.read().decode()
    os.waitpid(child, 0)
    assert "before this process was forked" in message
    assert "forkserver" in message


def test_a_missing_package_is_an_error_with_the_command(
    web: FaultyServer, options: RemoteOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    with pytest.raises(CorpusError, match=r"needs the package obstore. pip install 'penstock\[remote\]'"):
        storage_of(web.url, options).open("object")


def test_a_program_that_ends_does_not_wait_for_a_store_that_is_gone(tmp_path: Path) -> None:
    code = f"""
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from penstock.core.errors import CorpusError
from penstock.storage.base import storage_of
from penstock.storage.options import RemoteOptions
pool = ThreadPoolExecutor()

def read():
    options = RemoteOptions(cache_folder=Path({str(tmp_path)!r}), deadline_s=3600.0, first_delay_s=3600.0)
    try:
        storage_of("http://127.0.0.1:9", options).open("object")
    except CorpusError as error:
        print("given up:", error)

pool.submit(read)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "given up: http://127.0.0.1:9/object cannot be read after 1 attempt" in done.stdout
