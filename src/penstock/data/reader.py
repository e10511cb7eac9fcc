"""Samples to fields: who computes which, where their rows are, their tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.data.assign import check_divisible, share
from penstock.data.buffers import Buffers
from penstock.data.collate import collate
from penstock.data.course import Course
from penstock.data.order import Places
from penstock.data.transform import NEEDED_FIELDS, Transform, apply
from penstock.data.types import Int32, Int64

Fields = dict[str, Int64 | Int32]


@dataclass(frozen=True, slots=True)
class Chosen:
    """Samples to read, and where each is; all arrays are [n] int64."""

    samples: Int64
    corpus: Int64
    legs: Int64
    places: Places


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

    def step(self, course: Course, step: int, on_sample: Callable[[int], None]) -> Fields:
        """Return this rank's batch of a step; `on_sample` gets each sample id before it is transformed."""
        samples = course.timeline.samples_of(step)
        check_divisible(len(samples), world_size=self.world_size)  # a past step may have had another size
        located = course.locate(samples)
        legs, places = course.places(located)
        mine = share(located.corpus, places.lane, rank=self.rank, world_size=self.world_size)
        chosen = Chosen(samples[mine], located.corpus[mine], legs[mine], places.take(mine))
        return self._read(course, located.phase, chosen, on_sample)

    def samples(self, course: Course, samples: Int64) -> Fields:
        """Return a batch of any samples [n] of one sequence length, in the order given."""
        located = course.locate(samples)
        legs, places = course.places(located)
        chosen = Chosen(samples, located.corpus, legs, places)
        return self._read(course, located.phase, chosen, lambda _sample: None)

    def _read(self, course: Course, phase: int, chosen: Chosen, on_sample: Callable[[int], None]) -> Fields:
        fields = self.fields if self.transform is None else NEEDED_FIELDS
        batch = {"sample_ids": chosen.samples, **self._collate(course, phase, chosen, fields)}
        if self.transform is None:
            return batch
        return apply(batch, self.transform, seed=self._seed, fields=self.fields, on_sample=on_sample)

    def _collate(self, course: Course, phase: int, chosen: Chosen, fields: Sequence[str]) -> Fields:
        """Read rows, run by run of rows that come from one corpus."""
        places, corpus = chosen.places, chosen.corpus
        at = np.stack((chosen.legs, places.epoch, places.pool, places.row), axis=1)
        edges = [0, *(np.flatnonzero(corpus[1:] != corpus[:-1]) + 1).tolist(), len(corpus)]
        parts = []
        for first, past in pairwise(edges):
            source, tables = course.rows(int(corpus[first]), phase, at[first:past])
            parts.append((source.corpus, tables))
        length = course.length(phase)
        return collate(parts, length=length, fields=fields, buffers=self._buffers)
