"""Orders of a corpus's tokens: Penstock's at any pool size, and those it is compared with.

An order is an array of rows [n, L] of corpus positions, int64, in the order of training; all hold each
token once, but for less than one row at the end. Documents are given by their lengths [d].
"""

import numpy as np

from penstock.core.rng import key_of, shuffled
from penstock.data import open_corpus
from penstock.data.order.holdout import part_of
from penstock.data.order.permutation import Geometry, choose_geometry
from penstock.data.order.pool import pack_pool
from penstock.data.order.row_order import Order


def ours(folder, *, length, seed, packing="best_fit", geometry=None, epoch=0):
    """Penstock's order of a corpus; at a geometry of choice, else the loader's own."""
    corpus = open_corpus(folder)
    space = part_of(corpus, name="web", split="train", holdout=0.0)
    geometry = geometry or choose_geometry(corpus.num_tokens, sequence_length=length)
    order = Order(corpus.num_tokens, geometry, name="web", seed=seed)
    samples = np.arange(epoch * order.samples_per_epoch, (epoch + 1) * order.samples_per_epoch - 1)
    places = order.locate(samples)
    bases = np.cumsum([0, *(shard.tokens for shard in corpus.manifest.shards)])
    rows = np.empty((len(samples), length), dtype=np.int64)
    for number in np.unique(places.pool).tolist():
        pool = pack_pool(space, order, epoch=epoch, pool=number, rule=packing)
        starts = bases[pool.pieces[:, 0]] + pool.pieces[:, 1]
        positions = spread(starts, pool.pieces[:, 2] - pool.pieces[:, 1])
        packed = positions[: len(positions) // length * length].reshape(-1, length)
        firsts = np.cumsum(np.append(0, (pool.pieces[:, 2] - pool.pieces[:, 1])))[np.array(pool.firsts)]
        mine = np.flatnonzero(places.pool == number)
        rows[mine] = packed[firsts[places.row[mine]] // length]
    return rows


def small_geometry(length, *, blocks_per_pool=4, lanes=4, block_rows=16):
    """Return a pool so small that it is a stress: few blocks meet, few lanes run side by side."""
    return Geometry(
        sequence_length=length,
        block_tokens=block_rows * length,
        blocks_per_pool=blocks_per_pool,
        lanes=lanes,
    )


def perfect(lengths, *, length, seed):
    """All documents permuted at random, joined and cut every L tokens, and the rows permuted: the ideal."""
    rows = _rows(lengths, shuffled(len(lengths), key_of(seed, "perfect")), length)
    return rows[shuffled(len(rows), key_of(seed, "perfect rows"))]


def shard_buffer(lengths, *, length, seed, shards, buffer):
    """Shards in random order, read one after another through a buffer of so many documents.

    A document that arrives takes the place of a random one, which leaves: the shuffle of tf.data,
    WebDataset and Hugging Face's streams.
    """
    rng = np.random.default_rng(seed)
    edges = np.linspace(0, len(lengths), shards + 1).astype(np.int64)
    incoming = np.concatenate([np.arange(edges[s], edges[s + 1]) for s in rng.permutation(shards)])
    held, out = incoming[:buffer].tolist(), []
    for document, place in zip(
        incoming[buffer:].tolist(), rng.integers(0, buffer, len(incoming)).tolist(), strict=False
    ):
        out.append(held[place])
        held[place] = document
    rng.shuffle(held)
    return _rows(lengths, np.array(out + held, dtype=np.int64), length)


def windows(lengths, *, length, seed):
    """Windows of L tokens, cut in file order, in one random permutation."""
    rows = in_file_order(lengths, length=length)
    return rows[shuffled(len(rows), key_of(seed, "windows"))]


def in_file_order(lengths, *, length, seed=0):  # noqa: ARG001
    """No shuffle."""
    total = int(lengths.sum()) // length * length
    return np.arange(total).reshape(-1, length)


def spread(starts, lengths):
    """Return the positions start, start + 1, ... of all runs, end to end."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)


def _rows(lengths, order, length):
    starts = np.cumsum(lengths) - lengths
    positions = spread(starts[order], lengths[order])
    return positions[: len(positions) // length * length].reshape(-1, length)
