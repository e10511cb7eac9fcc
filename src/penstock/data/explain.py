"""Explain the order: documents of a sample, samples of a document, tokens per corpus."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.core.arrays import Int64
from penstock.core.errors import ConfigError, UsageError, nearest
from penstock.data.corpus.corpus import Corpus
from penstock.data.order.epochs import EpochEntry
from penstock.data.sample_index import SampleIndex
from penstock.data.types import PADDING, Waste


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentSpan:
    """Consecutive tokens of one document inside a row."""

    corpus: str
    """Name of the corpus; empty for padding."""
    epoch: int
    """Epoch of the corpus, counted from 0."""
    shard: str
    """File of the shard."""
    document: int
    """Number of the document in the corpus; -1 for padding."""
    offset: int
    """First token, counted from the start of the document."""
    start: int
    """First token, counted from the start of the shard."""
    tokens: int
    """Number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Row that trains on a document."""

    step: int
    row: int
    """Index among the rows of the step, as in `Loader.samples_of`."""
    sample: int
    """Sample id."""
    epoch: int
    offset: int
    """First token of the row's part of the document, counted from the document's start."""
    tokens: int


def explain(sample_index: SampleIndex, samples: Int64) -> list[list[DocumentSpan]]:
    """Return the document spans of each sample, in training order."""
    phases = np.array([sample_index.phase_of(sample) for sample in samples.tolist()], dtype=np.int64)
    rows: list[list[DocumentSpan]] = [[]] * len(samples)
    for phase in np.unique(phases).tolist():
        chosen = np.flatnonzero(phases == phase)
        for index, row in zip(chosen.tolist(), _explained(sample_index, samples[chosen]), strict=True):
            rows[index] = row
    return rows


def _explained(sample_index: SampleIndex, samples: Int64) -> list[list[DocumentSpan]]:
    """Return the document spans of samples of one sequence length."""
    located = sample_index.locate(samples)
    entries, addresses = sample_index.addresses(located)
    at = np.stack((entries, addresses.epoch, addresses.pool, addresses.row), axis=1)
    rows = []
    for index, corpus in enumerate(located.corpus.tolist()):
        source, (table,) = sample_index.rows(corpus, located.phase, at[index : index + 1])
        epoch = int(addresses.epoch[index])
        rows.append([_piece(source.corpus, source.name, epoch, piece) for piece in table.tolist()])
    return rows


def find(sample_index: SampleIndex, name: str, document: int, *, steps: range) -> list[Use]:
    """Return the rows of some steps that train on a document, in step order.

    Raises:
        ConfigError: the run has no such corpus.
        UsageError: the corpus has no such document, or the steps are not a contiguous range.
    """
    if name not in sample_index.names:
        raise ConfigError("The run has no such corpus", got=name, fix=nearest(name, sample_index.names))
    index = sample_index.names.index(name)
    if steps.step != 1:
        raise UsageError("steps must be a contiguous range", got=steps)
    shard, start, stop = _document(sample_index.corpus(index), document)
    if start == stop:
        return []
    uses = []
    for phase, turns in enumerate(sample_index.taken(index, steps)):
        if turns:
            for turn, epoch, first, past in _turns_with(
                sample_index, index, phase, turns, (shard, start, stop)
            ):
                sample = sample_index.sample_of(index, phase, turn)
                step = None if sample is None else sample_index.change_log.step_of(sample)
                if sample is not None and step is not None:
                    row = int(np.flatnonzero(sample_index.change_log.samples_of(step) == sample)[0])
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
    """Return the number of empty documents at the start of a shard: `document_ends` does not list them."""
    of = corpus.shard(shard)
    return of.num_documents - len(of.document_ends(0, of.num_tokens))


def _turns_with(
    sample_index: SampleIndex, corpus: int, phase: int, turns: range, document: tuple[int, int, int]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (turn, epoch, first token, past token) of own samples that contain part of a document."""
    shard, start, stop = document
    epochs, base = (
        sample_index.epochs(corpus, phase, last=turns[-1]),
        int(sample_index.corpus(corpus).starts[shard]),
    )
    for index, entry in enumerate(epochs.entries):
        first = epochs.firsts[index]
        inside = range(max(turns.start, first) - first, _past(entry, turns.stop - first))
        if not inside:
            continue
        ranges = entry.space.positions_of(base + start, base + stop)
        epoch_range = range(_epoch(entry, inside[0]), _epoch(entry, inside[-1]) + 1)
        for epoch in epoch_range:
            pools = {pool for low, high in ranges for pool in entry.order.blocks.pools_with(epoch, low, high)}
            for pool in sorted(filter(entry.holds, pools)):
                packed = sample_index.pool(corpus, phase, (index, epoch, pool))
                for row, (first_token, past_token) in packed.rows_with(shard, start, stop):
                    turn = entry.sample_of(epoch, pool, row)
                    if turn in inside:
                        yield first + turn, epoch, first_token, past_token


def _past(entry: EpochEntry, samples: int) -> int:
    return samples if entry.num_samples is None else min(samples, entry.num_samples)


def _epoch(entry: EpochEntry, sample: int) -> int:
    return int(entry.locate(np.array([sample], dtype=np.int64)).epoch[0])


def _piece(corpus: Corpus, name: str, epoch: int, piece: list[int]) -> DocumentSpan:
    shard, start, stop, _ = piece
    if shard == PADDING:
        return DocumentSpan(
            corpus="", epoch=epoch, shard="", document=-1, offset=0, start=0, tokens=stop - start
        )
    ends = corpus.shard(shard).document_ends(0, start)
    offset = start - (int(ends[-1]) if len(ends) else 0)
    return DocumentSpan(
        corpus=name,
        epoch=epoch,
        shard=corpus.shard_name(shard),
        document=corpus.first_document(shard) + _empty_ones_first(corpus, shard) + len(ends),
        offset=offset,
        start=start,
        tokens=stop - start,
    )


def samples_by_corpus(sample_index: SampleIndex, step: int) -> dict[str, int]:
    """Return the number of samples taken from each corpus by the steps before `step`."""
    first = sample_index.change_log.first_sample(step)
    counts = Counter(sample_index.counts(first))
    for skip in sample_index.change_log.skips:
        if skip.start < first:
            counts.subtract(sample_index.counts(min(first, skip.stop)))
            counts.update(sample_index.counts(skip.start))
    return {name: counts[name] for name in sample_index.names}


def tokens_by_corpus(sample_index: SampleIndex, step: int) -> dict[str, int]:
    """Return the number of tokens, padding included, taken from each corpus by the steps before `step`."""
    lengths = [entry for entry in sample_index.change_log.lengths if entry[0] < step]
    edges = [*(start for start, _ in lengths), step]
    counts = [samples_by_corpus(sample_index, edge) for edge in edges]
    tokens = Counter[str]()
    for (_, length), early, late in zip(lengths, counts, counts[1:], strict=False):
        tokens.update({name: (late[name] - early[name]) * length for name in late})
    return {name: tokens[name] for name in sample_index.names}


def waste_by_corpus(sample_index: SampleIndex, step: int) -> dict[str, Waste]:
    """Return the waste of the steps before `step`, for each open corpus."""
    first = sample_index.change_log.first_sample(step)
    wasted = sample_index.waste(first)
    for skip in sample_index.change_log.skips:
        if skip.start < first:
            start, stop = sample_index.waste(skip.start), sample_index.waste(min(first, skip.stop))
            wasted = {name: of - (stop[name] - start[name]) for name, of in wasted.items()}
    return wasted


@dataclass(frozen=True, slots=True, kw_only=True)
class RepackedRows:
    """Rows packed again for one corpus after a sequence-length change."""

    rows: int
    """Rows of the new length packed from the rest of the open pools."""
    tokens: int
    """Tokens in them."""
    padding: int
    """Positions in them that hold no token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthChange:
    """Change of the sequence length; pools that no row was served from before it are not counted."""

    step: int
    """First step of the new length."""
    before: int
    """Tokens per row before the change."""
    after: int
    """Tokens per row from `step` on."""
    corpora: dict[str, RepackedRows]
    """Repacked rows by corpus name, for corpora with an epoch in progress."""


def length_changes(sample_index: SampleIndex, step: int) -> list[LengthChange]:
    """Return the sequence-length changes up to a step, with the rows that each packed again."""
    lengths = sample_index.change_log.lengths
    changes = []
    for phase, (start, after) in enumerate(lengths):
        if phase and start <= step:
            corpora = {
                name: RepackedRows(rows=rows, tokens=rows * after - padding, padding=padding)
                for name, (rows, padding) in sample_index.repacked(phase).items()
            }
            before = lengths[phase - 1][1]
            changes.append(LengthChange(step=start, before=before, after=after, corpora=corpora))
    return changes
