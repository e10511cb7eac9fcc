"""Steps to batches: the mixture, the order, the packing and the assignment, put together.

Everything a step holds is a function of (corpora, seed, step): `batch_at` may be called for any step
on any rank at any time. Iteration only counts steps, and the count is the state. The loader knows
ranks only as arguments of who computes what.
"""

import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import ConfigError, UsageError, nearest
from penstock.data.assign import check_divisible, share
from penstock.data.buffers import Buffers
from penstock.data.collate import FIELDS, collate
from penstock.data.corpus import Corpus
from penstock.data.holdout import Split, part_of
from penstock.data.mixture import Mixture, slots_of
from penstock.data.opening import open_corpus
from penstock.data.order import Places, choose_geometry
from penstock.data.packing import PACKERS
from penstock.data.prefetch import ahead
from penstock.data.source import Source
from penstock.data.state import Progress, State, decode, encode
from penstock.data.types import Batch, Int32, Int64


class Loader:
    """An iterable of batches that resumes exactly on any number of ranks.

    Each batch is a dict of this rank's share of one step: `sample_ids` [local_batch] int64 always,
    and the requested fields: `input_ids`, `labels`, `position_ids`, `document_ids`
    [local_batch, sequence_length] int64, `cu_seqlens` [documents + 1] int32 (see collate.py).

    Iteration goes on for ever, epoch after epoch, from wherever the state is; a new `iter()` continues,
    it does not start again. Closing an iterator, or dropping it, ends its threads.

    Args:
        corpora: name -> corpus folder. The names key the order and the state; the paths do not.
        weights: share of samples by name, need not sum to one; None: in proportion to tokens.
        sequence_length: tokens per row.
        global_batch_size: rows per step over all ranks; a multiple of `world_size`.
        rank: data-parallel rank of this process.
        world_size: number of data-parallel ranks.
        seed: keys every permutation.
        packing: rule that places documents into rows, a name in PACKERS.
        fields: which fields to build; each costs its memory traffic.
        epochs: name -> largest number of passes over that corpus; absent: no cap.
        split: "train", or "heldout" for the part that training never sees.
        holdout: share of each corpus that is held out for validation.
        num_workers: threads that prepare batches ahead; 0 for none. Changes nothing but speed.
        prefetch: batches prepared ahead.
        deliver: "torch" for CPU tensors, "pinned" for page-locked ones, "numpy" for arrays.

    Raises:
        CorpusError: a corpus is missing or damaged.
        ConfigError: an argument is out of range or names no corpus.
    """

    def __init__(
        self,
        corpora: Mapping[str, str | Path],
        *,
        weights: Mapping[str, float] | None = None,
        sequence_length: int,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        packing: str = "best_fit",
        fields: Sequence[str] = ("input_ids", "labels"),
        epochs: Mapping[str, int] | None = None,
        split: Split = "train",
        holdout: float = 0.0,
        num_workers: int = 1,
        prefetch: int = 2,
        deliver: str = "torch",
    ) -> None:
        sequence_length = _at_least(2, "sequence_length", sequence_length)
        global_batch_size = _at_least(1, "global_batch_size", global_batch_size)
        num_workers, prefetch = _at_least(0, "num_workers", num_workers), _at_least(0, "prefetch", prefetch)
        seed = _at_least(0, "seed", seed)
        _check_fields(fields)
        check_divisible(global_batch_size, world_size=world_size)
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be in [0, {world_size})", got=rank)
        self._sources = _open_sources(
            corpora, (split, holdout), length=sequence_length, seed=seed, rule=packing, epochs=epochs or {}
        )
        self._mixture = Mixture(slots_of(_weights(self._sources, weights)))
        self._identity = {
            "seed": seed,
            "L": sequence_length,
            "packing": packing,
            "split": [split, holdout],
            "mix": [[0, self._mixture.slots]],
            "corpora": {source.name: source.identity() for source in self._sources},
        }
        self._rank, self._world_size = rank, world_size
        self._length, self._fields = sequence_length, tuple(fields)
        self._num_workers, self._prefetch = num_workers, prefetch
        self._deliver = _delivery(deliver)
        self._progress = Progress(0, 0, [(0, global_batch_size)])
        self._loads = 0
        self._buffers = Buffers()

    @property
    def step(self) -> int:
        """Batches handed out so far: the step the next one belongs to."""
        return self._progress.step

    @property
    def corpora(self) -> dict[str, Corpus]:
        """The corpora by name."""
        return {source.name: source.space.corpus for source in self._sources}

    @property
    def num_samples(self) -> int | None:
        """Samples until the first capped corpus is used up, or None when none is capped."""
        ends = [
            self._mixture.sample_of(index, source.max_samples)
            for index, source in enumerate(self._sources)
            if source.max_samples is not None and self._mixture.slots[source.name]
        ]
        return min(ends, default=None)

    @property
    def samples_per_epoch(self) -> dict[str, int]:
        """Rows in one pass over each corpus, by name."""
        return {source.name: source.order.samples_per_epoch for source in self._sources}

    def samples_of(self, step: int) -> range:
        """Return the global samples of a step, past or to come."""
        first, size = self._progress.samples_at(step)
        return range(first, first + size)

    def batch_at(self, step: int) -> dict[str, Any]:  # Any: tensors or arrays, as `deliver` says
        """Return this rank's batch of any step, without moving the loader.

        Raises:
            CorpusExhausted: the step needs more epochs of a corpus than it may give.
            ConfigError: a past step's batch does not divide over this loader's ranks.
        """
        return self._deliver(self._read(step))

    def gather(self, samples: Int64) -> dict[str, Any]:
        """Return a batch of any global samples [n], in the order given, whole on this rank.

        Raises:
            CorpusExhausted: one of them needs more epochs of a corpus than it may give.
            UsageError: there are none, or one is negative.
        """
        if not len(samples) or samples.min() < 0:
            raise UsageError(
                "gather takes one sample or more, none of them negative", got=samples[:8].tolist()
            )
        corpus, turn = self._mixture.locate(samples)
        fields = self._collate(samples, corpus, self._locate(corpus, turn))
        return self._deliver(Batch(self.step, fields))

    def samples_by_corpus(self, samples: int) -> dict[str, int]:
        """Return how many of the first global samples came from each corpus, by name."""
        counts = self._mixture.counts(samples)
        return {source.name: count for source, count in zip(self._sources, counts, strict=True)}

    def __iter__(self) -> Generator[dict[str, Any]]:
        while True:
            loads, step = self._loads, self.step
            batches = ahead(self.batch_at, start=step, depth=self._prefetch, num_workers=self._num_workers)
            with closing(batches):
                # Until a state is loaded or another iterator moves: what was prepared is then out of date.
                while (loads, step) == (self._loads, self.step):
                    batch = next(batches)
                    step += 1
                    self._progress.step = step
                    self._progress.samples = self._progress.samples_at(step)[0]
                    yield batch

    def state_dict(self) -> State:
        """Return the state after the batches handed out so far: JSON values, equal on all ranks."""
        return encode(self._progress, self._identity)

    def load_state_dict(self, state: State) -> None:
        """Continue from a saved state, on this loader's ranks and with its batch size.

        Takes effect at once, also in the middle of an iteration.

        Raises:
            StateMismatch: the state was saved with other settings.
            CorpusChanged: a corpus is not the one the state was saved with.
        """
        size = self._progress.batch[-1][1]
        self._progress = decode(state, self._identity).with_batch_size(size)
        self._loads += 1

    def _read(self, step: int) -> Batch:
        if step < 0:
            raise UsageError("A step cannot be negative", got=step)
        first, size = self._progress.samples_at(step)
        check_divisible(size, world_size=self._world_size)  # a past step may have had another size
        samples = np.arange(first, first + size, dtype=np.int64)
        corpus, turn = self._mixture.locate(samples)
        places = self._locate(corpus, turn)
        mine = share(corpus, places.lane, rank=self._rank, world_size=self._world_size)
        return Batch(step, self._collate(samples[mine], corpus[mine], places.take(mine)))

    def _collate(self, samples: Int64, corpus: Int64, places: Places) -> dict[str, Int64 | Int32]:
        """Read rows, run by run of rows that come from one corpus."""
        parts = []
        for run in np.split(np.arange(len(corpus)), np.flatnonzero(np.diff(corpus)) + 1):
            source, at = self._sources[corpus[run[0]]], places.take(run)
            parts.append((source.space.corpus, source.rows(at.epoch, at.pool, at.row)))
        fields = collate(parts, length=self._length, fields=self._fields, buffers=self._buffers)
        return {"sample_ids": samples, **fields}

    def _locate(self, corpus: Int64, turn: Int64) -> Places:
        """Return the places of samples of several corpora, in the order given."""
        if len(self._sources) == 1:
            return self._sources[0].locate(turn)
        places = Places(*(np.empty_like(turn) for _ in range(4)))
        for index in np.unique(corpus).tolist():
            chosen = corpus == index
            found = self._sources[index].locate(turn[chosen])
            places.epoch[chosen], places.pool[chosen] = found.epoch, found.pool
            places.lane[chosen], places.row[chosen] = found.lane, found.row
        return places


def _at_least(least: int, name: str, value: int) -> int:
    """Return an integer of any kind as a plain one, which JSON can write."""
    try:
        whole = operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be a whole number", got=value) from None
    if whole < least:
        raise ConfigError(f"{name} must be at least {least}", got=whole)
    return whole


def _check_fields(fields: Sequence[str]) -> None:
    if isinstance(fields, str):
        raise ConfigError("fields must be a list of names", got=fields, fix=f"Write ({fields!r},).")
    for field in fields:
        if field not in FIELDS:
            raise ConfigError("The loader has no such field", got=field, fix=nearest(field, list(FIELDS)))


def _open_sources(
    corpora: Mapping[str, str | Path],
    part: tuple[Split, float],
    *,
    length: int,
    seed: int,
    rule: str,
    epochs: Mapping[str, int],
) -> list[Source]:
    if not isinstance(corpora, Mapping):
        raise ConfigError(
            "corpora must map names to folders", got=corpora, fix="Write {'web': 'path/to/corpus'}."
        )
    if not corpora:
        raise ConfigError("The loader needs at least one corpus", fix="Name one: {'web': 'path/to/corpus'}.")
    PACKERS[rule]  # an unknown rule is refused here, not at the first batch
    for name, cap in epochs.items():
        if name not in corpora:
            raise ConfigError("epochs names no corpus", got=name, fix=nearest(name, list(corpora)))
        if cap < 1:
            raise ConfigError(f"epochs of corpus {name!r} must be at least 1", got=cap)
    sources = []
    for name, path in corpora.items():
        space = part_of(open_corpus(path), name=name, split=part[0], holdout=part[1])
        geometry = choose_geometry(space.num_tokens, sequence_length=length)
        sources.append(Source(name, space, geometry, seed=seed, rule=rule, max_epochs=epochs.get(name)))
    return sources


def _weights(sources: Sequence[Source], weights: Mapping[str, float] | None) -> dict[str, float]:
    names = [source.name for source in sources]
    if weights is None:
        return {source.name: source.space.num_tokens for source in sources}
    for name in weights:
        if name not in names:
            raise ConfigError("weights names no corpus", got=name, fix=nearest(name, names))
    for name in names:
        if name not in weights:
            raise ConfigError(f"Corpus {name!r} has no weight", fix="Give it one; 0 leaves it out.")
    return {name: weights[name] for name in names}


def _delivery(deliver: str) -> Callable[[Batch], dict[str, Any]]:
    if deliver == "numpy":
        return lambda batch: batch.fields
    if deliver not in ("torch", "pinned"):
        raise ConfigError("deliver has no such choice", got=deliver, fix="Known: numpy, pinned, torch.")
    from penstock.data.torch_feed import to_tensors

    return partial(to_tensors, pin_memory=deliver == "pinned")
