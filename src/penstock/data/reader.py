"""Samples to fields: who computes which, where their rows are, their tokens."""

import numpy as np

from penstock.data.assign import check_divisible, share
from penstock.data.buffers import Buffers
from penstock.data.collate import collate
from penstock.data.course import Course
from penstock.data.order import Places
from penstock.data.types import Batch, Int32, Int64


class Reader:
    """Reads the batches of one rank. Thread-safe.

    Args:
        fields: which fields to build.
        rank: data-parallel rank of this process.
        world_size: number of data-parallel ranks.
    """

    def __init__(self, *, fields: tuple[str, ...], rank: int, world_size: int) -> None:
        self.fields = fields
        self.rank = rank
        self.world_size = world_size
        self._buffers = Buffers()

    def step(self, course: Course, step: int) -> Batch:
        """Return this rank's batch of a step."""
        samples = course.timeline.samples_of(step)
        check_divisible(len(samples), world_size=self.world_size)  # a past step may have had another size
        located = course.locate(samples)
        legs, places = course.places(located)
        mine = share(located.corpus, places.lane, rank=self.rank, world_size=self.world_size)
        fields = self._collate(course, located.phase, located.corpus[mine], legs[mine], places.take(mine))
        return Batch({"sample_ids": samples[mine], **fields})

    def samples(self, course: Course, samples: Int64) -> Batch:
        """Return a batch of any samples [n] of one sequence length, in the order given."""
        located = course.locate(samples)
        legs, places = course.places(located)
        fields = self._collate(course, located.phase, located.corpus, legs, places)
        return Batch({"sample_ids": samples, **fields})

    def _collate(
        self, course: Course, phase: int, corpus: Int64, legs: Int64, places: Places
    ) -> dict[str, Int64 | Int32]:
        """Read rows, run by run of rows that come from one corpus."""
        at = np.stack((legs, places.epoch, places.pool, places.row), axis=1)
        parts = []
        for rows in np.split(np.arange(len(corpus)), np.flatnonzero(np.diff(corpus)) + 1):
            source, tables = course.rows(int(corpus[rows[0]]), phase, at[rows])
            parts.append((source.corpus, tables))
        length = course.timeline.length[phase][1]
        return collate(parts, length=length, fields=self.fields, buffers=self._buffers)
