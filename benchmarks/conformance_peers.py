"""Two pipelines beside Penstock's in the conformance comparison, as their users put them together.

`StatefulDataLoader` is torchdata's, over fixed windows of a memory map. `Chain` is *ours*, written after the
design of IBM's fms-fsdp loader, which is not on PyPI: a chain of stateful iterators (documents of logical
shards -> packed rows -> a shuffling reservoir), each of which saves what it holds. On another number of
ranks it does as that design does: the positions of logical shards and the reservoirs are dealt out anew,
half-packed rows are dropped.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np

LENGTH = 64  # tokens per row
LOGICAL_SHARDS = 24  # dealt out to ranks
RESERVOIR_ROWS = 128  # fms-fsdp: 10,000 rows of 4,096 tokens as Python integers


class Windows:
    """Fixed windows of a memory map of tokens, the last one short."""

    def __init__(self, path):
        self.tokens = np.memmap(path, dtype=np.uint32, mode="r")

    def __len__(self):
        return -(-len(self.tokens) // LENGTH)

    def __getitem__(self, index):
        return self.tokens[index * LENGTH : (index + 1) * LENGTH].astype(np.int64)


def windows_loader(path, rows):
    """Return a maker of torchdata loaders: (rank, world_size, num_workers) -> StatefulDataLoader."""

    def make(rank, world_size, num_workers):
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        data = Windows(path)
        sampler = StatefulDistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True, seed=0)
        return StatefulDataLoader(
            data, batch_size=rows // world_size, sampler=sampler, num_workers=num_workers, collate_fn=list
        )

    return make


class Shards:
    """The documents of some logical shards, one of each in turn; its state is a position per shard."""

    def __init__(self, corpus, shards):
        self.corpus = corpus  # (tokens, document ends)
        self.read = dict.fromkeys(shards, 0)

    def __iter__(self):
        tokens, ends = self.corpus
        starts = np.append(0, ends[:-1])
        while True:
            shard = min(self.read, key=lambda shard: (self.read[shard], shard))
            document = shard + self.read[shard] * LOGICAL_SHARDS
            if document >= len(ends):
                return  # its turn comes last, so the others are read as well
            self.read[shard] += 1
            yield tokens[starts[document] : ends[document]]


class Packed:
    """Rows of LENGTH tokens, cut from documents end to end; its state is the row it has begun."""

    def __init__(self, documents):
        self.documents, self.begun = documents, np.zeros(0, dtype=np.int64)

    def __iter__(self):
        for document in self.documents:
            self.begun = np.append(self.begun, document)
            while len(self.begun) >= LENGTH:
                row, self.begun = self.begun[:LENGTH], self.begun[LENGTH:]
                yield row
        if len(self.begun):
            row, self.begun = self.begun, self.begun[:0]
            yield row


class Reservoir:
    """Rows in the order of a shuffling reservoir; its state is the reservoir and its random numbers."""

    def __init__(self, rows, seed):
        self.rows, self.held = rows, []
        self.rng = np.random.default_rng(seed)

    def __iter__(self):
        for row in self.rows:
            self.held.append(row)
            while len(self.held) >= RESERVOIR_ROWS:
                yield self._any()
        while self.held:
            yield self._any()

    def _any(self):
        place = int(self.rng.integers(len(self.held)))
        self.held[place], self.held[-1] = self.held[-1], self.held[place]
        return self.held.pop()


class Chain:
    """A rank's chain; batches are lists of rows."""

    def __init__(self, corpus, *, rank, world_size, rows):
        self.shards = Shards(corpus, range(rank, LOGICAL_SHARDS, world_size))
        self.packed = Packed(self.shards)
        self.reservoir = Reservoir(self.packed, rank)
        self.batch = rows // world_size

    def __iter__(self) -> Iterator[list]:
        rows = iter(self.reservoir)
        while batch := list(islice(rows, self.batch)):
            yield batch


class ChainAdapter:
    """The chain in the conformance kit: states of all ranks in, dealt out anew where the ranks changed."""

    def __init__(self, corpus, rows):
        self.corpus, self.rows = corpus, rows

    def open(self, rank, world_size, num_workers, states=None):  # noqa: ARG002 - no workers here
        """Open one rank."""
        chain = Chain(self.corpus, rank=rank, world_size=world_size, rows=self.rows)
        if states:
            read = {shard: count for state in states for shard, count in state["read"].items()}
            chain.shards.read = {shard: read[shard] for shard in chain.shards.read}
            if len(states) == world_size:
                chain.packed.begun = states[rank]["begun"]
                chain.reservoir.held = list(states[rank]["held"])
                chain.reservoir.rng.bit_generator.state = states[rank]["rng"]
            else:
                held = [row for state in states for row in state["held"]]
                chain.reservoir.held = held[rank::world_size]
        return [chain, iter(chain)]

    def next(self, opened):
        """Return the tokens of the next batch."""
        return np.concatenate(next(opened[1]))

    def save(self, opened):
        """Return what every stage holds."""
        chain = opened[0]
        return {
            "read": chain.shards.read,
            "begun": chain.packed.begun,
            "held": chain.reservoir.held,
            "rng": chain.reservoir.rng.bit_generator.state,
        }

    def close(self, opened):
        """Drop the iterators."""
        opened.clear()
