"""Where a sample's tokens come from, and which samples a document goes to: the order, read both ways."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.core.errors import ConfigError, UsageError, nearest
from penstock.data.corpus import Corpus
from penstock.data.course import Course
from penstock.data.legs import Leg
from penstock.data.pool import PADDING
from penstock.data.types import Int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of tokens of one document inside a row."""

    corpus: str
    """Name of the corpus; empty for padding."""
    epoch: int
    """Which pass over it, from 0."""
    shard: str
    """File it lies in."""
    document: int
    """Number of the document in the corpus."""
    offset: int
    """First token, counted from the start of the document."""
    start: int
    """First token, counted from the start of the shard."""
    tokens: int
    """How many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A row that trains on a document."""

    step: int
    row: int
    """Index among the rows of the step, as in `Loader.samples_of`."""
    sample: int
    """Sample id."""
    epoch: int
    offset: int
    """First token of the document in the row, counted from its start."""
    tokens: int


def explain(course: Course, samples: Int64) -> list[list[Piece]]:
    """Return the pieces of each sample, in the order they are trained on."""
    phases = np.array([course.phase_of(sample) for sample in samples.tolist()], dtype=np.int64)
    rows: list[list[Piece]] = [[]] * len(samples)
    for phase in np.unique(phases).tolist():
        chosen = np.flatnonzero(phases == phase)
        for index, row in zip(chosen.tolist(), _explained(course, samples[chosen]), strict=True):
            rows[index] = row
    return rows


def _explained(course: Course, samples: Int64) -> list[list[Piece]]:
    """Return the pieces of samples of one sequence length."""
    located = course.locate(samples)
    legs, places = course.places(located)
    at = np.stack((legs, places.epoch, places.pool, places.row), axis=1)
    rows = []
    for index, corpus in enumerate(located.corpus.tolist()):
        source, (table,) = course.rows(corpus, located.phase, at[index : index + 1])
        epoch = int(places.epoch[index])
        rows.append([_piece(source.corpus, source.name, epoch, piece) for piece in table.tolist()])
    return rows


def find(course: Course, name: str, document: int, *, steps: range) -> list[Use]:
    """Return the rows of some steps that train on a document, in the order of steps.

    Raises:
        ConfigError: no such corpus.
        UsageError: it has no such document, or the steps are not a range without gaps.
    """
    if name not in course.names:
        raise ConfigError("The run has no such corpus", got=name, fix=nearest(name, course.names))
    index = course.names.index(name)
    if steps.step != 1:
        raise UsageError("steps must be a range without gaps", got=steps)
    shard, start, stop = _document(course.corpus(index), document)
    if start == stop:
        return []
    uses = []
    for phase, turns in enumerate(course.taken(index, steps)):
        if turns:
            for turn, epoch, first, past in _turns_with(course, index, phase, turns, (shard, start, stop)):
                sample = course.sample_of(index, phase, turn)
                step = None if sample is None else course.timeline.step_of(sample)
                if sample is not None and step is not None:
                    row = int(np.flatnonzero(course.timeline.samples_of(step) == sample)[0])
                    at = {"offset": first - start, "tokens": past - first}
                    uses.append(Use(step=step, row=row, sample=sample, epoch=epoch, **at))
    return sorted(uses, key=lambda use: (use.step, use.row, use.offset))


def _document(corpus: Corpus, document: int) -> tuple[int, int, int]:
    """Return the shard of a document and its tokens [start, stop) in it."""
    if not 0 <= document < corpus.num_documents:
        raise UsageError(f"{corpus.location} has documents 0 to {corpus.num_documents - 1:,}", got=document)
    shard = corpus.shard_of_document(document)
    inside = document - corpus.first_document(shard) - _empty_ones_first(corpus, shard)
    if inside < 0:
        return shard, 0, 0
    ends = corpus.shard(shard).document_ends(0, int(corpus.starts[shard + 1] - corpus.starts[shard]))
    return shard, int(ends[inside - 1]) if inside else 0, int(ends[inside])


def _empty_ones_first(corpus: Corpus, shard: int) -> int:
    """Return how many empty documents a shard begins with: they end at 0, and that is not looked at."""
    of = corpus.shard(shard)
    return of.num_documents - len(of.document_ends(0, of.num_tokens))


def _turns_with(
    course: Course, corpus: int, phase: int, turns: range, document: tuple[int, int, int]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield a corpus's own samples that hold some of a document: (turn, epoch, first token, past token)."""
    shard, start, stop = document
    way, base = course.way(corpus, phase, last=turns[-1]), int(course.corpus(corpus).starts[shard])
    for index, leg in enumerate(way.legs):
        first = way.firsts[index]
        inside = range(max(turns.start, first) - first, _past(leg, turns.stop - first))
        if not inside:
            continue
        ranges = leg.space.positions_of(base + start, base + stop)
        epochs = range(_epoch(leg, inside[0]), _epoch(leg, inside[-1]) + 1)
        for epoch in epochs:
            pools = {pool for low, high in ranges for pool in leg.order.blocks.pools_with(epoch, low, high)}
            for pool in sorted(filter(leg.holds, pools)):
                packed = course.pool(corpus, phase, (index, epoch, pool))
                for row, (first_token, past_token) in packed.rows_with(shard, start, stop):
                    turn = leg.sample_of(epoch, pool, row)
                    if turn in inside:
                        yield first + turn, epoch, first_token, past_token


def _past(leg: Leg, samples: int) -> int:
    return samples if leg.num_samples is None else min(samples, leg.num_samples)


def _epoch(leg: Leg, sample: int) -> int:
    return int(leg.locate(np.array([sample], dtype=np.int64)).epoch[0])


def _piece(corpus: Corpus, name: str, epoch: int, piece: list[int]) -> Piece:
    shard, start, stop, _ = piece
    if shard == PADDING:
        return Piece(corpus="", epoch=epoch, shard="", document=-1, offset=0, start=0, tokens=stop - start)
    ends = corpus.shard(shard).document_ends(0, start)
    offset = start - (int(ends[-1]) if len(ends) else 0)
    return Piece(
        corpus=name,
        epoch=epoch,
        shard=corpus.shard_name(shard),
        document=corpus.first_document(shard) + _empty_ones_first(corpus, shard) + len(ends),
        offset=offset,
        start=start,
        tokens=stop - start,
    )
