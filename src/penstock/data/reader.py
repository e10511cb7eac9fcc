"""Samples to fields: the rows of a step or of any samples, read, collated and transformed."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from penstock.data.buffers import Buffers
from penstock.data.collate import collate
from penstock.data.course import Course
from penstock.data.shares import Chosen, Shares, locate, shares_from
from penstock.data.transform import NEEDED_FIELDS, Transform, apply
from penstock.data.types import Int32, Int64

Fields = dict[str, Int64 | Int32]


class Reader:
    """Reads the batches of one rank. Thread-safe.

    Args:
        fields: which fields to build.
        rank: data-parallel rank of this process.
        world_size: number of data-parallel ranks.
        transform: applied to each row; None: none is.
        seed: keys what a transform draws.
    """

    def __init__(
        self, *, fields: tuple[str, ...], rank: int, world_size: int, transform: Transform | None, seed: int
    ) -> None:
        self.fields = fields
        self.rank = rank
        self.world_size = world_size
        self.transform = transform
        self._seed = seed
        self._buffers = Buffers()
        self._shares: Shares | None = None  # what was located last

    def step(self, course: Course, step: int, on_sample: Callable[[int], None]) -> Fields:
        """Return this rank's batch of a step; `on_sample` gets each sample id before it is transformed."""
        shares = self._shares
        if shares is None or shares.course is not course or step not in shares.steps:
            shares = shares_from(course, step, rank=self.rank, world_size=self.world_size)
            self._shares = shares
        return self._read(course, shares.of(step), on_sample)

    def samples(self, course: Course, samples: Int64) -> Fields:
        """Return a batch of any samples [n] of one sequence length, in the order given."""
        return self._read(course, locate(course, samples), lambda _sample: None)

    def _read(self, course: Course, chosen: Chosen, on_sample: Callable[[int], None]) -> Fields:
        fields = self.fields if self.transform is None else NEEDED_FIELDS
        batch = {"sample_ids": chosen.samples, **self._collate(course, chosen, fields)}
        if self.transform is None:
            return batch
        return apply(batch, self.transform, seed=self._seed, fields=self.fields, on_sample=on_sample)

    def _collate(self, course: Course, chosen: Chosen, fields: Sequence[str]) -> Fields:
        """Read rows, run by run of rows that come from one corpus."""
        corpus = chosen.corpus
        edges = [0, len(corpus)]
        if len(course.names) > 1:
            edges[1:1] = (np.flatnonzero(corpus[1:] != corpus[:-1]) + 1).tolist()
        parts = []
        for first, past in pairwise(edges):
            source, tables = course.rows(int(corpus[first]), chosen.phase, chosen.places[first:past])
            parts.append((source.corpus, tables))
        length = course.length(chosen.phase)
        return collate(parts, length=length, fields=fields, buffers=self._buffers)
