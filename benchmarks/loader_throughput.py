"""How fast is the loader, beside the floor of the machine and beside other loaders?

    python benchmarks/loader_throughput.py                                     # ten minutes
    python benchmarks/loader_throughput.py --tokens 100M --rounds 3 --out benchmarks/results

Log-normal documents (median 545 tokens), warm page cache, one batch = 262,144 tokens. The floor reads
random windows of the same bytes and widens them to int64 in a fresh batch: what a loader that shuffles
must do at least. Every setting reads `--tokens` of the corpus, the slow peers a tenth, from a new loader:
opening it and packing its pools is part of the figure. All take turns, round by round; figures are
medians, per CPU-second of the whole process (and of its children, with two processes) and per second.
"""

import argparse
import contextlib
import multiprocessing
import statistics
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path

import corpora
import drawing
import numpy as np
from measuring import interleaved, median
from results_file import file_result
from throughput_peers import PACKAGES, flat_tokens, open_peers

from penstock.core import clock
from penstock.core.units import parse_count
from penstock.data import Loader

BATCH_TOKENS = 262_144
LENGTHS = (2048, 4096, 8192, 131_072)
BASE = 4096
FIELDS = {"": ("input_ids",), ", labels": ("input_ids", "labels")}
ALL_FIELDS = ("input_ids", "labels", "cu_seqlens", "position_ids", "document_ids")
SLOW_SHARE = 10
_SLOW = ("MosaicML", "grain")


def floor(flat, num_tokens, *, length):
    """Read random windows of a memory map into int64 batches; returns the tokens."""
    rows, rng = BATCH_TOKENS // length, np.random.default_rng(1)
    flat = np.memmap(flat.filename, dtype=flat.dtype, mode="r")  # opened anew, as every loader must
    batches = num_tokens // BATCH_TOKENS
    for _ in range(batches):
        batch = np.empty((rows, length), dtype=np.int64)
        for row, at in enumerate(rng.integers(0, len(flat) - length, rows).tolist()):
            batch[row] = flat[at : at + length]
    return batches * BATCH_TOKENS


def load(folder, num_tokens, *, length=BASE, packing="best_fit", rows=None, **options):
    """Iterate over a new loader, `rows` a batch of this rank; returns the tokens this rank was given."""
    options = {"fields": ("input_ids",), "num_workers": 0, **options}
    rows = rows or BATCH_TOKENS // length
    size = rows * options.get("world_size", 1)
    loader = Loader(
        {"web": folder}, sequence_length=length, global_batch_size=size, packing=packing, **options
    )
    batches = num_tokens // (rows * length)
    with closing(iter(loader)) as given:
        for _ in range(batches):
            next(given)
    return batches * rows * length


def _child(pipe, folder, num_tokens, options):
    """One of two ranks: import, say so, load when told, for as often as told."""
    Loader({"web": folder}, sequence_length=BASE, global_batch_size=2, deliver="torch").batch_at(0)
    while pipe.recv():
        cpu = clock.cpu_seconds()
        pipe.send((load(folder, num_tokens, **options), clock.cpu_seconds() - cpu))


def two_processes(folder, num_tokens, options, *, rounds):
    """Measure two ranks in two processes at once: (tokens/s, tokens/CPU-s), per round."""
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        rank_options = {**options, "rank": rank, "world_size": 2}
        child = context.Process(target=_child, args=(theirs, folder, num_tokens // 2, rank_options))
        child.start()
        pipes.append(ours)
        children.append(child)
    found = {"per_s": [], "per_cpu_s": []}
    for number in range(-1, rounds):
        start = clock.monotonic()
        for pipe in pipes:
            pipe.send(True)
        answers = [pipe.recv() for pipe in pipes]
        tokens = sum(tokens for tokens, _ in answers)
        if number >= 0:
            found["per_s"].append(tokens / (clock.monotonic() - start))
            found["per_cpu_s"].append(tokens / sum(cpu for _, cpu in answers))
    for pipe, child in zip(pipes, children, strict=True):
        pipe.send(False)
        child.join()
    return found


def settings(folders, flats, tokens, *, lengths):
    """Return name -> work for the floor and all of Penstock's settings in one process."""
    works = {}
    for length in lengths:
        works[f"floor, {length:,}"] = partial(floor, flats["uint16"], tokens, length=length)
        for packing in ("concat", "best_fit"):
            for threads in (0, 1):
                name = f"{packing}, {length:,}{', a thread ahead' if threads else ''}"
                options = {"length": length, "packing": packing, "num_workers": threads}
                works[name] = partial(load, folders["uint16"], tokens, **options)
    works[f"floor, {BASE:,}, uint32"] = partial(floor, flats["uint32"], tokens, length=BASE)
    for packing in ("concat", "best_fit"):
        name = f"{packing}, {BASE:,}"
        works[f"{name}, uint32"] = partial(load, folders["uint32"], tokens, packing=packing)
        for label, fields in {"labels": FIELDS[", labels"], "all fields": ALL_FIELDS}.items():
            works[f"{name}, {label}"] = partial(
                load, folders["uint16"], tokens, packing=packing, fields=fields
            )
    return works


def measure(arguments, folder):
    """Return name -> rates of everything."""
    lengths = corpora.lognormal_lengths(arguments.tokens)
    folders, flats = {}, {}
    for dtype in ("uint16", "uint32"):
        folders[dtype] = corpora.write(folder / dtype, lengths, corpora.random_tokens(dtype), dtype=dtype)
        flats[dtype] = flat_tokens(corpora.warm(folders[dtype]), folder / f"{dtype}.bin")
        flats[dtype].max()
    works = settings(folders, flats, arguments.tokens, lengths=arguments.lengths)
    peers = {}
    if not arguments.no_peers:
        with contextlib.chdir(folder):
            peers = open_peers(flats["uint16"], folder, length=BASE, rows=BATCH_TOKENS // BASE)
    for name, work in peers.items():
        share = SLOW_SHARE if name.startswith(_SLOW) else 1
        works[name] = partial(work, max(arguments.tokens // share, 2 * BATCH_TOKENS))
    rates = interleaved(works, rounds=arguments.rounds)
    for packing in ("concat", "best_fit"):
        name = f"{packing}, {BASE:,}, two processes"
        options = {"packing": packing, "num_workers": 0}
        rates[name] = two_processes(folders["uint16"], arguments.tokens, options, rounds=arguments.rounds)
    first = {rule: first_batch_ms(folders["uint16"], rule) for rule in ("concat", "best_fit")}
    return rates, list(peers), first


def first_batch_ms(folder, packing):
    """Return milliseconds from nothing to the first batch, the middle of five."""
    found = []
    for _ in range(5):
        start = clock.monotonic()
        rows = BATCH_TOKENS // BASE
        Loader({"web": folder}, sequence_length=BASE, global_batch_size=rows, packing=packing).batch_at(0)
        found.append((clock.monotonic() - start) * 1e3)
    return statistics.median(found)


def report(rates, peers, first):
    """Print the table and the verdicts; return the verdicts."""
    middle = {name: median(found["per_cpu_s"]) for name, found in rates.items()}
    base = middle[f"floor, {BASE:,}"]
    print(f"\n{'setting':52} {'M tokens/CPU-s':>14} {'min':>6} {'max':>6} {'M tokens/s':>11} {'of floor':>9}")
    for name, found in rates.items():
        low, high = min(found["per_cpu_s"]) / 1e6, max(found["per_cpu_s"]) / 1e6
        wall, share = median(found["per_s"]) / 1e6, middle[name] / base
        print(f"{name:52} {middle[name] / 1e6:14.0f} {low:6.0f} {high:6.0f} {wall:11.0f} {share:9.2f}")
    best_peer = max(peers, key=lambda name: middle[name], default=None)
    verdicts = {
        "concat_share_of_floor": round(middle[f"concat, {BASE:,}"] / base, 3),
        "best_fit_share_of_floor": round(middle[f"best_fit, {BASE:,}"] / base, 3),
        "fastest_peer": best_peer,
        "best_fit_times_fastest_peer": (
            round(middle[f"best_fit, {BASE:,}"] / middle[best_peer], 2) if best_peer else None
        ),
        "best_fit_times_90000_tokens_per_s": round(middle[f"best_fit, {BASE:,}"] / 90_000),
        "first_batch_ms": first,
    }
    for name, value in verdicts.items():
        print(f"{name}: {value}")
    return verdicts


def drawn(rates, peers):
    """Return the bar chart: peers, the floor and the main settings at one length."""
    names = [
        f"floor, {BASE:,}",
        f"concat, {BASE:,}",
        f"best_fit, {BASE:,}",
        f"best_fit, {BASE:,}, labels",
        *peers,
    ]
    rows = []
    for name in names:
        colour = 6 if name.startswith("floor") else 1 if name in peers else 0
        label = name if name in peers or colour == 6 else f"Penstock {name}"
        rows.append((label, median(rates[name]["per_cpu_s"]) / 1e6, colour))
    return drawing.bars(
        "One process, same tokens, sequence length 4,096", rows, x_label="million tokens per CPU-second"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=parse_count, default=200_000_000, help="of the corpus, and read a turn"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--no-peers", action="store_true", help="leave the other loaders out")
    parser.add_argument("--out", type=Path, help="folder to file the result in, as JSON and SVG")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rates, peers, first = measure(arguments, Path(folder))
    verdicts = report(rates, peers, first)
    if arguments.out:
        result = {"tokens": arguments.tokens, "verdicts": verdicts, "rates": rates}
        drawings = {"peers": drawn(rates, peers)}
        file_result(arguments.out, "loader_throughput", result, drawings=drawings, packages=PACKAGES)


if __name__ == "__main__":
    main()
