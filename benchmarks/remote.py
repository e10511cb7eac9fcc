"""What does it cost to train from a far corpus: bytes fetched, time to the first batch, rate cold and warm?

    PYTHONPATH=. python benchmarks/remote.py                         # a minute
    PYTHONPATH=. python benchmarks/remote.py --out benchmarks/results

Log-normal documents (median 545 tokens) in 4 shards, 33.5 million tokens, uint16, sequences of 2,048: 64
pools in 16 lanes, blocks of 64 KiB, the smallest that the loader makes of such a corpus and so the worst
case for edges. The web server is a process of this machine with no network before it, the S3 server is
moto, which is made for tests: their rates are floors for what the reading side can do, and only ratios are
of interest; of an epoch that comes from the cache alone, per CPU-second. `requests` and `amplification`
(bytes fetched / bytes of tokens served) are exact.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the faulty server of the tests

import numpy as np
from measuring import interleaved, median
from results_file import file_result
from tests.integration.remote.faulty import serving
from tests.integration.remote.setting import upload

from penstock.core import clock
from penstock.core.files import checksum
from penstock.data import Loader
from penstock.data.corpus.manifest import Manifest, ShardEntry, save_manifest
from penstock.data.formats.arrow import write_shard

LENGTH, BATCH, NUM_TOKENS, SHARDS = 2048, 64, 64 * 16 * 16 * 2048, 4
STEPS = NUM_TOKENS // LENGTH // BATCH


def make_corpus(folder):
    """Write random tokens in log-normal documents."""
    folder.mkdir()
    rng, entries, size = np.random.default_rng(0), [], NUM_TOKENS // SHARDS
    for index in range(SHARDS):
        ends = np.cumsum(np.maximum(1, rng.lognormal(6.3, 1.2, size // 500).astype(np.int64)))
        offsets = np.concatenate(([0], ends[ends < size], [size]))
        path = folder / f"shard-{index:05d}.arrow"
        write_shard(path, rng.integers(0, 60_000, size).astype(np.uint16), offsets)
        entries.append(
            ShardEntry(
                name=path.name,
                tokens=size,
                documents=len(offsets) - 1,
                bytes=path.stat().st_size,
                checksum=checksum(path),
            )
        )
    save_manifest(folder, Manifest(format="arrow", dtype="uint16", vocab_size=60_000, shards=tuple(entries)))


def open_loader(place, *, rank=0, ranks=1, epochs=1):
    """Open the corpus as one rank of several, for an epoch or more."""
    return Loader(
        {"web": str(place)},
        sequence_length=LENGTH,
        global_batch_size=BATCH,
        rank=rank,
        world_size=ranks,
        epochs={"web": epochs},
        fields=("input_ids",),
        deliver="numpy",
    )


def read_epoch(place):
    """Read an epoch; return seconds from before opening, to the first batch and to the last."""
    began = clock.monotonic()
    batches = iter(open_loader(place))
    next(batches)
    first = clock.monotonic() - began
    for _ in range(STEPS - 1):
        next(batches)
    took = clock.monotonic() - began
    batches.close()
    return first, took


def use_cache(folder):
    """Let what is opened from now on keep its pages there."""
    os.environ |= {"PENSTOCK_CACHE": str(folder), "PENSTOCK_CACHE_BYTES": "8GiB"}


def amplification(server, work, *, ranks, shared):
    """Read an epoch on each of several ranks, one after the other; return requests and bytes over tokens."""
    server.traffic.clear()
    for rank in range(ranks):
        use_cache(work / f"amplification-{ranks}-{'all' if shared else rank}-{shared}")
        loader = open_loader(server.url, rank=rank, ranks=ranks)
        for step in range(STEPS):
            loader.batch_at(step)
    return {
        "ranks": ranks,
        "caches": "one" if shared else "one a rank",
        "amplification": round(server.traffic.body_bytes / (2 * NUM_TOKENS), 3),
        "requests": len(server.traffic.requests),
    }


def first_batch(server, work, *, delay_s):
    """Return what the first batch of one of 8 ranks takes when every request takes a while."""
    server.traffic.clear()
    server.delay_s = delay_s
    use_cache(work / f"first-{delay_s}-{clock.monotonic()}")
    began = clock.monotonic()
    loader = open_loader(server.url, ranks=8)
    opened = clock.monotonic() - began
    loader.batch_at(0)
    took = clock.monotonic() - began
    requests, fetched = len(server.traffic.requests), server.traffic.body_bytes
    server.delay_s = 0.0
    return {
        "delay_ms": 1000 * delay_s,
        "open_s": round(opened, 3),
        "first_batch_s": round(took, 3),
        "requests": requests,
        "fetched_share_of_corpus": round(fetched / (2 * NUM_TOKENS), 3),
    }


def rates(places, work, *, rounds):
    """Return tokens/s of an epoch from each place, local, cold and warm, rounds taking turns."""
    found = {}
    for number in range(rounds):
        for name, place in places.items():
            use_cache(work / f"rate-{name}-{number}")
            for state in ("cold", "warm") if name != "local" else ("warm",):
                first, took = read_epoch(place)
                found.setdefault(f"{name} {state}", []).append((NUM_TOKENS / took, first))
            shutil.rmtree(work / f"rate-{name}-{number}", ignore_errors=True)
    local = float(np.median([rate for rate, _ in found["local warm"]]))
    return {
        name: {
            "tokens_per_s": round(float(np.median([rate for rate, _ in runs]))),
            "of_local": round(float(np.median([rate for rate, _ in runs])) / local, 3),
            "first_batch_s": round(float(np.median([first for _, first in runs])), 3),
        }
        for name, runs in found.items()
    }


def steady_rates(places, work, *, rounds):
    """Return tokens per CPU-second of an epoch after the first, from a cache that holds all and from files.

    Both loaders stay open and take turns; the far one's CPU time is that of its threads too.
    """
    use_cache(work / "steady")
    streams = {name: iter(open_loader(place, epochs=rounds + 2)) for name, place in places.items()}

    def epoch(batches):
        for _ in range(STEPS):
            next(batches)
        return NUM_TOKENS

    found = interleaved({name: partial(epoch, stream) for name, stream in streams.items()}, rounds=rounds)
    for stream in streams.values():
        stream.close()
    local = np.array(found["local"]["per_cpu_s"])
    return {
        name: {
            "tokens_per_cpu_s": round(median(rates["per_cpu_s"])),
            "of_local": round(median((np.array(rates["per_cpu_s"]) / local).tolist()), 3),
        }
        for name, rates in found.items()
    }


def serve(folder, pipe):
    """Serve a folder from a process of its own until told to stop."""
    with serving(Path(folder)) as server:
        pipe.send(server.url)
        pipe.recv()


def start_s3():
    """Start moto's S3 server; return its process and address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    while True:
        try:
            urlopen(f"{url}/moto-api/", timeout=5).close()
            return process, url
        except OSError:
            clock.sleep(0.05)


def use_s3(url):
    """Lead the client to the S3 server."""
    os.environ |= {
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test-key",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
    }


def measure(work, *, rounds):
    folder = work / "corpus"
    make_corpus(folder)
    result = {"tokens": NUM_TOKENS, "sequence_length": LENGTH}
    with serving(folder) as server:
        result["amplification"] = [
            amplification(server, work, ranks=ranks, shared=shared)
            for shared in (False, True)
            for ranks in (1, 4, 8)
        ]
        result["first_batch"] = [first_batch(server, work, delay_s=delay_s) for delay_s in (0.0, 0.02, 0.1)]
    ours, theirs = multiprocessing.Pipe()
    web = multiprocessing.get_context("spawn").Process(target=serve, args=(str(folder), theirs))
    web.start()
    s3, s3_url = start_s3()
    try:
        use_s3(s3_url)
        address = upload(folder, s3_url=s3_url, bucket="corpora", prefix="web")
        places = {"local": folder, "web": ours.recv(), "s3": address}
        result["epochs"] = rates(places, work, rounds=rounds)
        del places["s3"]
        result["epochs_after_the_first"] = steady_rates(places, work, rounds=max(5, rounds))
    finally:
        ours.send("stop")
        web.join()
        s3.terminate()
        s3.wait()
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--no-lookahead", action="store_true", help="fetch only what is read, when it is read"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        seen = patch("penstock.data.lookahead.Lookahead.read") if options.no_lookahead else nullcontext()
        with seen:
            result = measure(Path(work), rounds=options.rounds)
    result["lookahead"] = not options.no_lookahead
    print(json.dumps(result, indent=1))
    if options.out:
        name = "remote-without-lookahead" if options.no_lookahead else "remote"
        file_result(options.out, name, result, packages=("obstore", "moto", "pyarrow"))


if __name__ == "__main__":
    main()
