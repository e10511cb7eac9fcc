"""This rank's rows of several steps, located in one go.

A call of numpy costs microseconds whatever the number of rows, and the order is a function: where the rows of
the next steps are can be had with those of this one. What was located belongs to the course it was located
on; a change of the run makes another course, so nothing that is out of date is ever used.
"""

from dataclasses import dataclass

import numpy as np

from penstock.data.assign import check_divisible, share
from penstock.data.course import Course
from penstock.data.stretches import Located
from penstock.data.types import Int64

_AT_ONCE = 2048  # samples: half a millisecond


@dataclass(frozen=True, slots=True)
class Chosen:
    """Samples to read, all of one sequence length, and where each is."""

    samples: Int64
    """[n] ids."""
    corpus: Int64
    """[n] indices of corpora."""
    places: Int64
    """[n, 4] leg, epoch, pool, row."""
    phase: int
    """Index of the sequence length."""


@dataclass(frozen=True, slots=True)
class Shares:
    """What one rank reads in some steps; arrays are as of Chosen, with the steps as an axis before."""

    course: Course
    steps: range
    samples: Int64
    corpus: Int64
    places: Int64
    phase: int

    def of(self, step: int) -> Chosen:
        """Return what the rank reads in one of the steps; the ids are the caller's own."""
        index = step - self.steps.start
        return Chosen(self.samples[index].copy(), self.corpus[index], self.places[index], self.phase)


def locate(course: Course, samples: Int64) -> Chosen:
    """Return where samples [n] of one sequence length are, in the order given."""
    located = course.locate(samples)
    return Chosen(samples, located.corpus, _places(course, located)[0], located.phase)


def shares_from(course: Course, step: int, *, rank: int, world_size: int) -> Shares:
    """Return what a rank reads in a step, and in as many of the next as can be located with it.

    Raises:
        ConfigError: the step's batch does not divide over the ranks; a past one may have had another size.
    """
    size = course.timeline.batch_size_at(step)
    check_divisible(size, world_size=world_size)
    steps = course.timeline.steps_alike(step, most=max(1, _AT_ONCE // size))
    samples = course.timeline.samples_in(steps)
    located = course.locate(samples)
    if not course.holds(located):  # later steps wait for what is not there yet, or are an error of theirs
        steps, samples = steps[:1], samples[:size]
        located = course.locate(samples)
    places, lanes = _places(course, located)
    in_steps = (len(steps), size)
    mine = share(located.corpus.reshape(in_steps), lanes.reshape(in_steps), rank=rank, world_size=world_size)
    mine += np.arange(0, len(samples), size)[:, None]
    return Shares(course, steps, samples[mine], located.corpus[mine], places[mine], located.phase)


def _places(course: Course, located: Located) -> tuple[Int64, Int64]:
    legs, places = course.places(located)
    return np.stack((legs, places.epoch, places.pool, places.row), axis=1), places.lane
