"""How fast is the loader in one process, per CPU-second, beside the floor of the machine?

    python benchmarks/loader.py                     # 200M tokens of synthetic documents, five rounds
    python benchmarks/loader.py --tokens 1G --rounds 3 --out benchmarks/results

The corpus has log-normal document lengths (median 545, mean about 1,100 tokens), uint16, sequence
length 4,096, batches of 64 rows, warm page cache. The floor reads random windows of the same bytes and
widens them to int64 in a fresh batch: no loader that delivers int64 can do with less. All settings
and the floor are measured in turn, round by round, so that other load falls on all alike; figures are
medians, in million tokens per CPU-second of the whole process.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from penstock.core import clock
from penstock.core.units import parse_count
from penstock.data import Loader, open_corpus
from penstock.data.formats.arrow import write_shard
from penstock.data.manifest import Manifest, ShardEntry, save_manifest

LENGTH, ROWS = 4096, 64
TOKENS_ONLY = ("input_ids",)
LABELS = ("input_ids", "labels")
EVERYTHING = ("input_ids", "labels", "cu_seqlens", "position_ids", "document_ids")


def make_corpus(folder, num_tokens, *, shard_tokens=50_000_000):
    """Write a corpus of about `num_tokens` random tokens in log-normal documents."""
    rng = np.random.default_rng(0)
    entries = []
    while (done := sum(entry.tokens for entry in entries)) < num_tokens:
        lengths = np.clip(rng.lognormal(6.3, 1.2, shard_tokens // 500), 1, 200_000).astype(np.int64)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        offsets = offsets[: np.searchsorted(offsets, min(shard_tokens, num_tokens - done))]
        path = folder / f"shard-{len(entries):05d}.arrow"
        write_shard(path, rng.integers(1, 50_000, offsets[-1], dtype=np.uint16), offsets)
        sizes = {"tokens": int(offsets[-1]), "documents": len(offsets) - 1, "bytes": path.stat().st_size}
        entries.append(ShardEntry(name=path.name, checksum="", **sizes))
        if offsets[-1] < shard_tokens // 2:
            break
    save_manifest(folder, Manifest(format="arrow", dtype="uint16", vocab_size=50_000, shards=tuple(entries)))


def floor(corpus, num_tokens):
    """Tokens per CPU-second of reading random windows and widening them."""
    tokens = corpus.shard(0).tokens[0 : corpus.manifest.shards[0].tokens]
    rng = np.random.default_rng(1)
    start = clock.cpu_seconds()
    for _ in range(num_tokens // (ROWS * LENGTH)):
        batch = np.empty((ROWS, LENGTH), dtype=np.int64)
        for row, at in enumerate(rng.integers(0, len(tokens) - LENGTH, ROWS).tolist()):
            batch[row] = tokens[at : at + LENGTH]
    return num_tokens / (clock.cpu_seconds() - start)


def loading(folder, num_tokens, *, packing, fields, num_workers):
    """Tokens per CPU-second of iterating over a new loader, its first batch included."""
    start = clock.cpu_seconds()
    loader = Loader(
        {"web": folder},
        sequence_length=LENGTH,
        global_batch_size=ROWS,
        packing=packing,
        fields=fields,
        num_workers=num_workers,
    )
    with closing(iter(loader)) as batches:
        for _ in range(num_tokens // (ROWS * LENGTH)):
            next(batches)
    return num_tokens / (clock.cpu_seconds() - start)


def first_batch_ms(folder, packing):
    """Milliseconds from nothing to the first batch."""
    start = clock.monotonic()
    loader = Loader({"web": folder}, sequence_length=LENGTH, global_batch_size=ROWS, packing=packing)
    loader.batch_at(0)
    return (clock.monotonic() - start) * 1e3


def cpu_name():
    """What the processor calls itself."""
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [line for line in cpuinfo.read_text().splitlines() if "model name" in line]
        if cpuinfo.exists()
        else []
    )
    return names[0].partition(":")[2].strip() if names else platform.machine()


def measure(folder, num_tokens, rounds):
    corpus = open_corpus(folder)
    for shard in range(len(corpus.manifest.shards)):
        np.add.reduce(
            corpus.shard(shard).tokens[0 : corpus.manifest.shards[shard].tokens]
        )  # warm the page cache
    settings = {
        f"{packing}, {name}, {'a thread ahead' if workers else 'no thread'}": {
            "packing": packing,
            "fields": fields,
            "num_workers": workers,
        }
        for packing in ("concat", "best_fit")
        for name, fields in {"tokens": TOKENS_ONLY, "labels": LABELS, "all fields": EVERYTHING}.items()
        for workers in (0, 1)
    }
    rates = {name: [] for name in ("floor", *settings)}
    for number in range(rounds):
        rates["floor"].append(floor(corpus, num_tokens))
        for name, options in settings.items():
            rates[name].append(loading(folder, num_tokens, **options))
        print(f"round {number + 1} of {rounds}", flush=True)
    first = {
        rule: statistics.median(first_batch_ms(folder, rule) for _ in range(5))
        for rule in ("concat", "best_fit")
    }
    return rates, first


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=parse_count, default=200_000_000, help="tokens of the corpus and a round"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder to file the result in, as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_corpus(Path(folder), arguments.tokens)
        rates, first = measure(folder, arguments.tokens, arguments.rounds)
    base = statistics.median(rates["floor"])
    print(f"\n{'setting':42} {'M tokens/CPU-s':>15} {'min':>6} {'max':>6} {'of floor':>9}")
    for name, found in rates.items():
        middle = statistics.median(found)
        low, high = min(found) / 1e6, max(found) / 1e6
        print(f"{name:42} {middle / 1e6:15.0f} {low:6.0f} {high:6.0f} {middle / base:9.2f}")
    print(f"first batch: {', '.join(f'{rule} {ms:.0f} ms' for rule, ms in first.items())}")
    if arguments.out:
        now = datetime.now(UTC)
        result = {
            "benchmark": "loader",
            "date": now.date().isoformat(),
            "machine": {"cpu": cpu_name(), "cores": os.cpu_count()},
            "python": platform.python_version(),
            "numpy": np.__version__,
            "tokens": arguments.tokens,
            "tokens_per_cpu_second": rates,
            "first_batch_ms": first,
        }
        path = arguments.out / f"loader-{now.date()}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"filed in {path}")


if __name__ == "__main__":
    main()
