"""How near is the order to an ideal shuffle, on a corpus sorted by source, the worst case?

    python benchmarks/shuffle_quality.py --out benchmarks/results

Orders of one epoch: Penstock's (the loader's own pools for this corpus, and pools made small to see
them fail), all documents permuted at random (ideal), shards read in random order through a buffer of
documents, windows cut once and permuted, and no shuffle. A batch has 64 rows; a row holds about four
documents, as with 4,096-token rows of web text. Value of a sample: the mean place of its tokens in the
corpus, which is its source, since the corpus is sorted.

    shards      distinct source shards among the tokens of a batch
    per row     distinct source shards among the tokens of a row
    adjacent    correlation of a sample's value with the next one's
    worst lag   the largest correlation in absolute value over lags 1 to 256
    drift       standard deviation of a batch's mean value, as a multiple of the ideal's
"""

import argparse
import tempfile
from itertools import pairwise
from pathlib import Path

import corpora
import drawing
import numpy as np
import orders
from results_file import file_result

from penstock.core.units import parse_count
from penstock.data.order.permutation import choose_geometry

LENGTH, ROWS, SHARDS, BUFFER = 64, 64, 256, 1000
LAGS = 256


def make_orders(folder, lengths, *, seed):
    """Return name -> rows of positions."""
    arguments = {"length": LENGTH, "seed": seed}
    small = orders.small_geometry(LENGTH)
    return {
        "ideal: all documents permuted": orders.perfect(lengths, **arguments),
        "Penstock, concat": orders.ours(folder, packing="concat", **arguments),
        "Penstock, best_fit": orders.ours(folder, **arguments),
        "Penstock, concat, small pools": orders.ours(folder, packing="concat", geometry=small, **arguments),
        "windows cut once, permuted": orders.windows(lengths, **arguments),
        f"shard buffer, {BUFFER:,} documents": orders.shard_buffer(
            lengths, shards=SHARDS, buffer=BUFFER, **arguments
        ),
        "no shuffle": orders.in_file_order(lengths, length=LENGTH),
    }


def figures(rows, num_tokens):
    """Return the figures of one order, and its correlation at every lag and shards of every batch."""
    shard = rows * SHARDS // num_tokens
    batches = len(rows) // ROWS
    by_batch = np.array(
        [len(np.unique(shard[batch * ROWS : (batch + 1) * ROWS])) for batch in range(batches)]
    )
    sorted_shards = np.sort(shard, axis=1)
    per_row = 1 + (np.diff(sorted_shards, axis=1) > 0).sum(axis=1)
    value = rows.mean(axis=1) / num_tokens
    centred = value - value.mean()
    power = float((centred * centred).mean())
    lags = [float((centred[:-lag] * centred[lag:]).mean() / power) for lag in range(1, LAGS + 1)]
    means = value[: batches * ROWS].reshape(batches, ROWS).mean(axis=1)
    return {
        "shards": float(by_batch.mean()),
        "shards_least": int(by_batch.min()),
        "per_row": float(per_row.mean()),
        "adjacent": lags[0],
        "worst_lag": max(lags, key=abs),
        "batch_mean_std": float(means.std()),
        "_lags": lags,
        "_batches": by_batch.tolist(),
    }


def measure(num_tokens, folder, *, seeds):
    """Return name -> figures, means over the seeds; series are of the first seed."""
    lengths = corpora.lognormal_lengths(num_tokens, median=8.5, sigma=1.2, longest=4000)
    corpora.write(
        folder / "corpus", lengths, lambda start, stop: np.zeros(stop - start), shard_tokens=num_tokens
    )
    found = {}
    for seed in range(seeds):
        for name, rows in make_orders(folder / "corpus", lengths, seed=seed).items():
            found.setdefault(name, []).append(figures(rows, num_tokens))
    merged = {}
    for name, several in found.items():
        merged[name] = {
            key: float(np.mean([one[key] for one in several])) if not key.startswith("_") else value
            for key, value in several[0].items()
        }
    ideal = merged["ideal: all documents permuted"]["batch_mean_std"]
    for one in merged.values():
        one["drift"] = one["batch_mean_std"] / ideal
    return merged


def drawn(found):
    """Return the drawings."""
    some = [name for name in found if name != "no shuffle"]
    return {
        "shards": drawing.lines(
            f"Distinct source shards (of {SHARDS}) in a batch of {ROWS} rows, over the epoch",
            [
                drawing.Line(name=name, x=[float(x) for x in xs], y=ys)
                for name in found
                for xs, ys in [_thinned(found[name]["_batches"])]
            ],
            x_label="batch",
            y_label="distinct shards",
            from_zero=True,
        ),
        "correlation": drawing.lines(
            "Correlation of a sample's source with a later one's",
            [
                drawing.Line(name=name, x=[float(lag) for lag in range(1, LAGS + 1)], y=found[name]["_lags"])
                for name in some
            ],
            x_label="lag, samples",
            y_label="correlation",
        ),
    }


def _thinned(values, points=120):
    edges = np.linspace(0, len(values), min(points, len(values)) + 1).astype(int)
    pairs = list(pairwise(edges))
    return [(low + high) / 2 for low, high in pairs], [
        float(np.mean(values[low:high])) for low, high in pairs
    ]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=parse_count, default=8_000_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder to file the result in, as JSON and SVG")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments.tokens, Path(folder), seeds=arguments.seeds)
    print(f"{'order':34} {'shards':>7} {'per row':>8} {'adjacent':>9} {'worst lag':>10} {'drift':>6}")
    for name, one in found.items():
        print(
            f"{name:34} {one['shards']:7.1f} {one['per_row']:8.2f} {one['adjacent']:9.4f} "
            f"{one['worst_lag']:10.4f} {one['drift']:6.2f}"
        )
    if arguments.out:
        geometry = choose_geometry(arguments.tokens, sequence_length=LENGTH)
        result = {
            "tokens": arguments.tokens,
            "seeds": arguments.seeds,
            "pools": {
                "blocks": geometry.blocks_per_pool,
                "lanes": geometry.lanes,
                "block": geometry.block_tokens,
            },
            "orders": {
                name: {key: value for key, value in one.items() if key[0] != "_"}
                for name, one in found.items()
            },
        }
        file_result(arguments.out, "shuffle_quality", result, drawings=drawn(found))


if __name__ == "__main__":
    main()
